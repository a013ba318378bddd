"""The training loop: layouts give the same gradient, bad batches are not applied, measurements agree."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from train_run_cases import PARAMS, SSM, Faulty, assert_same, make_answers, make_settings, run

from specinfer_jax.errors import ConfigError
from train.evaluate import evaluate
from train.loop import NotFiniteError
from train.packing import BatchPlan
from train.parts import split_params
from train.record import read_metrics
from train.step import TrainBatch, by_rows, data_mesh, initial_state, make_step, on_all, train_batch


def batch_of_rows(rows: int) -> TrainBatch:
    plan = BatchPlan(make_answers(60), rows=rows, tokens=32)
    return train_batch(plan.batch(0))


def gradient(batch: TrainBatch, *, accumulate: int = 1, devices: int = 1, **run: Any) -> tuple[Any, Any]:
    """The gradient as AdamW's first mean of it tells it, and the metrics."""
    rows, tokens = batch.token_RT.shape
    settings = make_settings(rows=rows, accumulate=accumulate, clip=0.0, devices=devices, **run)
    mesh = data_mesh(devices)
    trained, frozen = split_params(PARAMS, settings.init.train)
    step = make_step(SSM, settings, mesh, rows=rows, tokens=tokens)
    state = jax.device_put(initial_state(trained, settings), on_all(mesh))
    state, metrics = step(state, jax.device_put(frozen, on_all(mesh)), jax.device_put(batch, by_rows(mesh)))
    mean = state.optimiser[0].mu
    return jax.tree.map(lambda leaf: np.asarray(leaf) / (1 - settings.optimiser.b1), mean), jax.device_get(metrics)


def assert_close(one: Any, other: Any, tolerance: float = 1e-6) -> None:
    """Equal to within `tolerance` of the largest element of all."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(other))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * largest)


def test_layouts_give_the_same_gradient() -> None:
    # B069: one row without a target, and all rows of one device (the last quarter) without one.
    batch = batch_of_rows(8)
    batch.weight_RT[1] = 0
    batch.weight_RT[6:] = 0
    alone, metrics = gradient(batch)
    assert metrics.targets == batch.weight_RT.sum() and metrics.healthy
    for layout in ({"accumulate": 4}, {"devices": 4}, {"devices": 2, "accumulate": 2, "remat": True}):
        other, other_metrics = gradient(batch, **layout)
        assert_close(other, alone)
        np.testing.assert_allclose(np.array(other_metrics[:5]), np.array(metrics[:5]), rtol=1e-6)


def test_batch_without_targets_is_harmless() -> None:
    batch = batch_of_rows(4)
    found, metrics = gradient(batch._replace(weight_RT=np.zeros_like(batch.weight_RT)))
    assert metrics.loss == 0 and metrics.healthy
    assert not any(leaf.any() for leaf in jax.tree.leaves(found))


def test_weights_of_0_and_1_are_a_mask_and_others_are_relative() -> None:
    batch = batch_of_rows(4)
    keep = np.random.default_rng(0).integers(0, 2, batch.weight_RT.shape).astype(np.float32)
    kept, _ = gradient(batch._replace(weight_RT=batch.weight_RT * keep))
    half, _ = gradient(batch._replace(weight_RT=batch.weight_RT * keep * 0.5))
    assert_close(half, kept)
    mixed, _ = gradient(batch._replace(weight_RT=batch.weight_RT * (0.25 + 0.75 * keep)))
    rest, _ = gradient(batch._replace(weight_RT=batch.weight_RT * (1 - keep)))
    a, b = (batch.weight_RT * keep).sum(), 0.25 * (batch.weight_RT * (1 - keep)).sum()
    assert_close(mixed, jax.tree.map(lambda x, y: (x * a + y * b) / (a + b), kept, rest), 3e-6)


def spoilt(batch: TrainBatch) -> TrainBatch:
    batch.weight_RT[0] = np.inf
    return batch


def test_bad_batch_stops_the_run_and_is_named(tmp_path: Path) -> None:
    settings = make_settings(steps=20, save_interval=5)
    batches = Faulty(settings, at=7, spoil=spoilt)
    with pytest.raises(NotFiniteError, match="batch 7 has loss") as caught:
        run(settings, tmp_path, batches)
    assert caught.value.step == 7
    assert caught.value.ids == batches.ids(7) and all(name in str(caught.value) for name in batches.ids(7))
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 8))
    # Nothing was applied: with a sound batch in its place, the run equals one that never had it.
    mended = run(settings, tmp_path)
    straight = run(settings, tmp_path / "straight")
    assert_same(mended.trained, straight.trained)


def test_bad_batch_leaves_the_state_alone() -> None:
    settings, batch = make_settings(), batch_of_rows(4)
    trained, frozen = split_params(PARAMS, settings.init.train)
    step = make_step(SSM, settings, data_mesh(1), rows=4, tokens=32)
    state = initial_state(trained, settings)
    before = jax.device_get(state)
    state, metrics = step(state, frozen, spoilt(batch_of_rows(4)))
    assert not metrics.healthy
    # Nor is a good batch applied behind it: whoever looks one step late still finds the state as it was.
    state, metrics = step(state, frozen, batch)
    assert not metrics.healthy and np.isfinite(metrics.loss)
    assert_same(jax.device_get(state)._replace(healthy=True), before._replace(healthy=True))


def test_rows_that_devices_cannot_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.rows must be a multiple of 8"):
        run(make_settings(rows=4, devices=4, accumulate=2), tmp_path)


def test_measurement_is_recorded_and_agrees_with_training(tmp_path: Path) -> None:
    settings = make_settings(steps=4, eval_interval=2)
    plan = BatchPlan(make_answers(12, seed=1), rows=4, tokens=32)
    calls = []

    def measure(params: Any, is_last: bool) -> dict[str, float]:
        calls.append(is_last)
        return {"cross_entropy": evaluate(params, SSM, plan)["all"].cross_entropy}

    ended = run(settings, tmp_path, measure=measure)
    assert calls == [False, True]
    assert [line["step"] for line in read_metrics(tmp_path) if "loss" not in line] == [2, 4]
    run(settings, tmp_path, measure=measure)
    assert [line["step"] for line in read_metrics(tmp_path) if "loss" not in line] == [2, 4]

    found = evaluate(ended.params, SSM, plan)
    assert set(found) == {"all", "greedy", "sampled"}
    assert found["all"].targets == plan.num_targets == found["greedy"].targets + found["sampled"].targets
    assert found["all"].cross_entropy == pytest.approx(ended.measured["cross_entropy"])
    assert list(found["all"].top_k) == sorted(found["all"].top_k)
    # The same answers through the training step: its loss is the measured cross-entropy.
    total = count = 0.0
    trained, frozen = split_params(ended.params, settings.init.train)
    step = make_step(SSM, settings, data_mesh(1), rows=4, tokens=32)
    for i in range(plan.steps_per_epoch):
        _, metrics = step(initial_state(trained, settings), frozen, train_batch(plan.batch(i)))
        total, count = total + float(metrics.loss * metrics.targets), count + float(metrics.targets)
    assert total / count == pytest.approx(found["all"].cross_entropy, rel=1e-5)


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    run(make_settings(steps=2, tensorboard=True), tmp_path)
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"cross_entropy" in content and b"tokens_per_second" in content
