"""The engine: requests into slots, prefill, bursts of compiled steps, results out.

Host side of one device. A burst runs on the device until a slot finishes (or for one step while streaming); between
bursts finished slots are emptied and waiting requests take their place.
"""

import dataclasses
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specinfer_jax.errors import SamplingError
from specinfer_jax.metrics import RequestStats
from specinfer_jax.outputs import TokenLogprobs
from specinfer_jax.serving.inbox import AllAtOnce, Inbox
from specinfer_jax.serving.request import EngineRequest, Progress, admission, check_request, token_logprobs
from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.rules import GREEDY
from specinfer_jax.speculation.sampling import ChosenLogprobs
from specinfer_jax.speculation.slots import admit, init_state, prefill_chunk, prompt_logprobs, release
from specinfer_jax.speculation.state import (
    FAILED,
    LENGTH,
    RUNNING,
    STOPPED,
    DecodeParams,
    DecodeState,
    LastStep,
    StepProgram,
    StepStats,
)

PREFILL_CHUNKS = (128, 32)
"""Prompt rows per prefill pass, largest first; a prompt takes the largest that it fills, the rest the smallest."""
_UNTIL_FINISHED = np.iinfo(np.int32).max
_FORCED_COST = 1e6
_PROBE_STEPS = 4
_FAILED = (
    "no token could be chosen: the model's logits are not finite, or allowed_token_ids, logit_bias, bad_words and "
    "min_tokens together ban every token"
)


@dataclasses.dataclass
class _Slot:
    """What the host remembers of a request on the device."""

    index: int
    request: EngineRequest
    prompt_logprobs: TokenLogprobs | None
    prefill_seconds: float
    decode_start: float
    emitted: int = 0

    @property
    def is_watched(self) -> bool:
        """The host must see every step."""
        return self.request.watch is not None or self.request.sampling.logprobs is not None


class Engine:
    """Runs requests through one compiled step program; not re-entrant, one call at a time."""

    def __init__(
        self, params: DecodeParams, program: StepProgram, *,
        num_slots: int, max_model_len: int, page_size: int, dtype: DTypeLike,
    ) -> None:  # fmt: skip
        self.params, self.program = params, program
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self._lock = threading.Lock()
        self._new_state = functools.partial(
            init_state, program, num_slots=num_slots, max_model_len=max_model_len, page_size=page_size, dtype=dtype
        )
        # State is donated everywhere: the caches are updated in place.
        self._burst = jax.jit(functools.partial(burst, program=program), donate_argnums=1)
        self._admit = jax.jit(functools.partial(admit, program=program), donate_argnums=0)
        self._release = jax.jit(release, donate_argnums=0)
        chunks = tuple(c for c in PREFILL_CHUNKS if c < max_model_len) or (max_model_len,)
        self._prefill = {
            chunk: jax.jit(functools.partial(prefill_chunk, program=program, chunk=chunk), donate_argnums=1)
            for chunk in chunks
        }
        self._prompt_logprobs = jax.jit(functools.partial(prompt_logprobs, program=program))
        self._costs = StepCosts(
            jnp.ones(len(program.buckets), jnp.float32), jnp.zeros(len(program.speculators), jnp.float32)
        )
        self._device_state: DecodeState | None = None

    @property
    def _state(self) -> DecodeState:
        """The slots' device state, empty ones after construction or a fault."""
        if self._device_state is None:
            self._device_state = self._new_state()
        return self._device_state

    @_state.setter
    def _state(self, state: DecodeState) -> None:
        self._device_state = state

    @property
    def costs(self) -> StepCosts:
        """Seconds of a verified pass by row bucket and of each speculator's drafting, measured by `warm_up`."""
        return self._costs

    def warm_up(self) -> None:
        """Compile every program and measure what trees cost; afterwards no request compiles anything."""
        with self._lock:
            probe = EngineRequest([0] * (sum(self._prefill) % self.max_model_len or 1), _UNTIL_FINISHED, frozenset())
            self._start(0, probe)
            for prefill in self._prefill.values():
                self._state, x_DT = prefill(self.params, self._state, jnp.int32(0))
                self._prompt_logprobs(self.params, self._state, jnp.int32(0), x_DT, jnp.int32(0))
            self._run_burst(1)
            if self.program.adaptive and self.program.speculators:
                self._measure_costs(probe)
            self._state = self._release(self._state, jnp.int32(0))

    def run(self, requests: Sequence[EngineRequest], *, stream: bool = False) -> Iterator[Progress]:
        """Continue every request; yields progress as it comes, the last of each request with its finish reason.

        Args:
          requests: any number; those beyond the slots wait.
          stream: one step at a time, so that tokens come out as they are committed.

        Raises:
          SamplingError: a request cannot be served; nothing was started.
          RuntimeError: another call is running.
        """
        for request in requests:
            self.check(request)
        yield from self._locked(AllAtOnce(requests), 1 if stream else _UNTIL_FINISHED)

    def serve(self, inbox: Inbox) -> Iterator[Progress]:
        """Continue requests as they come, one step at a time, until the inbox says that there will be no more.

        A fault while a request is admitted fails that request, a fault in a step fails those in the slots; both give a
        last progress with finish reason "error", and the engine goes on with fresh caches.

        Args:
          inbox: asked before every step; its requests must have passed `check`.

        Raises:
          RuntimeError: another call is running.
        """
        yield from self._locked(inbox, 1)

    def _locked(self, inbox: Inbox, steps: int) -> Iterator[Progress]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the engine is already running; finish or close the other call first")
        try:
            yield from self._run(inbox, steps)
        except GeneratorExit:  # the caller lost interest: nothing is running, the slots are free again
            for slot in range(self.num_slots):
                self._state = self._release(self._state, jnp.int32(slot))
            raise
        except BaseException:
            self._device_state = None  # donated buffers may be gone: the next call starts with fresh caches
            raise
        finally:
            self._lock.release()

    def check(self, request: EngineRequest) -> None:
        """Refuse what cannot be served.

        Raises:
          SamplingError: the message says what does not fit.
        """
        check_request(request)
        if self.program.verification == GREEDY and not request.sampling.is_greedy:
            raise SamplingError(
                f"temperature={request.sampling.temperature} needs a stochastic rule, and this LLM was made with "
                'verification="greedy"; use temperature=0 or another verification'
            )

    def _run(self, inbox: Inbox, steps: int) -> Iterator[Progress]:
        waiting: deque[tuple[int, EngineRequest]] = deque()
        slots: dict[int, _Slot] = {}
        while True:
            news = inbox.take(free_slots=self.num_slots - len(slots) - len(waiting), is_idle=not (slots or waiting))
            if news is None and not (slots or waiting):
                return
            if news is not None:
                waiting.extend(news.requests)
                self._give_up(news.cancelled, slots, waiting)
            for slot in range(self.num_slots):
                if slot not in slots and waiting:
                    yield from self._enter(slot, *waiting.popleft(), slots, inbox)
            if not slots:
                continue
            try:
                self._run_burst(1 if any(slot.is_watched for slot in slots.values()) else steps)
                progress = self._collect(slots)
            except Exception as error:
                if not inbox.survives_faults:
                    raise
                progress = self._failed(slots, error)
            # All is settled before anything is handed out, so that a caller who stops early leaves no half state.
            yield from progress

    def _give_up(
        self, cancelled: frozenset[int], slots: dict[int, _Slot], waiting: deque[tuple[int, EngineRequest]]
    ) -> None:
        """Forget requests that nobody wants any more."""
        for entry in [entry for entry in waiting if entry[0] in cancelled]:
            waiting.remove(entry)
        for b in [b for b, slot in slots.items() if slot.index in cancelled]:
            self._state = self._release(self._state, jnp.int32(b))
            del slots[b]

    def _enter(
        self, slot: int, index: int, request: EngineRequest, slots: dict[int, _Slot], inbox: Inbox
    ) -> Iterator[Progress]:
        """Admit and prefill; a fault fails this request, and those in the slots whose caches are gone with it."""
        began = time.perf_counter()
        try:
            of_prompt = self._start(slot, request)
        except Exception as error:
            if not inbox.survives_faults:
                raise
            slots[slot] = _Slot(index, request, None, 0.0, began)
            yield from self._failed(slots, error)
            return
        now = time.perf_counter()
        slots[slot] = _Slot(index, request, of_prompt, now - began, now)

    def _failed(self, slots: dict[int, _Slot], error: Exception) -> list[Progress]:
        """The end of everything in the slots after a fault; the caches are made anew."""
        self._device_state = None
        reason = f"the step failed: {type(error).__name__}: {error}"
        failed = [Progress(slot.index, [], "error", None, error=reason) for slot in slots.values()]
        slots.clear()
        return failed

    def _start(self, slot: int, request: EngineRequest) -> TokenLogprobs | None:
        """Admit a request and prefill its prompt; the prompt's log-probabilities if they are asked for."""
        place = jnp.int32(slot)
        arrays = admission(request, max_model_len=self.max_model_len, vocab_size=self.program.vocab_size)
        self._state = self._admit(self._state, place, arrays)
        parts, counts = [], []
        done, end = 0, len(request.prompt_ids) - 1  # the last prompt token is the root of the first step
        while done < end:
            chunk = next((c for c in self._prefill if c <= end - done), min(self._prefill))
            self._state, x_DT = self._prefill[chunk](self.params, self._state, place)
            if request.sampling.prompt_logprobs is not None:
                parts.append(self._prompt_logprobs(self.params, self._state, place, x_DT, jnp.int32(done)))
                counts.append(min(chunk, end - done))
            done += chunk
        jax.block_until_ready(self._state.committed_B)
        return token_logprobs(parts, counts) if parts else None

    def _run_burst(self, steps: int) -> None:
        self._state = self._burst(self.params, self._state, self._costs, jnp.int32(steps))
        jax.block_until_ready(self._state.committed_B)

    def _collect(self, slots: dict[int, _Slot]) -> list[Progress]:
        """Progress of every slot; finished ones leave."""
        now = time.perf_counter()
        state = self._state
        is_watched = any(slot.is_watched for slot in slots.values())
        token_BS, committed_B, finish_B, stats, last = jax.device_get(
            (state.token_BS, state.committed_B, state.finish_B, state.stats, state.last if is_watched else None)
        )
        progress = [
            self._advance(b, slot, token_BS[b, : committed_B[b]], int(finish_B[b]), stats, last, now)
            for b, slot in slots.items()
        ]
        for b, part in zip(list(slots), progress, strict=True):
            if part.finish_reason is not None:
                del slots[b]
        return progress

    def _advance(
        self, b: int, slot: _Slot, ids: np.ndarray, finish: int, stats: StepStats, last: LastStep | None, now: float
    ) -> Progress:
        """What one slot's request gained; the host's stop rule may end it, and then its slot is given up."""
        request, is_first = slot.request, slot.emitted == 0
        new = ids[len(request.prompt_ids) + slot.emitted :].tolist()
        reason = {STOPPED: "stop", LENGTH: "length", FAILED: "error"}.get(finish)
        counters = StepStats(*(counter_BX[b].copy() for counter_BX in stats))
        keep = request.watch(new) if request.watch is not None and new else None
        if keep is not None:
            assert last is not None
            _take_back(counters, np.asarray(last.source_BA[b, keep : len(new)]), first_depth=keep + 1)
            new, reason = new[:keep], "stop"
            if finish == RUNNING:
                self._state = self._release(self._state, jnp.int32(b))
        slot.emitted += len(new)
        of_new = None
        if request.sampling.logprobs is not None:
            assert last is not None
            A = self.program.path_len
            of_new = token_logprobs([ChosenLogprobs(*(x[b * A : (b + 1) * A] for x in last.logprobs))], [len(new)])
        return Progress(
            index=slot.index,
            new_token_ids=new,
            finish_reason=reason,
            stats=None if reason is None else self._request_stats(counters, slot, now),
            logprobs=of_new,
            prompt_logprobs=slot.prompt_logprobs if is_first else None,
            error=_FAILED if reason == "error" else None,
        )

    def _request_stats(self, counters: StepStats, slot: _Slot, now: float) -> RequestStats:
        names = [speculator.name for speculator in self.program.speculators]
        return RequestStats(
            tokens=slot.emitted,
            steps=int(counters.steps_BJ.sum()),
            steps_by_rows={n: int(c) for n, c in zip(self.program.buckets, counters.steps_BJ, strict=True)},
            proposed_by_position=counters.proposed_BA[1:].tolist(),
            accepted_by_position=counters.accepted_BA[1:].tolist(),
            proposed_by_speculator=dict(zip(names, counters.proposed_BM.tolist(), strict=True)),
            accepted_by_speculator=dict(zip(names, counters.accepted_BM.tolist(), strict=True)),
            prefill_seconds=slot.prefill_seconds,
            decode_seconds=now - slot.decode_start,
        )

    def _measure_costs(self, probe: EngineRequest, repeats: int = 3) -> None:
        """Seconds of a step at every row bucket, and of each speculator's drafting; the smallest of a few repeats."""
        measured = self._costs
        J, M = len(self.program.buckets), len(self.program.speculators)

        def seconds(bucket: int, drafting: int | None) -> float:
            # The gate runs the bucket that looks cheapest, and drafts where that looks free.
            verify_J = np.full(J, _FORCED_COST, np.float32)
            verify_J[bucket] = 1 / _FORCED_COST
            draft_M = np.full(M, _FORCED_COST * _FORCED_COST, np.float32)
            if drafting is not None:
                draft_M[drafting] = 0
            self._costs = StepCosts(jnp.asarray(verify_J), jnp.asarray(draft_M))
            shortest = {1: math.inf, _PROBE_STEPS: math.inf}
            for steps in (1, _PROBE_STEPS) * repeats:
                if not np.asarray(self._state.active_B)[0]:  # the probe reached a short max_model_len
                    self._start(0, probe)
                began = time.perf_counter()
                self._run_burst(steps)
                shortest[steps] = min(shortest[steps], time.perf_counter() - began)
            # The difference leaves out what a burst costs the host.
            return max(shortest[_PROBE_STEPS] - shortest[1], 1e-6) / (_PROBE_STEPS - 1)

        try:
            verify = [seconds(j, None) for j in range(J)]
            draft = [
                max(seconds(J - 1, m) - verify[-1], 0.0) if s.static_tree() is not None else 0.0
                for m, s in enumerate(self.program.speculators)
            ]
        finally:
            self._costs = measured
        self._costs = StepCosts(jnp.asarray(verify, jnp.float32), jnp.asarray(draft, jnp.float32))


def _take_back(counters: StepStats, source_X: np.ndarray, *, first_depth: int) -> None:
    """Uncount nodes of the newest step that the host cut off; `source_X` says who had proposed them (0: nobody)."""
    for depth, source in enumerate(source_X, first_depth):
        if source:
            counters.accepted_BA[depth] -= 1
            for m in range(len(counters.accepted_BM)):
                counters.accepted_BM[m] -= int(source) >> m & 1
