"""Which program takes the next steps: the one that can speculate, or plain steps, by measured tokens per second.

The gate decides step by step whether a tree pays, but the program around it costs something even where it verifies
none. Over several slots that may be more than its trees bring in, so both programs are measured while they serve:

    trees 4 | plain 4 | trees 4 | plain 16 | trees 4 | plain 64 | trees 4 | ... plain 64 | trees 4 | trees 16 | ...
                        (loses)            (loses)            (loses)                      (wins)    (wins)

Free of jax.
"""

import statistics
from collections import deque

_PROBE = 4
"""Steps of a try, of either program."""
_STRETCH = 16
"""Steps of trees between two looks while they win."""
_LONGEST_WAIT = 16
"""Most plain steps between tries, in tries."""
_RECHECK = 256
"""Steps of trees after which plain steps are measured again: the machine may have changed."""
_REMEMBERED = 9
"""Latest bursts that a program's seconds are the median of."""


class PlainSteps:
    """Tells which program is next and for how long; learns from what bursts did, in the order of their start."""

    def __init__(self) -> None:
        self.is_plain = False
        """Plain steps are next."""
        self._wait = 1
        self._since_plain = 0
        self._plain_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._tree_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._has_seen_plain = False
        self._begin(plain=False, steps=_PROBE)

    @property
    def steps_left(self) -> int:
        """Most steps of the next burst."""
        return self._planned - self._steps

    def seen(self, *, is_plain: bool, steps: int, slot_steps: int, tokens: int, seconds: float | None) -> None:
        """What a burst has done.

        Args:
          is_plain: which program it was; where it is not the one that is next, it began before the last change.
          steps: that it took, at least one.
          slot_steps: the same, summed over the slots that decoded.
          tokens: of all slots.
          seconds: that the device took; None: something else ran beside it.
        """
        if is_plain and not self._has_seen_plain:
            self._has_seen_plain, seconds = True, None  # the first run of a program is slow
        if seconds is not None:
            (self._plain_seconds if is_plain else self._tree_seconds).append(seconds / steps)
        if is_plain != self.is_plain:
            return
        if seconds is None and self._tree_seconds:
            seconds = steps * statistics.median(self._tree_seconds)
        self._steps += steps
        if seconds is not None:
            self._timed_steps += steps
            self._slot_steps += slot_steps
            self._tokens += tokens
            self._seconds += seconds
        if self._steps >= self._planned:
            self._end_stretch()

    def _begin(self, *, plain: bool, steps: int) -> None:
        self.is_plain, self._planned = plain, steps
        self._since_plain = 0 if plain else self._since_plain
        self._steps = self._timed_steps = self._slot_steps = self._tokens = 0
        self._seconds = 0.0

    def _end_stretch(self) -> None:
        if self.is_plain:
            self._begin(plain=False, steps=_PROBE)
        elif not self._plain_seconds:  # nothing to compare with
            self._begin(plain=True, steps=_PROBE)
        elif self._trees_won():
            self._wait = max(self._wait // 2, 1)
            self._since_plain += self._steps
            is_due = self._since_plain >= _RECHECK
            self._begin(plain=is_due, steps=_PROBE if is_due else _STRETCH)
        else:
            self._wait = min(self._wait * 4, _LONGEST_WAIT)
            self._begin(plain=True, steps=self._wait * _PROBE)

    def _trees_won(self) -> bool:
        """Whether this stretch gave more tokens per second than plain steps, which give one per step and slot."""
        if self._tokens <= self._slot_steps:  # noise may make these look faster, but they do strictly more
            return False
        plain = self._slot_steps / (self._timed_steps * statistics.median(self._plain_seconds))
        return self._tokens / self._seconds > plain
