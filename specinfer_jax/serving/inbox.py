"""How requests reach the engine while it runs: asked before every step, by the thread that owns the device."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from specinfer_jax.serving.request import EngineRequest


class News(NamedTuple):
    """What an inbox hands over."""

    requests: Sequence[tuple[int, EngineRequest]] = ()
    """New ones with the index that their progress will carry."""
    cancelled: frozenset[int] = frozenset()
    """Indices of requests that are not wanted any more; unknown ones are ignored."""


@runtime_checkable
class Inbox(Protocol):
    """Where the engine's requests come from."""

    survives_faults: bool
    """A fault fails the requests that it hits, instead of being raised."""

    def take(self, *, is_idle: bool) -> News | None:
        """Called before every step: what is new; waits while the engine is idle, and only then.

        None: there will be no more.
        """
        ...


class AllAtOnce:
    """All requests at the first call."""

    survives_faults = False

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self._news: News | None = News(list(enumerate(requests)))

    def take(self, *, is_idle: bool) -> News | None:
        news, self._news = self._news, None
        return news
