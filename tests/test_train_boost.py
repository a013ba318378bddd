"""Boost-tuning: what is marked, what the next SSM is trained on, resuming, offline against served success."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_model import CONFIG, write_folder
from train_run_cases import make_answers, make_settings, values, write_toml

from specinfer_jax.errors import ConfigError
from train.answers import Answer, split_answers
from train.boost import REPORT_FILE, boost, match_samples, next_weights
from train.export import open_trained
from train.settings import BoostSettings, TrainSettings, load_settings

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("match", "right"),
    [
        (1, [1, 1, 0, 1, 1, 1, 0, 1]),
        (2, [1, 0, 0, 1, 1, 0, 0, 1]),
        (3, [0, 0, 0, 1, 0, 0, 0, 1]),
        ("continuation", [0] * 8),
    ],
)
def test_places_that_match(match: str | int, right: list[int]) -> None:
    hit_T = np.array([1, 1, 0, 1, 1, 1, 0, 1], bool)
    assert match_samples(hit_T, match).astype(int).tolist() == right
    assert match_samples(np.ones(3, bool), match).all()
    assert not match_samples(np.zeros(3, bool), match).any()


def test_what_the_next_round_weighs() -> None:
    marked = {"a": np.array([True, False])}
    assert next_weights(marked, BoostSettings(weighting="drop"))["a"].tolist() == [0, 1]
    assert next_weights(marked, BoostSettings(weighting="soft", soft_weight=0.5))["a"].tolist() == [0.5, 1]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> TrainSettings:
    folder = tmp_path_factory.mktemp("boost")
    llm = write_folder(folder / "llm")
    answers = folder / "answers.jsonl"
    answers.write_text("\n".join(a.as_line() for a in make_answers(60, vocab=CONFIG["vocab_size"])) + "\n")
    made = make_settings(steps=30, llm=str(llm), answers=(str(answers),))
    return dataclasses.replace(made, boost=BoostSettings(rounds=2, match=1, weighting="drop", tree="1"))


def test_two_rounds_and_a_third_later(settings: TrainSettings, tmp_path: Path) -> None:
    rounds = boost(settings, tmp_path, quiet=True, prompts=4)
    assert [r.ssm for r in rounds] == [1, 2]
    first, second = rounds
    assert 0 < first.marked <= second.marked <= 1
    assert first.weight_left == pytest.approx(1 - first.marked, abs=1e-6)
    assert first.set_top_1 == first.own_top_1 <= second.set_top_1
    report = json.loads((tmp_path / REPORT_FILE).read_text())
    assert report["rounds"] == [dataclasses.asdict(r) for r in rounds]
    # Case B072: what the engine accepts is what was counted offline, on the engine's own continuations.
    assert first.tokens_per_step is not None and first.tokens_per_step >= 1
    assert first.served_top_1 == pytest.approx(first.offline_top_1, abs=0.01)

    # The same command with one round more only trains the third.
    before = (tmp_path / "ssm-2" / "metrics.jsonl").read_bytes()
    more = dataclasses.replace(settings, boost=dataclasses.replace(settings.boost, rounds=3))
    again = boost(more, tmp_path, quiet=True, prompts=0)
    assert [(r.marked, r.set_top_1) for r in again[:2]] == [(r.marked, r.set_top_1) for r in rounds]
    assert len(again) == 3
    assert (tmp_path / "ssm-2" / "metrics.jsonl").read_bytes() == before


def test_later_ssms_share_the_first_ones_layers(settings: TrainSettings, tmp_path: Path) -> None:
    shared = dataclasses.replace(settings, boost=dataclasses.replace(settings.boost, own_layers=1, later_steps=12))
    assert len(boost(shared, tmp_path, quiet=True, prompts=0)) == 2
    first, second = (open_trained(tmp_path / f"ssm-{n}").model for n in (1, 2))
    assert [open_trained(tmp_path / f"ssm-{n}").step for n in (1, 2)] == [30, 12]
    last = first.config.num_layers - 1
    assert second.config == first.config
    for l in range(first.config.num_layers):
        pairs = zip(*(jax.tree.leaves(ssm.params[f"layers_{l}"]) for ssm in (first, second)), strict=True)
        is_equal = [bool((a == b).all()) for a, b in pairs]
        assert not any(is_equal) if l == last else all(is_equal)
    too_many = dataclasses.replace(shared, boost=dataclasses.replace(shared.boost, own_layers=9))
    with pytest.raises(ConfigError, match=r"own_layers is 9, and the first SSM has \d+ layers"):
        boost(too_many, tmp_path, quiet=True, prompts=0)


def test_a_finished_ssm_stands_for_the_first_round(settings: TrainSettings, tmp_path: Path) -> None:
    rounds = boost(settings, tmp_path / "whole", quiet=True, prompts=0)
    finished = str(tmp_path / "whole" / "ssm-1")
    given = dataclasses.replace(settings, boost=dataclasses.replace(settings.boost, first=finished))
    assert boost(given, tmp_path / "given", quiet=True, prompts=0) == rounds
    assert [path.name for path in sorted((tmp_path / "given").iterdir())] == [REPORT_FILE, "ssm-2"]
    of_both = [open_trained(tmp_path / name / "ssm-2").model.params for name in ("whole", "given")]
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *of_both))
    nothing = dataclasses.replace(settings, boost=dataclasses.replace(settings.boost, first=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"boost.first is '.*': neither the folder of an SSM nor one that ships"):
        boost(nothing, tmp_path / "nothing", quiet=True, prompts=0)


@pytest.mark.slow
def test_killed_at_five_moments_boosts_bit_for_bit(settings: TrainSettings, tmp_path: Path) -> None:
    rules = '[boost]\nrounds = 2\nmatch = 1\nweighting = "drop"\ntree = "1"\n'
    toml, out = write_toml(tmp_path / "run.toml", settings, rules), tmp_path / "killed"
    run = [sys.executable, "-m", "train.boost", str(toml), "--out", str(out), "--prompts", "0"]
    moments = np.random.default_rng(time.time_ns())
    begun, written = time.monotonic(), 0
    for _ in range(5):
        process = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        enough = written + int(moments.integers(1, 10))
        while written < enough and process.poll() is None:
            assert time.monotonic() < begun + 600, "it did not come to the moment"
            time.sleep(0.002)
            written = sum(path.read_bytes().count(b"\n") for path in out.glob("ssm-*/metrics.jsonl"))
        time.sleep(moments.random() * 0.3)
        process.kill()
        process.wait()
    subprocess.run(run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    boost(load_settings(toml), tmp_path / "straight", quiet=True, prompts=0)
    for name in ("ssm-1", "ssm-2"):
        assert values(out / name) == values(tmp_path / "straight" / name)
        of_both = [open_trained(folder / name).model.params for folder in (out, tmp_path / "straight")]
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), *of_both))
    killed, straight = ((folder / REPORT_FILE).read_text() for folder in (out, tmp_path / "straight"))
    assert killed == straight


def test_held_out_answers_are_never_trained_on(settings: TrainSettings) -> None:
    answers = make_answers(60, vocab=CONFIG["vocab_size"])
    fit, held = split_answers(answers, held_out=settings.data.held_out)
    assert fit and held
    assert not {a.id for a in fit} & {a.id for a in held}
    assert all(isinstance(a, Answer) for a in held)
