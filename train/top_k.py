"""The LLM's likeliest tokens at every place of answers, on disk and looked up for a batch. Free of jax.

teacher = TeacherTopK("answers/top16")
id_RTk, logprob_RTk = teacher.lookup(plan, step)          # lies over plan.batch(step)
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int, Int32

from train.answers import Answer, TrainDataError
from train.packing import BatchPlan

NO_ID = -1
"""Where there is no target."""
NO_LOGPROB = -1e9
"""Likewise: a finite number whose probability is 0."""
_SHARDS = "topk-*.npz"


class TopK(NamedTuple):
    """The likeliest tokens at some places, likeliest first; what is left of the probability is spread over the rest."""

    id_Nk: Int[np.ndarray, "N k"]
    """Token ids."""
    logprob_Nk: Float[np.ndarray, "N k"]
    """Log-probabilities at temperature 1."""


class TeacherTopK:
    """The rows of a folder that `python -m train.teacher` wrote, in memory."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read all shards.

        Args:
          folder: where they are.

        Raises:
          TrainDataError: there are none, or one cannot be read.
        """
        shards = sorted(Path(folder).glob(_SHARDS))
        if not shards:
            raise TrainDataError(f"{folder} holds no rows of the LLM; `python -m train.teacher` makes them")
        self.folder = Path(folder)
        self._rows: dict[str, TopK] = {}
        for shard in shards:
            self._rows |= _read_shard(shard)
        self.k = next(iter(self._rows.values())).id_Nk.shape[1]
        """Tokens of every row."""

    def __contains__(self, answer: Answer) -> bool:
        """Whether the answer's rows are there."""
        return answer.content_key in self._rows

    def missing(self, answers: Sequence[Answer]) -> list[str]:
        """Ids of answers whose rows are not there."""
        return [answer.id for answer in answers if answer not in self]

    def check(self, plan: BatchPlan) -> None:
        """Make sure, before training begins, that `lookup` will find every row.

        Raises:
          TrainDataError: it will not.
        """
        for a, (answer, length) in enumerate(zip(plan.answers, plan.length_A.tolist(), strict=True)):
            self._rows_of(plan, a, length - len(answer.prompt_ids) + 1)

    def _rows_of(self, plan: BatchPlan, a: int, size: int) -> TopK:
        """At least so many rows of an answer of the plan."""
        rows = self._rows.get(plan.keys[a])
        if rows is None or len(rows.id_Nk) < size:
            what = "no rows of" if rows is None else "too few rows of"
            raise TrainDataError(
                f"{self.folder} has {what} answer {plan.answers[a].id!r}; run `python -m train.teacher` on the same "
                f"answers, with at least as many tokens a row"
            )
        return rows

    def lookup(self, plan: BatchPlan, step: int) -> tuple[Int32[np.ndarray, "R T k"], Float32[np.ndarray, "R T k"]]:
        """Rows for every target of `plan.batch(step)`, in the same places.

        Args:
          plan: the batches.
          step: which of them.

        Returns:
          Ids and log-probabilities; where there is no target, `NO_ID` and `NO_LOGPROB`.

        Raises:
          TrainDataError: the LLM's rows of an answer are not there, or end before the answer does.
        """
        id_RTk = np.full((plan.rows, plan.tokens, self.k), NO_ID, np.int32)
        logprob_RTk = np.full(id_RTk.shape, NO_LOGPROB, np.float32)
        for place in plan.places(step):
            size = place.stop - place.first_target
            rows = self._rows_of(plan, place.answer, size)
            at = slice(place.first_target, place.stop)
            id_RTk[place.row, at] = rows.id_Nk[:size]
            logprob_RTk[place.row, at] = rows.logprob_Nk[:size]
        return id_RTk, logprob_RTk


def next_shard(folder: Path) -> Path:
    """Where the next shard of a folder goes."""
    number = 1 + max((int(path.stem.split("-")[1]) for path in folder.glob(_SHARDS)), default=-1)
    return folder / f"topk-{number:05}.npz"


def write_shard(path: Path, rows: Mapping[str, TopK], *, id_dtype: np.dtype, logprob_dtype: np.dtype) -> None:
    """Write rows by content key, so that the file is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez(
            file,
            key_A=np.array(list(rows)),
            count_A=np.array([len(top.id_Nk) for top in rows.values()], np.int64),
            id_Nk=np.concatenate([top.id_Nk for top in rows.values()]).astype(id_dtype),
            logprob_Nk=np.concatenate([top.logprob_Nk for top in rows.values()]).astype(logprob_dtype),
        )
    os.replace(temporary, path)


def _read_shard(path: Path) -> dict[str, TopK]:
    try:
        with np.load(path) as shard:
            id_Nk, logprob_Nk = shard["id_Nk"], shard["logprob_Nk"]
            end_A = np.cumsum(shard["count_A"])
            keys = shard["key_A"].tolist()
    except Exception as error:  # a damaged file may fail in any way
        raise TrainDataError(f"cannot read {path}: {error}") from error
    starts = [0, *end_A[:-1].tolist()]
    return {
        key: TopK(id_Nk[start:end], logprob_Nk[start:end])
        for key, start, end in zip(keys, starts, end_A.tolist(), strict=True)
    }


def keys_of(folder: Path) -> set[str]:
    """Content keys of all answers whose rows are there."""
    return {key for path in sorted(folder.glob(_SHARDS)) for key in _read_shard(path)}
