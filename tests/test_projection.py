"""benchmarks/projection.py: what its passes are and how figures follow from them."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from test_scale import ROW

from benchmarks import projection
from benchmarks.projection import PassTimes, chip_seconds, draft_passes, predicted_speedup, project, weights_of
from specinfer_jax.models.transformer import init_params
from specinfer_jax.tree.expand import parse_expansion

CHIP = projection.Chip(1e9, 1e12, 1e8, 1e7)
SHARED = dataclasses.replace(ROW, llm="llama-7b", target="v5e", devices=2, layers=32, ssm_layers=2)


def test_leaves_are_drafted_without_a_pass_of_their_own() -> None:
    assert draft_passes(parse_expansion("1,1,3,1")) == [(6, 1), (1, 1), (1, 1), (3, 3)]
    assert draft_passes(parse_expansion("2")) == [(3, 1)]
    assert draft_passes(parse_expansion("2/1,0")) == [(4, 1), (1, 1)]


def test_a_pass_reads_or_computes() -> None:
    assert chip_seconds(CHIP, 8e6, 2e6, 1) == 0.01  # bytes at 1 GB/s
    assert chip_seconds(CHIP, 8e6, 2e6, 10_000) == pytest.approx(2 * 10_000 * 4e6 / 1e12)  # 4 M parameters
    assert chip_seconds(CHIP, 8e6, 2e6, 1, from_host=True) == 0.8


def test_weights_are_those_that_a_pass_reads() -> None:
    config = projection.PAPER_MODELS["llama-7b"]
    everything = 2 * (6_738_415_616 - config.vocab_size * config.width - config.width)  # no embedding, no last norm
    assert sum(weights_of(config, 2)) == everything


def test_the_speedup_is_tokens_times_passes() -> None:
    found = project(SHARED, 1)
    ratio = found.incremental_seconds / (found.verify_seconds + found.draft_seconds)
    assert found.speedup(3.0) == pytest.approx(3 * ratio)
    assert 0.5 < ratio < 1, "a tree's pass waits for memory as one row's does"
    # Weights over the host's link hide what the SSM costs.
    offloaded = project(dataclasses.replace(SHARED, offload=True, devices=1, collectives={}, collective_bytes=0), 1)
    assert offloaded.speedup(3.0) > 2.9
    assert project(SHARED, 64).speedup(3.0) < found.speedup(3.0), "with many slots rows cost arithmetic"


def test_a_step_is_made_up_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = projection.PAPER_MODELS["tiny"]
    passes = PassTimes(config, init_params(config, jax.random.key(0)), num_slots=1)
    assert passes.seconds(2) > 0
    monkeypatch.setattr(PassTimes, "seconds", lambda self, rows: 1.0 + rows)
    # 1 + 1 against the LLM's 1 + 4 and the SSM's 1 + 5, 1 + 1, 1 + 1.
    assert predicted_speedup(passes, passes, parse_expansion("1,1,1"), 2.0) == pytest.approx(2 * 2 / (5 + 6 + 2 + 2))


def test_the_table_has_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.json").write_text(json.dumps([dataclasses.asdict(SHARED)]), encoding="utf-8")
    projection.main(["--rows", str(tmp_path / "s.json")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:5] for line in lines[2:]] == [[" llama-7b ", " v5e ", " 2 ", f" {n} "] for n in (1, 16)]


def test_something_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        projection.main([])
    assert "give --rows FILE or --check" in capsys.readouterr().err
