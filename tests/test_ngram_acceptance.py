"""benchmarks/ngram_acceptance.py: the counts of a text small enough to count by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.ngram_acceptance import continuations, count, main
from specinfer_jax.speculation.ngram import NgramSpeculator


def test_continuations_are_the_speculators() -> None:
    found = continuations([1, 2, 3, 9, 1, 2, 7, 8, 1, 2], max_match=3, branches=2, depth=3)
    assert found == [(2, [7, 8, 1]), (2, [3, 9, 1])]
    # an occurrence that overlaps the end repeats with its own period
    assert continuations([4, 5, 4], max_match=3, branches=2, depth=4) == [(1, [5, 4, 5, 4])]


def test_counts_by_hand() -> None:
    right, seen, tokens = count(iter([([1, 2, 1], [2, 3])]), NgramSpeculator(branch_depths=(2,)))
    # "1 2 1" matches one and proposes 2 (right), then 1 (3 came); "1 2 1 2" matches two and proposes 1 (3 came)
    assert tokens == 2
    assert seen == {(1, 0, 0): 1, (1, 0, 1): 1, (2, 0, 0): 1}
    assert {kind: n for kind, n in right.items() if n} == {(1, 0, 0): 1}


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    rows = [
        {"prompt_ids": [1, 2, 1], "response_ids": [2, 1, 2], "temperature": 0.0},
        {"prompt_ids": [1], "response_ids": [5, 5, 5, 5], "temperature": 0.8},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    main(["--answers", str(path)])
    assert "3 answer tokens" in capsys.readouterr().out
