"""Reading one safetensors file by memory map, bfloat16 included, without torch.

The format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, the data. Read
here and not by the safetensors package because its numpy side knew no bfloat16 for long, and because errors shall name
the tensors that a cut-off file lacks.
"""

import json
import math
import mmap
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from specinfer_jax.checkpoint.assign import StoredTensor, listed
from specinfer_jax.errors import CheckpointError

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}

_LFS_POINTER = b"version https://git-lfs."


def map_file(path: Path) -> mmap.mmap:
    """Map a model file for reading.

    Raises:
      CheckpointError: the file cannot be read, is empty, or is a git-lfs pointer instead of the file.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # what mmap says about length 0
        raise CheckpointError(f"{path} is empty; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise CheckpointError(f"{path} is a git-lfs pointer, not the model file; fetch it with `git lfs pull`")
    return data


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name; no data is read yet.

    Raises:
      CheckpointError: not a safetensors file, cut off (naming the tensors), or a dtype that is no float.
    """
    data = map_file(path)
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise CheckpointError(f"{path} is cut off inside its header or is no safetensors file; download it again")
    try:
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        entries = {name: _entry(fields) for name, fields in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} has a damaged header or is no safetensors file; download it again") from None
    _check_entries(path, entries, len(data) - start)

    def stored(name: str, dtype: str, shape: tuple[int, ...], begin: int) -> StoredTensor:
        def read() -> np.ndarray:
            count = math.prod(shape)
            return np.frombuffer(data, _DTYPES[dtype], count=count, offset=start + begin).reshape(shape)

        def give_back() -> None:
            if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
                first = (start + begin) // mmap.PAGESIZE * mmap.PAGESIZE
                length = math.prod(shape) * _DTYPES[dtype].itemsize + start + begin - first
                if length:
                    data.madvise(mmap.MADV_DONTNEED, first, length)

        return StoredTensor(path, name, shape, read, give_back)

    return {name: stored(name, dtype, shape, begin) for name, (dtype, shape, begin, _) in entries.items()}


def _entry(fields: dict[str, object]) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = fields["data_offsets"]  # type: ignore[misc]
    shape = tuple(int(size) for size in fields["shape"])  # type: ignore[union-attr]
    return str(fields["dtype"]), shape, int(begin), int(end)


def _check_entries(path: Path, entries: dict[str, tuple[str, tuple[int, ...], int, int]], size: int) -> None:
    other = [f"{name} ({dtype})" for name, (dtype, *_) in entries.items() if dtype not in _DTYPES]
    if other:
        raise CheckpointError(
            f"{path}: tensors of a dtype that is not supported: {listed(other)}; supported are {', '.join(_DTYPES)}"
        )
    outside = [name for name, (*_, end) in entries.items() if end > size]
    if outside:
        raise CheckpointError(f"{path} is cut off, the data of {listed(outside)} is missing; download it again")
    damaged = [
        name
        for name, (dtype, shape, begin, end) in entries.items()
        if begin < 0 or min(shape, default=0) < 0 or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize
    ]
    if damaged:
        raise CheckpointError(f"{path}: shape and data of {listed(damaged)} contradict each other; download it again")
