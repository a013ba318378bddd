"""Who holds what on a mesh of devices: one rules object from logical axes to the mesh's axes "data" and "model".

    data    slots, and the cache's pages with them: every group of devices along it decodes requests of its own
    model   heads, MLP columns and the vocabulary of the LLM (Megatron's column and row split); an SSM is whole

"model" is left to the compiler: weights are placed, activations are constrained at a few places, and it puts two
all-reduces into every layer. "data" is not: `placement.py` hands every group its own slots, so groups exchange nothing.
Without a mesh (`jax.set_mesh`, `use_abstract_mesh`) every function here does nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig

DATA, MODEL = "data", "model"
"""Axes of every mesh, in this order."""
WHOLE = PartitionSpec()
"""A copy on every device."""

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis; a new layout is one edit here."""

    axes: Mapping[str, str]
    """Logical axes that are split, and over what."""

    def spec(self, *logical: str | None) -> PartitionSpec:
        """How an array with these axes lies on the mesh; None: not split.

        Raises:
          ValueError: an axis is unknown, or two of the array's axes claim the same axis of the mesh.
        """
        unknown = [name for name in logical if name is not None and name not in self.axes]
        if unknown:
            raise ValueError(f"unknown logical axis {unknown[0]!r}; known are {', '.join(self.axes)}")
        found = [None if name is None else self.axes[name] for name in logical]
        used = [axis for axis in found if axis is not None]
        if len(set(used)) < len(used):
            raise ValueError(f"axes {logical} would split an array twice over one axis of the mesh: {used}")
        return PartitionSpec(*found)


RULES = Rules({"slots": DATA, "pages": DATA, "heads": MODEL, "mlp": MODEL, "vocab": MODEL})
"""The layout of the project."""

WEIGHT_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    *((f"attention/{name}/kernel", ("heads", None)) for name in "qkv"),
    *((f"attention/{name}/bias", ("heads",)) for name in "qkv"),
    ("attention/out/kernel", (None, "heads")),
    *((f"mlp/{name}/kernel", ("mlp", None)) for name in ("gate", "up")),
    *((f"mlp/{name}/bias", ("mlp",)) for name in ("gate", "up")),
    ("mlp/down/kernel", (None, "mlp")),
    ("embed/embedding", ("vocab", None)),
    ("head/kernel", ("vocab", None)),
)
"""Logical axes of a parameter by the end of its path; what is not named (norms, positions) is whole."""


def make_mesh(data: int, model: int, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of the first `data * model` devices.

    Raises:
      ConfigError: there are fewer.
    """
    devices = jax.devices() if devices is None else devices
    if data * model > len(devices):
        raise ConfigError(
            f"mesh data={data},model={model} needs {data * model} devices and there are {len(devices)}; on CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={data * model} makes as many"
        )
    grid = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def split_config(config: ModelConfig, model: int) -> ModelConfig:
    """The config of the same model as it is laid out over `model` devices.

    The vocabulary grows to a multiple of them, by ids that are never likely. KV heads that are fewer than devices are
    repeated until every device has one; where they neither divide nor are divided, attention is computed whole.
    """
    if model == 1:
        return config
    H, G = config.num_heads, config.num_kv_heads
    repeats = G % model != 0 and model % G == 0 and H % model == 0
    padding = -config.vocab_size % model
    return dataclasses.replace(
        config,
        vocab_size=config.vocab_size + padding,
        num_padding_ids=config.num_padding_ids + padding,
        num_kv_heads=model if repeats else G,
    )


def splits(config: ModelConfig, model: int, axis: str | None) -> bool:
    """Whether `model` devices share a logical axis of this (laid out) config."""
    sizes = {"heads": config.num_kv_heads, "mlp": config.mlp_width, "vocab": config.vocab_size}
    return axis in sizes and sizes[axis] % model == 0


def weight_spec(path: str, config: ModelConfig, model: int) -> PartitionSpec:
    """How one parameter (`layers_0/attention/q/kernel`) of a laid out config lies on the mesh."""
    axes = next((axes for end, axes in WEIGHT_AXES if path.endswith(end)), ())
    return RULES.spec(*(axis if splits(config, model, axis) else None for axis in axes))


def mesh_axes() -> dict[str, int]:
    """Sizes of the axes of the mesh around this trace that the compiler may split over; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    return {name: size for name, size in mesh.shape.items() if name not in mesh.manual_axes}


def constrain(x: Array, *logical: str | None) -> Array:
    """The same array, laid out by the rules as far as its sizes divide; each axis not named is whole."""
    free = mesh_axes()
    if MODEL not in free:
        return x
    wanted = RULES.spec(*logical)
    spec = [
        axis if axis is not None and axis in free and size % free[axis] == 0 else None
        for axis, size in zip(wanted, x.shape, strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def whole_on_each_device(run: Callable[..., Result]) -> Callable[..., Result]:
    """`run` without any split: each device computes all of it from whole arguments, and they exchange nothing."""
    free = set(mesh_axes())
    if not free:
        return run
    mesh = jax.sharding.get_abstract_mesh()
    return jax.shard_map(run, mesh=mesh, axis_names=free, in_specs=WHOLE, out_specs=WHOLE, check_vma=False)


def any_slot(flag_B: Bool[Array, " B"]) -> Bool[Array, ""]:
    """Whether the flag is set in any slot, those of other groups of devices included."""
    mesh = jax.sharding.get_abstract_mesh()
    found = flag_B.any()
    if mesh.empty or DATA not in mesh.manual_axes or MODEL in mesh.manual_axes:
        return found
    return jax.lax.psum(found.astype(jnp.int32), DATA) > 0


def top_k(x_TV: Float[Array, "T V"], k: int) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
    """`jax.lax.top_k` over a vocabulary that may be split: each device ranks its own part, then the winners meet."""
    free = mesh_axes()
    devices = free.get(MODEL, 1)
    V = x_TV.shape[1]
    if devices == 1 or V % devices:
        best_Tk, id_Tk = jax.lax.top_k(x_TV, k)
        return best_Tk, id_Tk

    def rank(part_Tv: Array) -> tuple[Array, Array]:
        best_Tk, id_Tk = jax.lax.top_k(part_Tv, min(k, V // devices))
        id_Tk = id_Tk + jax.lax.axis_index(MODEL) * (V // devices)
        # In the order of the parts, so that of equal entries the lowest id comes first, as without a split.
        best_TX = jax.lax.all_gather(best_Tk, MODEL, axis=1, tiled=True)
        id_TX = jax.lax.all_gather(id_Tk, MODEL, axis=1, tiled=True)
        best_Tk, place_Tk = jax.lax.top_k(best_TX, k)
        return best_Tk, jnp.take_along_axis(id_TX, place_Tk, axis=1)

    split = PartitionSpec(None, MODEL)
    mesh = jax.sharding.get_abstract_mesh()
    # Fully manual where "data" is free too: rows are whole there.
    return jax.shard_map(rank, mesh=mesh, axis_names=set(free), in_specs=split, out_specs=WHOLE, check_vma=False)(x_TV)
