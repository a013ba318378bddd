"""Streams: what they give out, joined, is the whole decode, and never half a character."""

import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import BYTES, KINDS, PIECES, STREAMED
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from specinfer_jax.checkpoint.tokenizer_parts import TokenizerParts
from specinfer_jax.errors import TokenizerError
from specinfer_jax.tokenizer import IncrementalDetokenizer, Tokenizer


def commits(ids: Sequence[int], sizes: Iterator[int]) -> Iterator[Sequence[int]]:
    start = 0
    while start < len(ids):
        size = next(sizes)
        yield ids[start : start + size]
        start += size


@KINDS
@pytest.mark.parametrize("size", range(1, 9))
def test_a_stream_equals_the_whole_decode(tokenizer: Tokenizer, size: int) -> None:  # case B057
    ids = tokenizer.encode(STREAMED)
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    deltas.append(detokenizer.flush())
    assert "".join(deltas) == tokenizer.decode(ids) == STREAMED
    assert not any("\N{REPLACEMENT CHARACTER}" in delta for delta in deltas)


def test_bytes_are_given_out_with_the_last_one_of_a_character() -> None:
    ids = BYTES.encode("a🙂b")
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.push([index]) for index in ids] == ["a", "", "", "", "🙂", "b"]
    assert detokenizer.flush() == ""


def test_a_run_of_byte_pieces_waits_for_its_end() -> None:
    # One wrong byte later turns the whole run into U+FFFD, so nothing of it is certain before.
    smile = [PIECES.ids_by_token()[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    wrong, letter = PIECES.ids_by_token()["<0xFF>"], PIECES.ids_by_token()["e"]
    detokenizer = IncrementalDetokenizer(PIECES)
    assert [detokenizer.push([index]) for index in [*smile, letter]] == ["", "", "", "", "🙂e"]
    assert detokenizer.push([*smile, wrong]) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}" * 5 == PIECES.decode([letter, *smile, wrong])[1:]


def test_one_leading_space_is_taken_from_the_whole_text_only() -> None:
    bar = PIECES.ids_by_token()["▁"]
    detokenizer = IncrementalDetokenizer(PIECES)
    assert [detokenizer.push([1, bar]), detokenizer.push([bar]), detokenizer.push([2, bar])] == ["", " ", " "]


@KINDS
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_in_any_commits_stream_as_they_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:  # case B057
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2) | st.integers(0, 262), max_size=40))
    ids += tokenizer.encode(data.draw(st.text(max_size=20)))
    sizes = iter(data.draw(st.lists(st.integers(1, 8), min_size=len(ids), max_size=len(ids))))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(commit) for commit in commits(ids, sizes)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60))
def test_text_survives_encoding(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


def test_the_cost_of_a_token_does_not_grow() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    ids = BYTES.encode(STREAMED + " and some words. ")
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(200):
            detokenizer.push(ids)
        seconds.append(time.perf_counter() - start)
    assert seconds[-1] < 4 * seconds[0]


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse(), decoders.Strip("x", left=1)])]
)
def test_an_unknown_decoder_does_not_stream(decoder: object) -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(TokenizerParts(backend, {}, frozenset(), None))
    assert tokenizer.decode([0]) == "a"
    with pytest.raises(TokenizerError, match="cannot stream"):
        IncrementalDetokenizer(tokenizer)
