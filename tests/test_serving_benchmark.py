"""The load generator counts what clients see; paths as sequences verify the same nodes as one tree."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny_model
from decode_cases import shared_engine

from benchmarks import parallel_paths, serving
from benchmarks.serving_load import Load, Seen, percentiles, run_load
from specinfer_jax.assemble import open_model
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.tree.expand import parse_expansion


def test_time_per_token_leaves_the_first_out() -> None:
    # case B082: 4 tokens every 40 ms
    seen = Seen(0.0, first=1.0, last=1.04, tokens=5)
    assert seen.time_per_token == pytest.approx(0.01)
    assert Seen(0.0, first=1.0, last=1.0, tokens=1).time_per_token is None
    assert percentiles([]) is None


def test_a_closed_loop_and_arrivals_at_random() -> None:
    engine = shared_engine(num_slots=2)
    requests = [EngineRequest([5, i], 1 + i, frozenset()) for i in range(6)]
    closed = Load(requests, clients=2)
    first = closed.take(is_idle=True)
    assert first is not None and [index for index, _ in first.requests] == [0, 1]
    again = closed.take(is_idle=False)
    assert again is not None and not again.requests
    for load in (Load(requests, clients=2), Load(requests, rate=200.0)):
        row = run_load(engine, load)
        assert (row["requests"], row["tokens"]) == (6, 21)
        assert row["tokens_per_step"] == 1
        assert [seen.tokens for _, seen in sorted(load.seen.items())] == [1, 2, 3, 4, 5, 6]
        assert all(seen.arrived < seen.first <= seen.last for seen in load.seen.values())
    with pytest.raises(ValueError, match="clients or rate"):
        Load(requests)


def test_paths_verify_what_the_tree_verifies(tmp_path: Path) -> None:
    assert parallel_paths.paths_of(parse_expansion("1,2,1")) == [[0, 1, 2, 4], [0, 1, 3, 5]]
    model = open_model(tiny_model.write_folder(tmp_path), dtype=jnp.dtype(jnp.float32))
    row = parallel_paths.measure(model, parse_expansion("2,1"), 2, context=70, repeats=1, dtype=jnp.float32)
    assert row["largest_difference"] < 1e-3
    assert (row["nodes"], row["paths"], row["rows_of_paths"]) == (5, 2, 6)
    assert row["paths_bytes"] > row["tree_bytes"]


@pytest.mark.slow
def test_the_whole_study_on_a_tiny_model(tmp_path: Path) -> None:
    model, prompts = tiny_model.write_folder(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(4)))
    out = tmp_path / "out"
    common = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "4", "--max-model-len", "96"]
    serving.main([*common, "--batches", "1,2", "--out", str(out)])
    rows = json.loads((out / "serving.json").read_text())["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [(m, b) for b in (1, 2) for m in serving.MODES]
    assert (out / "by_batch.png").stat().st_size > 1_000
    with pytest.raises(SystemExit):
        serving.parse_arguments([*common, "--widths", "1,2"])
