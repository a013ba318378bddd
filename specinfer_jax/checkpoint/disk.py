"""Writing model files so that nothing half-written is ever found: space checks, flushing, clear errors."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from specinfer_jax.errors import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission and other file errors inside the block into one clear sentence."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise full_disk(folder) from None
        raise CheckpointError(f"cannot write to {folder}: {error.strerror or error}") from None


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk or a quota is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def full_disk(folder: Path) -> CheckpointError:
    """The error for a disk that filled up while writing."""
    return CheckpointError(f"the disk of {folder} is full; free some space or choose a folder on another disk")


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse to begin what would fill the disk.

    Raises:
      CheckpointError: `folder`'s disk has fewer than `needed` bytes left.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"the disk of {folder} has {free / 1e6:.0f} MB left and {needed / 1e6:.0f} MB are needed; "
            "free some space or choose a folder on another disk"
        )


def flush_to_disk(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk, so that a rename after it cannot expose less."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
