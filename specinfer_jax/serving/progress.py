"""What the host remembers of a request while it runs, and what a report of the device adds to it."""

import time
from typing import Any

import numpy as np

from specinfer_jax.metrics import RequestStats
from specinfer_jax.serving.device import Report
from specinfer_jax.serving.request import EngineRequest, Progress, token_logprobs
from specinfer_jax.serving.schedule import Prefill
from specinfer_jax.speculation.sampling import ChosenLogprobs
from specinfer_jax.speculation.state import FAILED, LENGTH, STOPPED, StepProgram, StepStats

_REASONS = {STOPPED: "stop", LENGTH: "length", FAILED: "error"}
_NO_TOKEN = (
    "no token could be chosen: the model's logits are not finite, or allowed_token_ids, logit_bias, bad_words and "
    "min_tokens together ban every token"
)


class Running:
    """A request from its arrival to its end, through as many visits to slots as it takes."""

    def __init__(self, index: int, request: EngineRequest) -> None:
        self.index, self.request = index, request
        self.visit = 0
        """Times that it was put back; what an earlier visit's steps report is void, since they are taken again."""
        self._emitted = 0
        self._cached_tokens: int | None = None
        self._counted: StepStats | None = None
        """Counters of earlier visits."""
        self._counters: StepStats | None = None
        """Counters of this visit, as last seen."""
        self._of_prompt: tuple[list[ChosenLogprobs], list[int]] = ([], [])
        self._prefill_seconds = self._decode_seconds = 0.0
        self._clock = 0.0

    @property
    def is_watched(self) -> bool:
        """The host decides whether it goes on."""
        return self.request.watch is not None

    @property
    def is_seen_step_by_step(self) -> bool:
        """The host must see what each step did."""
        return self.is_watched or self.request.sampling.logprobs is not None

    @property
    def wants_trees(self) -> bool:
        """It is not decoded incrementally by its own wish."""
        return self.request.speculation is None or self.request.speculation.enabled

    @property
    def steps_taken(self) -> int:
        """Steps of this visit, as last seen."""
        return 0 if self._counters is None else int(self._counters.steps_BJ.sum())

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They are asked for, and not handed out yet."""
        return self.request.sampling.prompt_logprobs is not None and not self._emitted

    def enter(self, work: Prefill) -> None:
        """It has a slot."""
        self._clock = time.perf_counter()
        self._of_prompt = ([], [])
        if self._cached_tokens is None:
            self._cached_tokens = work.start

    def add_prompt_logprobs(self, of_chunk: ChosenLogprobs, count: int) -> None:
        """Of the tokens behind the next `count` of the prompt."""
        self._of_prompt[0].append(of_chunk)
        self._of_prompt[1].append(count)

    def begin_decoding(self) -> None:
        """Its prompt is in the cache."""
        now = time.perf_counter()
        self._prefill_seconds += now - self._clock
        self._clock = now

    def put_back(self) -> None:
        """It has lost its slot."""
        self.visit += 1
        self._decode_seconds += time.perf_counter() - self._clock
        self._counted, self._counters = _added(self._counted, self._counters), None

    def advance(self, report: Report, slot: int, program: StepProgram) -> Progress:
        """What a burst has given it; the host's stop rule may end it."""
        count = len(self.request.prompt_ids)
        new = np.asarray(report.token_BS)[slot, count + self._emitted : report.committed_B[slot]].tolist()
        reason = _REASONS.get(int(report.finish_B[slot]))
        counted: list[Any] = [np.array(counter_BX[slot]) for counter_BX in report.stats]
        self._counters = StepStats(*counted)
        keep = self.request.watch(new) if self.request.watch is not None and new else None
        if keep is not None:
            _take_back(self._counters, np.asarray(report.last.source_BA[slot, keep : len(new)]), first_depth=keep + 1)
            new, reason = new[:keep], "stop"
        of_new = None
        if self.request.sampling.logprobs is not None:
            A = program.path_len
            own = ChosenLogprobs(*(x[slot * A : (slot + 1) * A] for x in report.last.logprobs))
            of_new = token_logprobs([own], [len(new)])
        of_prompt = token_logprobs(*self._of_prompt) if self._of_prompt[0] and not self._emitted else None
        self._of_prompt = ([], [])
        self._emitted += len(new)
        return Progress(
            index=self.index,
            new_token_ids=new,
            finish_reason=reason,
            stats=None if reason is None else self._stats(program),
            logprobs=of_new,
            prompt_logprobs=of_prompt,
            error=_NO_TOKEN if reason == "error" else None,
        )

    def _stats(self, program: StepProgram) -> RequestStats:
        names = [speculator.name for speculator in program.speculators]
        counters: Any = _added(self._counted, self._counters)
        return RequestStats(
            tokens=self._emitted,
            steps=int(counters.steps_BJ.sum()),
            steps_by_rows={n: int(c) for n, c in zip(program.buckets, counters.steps_BJ, strict=True)},
            proposed_by_position=counters.proposed_BA[1:].tolist(),
            accepted_by_position=counters.accepted_BA[1:].tolist(),
            proposed_by_speculator=dict(zip(names, counters.proposed_BM.tolist(), strict=True)),
            accepted_by_speculator=dict(zip(names, counters.accepted_BM.tolist(), strict=True)),
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds + time.perf_counter() - self._clock,
            cached_tokens=self._cached_tokens or 0,
        )


def failure(index: int, error: Exception) -> Progress:
    """The end of a request that a fault has hit."""
    return Progress(index, [], "error", None, error=f"the step failed: {type(error).__name__}: {error}")


def _added(first: StepStats | None, second: StepStats | None) -> StepStats | None:
    if first is None or second is None:
        return first if second is None else second
    return StepStats(*(a + b for a, b in zip(first, second, strict=True)))


def _take_back(counters: Any, source_X: np.ndarray, *, first_depth: int) -> None:
    """Uncount nodes of the newest step that the host cut off; `source_X` says who had proposed them (0: nobody)."""
    for depth, source in enumerate(source_X, first_depth):
        if source:
            counters.accepted_BA[depth] -= 1
            for m in range(len(counters.accepted_BM)):
                counters.accepted_BM[m] -= int(source) >> m & 1
