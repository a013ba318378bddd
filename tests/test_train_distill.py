"""Distillation end to end on a tiny model: starts, weights, teacher, runs that are refused."""

from pathlib import Path

import numpy as np
import pytest
from train_run_cases import assert_same, changed, distill_settings, make_answers

from specinfer_jax.errors import ConfigError
from train.distill import PlanBatches, distill
from train.packing import BatchPlan
from train.record import read_metrics
from train.top_k import TopK, write_shard


def test_distill_starts_from_the_llm_and_refuses_another_run(tmp_path: Path) -> None:
    settings = distill_settings(tmp_path, steps=3, vocabulary=12)
    out = tmp_path / "run"
    done = distill(settings, out, quiet=True)
    assert done.model.config.output_vocab_size == 12
    assert {2} <= set(np.asarray(done.model.params["output_ids"]).tolist())
    assert done.trained.measured["targets"] > 0
    again = distill(settings, out, quiet=True)
    assert_same(again.model.params, done.model.params)
    with pytest.raises(ConfigError, match=r"other settings \(optimiser.learning_rate\)"):
        distill(changed(settings, "optimiser", learning_rate=1.0), out, quiet=True)
    with pytest.raises(ConfigError, match="the answers"):
        distill(settings, out, answers=make_answers(20, vocab=20), quiet=True)
    distill(changed(settings, "run", keep=1, max_minutes=5.0), out, quiet=True)
    with pytest.raises(ConfigError, match="holds id"):
        distill(settings, tmp_path / "other", answers=make_answers(40, vocab=5000), quiet=True)


def test_weights_by_answer_or_token_reach_the_batch() -> None:
    answers = make_answers()
    plan = BatchPlan(answers, rows=4, tokens=16)  # some are cut
    by_token = {a.id: np.arange(1, len(a.response_ids) + 1) / 32 for a in answers[1::2]}
    weights = {answer.id: 0.25 for answer in answers[::2][:10]} | by_token
    plain, weighted = PlanBatches(plan).batch(1), PlanBatches(plan, weights=weights).batch(1)
    for place in plan.places(1):
        at = place.row, slice(place.first_target, place.stop)
        weight = weights.get(plan.answers[place.answer].id, 1.0)
        size = place.stop - place.first_target
        assert (weighted.weight_RT[at] == (weight if isinstance(weight, float) else weight[:size])).all()
        assert (plain.weight_RT[at] == 1).all()
    assert ((weighted.weight_RT > 0) == (plain.weight_RT > 0)).all()


def test_answers_that_count_nothing_are_left_out(tmp_path: Path) -> None:
    settings = distill_settings(tmp_path, steps=2)
    answers = make_answers(vocab=20)
    weights = {a.id: np.zeros(len(a.response_ids)) for a in answers[::2]}
    weighted = distill(settings, tmp_path / "run", answers=answers, weights=weights, quiet=True)
    dropped = distill(settings, tmp_path / "dropped", answers=answers[1::2], quiet=True)
    assert_same(weighted.model.params, dropped.model.params)
    with pytest.raises(ConfigError, match="the answers"):
        distill(settings, tmp_path / "run", answers=answers, quiet=True)


def test_teacher_and_bfloat16_take_part(tmp_path: Path) -> None:
    settings = distill_settings(tmp_path, steps=4)
    answers, random = make_answers(vocab=20), np.random.default_rng(0)
    rows = {}
    for answer in answers:
        size = len(answer.response_ids)
        ids = np.stack([random.choice(20, 3, replace=False) for _ in range(size)])
        rows[answer.content_key] = TopK(ids, np.log(random.dirichlet(np.ones(4), size)[:, :3]))
    (tmp_path / "teacher").mkdir()
    write_shard(
        tmp_path / "teacher" / "topk-00000.npz", rows, id_dtype=np.dtype(np.int32), logprob_dtype=np.dtype(np.float32)
    )  # fmt: skip
    settings = changed(settings, "data", teacher=str(tmp_path / "teacher"))
    settings = changed(settings, "loss", kl=0.5, cross_entropy=0.25)
    distill(settings, tmp_path / "float32", answers=answers, quiet=True)
    lines = [line for line in read_metrics(tmp_path / "float32") if "loss" in line]
    for line in lines:
        assert line["kl"] > 0 and line["loss"] == pytest.approx(0.25 * line["cross_entropy"] + 0.5 * line["kl"])
    distill(changed(settings, "run", compute_dtype="bfloat16"), tmp_path / "bfloat16", answers=answers, quiet=True)
    rough = [line for line in read_metrics(tmp_path / "bfloat16") if "loss" in line]
    assert [line["loss"] for line in rough] == pytest.approx([line["loss"] for line in lines], rel=0.02)
