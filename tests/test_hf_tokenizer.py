"""Tokenizers of Hugging Face model folders."""

import json
from pathlib import Path

import pytest
from tokenizer_cases import BYTE_LEVEL, BYTES, KINDS, PIECES, save_folder
from tokenizers import Tokenizer as Backend

from specinfer_jax.errors import TokenizerError
from specinfer_jax.tokenizer import Tokenizer


@KINDS
def test_a_folder_gives_the_ids_of_its_tokenizer_json(tokenizer: Tokenizer, tmp_path: Path) -> None:
    loaded = Tokenizer.from_hf_folder(save_folder(tmp_path, tokenizer))
    for text in BYTE_LEVEL["texts"]:
        assert loaded.encode(text) == tokenizer.encode(text)
        assert loaded.decode(loaded.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert loaded.special_token_ids == tokenizer.special_token_ids
    assert not loaded.first_differences(tokenizer)


def test_the_post_processor_of_tokenizer_json_decides_about_bos(tmp_path: Path) -> None:
    config = {"add_bos_token": False, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    loaded = Tokenizer.from_hf_folder(save_folder(tmp_path, PIECES, config))
    assert loaded.encode("a")[0] == loaded.bos_token_id == 1
    assert loaded.eos_token_id == 2


def test_tokens_of_the_configuration_are_added(tmp_path: Path) -> None:
    tool = {"content": "<tool>", "special": False, "normalized": False}
    config = {
        "pad_token": "<pad>",
        "additional_special_tokens": ["<extra>"],
        "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}, "702": tool},
    }
    loaded = Tokenizer.from_hf_folder(save_folder(tmp_path, BYTES, config))
    assert loaded.encode("<tool><pad><extra>") == [702, 703, 704]
    assert loaded.pad_token_id == 703
    assert loaded.vocab_size == 705
    assert loaded.decode([702, 703, 704]) == "<tool>"


def test_the_special_tokens_map_counts_where_the_configuration_lists_no_added_tokens(tmp_path: Path) -> None:
    special = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    config = {"eos_token": "<|endoftext|>"}
    folder = save_folder(tmp_path, BYTES, config, special_tokens_map=special)
    assert Tokenizer.from_hf_folder(folder).eos_token_id == 2
    save_folder(tmp_path, BYTES, config | {"added_tokens_decoder": {}}, special_tokens_map=special)
    assert Tokenizer.from_hf_folder(folder).eos_token_id == 0


def test_eos_ids_come_from_the_generation_config_too(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>"}
    folder = save_folder(
        tmp_path, BYTES, config, generation_config={"eos_token_id": [0, 1]}, config={"eos_token_id": 7}
    )
    assert Tokenizer.from_hf_folder(folder).eos_token_ids == {0, 1, 2}
    folder = save_folder(tmp_path / "bare", BYTES, {}, config={"eos_token_id": 7})
    assert Tokenizer.from_hf_folder(folder).eos_token_ids == {7}


def test_truncation_and_padding_left_in_tokenizer_json_do_nothing(tmp_path: Path) -> None:
    folder = save_folder(tmp_path, BYTES)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_hf_folder(folder).encode("one two three") == BYTES.encode("one two three")


def test_vocab_json_and_merges_txt_give_what_transformers_gives(tmp_path: Path) -> None:
    golden, metadata = BYTE_LEVEL["gpt2_folder"], BYTE_LEVEL["metadata"]
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"][:-3])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(metadata["tokenizer.ggml.merges"]) + "\n", encoding="utf-8"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(golden["config"]), encoding="utf-8")
    loaded = Tokenizer.from_hf_folder(tmp_path)
    assert loaded.vocab_size == golden["length"]
    assert [loaded.encode(text) for text in golden["texts"]] == golden["ids"]
    assert (loaded.bos_token_id, loaded.eos_token_ids) == (0, {2})


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(TokenizerError, match=r"sentencepiece tokenizer\.model: tokenizer\.json is needed"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    with pytest.raises(TokenizerError, match="RobertaTokenizer"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_hf_folder(tmp_path)
