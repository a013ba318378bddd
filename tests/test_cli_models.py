"""`specinfer info | pull | convert | tree | bench` on a tiny model, and what a converted model keeps."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_model import CONFIG, METADATA, TOKENIZER, write_file, write_folder
from tokenizer_cases import BYTE_LEVEL, BYTES, PIECES, PIECES_WITHOUT_PREFIX, STREAMED
from typer.testing import CliRunner

from specinfer_jax import cli
from specinfer_jax.checkpoint.known_models import KNOWN_MODELS
from specinfer_jax.opened import open_model
from specinfer_jax.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


def run(*arguments: object):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    return result


def test_info_tells_what_a_model_is(folder: Path) -> None:
    text = run("info", folder, "--dtype", "bfloat16").stdout
    rows = {line[:18].strip(): line[18:].strip() for line in text.splitlines() if line.strip()}
    parameters = 2 * 704 * 32 + (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32) + 32
    assert rows["model"] == rows["where"] == str(folder)
    assert rows["format"].startswith("hf, ")
    assert rows["family"] == "llama"
    assert rows["attention"] == "4 query heads, 2 key/value heads of size 8"
    assert rows["parameters"].startswith(f"{parameters:,} (")
    assert rows["parameters"].endswith(" in bfloat16)")
    assert rows["cache per token"].startswith(f"{2 * 2 * 8 * 2:,} bytes")  # K and V, 2 heads of 8, 2 bytes
    assert rows["context"] == "128 tokens"
    assert rows["tokenizer"] == "BPE, 702 tokens, ends at <|im_end|> (2), with chat template"
    assert "licence" not in rows


def test_info_and_pull_of_a_known_name(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file(tmp_path / "known.gguf")
    for module in ("cli.models", "cli.screen"):
        monkeypatch.setattr(f"specinfer_jax.{module}.resolve", lambda name: file if name in KNOWN_MODELS else folder)
    text = run("info").stdout
    assert "smollm2-135m-instruct" in text
    assert "Apache-2.0" in text
    assert str(file) in text
    settings = tmp_path / "pair.toml"
    settings.write_text('[speculation]\nssms = ["some/ssm"]\n')
    lines = run("pull", "-c", settings).stdout.splitlines()
    assert lines == [f"smollm2-135m-instruct: {file}", f"some/ssm: {folder}"]


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_converted_model_needs_nothing_else(kind: str, folder: Path, tmp_path: Path) -> None:
    source = folder if kind == "folder" else write_file(tmp_path / "tiny.gguf", seed=3)
    out = tmp_path / "converted"
    assert run("convert", source, out).stdout.startswith(f"wrote {out} (")
    before, after = (open_model(path, dtype=np.dtype("float32")) for path in (source, out))
    if kind == "gguf":
        source.unlink()
    assert before.config == after.config
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before.params, after.params))
    chat = [{"role": "user", "content": STREAMED}]
    assert before.tokenizer.encode_chat(chat) == after.tokenizer.encode_chat(chat)
    assert before.tokenizer.eos_token_ids == after.tokenizer.eos_token_ids == {2}


def test_generation_of_a_converted_model_is_equal(tmp_path: Path) -> None:
    source, out = write_file(tmp_path / "tiny.gguf", seed=3), tmp_path / "converted"
    run("convert", source, out)
    outputs = [
        json.loads(run("generate", "one two", "-m", path, "--no-speculation", "-n", 12, "--json").stdout)
        for path in (source, out)
    ]
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]
    assert len(outputs[0]["token_ids"]) > 1


@pytest.mark.parametrize(
    "tokenizer", [BYTES, PIECES, PIECES_WITHOUT_PREFIX, TOKENIZER], ids=["bytes", "pieces", "no_prefix", "chat"]
)
def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, content in tokenizer.save_files().items():
        (tmp_path / name).write_bytes(content)
    again = Tokenizer.from_hf_folder(tmp_path)
    assert tokenizer.first_differences(again) == []
    for attribute in ("vocab_size", "eos_token_ids", "special_token_ids", "bos_token_id", "eos_token_id"):
        assert getattr(again, attribute) == getattr(tokenizer, attribute)
    assert again.chat_template == tokenizer.chat_template
    for text in [*BYTE_LEVEL["texts"], STREAMED, " two  spaces\n", "<|im_start|>user<s></s>"]:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert again.encode(text, add_special_tokens=special) == ids
        assert again.decode(ids) == tokenizer.decode(ids)


def test_a_role_of_an_ordinary_token_does_not_make_it_special(tmp_path: Path) -> None:
    ordinary = METADATA["tokenizer.ggml.tokens"].index("format")
    tokenizer = Tokenizer.from_gguf(METADATA | {"tokenizer.ggml.padding_token_id": ordinary})
    for name, content in tokenizer.save_files().items():
        (tmp_path / name).write_bytes(content)
    again = Tokenizer.from_hf_folder(tmp_path)
    assert again.special_token_ids == tokenizer.special_token_ids
    assert again.encode("formatformat informat") == tokenizer.encode("formatformat informat")


def test_tree_draws_in_the_terminal_and_as_svg(folder: Path, tmp_path: Path) -> None:
    svg = tmp_path / "trees.svg"
    result = run("tree", "one two", "-m", folder, "--ssm", folder, "--tree", "1,2", "--steps", 2, "--svg", svg)
    assert result.stderr == f"wrote {svg}\n"
    assert result.stdout.splitlines()[0] == "■ last committed   ✔ accepted   ○ proposed only   ★ bonus token of the LLM"
    # The SSM is the LLM: first children are accepted at both levels, the second child of level 2 never.
    for step in (1, 2):
        assert f"step {step}: 3 proposed, 2 accepted, 3 tokens committed" in result.stdout
    body = result.stdout.partition("\n")[2]
    assert [body.count(sign) for sign in "■✔○★"] == [2, 4, 2, 2]
    assert ET.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_vocabulary_of_the_tiny_model_is_padded() -> None:
    assert CONFIG["vocab_size"] == 704
    assert TOKENIZER.vocab_size == 702
