"""One continuation: text, ids and reasons are the same however many tokens a step commits."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from fake_engine import STATS, FakeEngine, logprobs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import BYTES, PIECES
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from specinfer_jax.checkpoint.tokenizer_parts import TokenizerParts
from specinfer_jax.completion import Completion, StopText, logprob_dicts
from specinfer_jax.detokenizer import BYTE_OF
from specinfer_jax.outputs import CompletionOutput, Logprob, StreamOutput
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.request import EngineRequest, Progress
from specinfer_jax.tokenizer import Tokenizer

END = "<end>"
CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 8])
OBEYS = pytest.mark.parametrize("obeys_watch", [True, False], ids=["watched", "not watched"])


def tokenizer_of(texts: Sequence[str | bytes]) -> Tokenizer:
    """A byte-level tokenizer with a token for every different text, in order, and `END` behind them."""
    raw = dict.fromkeys(text.encode() if isinstance(text, str) else text for text in texts if text != END)
    pieces = ["".join(CHARACTER_OF[byte] for byte in text) for text in raw]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(TokenizerParts(backend, {}, frozenset({len(pieces)}), None))


def ids_of(tokenizer: Tokenizer, texts: Sequence[str | bytes]) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[text.encode() if isinstance(text, str) else text] for text in texts]


def decode(
    tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams, *, size: int, obeys_watch: bool = True
) -> tuple[CompletionOutput, list[StreamOutput]]:
    """The whole and the streamed pieces of a continuation that the engine commits `size` ids at a time."""
    end_ids = frozenset((*(() if params.ignore_eos else tokenizer.eos_token_ids), *params.stop_token_ids))
    completion = Completion(tokenizer, params, prompt_ids=[0], end_ids=end_ids)
    request = EngineRequest([0], params.max_tokens or 99, end_ids, params, watch=completion.watch)
    engine = FakeEngine(lambda request: ids, size, obeys_watch)
    pieces = [completion.add(progress) for progress in engine.run([request], stream=True)]
    return completion.output(), pieces


SIXTY = "the quick brown fox jumps over the lazy dog, then once more."
# The tokens' texts, the parameters, and: the text, the number of ids kept, finish reason, stop reason.
CASES = {
    "at the second token of a commit": (["a", "stop", "b", "c", "d", "e", "f", "g"], {"stop": "stop"}, "a", 2, "stop"),
    "over two commits": (["x", "y", "st", "op", "z"], {"stop": ["stop"]}, "xy", 4, "stop"),
    "over many tokens": (["x", "s", "t", "o", "p", "z"], {"stop": "stop"}, "x", 5, "stop"),
    "a false start": (["s", "t", "s", "t", "o", "p"], {"stop": "stop"}, "st", 6, "stop"),
    "inside a token": (["go ", "stop!", "z"], {"stop": "stop"}, "go ", 2, "stop"),
    "ends inside a token": (["go st", "op!", "z"], {"stop": "stop"}, "go ", 2, "stop"),
    "an emoji in bytes": (["a", b"\xf0\x9f", b"\x99\x82", "z"], {"stop": "🙂"}, "a", 3, "🙂"),
    "a blank line": (["a", "\n", "\n", "b"], {"stop": "\n\n"}, "a", 3, "\n\n"),
    "a blank line in a token": (["a", ".\n\n", "b"], {"stop": "\n\n"}, "a.", 2, "\n\n"),
    "with a leading space": (["in", " any", " way"], {"stop": " any"}, "in", 2, " any"),
    "sixty characters": (["on ", *[SIXTY[i : i + 7] for i in range(0, 60, 7)], "z"], {"stop": SIXTY}, "on ", 10, SIXTY),
    "the first to complete": (["a", "b", "c", "d"], {"stop": ["abcd", "bc"]}, "a", 3, "bc"),
    "the first in a token": (["zero", "one two"], {"stop": ["two", "one"]}, "zero", 2, "one"),
    "the first to begin in a token": (["ab", "cde"], {"stop": ["cd", "bcde"]}, "a", 2, "bcde"),
    "the shortest of one beginning": (["a", "bcd"], {"stop": ["bcd", "bc"]}, "a", 2, "bc"),
    "included": (["go ", "stop!"], {"stop": "stop", "include_stop_str_in_output": True}, "go stop", 2, "stop"),
    "before an end token": (["a", "stop", "b", END], {"stop": "stop"}, "a", 2, "stop"),
    "behind an end token": (["a", END, "stop"], {"stop": "stop"}, "a", 2, None),
    "an ignored end token": (["a", END, "stop"], {"stop": "stop", "ignore_eos": True}, "a", 3, "stop"),
    "the end token's text": (["a", END], {"stop": END, "skip_special_tokens": False}, "a", 2, None),
    "the end token's text, included": (
        ["a", END], {"stop": END, "skip_special_tokens": False, "include_stop_str_in_output": True}, "a<end>", 2, END
    ),
    "a stop token's text": (["a", "b", "c"], {"stop": "b", "stop_token_ids": [1]}, "a", 2, 1),
    "a stop token's text, included": (
        ["a", "b", "c"], {"stop_token_ids": [1], "include_stop_str_in_output": True}, "ab", 2, 1
    ),
    "half a stop string, then an end token": (["x", "st", END], {"stop": "stop"}, "xst", 3, None),
    "all of it too early": (["a", "b", "c", "a", "b"], {"stop": "ab", "min_tokens": 2}, "abc", 5, "ab"),
    "half of it too early": (["a", "b", "c"], {"stop": "ab", "min_tokens": 1}, "", 2, "ab"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@SIZES
@OBEYS
def test_where_an_answer_ends(case: tuple, size: int, obeys_watch: bool) -> None:  # cases B020, B059
    texts, settings, text, count, stop_reason = case
    tokenizer = tokenizer_of(texts)
    ids = ids_of(tokenizer, texts)
    params = SamplingParams(**settings)
    output, pieces = decode(tokenizer, ids, params, size=size, obeys_watch=obeys_watch)
    assert (output.text, output.token_ids) == (text, ids[:count])
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_reason)
    assert "".join(piece.text for piece in pieces) == text
    assert [i for piece in pieces for i in piece.token_ids] == ids[:count]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert (pieces[-1].stop_reason, pieces[-1].stats) == (stop_reason, STATS)
    if obeys_watch:
        assert len(pieces) == math.ceil(count / size)  # the request ended there


@SIZES
@OBEYS
def test_without_a_match_the_limit_ends_it(size: int, obeys_watch: bool) -> None:
    texts = ["a", "b", "c", b"\xf0\x9f"]
    tokenizer = tokenizer_of(texts)
    ids = ids_of(tokenizer, texts)
    output, pieces = decode(tokenizer, ids, SamplingParams(stop="abcdef"), size=size, obeys_watch=obeys_watch)
    assert output.text == "abc\N{REPLACEMENT CHARACTER}" == tokenizer.decode(ids) == "".join(p.text for p in pieces)
    assert (output.finish_reason, output.stop_reason, output.token_ids) == ("length", None, ids)
    assert (output.logprobs, output.cumulative_logprob) == (None, None)


@SIZES
def test_text_that_the_tokenizer_held_back_may_complete_a_stop_string(size: int) -> None:  # case B059
    # Of sentencepiece, a run of bytes is text only when it has ended: here with the answer, or with the next token.
    smile = [PIECES.ids_by_token()[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    one, params = PIECES.ids_by_token()["one"], SamplingParams(stop="🙂")
    for behind, count in ([], 5), ([one, one], 6):
        output, pieces = decode(PIECES, [one, *smile, *behind], params, size=size)
        assert (output.text, output.finish_reason, output.stop_reason) == ("one", "stop", "🙂")
        assert len(output.token_ids) == count
        assert "".join(piece.text for piece in pieces) == "one"


def test_a_stream_holds_back_what_a_stop_string_may_reach() -> None:
    texts = ["h", "e", "l", "lo", END]
    tokenizer = tokenizer_of(texts)
    _, pieces = decode(tokenizer, ids_of(tokenizer, texts), SamplingParams(stop="xyz"), size=1)
    assert [piece.text for piece in pieces] == ["", "", "h", "el", "lo"]
    _, pieces = decode(tokenizer, ids_of(tokenizer, texts), SamplingParams(), size=1)
    assert [piece.text for piece in pieces] == ["h", "e", "l", "lo", ""]


def test_no_more_is_kept_than_the_longest_stop_string_needs() -> None:
    # So a token's cost does not grow with the text.
    text = StopText(["never", "neither"], is_included=False)
    given_out = 0
    for number in range(1, 500):
        given_out += len(text.push("some "))
        assert given_out == max(0, 5 * number - 6)
    assert text.flush() == " some "


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_commits_end_where_reading_token_by_token_does(data: st.DataObject) -> None:  # cases B020, B059
    words = st.text("ab", min_size=1, max_size=3)
    texts = data.draw(st.lists(words, min_size=1, max_size=12))
    stop = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
    min_tokens, is_included = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    # The oracle looks at the whole text again at every token.
    whole, count, reason = "".join(texts), len(texts), None
    for k in range(min_tokens, len(texts)):
        before, behind = "".join(texts[:k]), "".join(texts[: k + 1])
        found = [
            (start, start + len(string), string)
            for string in stop for start in range(len(behind))
            if behind.startswith(string, start) and start + len(string) > len(before)
        ]  # fmt: skip
        if found:
            start, end, reason = min(found)
            whole, count = behind[: end if is_included else start], k + 1
            break
    tokenizer = tokenizer_of(texts)
    ids = ids_of(tokenizer, texts)
    params = SamplingParams(stop=stop, min_tokens=min_tokens, include_stop_str_in_output=is_included)
    size, obeys_watch = data.draw(st.integers(1, 8)), data.draw(st.booleans())
    output, pieces = decode(tokenizer, ids, params, size=size, obeys_watch=obeys_watch)
    assert (output.text, output.token_ids, output.stop_reason) == (whole, ids[:count], reason)
    assert output.finish_reason == ("length" if reason is None else "stop")
    assert "".join(piece.text for piece in pieces) == whole


@pytest.mark.parametrize("num_top", [0, 1, 5])
@SIZES
@OBEYS
def test_logprobs_of_every_token(num_top: int, size: int, obeys_watch: bool) -> None:  # case B076
    texts = ["a", "b", "c", " d", "e", "f", b"\xff", "stop", "z"]
    tokenizer = tokenizer_of(texts)
    chosen = [6, 1, 3, 7]
    output, pieces = decode(
        tokenizer, [*chosen, 0], SamplingParams(stop="stop", logprobs=num_top), size=size, obeys_watch=obeys_watch
    )
    assert output.token_ids == chosen
    texts_alone = ["a", "b", "c", " d", "e", "f", "\N{REPLACEMENT CHARACTER}", "stop"]

    def entry(i: int) -> Logprob:
        return Logprob(-(i + 1) / 2, i + 1, texts_alone[i])

    assert output.logprobs == [{i: entry(i) for i in (own, *range(num_top))} for own in chosen]
    assert [next(iter(entries)) for entries in output.logprobs] == chosen  # the token itself comes first
    assert output.cumulative_logprob == -(7 + 2 + 4 + 8) / 2
    assert [entries for piece in pieces for entries in piece.logprobs or []] == output.logprobs
    assert [len(piece.logprobs or []) for piece in pieces] == [len(piece.token_ids) for piece in pieces]


def test_logprobs_of_a_small_vocabulary_and_of_ids_without_text() -> None:
    measured = logprobs_of([2, 900], num_top=2)
    entries = logprob_dicts(tokenizer_of(["a", "b", "c"]), [2, 900], measured, num_top=20)
    assert [list(entry) for entry in entries] == [[2, 0, 1], [900, 0, 1]]
    assert entries[1][900] == Logprob(-450.5, 901, None)


def test_logprobs_of_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=1)
    completion = Completion(BYTES, params, prompt_ids=[5, 0, 2], end_ids=())
    first = completion.add(Progress(0, [3], None, None, prompt_logprobs=logprobs_of([0, 2])))
    last = completion.add(Progress(0, [3], "length", STATS))
    [none, second, third] = completion.prompt_logprobs or []
    assert none is None
    assert {i: (entry.logprob, entry.rank) for i, entry in (second or {}).items()} == {0: (-0.5, 1)}
    assert {i: (entry.logprob, entry.rank) for i, entry in (third or {}).items()} == {2: (-1.5, 3), 0: (-0.5, 1)}
    assert (first.prompt_logprobs, last.prompt_logprobs) == (completion.prompt_logprobs, None)
    assert Completion(BYTES, params, prompt_ids=[5], end_ids=()).prompt_logprobs == [None]
    assert Completion(BYTES, SamplingParams(), prompt_ids=[5], end_ids=()).prompt_logprobs is None


def test_a_failure_keeps_what_there_was() -> None:
    texts = ["a", "b", "c"]
    completion = Completion(tokenizer_of(texts), SamplingParams(stop="bcd"), prompt_ids=[0], end_ids=())
    completion.add(Progress(0, [0, 1], None, None))
    piece = completion.add(Progress(0, [], "error", STATS, error="not finite"))
    assert (piece.finish_reason, piece.error, piece.text, piece.stats) == ("error", "not finite", "ab", STATS)
    assert (completion.output().finish_reason, completion.output().text, completion.error) == (
        "error", "ab", "not finite"
    )  # fmt: skip


def test_a_failure_is_not_taken_for_a_stop() -> None:
    smile = [PIECES.ids_by_token()[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    completion = Completion(PIECES, SamplingParams(stop="🙂"), prompt_ids=[1], end_ids=())
    completion.add(Progress(0, smile, "error", STATS, error="not finite"))
    assert (completion.output().finish_reason, completion.output().stop_reason) == ("error", None)


def test_the_engine_is_told_how_many_tokens_to_keep() -> None:  # case B020
    texts = list("abstopcd")
    completion = Completion(tokenizer_of(texts), SamplingParams(stop=["stop"]), prompt_ids=[0], end_ids=())
    assert completion.watch([0, 1, 2]) is None
    assert completion.watch([3, 4, 5, 6, 7]) == 3


def test_numbers_are_plain_python() -> None:
    [entries] = logprob_dicts(BYTES, [1], logprobs_of([1]), num_top=1)
    for i, entry in entries.items():
        assert (type(i), type(entry.logprob), type(entry.rank)) == (int, float, int)
    assert not any(isinstance(i, np.integer) for i in entries)
