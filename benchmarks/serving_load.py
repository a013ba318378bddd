"""Loads for an engine, as its inbox: a fixed number of clients, or arrivals at random; and what each request saw."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from specinfer_jax.metrics import RequestStats, total
from specinfer_jax.serving.engine import Engine
from specinfer_jax.serving.inbox import News
from specinfer_jax.serving.request import EngineRequest


@dataclasses.dataclass
class Seen:
    """One request, as its client saw it; seconds on one clock."""

    arrived: float
    first: float = math.nan
    """First tokens."""
    last: float = math.nan
    """Last tokens."""
    longest_gap: float = 0.0
    """Between two pieces."""
    tokens: int = 0
    stats: RequestStats | None = None

    @property
    def time_per_token(self) -> float | None:
        """Of the tokens behind the first piece's first; None for an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


class Load:
    """Hands requests over when they are due, and keeps what becomes of them."""

    survives_faults = False

    def __init__(self, requests: Sequence[EngineRequest], *, clients: int | None = None, rate: float | None = None):
        """Either a closed loop or a Poisson process.

        Args:
          requests: all of them, in order.
          clients: so many are under way at any time (closed loop).
          rate: arrivals per second, at random (seed 0).
        """
        if (clients is None) == (rate is None):
            raise ValueError("give clients or rate")
        self._waiting = deque(enumerate(requests))
        self._clients = clients
        gaps = (
            np.zeros(len(requests)) if rate is None else np.random.default_rng(0).exponential(1 / rate, len(requests))
        )
        self._due = np.cumsum(gaps)
        self.seen: dict[int, Seen] = {}
        self._open = 0
        self._began = time.perf_counter()

    def take(self, *, is_idle: bool) -> News | None:
        """As `Inbox.take`."""
        if is_idle and not self._waiting:
            return None
        if is_idle and self._clients is None:
            time.sleep(max(0.0, self._due[self._waiting[0][0]] - self._elapsed()))
        news = []
        while self._waiting and self._is_due(self._waiting[0][0]):
            index, request = self._waiting.popleft()
            # A request has arrived when it was due, whether or not the engine looked then.
            self.seen[index] = Seen(self._elapsed() if self._clients else float(self._due[index]))
            self._open += 1
            news.append((index, request))
        return News(news)

    def _is_due(self, index: int) -> bool:
        return self._open < self._clients if self._clients else self._due[index] <= self._elapsed()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def add(self, index: int, new_tokens: int, stats: RequestStats | None) -> None:
        """A request has got tokens; `stats` with the last ones."""
        seen, now = self.seen[index], self._elapsed()
        if new_tokens:
            if not seen.tokens:
                seen.first = now
            else:
                seen.longest_gap = max(seen.longest_gap, now - seen.last)
            seen.last = now
            seen.tokens += new_tokens
        if stats is not None:
            seen.stats = stats
            self._open -= 1


def run_load(engine: Engine, load: Load) -> dict[str, Any]:
    """Serve a load; figures in seconds and tokens per second."""
    for progress in engine.serve(load):
        load.add(progress.index, len(progress.new_token_ids), progress.stats)
    seen = list(load.seen.values())
    stats = total([s.stats for s in seen if s.stats is not None])
    duration = max(s.last for s in seen) - min(s.arrived for s in seen)
    per_token = [t for s in seen if (t := s.time_per_token) is not None]
    return {
        "requests": len(seen),
        "tokens": sum(s.tokens for s in seen),
        "seconds": duration,
        "tokens_per_second": sum(s.tokens for s in seen) / duration,
        "requests_per_second": len(seen) / duration,
        "tokens_per_step": stats.tokens_per_step,
        "steps_by_rows": stats.steps_by_rows,
        "seconds_by_rows": dict(zip(engine.program.buckets, engine.costs.verify_J.tolist(), strict=True)),
        "cached_tokens": stats.cached_tokens,
        "time_to_first_token": percentiles([s.first - s.arrived for s in seen]),
        "time_per_output_token": percentiles(per_token),
        "longest_gap": percentiles([s.longest_gap for s in seen]),
        "preemptions": engine.manager.preemptions,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, 90th and 99th percentile; None of nothing."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return {"mean": float(np.mean(values)), "p50": p50, "p90": p90, "p99": p99}
