"""The engine: the request manager decides, the device works, progress comes out.

Every iteration takes in what is new, secures pages, prefills, runs steps of all slots that decode, and hands out what
they committed. `run` does that for a list of requests: prompts whole, then bursts that end when a slot finishes.
`serve` does it for requests that come and go: one chunk of a prompt and one step of the others in turn, and while the
device works on a step the host deals with the one before.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specinfer_jax.errors import SamplingError
from specinfer_jax.parallel.sharding import DATA
from specinfer_jax.serving.device import UNTIL_FINISHED, Report
from specinfer_jax.serving.inbox import AllAtOnce, Inbox
from specinfer_jax.serving.plain_steps import PlainSteps
from specinfer_jax.serving.progress import Running, failure
from specinfer_jax.serving.request import EngineRequest, Progress, check_request, readmission, token_limit
from specinfer_jax.serving.request_manager import RequestManager
from specinfer_jax.serving.schedule import Prefill
from specinfer_jax.serving.warm_up import ReadyDevice
from specinfer_jax.speculation.narrow import narrowed
from specinfer_jax.speculation.rules import GREEDY
from specinfer_jax.speculation.slots import Admission
from specinfer_jax.speculation.state import DecodeParams, StepProgram


@dataclasses.dataclass(frozen=True)
class _Pace:
    """How much the engine does between two looks at its inbox."""

    steps: int
    """Most steps of a burst."""
    prefill_passes: int | None
    """Most prefill passes; None: all that there are."""
    overlaps: bool
    """The next step may begin before the host has seen the last one."""


class _Flight(NamedTuple):
    """A burst whose results the host has not seen."""

    report: Report
    steps: int
    slots: list[tuple[int, Running, int]]
    """(slot, request, its visit) of all that decoded."""
    is_plain: bool
    """By the program without speculation."""
    began: float
    """When the device was told, by the engine's clock."""
    is_alone: bool
    """No prefill pass has to end before it begins."""


class Engine(ReadyDevice):
    """Runs requests through one compiled step program; not re-entrant, one call at a time."""

    def __init__(
        self, params: DecodeParams, program: StepProgram, *,
        num_slots: int, max_model_len: int, page_size: int, dtype: DTypeLike, num_pages: int | None = None,
        shares_prefixes: bool = True, prefill_tokens: int | None = None, mesh: Mesh | None = None,
    ) -> None:  # fmt: skip
        """Nothing is compiled yet.

        Args:
          params: of the LLM and the SSMs.
          program: the step.
          num_slots: requests that decode side by side.
          max_model_len: most tokens of a request.
          page_size: tokens of a cache page.
          dtype: of the caches.
          num_pages: pages of every cache; None: enough for all slots at max_model_len. With fewer, requests are put
            back and prefilled again when pages run out; their output does not change.
          shares_prefixes: keep full pages of prompts for later requests that begin in the same way.
          prefill_tokens: most prompt tokens between two steps of those who decode, in `serve`; a pass counts for the
            largest chunk, and there is always one. None: one.
          mesh: as for `Device`; where it splits the slots, each group of devices has pages of its own.

        Raises:
          ConfigError: the pages do not hold one request, or slots or pages do not split over the mesh.
        """
        super().__init__(
            params, program, num_slots=num_slots, max_model_len=max_model_len, page_size=page_size, dtype=dtype,
            num_pages=num_pages, mesh=mesh,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._passes = max(1, (prefill_tokens or 0) // max(self.chunks))
        self.manager = RequestManager(
            num_slots=num_slots, num_pages=self.num_pages, page_size=page_size, max_model_len=max_model_len,
            step_tokens=program.path_len, chunks=self.chunks, shares_prefixes=shares_prefixes,
            num_groups=1 if mesh is None else mesh.shape[DATA],
        )  # fmt: skip
        """The scheduler and its books; read them, and leave the rest to the engine."""
        models = [program.llm, *(s.cached_model.config for s in program.speculators if s.cached_model is not None)]
        self._depends_on_length = any(
            config.rope is not None and config.rope.rope_type == "dynamic" for config in models
        )
        self.clock: Callable[[], float] = time.perf_counter
        """Seconds; what bursts are timed with."""
        self._choice = PlainSteps() if self.has_plain_steps else None
        self._collected_at = 0.0
        self._open: dict[int, Running] = {}
        self._handed_out: list[list[int] | None] | None = None

    def warm_up(self) -> None:
        """Compile every program and measure what trees cost; afterwards no request compiles anything."""
        with self._lock:
            super().warm_up()
            self._lose_caches()  # the probe wrote where it liked

    def run(self, requests: Sequence[EngineRequest], *, stream: bool = False) -> Iterator[Progress]:
        """Continue every request; yields progress as it comes, the last of each request with its finish reason.

        Args:
          requests: any number; those beyond the slots wait.
          stream: one step at a time, so that tokens come out as they are committed.

        Raises:
          SamplingError, SpeculationError: a request cannot be served; nothing was started.
          RuntimeError: another call is running.
        """
        for request in requests:
            self.check(request)
        yield from self._locked(AllAtOnce(requests), _Pace(1 if stream else UNTIL_FINISHED, None, overlaps=False))

    def serve(self, inbox: Inbox) -> Iterator[Progress]:
        """Continue requests as they come, one step at a time, until the inbox says that there will be no more.

        A fault on the host while a request is admitted fails that request. A fault on the device fails those in the
        slots; both give a last progress with finish reason "error", and the engine goes on, after the latter with
        fresh caches.

        Args:
          inbox: asked before every step; its requests must have passed `check`.

        Raises:
          RuntimeError: another call is running.
        """
        yield from self._locked(inbox, _Pace(1, self._passes, overlaps=True))

    def check(self, request: EngineRequest) -> None:
        """Refuse what cannot be served.

        Raises:
          SamplingError, SpeculationError: the message says what does not fit.
        """
        check_request(request)
        narrowed(self.program, request.speculation)
        if self.program.verification == GREEDY and not request.sampling.is_greedy:
            raise SamplingError(
                f"temperature={request.sampling.temperature} needs a stochastic rule, and this LLM was made with "
                'verification="greedy"; use temperature=0 or another verification'
            )

    def _locked(self, inbox: Inbox, pace: _Pace) -> Iterator[Progress]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the engine is already running; finish or close the other call first")
        try:
            yield from self._run(inbox, pace)
        except GeneratorExit:  # the caller lost interest: nothing is running, the slots are free again
            self._end_all()
            self._hand_out()
            raise
        except BaseException:
            self._end_all()
            self._lose_caches()  # donated buffers may be gone: the next call starts with fresh caches
            raise
        finally:
            self._lock.release()

    def _run(self, inbox: Inbox, pace: _Pace) -> Iterator[Progress]:
        flight: _Flight | None = None
        while True:
            if flight is not None and self.manager.is_idle:
                self.manager.collected(flight.steps)  # it ran for nobody
                flight = None
            news = inbox.take(is_idle=self.manager.is_idle)
            if news is None and self.manager.is_idle:
                return
            if news is not None:
                for index, request in news.requests:
                    self._add(index, request)
                for index in news.cancelled:
                    self._end(index)
            progress: list[Progress] = []
            try:
                for index in self.manager.secure(passes=pace.prefill_passes):
                    self._open[index].put_back()
                is_awaited = bool(self.manager.decoding())
                has_passed = self._prefill_some(pace, progress) and pace.prefill_passes is not None
                # Those who decode wait for the passes and a step: the step is kept short then.
                launched = self._launch(pace, is_brief=is_awaited and has_passed, is_alone=not has_passed)
                if flight is not None:
                    self._collect(flight, progress)
                flight = launched
                if flight is not None and not (pace.overlaps and not any(r.is_watched for _, r, _ in flight.slots)):
                    self._collect(flight, progress)
                    flight = None
            except Exception as error:
                if not inbox.survives_faults:
                    raise
                flight = None
                self._fail_all(error, progress)
            # All is settled before anything is handed out, so that a caller who stops early leaves no half state.
            yield from progress

    def _add(self, index: int, request: EngineRequest) -> None:
        self._open[index] = Running(index, request)
        # With dynamic rope scaling keys depend on the prompt's length.
        salt = str(len(request.prompt_ids)).encode() if self._depends_on_length else b""
        self.manager.add(
            index, request.prompt_ids, token_limit(request, self.max_model_len), priority=request.priority,
            shares=request.sampling.prompt_logprobs is None, salt=salt,
        )  # fmt: skip

    def _end(self, index: int) -> None:
        """Forget a request, if there is one."""
        self.manager.end(index)
        self._open.pop(index, None)

    def _end_all(self) -> None:
        for index in list(self._open):
            self._end(index)

    def _lose_caches(self) -> list[int]:
        self.forget_state()
        self._handed_out = None
        return self.manager.forget_caches()

    def _fail_all(self, error: Exception, progress: list[Progress]) -> None:
        """The end of everything in the slots after a fault; the caches are made anew."""
        for index in self._lose_caches():
            progress.append(failure(index, error))
            self._open.pop(index)

    def _hand_out(self) -> None:
        """Tell the device of pages that have moved since it was last told."""
        pages = self.manager.tables()
        tables = [None if owner is None else own for owner, own in zip(self.manager.slots, pages, strict=True)]
        if tables != self._handed_out:
            self.hand_out(tables)
            self._handed_out = tables

    def _prefill_some(self, pace: _Pace, progress: list[Progress]) -> bool:
        """Admissions and chunks; whether there was a pass."""
        has_passed = False
        while work := self.manager.next_prefill():
            running = self._open[work.index]
            if work.is_new:
                try:
                    arrays = self._arrays(running, work)
                except Exception as error:  # nothing has reached the device
                    self._end(work.index)
                    progress.append(failure(work.index, error))
                    continue
                self._hand_out()
                self.enter(work.slot, arrays)
                running.enter(work)
            if work.size:
                self._prefill_chunk(running, work)
                has_passed = True
            self.manager.prefilled(work)
            if work.is_last:
                if pace.prefill_passes is None:
                    jax.block_until_ready(self._state.committed_B)  # so that the clock tells what a prompt takes
                running.begin_decoding()
        return has_passed

    def _arrays(self, running: Running, work: Prefill) -> Admission:
        entry = self.manager.slots[work.slot]
        assert entry is not None
        return readmission(
            running.request, entry.tokens, work.start, narrowed(self.program, running.request.speculation),
            max_model_len=self.max_model_len, vocab_size=self.program.vocab_size,
        )  # fmt: skip

    def _prefill_chunk(self, running: Running, work: Prefill) -> None:
        x_DT = self.prefill(work.slot, work.size)
        if running.wants_prompt_logprobs:
            of_chunk = self.logprobs_of_prompt(work.slot, x_DT, work.start)
            running.add_prompt_logprobs(of_chunk, work.count)

    def _launch(self, pace: _Pace, *, is_brief: bool, is_alone: bool) -> _Flight | None:
        """Steps of all slots that decode, on their way; None: nobody decodes."""
        slots = [(entry.slot, self._open[entry.index]) for entry in self.manager.decoding() if entry.slot is not None]
        is_seen = any(running.is_seen_step_by_step for _, running in slots)
        most, is_plain = pace.steps, False
        if self._choice is not None:
            most = min(most, self._choice.steps_left)
            is_plain = self._choice.is_plain or not any(running.wants_trees for _, running in slots)
        steps = self.manager.start_steps(1 if is_seen else most)
        if not steps:
            return None
        self._hand_out()
        began = self.clock()
        report = self.plain_steps(steps) if is_plain else self.steps(steps, is_brief=is_brief)
        visits = [(slot, running, running.visit) for slot, running in slots]
        return _Flight(report, steps, visits, is_plain, began, is_alone)

    def _collect(self, flight: _Flight, progress: list[Progress]) -> None:
        """Progress of every slot that decoded; finished requests leave."""
        needs_last = any(running.is_seen_step_by_step for _, running, _ in flight.slots)
        report: Report = self.fetch(flight.report if needs_last else flight.report._replace(last=None))
        self.manager.collected(flight.steps)
        now = self.clock()
        seconds = now - max(flight.began, self._collected_at)  # the burst before may have gone on for a while
        self._collected_at = now
        steps_taken: list[int] = []
        tokens = 0
        for slot, running, visit in flight.slots:
            if self._open.get(running.index) is not running or running.visit != visit:
                continue  # finished, cancelled or put back since
            before = running.steps_taken
            part = running.advance(report, slot, self.program)
            steps_taken.append(running.steps_taken - before)
            tokens += len(part.new_token_ids)
            self.manager.advance(running.index, part.new_token_ids)
            if part.finish_reason is not None:
                self._end(running.index)
            progress.append(part)
        if self._choice is not None and any(steps_taken):
            self._choice.seen(
                is_plain=flight.is_plain, steps=max(steps_taken), slot_steps=sum(steps_taken), tokens=tokens,
                seconds=seconds if flight.is_alone else None,
            )  # fmt: skip
