"""Messages, bodies and addresses that are odd or wrong, and faults of the engine, in OpenAI's shape."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_async_llm import ANSWER, CHAT, HI, Client, as_made, error_of, serving_client
from tiny_model import TOKENIZER

from specinfer_jax.serving.async_protocol import (
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    RequestTimeoutError,
)

IDS = TOKENIZER.encode(ANSWER)


@pytest.fixture(scope="module")
def served() -> Iterator[Client]:
    with serving_client() as client:
        yield client


@pytest.fixture
def client(served: Client) -> Iterator[Client]:
    with as_made(served):
        yield served


# --- messages


def test_content_null_missing_empty_and_in_parts(client: Client) -> None:  # case B079
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system"}, {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}]},
    ]  # fmt: skip
    assert client.chat(messages).status_code == 200
    plain = [("system", ""), ("user", ""), ("assistant", ""), ("tool", "4"), ("user", "a\nb")]
    rendered = TOKENIZER.encode_chat([{"role": role, "content": content} for role, content in plain])
    assert client.engine.asked[-1].prompt_ids == rendered
    assert client.engine.messages[-1][2]["tool_calls"] == [call], "templates get all of a message"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"), (None, "messages"), ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"), ([*HI, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"), (["hi"], "messages[0]"),
    ],
    ids=str,
)  # fmt: skip
def test_messages_of_another_kind(client: Client, messages: Any, param: str) -> None:  # case B079
    error = error_of(response := client.chat(messages))
    assert response.status_code == 400 and error["param"] == param


def test_generation_prompt(client: Client) -> None:
    client.chat(add_generation_prompt=False)
    assert client.engine.asked[-1].prompt_ids == TOKENIZER.encode_chat(HI, add_generation_prompt=False)


# --- what goes wrong in the engine


FAULTS = [
    (QueueFullError(retry_after=2.5), 429, "rate_limit_error", "queue_full"),
    (RequestTimeoutError(), 408, "timeout_error", "timeout"),
    (RequestCancelledError(), 503, "server_error", "cancelled"),
    (RequestFailedError("secret path"), 500, "server_error", "request_failed"),
    (EngineDeadError("secret path"), 503, "server_error", "engine_dead"),
    (KeyError("secret path"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "status", "kind", "code"), FAULTS, ids=lambda value: str(value))
def test_faults_before_the_first_piece(
    client: Client, fault: Exception, status: int, kind: str, code: str, stream: bool
) -> None:
    client.engine.raises = fault
    error = error_of(response := client.chat(stream=stream))
    assert (response.status_code, error["type"], error["code"]) == (status, kind, code)
    assert "secret" not in response.text
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


def test_faults_in_the_midst_of_a_stream(client: Client) -> None:
    client.engine.fails_behind = 2
    events = client.events()
    assert events[-1]["error"]["code"] == "request_failed"
    assert error_of(response := client.chat())["code"] == "request_failed" and response.status_code == 500
    assert error_of(client.complete(["a", "b"]))["code"] == "request_failed"
    client.engine.fails_behind = None
    client.engine.no_token_left = True
    error = error_of(response := client.chat())
    assert response.status_code == 500 and error["message"] == "the device is on fire"
    assert error_of(response := client.chat(allowed_token_ids=[5]))["code"] == "no_token_left"
    assert response.status_code == 400, "the request itself bans tokens"


def test_an_engine_that_ends_without_a_last_piece(client: Client) -> None:
    client.engine.forgets = True
    try:
        assert error_of(client.chat())["code"] == "request_failed"
        assert client.events()[-1]["error"]["code"] == "request_failed"
        client.engine.size = 1000
        response = client.chat(stream=True)
        assert response.status_code == 500 and error_of(response)["code"] == "request_failed"
    finally:
        client.engine.forgets = False


def test_one_prompt_of_several_that_is_refused_ends_all(client: Client) -> None:
    client.engine.delay, client.engine.capacity = 0.01, 3
    response = client.complete(["a", "b", "c", "d"])
    assert response.status_code == 429 and client.engine.settles()
    assert client.complete(["a", "b", "c"]).status_code == 200


def test_a_queue_that_is_full_has_room_again(client: Client) -> None:
    client.engine.capacity = 0
    assert client.chat().status_code == 429
    client.engine.capacity = 1
    assert client.chat().status_code == 200


# --- other bodies and addresses


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"", 400, "invalid_type"), (b"{", 400, "invalid_json"), (b"[]", 400, "invalid_type"),
        (b'"x"', 400, "invalid_type"), (b"null", 400, "invalid_type"), (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, "invalid_body"), (b'{"messages": ' + b"9" * 5000 + b"}", 400, "invalid_body"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
        (b'{"\\ud800": 1, "messages": [{"role": "user"}]}', 400, "invalid_type"),
        (b'{"temperature": NaN, "messages": [{"role": "user"}]}', 400, None),
        (b'{"temperature": 1e999, "messages": [{"role": "user"}]}', 400, None),
        (b'{"model": "\\u0000\\u202e", "messages": [{"role": "user"}]}', 404, "model_not_found"),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_bodies_that_are_no_request(client: Client, content: bytes, status: int, code: str | None) -> None:
    response = client.http.post(CHAT, content=content, headers={"content-type": "application/json"})
    error = error_of(response)
    assert response.status_code == status, response.text
    assert code is None or error["code"] == code


def test_addresses_and_methods(client: Client) -> None:
    assert error_of(client.http.get("/nothing"))["code"] == "unknown_url"
    response = client.http.get(CHAT)
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"
    response = client.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})
    assert response.status_code == 415 and error_of(response)["code"] == "unsupported_media_type"


def test_models(client: Client) -> None:
    (card,) = client.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", client.engine.max_model_len)
    assert client.http.get("/v1/models/fake").json() == card
    assert client.http.get("/v1/models/a/b").status_code == 404
    assert client.chat(model="fake").json()["model"] == "fake"
