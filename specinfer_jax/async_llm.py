"""`AsyncLLM`: requests that come and go while others decode; what `specinfer serve` runs.

llm = AsyncLLM("smollm2-135m-instruct", max_num_seqs=4)
async for piece in llm.generate(llm.encode("Once upon a time"), SamplingParams(max_tokens=64), request_id="r1"):
    print(piece.text, end="")

One thread owns the device and takes one step after the other; requests join and leave between steps. Texts are put
together in that thread too, and handed to the event loop that asked.
"""

import asyncio
import dataclasses
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from specinfer_jax.completion import Completion
from specinfer_jax.config import DEFAULT_MODEL, ONE_DEVICE, Speculation
from specinfer_jax.errors import ConfigError
from specinfer_jax.llm import LLM
from specinfer_jax.opened import Model
from specinfer_jax.outputs import StreamOutput
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import (
    Buckets,
    EngineDeadError,
    EngineSnapshot,
    QueueFullError,
    RequestCancelledError,
    RequestSpeculation,
    RequestTimeoutError,
    ServingError,
)
from specinfer_jax.serving.inbox import News
from specinfer_jax.serving.request import EngineRequest, Progress
from specinfer_jax.tokenizer import Tokenizer

STEP_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds, of the histogram of steps."""


@dataclasses.dataclass
class _Ticket:
    """One continuation on its way."""

    request: EngineRequest
    completion: Completion
    pieces: asyncio.Queue[StreamOutput | ServingError]
    loop: asyncio.AbstractEventLoop

    def post(self, piece: StreamOutput | ServingError) -> None:
        """Hand a piece to the event loop that asked; one that is closed asks no more."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:
            return


class _Desk:
    """The engine's inbox: what is new, cancellations, and the end. All methods are thread-safe."""

    survives_faults = True

    def __init__(self, max_queue: int, on_step: Callable[[float], None], num_waiting: Callable[[], int]) -> None:
        """`num_waiting`: requests that wait for a slot in the engine."""
        self._on_step, self._num_waiting = on_step, num_waiting
        self._step_began: float | None = None
        self._changed = threading.Condition()
        self._max_queue, self._numbers = max_queue, itertools.count()
        self._new: list[int] = []
        self._cancelled: set[int] = set()
        self._is_closed = False
        self.tickets: dict[int, _Ticket] = {}
        """Everything that has not ended, by index."""

    def add(self, tickets: Sequence[_Ticket]) -> list[int]:
        """Queue all tickets, or none."""
        with self._changed:
            if self._is_closed:
                raise EngineDeadError("the engine takes no more requests")
            if self.queued + len(tickets) > self._max_queue:
                raise QueueFullError(f"the queue holds {self.queued} of {self._max_queue} requests")
            indices = [next(self._numbers) for _ in tickets]
            self.tickets.update(zip(indices, tickets, strict=True))
            self._new += indices
            self._changed.notify_all()
            return indices

    def cancel(self, indices: Sequence[int]) -> None:
        """Give requests up; those that have ended are left alone."""
        with self._changed:
            gone = {index for index in indices if self.tickets.pop(index, None) is not None}
            self._cancelled |= gone - set(self._new)
            self._new = [index for index in self._new if index not in gone]
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing new from now on; what is queued is still served."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def take(self, *, is_idle: bool) -> News | None:
        """As `Inbox.take`; between two calls while requests are under way lies one step."""
        if self._step_began is not None:
            self._on_step(time.perf_counter() - self._step_began)
            self._step_began = None
        with self._changed:
            while is_idle and not (self._new or self._is_closed):
                self._changed.wait()
            if is_idle and not self._new and self._is_closed:
                return None
            taken, self._new = self._new, []
            cancelled, self._cancelled = frozenset(self._cancelled), set()
            self._step_began = time.perf_counter() if taken or not is_idle else None
            return News([(index, self.tickets[index].request) for index in taken], cancelled)

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._new) + self._num_waiting()


class AsyncLLM:
    """A model that serves requests side by side; an `AsyncEngine`."""

    def __init__(
        self, model: str | os.PathLike[str] | Model = DEFAULT_MODEL, *, speculation: Speculation | None = None,
        dtype: str = "auto", max_model_len: int | None = None, max_num_seqs: int | None = None, max_queue: int = 1024,
        cache_tokens: int | None = None, shares_prefixes: bool = True, prefill_tokens: int | None = None,
        mesh: str = ONE_DEVICE, offload: str = "none",
    ) -> None:  # fmt: skip
        """Load, compile and measure, as `LLM`; then start the thread that owns the device.

        Args:
          model, speculation, dtype, max_model_len, max_num_seqs, cache_tokens, shares_prefixes, prefill_tokens,
            mesh, offload: as for `LLM`.
          max_queue: most requests that wait; more are refused.
        """
        if max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, got {max_queue}")
        self._llm = LLM(
            model, speculation=speculation, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            cache_tokens=cache_tokens, shares_prefixes=shares_prefixes, prefill_tokens=prefill_tokens, mesh=mesh,
            offload=offload,
        )  # fmt: skip
        self.model_name = self._llm.model.location
        self.max_model_len = self._llm.max_model_len
        self.tokenizer: Tokenizer = self._llm.tokenizer
        self._figures = _Figures()
        manager = self._llm.engine.manager
        self._desk = _Desk(max_queue, self._figures.step, lambda: manager.num_waiting)
        self._thread = threading.Thread(target=self._serve, name="specinfer engine", daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        """Whether a request starts at once."""
        return self._thread.is_alive()

    def encode(self, text: str) -> list[int]:
        """The prompt's ids."""
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of a chat, rendered with the model's template."""
        return self.tokenizer.encode_chat(messages, **options)

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0,
        timeout: float | None = None, speculation: RequestSpeculation | None = None,
    ) -> AsyncIterator[StreamOutput]:  # fmt: skip
        """Continue a prompt, piece by piece; as `AsyncEngine.generate`."""
        prompt_ids = self._llm.check_prompt(prompt_ids)
        jobs = self._llm.jobs(prompt_ids, params, speculation=speculation, priority=priority)
        for job in jobs:
            self._llm.engine.check(job.request)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        tickets = [_Ticket(job.request, job.completion, pieces, loop) for job in jobs]
        indices = self._desk.add(tickets)
        self._figures.prompt_tokens += len(prompt_ids)
        unfinished = len(tickets)
        deadline = None if timeout is None else loop.time() + timeout
        try:
            while unfinished:
                left = None if deadline is None else deadline - loop.time()
                try:
                    piece = await asyncio.wait_for(pieces.get(), left)
                except TimeoutError:
                    raise RequestTimeoutError(f"request {request_id} took more than {timeout:g} seconds") from None
                if isinstance(piece, ServingError):
                    raise piece
                unfinished -= piece.finish_reason is not None
                yield piece
        finally:
            if unfinished:
                self._figures.cancelled += unfinished
            self._desk.cancel(indices)

    def snapshot(self) -> EngineSnapshot:
        """Counters and gauges."""
        open_requests, manager = len(self._desk.tickets), self._llm.engine.manager
        queued = min(self._desk.queued, open_requests)
        return self._figures.snapshot(
            is_alive=self._thread.is_alive(), queued=queued, running=open_requests - queued, slots=manager.num_slots,
            pages_used=manager.pages_used, pages_total=manager.num_pages, preemptions=manager.preemptions,
        )  # fmt: skip

    async def drain(self, timeout: float | None) -> None:
        """Take no new requests, let the others end, give up what is left after `timeout` seconds, and stop."""
        self._desk.close()
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._thread.is_alive():
            if deadline is not None and time.monotonic() > deadline:
                left = dict(self._desk.tickets)
                self._desk.cancel(list(left))
                for ticket in left.values():
                    ticket.post(RequestCancelledError("the engine was stopped before the answer's end"))
            await asyncio.sleep(0.02)

    def _serve(self) -> None:
        """The engine's thread."""
        try:
            for progress in self._llm.engine.serve(self._desk):
                self._figures.count(progress)
                self._deliver(progress)
        finally:
            self._desk.close()
            for ticket in list(self._desk.tickets.values()):
                ticket.post(EngineDeadError("the engine has ended"))

    def _deliver(self, progress: Progress) -> None:
        ticket = self._desk.tickets.get(progress.index)
        if ticket is None:
            return  # cancelled while the step ran
        if progress.stats is not None and ticket.request.sample == 0:  # the prompt counts once, whatever n is
            self._figures.cached_prompt_tokens += progress.stats.cached_tokens
        piece = ticket.completion.add(progress)
        if piece.finish_reason is not None:
            self._desk.tickets.pop(progress.index, None)
        ticket.post(piece)


class _Figures:
    """Counters since the start; written by the engine's thread, read by any."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_prompt_tokens = self.generated_tokens = 0
        self.cancelled = self.failed = self.steps = 0
        self._proposed, self._accepted = Counter[int](), Counter[int]()
        self._proposed_by, self._accepted_by = Counter[str](), Counter[str]()
        self._step_counts = [0] * (len(STEP_BOUNDS) + 1)
        self._step_total = 0.0

    def count(self, progress: Progress) -> None:
        """Take in what a step gave one request."""
        self.generated_tokens += len(progress.new_token_ids)
        self.failed += progress.finish_reason == "error"
        stats = progress.stats
        if stats is None:
            return
        self._proposed.update(dict(enumerate(stats.proposed_by_position)))
        self._accepted.update(dict(enumerate(stats.accepted_by_position)))
        self._proposed_by.update(stats.proposed_by_speculator)
        self._accepted_by.update(stats.accepted_by_speculator)

    def step(self, seconds: float) -> None:
        """Take in one step of all slots, prefill of new requests included."""
        self.steps += 1
        self._step_counts[sum(seconds > bound for bound in STEP_BOUNDS)] += 1
        self._step_total += seconds

    def snapshot(self, **gauges: Any) -> EngineSnapshot:
        """The counters with the gauges of now."""

        def by_position(counter: Counter[int]) -> list[int]:
            return [counter[i] for i in range(len(counter))]

        return EngineSnapshot(
            **gauges, steps=self.steps, step_seconds=Buckets(STEP_BOUNDS, tuple(self._step_counts), self._step_total),
            prompt_tokens=self.prompt_tokens, cached_prompt_tokens=self.cached_prompt_tokens,
            generated_tokens=self.generated_tokens, cancelled=self.cancelled,
            failed=self.failed, proposed_by_position=by_position(self._proposed),
            accepted_by_position=by_position(self._accepted), proposed_by_speculator=dict(self._proposed_by),
            accepted_by_speculator=dict(self._accepted_by),
        )  # fmt: skip
