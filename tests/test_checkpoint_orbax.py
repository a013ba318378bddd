"""Converted models: saved and restored bit for bit, whole or not at all."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import CONFIGS, llama_config, write_hf_folder

from specinfer_jax.checkpoint import orbax_io
from specinfer_jax.checkpoint.load import LoadedModel, load_model, read_config
from specinfer_jax.errors import CheckpointError

TOKENIZER = {"tokenizer.json": b'{"model": {}}', "tokenizer_config.json": b"{}"}


@pytest.fixture
def model(tmp_path: Path) -> LoadedModel:
    """A tiny llama, loaded."""
    write_hf_folder(tmp_path / "hf", llama_config(rope_scaling={"type": "yarn", "factor": 2.0}), seed=0)
    return load_model(tmp_path / "hf", dtype="float32")


def convert(model: LoadedModel, folder: Path) -> Path:
    """Save with tokenizer files."""
    orbax_io.save(folder, model.params, model.config, tokenizer_files=TOKENIZER)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_comes_back_bit_for_bit(tmp_path: Path, kind: str, dtype: str) -> None:
    write_hf_folder(tmp_path / "hf", CONFIGS[kind](), seed=0)
    before = load_model(tmp_path / "hf", dtype=dtype)
    folder = convert(before, tmp_path / "new" / "converted")
    after = load_model(folder, dtype=dtype)
    assert (after.config, after.format, after.source) == (before.config, "orbax", folder)
    assert jax.tree.structure(after.params) == jax.tree.structure(before.params)
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params), strict=True):
        assert new.dtype == jnp.dtype(dtype)
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
        assert new.devices() == {jax.devices()[0]}
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name in TOKENIZER} == TOKENIZER
    assert read_config(folder) == before.config


def test_the_source_is_needed_no_more(model: LoadedModel, tmp_path: Path) -> None:
    folder = convert(model, tmp_path / "converted")
    for file in (tmp_path / "hf").iterdir():
        file.unlink()
    assert load_model(folder, dtype="float32").config.rope == model.config.rope


def test_another_dtype_is_cast_as_numpy_casts(model: LoadedModel, tmp_path: Path) -> None:  # case B066
    folder = convert(model, tmp_path / "converted")
    after = load_model(folder, dtype="float16")
    for old, new in zip(jax.tree.leaves(model.params), jax.tree.leaves(after.params), strict=True):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(old).astype(np.float16))


def test_overflow_names_the_parameter(model: LoadedModel, tmp_path: Path) -> None:  # case B066
    norm = {"scale": model.params["head"]["norm"]["scale"].at[3].set(1e5)}
    params = {**model.params, "head": {**model.params["head"], "norm": norm}}
    folder = convert(model._replace(params=params), tmp_path / "converted")
    with pytest.raises(CheckpointError, match="converted/params: head/norm/scale holds 100000, more than float16"):
        load_model(folder, dtype="float16")


def test_parameters_are_restored_in_groups(model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = convert(model, tmp_path / "converted")
    monkeypatch.setattr(orbax_io, "_GROUP_BYTES", 5000)
    restored = []
    original = orbax_io._Restorer.restore
    monkeypatch.setattr(
        orbax_io._Restorer, "restore", lambda self, names: restored.append(len(names)) or original(self, names)
    )
    after = load_model(folder, dtype="float32")
    assert len(restored) > 3
    assert sum(restored) == len(jax.tree.leaves(model.params))
    for old, new in zip(jax.tree.leaves(model.params), jax.tree.leaves(after.params), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_an_existing_folder_is_left_alone(model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("x")
    with pytest.raises(CheckpointError, match="full exists already; name a new folder"):
        convert(model, tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["precious.txt"]
    (tmp_path / "empty").mkdir()
    convert(model, tmp_path / "empty")
    assert load_model(tmp_path / "empty", dtype="float32").config == model.config


@pytest.mark.parametrize("name", ["../x", "specinfer.json", "params", "a/b"])
def test_tokenizer_files_stay_in_the_folder(model: LoadedModel, tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be the name of a tokenizer file"):
        orbax_io.save(tmp_path / "converted", model.params, model.config, tokenizer_files={name: b""})


@pytest.mark.parametrize(
    ("failure", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "is full; free some space"),
        (OSError(errno.EACCES, "Permission denied"), CheckpointError, "cannot write to .*: Permission denied"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_nothing_half_written_stays(
    model: LoadedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    raised: Any,
    message: str,
) -> None:
    def fail(path: Path) -> None:
        raise failure

    monkeypatch.setattr(orbax_io, "flush_to_disk", fail)
    target = tmp_path / "out" / "converted"
    with pytest.raises(raised, match=message):
        convert(model, target)
    assert list(target.parent.iterdir()) == []


def test_tensorstore_says_full_in_its_own_words(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device")

    monkeypatch.setattr(orbax_io.ocp.StandardCheckpointer, "save", fail)
    with pytest.raises(CheckpointError, match="is full; free some space"):
        convert(model, tmp_path / "out" / "converted")
    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_run_left_is_removed(model: LoadedModel, tmp_path: Path) -> None:
    left_over = tmp_path / "out" / f".converted.partial-{os.getpid()}"
    left_over.mkdir(parents=True)
    (left_over / "half").write_text("x")
    convert(model, tmp_path / "out" / "converted")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["converted"]


def test_damaged_folders_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    folder = convert(model, tmp_path / "converted")
    header = json.loads((folder / "specinfer.json").read_text())

    def refused(changes: dict[str, Any], message: str) -> None:
        (folder / "specinfer.json").write_text(json.dumps(header | changes))
        with pytest.raises(CheckpointError, match=message):
            load_model(folder, dtype="float32")

    refused({"version": 99}, "has version 99 and 1 is needed; convert the model again")
    refused({"config": {"family": "llama"}}, "does not describe a model")
    refused({"config": None}, "does not describe a model")
    refused({"config": header["config"] | {"qkv_bias": True}}, "missing: layers_0/attention/k/bias, .* and 2 more")
    refused({"config": header["config"] | {"tied_head": True}}, "tensors that the model does not use: head/kernel$")
    refused(
        {"config": header["config"] | {"mlp_width": 47}},
        r"layers_0/mlp/down/kernel is \[32, 48\] instead of \[32, 47\]",
    )
    (folder / "specinfer.json").write_text(json.dumps(header))
    (folder / "params" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match="params is damaged or incomplete; convert the model again"):
        load_model(folder, dtype="float32")


def test_lost_data_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    folder = convert(model, tmp_path / "converted")
    for file in (folder / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="params is damaged or incomplete; convert the model again"):
        load_model(folder, dtype="float32")
