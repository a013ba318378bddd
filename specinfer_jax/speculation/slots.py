"""How a request gets into a slot: an empty state, pages, admission, and prefill in chunks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import causal_words
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, init_cache, read_first
from specinfer_jax.models.transformer import Params, forward, vocabulary_logits
from specinfer_jax.notation import LayerKV
from specinfer_jax.parallel.offload import weight_access
from specinfer_jax.parallel.sharding import top_k, whole_on_each_device
from specinfer_jax.speculation.randomness import request_key
from specinfer_jax.speculation.sampling import (
    ChosenLogprobs,
    SamplingState,
    chosen_logprobs,
    neutral_sampling,
    no_logprobs,
)
from specinfer_jax.speculation.state import RUNNING, DecodeParams, DecodeState, LastStep, StepProgram, StepStats


def init_state(
    program: StepProgram, *, num_slots: int, max_model_len: int, page_size: int, dtype: DTypeLike,
    num_pages: int | None = None,
) -> DecodeState:  # fmt: skip
    """All slots empty.

    Args:
      program: what the step computes.
      num_slots: B.
      max_model_len: S, most tokens of one request, prompt included.
      page_size: Z, tokens of one cache page.
      dtype: of the caches.
      num_pages: P, pages that `place` will hand out, the same ids in all caches; None: every slot owns its own.
    """

    def cache(config: ModelConfig) -> KVCache:
        return init_cache(
            config, num_slots=num_slots, max_model_len=max_model_len, page_size=page_size, dtype=dtype,
            num_pages=num_pages,
        )  # fmt: skip

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
        is_stop_BV=jnp.zeros((num_slots, program.vocab_size), bool),
        sampling=neutral_sampling(num_slots, program.vocab_size),
        cache=cache(program.llm),
        speculators=tuple(() if s.cached_model is None else cache(s.cached_model.config) for s in program.speculators),
        allowed_Bn=jnp.ones((num_slots, program.num_rows - 1), bool),
        max_nodes_B=jnp.full((num_slots,), program.num_rows - 1, jnp.int32),
        rate_BJ=jnp.tile(jnp.asarray(program.prior_rates())[None], (num_slots, 1)),
        stats=StepStats(zeros(len(program.buckets)), zeros(A), zeros(A), zeros(M), zeros(M)),
        last=LastStep(jnp.zeros((num_slots, A), jnp.uint32), no_logprobs(num_slots * A, program.num_logprobs)),
    )


class Admission(NamedTuple):
    """All that the device needs to know of one request."""

    token_S: Int[Array, " S"]
    """The prompt, 0 behind it."""
    prompt_len: Int[Array, ""]
    """Its tokens."""
    limit: Int[Array, ""]
    """Tokens at which the request ends with reason length."""
    is_stop_V: Bool[Array, " V"]
    """Ids that end it."""
    sampling: SamplingState
    """Of one slot (B = 1); `key_B2` holds the seed's high and low 32 bits."""
    sample: Int[Array, ""]
    """Which of the n continuations of one seed it is."""
    committed: Int[Array, ""] | None = None
    """Tokens of `token_S`: the prompt, and what was generated before the request was put back. None: the prompt."""
    cached: Int[Array, ""] | None = None
    """Tokens whose K/V lies in the slot's pages already; the slot decodes once all but the last token are in. None:
    nothing is, and the slot decodes at once (for callers that see to the cache themselves)."""
    allowed_n: Bool[Array, " n"] | None = None
    """As in `DecodeState`; None: all rows."""
    max_nodes: Int[Array, ""] | None = None
    """As in `DecodeState`; None: all nodes."""


def place(state: DecodeState, table: Int[Array, "B pages"], taken_B: Bool[Array, " B"]) -> DecodeState:
    """Hand out pages: the same table for all caches; slots that nobody has taken stop decoding."""

    def with_table(cache: KVCache) -> KVCache:
        return cache._replace(block_table=jnp.copy(table))  # one buffer each, or they could not be donated

    return state._replace(
        cache=with_table(state.cache),
        speculators=tuple(with_table(s) if isinstance(s, KVCache) else s for s in state.speculators),
        active_B=state.active_B & taken_B,
    )


def admit(state: DecodeState, slot: Int[Array, ""], request: Admission, *, program: StepProgram) -> DecodeState:
    """Give a slot to a request; counters and rates start afresh."""

    committed = request.prompt_len if request.committed is None else request.committed
    cached = jnp.int32(0) if request.cached is None else request.cached

    def starting(cache: KVCache, longest: int) -> KVCache:
        return cache._replace(length_B=cache.length_B.at[slot].set(jnp.minimum(cached, longest)))

    def put(field_BX: Array, value_X: Array) -> Array:
        return field_BX.at[slot].set(value_X)

    key_B2 = request_key(request.sampling.key_B2[0], request.sample)[None]
    sampling = request.sampling._replace(key_B2=key_B2)
    allowed_n = jnp.bool_(True) if request.allowed_n is None else request.allowed_n
    max_nodes = jnp.int32(program.num_rows - 1) if request.max_nodes is None else request.max_nodes
    return state._replace(
        token_BS=put(state.token_BS, request.token_S),
        committed_B=put(state.committed_B, committed),
        prompt_len_B=put(state.prompt_len_B, request.prompt_len),
        limit_B=put(state.limit_B, request.limit),
        active_B=put(state.active_B, jnp.bool_(True) if request.cached is None else cached >= committed - 1),
        finish_B=state.finish_B.at[slot].set(RUNNING),
        is_stop_BV=put(state.is_stop_BV, request.is_stop_V),
        sampling=jax.tree.map(lambda field_BX, value_1X: put(field_BX, value_1X[0]), state.sampling, sampling),
        cache=starting(state.cache, state.token_BS.shape[1]),
        speculators=tuple(
            s_state if s.cached_model is None else starting(s_state, s.cached_model.max_len)
            for s, s_state in zip(program.speculators, state.speculators, strict=True)
        ),
        allowed_Bn=put(state.allowed_Bn, allowed_n),
        max_nodes_B=put(state.max_nodes_B, max_nodes),
        rate_BJ=put(state.rate_BJ, jnp.asarray(program.prior_rates())),
        stats=jax.tree.map(lambda counter_BX: counter_BX.at[slot].set(0), state.stats),
    )


def prefill_chunk(
    params: DecodeParams, state: DecodeState, slot: Int[Array, ""], *, program: StepProgram, chunk: int
) -> tuple[DecodeState, Float[Array, "D T"]]:
    """Put the next `chunk` tokens of a slot into the LLM's and the SSMs' caches.

    The last token stays out: it is the root of the first step, whose pass computes its K/V and its logits. Once all
    others are in, the slot decodes.

    Returns:
      The state, and the LLM's activations behind those tokens (for `prompt_logprobs`).
    """
    end = state.committed_B[slot] - 1

    def run(model: Params, config: ModelConfig, cache: KVCache, longest: int) -> tuple[KVCache, Array]:
        count = jnp.clip(jnp.minimum(end, longest) - cache.length_B[slot], 0, chunk)
        count = jnp.where(slot < state.committed_B.shape[0], count, 0)  # another group of devices has the slot
        append = functools.partial(_append_prompt, config=config, program=program, chunk=chunk)
        append = append if config is program.llm else whole_on_each_device(append)
        return append(model, cache, state.token_BS[slot], state.prompt_len_B[slot], slot, count)

    speculators = tuple(
        s_state if s.cached_model is None else run(model, s.cached_model.config, s_state, s.cached_model.max_len)[0]
        for s, s_state, model in zip(program.speculators, state.speculators, params.speculators, strict=True)
    )
    cache, x_DT = run(params.llm, program.llm, state.cache, state.token_BS.shape[1])
    active_B = state.active_B.at[slot].set(cache.length_B[slot] >= end)
    return state._replace(cache=cache, speculators=speculators, active_B=active_B), x_DT


def prompt_logprobs(
    params: DecodeParams, state: DecodeState, slot: Int[Array, ""], x_DT: Float[Array, "D T"], start: Int[Array, ""],
    *, program: StepProgram,
) -> ChosenLogprobs:  # fmt: skip
    """Log-probabilities of the prompt's tokens behind those of a chunk.

    Args:
      params: the models.
      state: of the slots.
      slot: of the request.
      x_DT: what `prefill_chunk` returned.
      start: position of the chunk's first token.
      program: what is compiled.

    Returns:
      One entry per token of the chunk, for the token that follows it; rows behind the prompt's end mean nothing.
    """
    logits_VT = vocabulary_logits(params.llm, x_DT, config=program.llm, access=weight_access(program.offloads))
    position_T = start + 1 + jnp.arange(x_DT.shape[1], dtype=jnp.int32)
    next_T = state.token_BS[slot].at[position_T].get(mode="fill", fill_value=0)
    return chosen_logprobs(logits_VT, next_T, num_top=program.num_logprobs, top_k=top_k)


def _append_prompt(
    params: Params, cache: KVCache, token_S: Int[Array, " S"], prompt_len: Int[Array, ""], slot: Int[Array, ""],
    count: Int[Array, ""], *, config: ModelConfig, program: StepProgram, chunk: int,
) -> tuple[KVCache, Float[Array, "D T"]]:  # fmt: skip
    """One chain of `chunk` rows of one slot; rows from `count` on are padding and are dropped."""
    start = cache.length_B[slot]
    step_Q = jnp.arange(chunk, dtype=jnp.int32)
    position_1Q = (start + jnp.where(step_Q < count, step_Q, 0))[None]
    token_1Q = token_S[position_1Q]
    view = cache._replace(block_table=cache.block_table[slot][None], length_B=start[None])

    def run() -> tuple[Array, tuple[LayerKV, ...]]:
        return forward(
            params, token_1Q, position_1Q, view, causal_words(chunk)[None],
            config=config, prompt_len_B=prompt_len[None], implementation=program.implementation,
            access=weight_access(program.offloads and config is program.llm),
        )  # fmt: skip

    x_DT, rows = read_first(count > 0, run)
    return commit(cache, rows, count[None], slot[None]), x_DT
