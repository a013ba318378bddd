"""Parameters out of a GGUF file: dequantised by the gguf package, llama's rotary rows put back into HF's order."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from specinfer_jax.checkpoint.assign import StoredTensor, assign_params, flat_paths, listed, wanted_shapes
from specinfer_jax.checkpoint.gguf_header import GGUFFile, TensorInfo
from specinfer_jax.errors import CheckpointError, ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import FAMILIES, config_from_gguf
from specinfer_jax.models.families.rope import rope_from_factors
from specinfer_jax.models.transformer import Params
from specinfer_jax.parallel.weights import WeightPlacement

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

_ROPE_FACTORS = "rope_freqs.weight"
# Rows are dequantised in pieces of this many weights: the gguf package needs several times their size meanwhile, and
# pieces that stay in the processor's cache take half the time of large ones.
_WEIGHTS_AT_ONCE = 1 << 16


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's config from the metadata, the names of the tensors, and llama3's rope factors.

    Raises:
      ConfigError: the model is not supported; the message names the file and the key.
    """
    try:
        config = config_from_gguf(file.metadata, file.tensors.keys())
        if _ROPE_FACTORS in file.tensors and config.rope is not None:
            factors = _stored_tensors(file)[_ROPE_FACTORS].read().astype(np.float32)
            rope = rope_from_factors(config.rope, factors, head_size=config.head_size)
            config = dataclasses.replace(config, rope=rope)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    return config


def load_params(file: GGUFFile, config: ModelConfig, *, dtype: Any, placement: WeightPlacement | None = None) -> Params:
    """Load all parameters of a GGUF file.

    Args:
      file: what `open_gguf` returned.
      config: what `read_config` made of the same file.
      dtype: float32, bfloat16 or float16, for every parameter.
      placement: where each part goes; None: everything to the default device.

    Returns:
      Nested dict of arrays.

    Raises:
      CheckpointError: tensors are missing, surplus, mis-shaped, cut off or of a type that is not supported (all of
        this before anything is allocated); a value overflows `dtype`.
    """
    family = FAMILIES[config.family]
    stored = _stored_tensors(file)
    stored.pop(_ROPE_FACTORS, None)
    shapes = wanted_shapes(config, stored, file.path)
    for path, _ in flat_paths(shapes):
        row = family.weight_name(path)
        if row.gguf_interleaved is not None and row.gguf in stored:
            heads = config.num_heads if row.gguf_interleaved == "query" else config.num_kv_heads
            stored[row.gguf] = stored[row.gguf]._replace(read=_with_halves(stored[row.gguf].read, heads))
    return assign_params(
        shapes,
        stored,
        name_of=lambda path: str(family.weight_name(path).gguf),
        dtype=dtype,
        source=file.path,
        placement=placement,
    )


def _with_halves(read: Callable[[], np.ndarray], heads: int) -> Callable[[], np.ndarray]:
    """Undo llama.cpp's row order.

    Its rotary embedding turns neighbouring rows of a head, HF's turns row j together with row j + K/2; the converter
    therefore stores the rows of a head as 0, K/2, 1, K/2 + 1, ...
    """

    def read_in_halves() -> np.ndarray:
        values = read()
        pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)

    return read_in_halves


def _stored_tensors(file: GGUFFile) -> dict[str, StoredTensor]:
    """All tensors of the file, after every type, shape and extent was found good."""
    types = {name: _type_name(info.type_id) for name, info in file.tensors.items()}
    unsupported = [f"{name} ({kind})" for name, kind in types.items() if kind not in SUPPORTED_TYPES]
    if unsupported:
        raise CheckpointError(
            f"{file.path}: tensors of a type that is not supported: {listed(unsupported)}; "
            f"supported are {', '.join(SUPPORTED_TYPES)}"
        )
    uneven = [
        f"{name} (rows of {info.shape[-1] if info.shape else 0} in {types[name]})"
        for name, info in file.tensors.items()
        if not info.shape or info.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)][0]
    ]
    if uneven:
        raise CheckpointError(f"{file.path}: rows that are no multiple of their type's block: {listed(uneven)}")
    outside = [name for name, info in file.tensors.items() if info.offset + _byte_count(info) > len(file.data)]
    if outside:
        raise CheckpointError(f"{file.path} is cut off, the data of {listed(outside)} is missing; download it again")
    return {name: _stored_tensor(file, name, info) for name, info in file.tensors.items()}


def _type_name(type_id: int) -> str:
    try:
        return GGMLQuantizationType(type_id).name
    except ValueError:
        return f"type {type_id}"


def _byte_count(info: TensorInfo) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.type_id)]
    return math.prod(info.shape) // block * size


def _stored_tensor(file: GGUFFile, name: str, info: TensorInfo) -> StoredTensor:
    def read() -> np.ndarray:
        kind = GGMLQuantizationType(info.type_id)
        packed = np.frombuffer(file.data, np.uint8, count=_byte_count(info), offset=info.offset)
        plain: dict[GGMLQuantizationType, Literal["<f4", "<f2"]] = {
            GGMLQuantizationType.F32: "<f4",
            GGMLQuantizationType.F16: "<f2",
        }
        if kind in plain:
            return packed.view(plain[kind]).reshape(info.shape)
        return _dequantise(packed, kind, info.shape)

    return StoredTensor(file.path, name, info.shape, read)


def _dequantise(packed: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    row_count = math.prod(shape[:-1])
    packed = packed.reshape(row_count, -1)
    values = np.empty((row_count, shape[-1]), np.float32)
    step = max(1, _WEIGHTS_AT_ONCE // shape[-1])
    for row in range(0, row_count, step):
        values[row : row + step] = dequantize(packed[row : row + step], kind)
    return values.reshape(shape)
