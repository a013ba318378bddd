"""Answers side by side in rows of fixed length: the batches of training, as a pure function of (seed, step).

    row 0   token    p p p r r | p p r r r | .         p prompt, r response, . padding
            target   p p r r r | p r r r e | .         the next token of the same answer; e its last (often the EOS)
            is_target    x x x |   x x x x |           response tokens only
            position 0 1 2 3 4 | 0 1 2 3 4 | 0
            segment  1 1 1 1 1 | 2 2 2 2 2 | 0

Letters: R rows of a batch, T tokens of a row, C = ceil(T / 32) ancestor words.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, UInt32

from train.answers import Answer, TrainDataError


class PackedBatch(NamedTuple):
    """One batch, as numpy arrays."""

    token_RT: Int32[np.ndarray, "R T"]
    """What the model reads; 0 in padding."""
    position_RT: Int32[np.ndarray, "R T"]
    """From 0 in every answer; 0 in padding."""
    segment_RT: Int32[np.ndarray, "R T"]
    """From 1 in every row; 0 is padding."""
    target_RT: Int32[np.ndarray, "R T"]
    """The next token of the same answer; 0 in padding."""
    is_target_RT: Bool[np.ndarray, "R T"]
    """The target is a token of the response."""


class Place(NamedTuple):
    """Where an answer lies in a batch."""

    answer: int
    """Its number in the plan's `answers`."""
    row: int
    """Its row in the batch."""
    start: int
    """Column of its first token."""
    first_target: int
    """Column whose target is the response's first token."""
    stop: int
    """Column behind its last token."""


class BatchPlan:
    """Which answers lie where in which batch: all from (set of answers, rows, tokens, seed), without state.

    The lengths are packed once, longest first into the fullest row that has room. Every epoch deals the answers anew to
    the places of their own length and shuffles the rows, so all epochs have the same number of steps.
    """

    def __init__(self, answers: Sequence[Answer], *, rows: int, tokens: int, seed: int = 0) -> None:
        """Pack.

        Args:
          answers: at least one with a response that begins within `tokens`.
          rows: R, of every batch; an epoch's last batch is filled up with padding.
          tokens: T, of every row; longer answers are cut.
          seed: of the shuffling.

        Raises:
          TrainDataError: nothing to train on, or sizes below 1.
        """
        if rows < 1 or tokens < 1:
            raise TrainDataError(f"a batch needs at least one row of one token, got {rows} of {tokens}")
        by_id = sorted(answers, key=lambda answer: (answer.id, answer.prompt_ids, answer.response_ids))
        self.answers = [answer for answer in by_id if has_target(answer, tokens)]
        """Those with a target, by id: in which order they were made and read has no effect on anything."""
        self.left_out = [answer.id for answer in answers if not has_target(answer, tokens)]
        """Ids of those without: an empty response, or one that begins behind `tokens`."""
        if not self.answers:
            raise TrainDataError(f"none of {len(answers)} answers has a response that begins within {tokens} tokens")
        full_A = np.array([len(a.prompt_ids) + len(a.response_ids) - 1 for a in self.answers])
        self.length_A = np.minimum(full_A, tokens)
        """Tokens that every answer takes in a row: all but its last, which is only a target."""
        self.num_cut = int((full_A > tokens).sum())
        """Answers that lose their end."""
        self.rows, self.tokens, self.seed = rows, tokens, seed
        self._slots = _pack(-np.sort(-self.length_A), tokens)
        self.num_rows = max(row for row, _ in self._slots) + 1
        """Rows with tokens in an epoch."""
        self.steps_per_epoch = -(-self.num_rows // rows)
        """Batches of an epoch."""
        self._epoch = functools.lru_cache(maxsize=2)(self._deal)

    @functools.cached_property
    def keys(self) -> list[str]:
        """Content keys of the answers."""
        return [answer.content_key for answer in self.answers]

    @property
    def fill(self) -> float:
        """Share of an epoch's tokens that are no padding."""
        return float(self.length_A.sum()) / (self.steps_per_epoch * self.rows * self.tokens)

    @property
    def num_targets(self) -> int:
        """Response tokens of an epoch."""
        prompt_A = np.array([len(a.prompt_ids) for a in self.answers])
        return int((self.length_A - prompt_A + 1).sum())

    def batch(self, step: int) -> PackedBatch:
        """The batch of a step, counted from 0 over all epochs."""
        token, position, segment, target = np.zeros((4, self.rows, self.tokens), np.int32)
        batch = PackedBatch(token, position, segment, target, np.zeros((self.rows, self.tokens), bool))
        used_R = np.zeros(self.rows, np.int32)
        for place in self.places(step):
            answer, r, at = self.answers[place.answer], place.row, slice(place.start, place.stop)
            ids = np.array(answer.prompt_ids + answer.response_ids, np.int32)
            size = place.stop - place.start
            used_R[r] += 1
            batch.token_RT[r, at] = ids[:size]
            batch.target_RT[r, at] = ids[1 : size + 1]
            batch.position_RT[r, at] = np.arange(size)
            batch.segment_RT[r, at] = used_R[r]
            batch.is_target_RT[r, place.first_target : place.stop] = True
        return batch

    def ids(self, step: int) -> list[str]:
        """Ids of the batch's answers, row by row from left to right."""
        return [self.answers[place.answer].id for place in self.places(step)]

    def places(self, step: int) -> list[Place]:
        """Where the batch's answers lie, row by row from left to right."""
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        answers_in = self._epoch(step // self.steps_per_epoch)
        first = step % self.steps_per_epoch * self.rows
        return [
            self._place(a, start, row)
            for row, in_row in enumerate(answers_in[first : first + self.rows])
            for a, start in in_row
        ]

    def _place(self, a: int, start: int, row: int) -> Place:
        return Place(a, row, start, start + len(self.answers[a].prompt_ids) - 1, start + int(self.length_A[a]))

    def _deal(self, epoch: int) -> list[list[tuple[int, int]]]:
        """(answer, start) by row of one epoch."""
        random = np.random.default_rng([self.seed, epoch])
        # Longest first, in random order among equals: the k-th takes the k-th place, which has its length.
        order_A = np.lexsort((random.random(len(self.answers)), -self.length_A))
        moved_to = random.permutation(self.num_rows).tolist()
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for a, (row, start) in zip(order_A.tolist(), self._slots, strict=True):
            rows[moved_to[row]].append((a, start))
        return rows


def has_target(answer: Answer, tokens: int) -> bool:
    """Whether anything is left of the response once an answer is cut to a row of `tokens`."""
    return bool(answer.response_ids) and len(answer.prompt_ids) <= tokens


def _pack(length_A: np.ndarray, tokens: int) -> list[tuple[int, int]]:
    """(row, start) of places of these lengths, given longest first: each into the fullest row that has room."""
    num_rows = 0
    with_room: list[list[int]] = [[] for _ in range(tokens + 1)]
    has_some = 0  # bit n: there is a row with room for exactly n
    placed: list[tuple[int, int]] = []
    for length in length_A.tolist():
        enough = has_some >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                has_some &= ~(1 << room)
        else:
            room, row = tokens, num_rows
            num_rows += 1
        placed.append((row, tokens - room))
        with_room[room - length].append(row)
        has_some |= 1 << (room - length)
    return placed


def segment_words(segment_RT: Int[Array, "R T"]) -> UInt32[Array, "R T C"]:
    """Ancestor words of packed rows: a token sees itself and what lies before it in its segment; jit-able.

    Padding sees padding, so that no row is without a key.
    """
    R, T = segment_RT.shape
    C = -(-T // 32)
    column_T = np.arange(T)
    sees_RTT = (segment_RT[:, :, None] == segment_RT[:, None, :]) & (column_T[None] <= column_T[:, None])[None]
    bits_RTC32 = jnp.pad(sees_RTT, ((0, 0), (0, 0), (0, C * 32 - T))).reshape(R, T, C, 32).astype(jnp.uint32)
    return (bits_RTC32 << np.arange(32, dtype=np.uint32).reshape(1, 1, 1, 32)).sum(axis=3, dtype=jnp.uint32)
