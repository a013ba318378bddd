"""Requests to the OpenAI-compatible endpoints, field by field, on an engine without a model."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_async_llm import ANSWER, CHAT, HI, TEXT, Client, as_made, error_of, serving_client
from tiny_model import TOKENIZER

from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import RequestSpeculation

IDS = TOKENIZER.encode(ANSWER)


@pytest.fixture(scope="module")
def served() -> Iterator[Client]:
    with serving_client() as client:
        yield client


@pytest.fixture
def client(served: Client) -> Iterator[Client]:
    with as_made(served):
        yield served


PASSED_ON = {
    "n": 3, "frequency_penalty": 0.5, "presence_penalty": -1, "temperature": 0.7, "top_p": 0.9, "top_k": 7,
    "min_p": 0.1, "repetition_penalty": 1.1, "seed": 2**64 - 1, "min_tokens": 2, "ignore_eos": True,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "prompt_logprobs": 3,
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("field", PASSED_ON)
def test_a_field_reaches_the_engine(client: Client, path: str, field: str) -> None:
    start = {"messages": HI} if path == CHAT else {"prompt": "one"}
    default = getattr(SamplingParams(), field)
    assert client.http.post(path, json=start | {field: None}).status_code == 200
    assert getattr(client.asked(), field) == default
    assert client.http.post(path, json=start | {field: PASSED_ON[field]}).status_code == 200
    assert getattr(client.asked(), field) == PASSED_ON[field] != default


def test_lists_and_maps_reach_the_engine(client: Client) -> None:
    client.chat(
        stop_token_ids=[5, 6], bad_words=["damn"], allowed_token_ids=[1, 2], logit_bias={"7": 1.5, "3": -100}, top_k=-1
    )  # fmt: skip
    params = client.asked()
    assert (params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ((5, 6), ("damn",), (1, 2))
    assert params.logit_bias == ((3, -100.0), (7, 1.5)) and params.top_k == 0


@pytest.mark.parametrize(("seed", "bits"), [(-1, 2**64 - 1), (2**64 + 3, 3), (10**30, 10**30 % 2**64)])
def test_seeds_have_64_bits(client: Client, seed: int, bits: int) -> None:
    assert client.chat(seed=seed).status_code == 200 and client.asked().seed == bits


def test_whole_numbers_may_be_written_as_floats(client: Client) -> None:
    assert client.complete([5.0, 6], max_tokens=2.0).status_code == 200
    assert client.engine.asked[-1].prompt_ids == [5, 6] and client.asked().max_tokens == 2


def test_limits_of_a_chat(client: Client) -> None:
    client.chat()
    assert client.asked().max_tokens is None
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert client.chat(**fields).json()["usage"]["completion_tokens"] == 3
    error = error_of(client.chat(max_tokens=3, max_completion_tokens=4))
    assert error["param"] == "max_tokens"


def test_the_answer_ends_where_the_context_does(client: Client) -> None:
    ids = [5] * (client.engine.max_model_len - 3)
    body = client.complete(ids, max_tokens=10**12).json()
    assert body["usage"]["completion_tokens"] == 3 and body["choices"][0]["finish_reason"] == "length"
    error = error_of(client.complete([*ids, 5, 5, 5]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize("stop", ["forty", ["forty"], ["zzz", "forty"], ["forty", "a", "b", "c"]])
def test_stop_ends_the_text(client: Client, stop: Any) -> None:  # case B077
    expected = ANSWER[: min(ANSWER.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in ANSWER)]
    (choice,) = client.chat(stop=stop).json()["choices"]
    assert choice["message"]["content"] == expected and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] in stop
    streamed = client.events(stop=stop)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in streamed) == expected


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(client: Client, stop: Any) -> None:  # case B077
    assert client.chat(stop=stop).json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("stop", [[""], "", ["a"] * 5, 5, [5], {"a": 1}, True])
def test_stop_of_another_kind(client: Client, stop: Any) -> None:  # case B077
    error = error_of(response := client.chat(stop=stop))
    assert response.status_code == 400 and error["param"].startswith("stop") and error["message"]


def test_special_text_and_stop_text_on_request(client: Client) -> None:
    client.engine.script = lambda request: [*TOKENIZER.encode("so"), 1, *TOKENIZER.encode("end here")]
    assert client.chat().json()["choices"][0]["message"]["content"] == "soend here"
    body = client.chat(skip_special_tokens=False, stop="end", include_stop_str_in_output=True).json()
    assert body["choices"][0]["message"]["content"] == "so<|im_start|>end"


def test_speculation_priority_and_time_reach_the_engine(client: Client) -> None:
    client.chat(speculation={"enabled": False, "max_nodes": 3, "ssms": ["a"], "tree": "1,1"}, priority=-5, timeout=2)
    asked = client.engine.asked[-1]
    assert asked.speculation == RequestSpeculation(False, 3, ("a",), "1,1")
    assert (asked.priority, asked.timeout) == (-5, 2.0)
    client.chat(speculation={}, timeout=10_000)
    asked = client.engine.asked[-1]
    assert asked.speculation == RequestSpeculation()
    assert (asked.priority, asked.timeout) == (0, 600.0), "the server's own limit is the longest"
    client.chat()
    assert client.engine.asked[-1].speculation is None


def test_fields_that_change_nothing(client: Client) -> None:
    fields = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "use_beam_search": False, "best_of": None, "logprobs": False, "stream": False, "chat_template_kwargs": {},
    }  # fmt: skip
    fields.pop("best_of")
    assert client.chat(**fields).status_code == 200
    assert client.complete(best_of=2, n=2, suffix="").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_token": 5}, "max_token", "unknown_parameter"),
        ({"speculation": {"nodes": 5}}, "speculation.nodes", "unknown_parameter"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "unsupported_parameter"),
        ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"n": 0}, "n", "number_below_min_value"),
        ({"n": 129}, "n", "number_above_max_value"),
        ({"n": 2, "temperature": 0}, "n", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "number_below_min_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 1.1}, "top_p", "number_above_max_value"),
        ({"max_tokens": 0}, "max_tokens", "number_below_min_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "number_above_max_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "invalid_format"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "number_above_max_value"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", None),
        ({"model": "gpt-4"}, "model", "model_not_found"),
        ({"repetition_penalty": 1.23}, "repetition_penalty", "invalid_value"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(client: Client, fields: dict, param: str, code: str | None) -> None:
    error = error_of(response := client.chat(**fields))
    assert response.status_code == (404 if code == "model_not_found" else 400)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_rules_of_completions(client: Client) -> None:
    for fields, param in (
        ({"best_of": 2}, "best_of"), ({"suffix": "x"}, "suffix"), ({"logprobs": 21}, "logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1}, "stream"), ({"messages": HI}, "messages"),
    ):  # fmt: skip
        error = error_of(response := client.complete(**fields))
        assert response.status_code == 400 and error["param"] == param
