"""What a request returns; fields as in vLLM. Free of jax."""

import dataclasses

import numpy as np

from specinfer_jax.metrics import RequestStats

MAX_LOGPROBS = 20
"""Most alternatives per token that `logprobs` and `prompt_logprobs` may ask for."""


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probabilities of consecutive tokens, before penalties, bias and temperature; K = MAX_LOGPROBS."""

    logprob_T: np.ndarray
    """float32 `[T]`: of every token."""
    rank_T: np.ndarray
    """int32 `[T]`: 1 where no token was likelier."""
    top_id_TK: np.ndarray
    """int32 `[T, K]`: the likeliest tokens, likeliest first; cut to what the vocabulary holds."""
    top_logprob_TK: np.ndarray
    """float32 `[T, K]`: theirs."""


@dataclasses.dataclass(frozen=True)
class Logprob:
    """One token at one place."""

    logprob: float
    """Natural logarithm of its probability before penalties, bias and temperature."""
    rank: int
    """1 where no token was likelier."""
    decoded_token: str | None
    """The token's own text, U+FFFD for parts of characters; None for an id without text."""


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Number of the continuation, from 0; below `n`."""
    text: str
    """Decoded tokens, up to the stop string or the stop token."""
    token_ids: list[int]
    """Generated ids; the last is the stop token, or the one that completed the stop string."""
    finish_reason: str
    """"stop": a stop string or token; "length": max_tokens or the context ended; "error": see `RequestOutput.error`."""
    stop_reason: int | str | None = None
    """The stop string, or the stop token if it is one of `stop_token_ids`; None for the model's own end of sequence."""
    logprobs: list[dict[int, Logprob]] | None = None
    """If asked for, per token: the token itself first, then the likeliest."""
    cumulative_logprob: float | None = None
    """Sum over the tokens' own, if logprobs are asked for."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """Everything about one finished request."""

    request_id: str
    """Position of the prompt in its call."""
    prompt: str | None
    """The prompt's text if it was given as text or chat."""
    prompt_token_ids: list[int]
    """Ids the LLM continued."""
    outputs: list[CompletionOutput]
    """The n continuations, in order."""
    stats: RequestStats | None
    """Steps, acceptance and seconds, summed over the continuations; None for a refused request."""
    error: str | None = None
    """Why the request was refused or failed, None otherwise."""
    finished: bool = True
    """Always true here; streams yield `StreamOutput`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """If asked for, per prompt token: the token itself first, then the likeliest; None for the first token."""

    @property
    def text(self) -> str:
        """Text of the first continuation."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Ids of the first continuation."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Finish reason of the first continuation."""
        return self.outputs[0].finish_reason


@dataclasses.dataclass(frozen=True)
class StreamOutput:
    """What one step added to one continuation of a streamed request."""

    text: str
    """New text; empty while a character is incomplete, or while a stop string may yet complete."""
    token_ids: list[int]
    """Ids this step committed."""
    finish_reason: str | None = None
    """Set with the continuation's last piece, as in `CompletionOutput`."""
    stats: RequestStats | None = None
    """Set with the last piece."""
    index: int = 0
    """Number of the continuation, from 0; below `n`."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Of these ids, as in `CompletionOutput`."""
    stop_reason: int | str | None = None
    """Set with the last piece, as in `CompletionOutput`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With the first piece of continuation 0, as in `RequestOutput`."""
    error: str | None = None
    """Why the continuation failed; with the last piece."""
