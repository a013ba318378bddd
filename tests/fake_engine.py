"""An engine without a model: it commits ids that a script gives, and ends requests as the real one does."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specinfer_jax.metrics import RequestStats
from specinfer_jax.outputs import TokenLogprobs
from specinfer_jax.serving.request import EngineRequest, Progress

STATS = RequestStats(
    tokens=2, steps=1, steps_by_rows={1: 1}, proposed_by_position=[1], accepted_by_position=[1],
    proposed_by_speculator={"ngram": 1}, accepted_by_speculator={"ngram": 1}, prefill_seconds=0.5, decode_seconds=0.25,
    cached_tokens=2,
)  # fmt: skip
"""Of every request."""
NUM_TOP = 5


def logprobs_of(ids: Sequence[int], *, num_top: int = NUM_TOP) -> TokenLogprobs:
    """Id i is always the one of rank i + 1, with log-probability -(i + 1) / 2."""
    ids_T = np.array(ids, np.int32)
    top_TK = np.tile(np.arange(num_top, dtype=np.int32), (len(ids), 1))
    return TokenLogprobs(-(ids_T + 1) / np.float32(2), ids_T + 1, top_TK, -(top_TK + 1) / np.float32(2))


@dataclasses.dataclass
class FakeEngine:
    """Commits `script(request)`, `size` ids at a time and the requests in turn; at the script's end comes the limit."""

    script: Callable[[EngineRequest], Sequence[int]]
    size: int = 1
    obeys_watch: bool = True
    fails: Callable[[EngineRequest], bool] = lambda request: False
    """Which requests fail behind their first commit."""
    requests: list[EngineRequest] = dataclasses.field(default_factory=list)
    """All that it was asked for."""

    def run(self, requests: Sequence[EngineRequest], *, stream: bool = False) -> Iterator[Progress]:
        self.requests += requests
        running = [self._progress(index, request) for index, request in enumerate(requests)]
        while running:
            for one in list(running):
                progress = next(one)
                if progress.finish_reason is not None:
                    running.remove(one)
                yield progress

    def _progress(self, index: int, request: EngineRequest) -> Iterator[Progress]:
        of_prompt = logprobs_of(request.prompt_ids[1:]) if request.sampling.prompt_logprobs is not None else None
        for number, (ids, reason) in enumerate(self._commits(request)):
            reason = "error" if self.fails(request) and number == 1 else reason
            yield Progress(
                index, ids, reason, None if reason is None else STATS,
                logprobs=logprobs_of(ids) if request.sampling.logprobs is not None else None,
                prompt_logprobs=of_prompt if number == 0 else None,
                error="the device is on fire" if reason == "error" else None,
            )  # fmt: skip

    def _commits(self, request: EngineRequest) -> Iterator[tuple[list[int], str | None]]:
        ids = list(self.script(request))[: request.max_tokens]
        for start in range(0, len(ids), self.size):
            new = ids[start : start + self.size]
            end = next((k for k, i in enumerate(new, 1) if i in request.stop_token_ids), None)
            reason = "stop" if end is not None else "length" if start + self.size >= len(ids) else None
            new = new[:end]
            keep = request.watch(new) if request.watch is not None and self.obeys_watch else None
            if keep is not None:
                new, reason = new[:keep], "stop"
            yield new, reason
            if reason is not None:
                return
