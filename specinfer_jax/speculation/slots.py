"""How a request gets into a slot: an empty state, admission, and prefill in chunks."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

from pallas_kernels.tree_attention import causal_words
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, init_cache, read_first
from specinfer_jax.models.transformer import Params, forward
from specinfer_jax.notation import LayerKV
from specinfer_jax.speculation.state import RUNNING, DecodeParams, DecodeState, StepProgram, StepStats


def init_state(
    program: StepProgram, *, num_slots: int, max_model_len: int, page_size: int, dtype: DTypeLike
) -> DecodeState:
    """All slots empty.

    Args:
      program: what the step computes.
      num_slots: B.
      max_model_len: S, most tokens of one request, prompt included.
      page_size: Z, tokens of one cache page.
      dtype: of the caches.
    """

    def cache(config: ModelConfig, longest: int) -> KVCache:
        return init_cache(config, num_slots=num_slots, max_model_len=longest, page_size=page_size, dtype=dtype)

    def zeros(*shape: int) -> Array:
        return jnp.zeros((num_slots, *shape), jnp.int32)

    A, M = program.path_len, len(program.speculators)
    return DecodeState(
        token_BS=zeros(max_model_len),
        committed_B=zeros(),
        prompt_len_B=zeros(),
        limit_B=zeros(),
        active_B=jnp.zeros((num_slots,), bool),
        finish_B=zeros(),
        is_stop_BV=jnp.zeros((num_slots, program.llm.vocab_size), bool),
        cache=cache(program.llm, max_model_len),
        speculators=tuple(
            () if s.cached_model is None else cache(s.cached_model.config, min(s.cached_model.max_len, max_model_len))
            for s in program.speculators
        ),
        rate_BJ=jnp.tile(jnp.asarray(program.prior_rates())[None], (num_slots, 1)),
        stats=StepStats(zeros(len(program.buckets)), zeros(A), zeros(A), zeros(M), zeros(M)),
    )


def admit(
    state: DecodeState,
    slot: Int[Array, ""],
    token_S: Int[Array, " S"],
    prompt_len: Int[Array, ""],
    limit: Int[Array, ""],
    is_stop_V: Bool[Array, " V"],
    *,
    program: StepProgram,
) -> DecodeState:
    """Give a slot to a request: its prompt, its limit, its stop ids; counters and rates start afresh."""

    def forget(cache: KVCache) -> KVCache:
        return cache._replace(length_B=cache.length_B.at[slot].set(0))

    return state._replace(
        token_BS=state.token_BS.at[slot].set(token_S),
        committed_B=state.committed_B.at[slot].set(prompt_len),
        prompt_len_B=state.prompt_len_B.at[slot].set(prompt_len),
        limit_B=state.limit_B.at[slot].set(limit),
        active_B=state.active_B.at[slot].set(True),
        finish_B=state.finish_B.at[slot].set(RUNNING),
        is_stop_BV=state.is_stop_BV.at[slot].set(is_stop_V),
        cache=forget(state.cache),
        speculators=tuple(forget(s) if isinstance(s, KVCache) else s for s in state.speculators),
        rate_BJ=state.rate_BJ.at[slot].set(jnp.asarray(program.prior_rates())),
        stats=jax.tree.map(lambda counter_BX: counter_BX.at[slot].set(0), state.stats),
    )


def release(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Stop decoding a slot whose request was given up."""
    return state._replace(active_B=state.active_B.at[slot].set(False))


def prefill_chunk(
    params: DecodeParams, state: DecodeState, slot: Int[Array, ""], *, program: StepProgram, chunk: int
) -> DecodeState:
    """Put the next `chunk` prompt tokens of a slot into the LLM's and the SSMs' caches.

    The prompt's last token stays out: it is the root of the first step, whose pass computes its K/V and its logits.
    """
    end = state.prompt_len_B[slot] - 1

    def run(model: Params, config: ModelConfig, cache: KVCache, longest: int) -> KVCache:
        count = jnp.clip(jnp.minimum(end, longest) - cache.length_B[slot], 0, chunk)
        return _append_prompt(model, config, cache, state, slot, count, program, chunk)

    speculators = tuple(
        s_state if s.cached_model is None else run(model, s.cached_model.config, s_state, s.cached_model.max_len)
        for s, s_state, model in zip(program.speculators, state.speculators, params.speculators, strict=True)
    )
    cache = run(params.llm, program.llm, state.cache, state.token_BS.shape[1])
    return state._replace(cache=cache, speculators=speculators)


def _append_prompt(
    params: Params, config: ModelConfig, cache: KVCache, state: DecodeState, slot: Array, count: Array,
    program: StepProgram, chunk: int,
) -> KVCache:  # fmt: skip
    """One chain of `chunk` rows of one slot; rows from `count` on are padding and are dropped."""
    start = cache.length_B[slot]
    step_Q = jnp.arange(chunk, dtype=jnp.int32)
    position_1Q = (start + jnp.where(step_Q < count, step_Q, 0))[None]
    token_1Q = state.token_BS[slot][position_1Q]
    view = cache._replace(block_table=cache.block_table[slot][None], length_B=start[None])

    def rows() -> tuple[LayerKV, ...]:
        return forward(
            params, token_1Q, position_1Q, view, causal_words(chunk)[None],
            config=config, prompt_len_B=state.prompt_len_B[slot][None], implementation=program.implementation,
        )[1]  # fmt: skip

    return commit(cache, read_first(count > 0, rows), count[None], slot[None])
