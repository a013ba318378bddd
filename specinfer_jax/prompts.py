"""Prompts from JSONL files. Free of jax."""

import dataclasses
import json
import sys
from pathlib import Path

from specinfer_jax.errors import PromptError


@dataclasses.dataclass(frozen=True)
class PromptEntry:
    """One prompt of a JSONL file."""

    prompt: str
    """Its text."""
    category: str | None = None
    """What it is grouped by with `by_category`."""


DEFAULT_PROMPTS = (
    PromptEntry("Name three rivers of Europe and one city on each."),
    PromptEntry("Write a Python function that returns the sum of the squares of a list."),
    PromptEntry("Explain in two sentences why the sky is blue."),
    PromptEntry("Rewrite this sentence in the past tense: The train leaves at nine and arrives at noon."),
)
"""What `specinfer bench` measures where no prompts are given."""


def read_prompts(path: str | Path, *, limit: int | None = None) -> list[PromptEntry]:
    """Prompts of a JSONL file of `{"prompt": ..., "category": ...}`; "-" is standard input; other keys are ignored.

    Raises:
      PromptError: the file cannot be read, a line is not such an object, or there is no line at all.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise PromptError(f"cannot read {path}: {reason}") from error
    # Not splitlines(): JSON strings may hold line separators of other kinds.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    prompts = [_read_line(line, f"{path} line {number}") for number, line in lines[:limit]]
    if not prompts:
        raise PromptError(f"{path} holds no prompts")
    return prompts


def _read_line(line: str, place: str) -> PromptEntry:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{place} is not JSON: {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise PromptError(f'{place} must be an object with a text under "prompt"')
    category = entry.get("category")
    return PromptEntry(entry["prompt"], None if category is None else str(category))
