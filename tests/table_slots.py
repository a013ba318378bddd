"""Table models in the package's slots: what the verifier is given, and its walks, compiled once for a few shapes."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from exact_law import Rules, TableModel

from specinfer_jax.speculation.draft import Draft, MergedDraft, merge_drafts
from specinfer_jax.speculation.mss import MssOutcome, walk_mss
from specinfer_jax.speculation.sampling import (
    ANY_TOKEN,
    MAX_BAD_LENGTH,
    MAX_BAD_SEQUENCES,
    History,
    SamplingState,
    history_of_root,
    in_use,
)
from specinfer_jax.speculation.verifier import Target, verify_greedy, verify_naive
from specinfer_jax.tree.token_tree import TokenTree

PATH_LEN = 4
"""A of every walk: trees have at most three levels."""
MOST_CONTEXT = 16
"""Tokens of prompt and output."""

root_history = jax.jit(history_of_root, static_argnames="vocab_size")
naive = jax.jit(verify_naive, static_argnames="path_len")
greedy = jax.jit(verify_greedy, static_argnames="path_len")


class Prepared(NamedTuple):
    """A table model as the verifier sees it, in every slot alike."""

    logits_PV: jax.Array
    sampling: SamplingState
    history: History
    is_stop_BV: jax.Array


def prepare(model: TableModel, B: int) -> Prepared:
    """The model in B slots."""
    V = model.logits_PV.shape[1]
    context = [*model.prompt, *model.output]
    token_BS = np.zeros((B, MOST_CONTEXT), np.int32)
    token_BS[:, : len(context)] = context
    counts = (np.full(B, len(context), np.int32), np.full(B, len(model.prompt), np.int32))
    history = root_history(token_BS, *counts, vocab_size=V, shaped=np.bool_(model.rules.is_shaped))
    is_stop_BV = np.tile(np.isin(np.arange(V), model.stop_ids), (B, 1))
    logits_PV = np.zeros((sum(V**d for d in range(PATH_LEN)), V), np.float32)  # one shape, whatever the table's depth
    logits_PV[: len(model.logits_PV)] = model.logits_PV
    return Prepared(jnp.asarray(logits_PV), sampling_of([model.rules] * B, V), history, jnp.asarray(is_stop_BV))


def sampling_of(rules: Sequence[Rules], V: int) -> SamplingState:
    """One slot per request, as the engine would fill it."""
    B = len(rules)
    bias_BV = np.zeros((B, V), np.float32)
    bad_BXY = np.full((B, MAX_BAD_SEQUENCES, MAX_BAD_LENGTH), ANY_TOKEN, np.int32)
    for b, rule in enumerate(rules):
        for token, bias in rule.bias:
            bias_BV[b, token] = bias
        for i, sequence in enumerate(rule.bad):
            bad_BXY[b, i, -len(sequence) :] = sequence

    def column(name: str, dtype: type = np.float32) -> jax.Array:
        return jnp.asarray(np.array([getattr(rule, name) for rule in rules], dtype))

    return SamplingState(
        temperature_B=column("temperature"), top_k_B=column("top_k", np.int32), top_p_B=column("top_p"),
        min_p_B=column("min_p"), repetition_penalty_B=column("repetition"), presence_penalty_B=column("presence"),
        frequency_penalty_B=column("frequency"), min_tokens_B=column("min_tokens", np.int32),
        bias_BV=jnp.asarray(bias_BV), bad_BXY=jnp.asarray(bad_BXY), is_shaped_B=column("is_shaped", np.bool_),
        wants_logprobs_B=jnp.zeros(B, bool),
        key_B2=jnp.asarray(np.stack([np.full(B, 7), np.arange(B)], axis=1), jnp.uint32),
    )  # fmt: skip


def target_of(tree: TokenTree, prepared: Prepared) -> Target:
    """The table's logits behind every node, looked up by the path that leads there."""
    V = prepared.logits_PV.shape[1]
    number_BN = jnp.zeros_like(tree.token_BN)
    for _ in range(PATH_LEN - 1):
        parent_BN = jnp.take_along_axis(number_BN, tree.parent_BN, axis=1, mode="fill", fill_value=0)
        number_BN = jnp.where(tree.depth_BN > 0, parent_BN * V + tree.token_BN + 1, 0)
    logits_BNV = jnp.take(prepared.logits_PV, number_BN, axis=0, mode="clip")
    use = in_use(prepared.sampling, jnp.ones(tree.token_BN.shape[0], bool))
    return Target(logits_BNV.reshape(-1, V).T, prepared.sampling, prepared.is_stop_BV, use)


@jax.jit
def merged_with_target(drafts: tuple[Draft, ...], prepared: Prepared) -> tuple[MergedDraft, Target]:
    """One tree per slot, and the LLM's laws behind its nodes."""
    merged = merge_drafts(drafts, with_draws=True)
    return merged, target_of(merged.tree, prepared)


@functools.partial(jax.jit, static_argnames="renormalize")
def walk(
    merged: MergedDraft, target: Target, history: History, uniform_BR: jax.Array, *, renormalize: bool
) -> MssOutcome:
    """The verifier as a function of its random numbers."""
    return walk_mss(
        merged.tree, merged.draws, merged.drawn_from, target, history, uniform_BR, path_len=PATH_LEN,
        renormalize=renormalize,
    )  # fmt: skip
