"""Acceptance by depth and child rank, as measured: what the best tree follows from, shipped beside an SSM as JSON."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from specinfer_jax.errors import SpeculationError

_ROUNDING = 1e-3
_DIGITS = 4


@dataclasses.dataclass(frozen=True)
class AcceptanceRates:
    """Chance that a node's child of some rank is the LLM's next token, given that the node itself was."""

    rate: tuple[tuple[float, ...], ...]
    """`rate[d][r]`: children of rank r (0 is the likeliest) of nodes at depth d (0 is the root); the last row holds for
    all deeper nodes as well, and ranks that it does not name are never accepted."""

    def __post_init__(self) -> None:
        if not self.rate or any(not row for row in self.rate):
            raise SpeculationError("acceptance rates need at least one depth and one rank of each")
        for depth, row in enumerate(self.rate):
            is_falling = all(a >= b for a, b in itertools.pairwise(row))
            if not (all(0 <= chance <= 1 for chance in row) and is_falling and sum(row) <= 1 + _ROUNDING):
                raise SpeculationError(
                    f"acceptance rates at depth {depth} must lie in [0, 1], fall with the rank and add up to at most "
                    f"1, got {row}"
                )

    def at(self, depth: int, num_ranks: int) -> np.ndarray:
        """float64 `[num_ranks]`: of the children of nodes at `depth`."""
        row = self.rate[min(depth, len(self.rate) - 1)][:num_ranks]
        return np.array([*row, *[0.0] * (num_ranks - len(row))])

    def success(self, depth: int = 0) -> tuple[float, ...]:
        """Chance that one of the first k children is right, for k = 1, 2, ... (SpecInfer, Table 1)."""
        return tuple(np.cumsum(self.rate[min(depth, len(self.rate) - 1)]).tolist())

    def as_dict(self) -> dict[str, Any]:
        """For JSON; rates are rounded to four digits."""
        return {"rate": [[round(chance, _DIGITS) for chance in row] for row in self.rate]}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_dict(cls, value: Any) -> "AcceptanceRates":
        """Take back what `as_dict` gave.

        Raises:
          SpeculationError: it did not.
        """
        try:
            rate = tuple(tuple(float(chance) for chance in row) for row in value["rate"])
        except (ValueError, TypeError, KeyError) as error:
            message = f'acceptance rates must look like {{"rate": [[0.5, 0.1], ...]}}: {error!r}'
            raise SpeculationError(message) from None
        return cls(rate)

    @classmethod
    def from_json(cls, text: str) -> "AcceptanceRates":
        """Read what `to_json` wrote.

        Raises:
          SpeculationError: it did not.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise SpeculationError(f"acceptance rates must look like JSON: {error}") from None
        return cls.from_dict(value)

    @classmethod
    def from_success(cls, at_first: float, at_last: float, num_ranks: int) -> "AcceptanceRates":
        """The curve through two figures of a success table, the same at every depth.

        Success is taken to grow with the logarithm of k; published tables with all k lie close to that.

        Args:
          at_first: success with one child.
          at_last: success with `num_ranks` children.
          num_ranks: at least 2.
        """
        success = at_first + (at_last - at_first) * np.log(np.arange(1, num_ranks + 1)) / np.log(num_ranks)
        return cls((tuple(np.diff(success, prepend=0.0).tolist()),))

    @classmethod
    def from_counts(
        cls, hits: Sequence[Any] | np.ndarray, trials: Sequence[Any] | np.ndarray, *, smoothing: float | int = 50
    ) -> "AcceptanceRates":
        """From measurements; depths seen seldom lean on the average over all depths.

        Args:
          hits: `[depths][ranks]`, how often a child was the LLM's token.
          trials: `[depths][ranks]`, how often there was such a child of a right node; or `[depths]`, for all ranks.
          smoothing: observations that the average over all depths is worth at each depth.

        Raises:
          SpeculationError: the shapes differ, a count is negative, or there are more hits than trials.
        """
        hit_DR = np.array(hits, np.float64)
        trial_DR = np.array(trials, np.float64)
        if hit_DR.ndim == 2 and trial_DR.shape == hit_DR.shape[:1]:
            trial_DR = np.repeat(trial_DR[:, None], hit_DR.shape[1], axis=1)
        if hit_DR.ndim != 2 or trial_DR.shape != hit_DR.shape or not ((hit_DR >= 0) & (hit_DR <= trial_DR)).all():
            raise SpeculationError("hits must be [depths][ranks] and lie between 0 and as many trials")
        average_R = hit_DR.sum(axis=0) / np.maximum(trial_DR.sum(axis=0), 1e-9)
        rate_DR = (hit_DR + smoothing * average_R) / np.maximum(trial_DR + smoothing, 1e-9)
        rows = (_falling(rate_R, trial_R + smoothing) for rate_R, trial_R in zip(rate_DR, trial_DR, strict=True))
        return cls(tuple(tuple((row / max(row.sum(), 1.0)).tolist()) for row in rows))


def count_ranks(ranks: Iterable[np.ndarray], *, num_depths: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Hits and trials for `AcceptanceRates.from_counts` out of a teacher-forced pass of an SSM over the LLM's answers.

    Every token of an answer is taken to be the root of a step once: its next tokens are the path, and the SSM sees on
    a right path what it saw in the pass.

    Args:
      ranks: one array per answer: by token the rank that the SSM gave it, 0 for its likeliest; any value from
        `num_ranks` on for a token that no child names.
      num_depths: depths told apart; nodes at the last one stand for all deeper ones.
      num_ranks: children of a node.

    Returns:
      hits `[num_depths, num_ranks]` and trials `[num_depths]`.
    """
    hit_DR, trial_D = np.zeros((num_depths, num_ranks), np.int64), np.zeros(num_depths, np.int64)
    for rank_T in ranks:
        rank_T = np.asarray(rank_T)
        on_path_T = np.ones(len(rank_T), bool)
        for depth in range(num_depths):
            hit_DR[depth] += np.bincount(rank_T[on_path_T & (rank_T < num_ranks)], minlength=num_ranks)
            trial_D[depth] += on_path_T.sum()
            # A node one deeper: the token before was right, and below a right node itself.
            on_path_T = np.concatenate([[False], (on_path_T & (rank_T < num_ranks))[:-1]])
    return hit_DR, trial_D


def _falling(value_R: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
    """The nearest values (weighted squares) that never rise: neighbours that do are averaged until none does."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(value_R, weight_R, strict=True):
        block = (float(value), float(weight), 1)
        while blocks and blocks[-1][0] < block[0]:
            before = blocks.pop()
            total = before[1] + block[1]
            mean = (before[0] * before[1] + block[0] * block[1]) / total if total else (before[0] + block[0]) / 2
            block = (mean, total, before[2] + block[2])
        blocks.append(block)
    return np.repeat([value for value, _, _ in blocks], [count for _, _, count in blocks])
