"""Weights in host memory, streamed to the device layer by layer (SpecInfer, section 6.4: OPT-30B on one GPU).

    host      w0  w1  w2  w3 ...
    device        | x = layer(w1, x)   |   x = layer(w2, x)   |      two layers at a time: the one that computes
                  | copy w2            |   copy w3            |      and the next one, which arrives meanwhile

The compiler sees no dependence between copies and would start all of them at once; so each layer is one branch of a
conditional (`read_first`) whose condition it cannot foresee: what is inside begins when the branch begins. Measured by
compiling for TPU v5e: two layers of temporaries, against all of them without branches (docs/log.md).
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Bool, Float

from specinfer_jax.models.kv_cache import read_first
from specinfer_jax.models.transformer import RESIDENT, LayerRun, Params, WeightAccess
from specinfer_jax.notation import LayerKV


def to_device(weights: Any) -> Any:
    """Copies in the device's own memory, split over devices as they are."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), weights)


def run_streamed(
    layer: LayerRun, params: Params, x_DT: Float[Array, "D T"], num_layers: int, condition: Bool[Array, ""]
) -> tuple[Float[Array, "D T"], tuple[LayerKV, ...]]:
    """All layers in turn; while one computes, the next one's weights are on their way."""
    weights = read_first(condition, lambda: to_device(params["layers_0"]))
    rows = []
    for l in range(num_layers):
        # Bound as defaults: the names move on with the loop.
        def one(x_DT: Array = x_DT, weights: Any = weights, l: int = l) -> tuple[Array, LayerKV, Any]:
            following = to_device(params[f"layers_{l + 1}"]) if l + 1 < num_layers else ()
            x_DT, new = layer(l, weights, x_DT)
            return x_DT, new, following

        x_DT, new, weights = read_first(condition, one)
        rows.append(new)
    return x_DT, tuple(rows)


def use_streamed(weights: Params, compute: Callable[..., Any], x: Array, condition: Bool[Array, ""]) -> Any:
    """`compute(weights, x)` with weights that are on the device for that long."""
    # The barrier, since XLA refuses branches of which one ends in a sharding constraint and the other does not.
    return read_first(condition, lambda: jax.lax.optimization_barrier(compute(to_device(weights), x)))


STREAMED = WeightAccess(run_streamed, use_streamed)
"""How the decoder gets at weights in host memory."""


def weight_access(offloads: bool) -> WeightAccess:
    """Of an LLM that is offloaded or not."""
    return STREAMED if offloads else RESIDENT
