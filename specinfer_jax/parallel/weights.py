"""Weights on a mesh: each device's part is cut out of a tensor, maybe in a mapped file; nothing else is copied."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from specinfer_jax.config import ONE_DEVICE, mesh_shape
from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.parallel.sharding import DATA, MODEL, WHOLE, make_mesh, split_config, splits, weight_spec

DEVICE, HOST = "device", "pinned_host"
"""Kinds of memory that weights live in."""


@dataclasses.dataclass(frozen=True)
class WeightPlacement:
    """Where the parameters of one model go."""

    mesh: Mesh
    """Devices, with the axes "data" and "model"."""
    stored: ModelConfig
    """The model as its files hold it."""
    memory: str = DEVICE
    """DEVICE, or HOST for an LLM whose layers are streamed (offload.py)."""

    @property
    def model(self) -> int:
        """Devices that share the LLM."""
        return self.mesh.shape[MODEL]

    @property
    def config(self) -> ModelConfig:
        """The model as it is laid out."""
        return split_config(self.stored, self.model)

    def shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a parameter as laid out, from its stored one."""
        rows = shape[0]
        if _is_vocabulary(path):
            rows += self.config.num_padding_ids - self.stored.num_padding_ids
        elif _is_kv(path):
            rows = rows // self.stored.num_kv_heads * self.config.num_kv_heads
        return (rows, *shape[1:])

    def sharding(self, path: str) -> NamedSharding:
        """Of one parameter."""
        spec = weight_spec(path, self.config, self.model)
        is_matrix = path.endswith(("/kernel", "/embedding", "/position"))  # the rest is small and stays on the device
        return NamedSharding(self.mesh, spec, memory_kind=self.memory if is_matrix else DEVICE)

    def place(self, path: str, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
        """One parameter on its devices.

        Args:
          path: `layers_0/attention/q/kernel`.
          shape: as stored.
          read: values at slices of the stored tensor, in the final dtype; called once per part that lives here.
        """
        laid_out = self.shape(path, shape)

        def part(index: Any) -> np.ndarray:
            bounds = [s.indices(size)[:2] for s, size in zip(index, laid_out, strict=True)]
            return self._rows(path, shape, bounds, read)

        return jax.make_array_from_callback(laid_out, self.sharding(path), part)

    def _rows(
        self, path: str, shape: tuple[int, ...], bounds: list[tuple[int, int]], read: Callable[..., np.ndarray]
    ) -> np.ndarray:
        """A part of the laid out parameter: zeros for padding ids, a KV head again for every device that needs it."""
        (start, stop), rest = bounds[0], tuple(slice(*bound) for bound in bounds[1:])
        if _is_kv(path) and self.config.num_kv_heads != self.stored.num_kv_heads:
            K, repeat = self.stored.head_size, self.config.num_kv_heads // self.stored.num_kv_heads
            heads = range(start // K, stop // K)
            return np.concatenate([read((slice(h // repeat * K, (h // repeat + 1) * K), *rest)) for h in heads])
        if stop <= shape[0]:
            return read((slice(start, stop), *rest))
        known = read((slice(min(start, shape[0]), shape[0]), *rest))
        return np.concatenate([known, np.zeros((stop - start - len(known), *known.shape[1:]), known.dtype)])

    def as_stored(self, path: str, x: jax.Array) -> jax.Array:
        """A laid out parameter whole on every device and without what the layout added."""
        rows, repeat = x.shape[0], self.config.num_kv_heads // self.stored.num_kv_heads

        def trim(x: jax.Array) -> jax.Array:
            if _is_vocabulary(path):
                return x[: rows - (self.config.num_padding_ids - self.stored.num_padding_ids)]
            if _is_kv(path) and repeat > 1:
                by_head = x.reshape(-1, repeat, self.stored.head_size, *x.shape[1:])
                return by_head[:, 0].reshape(-1, *x.shape[1:])
            return x

        on_devices = jax.device_put(x, x.sharding.with_memory_kind(DEVICE))
        return jax.jit(trim, out_shardings=NamedSharding(self.mesh, WHOLE))(on_devices)


def find_mesh(mesh: str, offload: str) -> tuple[Mesh | None, str]:
    """(devices, memory of the LLM's weights) for settings of `LLMConfig`; None: the default device alone.

    Raises:
      ConfigError: there are not so many devices, or they have no host memory to stream from.
    """
    if mesh == ONE_DEVICE and offload == "none":
        return None, DEVICE
    found = make_mesh(*mesh_shape(mesh))
    if offload == "none":
        return found, DEVICE
    device = found.devices.flat[0]
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise ConfigError(f"offload='host' needs devices with {HOST} memory, which {device.platform} lacks here")
    return found, HOST


def place_params(params: Mapping[str, Any], placement: WeightPlacement) -> dict[str, Any]:
    """Parameters that are loaded already, laid out anew; their own arrays stay where they are."""

    def place(path: Any, x: jax.Array) -> jax.Array:
        values = np.asarray(x)
        return placement.place(joined(path), values.shape, lambda index: values[index])

    return jax.tree_util.tree_map_with_path(place, dict(params))


class StoredView:
    """A laid out parameter as its file holds it, gathered when somebody looks."""

    def __init__(self, placement: WeightPlacement, path: str, x: jax.Array) -> None:
        self._placement, self._path, self._x = placement, path, x

    def array(self) -> jax.Array:
        """Whole on every device."""
        return self._placement.as_stored(self._path, self._x)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.array(), dtype)


def stored_views(params: Mapping[str, Any], placement: WeightPlacement) -> dict[str, Any]:
    """The tree of `StoredView`s of a laid out model."""
    return jax.tree_util.tree_map_with_path(lambda path, x: StoredView(placement, joined(path), x), dict(params))


def replicate(params: Any, mesh: Mesh) -> Any:
    """Every array whole on each device of the mesh: how SSMs lie."""
    whole = NamedSharding(mesh, WHOLE)
    return jax.tree.map(lambda x: jax.device_put(x.array() if isinstance(x, StoredView) else x, whole), params)


def joined(path: tuple[Any, ...]) -> str:
    """A parameter's path as text, `layers_0/attention/q/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def bytes_by_device(config: ModelConfig, mesh: Mesh, shapes: Mapping[str, Any]) -> int:
    """Bytes of the weights that one device of the mesh holds; `shapes` are those of the laid out config."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        is_split = any(axis is not None for axis in weight_spec(joined(path), config, mesh.shape[MODEL]))
        total += math.prod(leaf.shape) * leaf.dtype.itemsize // (mesh.shape[MODEL] if is_split else 1)
    return total


def cache_share(config: ModelConfig, mesh: Mesh | None) -> int:
    """Over how many devices a model's cache is split."""
    if mesh is None:
        return 1
    return mesh.shape[DATA] * (mesh.shape[MODEL] if splits(config, mesh.shape[MODEL], "heads") else 1)


def _is_vocabulary(path: str) -> bool:
    return path in ("embed/embedding", "head/kernel")


def _is_kv(path: str) -> bool:
    return any(part in path for part in ("attention/k/", "attention/v/"))
