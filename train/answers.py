"""What the LLM answered: the samples of distillation and boost-tuning, as lines of JSON. Free of jax.

{"id": "dolly-17", "temperature": 0.0, "prompt_ids": [1, 9690, 198], "response_ids": [504, 2887, 2]}
"""

import dataclasses
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_jax.errors import SpecInferError

SHARD_PATTERN = "answers-*.jsonl*"
"""Files of a folder that hold answers."""
FIELDS = ("id", "temperature", "prompt_ids", "response_ids")


class TrainDataError(SpecInferError):
    """A file of prompts or answers cannot be read or does not fit what is asked for."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One prompt and what the LLM wrote behind it."""

    id: str
    """Name of the sample; unique among answers that were read together."""
    temperature: float
    """At which the LLM wrote it; 0 is greedy."""
    prompt_ids: tuple[int, ...]
    """The prompt as served: with chat template and special tokens."""
    response_ids: tuple[int, ...]
    """What was generated, with the id that ended it if one did."""

    @property
    def content_key(self) -> str:
        """Name of the tokens themselves, 16 hex digits; equal for equal prompts and responses under any id."""
        ids = np.asarray([len(self.prompt_ids), *self.prompt_ids, *self.response_ids], np.uint32)
        return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()

    def as_line(self) -> str:
        """The line of JSON, without its end."""
        return json.dumps({name: getattr(self, name) for name in FIELDS}, separators=(",", ":"))


def read_answers(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Answer]:
    """Answers of JSONL files (.gz too) and of folders that `train.data` wrote, in that order.

    An answer that comes twice is kept once. Another answer under an id that was there gets "#2", "#3", ... behind it.

    Args:
      paths: one or several.

    Raises:
      TrainDataError: a file cannot be read, a line is no answer (the message names it), or there is none at all.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    answers: dict[str, Answer] = {}
    for path in given:
        is_folder = Path(path).is_dir()
        for file in answer_files(path):
            for place, entry in read_json_lines(file, may_be_torn=is_folder):
                _add(answers, parse_answer(entry, place))
    if not answers:
        raise TrainDataError(f"no answers in {', '.join(map(str, given)) or 'an empty list of files'}")
    return list(answers.values())


def _add(answers: dict[str, Answer], answer: Answer) -> None:
    base, number = answer.id, 1
    while (known := answers.get(answer.id)) is not None:
        if known == answer:
            return
        number += 1
        answer = dataclasses.replace(answer, id=f"{base}#{number}")
    answers[answer.id] = answer


def answer_files(path: str | os.PathLike[str]) -> list[Path]:
    """The file itself, or a folder's shards in their order.

    Raises:
      TrainDataError: a folder without answers.
    """
    if not Path(path).is_dir():
        return [Path(path)]
    shards = sorted(Path(path).glob(SHARD_PATTERN))
    if not shards:
        raise TrainDataError(f"{path} holds no answers; expected files {SHARD_PATTERN}")
    return shards


def read_json_lines(path: str | os.PathLike[str], *, may_be_torn: bool = False) -> Iterator[tuple[str, Any]]:
    """(place, value) of every line that is not blank; places read "FILE line 3".

    Args:
      path: the file.
      may_be_torn: a last line without an end is still being written, or its writer was killed; it is left out.

    Raises:
      TrainDataError: the file cannot be read, or a line is not JSON.
    """
    # Not splitlines(): JSON strings may hold line separators of other kinds.
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines[:-1] if may_be_torn else lines, 1):
        if line.strip():
            try:
                yield f"{path} line {number}", json.loads(line)
            except ValueError as error:
                raise TrainDataError(f"{path} line {number} is not JSON: {error}") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 file, unpacked if its name ends in .gz.

    Raises:
      TrainDataError: it cannot be read.
    """
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if str(path).endswith(".gz") else data).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainDataError(f"cannot read {path}: it is not UTF-8 text") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not a whole gzip file"
        raise TrainDataError(f"cannot read {path}: {reason}") from error


def parse_answer(entry: Any, place: str) -> Answer:
    """The answer of one line.

    Raises:
      TrainDataError: something is missing or of the wrong kind; `place` begins the message.
    """
    missing = [name for name in FIELDS if name not in entry] if isinstance(entry, dict) else list(FIELDS)
    if missing:
        raise TrainDataError(f"{place} must be an object with {', '.join(FIELDS)}; it lacks {', '.join(missing)}")
    if not isinstance(entry["id"], str):
        raise TrainDataError(f"{place}: id must be a string, got {entry['id']!r}")
    temperature = entry["temperature"]
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 1e9:
        raise TrainDataError(f"{place}: temperature must be a number of at least 0, got {temperature!r}")
    prompt_ids, response_ids = (_ids(entry[name], f"{place}: {name}") for name in FIELDS[2:])
    if not prompt_ids:
        raise TrainDataError(f"{place}: prompt_ids holds nothing; at least one id is needed")
    return Answer(entry["id"], float(temperature), prompt_ids, response_ids)


def _ids(value: Any, place: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**31 for i in value):
        raise TrainDataError(f"{place} must be a list of token ids")
    return tuple(value)


def split_answers(answers: Sequence[Answer], *, held_out: float) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on and held-out ones; all answers to one prompt fall on the same side.

    Args:
      answers: of any ids; what counts is the prompt's tokens.
      held_out: about this share of the prompts, by a hash: the same ones whatever else is read.
    """
    train: list[Answer] = []
    held: list[Answer] = []
    for answer in answers:
        is_held = text_hash(repr(answer.prompt_ids)) < held_out * 2**64
        (held if is_held else train).append(answer)
    return train, held


def text_hash(text: str, *, seed: int = 0) -> int:
    """64 bits that depend on the text and the seed alone, on every machine and in every run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest(), "big")
