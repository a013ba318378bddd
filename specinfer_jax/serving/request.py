"""What the engine is asked for and what it hands back, and how a request becomes arrays."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from specinfer_jax.errors import SamplingError
from specinfer_jax.metrics import RequestStats
from specinfer_jax.outputs import TokenLogprobs
from specinfer_jax.sampling_params import GREEDY, SamplingParams
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.speculation.narrow import Narrowed
from specinfer_jax.speculation.sampling import (
    ANY_TOKEN,
    MAX_BAD_LENGTH,
    MAX_BAD_SEQUENCES,
    ChosenLogprobs,
    SamplingState,
)
from specinfer_jax.speculation.slots import Admission


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One prompt to continue; already checked by the caller."""

    prompt_ids: Sequence[int]
    """At least one id, fewer than the engine's max_model_len."""
    max_tokens: int
    """Most tokens to generate; the engine's max_model_len may end the request earlier."""
    stop_token_ids: frozenset[int]
    """Ids that end the request; the id itself is emitted."""
    sampling: SamplingParams = GREEDY
    """How tokens are chosen; `stop`, `n`, `seed`, `bad_words` and everything about text are the caller's."""
    seed: int = 0
    """Random numbers of this request, 64 bits; the caller draws one where the user gave none."""
    sample: int = 0
    """Which of the n continuations of one seed this is."""
    bad_sequences: Sequence[Sequence[int]] = ()
    """Token sequences that are never completed (`bad_words`, encoded)."""
    watch: Callable[[list[int]], int | None] | None = None
    """Host's stop rule: gets every step's new ids; returns how many of them to keep if the request ends with them, else
    None. It sees each id once; the id that ends a request on the device is among them."""
    priority: int = 0
    """Lower goes first (request_manager.py)."""
    speculation: RequestSpeculation | None = None
    """Which part of the engine's trees it wants; None: all."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """New tokens of one request."""

    index: int
    """Position of the request in the call."""
    new_token_ids: list[int]
    """Tokens committed since the last progress."""
    finish_reason: str | None
    """"stop", "length" or "error" with the last tokens, else None."""
    stats: RequestStats | None
    """Counters, with the last tokens only."""
    logprobs: TokenLogprobs | None = None
    """Of the new tokens, if the request asks for them."""
    prompt_logprobs: TokenLogprobs | None = None
    """Of the prompt's tokens behind the first, with the first progress, if the request asks for them."""
    error: str | None = None
    """Why the request failed, with finish reason "error"."""


def check_request(request: EngineRequest) -> None:
    """Refuse what no slot has room for.

    Raises:
      SamplingError: more or longer banned sequences than fit.
    """
    sequences = _of_several_tokens(request)
    longest = max(map(len, sequences), default=0)
    if len(sequences) > MAX_BAD_SEQUENCES or longest > MAX_BAD_LENGTH:
        raise SamplingError(
            f"bad_words come to {len(sequences)} sequences of up to {longest} tokens; at most {MAX_BAD_SEQUENCES} of "
            f"more than one token fit, each of at most {MAX_BAD_LENGTH}"
        )


def token_limit(request: EngineRequest, max_model_len: int) -> int:
    """Tokens at which a request ends, prompt included."""
    return min(len(request.prompt_ids) + request.max_tokens, max_model_len)


def admission(request: EngineRequest, *, max_model_len: int, vocab_size: int) -> Admission:
    """What `admit` puts into a slot, as numpy arrays, which a compiled call takes as they are."""
    count = len(request.prompt_ids)
    token_S: Any = np.zeros(max_model_len, np.int32)
    token_S[:count] = request.prompt_ids
    return Admission(
        token_S=token_S,
        prompt_len=_whole(count),
        limit=_whole(token_limit(request, max_model_len)),
        is_stop_V=_is_among(request.stop_token_ids, vocab_size),
        sampling=_sampling(request, vocab_size),
        sample=_whole(request.sample),
    )


def readmission(
    request: EngineRequest, tokens: Sequence[int], cached: int, part: Narrowed, *, max_model_len: int, vocab_size: int
) -> Admission:
    """What the engine admits: `admission` with what is known of the request's tokens and pages, and of its trees.

    Args:
      request: the request.
      tokens: its prompt, and what it had generated before it was put back.
      cached: how many of them are in its pages.
      part: of the compiled trees.
      max_model_len: S.
      vocab_size: V.
    """
    fresh = admission(request, max_model_len=max_model_len, vocab_size=vocab_size)
    token_S: Any = fresh.token_S
    token_S[: len(tokens)] = tokens
    allowed_n: Any = part.allowed_n
    return fresh._replace(
        token_S=token_S, committed=_whole(len(tokens)), cached=_whole(cached), allowed_n=allowed_n,
        max_nodes=_whole(part.max_nodes),
    )  # fmt: skip


def _whole(value: int) -> Any:
    return np.int32(value)


def _is_among(ids: Iterable[int], vocab_size: int) -> Any:
    is_among_V = np.zeros(vocab_size, bool)
    is_among_V[[i for i in ids if i < vocab_size]] = True
    return is_among_V


def _of_several_tokens(request: EngineRequest) -> list[Sequence[int]]:
    return [ids for ids in request.bad_sequences if len(ids) > 1]


def _sampling(request: EngineRequest, vocab_size: int) -> SamplingState:
    """One slot's `SamplingState`; the key is still the seed."""
    params = request.sampling
    bias_V: Any = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias_V[~_is_among(params.allowed_token_ids, vocab_size)] = -np.inf
    for token_id, bias in params.logit_bias:
        if token_id < vocab_size:
            bias_V[token_id] += bias
    bias_V[_is_among([ids[0] for ids in request.bad_sequences if len(ids) == 1], vocab_size)] = -np.inf
    bad_XY: Any = np.full((MAX_BAD_SEQUENCES, MAX_BAD_LENGTH), ANY_TOKEN, np.int32)
    for row_Y, ids in zip(bad_XY, _of_several_tokens(request), strict=False):
        row_Y[-len(ids) :] = ids
    is_shaped = (
        bool(bias_V.any()) or bool((bad_XY[:, -1] != ANY_TOKEN).any()) or params.min_tokens > 0
        or params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    )  # fmt: skip

    def one(value: float | int, dtype: type = np.float32) -> Any:
        return np.full((1,), value, dtype)

    seed_12: Any = np.array([divmod(request.seed % 2**64, 2**32)], np.uint32)
    return SamplingState(
        temperature_B=one(0 if params.is_greedy else params.temperature),
        top_k_B=one(min(params.top_k, vocab_size), np.int32),
        top_p_B=one(params.top_p),
        min_p_B=one(params.min_p),
        repetition_penalty_B=one(params.repetition_penalty),
        presence_penalty_B=one(params.presence_penalty),
        frequency_penalty_B=one(params.frequency_penalty),
        min_tokens_B=one(params.min_tokens, np.int32),
        bias_BV=bias_V[None],
        bad_BXY=bad_XY[None],
        is_shaped_B=one(is_shaped, bool),
        wants_logprobs_B=one(params.logprobs is not None, bool),
        key_B2=seed_12,
    )


def token_logprobs(parts: Sequence[ChosenLogprobs], counts: Sequence[int]) -> TokenLogprobs:
    """The first `count` entries of every part, in a row, on the host."""
    columns = zip(*parts, strict=True)
    return TokenLogprobs(
        *(np.concatenate([np.asarray(x)[:n] for x, n in zip(column, counts, strict=True)]) for column in columns)
    )
