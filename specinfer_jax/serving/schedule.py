"""What the scheduler knows of a request, and what it tells the engine to do for it. Free of jax."""

import dataclasses

from specinfer_jax.serving.pages import Key


@dataclasses.dataclass(eq=False)
class Entry:
    """One request on its way."""

    index: int
    """The caller's name for it."""
    rank: int
    """Lower goes first."""
    tokens: list[int]
    """Prompt and committed tokens."""
    limit: int
    """Tokens at which it ends."""
    shares: bool
    """May begin with pages that others filled."""
    salt: bytes
    """Shares only with the same salt."""
    slot: int | None = None
    """Where it is; None: it waits."""
    pages: list[int] = dataclasses.field(default_factory=list)
    """What it holds, in order."""
    prefilled: int = 0
    """Tokens in the cache while it is prefilling."""
    decodes: bool = False
    """Its prompt is in the cache."""
    keys: list[Key] = dataclasses.field(default_factory=list)
    """Of the full pages that prefill fills."""

    @property
    def order(self) -> tuple[int, int]:
        """Position among all others."""
        return self.rank, self.index

    @property
    def prefill_end(self) -> int:
        """Tokens that prefill puts into the cache; the last one is the root of the first step."""
        return len(self.tokens) - 1


@dataclasses.dataclass(frozen=True)
class Prefill:
    """What the device does next for one slot's prompt."""

    index: int
    """Whose."""
    slot: int
    """Where."""
    is_new: bool
    """The request enters the slot now, with `start` tokens in the cache already."""
    start: int
    """Tokens in the cache before."""
    size: int
    """Rows of the pass; 0: none is needed."""
    count: int
    """Rows of it that are tokens."""
    is_last: bool
    """The slot decodes from here on."""
