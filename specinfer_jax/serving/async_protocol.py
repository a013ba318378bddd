"""What the server asks of an engine: `AsyncEngine`, the errors it raises, the figures it keeps. Free of jax.

async for piece in engine.generate(ids, params, request_id="r1"):      # StreamOutput, all n continuations interleaved
    print(piece.index, piece.text, piece.finish_reason)

Everything runs in one event loop; the thread that owns the device is the engine's own business.
"""

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specinfer_jax.outputs import StreamOutput
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.request_speculation import RequestSpeculation

if TYPE_CHECKING:
    from specinfer_jax.tokenizer import Tokenizer


class ServingError(RuntimeError):
    """A request was not served, or not to its end, for a reason that lies outside of it."""


class QueueFullError(ServingError):
    """The queue has no room for the request; nothing was started."""

    def __init__(self, message: str = "the queue is full", *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which it may be worth to ask again."""


class RequestTimeoutError(ServingError):
    """The request did not end within its `timeout`; it holds nothing any more."""


class RequestCancelledError(ServingError):
    """The engine gave the request up, at the end of `drain`'s time-out for example."""


class RequestFailedError(ServingError):
    """A fault in a step hit this request; the engine goes on."""


class EngineDeadError(ServingError):
    """The engine has ended or cannot go on; no request will be served again."""


@dataclasses.dataclass(frozen=True)
class Buckets:
    """A histogram that only grows."""

    bounds: Sequence[float] = ()
    """Upper bounds, ascending; a last bucket without bound is understood."""
    counts: Sequence[int] = (0,)
    """Observations of each bucket alone, one more than bounds."""
    total: float = 0.0
    """Sum of what was observed."""


@dataclasses.dataclass(frozen=True)
class EngineSnapshot:
    """Counters since the start and gauges of now."""

    is_alive: bool = True
    """False once the engine cannot serve any more."""
    queued: int = 0
    """Sequences that wait for a slot, preempted ones included."""
    running: int = 0
    """Sequences in slots."""
    slots: int = 0
    """Slots there are."""
    pages_used: int = 0
    """Cache pages that a sequence or a shared prefix holds."""
    pages_total: int = 0
    """Cache pages there are."""
    steps: int = 0
    """LLM passes, each over all slots."""
    step_seconds: Buckets = Buckets()
    """Wall time of a step."""
    prompt_tokens: int = 0
    """Prompt tokens taken in, those of shared prefixes included."""
    cached_prompt_tokens: int = 0
    """Those of them that a shared prefix spared the LLM."""
    generated_tokens: int = 0
    """Tokens committed and kept."""
    preemptions: int = 0
    """Sequences put back because pages ran out."""
    cancelled: int = 0
    """Sequences given up before their end."""
    failed: int = 0
    """Sequences that a fault ended."""
    proposed_by_position: Sequence[int] = ()
    """As in `RequestStats`, over all requests."""
    accepted_by_position: Sequence[int] = ()
    """As in `RequestStats`, over all requests."""
    proposed_by_speculator: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """As in `RequestStats`, over all requests."""
    accepted_by_speculator: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """As in `RequestStats`, over all requests."""


@runtime_checkable
class AsyncEngine(Protocol):
    """What serves requests side by side. `AsyncLLM` is one; tests have another without a model."""

    model_name: str
    """The name that requests may call the model by."""
    max_model_len: int
    """Most tokens of one request, prompt included; a longer answer ends there with `length`."""
    tokenizer: "Tokenizer"
    """The model's tokenizer."""

    def is_ready(self) -> bool:
        """Whether everything is compiled, so that a request starts at once."""
        ...

    def encode(self, text: str) -> list[int]:
        """The prompt's ids. May be called from any thread.

        Raises:
          PromptError, TokenizerError: the text is refused.
        """
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a chat, `options` as in `Tokenizer.encode_chat`. May be called from any thread.

        Raises:
          PromptError, TokenizerError: the chat is refused.
        """
        ...

    def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0,
        timeout: float | None = None, speculation: RequestSpeculation | None = None,
    ) -> AsyncIterator[StreamOutput]:  # fmt: skip
        """Continue a prompt: the pieces of all `params.n` continuations, each continuation's own in order.

        The iterator ends when every continuation has had its piece with a `finish_reason`. Closing it (`aclose`), or
        cancelling the task that waits for it, gives the request up at once; after its end that does nothing. A piece
        whose reason is "error" says that this continuation alone could not go on. Nothing has to happen before the
        first piece is asked for, and what is wrong with the request is said by then.

        Args:
          prompt_ids: at least one.
          params: what is asked for.
          request_id: unique among the requests under way; appears in logs.
          priority: requests with a lower number go first, as in vLLM, but nobody is overtaken for ever.
          timeout: seconds from now until the last piece; None: no limit.
          speculation: None: the engine's own.

        Raises:
          SpecInferError: the prompt, a parameter or the speculation does not fit the model.
          QueueFullError: there is no room for all continuations; none was started.
          RequestTimeoutError, RequestCancelledError, RequestFailedError, EngineDeadError: as they say, at any piece.
        """
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges; cheap, waits for nothing."""
        ...

    async def drain(self, timeout: float | None) -> None:
        """Take no new requests, let the others end, give up what is left after `timeout` seconds, and stop.

        What is given up ends with `RequestCancelledError`. May be called again, while a call waits too, to give less
        time.
        """
        ...
