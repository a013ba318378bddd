"""The LLM's likeliest tokens over given answers: what decoding sees, in the right places, whatever is interrupted."""

import dataclasses
import os
from pathlib import Path

import decode_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from specinfer_jax.models.transformer import init_params
from specinfer_jax.opened import Model
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import EngineRequest
from train import teacher, top_k
from train.answers import Answer, TrainDataError
from train.packing import BatchPlan
from train.top_k import NO_ID, NO_LOGPROB, TeacherTopK

FLOAT32 = np.dtype(np.float32)


def as_model(config: decode_cases.ModelConfig) -> Model:
    tokenizer = dataclasses.make_dataclass("Ids", ["vocab_size"])(config.vocab_size)
    return Model(config, decode_cases.params_of(config), tokenizer, "tiny")


def decoded(config: decode_cases.ModelConfig, count: int = 6) -> tuple[list[Answer], list[decode_cases.Result]]:
    """Answers of incremental decoding with the log-probabilities that it saw; half of them sampled."""
    engine = decode_cases.shared_engine(config=config, num_slots=2)
    requests = [
        EngineRequest(
            decode_cases.PROMPTS[i % len(decode_cases.PROMPTS)], 5 + 3 * i, frozenset(),
            SamplingParams(temperature=i % 2, logprobs=20, max_tokens=None), seed=i,
        )
        for i in range(count)
    ]  # fmt: skip
    results = decode_cases.run_requests(engine, requests)
    answers = [
        Answer(f"a{i}", float(i % 2), tuple(request.prompt_ids), tuple(result.ids))
        for i, (request, result) in enumerate(zip(requests, results, strict=True))
    ]
    return answers, results


@pytest.mark.parametrize("config", [decode_cases.LLAMA, decode_cases.OPT], ids=["llama", "opt"])
def test_rows_are_the_logits_of_incremental_decoding(config: decode_cases.ModelConfig, tmp_path: Path) -> None:
    # case B093
    answers, results = decoded(config)
    teacher.write_teacher_rows(as_model(config), answers, tmp_path, k=20, rows=2, tokens=64, dtype=FLOAT32)
    plan = BatchPlan(answers, rows=3, tokens=64, seed=9)
    rows = TeacherTopK(tmp_path)
    assert rows.k == 20 and rows.missing(answers) == []
    rows.check(plan)
    seen = 0
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        id_RTk, logprob_RTk = rows.lookup(plan, step)
        assert (id_RTk.dtype, logprob_RTk.dtype) == (np.int32, np.float32)
        assert (id_RTk[~batch.is_target_RT] == NO_ID).all()
        assert (logprob_RTk[~batch.is_target_RT] == NO_LOGPROB).all()
        assert (np.exp(logprob_RTk[batch.is_target_RT]).sum(axis=1) < 1 + 1e-5).all()
        for place in plan.places(step):
            saw = results[int(plan.answers[place.answer].id[1:])]
            at = slice(place.first_target, place.stop)
            np.testing.assert_array_equal(id_RTk[place.row, at], np.concatenate([x.top_id_TK for x in saw.logprobs]))
            expected = np.concatenate([x.top_logprob_TK for x in saw.logprobs])
            np.testing.assert_allclose(logprob_RTk[place.row, at], expected, atol=1e-4, rtol=0)
            # At temperature 0 the target is the likeliest token.
            if plan.answers[place.answer].temperature == 0:
                np.testing.assert_array_equal(batch.target_RT[place.row, at], id_RTk[place.row, at, 0])
            seen += place.stop - place.first_target
    assert seen == sum(len(answer.response_ids) for answer in answers)


def test_padding_ids_have_no_share(tmp_path: Path) -> None:
    answers, _ = decoded(decode_cases.LLAMA, 2)
    model = as_model(decode_cases.LLAMA)
    limited = model._replace(tokenizer=dataclasses.make_dataclass("Ids", ["vocab_size"])(20))
    for answer, top in teacher.teacher_rows(limited, BatchPlan(answers, rows=1, tokens=64), k=20):
        assert top.id_Nk.shape == (len(answer.response_ids), 20)
        assert top.id_Nk.max() < 20
        np.testing.assert_allclose(np.exp(top.logprob_Nk).sum(axis=1), 1, rtol=1e-5)


def test_many_targets_go_through_the_head_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, _ = decoded(decode_cases.LLAMA)
    plan = BatchPlan(answers, rows=2, tokens=64)
    whole = {answer.id: top for answer, top in teacher.teacher_rows(as_model(decode_cases.LLAMA), plan, k=4)}
    monkeypatch.setattr(teacher, "_COLUMNS", 16)
    for answer, top in teacher.teacher_rows(as_model(decode_cases.LLAMA), plan, k=4):
        np.testing.assert_array_equal(top.id_Nk, whole[answer.id].id_Nk)
        np.testing.assert_allclose(top.logprob_Nk, whole[answer.id].logprob_Nk, atol=1e-5)


def test_logits_that_are_not_finite_are_named() -> None:
    answers, _ = decoded(decode_cases.LLAMA, 1)
    params = init_params(decode_cases.LLAMA, jax.random.key(0))
    params["head"]["kernel"] = params["head"]["kernel"] * jnp.nan
    broken = as_model(decode_cases.LLAMA)._replace(params=params)
    with pytest.raises(TrainDataError, match="not finite on one of a0"):
        list(teacher.teacher_rows(broken, BatchPlan(answers, rows=1, tokens=64), k=4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_folder(tmp_path_factory.mktemp("tiny") / "model")


def made_up(count: int, size: int = 12) -> list[Answer]:
    random = np.random.default_rng(0)
    ids = [tuple(random.integers(3, 200, size).tolist()) for _ in range(2 * count)]
    return [Answer(f"m{i}", 0.0, ids[i][:4], ids[count + i]) for i in range(count)]


def write_answers(path: Path, answers: list[Answer]) -> Path:
    path.write_text("".join(answer.as_line() + "\n" for answer in answers))
    return path


def command(folder: Path, answers: Path, out: Path, *more: str) -> list[str]:
    return [
        "--model", str(folder), "--answers", str(answers), "--out", str(out), "--dtype", "float32",
        "--rows", "2", "--tokens", "32", "--k", "5", *more,
    ]  # fmt: skip


def test_an_interrupted_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # case B071: the process dies between the write of a shard and its rename
    no_target = [Answer("none", 0.0, (5,), ()), Answer("late", 0.0, tuple(range(3, 40)), (5,))]
    answers = [*made_up(20), *no_target]
    file = write_answers(tmp_path / "answers.jsonl", answers)
    monkeypatch.setattr(teacher, "_TOKENS_PER_SHARD", 60)
    replaced: list[Path] = []

    def replace_or_die(source: Path, target: Path, move=os.replace) -> None:
        if len(replaced) == 2:
            raise KeyboardInterrupt
        replaced.append(target)
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(top_k.os, "replace", replace_or_die)
        with pytest.raises(SystemExit, match="stopped; the same command goes on"):
            teacher.main(command(folder, file, tmp_path / "out"))
    there = TeacherTopK(tmp_path / "out")
    assert 0 < len(there.missing(answers)) < 20 + len(no_target)
    teacher.main(command(folder, file, tmp_path / "out"))
    teacher.main(command(folder, file, tmp_path / "whole"))
    resumed, whole = TeacherTopK(tmp_path / "out"), TeacherTopK(tmp_path / "whole")
    assert resumed.missing(answers) == whole.missing(answers) == ["none", "late"]
    plan = BatchPlan(answers, rows=2, tokens=32)
    for step in range(plan.steps_per_epoch):
        (id_RTk, logprob_RTk), (own_id_RTk, own_logprob_RTk) = resumed.lookup(plan, step), whole.lookup(plan, step)
        np.testing.assert_array_equal(id_RTk, own_id_RTk)
        np.testing.assert_allclose(logprob_RTk, own_logprob_RTk, atol=1e-5)
    # With everything there no model is opened.
    monkeypatch.setattr(teacher, "open_model", None)
    capsys.readouterr()
    teacher.main(command(folder, file, tmp_path / "out"))
    assert "22 answers, 20 of them different" in capsys.readouterr().err
    # Other settings are refused.
    with pytest.raises(SystemExit, match="k is 5 there and 6 now"):
        teacher.main(command(folder, file, tmp_path / "out", "--k", "6"))


def test_rows_of_another_answer_are_never_used(folder: Path, tmp_path: Path) -> None:
    answers = made_up(4)
    out = tmp_path / "out"
    teacher.main(command(folder, write_answers(tmp_path / "answers.jsonl", answers), out, "--logprobs", "float16"))
    rows = TeacherTopK(out)
    changed = [dataclasses.replace(answers[0], response_ids=answers[0].response_ids[:-1]), *answers[1:]]
    with pytest.raises(TrainDataError, match="no rows of answer 'm0'"):
        rows.lookup(BatchPlan(changed, rows=8, tokens=32), 0)
    renamed = [dataclasses.replace(answer, id=f"other{answer.id}") for answer in answers]
    rows.lookup(BatchPlan(renamed, rows=8, tokens=32), 0)
    rows.lookup(BatchPlan(answers, rows=8, tokens=9), 0)  # cut: the first rows
    short = tmp_path / "short"
    teacher.main(command(folder, tmp_path / "answers.jsonl", short, "--tokens", "9"))
    with pytest.raises(TrainDataError, match="too few rows of answer"):
        TeacherTopK(short).lookup(BatchPlan(answers, rows=8, tokens=32), 0)
    with pytest.raises(TrainDataError, match="too few rows of answer"):
        TeacherTopK(short).check(BatchPlan(answers, rows=8, tokens=32))
    TeacherTopK(short).check(BatchPlan(answers, rows=8, tokens=9))
    with np.load(next(out.glob("topk-*"))) as shard:
        assert (shard["id_Nk"].dtype, shard["logprob_Nk"].dtype) == (np.uint16, np.float16)


def test_the_command_line_says_what_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_answers(tmp_path / "answers.jsonl", [Answer("big", 0.0, (5,), (10**6,))])
    for more, message in (
        (["--tokens", "512"], r"--tokens 512 exceeds the 128"),
        (["--k", "100000"], r"--k 100000 exceeds the vocabulary"),
        ([], r"answer 'big' holds token id 1000000"),
    ):
        with pytest.raises(SystemExit, match=message):
            teacher.main(command(folder, file, tmp_path / "out", *more))
    with pytest.raises(SystemExit, match="2"):
        teacher.main(command(folder, file, tmp_path / "out", "--rows", "0"))
    assert "--rows must be at least 1" in capsys.readouterr().err
    with pytest.raises(TrainDataError, match="holds no rows of the LLM"):
        TeacherTopK(tmp_path / "out")
    (tmp_path / "out" / "topk-00000.npz").write_bytes(b"damaged")
    with pytest.raises(TrainDataError, match=r"cannot read .*topk-00000.npz"):
        TeacherTopK(tmp_path / "out")
