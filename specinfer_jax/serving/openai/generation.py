"""One request under way: its prompts in the engine, their pieces in one stream, what they cost. Free of jax.

A request ends in one of three ways: the pieces end, an error ends them, or the client has gone and `aclose` gives all
of it up at once. Nothing is given up that has ended by itself.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

from specinfer_jax.metrics import RequestStats, total
from specinfer_jax.outputs import StreamOutput
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import RequestFailedError
from specinfer_jax.serving.openai.errors import ApiError
from specinfer_jax.serving.openai.prometheus import ServerMetrics
from specinfer_jax.serving.openai.responses import CompletionTokensDetails, PromptTokensDetails, Usage

Result = TypeVar("Result")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's channel from the client."""


class ClientGone(ApiError):
    """Nobody waits for the answer any more; the status is nginx's, for the log alone."""

    def __init__(self) -> None:
        super().__init__(499, "The client closed the connection.", code="client_closed_request")


class Piece(NamedTuple):
    """What one step added to one continuation of one prompt."""

    prompt: int
    """Position of the prompt in the request."""
    output: StreamOutput
    """The piece."""


class Pieces:
    """The pieces of several prompts as they come; those of one continuation in order.

    Every prompt's iterator lives in a task of its own from its first to its last step.
    """

    def __init__(self, streams: Sequence[AsyncIterator[StreamOutput]], metrics: ServerMetrics) -> None:
        """Start all of them; `aclose` must be called in the end."""
        self._queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self._metrics = metrics
        self._running = len(streams)
        self._tasks = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(streams)]

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> Piece:
        while self._running:
            entry = await self._queue.get()
            if isinstance(entry, Piece):
                return entry
            if isinstance(entry, Exception):
                raise entry
            self._running -= 1
        raise StopAsyncIteration

    async def first(self) -> Piece:
        """The first piece, with which everything is known that is wrong with the request."""
        async for piece in self:
            return piece
        raise RequestFailedError("the engine ended a request without an answer")

    async def aclose(self) -> None:
        """Give up what has not ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, prompt: int, stream: AsyncIterator[StreamOutput]) -> None:
        last: dict[int, float] = {}  # continuation -> time of its newest piece
        began = time.perf_counter()
        try:
            async for output in stream:
                now = time.perf_counter()
                before = last.get(output.index)
                since = now - (began if before is None else before)
                self._metrics.on_piece(since, len(output.token_ids), is_first=before is None)
                last[output.index] = now
                self._queue.put_nowait(Piece(prompt, output))
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()
            self._queue.put_nowait(None)


class Tally:
    """What a request has cost so far."""

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._cached_tokens = self._completion_tokens = 0
        self._stats: list[RequestStats] = []

    def add(self, output: StreamOutput) -> None:
        """Count a piece."""
        self._completion_tokens += len(output.token_ids)
        if output.stats is not None:
            self._stats.append(output.stats)
            if output.index == 0:  # the other continuations of a prompt share it with the first
                self._cached_tokens += output.stats.cached_tokens

    @property
    def stats(self) -> RequestStats | None:
        """Counters of all continuations that have ended; None before the first has."""
        return total(self._stats) if self._stats else None

    def usage(self) -> Usage:
        """The same for the client."""
        stats = self.stats
        accepted = rejected = 0
        if stats is not None:
            accepted = sum(stats.accepted_by_position)
            # A node that several speculators proposed counts for each of them.
            rejected = sum(stats.proposed_by_speculator.values()) - sum(stats.accepted_by_speculator.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
            ),
            tokens_per_step=None if stats is None else stats.tokens_per_step,
        )


def check_piece(output: StreamOutput, params: SamplingParams) -> None:
    """Refuse to go on where a continuation could not.

    Raises:
      ApiError: 400 if the request's own fields may ban every token, else 500.
    """
    if output.finish_reason != "error":
        return
    bans = params.allowed_token_ids is not None or params.bad_words or params.logit_bias or params.min_tokens
    message = output.error or "the continuation failed"
    if bans:
        raise ApiError(400, message, code="no_token_left")
    raise ApiError(500, message, kind="server_error", code="request_failed")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do some work for a client, and stop it as soon as the client has gone. The body must have been read.

    Raises:
      ClientGone: it has.
    """
    task, watcher = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for running in (task, watcher):
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await running


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
