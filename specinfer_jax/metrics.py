"""What a request cost and gained, in plain Python. Free of jax.

Counted are kept tokens only: what an end-of-sequence token or the length limit cut off is neither emitted nor accepted.
"""

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class RequestStats:
    """Counters of one finished request, or the sum over several."""

    tokens: int
    """Tokens emitted."""
    steps: int
    """LLM passes that emitted them (prefill not counted)."""
    steps_by_rows: Mapping[int, int]
    """LLM passes by number of tree rows verified; rows 1 is incremental decoding."""
    proposed_by_position: Sequence[int]
    """Entry d: steps whose verified tree reached depth d + 1."""
    accepted_by_position: Sequence[int]
    """Entry d: steps in which at least d + 1 proposed tokens were accepted and kept."""
    proposed_by_speculator: Mapping[str, int]
    """Verified nodes of each speculator; a node that several proposed counts for each."""
    accepted_by_speculator: Mapping[str, int]
    """Accepted and kept nodes of each speculator."""
    prefill_seconds: float
    """Wall time of the prompt."""
    decode_seconds: float
    """Wall time from the end of prefill to the last token."""
    cached_tokens: int = 0
    """Prompt tokens that a shared prefix spared the LLM."""

    @property
    def tokens_per_step(self) -> float | None:
        """Emitted tokens per LLM pass, bonus token included; None without a step."""
        return self.tokens / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Emitted tokens per second of decoding; None if no time passed."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else None

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Unconditional: share of steps that kept position d + 1 among those that proposed one; None: none did."""
        pairs = zip(self.accepted_by_position, self.proposed_by_position, strict=True)
        return [accepted / proposed if proposed else None for accepted, proposed in pairs]


def total(stats: Sequence[RequestStats]) -> RequestStats:
    """Sum of several requests' counters; positions and speculators are matched up."""

    def add_lists(lists: Sequence[Sequence[int]]) -> list[int]:
        length = max((len(x) for x in lists), default=0)
        return [sum(x[i] for x in lists if i < len(x)) for i in range(length)]

    def add_maps(maps: Sequence[Mapping]) -> dict:
        keys = dict.fromkeys(key for x in maps for key in x)
        return {key: sum(x.get(key, 0) for x in maps) for key in keys}

    return RequestStats(
        tokens=sum(s.tokens for s in stats),
        steps=sum(s.steps for s in stats),
        steps_by_rows=add_maps([s.steps_by_rows for s in stats]),
        proposed_by_position=add_lists([s.proposed_by_position for s in stats]),
        accepted_by_position=add_lists([s.accepted_by_position for s in stats]),
        proposed_by_speculator=add_maps([s.proposed_by_speculator for s in stats]),
        accepted_by_speculator=add_maps([s.accepted_by_speculator for s in stats]),
        prefill_seconds=sum(s.prefill_seconds for s in stats),
        decode_seconds=sum(s.decode_seconds for s in stats),
        cached_tokens=sum(s.cached_tokens for s in stats),
    )
