"""What a request returns; fields as in vLLM. Free of jax."""

import dataclasses

from specinfer_jax.metrics import RequestStats


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    """Number of the continuation; 0 while n is 1."""
    text: str
    """Decoded tokens."""
    token_ids: list[int]
    """Generated ids, the stop token included."""
    finish_reason: str
    """"stop": a stop token; "length": max_tokens or the context ended; "error": refused, see `RequestOutput.error`."""
    stop_reason: int | None = None
    """The stop token if it was one of `stop_token_ids`, None for the model's own end of sequence."""


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
    """The continuations; one while n is 1."""
    stats: RequestStats | None
    """Steps, acceptance and seconds; None for a refused request."""
    error: str | None = None
    """Why the request was refused, None otherwise."""
    finished: bool = True
    """Always true here; streams yield `StreamOutput`."""

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
    """What one step added to a streamed request."""

    text: str
    """New text; empty while a character is incomplete."""
    token_ids: list[int]
    """Ids this step committed."""
    finish_reason: str | None = None
    """Set with the last piece."""
    stats: RequestStats | None = None
    """Set with the last piece."""
