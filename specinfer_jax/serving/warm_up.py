"""A device made ready: programs loaded, and what passes cost measured, so that no request waits for either."""

import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from specinfer_jax.serving.device import NEVER, UNTIL_FINISHED, Device, step_costs
from specinfer_jax.serving.request import EngineRequest, readmission
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.speculation.narrow import Narrowed, narrowed

_PROBE_STEPS = 4
_PROBE_SECONDS = 0.4
"""Spent on one row bucket; two steps in any case."""


class ReadyDevice(Device):
    """A `Device` that can be warmed up."""

    def warm_up(self) -> None:
        """Compile every program and measure what trees cost; afterwards no request compiles anything."""
        probe = EngineRequest([0] * (sum(self._prefill) % self.max_model_len or 1), UNTIL_FINISHED, frozenset())
        if self._on_mesh is None:
            # From shapes: the arrays are given away meanwhile. First, since tracing holds Python's lock.
            step_program = self._burst.lower(self.params, jax.eval_shape(self._new_state), self._costs, np.int32(1))
            with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
                # It takes longer to compile, or to load from the cache, than all others, which run once meanwhile.
                step = pool.submit(step_program.compile)
                for done in [pool.submit(load) for load in self._other_loads(probe)]:
                    done.result()
                self._run_once(probe)
                step.result()
        else:
            self._run_once(probe)
        self.fetch(self.steps(1))
        if self.program.adaptive and self.program.speculators:
            self._probe(probe, narrowed(self.program, None))  # the first passes of a process are slow
            self._measure_costs(probe)
        self.hand_out([None] * self.num_slots)

    def _run_once(self, probe: EngineRequest) -> None:
        """Every program but the step's."""
        self._probe(probe, narrowed(self.program, None))
        for chunk in self._prefill:
            x_DT = self.prefill(0, chunk)
            self.logprobs_of_prompt(0, x_DT, 0)
        if self.has_plain_steps:
            self.fetch(self.plain_steps(1))

    def _other_loads(self, request: EngineRequest) -> list[Callable[[], object]]:
        """Compile each program but the step's, or load it from the compile cache; calls then find it."""
        state, slot, vocab_size = self._state, np.int32(0), self.program.vocab_size
        plain = self._plain_burst
        part = narrowed(self.program, None)
        arrays = readmission(
            request, request.prompt_ids, 0, part, max_model_len=self.max_model_len, vocab_size=vocab_size
        )
        table = np.zeros((self.num_slots, self._table_pages), np.int32)

        def load_chunk(prefill: Any) -> None:
            traced = prefill.trace(self.params, state, slot)
            of_chunk = traced.out_info[1]
            x_DT = jax.ShapeDtypeStruct(of_chunk.shape, of_chunk.dtype)
            traced.lower().compile()
            self._prompt_logprobs.lower(self.params, state, slot, x_DT, slot).compile()

        return [
            *([] if plain is None else [lambda: plain.lower(self.params, state, np.int32(1)).compile()]),
            *(functools.partial(load_chunk, prefill) for prefill in self._prefill.values()),
            lambda: self._admit.lower(state, slot, arrays).compile(),
            lambda: self._place.lower(state, table, np.zeros(self.num_slots, bool)).compile(),
        ]

    def _probe(self, request: EngineRequest, part: Narrowed) -> None:
        """A request into the first slot and to its first step, whatever pages others hold; its first pass is timed."""
        self.hand_out([list(range(self._table_pages)), *[None] * (self.num_slots - 1)])
        arrays = readmission(
            request, request.prompt_ids, 0, part, max_model_len=self.max_model_len, vocab_size=self.program.vocab_size
        )
        self.enter(0, arrays)
        for chunk in self._prefill:
            jax.block_until_ready(self._state.committed_B)
            began = time.perf_counter()
            jax.block_until_ready(self.prefill(0, chunk))
            if chunk == max(self._prefill) < len(request.prompt_ids):
                self._chunk_seconds = min(self._chunk_seconds, time.perf_counter() - began)
        jax.block_until_ready(self._state.committed_B)

    def _measure_costs(self, probe: EngineRequest, repeats: int = 3) -> None:
        """Seconds of a step at every row bucket, and of each speculator's drafting; the smallest of a few repeats."""
        measured, part = self._costs, narrowed(self.program, None)
        J, M = len(self.program.buckets), len(self.program.speculators)

        def force(bucket: int, drafting: int | None) -> None:
            # The gate runs the bucket that looks cheapest, and drafts where that looks free.
            verify_J = np.full(J, NEVER, np.float32)
            verify_J[bucket] = 1 / NEVER
            draft_M = np.full(M, NEVER * NEVER, np.float32)
            if drafting is not None:
                draft_M[drafting] = 0
            self._costs = step_costs(verify_J, draft_M)

        def seconds(steps: int) -> float:
            if not self.fetch(self._state.active_B)[0]:  # the probe reached a short max_model_len
                self._probe(probe, part)
            began = time.perf_counter()
            jax.block_until_ready(self.steps(steps))
            return time.perf_counter() - began

        def one_step() -> float:
            found: list[float] = []
            while len(found) < 2 or (len(found) < 2 * repeats and sum(found) < _PROBE_SECONDS):
                found.append(seconds(1))
            return min(found)

        try:
            force(0, None)
            pairs = [(seconds(1), seconds(_PROBE_STEPS)) for _ in range(repeats)]
            one, several = (min(times) for times in zip(*pairs, strict=True))
            plain = max(several - one, 1e-6) / (_PROBE_STEPS - 1)
            of_burst = max(one - plain, 0.0)  # what each burst costs the host
            verify = [plain]
            for j in range(1, J):
                force(j, None)
                verify.append(max(one_step() - of_burst, 1e-6))
            draft = [0.0] * M
            for m, speculator in enumerate(self.program.speculators):
                if speculator.static_tree() is not None:
                    # Alone: what others offer for nothing might keep it from drafting.
                    part = narrowed(self.program, RequestSpeculation(ssms=(speculator.name,)))
                    self._probe(probe, part)
                    force(min(1, J - 1), m)
                    draft[m] = max(one_step() - of_burst - verify[min(1, J - 1)], 0.0)
        finally:
            self._costs = measured
        self._costs = step_costs(verify, draft)
