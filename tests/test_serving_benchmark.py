"""The load generator counts what clients see; paths as sequences verify the same nodes as one tree."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from fake_engine import STATS

from benchmarks import parallel_paths, serving
from benchmarks.serving_load import Load, Seen, percentiles, run_load
from specinfer_jax.opened import open_model
from specinfer_jax.serving.inbox import Inbox
from specinfer_jax.serving.request import EngineRequest, Progress
from specinfer_jax.tree.expand import parse_expansion


def test_time_per_token_leaves_the_first_out() -> None:
    # case B082: 4 tokens every 40 ms
    seen = Seen(0.0, first=1.0, last=1.04, tokens=5)
    assert seen.time_per_token == pytest.approx(0.01)
    assert Seen(0.0, first=1.0, last=1.0, tokens=1).time_per_token is None
    assert percentiles([]) is None


class Turns:
    """An engine without a model: in every iteration each of two slots gets a token."""

    manager = SimpleNamespace(preemptions=0)
    program = SimpleNamespace(buckets=(1,))
    costs = SimpleNamespace(verify_J=np.ones(1))

    def serve(self, inbox: Inbox) -> Iterator[Progress]:
        waiting: list[tuple[int, EngineRequest]] = []
        left: dict[int, int] = {}
        while (news := inbox.take(is_idle=not waiting and not left)) is not None:
            waiting += news.requests
            while waiting and len(left) < 2:
                index, request = waiting.pop(0)
                left[index] = request.max_tokens
            for index in list(left):
                left[index] -= 1
                reason = None if left[index] else "length"
                count = index + 1
                yield Progress(index, [0], reason, reason and dataclasses.replace(STATS, tokens=count, steps=count))
                if reason:
                    del left[index]


def test_a_closed_loop_and_arrivals_at_random() -> None:
    engine: Any = Turns()
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


def test_the_middle_repeat_is_shown_and_ratios_are_taken_in_turn() -> None:
    own, first = ([{"tokens_per_second": rate} for rate in rates] for rates in ((30.0, 10.0, 24.0), (20.0, 10.0, 12.0)))
    assert serving.middle(own, first) == {"tokens_per_second": 24.0, "over_first_mode": 1.5}
    assert serving.middle(own[:2], first[:2]) == {"tokens_per_second": 10.0, "over_first_mode": 1.25}


@pytest.mark.slow
def test_the_whole_study_on_a_tiny_model(tmp_path: Path) -> None:
    model, prompts = tiny_model.write_folder(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(4)))
    out = tmp_path / "out"
    common = ["--model", str(model), "--prompts", str(prompts), "--max-tokens", "4", "--max-model-len", "96"]
    serving.main([*common, "--batches", "1,2", "--repeats", "2", "--out", str(out)])
    rows = json.loads((out / "serving.json").read_text())["rows"]
    assert [(row["mode"], row["batch"]) for row in rows] == [(m, b) for b in (1, 2) for m in serving.MODES]
    assert (out / "by_batch.png").stat().st_size > 1_000
    with pytest.raises(SystemExit):
        serving.parse_arguments([*common, "--widths", "1,2"])
