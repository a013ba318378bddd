"""benchmarks/equality.py: what counts as a difference, and a run on a tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_file

from benchmarks import equality
from benchmarks.equality import Difference, count_unexplained, first_difference, margins_of, plain_margin
from pallas_kernels.tree_attention import causal_words
from specinfer_jax.models.kv_cache import init_cache
from specinfer_jax.models.transformer import forward, vocabulary_logits
from specinfer_jax.opened import open_model


@pytest.mark.parametrize(
    ("expected", "found", "step"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [], None), ([5], [6], 0)],
)
def test_first_difference(expected: list[int], found: list[int], step: int | None) -> None:
    assert first_difference(expected, found) == step


def test_margins() -> None:
    logits = np.array([[1.0, 4.0, 3.5], [2.0, 2.0, 0.0]], np.float32)
    assert margins_of(logits) == [0.5, 0.0]


@pytest.mark.parametrize(
    ("margins", "unexplained"), [([], 0), ([9e-5], 0), ([0.0, 9e-5], 0), ([0.0, 0.0, 0.0], 1), ([2e-4, 0.0], 1)]
)
def test_only_two_ties_are_rounding(margins: list[float], unexplained: int) -> None:
    differences = [Difference("n-gram", i, 3, 1, 2, margin) for i, margin in enumerate(margins)]
    assert count_unexplained(differences) == unexplained


def test_every_mode_runs_and_differences_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def transformers_ids(path: Path, prompts: list, expected: list) -> Iterator[tuple[list, list, list]]:
        yield expected[0], expected[0], [1.0] * len(expected[0])
        wrong = [*expected[1][:-1], expected[1][-1] + 1]
        yield expected[1], wrong, [*([1.0] * (len(wrong) - 1)), last_margin]

    monkeypatch.setattr(equality, "_transformers_ids", transformers_ids)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab ab ab ab"}\n{"prompt": "x"}\n{"prompt": "not read"}\n')
    arguments = ["--prompts", tmp_path / "prompts.jsonl", "--limit", 2, "--max-tokens", 6, "--max-model-len", 128]
    arguments += ["--model", write_file(tmp_path / "tiny.gguf"), "--against", "transformers"]
    arguments += ["--json", tmp_path / "out"]
    last_margin = 5e-4
    assert equality.main([str(argument) for argument in arguments]) == 0
    report = json.loads((tmp_path / "out").read_text())
    modes = [row["mode"] for row in report["rows"]]
    assert modes == ["incremental", "n-gram", "self-draft", "first 1 layers", "transformers"]
    assert len({row["tokens"] for row in report["rows"]}) == 1
    assert [row["differences"] for row in report["rows"]] == [0, 0, 0, 0, 1]
    assert report["rows"][2]["acceptance"][0] == 1.0
    [difference] = report["differences"]
    assert (difference["prompt"], difference["margin"], report["prompts"]) == (1, 5e-4, 2)
    assert "margin 5.00e-04" in capsys.readouterr().out


def test_plain_margin_is_that_of_the_next_token(tmp_path: Path) -> None:
    model = open_model(write_file(tmp_path / "tiny.gguf"), dtype=jnp.dtype(jnp.float32))
    params, config, ids = model.params, model.config, [5, 6, 7, 8]
    cache = init_cache(config, num_slots=1, max_model_len=1, page_size=1, dtype=jnp.float32)
    words = causal_words(4)[None]
    x_DT, _ = forward(params, jnp.asarray([ids]), jnp.arange(4)[None], cache, words, config=config)
    logits_TV = np.asarray(vocabulary_logits(params, x_DT, config=config)).T
    for length in (1, 2, 4):
        found = plain_margin(model, ids[:1], ids[1:length])
        assert found == pytest.approx(margins_of(logits_TV)[length - 1], abs=1e-5)


def test_a_clear_difference_to_transformers_is_unexplained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [([1, 2, 3], [1, 9, 9], [0.5, 0.2, 0.1]), ([1, 2, 3], [1, 2, 9], [0.5, 5e-4, 0.3])]
    monkeypatch.setattr(equality, "_transformers_ids", lambda *_: iter(found))
    row, differences = equality.check_transformers(tmp_path, [[1], [2]], [[1, 2, 3]] * 2)
    # the second prompt's ids were a matter of rounding one step before they parted
    assert (row.differences, row.unexplained) == (2, 1)
    assert [(d.prompt, d.step, d.margin) for d in differences] == [(0, 1, 0.2), (1, 2, 0.3)]
