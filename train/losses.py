"""The vocabulary head with its losses, summed over a batch; logits exist only for a chunk of tokens at a time.

The gradient is computed with the loss, chunk by chunk (it is q times a number, changed at k + 1 rows), so that a
training step makes every chunk's logits once; and only tokens with a target go through the head, in front of the
others by a permutation within each device's share of the rows:

    device 0   x x x . x x . | .          device 1   x x x . . . . | .        3 chunks of 2 tokens each, not 4

Letters: R rows, T tokens of a row, N = R * T, g devices (groups), t = N / g tokens of a group, n tokens of a chunk (of
all groups), k of the teacher's ids, V head rows.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import vocabulary_logits
from train.parts import merge_params
from train.token_losses import Sums, Targets, head_rows, rows_of, token_losses

_LEAST_CHUNKS = 8
"""So many at least, or the last one would hold many tokens without a target."""


class LossKind(NamedTuple):
    """The static side of the losses."""

    config: ModelConfig
    """The SSM."""
    cross_entropy: float
    """Weight of the cross-entropy."""
    kl: float
    """Weight of the divergence."""
    chunk: int
    """Tokens of every group that go through the head at a time; divides t."""
    groups: int
    """Devices that share the rows."""
    dtype: DTypeLike
    """Of the head's product; its sums, logits and gradients are float32."""


def chunk_tokens(tokens: int, *, vocab_size: int, logits_mb: int) -> int:
    """The largest divisor of a group's tokens, at most an eighth of them, whose float32 logits take `logits_mb` MiB."""
    most = max(1, min(tokens // _LEAST_CHUNKS, (logits_mb << 20) // (4 * vocab_size)))
    return max(c for c in range(1, most + 1) if tokens % c == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def loss_sums(
    trained: Mapping[str, Any], frozen: Mapping[str, Any], x_DN: Float[Array, "D N"], targets: Targets, kind: LossKind
) -> Sums:
    """Sums of the losses; differentiable in `trained` and `x_DN`, in reverse, through `Sums.loss`.

    Args:
      trained: float32 parameters of the head that have a gradient (`parts.head_part`).
      frozen: the others.
      x_DN: activations before the head, row after row.
      targets: what to foresee.
      kind: which losses, over which head.

    Returns:
      Sums in float32, finite for any mask; divide them by the global sum of weights, never by a device's own.
    """
    rows = head_rows(frozen, kind.config)
    order = _targets_first(targets, kind)
    x_Dgt, sorted_targets = _sorted(x_DN, targets, order)

    def add(i: Array, total: Sums) -> Sums:
        x_Dn, chunk = _chunk(i, x_Dgt, sorted_targets, kind)
        sums, _ = _losses(_logits(trained, frozen, x_Dn, kind), chunk, rows, kind)
        return jax.tree.map(jnp.add, total, sums)

    return jax.lax.fori_loop(0, order.chunks, add, _no_sums())


def _with_slopes(
    trained: Mapping[str, Any], frozen: Mapping[str, Any], x_DN: Float[Array, "D N"], targets: Targets, kind: LossKind
) -> tuple[Sums, Any]:
    """The sums, and the derivatives of `Sums.loss` for the backward pass."""
    rows = head_rows(frozen, kind.config)
    order = _targets_first(targets, kind)
    x_Dgt, sorted_targets = _sorted(x_DN, targets, order)

    def add(i: Array, total: Any) -> Any:
        sums, slopes, slope_Dgt = total
        x_Dn, chunk = _chunk(i, x_Dgt, sorted_targets, kind)
        logits_Vn, pull = jax.vjp(lambda own, x_Dn: _logits(own, frozen, x_Dn, kind), trained, x_Dn)
        new_sums, slope_Vn = _losses(logits_Vn, chunk, rows, kind)
        new_slopes, slope_Dn = pull(slope_Vn)
        sums, slopes = jax.tree.map(jnp.add, (sums, slopes), (new_sums, new_slopes))
        slope_Dgc = slope_Dn.reshape(-1, kind.groups, kind.chunk)
        return sums, slopes, jax.lax.dynamic_update_slice_in_dim(slope_Dgt, slope_Dgc, i * kind.chunk, axis=2)

    start = _no_sums(), jax.tree.map(jnp.zeros_like, trained), jnp.zeros_like(x_Dgt)
    sums, slopes, slope_Dgt = jax.lax.fori_loop(0, order.chunks, add, start)
    slope_DN = jnp.take_along_axis(slope_Dgt, jnp.argsort(order.index_gt)[None], axis=2).reshape(x_DN.shape)
    return sums, (slopes, slope_DN)


def _scale_slopes(_: LossKind, slopes: Any, scale: Sums) -> tuple[Any, None, Any, None]:
    trained, x_DN = jax.tree.map(lambda slope: (slope * scale.loss).astype(slope.dtype), slopes)
    return trained, None, x_DN, None


loss_sums.defvjp(_with_slopes, _scale_slopes)


def token_scores(
    head: Mapping[str, Any], x_DN: Float[Array, "D N"], id_RT: Int32[Array, "R T"], kind: LossKind
) -> tuple[Float32[Array, "R T"], Int32[Array, "R T"]]:
    """Cross-entropy of every token, and how many ids come before it in the order of probability (ties by id).

    A token without a row in a reduced head has cross-entropy NaN and rank V.
    """
    rows = head_rows(head, kind.config)
    targets = Targets(id_RT, jnp.ones(id_RT.shape, jnp.float32))
    order = _Order(jnp.arange(id_RT.size, dtype=jnp.int32).reshape(kind.groups, -1) % (id_RT.size // kind.groups), 0)
    x_Dgt, sorted_targets = _sorted(x_DN, targets, order)

    def score(i: Array) -> tuple[Array, Array]:
        x_Dn, chunk = _chunk(i, x_Dgt, sorted_targets, kind)
        logits_Vn = _logits({}, head, x_Dn, kind)
        row_n, is_inside_n = rows_of(chunk.id_RT.reshape(-1), rows)
        of_target_1n = jnp.take_along_axis(logits_Vn, row_n[None], axis=0)
        before_Vn = (logits_Vn > of_target_1n) | (
            (logits_Vn == of_target_1n) & (jnp.arange(logits_Vn.shape[0])[:, None] < row_n[None])
        )
        ce_n = jax.nn.logsumexp(logits_Vn, axis=0) - of_target_1n[0]
        rank_n = before_Vn.sum(axis=0, dtype=jnp.int32)
        return jnp.where(is_inside_n, ce_n, jnp.nan), jnp.where(is_inside_n, rank_n, logits_Vn.shape[0])

    scores = jax.lax.map(score, jnp.arange(x_Dgt.shape[2] // kind.chunk, dtype=jnp.int32))
    ce_RT, rank_RT = jax.tree.map(
        lambda leaf_in: jnp.moveaxis(leaf_in.reshape(-1, kind.groups, kind.chunk), 0, 1).reshape(id_RT.shape), scores
    )
    return ce_RT, rank_RT


def _logits(
    trained: Mapping[str, Any], frozen: Mapping[str, Any], x_Dn: Float[Array, "D n"], kind: LossKind
) -> Float32[Array, "V n"]:
    trained = jax.tree.map(lambda leaf: leaf.astype(kind.dtype), trained)
    no_embedding = {"embedding": jnp.zeros((0, 0), kind.dtype)}  # a head of its own reads none
    head = {"head": {}, "embed": no_embedding} | merge_params(trained, frozen)
    return vocabulary_logits(head, x_Dn, config=kind.config)


def _losses(
    logits_Vn: Float32[Array, "V n"], targets: Targets, rows: Int32[Array, " ids"] | None, kind: LossKind
) -> tuple[Sums, Array]:
    return token_losses(logits_Vn, targets, rows, cross_entropy=kind.cross_entropy, kl=kind.kl)


def _no_sums() -> Sums:
    return Sums(*(jnp.zeros((), jnp.float32) for _ in Sums._fields))


class _Order(NamedTuple):
    """A permutation of the tokens of every group."""

    index_gt: Int32[Array, "g t"]
    """Which token comes where."""
    chunks: Any
    """How many chunks hold all targets."""


def _targets_first(targets: Targets, kind: LossKind) -> _Order:
    has_target_gt = (targets.weight_RT > 0).reshape(kind.groups, -1)
    most = has_target_gt.sum(axis=1, dtype=jnp.int32).max()
    return _Order(jnp.argsort(~has_target_gt, axis=1, stable=True), (most + kind.chunk - 1) // kind.chunk)


def _sorted(x_DN: Float[Array, "D N"], targets: Targets, order: _Order) -> tuple[Array, Targets]:
    """`[D, g, t]` activations and `[g, t(, k)]` targets in another order within every group."""
    g, t = order.index_gt.shape
    x_Dgt = jnp.take_along_axis(x_DN.reshape(-1, g, t), order.index_gt[None], axis=2)

    def moved(leaf: Array) -> Array:
        index = order.index_gt.reshape(g, t, *[1] * (leaf.ndim - 2))
        return jnp.take_along_axis(leaf.reshape(g, t, *leaf.shape[2:]), index, axis=1)

    return x_Dgt, jax.tree.map(moved, targets)


def _chunk(i: Array, x_Dgt: Float[Array, "D g t"], targets: Targets, kind: LossKind) -> tuple[Array, Targets]:
    """The i-th chunk of every group: `[D, n]` activations and `[g, chunk(, k)]` targets."""

    def cut(leaf: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, i * kind.chunk, kind.chunk, axis)

    x_Dgc = cut(x_Dgt, 2)
    return x_Dgc.reshape(x_Dgc.shape[0], -1), jax.tree.map(lambda leaf: cut(leaf, 1), targets)
