"""From a request's fields to `SamplingParams` and `RequestSpeculation`, and the rules between fields. Free of jax."""

import dataclasses
from typing import Any

from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import RequestSpeculation
from specinfer_jax.serving.openai.errors import ApiError
from specinfer_jax.serving.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest

COMPLETION_TOKENS = 16
"""Most tokens of a completion that names no limit, as OpenAI and vLLM have it; a chat then has all of the context."""
_SAME = tuple(
    name
    for name in (field.name for field in dataclasses.fields(SamplingParams))
    if name in GenerationRequest.model_fields
)
"""Fields that mean the same in both."""


def chat_params(request: ChatCompletionRequest, *, cap: int | None) -> SamplingParams:
    """How a chat is continued; `cap` is the server's own limit to an answer's tokens.

    Raises:
      ApiError, SamplingError: fields contradict each other.
    """
    _check(request)
    limits = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them.", param="max_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    return SamplingParams(max_tokens=_capped(next(iter(limits), None), cap), logprobs=num_top, **_same(request))


def completion_params(request: CompletionRequest, *, cap: int | None) -> SamplingParams:
    """How a text is continued. Where no tokens are asked for, one is, for the caller to drop.

    Raises:
      ApiError, SamplingError: fields contradict each other.
    """
    _check(request)
    if request.best_of not in (None, request.n or 1):
        raise ApiError(400, "best_of is supported only if it equals n.", param="best_of", code="unsupported_value")
    if request.stream and request.echo and request.logprobs is not None:
        raise ApiError(400, "echo with logprobs cannot be streamed.", param="stream", code="unsupported_value")
    wanted = COMPLETION_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
    same = _same(request)
    if request.echo and request.logprobs is not None:
        same["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return SamplingParams(max_tokens=_capped(wanted, cap), logprobs=request.logprobs, **same)


def speculation(request: GenerationRequest) -> RequestSpeculation | None:
    """How the request wants to be speculated on."""
    options = request.speculation
    if options is None:
        return None
    ssms = None if options.ssms is None else tuple(options.ssms)
    return RequestSpeculation(options.enabled, options.max_nodes, ssms, options.tree)


def time_limit(request: GenerationRequest, own: float | None) -> float | None:
    """Seconds that the request may take: the shorter of its limit and the server's."""
    return min((limit for limit in (request.timeout, own) if limit is not None), default=None)


def _check(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed.", param="prompt_logprobs")


def _same(request: GenerationRequest) -> dict[str, Any]:
    same = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    if "seed" in same:
        # JSON schemas cannot say where 64 bits end: their limits are floats.
        same["seed"] %= 2**64
    return same


def _capped(wanted: int | None, cap: int | None) -> int | None:
    return min((limit for limit in (wanted, cap) if limit is not None), default=None)
