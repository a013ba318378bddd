"""One step of training: gradients over a batch in turns, clipping, AdamW; pure, jitted, its state donated.

The step guards itself: where loss or gradient are not finite, nothing of the batch is applied, and no later batch
either, so that whoever reads the metrics one step late still finds the state as it was before that batch.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache
from specinfer_jax.models.transformer import forward
from train.losses import LossKind, chunk_tokens, loss_sums
from train.packing import PackedBatch, segment_words
from train.parts import head_part, merge_params
from train.settings import OptimiserSettings, TrainSettings
from train.token_losses import Sums, Targets

DATA_AXIS = "data"
"""Mesh axis over which the rows of a batch are split."""


class TrainBatch(NamedTuple):
    """A batch on its way into the step: numpy arrays, or arrays on the devices."""

    token_RT: Int32[Any, "R T"]
    """What the model reads."""
    position_RT: Int32[Any, "R T"]
    """Positions, from 0 in every segment."""
    segment_RT: Int32[Any, "R T"]
    """Which answer a token belongs to; 0 is padding."""
    target_RT: Int32[Any, "R T"]
    """Next tokens."""
    weight_RT: Float32[Any, "R T"]
    """0 where there is no target; 1, or the weight of the sample."""
    teacher_id_RTk: Int32[Any, "R T k"] | None = None
    """The teacher's likeliest ids."""
    teacher_logprob_RTk: Float32[Any, "R T k"] | None = None
    """Their log-probabilities."""


class TrainState(NamedTuple):
    """All that changes in training; what a checkpoint holds."""

    step: Int32[Array, ""]
    """Batches applied."""
    params: Any
    """Parameters under training, float32."""
    optimiser: Any
    """Optax's state."""
    healthy: Bool[Array, ""]
    """False from the first batch on whose loss or gradient was not finite; it and later ones are not applied."""


class Metrics(NamedTuple):
    """What a step tells, as float32 numbers."""

    loss: Float32[Array, ""]
    """Minimised: weighted losses by the weight of all targets."""
    cross_entropy: Float32[Array, ""]
    """Per target that the head has a row for, in nats."""
    kl: Float32[Array, ""]
    """Divergence from the teacher per target, in nats."""
    top_1: Float32[Array, ""]
    """Share of targets that were the likeliest token."""
    targets: Float32[Array, ""]
    """Targets of the batch."""
    outside: Float32[Array, ""]
    """Those that a reduced head has no row for."""
    gradient_norm: Float32[Array, ""]
    """Before clipping."""
    learning_rate: Float32[Array, ""]
    """Of this step."""
    healthy: Bool[Array, ""]
    """The batch was applied."""


def train_batch(packed: PackedBatch, *, weight_RT: np.ndarray | None = None) -> TrainBatch:
    """A packed batch with weights: those given, where there is a target; else 1."""
    weight = packed.is_target_RT.astype(np.float32)
    return TrainBatch(*packed[:4], weight if weight_RT is None else weight * weight_RT.astype(np.float32))


def hidden(params: Any, batch: TrainBatch, config: ModelConfig) -> Float[Array, "D N"]:
    """Activations before the head of all rows: the serving forward pass, with no cache and packed rows for a tree."""
    R, _ = batch.token_RT.shape
    dtype = params["embed"]["embedding"].dtype
    no_pages = (jnp.zeros((config.num_kv_heads, 0, 1, config.head_size), dtype),) * config.num_layers
    cache = KVCache(no_pages, no_pages, jnp.zeros((R, 0), jnp.int32), jnp.zeros((R,), jnp.int32))
    words_RTC = segment_words(batch.segment_RT)
    x_DN, _ = forward(
        params, batch.token_RT, batch.position_RT, cache, words_RTC, config=config, implementation="xla"
    )  # fmt: skip
    return x_DN


def cast(params: Any, dtype: DTypeLike) -> Any:
    """Floating-point leaves in another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params)


def compute_dtype(name: str) -> np.dtype:
    """The dtype of activations; "auto" is bfloat16 on TPU and NVIDIA sm_80 or newer, else float32."""
    if name != "auto":
        return jnp.dtype(name)
    device = jax.devices()[0]
    is_fast = device.platform == "tpu" or float(getattr(device, "compute_capability", 0) or 0) >= 8
    return jnp.dtype(jnp.bfloat16 if is_fast else jnp.float32)


def learning_rate(settings: OptimiserSettings, steps: int) -> optax.Schedule:
    """Linear warm-up whose first step counts already, then a cosine that ends with the last step."""
    peak, warmup = settings.learning_rate, min(settings.warmup, steps - 1)
    first = peak / (warmup + 1)
    return optax.warmup_cosine_decay_schedule(first, peak, warmup, steps, peak * settings.final_share)


def make_optimiser(settings: OptimiserSettings, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW; biases and norms do not decay."""
    adam = optax.adamw(
        learning_rate(settings, steps), settings.b1, settings.b2, settings.epsilon, weight_decay=settings.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), adam) if settings.clip_norm else adam


def data_mesh(devices: int) -> Mesh:
    """The first so many devices, all for 0, along the data axis."""
    return Mesh(np.array(jax.devices()[: devices or None]), (DATA_AXIS,))


def on_all(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """The first axis split."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS))


def initial_state(trained: Mapping[str, Any], settings: TrainSettings) -> TrainState:
    """The state before the first batch; arrays are copied, since the step overwrites them."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), dict(trained))
    optimiser = make_optimiser(settings.optimiser, settings.run.steps).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimiser, jnp.ones((), bool))


def make_step(
    config: ModelConfig, settings: TrainSettings, mesh: Mesh, *, rows: int, tokens: int
) -> Callable[[TrainState, Any, TrainBatch], tuple[TrainState, Metrics]]:
    """The jitted step `(state, frozen, batch) -> (state, metrics)`; the state is donated.

    `frozen` is in the compute dtype; the batch's rows are split over the mesh, which must divide rows / accumulate.
    """
    optimiser = make_optimiser(settings.optimiser, settings.run.steps)
    schedule = learning_rate(settings.optimiser, settings.run.steps)
    turns = settings.optimiser.accumulate
    kind = loss_kind(config, settings, mesh, tokens=rows * tokens // turns)
    sums_of = functools.partial(_sums, kind=kind, remat=settings.run.remat)

    def step(state: TrainState, frozen: Any, batch: TrainBatch) -> tuple[TrainState, Metrics]:
        slopes, sums = _gradient(sums_of, state.params, frozen, batch, turns)
        weight = batch.weight_RT.sum()
        share = jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0)
        slopes = jax.tree.map(lambda slope: slope * share, slopes)
        loss, norm = sums.loss * share, _norm(slopes)
        healthy = state.healthy & jnp.isfinite(loss) & jnp.isfinite(norm)
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        metrics = Metrics(
            loss, _ratio(sums.ce, sums.inside), sums.kl * share, _ratio(sums.hits, sums.targets), sums.targets,
            sums.outside, norm, rate, healthy,
        )  # fmt: skip

        def apply(params: Any, inner: Any) -> tuple[Any, Any]:
            changes, inner = optimiser.update(slopes, inner, params)
            return optax.apply_updates(params, changes), inner

        params, inner = jax.lax.cond(
            healthy, apply, lambda params, inner: (params, inner), state.params, state.optimiser
        )
        return TrainState(state.step + healthy, params, inner, healthy), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=on_all(mesh))


def loss_kind(config: ModelConfig, settings: TrainSettings, mesh: Mesh, *, tokens: int) -> LossKind:
    """The losses that settings ask for; `tokens` go through the model at a time, on all devices together."""
    vocab_size = config.output_vocab_size or config.vocab_size
    chunk = chunk_tokens(tokens // mesh.size, vocab_size=vocab_size, logits_mb=settings.loss.logits_mb)
    dtype = compute_dtype(settings.run.compute_dtype)
    return LossKind(config, settings.loss.cross_entropy, settings.loss.kl, chunk, mesh.size, dtype)


def _sums(trained: Any, frozen: Any, batch: TrainBatch, *, kind: LossKind, remat: bool) -> Sums:
    activations = functools.partial(hidden, config=kind.config)
    if remat:
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        activations = jax.checkpoint(activations, policy=policy)  # type: ignore[assignment]
    x_DN = activations(merge_params(cast(trained, kind.dtype), frozen), batch)
    tied = kind.config.tied_head
    targets = Targets(batch.target_RT, batch.weight_RT, batch.teacher_id_RTk, batch.teacher_logprob_RTk)
    return loss_sums(head_part(trained, tied=tied), head_part(frozen, tied=tied), x_DN, targets, kind)


def _gradient(
    sums_of: Callable[..., Sums], params: Any, frozen: Any, batch: TrainBatch, turns: int
) -> tuple[Any, Sums]:
    """Derivatives of the summed loss, and all sums, over the batch in `turns` turns."""

    def of(part: TrainBatch) -> tuple[Any, Sums]:
        def loss(params: Any) -> tuple[Array, Sums]:
            sums = sums_of(params, frozen, part)
            return sums.loss, sums

        return jax.grad(loss, has_aux=True)(params)

    if turns == 1:
        return of(batch)
    # Every turn takes each turns-th row, so that a mesh that splits the rows splits every turn.
    parts = jax.tree.map(lambda leaf: jnp.moveaxis(leaf.reshape(-1, turns, *leaf.shape[1:]), 1, 0), batch)
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(of, batch))

    def add(total: Any, part: TrainBatch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of(part)), None

    return jax.lax.scan(add, start, parts)[0]


def _norm(tree: Any) -> Array:
    """Of all leaves together."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.zeros((), jnp.float32)))


def _ratio(part: Array, whole: Array) -> Array:
    """part / whole, and 0 for 0 / 0."""
    return part / jnp.maximum(whole, 1e-9)
