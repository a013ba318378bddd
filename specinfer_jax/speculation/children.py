"""How an SSM's children are chosen: its likeliest tokens, or draws from its distribution.

Draws come from the SSM's C likeliest ids, under the request's temperature and filters: that *is* q, renormalised, and
what the verifier is told. Ids outside C are never proposed, which costs acceptance only where p has mass far down the
SSM's list, and makes q a few hundred bytes per node instead of a row of the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specinfer_jax.speculation.mss import DraftDistributions
from specinfer_jax.speculation.randomness import gumbel
from specinfer_jax.speculation.rules import WITHOUT_REPLACEMENT
from specinfer_jax.speculation.sampling import SamplingState

MAX_CANDIDATES = 64
"""C: candidates of one node (docs/log.md)."""


class Children(NamedTuple):
    """k children of every node of a level, in the order drawn."""

    token_BWk: Int[Array, "B W k"]
    """Ids in the SSM's vocabulary."""
    valid_BWk: Bool[Array, "B W k"]
    """False where q has fewer tokens than k."""
    slot_BWk: Int[Array, "B W k"]
    """Which candidate it is."""
    drawn_from: DraftDistributions
    """q of every node, ids in the SSM's vocabulary."""


def likeliest_children(logits_VT: Float[Array, "V T"], num_slots: int, k: int) -> tuple[Array, Array]:
    """The k likeliest ids after every row, likeliest first, and whether there are so many: `[B, W, k]` each."""
    V = logits_VT.shape[0]
    if k == 1:
        id_T1 = jnp.argmax(logits_VT, axis=0).astype(jnp.int32)[:, None]
    else:
        _, id_T1 = jax.lax.top_k(logits_VT.T, min(k, V))
        id_T1 = jnp.pad(id_T1.astype(jnp.int32), ((0, 0), (0, max(k - V, 0))), mode="edge")
    id_BWk = id_T1.reshape(num_slots, -1, k)
    return id_BWk, jnp.broadcast_to(jnp.arange(k)[None, None] < V, id_BWk.shape)


def drawn_children(
    logits_VT: Float[Array, "V T"], sampling: SamplingState, key_B: Key[Array, " B"], *, k: int, rule: str
) -> Children:
    """k draws per node in slots with a temperature; in greedy slots the k likeliest.

    Args:
      logits_VT: the SSM's; column `slot * W + node`.
      sampling: of the slots.
      key_B: one key per slot for this SSM and level.
      k: children per node.
      rule: IID or WITHOUT_REPLACEMENT.
    """
    B = key_B.shape[0]
    C = min(MAX_CANDIDATES, logits_VT.shape[0])
    logit_TC, id_TC = jax.lax.top_k(logits_VT.T, C)
    id_BWC, logit_BWC = id_TC.astype(jnp.int32).reshape(B, -1, C), logit_TC.reshape(B, -1, C)
    prob_BWC = candidate_probabilities(logit_BWC, sampling)
    log_prob_BWC = jnp.log(prob_BWC)
    W = id_BWC.shape[1]
    if rule == WITHOUT_REPLACEMENT:
        # The k largest of log q + Gumbel noise, in order, are k draws one after the other without replacement.
        score_BWC = log_prob_BWC + gumbel(key_B, W, C)
        score_BWk, slot_BWk = jax.lax.top_k(score_BWC, min(k, C))
        missing = k - min(k, C)
        slot_BWk = jnp.pad(slot_BWk, ((0, 0), (0, 0), (0, missing)))
        valid_BWk = jnp.pad(score_BWk > -jnp.inf, ((0, 0), (0, 0), (0, missing)))
    else:
        score_BWkC = log_prob_BWC[:, :, None] + gumbel(key_B, W, k, C)
        slot_BWk = jnp.argmax(score_BWkC, axis=3)
        valid_BWk = score_BWkC.max(axis=3) > -jnp.inf
    is_random_B11 = sampling.is_random_B[:, None, None]
    rank_k = jnp.arange(k)[None, None]
    slot_BWk = jnp.where(is_random_B11, slot_BWk, jnp.minimum(rank_k, C - 1)).astype(jnp.int32)
    valid_BWk = jnp.where(is_random_B11, valid_BWk, rank_k < C)
    token_BWk = jnp.take_along_axis(id_BWC, slot_BWk, axis=2)
    return Children(token_BWk, valid_BWk, slot_BWk, DraftDistributions(id_BWC, prob_BWC))


def candidate_probabilities(logit_BWC: Float[Array, "B W C"], sampling: SamplingState) -> Float[Array, "B W C"]:
    """q over candidates sorted from the likeliest: temperature, min-p, top-k, top-p; all 0 where the logits are NaN.

    Filters only raise acceptance here; whatever they do, q is what is drawn from.
    """
    C = logit_BWC.shape[2]

    def per_slot(x_B: Array) -> Array:
        return x_B[:, None, None]

    x_BWC = logit_BWC - logit_BWC[:, :, :1]
    x_BWC = x_BWC / jnp.where(per_slot(sampling.is_random_B), per_slot(sampling.temperature_B), 1.0)
    x_BWC = jnp.where(x_BWC >= jnp.log(per_slot(sampling.min_p_B)), x_BWC, -jnp.inf)
    rank_11C = jnp.arange(C)[None, None]
    x_BWC = jnp.where((rank_11C < per_slot(sampling.top_k_B)) | (per_slot(sampling.top_k_B) <= 0), x_BWC, -jnp.inf)
    weight_BWC = jnp.nan_to_num(jnp.exp(x_BWC), nan=0.0, posinf=0.0)
    prob_BWC = _normalised(weight_BWC)
    before_BWC = jnp.cumsum(prob_BWC, axis=2) - prob_BWC
    return _normalised(jnp.where((before_BWC < per_slot(sampling.top_p_B)) | (rank_11C == 0), prob_BWC, 0.0))


def _normalised(weight_BWC: Array) -> Array:
    return weight_BWC / jnp.maximum(jnp.sum(weight_BWC, axis=2, keepdims=True), jnp.finfo(jnp.float32).tiny)
