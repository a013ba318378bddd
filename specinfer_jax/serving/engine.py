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

from specinfer_jax.metrics import RequestStats
from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.slots import admit, init_state, prefill_chunk, release
from specinfer_jax.speculation.state import LENGTH, STOPPED, DecodeParams, DecodeState, StepProgram, StepStats

PREFILL_CHUNKS = (128, 32)
"""Prompt rows per prefill pass, largest first; a prompt takes the largest that it fills, the rest the smallest."""
_UNTIL_FINISHED = np.iinfo(np.int32).max
_FORCED_COST = 1e6
_PROBE_STEPS = 4


@dataclasses.dataclass(frozen=True)
class EngineRequest:
    """One prompt to continue; already checked by the caller."""

    prompt_ids: Sequence[int]
    """At least one id, fewer than the engine's max_model_len."""
    max_tokens: int
    """Most tokens to generate; the engine's max_model_len may end the request earlier."""
    stop_token_ids: frozenset[int]
    """Ids that end the request; the id itself is emitted."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """New tokens of one request."""

    index: int
    """Position of the request in the call."""
    new_token_ids: list[int]
    """Tokens committed since the last progress."""
    finish_reason: str | None
    """"stop" or "length" with the last tokens, else None."""
    stats: RequestStats | None
    """Counters, with the last tokens only."""


@dataclasses.dataclass
class _Slot:
    """What the host remembers of a request on the device."""

    index: int
    prompt_len: int
    emitted: int
    prefill_seconds: float
    decode_start: float


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
            for chunk in self._prefill.values():
                self._state = chunk(self.params, self._state, jnp.int32(0))
            self._run_burst(1)
            if self.program.adaptive and self.program.speculators:
                self._measure_costs(probe)
            self._state = self._release(self._state, jnp.int32(0))

    def run(self, requests: Sequence[EngineRequest], *, stream: bool = False) -> Iterator[Progress]:
        """Continue every request; yields progress as it comes, the last of each request with its finish reason.

        Args:
          requests: any number; those beyond the slots wait.
          stream: one step at a time, so that tokens come out as they are committed.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("the engine is already running; finish or close the other call first")
        try:
            yield from self._run(requests, 1 if stream else _UNTIL_FINISHED)
        except GeneratorExit:  # the caller lost interest: nothing is running, the slots are free again
            for slot in range(self.num_slots):
                self._state = self._release(self._state, jnp.int32(slot))
            raise
        except BaseException:
            self._device_state = None  # donated buffers may be gone: the next call starts with fresh caches
            raise
        finally:
            self._lock.release()

    def _run(self, requests: Sequence[EngineRequest], steps: int) -> Iterator[Progress]:
        waiting = deque(enumerate(requests))
        slots: dict[int, _Slot] = {}
        while waiting or slots:
            for slot in range(self.num_slots):
                if slot not in slots and waiting:
                    index, request = waiting.popleft()
                    began = time.perf_counter()
                    self._start(slot, request)
                    now = time.perf_counter()
                    slots[slot] = _Slot(index, len(request.prompt_ids), 0, now - began, now)
            self._run_burst(steps)
            yield from self._collect(slots)

    def _start(self, slot: int, request: EngineRequest) -> None:
        """Admit a request and prefill its prompt."""
        count = len(request.prompt_ids)
        token_S = np.zeros(self.max_model_len, np.int32)
        token_S[:count] = request.prompt_ids
        is_stop_V = np.zeros(self.program.llm.vocab_size, bool)
        is_stop_V[[i for i in request.stop_token_ids if i < self.program.llm.vocab_size]] = True
        limit = min(count + request.max_tokens, self.max_model_len)
        place = jnp.int32(slot)
        self._state = self._admit(
            self._state, place, jnp.asarray(token_S), jnp.int32(count), jnp.int32(limit), jnp.asarray(is_stop_V)
        )
        left = count - 1  # the last prompt token is the root of the first step
        while left > 0:
            chunk = next((c for c in self._prefill if c <= left), min(self._prefill))
            self._state = self._prefill[chunk](self.params, self._state, place)
            left -= chunk
        jax.block_until_ready(self._state.committed_B)

    def _run_burst(self, steps: int) -> None:
        self._state = self._burst(self.params, self._state, self._costs, jnp.int32(steps))
        jax.block_until_ready(self._state.committed_B)

    def _collect(self, slots: dict[int, _Slot]) -> Iterator[Progress]:
        """Progress of every slot; finished ones leave."""
        now = time.perf_counter()
        token_BS, committed_B, finish_B, stats = jax.device_get(
            (self._state.token_BS, self._state.committed_B, self._state.finish_B, self._state.stats)
        )
        progress = []
        for slot, request in list(slots.items()):
            new = token_BS[slot, request.prompt_len + request.emitted : committed_B[slot]].tolist()
            request.emitted += len(new)
            reason = {STOPPED: "stop", LENGTH: "length"}.get(int(finish_B[slot]))
            request_stats = None
            if reason is not None:
                counters = jax.tree.map(lambda counter, b=slot: counter[b], stats)
                request_stats = self._request_stats(counters, request, now)
                del slots[slot]
            progress.append(Progress(request.index, new, reason, request_stats))
        # The loop above is done before anything is handed out, so that a caller who stops early leaves no half state.
        yield from progress

    def _request_stats(self, counters: StepStats, request: _Slot, now: float) -> RequestStats:
        names = [speculator.name for speculator in self.program.speculators]
        return RequestStats(
            tokens=request.emitted,
            steps=int(counters.steps_BJ.sum()),
            steps_by_rows={n: int(c) for n, c in zip(self.program.buckets, counters.steps_BJ, strict=True)},
            proposed_by_position=counters.proposed_BA[1:].tolist(),
            accepted_by_position=counters.accepted_BA[1:].tolist(),
            proposed_by_speculator=dict(zip(names, counters.proposed_BM.tolist(), strict=True)),
            accepted_by_speculator=dict(zip(names, counters.accepted_BM.tolist(), strict=True)),
            prefill_seconds=request.prefill_seconds,
            decode_seconds=now - request.decode_start,
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
