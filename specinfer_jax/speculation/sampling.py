"""From logits to the distribution that a token is drawn from: what `SamplingParams` does at one node of every slot.

Order of operations, as in vLLM: bias and bans -> penalties -> temperature -> min-p -> top-k -> top-p. Everything is
float32. Top-k and top-p find their threshold by bisection over float bit patterns: exact like a sort, and ten times
cheaper on CPU (docs/log.md). Tokens that tie with the last one kept are kept too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

MAX_BAD_SEQUENCES, MAX_BAD_LENGTH = 64, 16
"""Banned sequences of more than one token that a request may have, and tokens of the longest."""
ANY_TOKEN = -1
"""In front of a banned sequence that is shorter than the longest."""
_NO_TOKEN = -2
"""Before the first token of the context."""


class SamplingState(NamedTuple):
    """Sampling parameters of every slot, on the device."""

    temperature_B: Float[Array, " B"]
    """0 is greedy."""
    top_k_B: Int[Array, " B"]
    """0 is off."""
    top_p_B: Float[Array, " B"]
    """1 is off."""
    min_p_B: Float[Array, " B"]
    """0 is off."""
    repetition_penalty_B: Float[Array, " B"]
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    presence_penalty_B: Float[Array, " B"]
    """Taken from logits of tokens in the output; 0 is off."""
    frequency_penalty_B: Float[Array, " B"]
    """Taken as often as the token is in the output; 0 is off."""
    min_tokens_B: Int[Array, " B"]
    """Stop ids are banned before so many tokens are out."""
    bias_BV: Float[Array, "B V"]
    """Added to the logits; -inf bans an id."""
    bad_BXY: Int[Array, "B X Y"]
    """Banned token sequences, `ANY_TOKEN` in front of short ones; rows of `ANY_TOKEN` alone are unused."""
    is_shaped_B: Bool[Array, " B"]
    """Some of bias, bans, penalties or min_tokens is in use."""
    wants_logprobs_B: Bool[Array, " B"]
    """Log-probabilities of committed tokens are asked for."""
    key_B2: UInt32[Array, "B 2"]
    """The request's random key (seed and sample)."""

    @property
    def is_random_B(self) -> Bool[Array, " B"]:
        """Slots that draw their tokens."""
        return self.temperature_B > 0


class InUse(NamedTuple):
    """Which parts any active slot needs; the others are skipped at run time."""

    shaped: Bool[Array, ""]
    """Bias, bans, penalties, min_tokens."""
    top_k: Bool[Array, ""]
    """Top-k."""
    top_p: Bool[Array, ""]
    """Top-p."""
    random: Bool[Array, ""]
    """Any temperature above 0."""
    logprobs: Bool[Array, ""]
    """Log-probabilities."""

    @property
    def plain(self) -> Bool[Array, ""]:
        """Every slot takes the argmax of its raw logits."""
        return ~(self.shaped | self.random)


class History(NamedTuple):
    """What came before a node: prompt, committed tokens, and the node's own ancestors."""

    output_count_BV: Int[Array, "B V"]
    """How often each id was generated; zeros while no slot is shaped."""
    in_prompt_BV: Bool[Array, "B V"]
    """Ids of the prompt; likewise."""
    recent_BY: Int[Array, "B Y"]
    """The latest tokens, the node's own last."""
    generated_B: Int[Array, " B"]
    """Tokens generated."""


def neutral_sampling(num_slots: int, vocab_size: int) -> SamplingState:
    """Greedy slots that use nothing."""

    def full(value: float | int, dtype: type = jnp.float32) -> Array:
        return jnp.full((num_slots,), value, dtype)

    return SamplingState(
        temperature_B=full(0),
        top_k_B=full(0, jnp.int32),
        top_p_B=full(1),
        min_p_B=full(0),
        repetition_penalty_B=full(1),
        presence_penalty_B=full(0),
        frequency_penalty_B=full(0),
        min_tokens_B=full(0, jnp.int32),
        bias_BV=jnp.zeros((num_slots, vocab_size), jnp.float32),
        bad_BXY=jnp.full((num_slots, MAX_BAD_SEQUENCES, MAX_BAD_LENGTH), ANY_TOKEN, jnp.int32),
        is_shaped_B=full(False, bool),
        wants_logprobs_B=full(False, bool),
        key_B2=jnp.zeros((num_slots, 2), jnp.uint32),
    )


def in_use(sampling: SamplingState, active_B: Bool[Array, " B"]) -> InUse:
    """What the active slots need together."""
    return InUse(
        shaped=(active_B & sampling.is_shaped_B).any(),
        top_k=(active_B & sampling.is_random_B & (sampling.top_k_B > 0)).any(),
        top_p=(active_B & sampling.is_random_B & (sampling.top_p_B < 1)).any(),
        random=(active_B & sampling.is_random_B).any(),
        logprobs=(active_B & sampling.wants_logprobs_B).any(),
    )


def history_of_root(
    token_BS: Int[Array, "B S"], committed_B: Int[Array, " B"], prompt_len_B: Int[Array, " B"],
    *, vocab_size: int, shaped: Bool[Array, ""],
) -> History:  # fmt: skip
    """The history at every tree's root, counted afresh from the committed tokens, so that it can never drift."""
    B, S = token_BS.shape
    position_S = jnp.arange(S)[None]

    def count() -> tuple[Array, Array]:
        is_output_BS = (position_S >= prompt_len_B[:, None]) & (position_S < committed_B[:, None])
        is_prompt_BS = position_S < prompt_len_B[:, None]

        def scatter(is_counted_BS: Array) -> Array:
            id_BS = jnp.where(is_counted_BS, token_BS, vocab_size)
            return jax.vmap(lambda id_S: jnp.zeros((vocab_size,), jnp.int32).at[id_S].add(1, mode="drop"))(id_BS)

        return scatter(is_output_BS), scatter(is_prompt_BS) > 0

    def nothing() -> tuple[Array, Array]:
        return jnp.zeros((B, vocab_size), jnp.int32), jnp.zeros((B, vocab_size), bool)

    output_count_BV, in_prompt_BV = jax.lax.cond(shaped, count, nothing)
    back_BY = committed_B[:, None] + jnp.arange(-MAX_BAD_LENGTH, 0, dtype=jnp.int32)[None]
    recent_BY = jnp.take_along_axis(token_BS, jnp.maximum(back_BY, 0), axis=1, mode="clip")
    return History(
        output_count_BV, in_prompt_BV, jnp.where(back_BY >= 0, recent_BY, _NO_TOKEN), committed_B - prompt_len_B
    )


def advance(history: History, token_B: Int[Array, " B"], moved_B: Bool[Array, " B"]) -> History:
    """The history one accepted token further, in the slots that moved."""
    shifted_BY = jnp.concatenate([history.recent_BY[:, 1:], token_B[:, None]], axis=1)
    moved_count_B = moved_B.astype(jnp.int32)
    return History(
        jax.vmap(lambda count_V, token, by: count_V.at[token].add(by, mode="drop"))(
            history.output_count_BV, token_B, moved_count_B
        ),
        history.in_prompt_BV,
        jnp.where(moved_B[:, None], shifted_BY, history.recent_BY),
        history.generated_B + moved_count_B,
    )


def log_weights(
    logits_BV: Float[Array, "B V"],
    sampling: SamplingState,
    history: History,
    is_stop_BV: Bool[Array, "B V"],
    use: InUse,
) -> Float[Array, "B V"]:
    """Log of each id's unnormalised probability at one node of every slot.

    Args:
      logits_BV: the model's, any float dtype.
      sampling: the slots' parameters.
      history: of the node.
      is_stop_BV: ids that `min_tokens` bans.
      use: from `in_use`.

    Returns:
      float32; the largest entry is 0, excluded ids are -inf; greedy slots keep their argmax alone (the first of equal
      ones). All -inf where nothing can be chosen: every id is banned, or the logits hold NaN or +inf.
    """
    x_BV = logits_BV.astype(jnp.float32)
    x_BV = _if(use.shaped, lambda x: _shape(x, sampling, history, is_stop_BV), x_BV)
    best_B1 = jnp.max(x_BV, axis=1, keepdims=True)
    # A maximum alone may miss a NaN: XLA's vectorised one on CPU does for some shapes.
    means_something_B1 = jnp.isfinite(best_B1) & ~jnp.isnan(x_BV).any(axis=1, keepdims=True)
    x_BV = jnp.where(means_something_B1, x_BV - best_B1, -jnp.inf)
    is_best_BV = (jnp.arange(x_BV.shape[1])[None] == jnp.argmax(x_BV, axis=1)[:, None]) & (x_BV == 0)
    is_random_B1 = sampling.is_random_B[:, None]
    x_BV = x_BV / jnp.where(is_random_B1, sampling.temperature_B[:, None], 1.0)
    x_BV = jnp.where(x_BV >= jnp.log(sampling.min_p_B)[:, None], x_BV, -jnp.inf)
    x_BV = _if(use.top_k, lambda x: _keep_top_k(x, sampling.top_k_B), x_BV)
    x_BV = _if(use.top_p, lambda x: _keep_top_p(x, sampling.top_p_B), x_BV)
    return jnp.where(is_random_B1, x_BV, jnp.where(is_best_BV, 0.0, -jnp.inf))


def _if(condition: Bool[Array, ""], change: Callable[[Array], Array], x_BV: Array) -> Array:
    return jax.lax.cond(condition, change, lambda x: x, x_BV)


def _shape(x_BV: Array, sampling: SamplingState, history: History, is_stop_BV: Array) -> Array:
    """Bias, bans and penalties, in vLLM's order."""
    V = x_BV.shape[1]
    x_BV = x_BV + sampling.bias_BV
    is_early_B1 = (history.generated_B < sampling.min_tokens_B)[:, None]
    x_BV = jnp.where(is_early_B1 & is_stop_BV, -jnp.inf, x_BV)
    before_BXY, last_BX = sampling.bad_BXY[:, :, :-1], sampling.bad_BXY[:, :, -1]
    is_there_BX = ((before_BXY == ANY_TOKEN) | (before_BXY == history.recent_BY[:, None, 1:])).all(axis=2)
    banned_BX = jnp.where(is_there_BX & (last_BX != ANY_TOKEN), last_BX, V)
    x_BV = jax.vmap(lambda x_V, id_X: x_V.at[id_X].set(-jnp.inf, mode="drop"))(x_BV, banned_BX)
    is_out_BV = history.output_count_BV > 0
    repetition_B1 = sampling.repetition_penalty_B[:, None]
    repeated_BV = jnp.where(x_BV > 0, x_BV / repetition_B1, x_BV * repetition_B1)
    x_BV = jnp.where(is_out_BV | history.in_prompt_BV, repeated_BV, x_BV)
    x_BV = x_BV - sampling.frequency_penalty_B[:, None] * history.output_count_BV
    return x_BV - sampling.presence_penalty_B[:, None] * is_out_BV


def _keep_top_k(x_BV: Array, top_k_B: Array) -> Array:
    """-inf below the k-th largest entry."""
    bits_BV = jax.lax.bitcast_convert_type(x_BV, jnp.int32)
    # Entries are at most 0; among negative floats a larger bit pattern is a smaller number.
    order_BV = jnp.where(bits_BV < 0, jnp.iinfo(jnp.int32).min - bits_BV, bits_BV)
    limit_B = jnp.where(top_k_B > 0, top_k_B, x_BV.shape[1])

    def enough(threshold_B: Array) -> Array:
        return jnp.sum(order_BV >= threshold_B[:, None], axis=1) >= limit_B

    threshold_B = _largest_true(enough, jnp.int32(jnp.iinfo(jnp.int32).min + 1), jnp.int32(1), top_k_B.shape[0])
    return jnp.where((order_BV >= threshold_B[:, None]) | (top_k_B <= 0)[:, None], x_BV, -jnp.inf)


def _keep_top_p(x_BV: Array, top_p_B: Array) -> Array:
    """-inf outside the smallest set of likeliest ids with at least top_p of the probability."""
    weight_BV = jnp.exp(x_BV)
    bits_BV = jax.lax.bitcast_convert_type(weight_BV, jnp.int32)
    need_B = top_p_B * jnp.sum(weight_BV, axis=1)

    def enough(threshold_B: Array) -> Array:
        return jnp.sum(jnp.where(bits_BV >= threshold_B[:, None], weight_BV, 0.0), axis=1) >= need_B

    above_one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32) + 1
    threshold_B = _largest_true(enough, jnp.int32(0), above_one, top_p_B.shape[0])
    return jnp.where((bits_BV >= threshold_B[:, None]) | (top_p_B >= 1)[:, None], x_BV, -jnp.inf)


def _largest_true(holds: Callable[[Array], Array], low: Array, above: Array, num_slots: int) -> Int[Array, " B"]:
    """Bisection in every slot: the largest whole number in [low, above) for which a falling condition holds; or low."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B, above_B = bounds
        # low + above overflows int32; the halves do not.
        middle_B = low_B // 2 + above_B // 2 + (low_B % 2 + above_B % 2) // 2
        holds_B = holds(middle_B) & (middle_B > low_B)
        return jnp.where(holds_B, middle_B, low_B), jnp.where(holds_B, above_B, middle_B)

    start = (jnp.full((num_slots,), low), jnp.full((num_slots,), above))
    return jax.lax.fori_loop(0, 32, halve, start)[0]


class ChosenLogprobs(NamedTuple):
    """Raw log-probabilities of the tokens at some columns of the logits; K = the number of alternatives."""

    logprob_T: Float[Array, " T"]
    """Of the chosen token."""
    rank_T: Int[Array, " T"]
    """1 + the number of likelier tokens."""
    top_id_TK: Int[Array, "T K"]
    """The likeliest tokens, likeliest first."""
    top_logprob_TK: Float[Array, "T K"]
    """Theirs."""


def chosen_logprobs(
    logits_VT: Float[Array, "V T"], token_T: Int[Array, " T"], *,
    num_top: int, top_k: Callable[[Array, int], Any] = jax.lax.top_k,
) -> ChosenLogprobs:  # fmt: skip
    """Log-softmax of the raw logits at the chosen tokens and at the `num_top` likeliest ones; at most V of them.

    `top_k`: as `jax.lax.top_k`, for a vocabulary that is split over devices.
    """
    x_TV = logits_VT.astype(jnp.float32).T
    x_TV = x_TV - jax.nn.logsumexp(x_TV, axis=1, keepdims=True)
    logprob_T1 = jnp.take_along_axis(x_TV, token_T[:, None], axis=1, mode="clip")
    top_TK, id_TK = top_k(x_TV, num_top)
    rank_T = 1 + jnp.sum(x_TV > logprob_T1, axis=1, dtype=jnp.int32)
    return ChosenLogprobs(logprob_T1[:, 0], rank_T, id_TK.astype(jnp.int32), top_TK)


def no_logprobs(num_tokens: int, num_top: int) -> ChosenLogprobs:
    """Zeros in place of `chosen_logprobs` where nobody asks."""
    return ChosenLogprobs(
        jnp.zeros((num_tokens,), jnp.float32),
        jnp.zeros((num_tokens,), jnp.int32),
        jnp.zeros((num_tokens, num_top), jnp.int32),
        jnp.zeros((num_tokens, num_top), jnp.float32),
    )
