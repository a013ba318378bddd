"""Requests that come and go by iteration number, for tests of `Engine.serve`."""

import dataclasses
from collections.abc import Mapping, Sequence

from specinfer_jax.metrics import RequestStats
from specinfer_jax.serving.engine import Engine
from specinfer_jax.serving.inbox import News
from specinfer_jax.serving.request import EngineRequest


@dataclasses.dataclass
class Served:
    """What became of one request."""

    ids: list[int] = dataclasses.field(default_factory=list)
    iterations: list[int] = dataclasses.field(default_factory=list)
    """When new tokens came."""
    finish_reason: str | None = None
    stats: RequestStats | None = None
    error: str | None = None


class Script:
    """Hands over what is due; when nothing is under way it skips to the next."""

    def __init__(
        self, arrivals: Mapping[int, Sequence[tuple[int, EngineRequest]]],
        cancels: Mapping[int, Sequence[int]] | None = None, *, survives_faults: bool = False,
    ) -> None:  # fmt: skip
        self._arrivals, self._cancels = dict(arrivals), dict(cancels or {})
        self.survives_faults = survives_faults
        self.iteration = -1

    def take(self, *, is_idle: bool) -> News | None:
        self.iteration += 1
        due = sorted((*self._arrivals, *self._cancels))
        if is_idle and not due:
            return None
        if is_idle and due[0] > self.iteration:
            self.iteration = due[0]
        requests = [entry for when in due if when <= self.iteration for entry in self._arrivals.pop(when, ())]
        cancelled = frozenset(i for when in due if when <= self.iteration for i in self._cancels.pop(when, ()))
        return News(requests, cancelled)


def serve(engine: Engine, script: Script) -> dict[int, Served]:
    """All that came out, by request."""
    found: dict[int, Served] = {}
    for progress in engine.serve(script):
        served = found.setdefault(progress.index, Served())
        assert served.finish_reason is None, "progress of a finished request"
        served.ids += progress.new_token_ids
        served.iterations.append(script.iteration)
        served.finish_reason, served.stats, served.error = progress.finish_reason, progress.stats, progress.error
    return found
