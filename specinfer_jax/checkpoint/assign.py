"""Tensors of a model file to the parameter tree: every parameter exactly once, every tensor used."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specinfer_jax.errors import CheckpointError, ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params, param_shapes
from specinfer_jax.parallel.weights import WeightPlacement, joined

_NAMES_SHOWN = 4


class StoredTensor(NamedTuple):
    """One tensor of a model file, checked to lie inside the file but not read yet."""

    file: Path
    """The file it is in."""
    name: str
    """Its name in that file."""
    shape: tuple[int, ...]
    """Its shape, slowest axis first."""
    read: Callable[[], np.ndarray]
    """Its values in a floating-point dtype; may be a view of the mapped file."""
    give_back: Callable[[], None] | None = None
    """Lets go of the memory that the mapped file takes here; None: nothing is mapped."""


def weight_dtype(dtype: Any) -> np.dtype:
    """The dtype that weights shall have: float32, bfloat16 or float16, by name or as a dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.float32, jnp.bfloat16, jnp.float16) or found is None:
        raise ConfigError(f"dtype {dtype!r} is not supported for weights; use float32, bfloat16 or float16")
    return found


def wanted_shapes(config: ModelConfig, stored: Collection[str], source: Path) -> Params:
    """`param_shapes`, after a look at the number of layers: a damaged one would keep it busy for ever.

    Raises:
      CheckpointError: there are more layers than tensors.
    """
    if config.num_layers > len(stored):
        raise CheckpointError(f"{source} speaks of {config.num_layers} layers but holds {len(stored)} tensors")
    return param_shapes(config)


def assign_params(
    shapes: Params,
    stored: Mapping[str, StoredTensor],
    *,
    name_of: Callable[[str], str],
    dtype: Any,
    source: Path,
    placement: WeightPlacement | None = None,
) -> Params:
    """Build the parameter tree from stored tensors, reading one tensor at a time.

    Args:
      shapes: which parameters there are, as `wanted_shapes` tells.
      stored: by name; known buffers that are no parameters are left out by the caller.
      name_of: parameter path (`layers_0/attention/q/kernel`) -> key of `stored`.
      dtype: float32, bfloat16 or float16, for every parameter.
      source: file or folder that errors name.
      placement: where each part goes; None: everything to the default device.

    Returns:
      Nested dict of arrays.

    Raises:
      CheckpointError: tensors are missing, surplus or mis-shaped, or a value overflows `dtype`.
    """
    target = weight_dtype(dtype)
    names = {path: name_of(path) for path, _ in flat_paths(shapes)}
    _check_names(names.values(), stored, source)
    _check_shapes({names[path]: leaf.shape for path, leaf in flat_paths(shapes)}, stored)

    def assign(path: Any, _: Any) -> jax.Array:
        tensor = stored[names[joined(path)]]
        x = _to_device(tensor, target) if placement is None else _to_mesh(joined(path), tensor, target, placement)
        if tensor.give_back is not None:
            tensor.give_back()
        return x

    return jax.tree_util.tree_map_with_path(assign, shapes)


def flat_paths(tree: Params) -> list[tuple[str, Any]]:
    """Leaves of a parameter tree with their paths, `layers_0/attention/q/kernel`."""
    return [(joined(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def listed(names: Iterable[str]) -> str:
    """The first few of many names, and how many more there are."""
    names = sorted(names)
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_names(wanted: Iterable[str], stored: Mapping[str, StoredTensor], source: Path) -> None:
    wanted = set(wanted)
    missing = wanted - stored.keys()
    surplus = [tensor for name, tensor in stored.items() if name not in wanted]
    if missing:
        raise CheckpointError(f"{source}: tensors that the model needs are missing: {listed(missing)}")
    if surplus:
        file = surplus[0].file
        names = listed(tensor.name for tensor in surplus if tensor.file == file)
        raise CheckpointError(f"{file}: tensors that the model does not use: {names}")


def _check_shapes(wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]) -> None:
    wrong = [(stored[name], shape) for name, shape in wanted.items() if stored[name].shape != shape]
    if wrong:
        file = wrong[0][0].file
        texts = [f"{t.name} is {list(t.shape)} instead of {list(shape)}" for t, shape in wrong if t.file == file]
        raise CheckpointError(f"{file}: tensors have the wrong shape: {listed(texts)}")


def _to_device(tensor: StoredTensor, dtype: np.dtype) -> jax.Array:
    values = tensor.read()
    if values.dtype != dtype:
        values = _cast(tensor, values, dtype)
    # jnp.array, since jax.device_put keeps well-aligned numpy memory as it is (even with may_alias=False): the values
    # may be a view of a file that somebody could overwrite, and such arrays cannot be donated. Waiting keeps one tensor
    # at a time in host memory.
    return jnp.array(values, copy=True).block_until_ready()


def _to_mesh(path: str, tensor: StoredTensor, dtype: np.dtype, placement: WeightPlacement) -> jax.Array:
    """Every device's part alone is read, cast and copied."""
    values = tensor.read()
    return placement.place(path, tensor.shape, lambda index: _cast(tensor, values[index], dtype)).block_until_ready()


def _cast(tensor: StoredTensor, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy, so that nothing refers to the mapped file."""
    with np.errstate(over="ignore"):  # reported below, with the tensor's name
        cast = values.astype(dtype, order="C")
    if values.dtype != dtype and (dtype.itemsize < values.dtype.itemsize or dtype == jnp.float16):
        _check_overflow(tensor, values, cast)
    return cast


def _check_overflow(tensor: StoredTensor, values: np.ndarray, cast: np.ndarray) -> None:
    overflowed = np.isinf(cast) & ~np.isinf(values)
    if overflowed.any():
        largest = float(np.abs(values[overflowed].astype(np.float64)).max())
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} holds {largest:.6g}, more than {cast.dtype.name} can hold "
            f"({float(jnp.finfo(cast.dtype).max):.6g}); load the model as float32 or bfloat16"
        )
