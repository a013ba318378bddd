"""Reading the header of a GGUF file: metadata and the table of tensors.

Read here and not by `gguf.GGUFReader` because that one makes numpy objects of every token and merge (2.4 s for a
vocabulary of 49,152; this takes 0.1 s), and because errors shall name the tensor of an unknown type or a cut-off file.
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType

from specinfer_jax.checkpoint.safetensors_file import map_file
from specinfer_jax.errors import CheckpointError

_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


class TensorInfo(NamedTuple):
    """One row of the tensor table."""

    shape: tuple[int, ...]
    """Slowest axis first (the file has it the other way round)."""
    type_id: int
    """Number of its quantisation type, maybe unknown."""
    offset: int
    """First byte of its data, from the beginning of the file."""


class GGUFFile(NamedTuple):
    """An open GGUF file: header parsed, tensor data mapped but not read."""

    path: Path
    """Where it is."""
    metadata: dict[str, object]
    """Every key with plain Python values (int, float, bool, str, lists of them)."""
    tensors: dict[str, TensorInfo]
    """By name, in file order."""
    data: mmap.mmap
    """The whole file."""


class _Cursor:
    """Reads little-endian values one after the other; running over the end raises struct.error."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def take_int(self, code: str) -> int:
        return int(self.take(code))

    def take_string(self) -> str:
        length = self.take_int("Q")
        if length > len(self.data) - self.at:
            raise struct.error
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def take_value(self, kind: int) -> object:
        if kind == GGUFValueType.STRING:
            return self.take_string()
        if kind == GGUFValueType.ARRAY:
            return self.take_array()
        return self.take(_SCALARS[GGUFValueType(kind)])

    def take_array(self) -> list[object]:
        kind, count = self.take_int("I"), self.take_int("Q")
        if count > len(self.data) - self.at:  # every element takes a byte at least
            raise struct.error
        if kind in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            return [self.take_value(kind) for _ in range(count)]
        dtype = np.dtype("<" + _SCALARS[GGUFValueType(kind)])
        if count * dtype.itemsize > len(self.data) - self.at:
            raise struct.error
        values = np.frombuffer(self.data, dtype, count=count, offset=self.at)
        self.at += values.nbytes
        return values.tolist()


def open_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file (version 2 or 3, little-endian).

    Raises:
      CheckpointError: no GGUF file, an unknown version, or a header that is damaged or cut off.
    """
    data = map_file(path)
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path} is no GGUF file (it does not begin with 'GGUF')")
    cursor = _Cursor(data)
    cursor.at = 4
    try:
        version = cursor.take_int("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{path} is GGUF version {version} or big-endian; little-endian version 2 or 3 is needed"
            )
        tensor_count, key_count = cursor.take_int("Q"), cursor.take_int("Q")
        metadata = {}
        for _ in range(key_count):
            key = cursor.take_string()
            metadata[key] = cursor.take_value(cursor.take_int("I"))
        rows = [_take_tensor_row(cursor) for _ in range(tensor_count)]
    except struct.error:
        raise CheckpointError(f"{path} is cut off inside its header; download it again") from None
    except (ValueError, KeyError, RecursionError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} has a damaged header; download it again") from None
    start = _aligned(path, cursor.at, metadata)
    tensors = {name: info._replace(offset=start + info.offset) for name, info in rows}
    if len(tensors) != len(rows):
        raise CheckpointError(f"{path} names a tensor twice")
    return GGUFFile(path, metadata, tensors, data)


def read_metadata(path: Path) -> dict[str, object]:
    """Metadata of a GGUF file as plain Python values."""
    return open_gguf(path).metadata


def _take_tensor_row(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name = cursor.take_string()
    axes = cursor.take_int("I")
    if axes > 8:
        raise ValueError(axes)
    shape = tuple(cursor.take_int("Q") for _ in range(axes))
    return name, TensorInfo(shape[::-1], cursor.take_int("I"), cursor.take_int("Q"))


def _aligned(path: Path, at: int, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: 'general.alignment' is {alignment!r}; it must be a positive integer")
    return -(-at // alignment) * alignment
