"""Losses of tokens whose logits are there, and their derivatives by every logit.

With the logits z of one token, its target y and the teacher's k likeliest ids (probabilities p, rest m = 1 - sum p):

    cross-entropy  -log q_y                                                              q = softmax(z)
    divergence     sum_k p_k log(p_k / q_k) + m log(m / q_rest)                          q_rest = 1 - sum_k q_k

The second is the KL divergence of k + 1 outcomes, "none of the k" being the last: never more than the KL of the whole
distributions, and zero only if the student gives the k ids and the rest their right shares. A reduced head cannot say
some ids. A target among them has no cross-entropy and is counted; a teacher's id among them takes its share out of
the divergence, which then compares what the head can say, scaled by the probability of that:

    s = 1 - (share of ids without a row);  divergence = sum_k p_k log(p_k / (s q_k)) + m log(m / (s q_rest))

Letters: R rows, T tokens of a row, n tokens, k of the teacher's ids, V head rows.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from specinfer_jax.models.config import ModelConfig

_LEAST_REST = 1e-6
"""Floor of q_rest: below it, float32 cannot tell it from the rounding of the sum that it is the rest of."""


class Targets(NamedTuple):
    """What the tokens of a batch are to foresee."""

    id_RT: Int32[Array, "R T"]
    """Next tokens."""
    weight_RT: Float32[Array, "R T"]
    """0 where there is no target; 1, or the weight of the sample."""
    teacher_id_RTk: Int32[Array, "R T k"] | None = None
    """The teacher's likeliest ids; an id below 0 is none."""
    teacher_logprob_RTk: Float32[Array, "R T k"] | None = None
    """Their log-probabilities under the teacher's whole distribution."""


class Sums(NamedTuple):
    """Sums over the targets of a batch; only `loss` has a gradient."""

    loss: Float32[Array, ""]
    """Weighted by sample and kind of loss; what is minimised, once divided by the sum of all `weight_RT`."""
    ce: Float32[Array, ""]
    """Cross-entropy, weighted by sample."""
    kl: Float32[Array, ""]
    """Divergence from the teacher, weighted by sample."""
    inside: Float32[Array, ""]
    """Weights of the targets that the head has a row for."""
    hits: Float32[Array, ""]
    """How many targets were the likeliest token."""
    targets: Float32[Array, ""]
    """How many targets there are."""
    outside: Float32[Array, ""]
    """How many of them the head has no row for."""


def head_rows(head: Mapping[str, Any], config: ModelConfig) -> Int32[Array, " ids"] | None:
    """The head's row of every id, -1 for an id that a reduced head lacks; None if every id is its own row."""
    if "output_ids" not in head:
        return None
    id_V = head["output_ids"]
    return jnp.full((config.vocab_size,), -1, jnp.int32).at[id_V].set(jnp.arange(id_V.size, dtype=jnp.int32))


def rows_of(id_n: Int[Array, "*n"], rows: Int32[Array, " ids"] | None) -> tuple[Array, Array]:
    """Head rows of ids (0 where there is none), and whether there is one."""
    row_n = id_n if rows is None else jnp.where(id_n >= 0, rows.at[id_n].get(mode="fill", fill_value=-1), -1)
    return jnp.maximum(row_n, 0), row_n >= 0


def token_losses(
    logits_Vn: Float32[Array, "V n"],
    targets: Targets,
    rows: Int32[Array, " ids"] | None,
    *,
    cross_entropy: float,
    kl: float,
) -> tuple[Sums, Float32[Array, "V n"]]:
    """Sums over n tokens, and the derivative of `Sums.loss` by every logit.

    Args:
      logits_Vn: of the student.
      targets: of the same tokens, in any shape that flattens to n.
      rows: what `head_rows` tells of the head.
      cross_entropy: weight of the cross-entropy.
      kl: weight of the divergence.
    """
    weight_n = targets.weight_RT.reshape(-1)
    row_n, is_inside_n = rows_of(targets.id_RT.reshape(-1), rows)
    has_target_n = weight_n > 0
    column_n = jnp.arange(weight_n.size)

    top_n = logits_Vn.max(axis=0)
    exp_Vn = jnp.exp(logits_Vn - top_n[None])
    total_n = exp_Vn.sum(axis=0)
    of_target_n = logits_Vn[row_n, column_n]
    log_total_n = top_n + jnp.log(total_n)
    ce_weight_n = jnp.where(is_inside_n, weight_n, 0)
    ce = jnp.sum(jnp.where(ce_weight_n > 0, (log_total_n - of_target_n) * ce_weight_n, 0))

    own_n = cross_entropy * ce_weight_n
    slope_rows, slope_values = row_n[None], -own_n[None]
    divergence, scale_n = jnp.zeros((), jnp.float32), own_n
    if targets.teacher_id_RTk is not None and targets.teacher_logprob_RTk is not None:
        k = targets.teacher_id_RTk.shape[-1]
        teacher = _teacher_shares(
            targets.teacher_id_RTk.reshape(-1, k).T, targets.teacher_logprob_RTk.reshape(-1, k).T, rows, has_target_n
        )
        kl_n, per_row_n, change_kn = _divergence(teacher, logits_Vn, top_n, total_n)
        divergence = jnp.sum(kl_n * weight_n)
        scale_n = own_n + kl * weight_n * per_row_n
        slope_rows = jnp.concatenate([slope_rows, teacher.row_kn])
        slope_values = jnp.concatenate([slope_values, kl * weight_n[None] * change_kn])

    slope_Vn = exp_Vn * (scale_n / total_n)[None]
    slope_Vn = slope_Vn.at[slope_rows, column_n[None]].add(slope_values)
    sums = Sums(
        loss=cross_entropy * ce + kl * divergence,
        ce=ce,
        kl=divergence,
        inside=ce_weight_n.sum(),
        hits=jnp.sum(has_target_n & is_inside_n & (of_target_n >= top_n), dtype=jnp.float32),
        targets=jnp.sum(has_target_n, dtype=jnp.float32),
        outside=jnp.sum(has_target_n & ~is_inside_n, dtype=jnp.float32),
    )
    return sums, slope_Vn


class _Shares(NamedTuple):
    """What the teacher gives to what the student's head can say."""

    row_kn: Int32[Array, "k n"]
    """Head rows of the teacher's ids; 0 for an id without one."""
    share_kn: Float32[Array, "k n"]
    """Their probabilities; 0 for an id without a row."""
    rest_n: Float32[Array, " n"]
    """Probability of all other ids."""


def _teacher_shares(
    id_kn: Int32[Array, "k n"],
    logprob_kn: Float32[Array, "k n"],
    rows: Int32[Array, " ids"] | None,
    has_target_n: Array,
) -> _Shares:
    row_kn, has_row_kn = rows_of(id_kn, rows)
    is_known_kn = (id_kn >= 0) & has_target_n[None]  # elsewhere the log-probabilities may be anything
    share_kn = jnp.where(is_known_kn, jnp.exp(jnp.where(is_known_kn, logprob_kn, 0).astype(jnp.float32)), 0)
    rest_n = jnp.where(is_known_kn.any(axis=0), jnp.maximum(1 - share_kn.sum(axis=0), 0), 0)
    return _Shares(row_kn, jnp.where(has_row_kn, share_kn, 0), rest_n)


def _divergence(
    teacher: _Shares, logits_Vn: Float32[Array, "V n"], top_n: Float32[Array, " n"], total_n: Float32[Array, " n"]
) -> tuple[Array, Array, Array]:
    """Divergence `[n]`, the factor on q in its derivative `[n]`, and what is added to that at the teacher's rows."""
    share_kn, rest_n = teacher.share_kn, teacher.rest_n
    logit_kn = jnp.take_along_axis(logits_Vn, teacher.row_kn, axis=0)
    q_kn = jnp.where(share_kn > 0, jnp.exp(logit_kn - top_n[None]) / total_n[None], 0)
    q_rest_n = jnp.maximum(1 - q_kn.sum(axis=0), _LEAST_REST)
    log_q_kn = logit_kn - (top_n + jnp.log(total_n))[None]
    said_n = share_kn.sum(axis=0) + rest_n
    kl_n = (
        jnp.sum(jnp.where(share_kn > 0, share_kn * (_log(share_kn) - log_q_kn), 0), axis=0)
        + rest_n * (_log(rest_n) - jnp.log(q_rest_n))
        - said_n * _log(said_n)
    )
    ratio_n = rest_n / q_rest_n
    return kl_n, said_n - ratio_n, q_kn * ratio_n[None] - share_kn


def _log(x: Array) -> Array:
    """log x, and 0 for x = 0, where it is multiplied with 0."""
    return jnp.log(jnp.where(x > 0, x, 1))
