"""Ids equal to the reference implementations' (tests/golden), whole decodes, special tokens, bad input."""

import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
from tokenizer_cases import (
    BYTE_LEVEL,
    BYTES,
    CHATML,
    GOLDEN,
    PIECES,
    PIECES_WITHOUT_PREFIX,
    SENTENCEPIECE,
    SMOLLM2,
    STREAMED,
)

from specinfer_jax.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from specinfer_jax.errors import TokenizerError
from specinfer_jax.tokenizer import Difference, IncrementalDetokenizer, Tokenizer


def test_the_golden_covers_every_known_way_to_cut_text() -> None:
    assert set(BYTE_LEVEL["ids_by_pre"]) == set(PRE_TOKENIZERS) - {"llama3", "llama-v3"}  # other names of llama-bpe


@pytest.mark.parametrize("pre", BYTE_LEVEL["ids_by_pre"])
def test_byte_level_ids_equal_llama_cpp(pre: str) -> None:  # case B061
    tokenizer = Tokenizer.from_gguf(BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": pre})
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in BYTE_LEVEL["texts"]]
    assert ids == BYTE_LEVEL["ids_by_pre"][pre]


def test_qwen2_composes_characters_as_transformers_does() -> None:
    tokenizer = Tokenizer.from_gguf(BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "qwen2"})
    golden = BYTE_LEVEL["qwen2_decomposed"]
    assert tokenizer.encode(golden["text"]) == golden["ids"]


def test_sentencepiece_ids_equal_the_published_form() -> None:  # case B061
    for probe in SENTENCEPIECE["probes"]:
        assert PIECES.encode(probe["text"]) == probe["ids"], probe["text"]


def test_sentencepiece_without_space_prefix_equals_llama_cpp() -> None:
    texts = [probe["text"] for probe in SENTENCEPIECE["probes"]]
    ids = [PIECES_WITHOUT_PREFIX.encode(text, add_special_tokens=False) for text in texts]
    assert ids == SENTENCEPIECE["ids_without_prefix"]


def test_sentencepiece_decodes_as_transformers_does() -> None:
    for golden in SENTENCEPIECE["decoded"]:
        assert PIECES.decode(golden["ids"], skip_special_tokens=False) == golden["text"]
        assert PIECES.decode(golden["ids"]) == golden["text_without_special"]


@pytest.mark.parametrize(("kind", "expected"), [(1, [3, 8, 6]), (5, [3, 4, 7]), (6, [3, 4, 7])])
def test_only_normal_pieces_are_merged(kind: int, expected: list[int]) -> None:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "bc", "ab"],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -9.0, -5.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, kind],
        "tokenizer.ggml.add_bos_token": False,
    }
    assert Tokenizer.from_gguf(metadata).encode("abc") == expected


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [("llama-bpe", None, [0]), ("llama-bpe", False, []), ("smollm", None, []), ("smollm", True, [0])],
)
def test_bos_is_added_as_the_file_says(pre: str, flag: bool | None, expected: list[int]) -> None:  # case B061
    metadata = {**BYTE_LEVEL["metadata"], "tokenizer.ggml.pre": pre}
    del metadata["tokenizer.ggml.add_bos_token"]
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = Tokenizer.from_gguf(metadata)
    plain = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == expected + plain


def test_sentencepiece_adds_bos_unless_told_otherwise_and_eos_only_if_told() -> None:
    metadata = SENTENCEPIECE["metadata"]
    without_flag = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.add_bos_token"}
    plain = PIECES.encode("a", add_special_tokens=False)
    assert Tokenizer.from_gguf(without_flag).encode("a") == [1, *plain]
    flags = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    assert Tokenizer.from_gguf(metadata | flags).encode("a") == [*plain, 2]


def test_padding_at_the_end_is_no_part_of_the_vocabulary() -> None:
    assert len(BYTE_LEVEL["metadata"]["tokenizer.ggml.tokens"]) == 704
    assert BYTES.vocab_size == 702
    assert BYTES.token_piece(703) is None
    assert BYTES.decode([703, *BYTES.encode("a"), 5000]) == "a"
    assert "[PAD702]" not in BYTES.ids_by_token()


def test_token_types_decide_what_is_special() -> None:
    assert BYTES.special_token_ids == {0, 1, 2}
    assert PIECES.special_token_ids == {0, 1, 2}
    user_defined = BYTES.ids_by_token()["<user  defined>"]
    assert BYTES.encode("<user  defined>") == [user_defined]
    assert BYTES.decode([1, user_defined, 2]) == "<user  defined>"
    assert BYTES.decode([1, user_defined, 2], skip_special_tokens=False) == "<|im_start|><user  defined><|im_end|>"


def test_named_ids() -> None:
    assert (BYTES.bos_token_id, BYTES.eos_token_id, BYTES.unk_token_id, BYTES.pad_token_id) == (0, 2, None, None)
    assert (PIECES.bos_token_id, PIECES.eos_token_id, PIECES.unk_token_id) == (1, 2, 0)
    assert BYTES.eos_token_ids == {2}


def test_end_of_turn_tokens_end_an_answer_too() -> None:
    metadata = BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 0}
    assert Tokenizer.from_gguf(metadata).eos_token_ids == {0}
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 1}).eos_token_ids == {0, 1}
    # A chat model whose file names the end of documents alone: its template ends turns with <|im_end|>.
    assert Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": CHATML}).eos_token_ids == {0, 2}


def test_token_bytes_are_what_a_token_adds() -> None:
    for tokenizer in (BYTES, PIECES_WITHOUT_PREFIX):
        ids = tokenizer.encode("Café " + STREAMED, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == "Café " + STREAMED
    assert BYTES.token_bytes(99_999) == b""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "no-such"}, "'no-such'.*tokenizer.json"),
        ({"tokenizer.ggml.pre": None}, "None.*tokenizer.json"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'.*tokenizer.json"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["zyx xyz"]}, "do not fit"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "702 tokens"),
        ({"tokenizer.ggml.bos_token_id": 703}, "bos_token_id is 703"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "tokenizer.ggml.scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(change: dict, words: str) -> None:  # case B061
    metadata = BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "gpt-2"} | change
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.from_gguf(metadata)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(TokenizerError, match="character 1"):
        BYTES.encode("a\ud83d")


# ---- two tokenizers


def test_equal_tokenizers_have_no_differences_and_padding_is_none() -> None:
    tokens = BYTE_LEVEL["metadata"]["tokenizer.ggml.tokens"]
    metadata = BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "gpt-2"}
    padded = metadata | {
        "tokenizer.ggml.tokens": [*tokens, "[PAD704]"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 5],
    }
    assert not BYTES.first_differences(Tokenizer.from_gguf(padded))
    assert not Tokenizer.from_gguf(padded).first_differences(BYTES)


def test_the_first_differing_ids_are_named() -> None:
    tokens = list(BYTE_LEVEL["metadata"]["tokenizer.ggml.tokens"])
    metadata = BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens}
    tokens[5], tokens[9] = tokens[9], tokens[5]
    swapped = Tokenizer.from_gguf(metadata)
    expected = [Difference(5, tokens[9], tokens[5]), Difference(9, tokens[5], tokens[9])]
    assert BYTES.first_differences(swapped) == expected
    assert BYTES.first_differences(swapped, limit=1) == expected[:1]
    assert [difference.token_id for difference in BYTES.first_differences(PIECES)] == [0, 1, 2]


def test_tokenizing_does_not_need_jax() -> None:
    code = "import sys, specinfer_jax.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=GOLDEN.parent.parent, check=False).returncode == 0


# ---- the default model


@pytest.fixture(scope="module")
def default_metadata(default_model_gguf: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(default_model_gguf).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


@pytest.mark.weights
def test_the_default_model_gives_the_ids_of_its_hf_tokenizer(default_metadata: dict[str, object]) -> None:  # case B061
    tokenizer = Tokenizer.from_gguf(default_metadata)
    for probe in SMOLLM2["probes"]:
        assert tokenizer.encode(probe["text"]) == probe["ids"], probe["text"]
    for golden in SMOLLM2["decoded"]:
        assert tokenizer.decode(golden["ids"], skip_special_tokens=False) == golden["text"]
        assert tokenizer.decode(golden["ids"]) == golden["text_without_special"]
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (1, 0, 2)


@pytest.mark.weights
def test_the_default_model_chats_as_transformers_does(default_metadata: dict[str, object]) -> None:
    tokenizer, golden = Tokenizer.from_gguf(default_metadata), SMOLLM2["chat"]
    assert tokenizer.apply_chat_template(golden["messages"]) == golden["text"]
    without_prompt = tokenizer.apply_chat_template(golden["messages"], add_generation_prompt=False)
    assert without_prompt == golden["text_without_prompt"]
    assert tokenizer.encode_chat(golden["messages"]) == golden["ids"]


@pytest.mark.weights
def test_the_default_model_streams_and_is_built_fast(default_metadata: dict[str, object]) -> None:  # case B057
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        tokenizer = Tokenizer.from_gguf(default_metadata)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.5
    ids = tokenizer.encode(STREAMED)
    for size in range(1, 9):
        detokenizer = IncrementalDetokenizer(tokenizer)
        deltas = [detokenizer.push(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(deltas) + detokenizer.flush() == STREAMED
