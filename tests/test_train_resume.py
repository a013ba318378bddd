"""Checkpoints: an interrupted or killed run goes on bit for bit; damaged files, a full disk, other models."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from train_run_cases import (
    Faulty,
    assert_same,
    changed,
    distill_settings,
    good,
    make_settings,
    run,
    values,
    write_toml,
)

from specinfer_jax.errors import CheckpointError
from train.checkpoints import Checkpoints
from train.distill import distill
from train.settings import TrainSettings, load_settings
from train.step import TrainBatch

ROOT = Path(__file__).parent.parent


class Crash(Exception):
    pass


def crash(batch: TrainBatch) -> TrainBatch:
    raise Crash


def test_interrupted_run_equals_a_straight_one(tmp_path: Path) -> None:
    # B070: ten answers make a few steps an epoch, so the break lies in a later one.
    settings = make_settings(steps=20, save_interval=5)
    batches = good(settings)
    straight = run(settings, tmp_path / "straight", batches)
    assert straight.is_complete and straight.step == 20
    assert sorted(path.name for path in (tmp_path / "straight" / "checkpoints").iterdir()) == ["15", "20"]
    with pytest.raises(Crash):
        run(settings, tmp_path / "broken", Faulty(settings, at=13, spoil=crash))
    again = good(settings)
    resumed = run(settings, tmp_path / "broken", again)
    assert again.asked[1:] == list(range(10, 20))  # the first tells the shapes
    assert_same(resumed.trained, straight.trained)
    assert values(tmp_path / "broken") == values(tmp_path / "straight")
    # A complete run gives its result again.
    assert_same(run(settings, tmp_path / "broken").trained, straight.trained)
    assert values(tmp_path / "broken") == values(tmp_path / "straight")
    losses = [line["loss"] for line in values(tmp_path / "straight")]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])


def test_time_limit_ends_with_a_checkpoint(tmp_path: Path) -> None:
    settings = make_settings(steps=6)
    limited = changed(settings, "run", max_minutes=1e-9)
    first = run(limited, tmp_path / "limited")
    assert (first.step, first.is_complete) == (1, False)
    assert run(limited, tmp_path / "limited").step == 2
    whole = run(settings, tmp_path / "limited")
    assert (whole.step, whole.is_complete) == (6, True)
    assert_same(whole.trained, run(settings, tmp_path / "straight").trained)


def test_damaged_and_unfinished_checkpoints_are_passed_over(tmp_path: Path) -> None:
    # B071: what a kill leaves behind, and worse.
    settings = make_settings(steps=12, save_interval=4)
    with pytest.raises(Crash):
        run(settings, tmp_path, Faulty(settings, at=9, spoil=crash))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["4", "8"]
    for path in (folder / "8").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    (folder / "9.orbax-checkpoint-tmp").mkdir()
    batches = good(settings)
    resumed = run(settings, tmp_path, batches)
    assert batches.asked[1] == 4
    assert sorted(path.name for path in folder.iterdir()) == ["12", "8"]
    assert_same(resumed.trained, run(settings, tmp_path / "straight").trained)


def test_full_disk_stops_with_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(steps=12, save_interval=4)

    def fill(batch: TrainBatch) -> TrainBatch:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        return batch

    with pytest.raises(CheckpointError, match="free some space"):
        run(settings, tmp_path, Faulty(settings, at=6, spoil=fill))
    monkeypatch.undo()
    batches = good(settings)
    run(settings, tmp_path, batches)
    assert batches.asked[1] == 4


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    settings = make_settings(steps=2)
    run(settings, tmp_path)
    with pytest.raises(CheckpointError):
        run(changed(settings, "init", train=("layers",)), tmp_path)
    with (
        Checkpoints(tmp_path, keep=1, read_only=True) as checkpoints,
        pytest.raises(CheckpointError, match="no checkpoint 7"),
    ):
        checkpoints.restore({}, step=7)


def start_process(toml: Path, out: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return subprocess.Popen(
        [sys.executable, "-m", "train.distill", str(toml), "--out", str(out)],
        cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def kill_after(process: subprocess.Popen[bytes], out: Path, lines: int) -> None:
    """SIGKILL once the record has so many lines."""
    metrics = out / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, process.stderr and process.stderr.read().decode()
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check_killed_run(folder: Path, settings: TrainSettings, kills: Sequence[int]) -> None:
    toml, out = write_toml(folder / "run.toml", settings), folder / "killed"
    for lines in kills:
        kill_after(start_process(toml, out), out, lines)
        assert (out / "checkpoints").exists()
    finish(start_process(toml, out))
    # In this process, which compiles with the same flags.
    distill(load_settings(toml), folder / "straight", quiet=True)
    assert values(out) == values(folder / "straight")
    assert len([line for line in values(out) if "loss" in line]) == settings.run.steps


def test_killed_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_killed_run(tmp_path, distill_settings(tmp_path, steps=60, save_interval=2), [21])


@pytest.mark.slow
def test_process_killed_at_20_moments_goes_on_bit_for_bit(tmp_path: Path) -> None:
    # B071: a checkpoint every step, so that most kills hit one that is being written.
    kills = np.random.default_rng(0).integers(1, 8, 20).cumsum().tolist()
    check_killed_run(tmp_path, distill_settings(tmp_path, steps=200, save_interval=1), kills)
