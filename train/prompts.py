"""Prompts for the LLM to answer: from JSONL or plain text, mixed by data set in a fixed order. Free of jax.

{"id": "dolly-17", "dataset": "dolly_3k", "prompt": "Name three rivers."}
"""

import dataclasses
import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.answers import TrainDataError, read_json_lines, read_text, text_hash

DOCUMENT_END = "<|endoftext|>"
"""A line of plain text that separates documents."""


@dataclasses.dataclass(frozen=True)
class TrainPrompt:
    """One prompt."""

    id: str
    """Its name, which its answer takes over."""
    prompt: str
    """Text without chat template; may be empty, and is then refused when its turn comes."""
    dataset: str = ""
    """Where it is from, to be weighted by."""


def read_train_prompts(path: str | os.PathLike[str]) -> list[TrainPrompt]:
    """Prompts of a JSONL file (.gz too) of `{"id", "prompt"[, "dataset"]}`; other keys are ignored.

    Raises:
      TrainDataError: the file cannot be read, a line is no such object, or two prompts share an id.
    """
    return _unique([_parse_prompt(entry, place) for place, entry in read_json_lines(path)], path)


def _parse_prompt(entry: Any, place: str) -> TrainPrompt:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or not entry["id"]:
        raise TrainDataError(f'{place} must be an object with a text under "id" and one under "prompt"')
    for name in ("prompt", "dataset"):
        if not isinstance(entry.get(name, ""), str):
            raise TrainDataError(f"{place}: {name} must be a text, got {entry[name]!r}")
    return TrainPrompt(entry["id"], entry.get("prompt", ""), entry.get("dataset", ""))


def _unique(prompts: Sequence[TrainPrompt], path: str | os.PathLike[str]) -> list[TrainPrompt]:
    """Each prompt once."""
    if not prompts:
        raise TrainDataError(f"{path} holds no prompts")
    by_id: dict[str, TrainPrompt] = {}
    for prompt in prompts:
        if by_id.setdefault(prompt.id, prompt).prompt != prompt.prompt:
            raise TrainDataError(f"{path} has two prompts with the id {prompt.id!r}; ids must tell prompts apart")
    return list(by_id.values())


def cut_text(path: str | os.PathLike[str], *, characters: int) -> list[TrainPrompt]:
    """A text file (.gz too) cut into prompts; documents are separated by lines `<|endoftext|>`.

    Args:
      path: the file; its name without endings is the data set and begins the ids.
      characters: about how long each prompt is; it ends at the first white space from there on. What is left of a
        document's end is dropped if it is shorter than half of that.

    Raises:
      TrainDataError: the file cannot be read or holds no text.
    """
    name = Path(path).name.split(".")[0]
    documents = re.split(rf"^{re.escape(DOCUMENT_END)}\s*$", read_text(path), flags=re.MULTILINE)
    prompts = [
        TrainPrompt(f"{name}-{number}-{start}", piece, name)
        for number, document in enumerate(documents)
        for start, piece in _pieces(document, characters)
    ]
    return _unique(prompts, path)


def _pieces(document: str, characters: int) -> list[tuple[int, str]]:
    """(offset, text) of consecutive pieces that begin and end with a word."""
    pieces = []
    word, space = re.compile(r"\S"), re.compile(r"\s")
    begin = word.search(document)
    while begin is not None:
        start = begin.start()
        end = space.search(document, start + characters)
        stop = len(document) if end is None else end.start()
        piece = document[start:stop].rstrip()
        if len(piece) * 2 >= characters:
            pieces.append((start, piece))
        begin = word.search(document, stop)
    return pieces


def parse_weights(text: str) -> dict[str, float]:
    """Weights by pattern, from "dolly_*=3,gpteacher_*=1".

    Raises:
      TrainDataError: it does not read like that.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        pattern, _, number = part.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not pattern.strip() or not 0 < weight < float("inf"):
            raise TrainDataError(
                f'datasets must read like "dolly_*=3,gpteacher_*=1" with weights above 0, got {part!r}'
            )
        weights[pattern.strip()] = weight
    return weights


def mix_prompts(
    prompts: Sequence[TrainPrompt], weights: Mapping[str, float] | None = None, *, seed: int = 0
) -> list[TrainPrompt]:
    """Prompts in the order in which they are answered, so that any beginning of it is a fair sample.

    Args:
      prompts: of all data sets.
      weights: by pattern of data sets (`*` and `?` as in file names; the first that fits counts): of any stretch each
        pattern gets a share in proportion to its weight, until its prompts are used up. Data sets that fit none are
        left out. None: all prompts, each as likely to come next as any other.
      seed: of the order.

    Raises:
      TrainDataError: a pattern fits no data set.
    """
    by_pattern: dict[str, list[TrainPrompt]] = {pattern: [] for pattern in weights or {"*": 1.0}}
    for prompt in prompts:
        pattern = next((p for p in by_pattern if fnmatch.fnmatchcase(prompt.dataset, p)), None)
        if pattern is not None:
            by_pattern[pattern].append(prompt)
    timed = []
    for pattern, group in by_pattern.items():
        if not group:
            known = ", ".join(sorted({p.dataset for p in prompts}))
            raise TrainDataError(
                f"no prompts of a data set {pattern!r} (patterns before it may have them); there are {known}"
            )
        group.sort(key=lambda p: (text_hash(p.id, seed=seed), p.id))
        # The k-th of a pattern is due at (k + 1/2) / weight.
        timed += [((k + 0.5) / (weights or {pattern: 1.0})[pattern], p.id, p) for k, p in enumerate(group)]
    return [prompt for _, _, prompt in sorted(timed, key=lambda entry: entry[:2])]
