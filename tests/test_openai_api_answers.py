"""Answers of the OpenAI-compatible endpoints: whole, streamed, with log-probabilities."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_async_llm import ANSWER, CHAT, HI, TEXT, VOCAB_SIZE, Client, as_made, error_of, serving_client
from tiny_model import TOKENIZER

IDS = TOKENIZER.encode(ANSWER)


@pytest.fixture(scope="module")
def served() -> Iterator[Client]:
    with serving_client() as client:
        yield client


@pytest.fixture
def client(served: Client) -> Iterator[Client]:
    with as_made(served):
        yield served


# --- whole answers


def test_chat_whole(client: Client) -> None:
    body = client.chat().json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion" and body["model"] == "fake" and body["system_fingerprint"]
    (choice,) = body["choices"]
    assert choice == {
        "index": 0, "message": {"role": "assistant", "content": ANSWER, "refusal": None}, "logprobs": None,
        "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    prompt = client.engine.asked[-1].prompt_ids
    assert prompt == TOKENIZER.encode_chat(HI)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(IDS))
    assert usage["total_tokens"] == len(prompt) + len(IDS)
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 1, "rejected_prediction_tokens": 0, "reasoning_tokens": 0, "audio_tokens": 0,
    }  # fmt: skip
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2, "audio_tokens": 0}
    assert usage["tokens_per_step"] == 2.0


def test_completion_whole_and_its_default_limit(client: Client) -> None:
    body = client.complete().json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    (choice,) = body["choices"]
    assert choice["text"] == TOKENIZER.decode(IDS[:16]) and choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("one", ["one"]), (["one", "two"], ["one", "two"]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_prompts_of_every_kind(client: Client, prompt: Any, expected: list) -> None:
    del client.engine.asked[:]
    body = client.complete(prompt, n=2, max_tokens=2).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
    ids = [TOKENIZER.encode(one) if isinstance(one, str) else one for one in expected]
    assert [asked.prompt_ids for asked in client.engine.asked] == ids
    assert len({asked.request_id for asked in client.engine.asked}) == len(ids)
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * len(ids), "once a prompt, whatever n is"
    assert body["usage"]["completion_tokens"] == 2 * 2 * len(ids)


@pytest.mark.parametrize("prompt", ["", [], [""], ["one", ""], [[]], [[1], []], None, 5, [1, "a"], [1.5], [-1], True])
def test_empty_and_odd_prompts(client: Client, prompt: Any) -> None:  # case B052
    error = error_of(response := client.complete(prompt))
    assert response.status_code == 400 and error["param"].startswith("prompt")


def test_ids_outside_the_vocabulary(client: Client) -> None:
    for fields in ({"prompt": [VOCAB_SIZE]}, {"logit_bias": {str(VOCAB_SIZE): 1}}, {"allowed_token_ids": [VOCAB_SIZE]}):
        error = error_of(response := client.complete(**fields))
        assert response.status_code == 400 and error["param"] == next(iter(fields))


def test_no_tokens_wanted(client: Client) -> None:  # case B052
    (choice,) = client.complete(max_tokens=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    body = client.complete("one two", max_tokens=0, echo=True, logprobs=1).json()
    assert body["choices"][0]["text"] == "one two" and body["usage"]["completion_tokens"] == 0
    columns = body["choices"][0]["logprobs"]
    assert len(columns["tokens"]) == len(TOKENIZER.encode("one two")) and columns["token_logprobs"][0] is None
    assert "".join(event["choices"][0]["text"] for event in client.events(TEXT, max_tokens=0, echo=True)) == "one"


def test_end_token_as_the_very_first(client: Client) -> None:  # case B052
    body = client.chat(stop_token_ids=[IDS[0]]).json()
    assert body["choices"][0]["message"]["content"] == "" and body["usage"]["completion_tokens"] == 1
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", IDS[0])


# --- streams


def test_chat_stream(client: Client) -> None:  # cases B075, B094
    events = client.events(n=3)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert not any("usage" in event for event in events)
    for index in range(3):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == ANSWER
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1]["delta"] == {}


def test_completion_stream(client: Client) -> None:
    events = client.events(TEXT, prompt=["a", "b"], n=2, max_tokens=8)
    for index in range(4):
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == TOKENIZER.decode(IDS[:8])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["length"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_stream_with_usage(client: Client, path: str) -> None:  # case B075
    events = client.events(path, stream_options={"include_usage": True}, max_tokens=6)
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6
    start = {"messages": HI} if path == CHAT else {"prompt": "one"}
    assert events[-1]["usage"] == client.http.post(path, json=start | {"max_tokens": 6}).json()["usage"]
    running = client.events(path, stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=6)
    counts = [event["usage"]["completion_tokens"] for event in running]
    assert counts == sorted(counts) and counts[-1] == 6


def test_half_characters_wait(client: Client) -> None:
    client.engine.script = lambda request: TOKENIZER.encode("a🙂b")
    client.engine.size = 1
    pieces = [event["choices"][0]["delta"].get("content", "") for event in client.events()]
    assert "".join(pieces) == "a🙂b" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


# --- log-probabilities


@pytest.mark.parametrize("top", [None, 0, 1, 5])
def test_logprobs_of_a_chat(client: Client, top: int | None) -> None:  # case B076
    fields = {"logprobs": True, "max_tokens": 7} | ({} if top is None else {"top_logprobs": top})
    whole = client.chat(**fields).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry for event in client.events(**fields)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]  # fmt: skip
    assert whole == streamed
    assert len(whole) == 7, "one for each token"
    assert "".join(bytes(entry["bytes"]).decode() for entry in whole) == TOKENIZER.decode(IDS[:7])
    assert [entry["logprob"] for entry in whole] == [-(i + 1) / 2 for i in IDS[:7]]
    for entry in whole:
        assert [other["logprob"] for other in entry["top_logprobs"]] == [-0.5, -1.0, -1.5, -2.0, -2.5][: top or 0]


def test_logprobs_of_parts_of_characters(client: Client) -> None:
    ids = TOKENIZER.encode("🙂")
    assert len(ids) > 1
    client.engine.script = lambda request: ids
    content = client.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "🙂"
    assert content[0]["token"].startswith("\\x")
    tokens = client.complete(logprobs=0).json()["choices"][0]["logprobs"]["tokens"]
    assert tokens[0].startswith("bytes:\\x")
    named = client.complete(logprobs=0, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["tokens"]
    assert named == [f"token_id:{i}" for i in ids]


def test_logprobs_of_a_completion(client: Client) -> None:  # case B076
    columns = client.complete(logprobs=2, max_tokens=5).json()["choices"][0]["logprobs"]
    names = [TOKENIZER.decode([i]) for i in IDS[:5]]
    assert columns["tokens"] == names
    assert columns["text_offset"] == [len("".join(names[:i])) for i in range(5)]
    assert columns["token_logprobs"] == [-(i + 1) / 2 for i in IDS[:5]]
    assert [len(top) for top in columns["top_logprobs"]] == [3] * 5, "two and the token itself"
    events = [event["choices"][0]["logprobs"] for event in client.events(TEXT, logprobs=2, max_tokens=5)]
    streamed = {key: [x for event in events if event for x in event[key]] for key in columns}
    assert streamed == columns


def test_echo(client: Client) -> None:
    assert client.complete("one two", echo=True, max_tokens=2).json()["choices"][0]["text"].startswith("one two")
    columns = client.complete("one two", echo=True, logprobs=1, max_tokens=2).json()["choices"][0]["logprobs"]
    ids = [*TOKENIZER.encode("one two"), *IDS[:2]]
    assert columns["tokens"] == [TOKENIZER.decode([i]) for i in ids]
    assert columns["token_logprobs"] == [None, *(-(i + 1) / 2 for i in ids[1:])]
    texts = client.complete([[5], [6]], echo=True, max_tokens=1).json()["choices"]
    assert [choice["text"] for choice in texts] == [TOKENIZER.decode([i, IDS[0]]) for i in (5, 6)]


def test_prompt_logprobs_and_ids(client: Client) -> None:
    body = client.chat(prompt_logprobs=1, return_token_ids=True, max_tokens=3).json()
    prompt = TOKENIZER.encode_chat(HI)
    assert body["prompt_token_ids"] == prompt and body["choices"][0]["token_ids"] == IDS[:3]
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(prompt)
    assert body["prompt_logprobs"][1][str(prompt[1])]["logprob"] == -(prompt[1] + 1) / 2
    choice = client.complete([5, 6], prompt_logprobs=0, return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6] and list(choice["prompt_logprobs"][1]) == ["6"]
    events = client.events(return_token_ids=True, max_tokens=4)
    assert events[0]["prompt_token_ids"] == prompt
    assert [i for event in events for i in event["choices"][0].get("token_ids", [])] == IDS[:4]
