"""The decode step: speculate -> tree forward of the LLM -> verify -> commit (SpecInfer, Algorithms 1 and 2).

One pure function, `step`, serves the compiled loop of `generate` and the token-by-token `stream`. Incremental decoding
is the same step with a tree of one row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.tree_attention import ancestor_words
from specinfer_jax.models.kv_cache import commit, gather_rows, read_first
from specinfer_jax.models.transformer import Params, forward, vocabulary_logits
from specinfer_jax.notation import LayerKV
from specinfer_jax.parallel.offload import weight_access
from specinfer_jax.parallel.sharding import any_slot, constrain, top_k, whole_on_each_device
from specinfer_jax.speculation import gate
from specinfer_jax.speculation.draft import Draft, MergedDraft, merge_drafts
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.mss import verify_mss
from specinfer_jax.speculation.narrow import allowed_rows
from specinfer_jax.speculation.rules import MSS_RENORMALIZED
from specinfer_jax.speculation.sampling import (
    ChosenLogprobs,
    History,
    InUse,
    chosen_logprobs,
    history_of_root,
    in_use,
    no_logprobs,
)
from specinfer_jax.speculation.speculator import Context, Speculator, SpeculatorState
from specinfer_jax.speculation.state import (
    FAILED,
    LENGTH,
    RUNNING,
    STOPPED,
    DecodeParams,
    DecodeState,
    LastStep,
    StepProgram,
    StepStats,
    StepTrace,
)
from specinfer_jax.speculation.verifier import Target, Verdict, verify_greedy, verify_naive
from specinfer_jax.tree.token_tree import TokenTree, clip_depth, clip_nodes, order_by, root_only, truncate


def step(params: DecodeParams, state: DecodeState, costs: StepCosts, *, program: StepProgram) -> DecodeState:
    """Propose trees, verify them in one LLM pass, commit the accepted path and the bonus token of every active slot."""
    return traced_step(params, state, costs, program=program)[0]


def traced_step(
    params: DecodeParams, state: DecodeState, costs: StepCosts, *, program: StepProgram
) -> tuple[DecodeState, StepTrace]:
    """`step`, and what it did; compiled without its second result it is `step`."""
    context = Context(state.token_BS, state.committed_B, state.prompt_len_B, state.sampling)
    use = in_use(state.sampling, state.active_B)
    room_B = jnp.where(state.active_B, state.limit_B - state.committed_B, 0)
    draft, speculators = _speculate(params, state, costs, context, room_B, program)
    draft, chosen = _fit(draft, state, costs, program)
    history = history_of_root(
        state.token_BS, state.committed_B, state.prompt_len_B, vocab_size=program.vocab_size, shaped=use.shaped
    )
    history = history._replace(
        output_count_BV=constrain(history.output_count_BV, None, "vocab"),
        in_prompt_BV=constrain(history.in_prompt_BV, None, "vocab"),
    )

    def branch(rows: int):
        return lambda: _verify(params.llm, draft, rows, state, context, history, use, program)

    # Branches only read the cache; one that wrote it would copy it whole (docs/log.md).
    branches = [branch(rows) for rows in program.buckets]
    is_one = len(branches) == 1
    verified = read_first(state.active_B.any(), branches[0]) if is_one else jax.lax.switch(chosen, branches)
    verdict = verified.verdict
    kept_B, finish_B = _apply_stop_rules(verdict, state, room_B)

    position_BA = state.committed_B[:, None] + jnp.arange(program.path_len, dtype=jnp.int32)[None]
    is_kept_BA = jnp.arange(program.path_len)[None] < kept_B[:, None]
    index_BA = jnp.where(is_kept_BA, position_BA, state.token_BS.shape[1])
    token_BS = jax.vmap(lambda token_S, i_A, new_A: token_S.at[i_A].set(new_A, mode="drop"))(
        state.token_BS, index_BA, verdict.token_BA
    )
    hit_BN, observed_BN = gate.committed_nodes(draft.tree, verdict.token_BA, kept_B)
    verified_rows = jnp.asarray(np.array(program.buckets, np.int32))[chosen]
    trace = StepTrace(draft.tree, verified_rows, draft.source_BN, verdict, kept_B)
    new_state = state._replace(
        token_BS=token_BS,
        committed_B=state.committed_B + kept_B,
        active_B=state.active_B & (finish_B == RUNNING),
        finish_B=jnp.where(state.active_B, finish_B, state.finish_B),
        cache=commit(state.cache, verified.path_kv, kept_B),
        speculators=speculators,
        rate_BJ=gate.update_rates(
            state.rate_BJ, jnp.asarray(program.prior_rates()), draft.kind_BN, hit_BN, observed_BN
        ),
        stats=_count(state, chosen, draft, hit_BN, trace, program),
        last=LastStep(_sources(draft, verdict, kept_B), verified.logprobs),
    )
    return new_state, trace


def burst(
    params: DecodeParams, state: DecodeState, costs: StepCosts, num_steps: Int[Array, ""], *, program: StepProgram
) -> DecodeState:
    """At most `num_steps` steps on the device; ends early when a slot finishes, so that its place can be filled."""

    def goes_on(done: Array, now: DecodeState) -> Array:
        return (done < num_steps) & any_slot(now.active_B) & ~any_slot(now.active_B != state.active_B)

    # Decided in the body: where slots are split over devices, they agree there, and a loop's condition cannot.
    def body(carry: tuple[Array, Array, DecodeState]) -> tuple[Array, Array, DecodeState]:
        _, done, now = carry
        now = step(params, now, costs, program=program)
        return goes_on(done + 1, now), done + 1, now

    start = jnp.zeros((), jnp.int32)
    return jax.lax.while_loop(lambda carry: carry[0], body, (goes_on(start, state), start, state))[2]


def _speculate(
    params: DecodeParams, state: DecodeState, costs: StepCosts, context: Context, room_B: Array, program: StepProgram
) -> tuple[MergedDraft, tuple[SpeculatorState, ...]]:
    """The union of all proposals, no deeper than the slot has room for, and the speculators' new states."""
    if not program.speculators:
        tree = root_only(context.root_token_B, 1)
        return MergedDraft(tree, tree.depth_BN, jnp.zeros_like(tree.token_BN, jnp.uint32)), ()
    wants_tree_B = room_B > 1  # with room for one token the bonus token is all that can be kept
    drafts: dict[int, Draft] = {}
    states: dict[int, SpeculatorState] = {}
    offered = jnp.zeros(())  # tokens per second, as expected of trees that cost nothing to draft
    starts = _starts(program)
    # Those first, so that drafting with a model is weighed against what is there already.
    for m in sorted(range(len(starts)), key=lambda m: program.speculators[m].static_tree() is not None):
        speculator, (first_kind, first_row) = program.speculators[m], starts[m]
        allowed_Bn = state.allowed_Bn[:, first_row : first_row + speculator.num_nodes]
        is_worth_it = _worth_drafting(speculator, m, first_kind, allowed_Bn, offered, state, costs, program)
        want_B = wants_tree_B & allowed_Bn.any(axis=1) & (is_worth_it | _must_stay_whole(state, program))
        propose = speculator.propose if speculator.cached_model is None else whole_on_each_device(speculator.propose)
        draft, states[m] = propose(params.speculators[m], state.speculators[m], context, want_B)
        tree = allowed_rows(draft.tree, allowed_Bn)
        drafts[m] = draft._replace(tree=tree, kind_BN=draft.kind_BN + first_kind)
        if program.adaptive and speculator.static_tree() is None and len(starts) > 1:
            offered = jnp.maximum(offered, _offer(drafts[m], state, costs, program))
    merged = merge_drafts([drafts[m] for m in range(len(starts))], with_draws=program.keeps_draws)
    return merged.moved(*clip_depth(merged.tree, room_B - 1)), tuple(states[m] for m in range(len(starts)))


def _starts(program: StepProgram) -> list[tuple[int, int]]:
    """Where every speculator's kinds and rows begin among those of all."""
    kinds = np.cumsum([0, *(speculator.num_kinds for speculator in program.speculators)])
    rows = np.cumsum([0, *(speculator.num_nodes for speculator in program.speculators)])
    return list(zip(kinds[:-1].tolist(), rows[:-1].tolist(), strict=True))


def _offer(draft: Draft, state: DecodeState, costs: StepCosts, program: StepProgram) -> Float[Array, ""]:
    """Expected tokens per second of all slots with this draft alone."""
    rate_BN = jnp.take_along_axis(state.rate_BJ, draft.kind_BN, axis=1)
    chance_BN = gate.path_chances(draft.tree, rate_BN, depth=program.path_len - 1)
    return gate.token_rates(-jnp.sort(-chance_BN, axis=1), state.active_B, program.buckets, costs.verify_J).max()


def _must_stay_whole(state: DecodeState, program: StepProgram) -> Bool[Array, ""]:
    """Whether a slot's tokens depend on its whole tree: a cut made for its neighbours' sake would change them."""
    has_tree_B = state.active_B & state.allowed_Bn.any(axis=1)
    return jnp.bool_(program.keeps_draws) & (has_tree_B & state.sampling.is_random_B).any()


def _worth_drafting(
    speculator: Speculator, m: int, first_kind: int, allowed_Bn: Bool[Array, "B n"], offered: Float[Array, ""],
    state: DecodeState, costs: StepCosts, program: StepProgram,
) -> Bool[Array, ""]:  # fmt: skip
    """Whether a speculator whose tree is known beforehand pays for its drafting, and better than what is offered."""
    static = speculator.static_tree()
    if static is None or not program.adaptive:
        return jnp.bool_(True)
    parent_N, depth_N, kind_N = static
    B, N = state.committed_B.shape[0], len(parent_N)
    shape = (B, N)
    tree = TokenTree(
        jnp.zeros(shape, jnp.int32),
        jnp.broadcast_to(parent_N[None], shape),
        jnp.broadcast_to(depth_N[None], shape),
        jnp.pad(allowed_Bn, ((0, 0), (1, 0)), constant_values=True),
    )
    chance_BN = gate.path_chances(tree, state.rate_BJ[:, first_kind + kind_N], depth=speculator.depth)
    chance_BN = -jnp.sort(-chance_BN, axis=1)
    rate_J = gate.token_rates(chance_BN, state.active_B, program.buckets, costs.verify_J, costs.draft_M[m])
    return (jnp.argmax(rate_J) > 0) & (rate_J.max() > offered)


def _fit(
    draft: MergedDraft, state: DecodeState, costs: StepCosts, program: StepProgram
) -> tuple[MergedDraft, Int[Array, ""]]:
    """The draft with its likeliest rows first, and the index of the bucket to run."""
    if not program.speculators:
        return draft, jnp.int32(0)
    if not program.adaptive:
        draft = draft.moved(*clip_nodes(draft.tree, state.max_nodes_B))
        rows_needed = jnp.max(jnp.sum(draft.tree.valid_BN, axis=1))
        return draft, jnp.searchsorted(np.array(program.buckets, np.int32), rows_needed).astype(jnp.int32)
    rate_BN = jnp.take_along_axis(state.rate_BJ, draft.kind_BN, axis=1)
    chance_BN = gate.path_chances(draft.tree, rate_BN, depth=program.path_len - 1)
    draft = draft.moved(*order_by(draft.tree, chance_BN))
    draft = draft.moved(*clip_nodes(draft.tree, state.max_nodes_B))
    chance_BN = jnp.where(draft.tree.valid_BN, -jnp.sort(-chance_BN, axis=1), 0)
    best = gate.best_bucket(chance_BN, state.active_B, program.buckets, costs.verify_J)
    return draft, jnp.where(_must_stay_whole(state, program), len(program.buckets) - 1, best)


class _Verified(NamedTuple):
    """Result of one LLM pass, padded to the longest path whatever the number of rows."""

    verdict: Verdict
    """The accepted path."""
    path_kv: tuple[LayerKV, ...]
    """K/V of its rows."""
    logprobs: ChosenLogprobs
    """Of the path's tokens, entry `slot * A + index`; zeros unless a slot asks for them."""


def _verify(
    params: Params, draft: MergedDraft, rows: int, state: DecodeState, context: Context, history: History, use: InUse,
    program: StepProgram,
) -> _Verified:  # fmt: skip
    """One LLM pass over the trees' first rows, and what the rules say of it."""
    tree = truncate(draft.tree, rows)
    B, N = tree.token_BN.shape
    A = program.path_len
    # The root sits at position cache length = committed - 1; a node's position follows from its depth.
    position_BN = state.cache.length_B[:, None] + tree.depth_BN
    x_DT, kv = forward(
        params, tree.token_BN, position_BN, state.cache, ancestor_words(tree.parent_BN),
        config=program.llm, prompt_len_B=context.prompt_len_B, implementation=program.implementation,
        access=weight_access(program.offloads),
    )  # fmt: skip
    logits_VT = vocabulary_logits(params, x_DT, config=program.llm, access=weight_access(program.offloads))
    target = Target(_emittable(logits_VT, program), state.sampling, state.is_stop_BV, use)
    path_len = min(A, N)

    def greedy() -> Verdict:
        target_T = jnp.argmax(target.logits_VT, axis=0).astype(jnp.int32)
        best_T = jnp.take_along_axis(target.logits_VT, target_T[None], axis=0)[0]
        failed_BN = ~jnp.isfinite(best_T).reshape(B, N)  # a NaN is the argmax of its column
        return verify_greedy(tree, target_T.reshape(B, N), path_len=path_len, failed_BN=failed_BN)

    def walk() -> Verdict:
        if rows < program.buckets[-1] or not program.keeps_draws:  # with draws only whole trees come here
            return verify_naive(tree, target, history, state.committed_B, path_len=path_len)
        assert draft.draws is not None and draft.drawn_from is not None
        renormalize = program.verification == MSS_RENORMALIZED
        return verify_mss(
            tree, draft.draws, draft.drawn_from, target, history, state.committed_B,
            path_len=path_len, renormalize=renormalize,
        )  # fmt: skip

    verdict = jax.lax.cond(use.plain, greedy, walk)
    padding = ((0, 0), (0, A - path_len))
    path_BA = jnp.pad(verdict.path_BA, padding, constant_values=N)
    verdict = verdict._replace(path_BA=path_BA, token_BA=jnp.pad(verdict.token_BA, padding))

    def logprobs() -> ChosenLogprobs:
        column_BA = jnp.arange(B)[:, None] * N + jnp.minimum(path_BA, N - 1)
        path_logits_VT = jnp.take(logits_VT, column_BA.reshape(-1), axis=1)
        return chosen_logprobs(path_logits_VT, verdict.token_BA.reshape(-1), num_top=program.num_logprobs, top_k=top_k)

    chosen = jax.lax.cond(use.logprobs, logprobs, lambda: no_logprobs(B * A, program.num_logprobs))
    return _Verified(verdict, gather_rows(kv, path_BA), chosen)


def _emittable(logits_VT: Float[Array, "V T"], program: StepProgram) -> Float[Array, "ids T"]:
    """Logits of the ids that may be emitted; a cut through a split vocabulary would move all of it."""
    if not program.splits_vocab:
        return logits_VT[: program.vocab_size]
    is_id_V1 = jnp.arange(logits_VT.shape[0])[:, None] < (program.vocab_limit or program.llm.vocab_size)
    return constrain(jnp.where(is_id_V1, logits_VT, -jnp.inf), "vocab", None)


def _sources(draft: MergedDraft, verdict: Verdict, kept_B: Int[Array, " B"]) -> UInt32[Array, "B A"]:
    """Who had proposed each kept token."""
    node_BA = jnp.roll(verdict.path_BA, -1, axis=1)
    source_BA = jnp.take_along_axis(draft.source_BN, node_BA, axis=1, mode="fill", fill_value=0)
    is_node_BA = jnp.arange(node_BA.shape[1])[None] < jnp.minimum(verdict.accepted_B, kept_B)[:, None]
    return jnp.where(is_node_BA, source_BA, jnp.uint32(0))


def _apply_stop_rules(
    verdict: Verdict, state: DecodeState, room_B: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """(tokens kept, finish code) per slot, decided token by token in order: stop token first, then the limit."""
    A = verdict.token_BA.shape[1]
    is_new_BA = jnp.arange(A)[None] <= verdict.accepted_B[:, None]
    is_stop_BA = jnp.take_along_axis(state.is_stop_BV, verdict.token_BA, axis=1, mode="fill", fill_value=False)
    is_stop_BA = is_stop_BA & is_new_BA
    up_to_stop_B = jnp.where(is_stop_BA.any(axis=1), jnp.argmax(is_stop_BA, axis=1).astype(jnp.int32) + 1, A + 1)
    # Where no token could be chosen behind the path, the path is still good.
    new_B = verdict.accepted_B + jnp.where(verdict.failed_B, 0, 1)
    kept_B = jnp.minimum(jnp.minimum(new_B, up_to_stop_B), room_B)
    finish_B = jnp.where(verdict.failed_B & (kept_B == new_B), FAILED, RUNNING)
    finish_B = jnp.where(kept_B == room_B, LENGTH, finish_B)
    finish_B = jnp.where(kept_B == up_to_stop_B, STOPPED, finish_B)
    return kept_B, finish_B.astype(jnp.int32)


def _count(
    state: DecodeState, chosen: Array, draft: MergedDraft, hit_BN: Array, trace: StepTrace, program: StepProgram
) -> StepStats:
    """Counters after this step; only what was verified and kept counts."""
    stats, tree = state.stats, draft.tree
    active_B1 = state.active_B[:, None]
    M = len(program.speculators)
    level_A = jnp.arange(program.path_len, dtype=jnp.int32)[None]
    was_verified_BN = tree.valid_BN & (jnp.arange(tree.num_rows)[None] < trace.verified_rows)
    deepest_B1 = jnp.max(jnp.where(was_verified_BN, tree.depth_BN, 0), axis=1, keepdims=True)
    accepted_B1 = jnp.minimum(trace.verdict.accepted_B, trace.kept_B)[:, None]
    by_source_BNM = (draft.source_BN[:, :, None] >> jnp.arange(M, dtype=jnp.uint32)[None, None]) & 1 > 0
    by_source_BNM = by_source_BNM & was_verified_BN[:, :, None] & active_B1[:, :, None]
    buckets_J = jnp.arange(len(program.buckets))[None]
    return StepStats(
        steps_BJ=stats.steps_BJ + (active_B1 & (buckets_J == chosen)),
        proposed_BA=stats.proposed_BA + (active_B1 & (level_A <= deepest_B1)),
        accepted_BA=stats.accepted_BA + (active_B1 & (level_A <= accepted_B1)),
        proposed_BM=stats.proposed_BM + jnp.sum(by_source_BNM, axis=1, dtype=jnp.int32),
        accepted_BM=stats.accepted_BM + jnp.sum(by_source_BNM & hit_BN[:, :, None], axis=1, dtype=jnp.int32),
    )
