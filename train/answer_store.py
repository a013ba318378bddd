"""A folder of answers that survives being killed: one line per answer, appended whole, and the settings they share.

answers-00000.jsonl   answers in order of completion, `ANSWERS_PER_SHARD` a file
skipped.jsonl         {"id", "reason"} of prompts that cannot be answered
settings.json         what all of them were made with
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from train.answers import Answer, TrainDataError, parse_answer, read_json_lines

ANSWERS_PER_SHARD = 5000
_SETTINGS = "settings.json"
_SKIPPED = "skipped.jsonl"


class AnswerStore:
    """The folder, opened by one process at a time; a context manager."""

    def __init__(
        self, folder: str | os.PathLike[str], settings: Mapping[str, Any], *, per_shard: int = ANSWERS_PER_SHARD
    ) -> None:
        """Open or make the folder; a line that was torn when its writer was killed is taken off.

        Args:
          folder: where.
          settings: what answers depend on; JSON values.
          per_shard: answers of a file.

        Raises:
          TrainDataError: another process writes there, the answers were made with other settings, or cannot be read.
        """
        self.folder, self._settings, self._per_shard = Path(folder), settings, per_shard
        self._lock = lock_folder(self.folder)
        try:
            check_settings(self.folder, settings)
            self.shards = sorted(self.folder.glob("answers-*.jsonl"))
            for path in (*self.shards, self.folder / _SKIPPED):
                _drop_torn_line(path)
            self._in_last = 0
            self.answered: set[str] = set()
            """Ids of prompts whose answers are there."""
            self.num_tokens = 0
            """Of all responses."""
            for shard in self.shards:
                self._in_last = 0
                for place, entry in read_json_lines(shard):
                    self._count(parse_answer(entry, place))
            self.skipped = self._read_skipped()
            """Reasons by id."""
        except BaseException:
            self._lock.release()
            raise

    def _read_skipped(self) -> dict[str, str]:
        path = self.folder / _SKIPPED
        entries = [entry for _, entry in read_json_lines(path)] if path.exists() else []
        return {entry["id"]: entry["reason"] for entry in entries}

    def __enter__(self) -> "AnswerStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def __contains__(self, prompt_id: str) -> bool:
        """Whether the prompt has had its turn."""
        return prompt_id in self.answered or prompt_id in self.skipped

    def add(self, answer: Answer) -> None:
        """Write an answer; once this returns, it stays."""
        if answer.id in self:
            raise ValueError(f"answer {answer.id!r} is there already")
        if not self.shards or self._in_last >= self._per_shard:
            self.shards.append(self.folder / f"answers-{len(self.shards):05}.jsonl")
            self._in_last = 0
        write_settings(self.folder, self._settings)
        _append(self.shards[-1], answer.as_line())
        self._count(answer)

    def skip(self, prompt_id: str, reason: str) -> None:
        """Note that a prompt cannot be answered."""
        write_settings(self.folder, self._settings)
        _append(self.folder / _SKIPPED, json.dumps({"id": prompt_id, "reason": reason}))
        self.skipped[prompt_id] = reason

    def _count(self, answer: Answer) -> None:
        self.answered.add(answer.id)
        self._in_last += 1
        self.num_tokens += len(answer.response_ids)


def lock_folder(folder: Path) -> FileLock:
    """Make the folder and keep other processes out; a lock goes with its process, however that ends.

    Raises:
      TrainDataError: another process has it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout as error:
        raise TrainDataError(
            f"another process is writing into {folder}; wait for it or choose another folder"
        ) from error
    except OSError as error:
        raise TrainDataError(f"cannot write into {folder}: {error.strerror}") from error
    return lock


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Where a folder has settings, they must be these.

    Raises:
      TrainDataError: they differ (the message names what does), or cannot be read.
    """
    path = folder / _SETTINGS
    if not path.exists():
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainDataError(f"cannot read {path}: {error}") from error
    names = [n for n in dict.fromkeys([*there, *settings]) if there.get(n) != settings.get(n)]
    if names:
        other = "; ".join(f"{n} is {there.get(n)!r} there and {settings.get(n)!r} now" for n in names)
        raise TrainDataError(f"{folder} was made with other settings: {other}; choose another folder")


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Put the settings there before the first result; a run that failed earlier leaves none."""
    if not (folder / _SETTINGS).exists():
        replace_file(folder / _SETTINGS, json.dumps(dict(settings), indent=2) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _append(path: Path, line: str) -> None:
    """One write for the whole line: a killed process has written it or, at worst, its beginning."""
    with open(path, "ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
