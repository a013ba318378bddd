"""The official `openai` client against the server: whole and streamed answers, every field, errors; over 40 calls."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_async_llm import ANSWER, FakeAsyncLLM, running_server
from tiny_model import TOKENIZER

from specinfer_jax.serving.async_protocol import QueueFullError, RequestTimeoutError
from specinfer_jax.serving.openai.settings import ServerSettings

openai = pytest.importorskip("openai")

HI: Any = [{"role": "user", "content": "hi"}]
IDS = TOKENIZER.encode(ANSWER)
ENGINE = FakeAsyncLLM()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(ENGINE, ServerSettings(api_keys=("first", "second"))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="second", max_retries=0) as client:
        yield client


CHAT_CALLS: list[dict[str, Any]] = [
    {}, {"max_tokens": 4}, {"max_completion_tokens": 4}, {"n": 2}, {"stop": "forty"}, {"stop": ["forty", "ever"]},
    {"stop": None}, {"stop": []}, {"seed": 7}, {"temperature": 0}, {"top_p": 0.5}, {"frequency_penalty": 1.0},
    {"presence_penalty": -1.0}, {"logit_bias": {"5": -100}}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3},
    {"user": "u", "metadata": {"k": "v"}, "store": False}, {"response_format": {"type": "text"}},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True}},
    {"extra_body": {"speculation": {"enabled": False}, "priority": 1}},
]  # fmt: skip


@pytest.mark.parametrize("fields", CHAT_CALLS, ids=str)
def test_chat_whole_and_streamed(client: Any, fields: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model="fake", messages=HI, **fields)
    stream = client.chat.completions.create(
        model="fake", messages=HI, stream=True, stream_options={"include_usage": True}, **fields
    )
    chunks = list(stream)
    *rest, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert len(whole.choices) == fields.get("n", 1)
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in rest if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        tokens = [entry for part in own if part.logprobs for entry in part.logprobs.content]
        assert tokens == (choice.logprobs.content if choice.logprobs else [])
        assert len(tokens) == (whole.usage.completion_tokens if fields.get("logprobs") else 0)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == len(whole.choices) and details.rejected_prediction_tokens == 0
    assert whole.usage.tokens_per_step == 2.0, "our own field"


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"max_tokens": 3}, {"n": 2}, {"stop": "forty", "max_tokens": 99}, {"echo": True}, {"logprobs": 2},
        {"prompt": ["a", "b"]}, {"prompt": [5, 6]}, {"prompt": [[5], [6]]}, {"suffix": None, "best_of": 1},
    ],
    ids=str,
)  # fmt: skip
def test_completions_whole_and_streamed(client: Any, fields: dict[str, Any]) -> None:
    fields = {"prompt": "one"} | fields
    whole = client.completions.create(model="fake", **fields)
    texts = ["" for _ in whole.choices]
    for chunk in client.completions.create(model="fake", stream=True, **fields):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert all(choice.finish_reason in ("stop", "length") for choice in whole.choices)


def test_the_stream_helper_of_the_client(client: Any) -> None:
    with client.chat.completions.stream(model="fake", messages=HI, stop=" as ever") as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER[: ANSWER.find(" as ever")]


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "specinfer_jax"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_errors(client: Any) -> None:
    def chat(**fields: Any) -> Any:
        return client.chat.completions.create(**({"model": "fake", "messages": HI} | fields))

    bad: list[dict[str, Any]] = [
        {"messages": []}, {"n": 0}, {"temperature": -1}, {"top_logprobs": 1}, {"extra_body": {"nonsense": 1}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"logit_bias": {"x": 1}},
    ]  # fmt: skip
    for fields in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(**fields)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.param == next(iter(fields.get("extra_body", fields))).replace("logit_bias", "logit_bias.x")
        with pytest.raises(openai.BadRequestError):
            chat(stream=True, **fields)
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="gpt-4")
    assert missing.value.code == "model_not_found"


def test_a_wrong_key(url: str) -> None:
    for key in ("wrong", "firs", "first2", "first second"):
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError) as caught:
                other.models.list()
            assert caught.value.code == "invalid_api_key"


def test_a_full_queue_is_tried_again(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="first", max_retries=1) as patient:
        ENGINE.raises = QueueFullError(retry_after=0.01)
        asked = len(ENGINE.asked)
        try:
            with pytest.raises(openai.RateLimitError) as caught:
                patient.chat.completions.create(model="fake", messages=HI)
        finally:
            ENGINE.raises = None
        assert caught.value.response.headers["retry-after"] == "1"
        assert len(ENGINE.asked) == asked + 2


def test_faults_of_the_engine(client: Any) -> None:
    ENGINE.raises = RequestTimeoutError()
    try:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="fake", prompt="x")
        assert caught.value.status_code == 408
    finally:
        ENGINE.raises = None
    ENGINE.fails_behind = 2
    try:
        with pytest.raises(openai.APIError, match="A fault ended this request"):
            list(client.completions.create(model="fake", prompt="x", stream=True))
    finally:
        ENGINE.fails_behind = None


def test_leaving_a_stream_gives_it_up(client: Any) -> None:  # case B073
    ENGINE.delay = 0.02
    try:
        cancelled = ENGINE.cancelled
        stream = client.chat.completions.create(model="fake", messages=HI, stream=True)
        next(iter(stream))
        stream.close()
        assert ENGINE.settles() and ENGINE.cancelled == cancelled + 1
    finally:
        ENGINE.delay = 0.0
