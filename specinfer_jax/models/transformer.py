"""The one decoder of the project: LLM and SSMs, prefill, verification and training all run through `forward`.

Pure functional: parameters and cache come in as arguments, the K/V of the pass's rows goes out; the cache itself is
only read. The parameter tree is

    {"embed": {...}, "layers_0": {...}, ..., "layers_{L-1}": {...}, "head": {...}}
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from specinfer_jax.models.attention import Attention
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache
from specinfer_jax.models.layers import MLP, Linear, Norm, RopeAngles, matmul_precision, rope_angles
from specinfer_jax.notation import LayerKV
from specinfer_jax.parallel.sharding import constrain

Params = Mapping[str, Any]
"""Nested dict of arrays; `param_shapes` tells names and shapes."""


def _apply(module: nn.Module, params: Params, *arguments: Any) -> Any:
    """The module's result; Linen's own type would also tell of state that no module here has."""
    return module.apply({"params": params}, *arguments)


class Embed(nn.Module):
    """Token ids (and learned positions) to feature-major activations."""

    config: ModelConfig
    """Vocabulary, widths, positions."""

    @nn.compact
    def __call__(
        self, token_T: Int[Array, " T"], position_T: Int[Array, " T"], dtype: DTypeLike
    ) -> Float[Array, "D T"]:
        config = self.config
        normal = nn.initializers.normal(0.02)
        embed_width = config.embed_width or config.width
        embedding_VE = self.param("embedding", normal, (config.vocab_size, embed_width), dtype)
        x_DT = constrain(embedding_VE[token_T].T, None, None)
        if config.embed_width is not None:
            x_DT = Linear(config.width, name="project_in")(x_DT)
        if config.rope is None:
            rows = config.max_position + config.learned_position_offset
            position_RD = self.param("position", normal, (rows, config.width), dtype)
            x_DT = x_DT + position_RD[position_T + config.learned_position_offset].T
        return x_DT


class DecoderLayer(nn.Module):
    """Attention and MLP with their residuals, normalised before (or, OPT-350m, after) each."""

    config: ModelConfig
    """What the layer computes."""
    implementation: str | None = None
    """Attention kernel; None picks."""

    @nn.compact
    def __call__(
        self,
        x_DT: Float[Array, "D T"],
        angles: RopeAngles | None,
        earlier: LayerKV | None,
        k_pages: Float[Array, "G P Z K"],
        v_pages: Float[Array, "G P Z K"],
        block_table: Int[Array, "B pages"],
        prefix_len_B: Int[Array, " B"],
        ancestors_BQC: UInt32[Array, "B Q C"],
    ) -> tuple[Float[Array, "D T"], LayerKV]:
        config = self.config
        attention = Attention(config, self.implementation, name="attention")
        attention_norm, mlp_norm = Norm(config, name="attention_norm"), Norm(config, name="mlp_norm")
        mlp = MLP(config, name="mlp")
        normed_DT = attention_norm(x_DT) if config.norm_first else x_DT
        out_DT, new = attention(normed_DT, angles, earlier, k_pages, v_pages, block_table, prefix_len_B, ancestors_BQC)
        # On a mesh the two sums over devices are here: every device goes on with the whole activations.
        x_DT = x_DT + constrain(out_DT, None, None)
        if config.norm_first:
            return x_DT + constrain(mlp(mlp_norm(x_DT)), None, None), new
        x_DT = attention_norm(x_DT)
        return mlp_norm(x_DT + constrain(mlp(x_DT), None, None)), new


class Head(nn.Module):
    """Final norm and vocabulary head; logits are float32."""

    config: ModelConfig
    """Norm, projection, tying."""

    @nn.compact
    def __call__(self, x_DT: Float[Array, "D T"], embedding_VE: Float[Array, "V E"] | None) -> Float[Array, "ids T"]:
        config = self.config
        if config.final_norm:
            x_DT = Norm(config, name="norm")(x_DT)
        if config.embed_width is not None:
            x_DT = Linear(config.embed_width, name="project_out")(x_DT)
        if not config.tied_head:
            shape = (config.output_vocab_size or config.vocab_size, x_DT.shape[0])
            embedding_VE = self.param("kernel", nn.initializers.normal(0.02), shape, x_DT.dtype)
        assert embedding_VE is not None, "a tied head needs the embedding"
        logits_VT = jnp.matmul(
            embedding_VE, x_DT, precision=matmul_precision(x_DT.dtype), preferred_element_type=jnp.float32
        )
        logits_VT = constrain(logits_VT, "vocab", None)
        if config.num_padding_ids:
            is_id_V1 = jnp.arange(config.vocab_size)[:, None] < config.vocab_size - config.num_padding_ids
            logits_VT = jnp.where(is_id_V1, logits_VT, -jnp.inf)
        # The barrier keeps a caller's transpose out of the product: XLA's CPU backend runs no transposed one from
        # bfloat16 to float32.
        return jax.lax.optimization_barrier(logits_VT) if x_DT.dtype != jnp.float32 else logits_VT


LayerRun = Callable[[int, Params, Array], tuple[Array, LayerKV]]
"""One layer of a pass: its number, its parameters, the activations; gives activations and its rows' K/V."""


def run_in_turn(
    layer: LayerRun, params: Params, x_DT: Float[Array, "D T"], num_layers: int, condition: Bool[Array, ""]
) -> tuple[Float[Array, "D T"], tuple[LayerKV, ...]]:
    """All layers, one after the other, with the parameters as they are."""
    rows = []
    for l in range(num_layers):
        x_DT, new = layer(l, params[f"layers_{l}"], x_DT)
        rows.append(new)
    return x_DT, tuple(rows)


class WeightAccess(NamedTuple):
    """How a pass gets at parameters; offloading has another one (parallel/offload.py)."""

    run_layers: Callable[[LayerRun, Params, Array, int, Array], tuple[Array, tuple[LayerKV, ...]]]
    """Runs all layers; the last argument is a flag that is true, but only at run time."""
    use: Callable[[Params, Callable[..., Any], Array, Array], Any]
    """Calls a function with embedding or head, and an array; last the flag."""


RESIDENT = WeightAccess(run_in_turn, lambda weights, compute, x, _: compute(weights, x))
"""Parameters lie where the pass runs."""


def forward(
    params: Params,
    token_BQ: Int[Array, "B Q"],
    position_BQ: Int[Array, "B Q"],
    cache: KVCache,
    ancestors_BQC: UInt32[Array, "B Q C"],
    *,
    config: ModelConfig,
    earlier: tuple[LayerKV, ...] | None = None,
    prompt_len_B: Int[Array, " B"] | None = None,
    implementation: str | None = None,
    access: WeightAccess = RESIDENT,
) -> tuple[Float[Array, "D T"], tuple[LayerKV, ...]]:
    """Run all layers on Q rows of every slot against the cached prefix and the rows so far.

    Args:
      params: the parameter tree.
      token_BQ: int32 ids.
      position_BQ: int32 position of every row in its own context (prefix length + depth, never the row's index).
      cache: read, not written.
      ancestors_BQC: uint32 bit-words; bit k of row i: row k (of `earlier` + this pass) is row i or an ancestor of it.
      config: what to compute.
      earlier: K/V of tree rows that previous passes computed, in row order.
      prompt_len_B: prompt lengths, only read by dynamic rope scaling.
      implementation: attention kernel; None picks.
      access: how parameters are got at.

    Returns:
      `[D, B*Q]` activations before the head, and per layer the K/V of this pass's rows.
    """
    position_T = position_BQ.reshape(-1)
    length_BQ = position_BQ + 1
    if prompt_len_B is not None:
        length_BQ = jnp.maximum(length_BQ, prompt_len_B[:, None])
    dtype = params["embed"]["embedding"].dtype
    is_true = position_T[0] >= 0
    x_DT = access.use(
        params["embed"], lambda weights, token_T: _apply(Embed(config), weights, token_T, position_T, dtype),
        token_BQ.reshape(-1), is_true,
    )  # fmt: skip
    angles = rope_angles(config, position_T, length_BQ.reshape(-1))

    def layer(l: int, weights: Params, x_DT: Array) -> tuple[Array, LayerKV]:
        return _run_layer(
            weights, x_DT, angles, None if earlier is None else earlier[l],
            cache.k_pages[l], cache.v_pages[l], cache.block_table, cache.length_B, ancestors_BQC,
            config=config, implementation=implementation,
        )  # fmt: skip

    return access.run_layers(layer, params, x_DT, config.num_layers, is_true)


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def _run_layer(
    params: Params, *arguments: Any, config: ModelConfig, implementation: str | None
) -> tuple[Float[Array, "D T"], LayerKV]:
    """One layer; jitted so that equal layers are traced once (the compiler inlines it again)."""
    return _apply(DecoderLayer(config, implementation), params, *arguments)


def vocabulary_logits(
    params: Params, x_DT: Float[Array, "D T"], *, config: ModelConfig, access: WeightAccess = RESIDENT
) -> Float[Array, "V T"]:
    """Float32 logits of every column; vocabulary-major, as the matmul leaves them."""
    head = {"head": params["head"]} | ({"embedding": params["embed"]["embedding"]} if config.tied_head else {})

    def logits(weights: Params, x_DT: Array) -> Array:
        return _apply(Head(config), weights["head"], x_DT, weights.get("embedding"))

    # True, NaN included; a square that is below 0 the compiler would see through.
    return access.use(head, logits, x_DT, ~(jnp.abs(x_DT[0, 0]) < -1))


def init_params(config: ModelConfig, key: Array, *, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters of a model that is not loaded from a file (tests, training from scratch)."""
    keys = jax.random.split(key, config.num_layers + 2)
    layers = {f"layers_{l}": _init_layer(keys[l + 1], config, dtype) for l in range(config.num_layers)}
    return {"embed": _init_embed(keys[0], config, dtype), **layers, "head": _init_head(keys[-1], config, dtype)}


# Flax runs a module to initialise it. Under jit the compiler sees that nobody wants what it computes.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _init_embed(key: Array, config: ModelConfig, dtype: DTypeLike) -> Params:
    zero_1 = jnp.zeros((1,), jnp.int32)
    return Embed(config).init(key, zero_1, zero_1, dtype)["params"]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init_layer(key: Array, config: ModelConfig, dtype: DTypeLike) -> Params:
    zero_11, x_D1 = jnp.zeros((1, 1), jnp.int32), jnp.zeros((config.width, 1), dtype)
    pages = jnp.zeros((config.num_kv_heads, 1, 1, config.head_size), dtype)
    angles = rope_angles(config, zero_11[0], zero_11[0] + 1)
    return DecoderLayer(config, "xla").init(
        key, x_D1, angles, None, pages, pages, zero_11, zero_11[0], jnp.ones((1, 1, 1), jnp.uint32)
    )["params"]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init_head(key: Array, config: ModelConfig, dtype: DTypeLike) -> Params:
    embedding = jnp.zeros((config.vocab_size, config.embed_width or config.width), dtype)
    variables: dict[str, Params] = dict(Head(config).init(key, jnp.zeros((config.width, 1), dtype), embedding))
    return variables.get("params", {})


def param_shapes(config: ModelConfig, *, dtype: DTypeLike = jnp.float32) -> Params:
    """Names, shapes and dtypes of the parameter tree as `jax.ShapeDtypeStruct`; allocates nothing."""
    one = dataclasses.replace(config, num_layers=1)  # layers are alike, and each takes a while to trace
    shapes = jax.eval_shape(lambda key: init_params(one, key, dtype=dtype), jax.random.key(0))
    layers = {f"layers_{l}": jax.tree.map(lambda x: x, shapes["layers_0"]) for l in range(config.num_layers)}
    return {"embed": shapes["embed"], **layers, "head": shapes["head"]}
