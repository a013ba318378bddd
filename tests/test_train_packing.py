"""Answers and packed batches: what lies where, by hand, and that batches follow from (seed, step) alone."""

import dataclasses
import gzip
import json
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from train.answers import Answer, TrainDataError, read_answers, split_answers
from train.packing import BatchPlan, segment_words

EOS = 2
A = Answer("a", 0.0, (5, 6, 7), (8, 9, EOS))
B = Answer("b", 0.0, (10,), (11, EOS))
C = Answer("c", 0.8, (20, 21), (22, 23, 24, 25, 26, 27, 28, 29))


def random_answers(count: int, seed: int = 0) -> list[Answer]:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 12, (count, 2)).tolist()
    return [
        Answer(f"r{i}", 0.0, tuple(random.integers(3, 60, p).tolist()), tuple(random.integers(3, 60, r).tolist()))
        for i, (p, r) in enumerate(sizes)
    ]


def test_two_answers_side_by_side() -> None:
    plan = BatchPlan([B, A], rows=1, tokens=8)
    batch = plan.batch(0)
    assert plan.ids(0) == ["a", "b"]
    assert batch.token_RT.tolist() == [[5, 6, 7, 8, 9, 10, 11, 0]]
    assert batch.target_RT.tolist() == [[6, 7, 8, 9, EOS, 11, EOS, 0]]
    assert batch.is_target_RT.tolist() == [[False, False, True, True, True, True, True, False]]
    assert batch.position_RT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert batch.segment_RT.tolist() == [[1, 1, 1, 1, 1, 2, 2, 0]]
    assert [field.dtype for field in batch] == [np.int32] * 4 + [np.bool_]
    assert (plan.num_targets, plan.fill, plan.steps_per_epoch) == (5, 7 / 8, 1)


def test_a_long_answer_is_cut_and_one_without_targets_is_left_out() -> None:
    no_response, long_prompt = Answer("n", 0.0, (1, 2), ()), Answer("p", 0.0, (1, 2, 3, 4, 5), (6,))
    plan = BatchPlan([A, C, no_response, long_prompt], rows=2, tokens=4)
    assert (plan.num_cut, plan.left_out) == (2, ["n", "p"])
    batch = plan.batch(0)
    row = plan.ids(0).index("c")
    assert batch.token_RT[row].tolist() == [20, 21, 22, 23]
    assert batch.target_RT[row].tolist() == [21, 22, 23, 24]
    assert batch.is_target_RT[row].tolist() == [False, True, True, True]
    assert batch.target_RT[1 - row].tolist() == [6, 7, 8, 9]  # of A, the EOS is cut off
    assert plan.num_targets == int(batch.is_target_RT.sum()) == 5
    # The first token of this response is the row's last target.
    [edge] = BatchPlan([Answer("e", 0.0, (1, 2, 3, 4), (5, 6))], rows=1, tokens=4).batch(0).is_target_RT.tolist()
    assert edge == [False, False, False, True]


def test_nothing_to_train_on_is_said() -> None:
    with pytest.raises(TrainDataError, match="none of 1 answers has a response that begins within 2 tokens"):
        BatchPlan([A], rows=1, tokens=2)
    with pytest.raises(TrainDataError, match="at least one row"):
        BatchPlan([A], rows=0, tokens=2)
    with pytest.raises(ValueError, match="steps count from 0"):
        BatchPlan([A], rows=1, tokens=8).ids(-1)


def test_an_epoch_has_every_answer_once_and_another_order_than_the_last() -> None:
    answers = random_answers(101)
    plan = BatchPlan(answers, rows=3, tokens=24, seed=5)
    epochs = [
        [i for step in range(plan.steps_per_epoch) for i in plan.ids(epoch * plan.steps_per_epoch + step)]
        for epoch in range(3)
    ]
    for ids in epochs:
        assert Counter(ids) == Counter(answer.id for answer in answers)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert BatchPlan(answers, rows=3, tokens=24, seed=6).ids(0) != plan.ids(0)
    assert plan.fill > 0.9
    # Who shares a row changes too.
    rows = [{(p.answer, p.row) for p in plan.places(step * plan.steps_per_epoch)} for step in range(2)]
    assert rows[0] != rows[1]


def test_tokens_of_all_batches_are_the_answers() -> None:
    answers = random_answers(60, seed=1)
    plan = BatchPlan(answers, rows=4, tokens=22, seed=2)
    seen = {}
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        for place in plan.places(step):
            answer, at = plan.answers[place.answer], slice(place.start, place.stop)
            full = answer.prompt_ids + answer.response_ids
            assert tuple(batch.token_RT[place.row, at]) == full[:-1]
            assert tuple(batch.target_RT[place.row, at]) == full[1:]
            assert tuple(batch.position_RT[place.row, at]) == tuple(range(len(full) - 1))
            chosen = batch.is_target_RT[place.row, at]
            assert tuple(batch.target_RT[place.row, at][chosen]) == answer.response_ids
            assert place.first_target == place.start + int(np.argmax(chosen))
            assert len(set(batch.segment_RT[place.row, at].tolist())) == 1
            seen[answer.id] = (step, place.row, int(batch.segment_RT[place.row, place.start]))
        is_padding_RT = batch.segment_RT == 0
        for field in batch:
            assert not field[is_padding_RT].any()
    assert len(set(seen.values())) == len(answers), "two answers share a segment"


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    # case B070
    answers = random_answers(50, seed=3)
    plan = BatchPlan(answers, rows=2, tokens=24, seed=1)
    steps = range(2 * plan.steps_per_epoch + 3)
    in_turn = [plan.batch(step) for step in steps]
    for step in reversed(steps):
        fresh = BatchPlan(answers[step:] + answers[:step], rows=2, tokens=24, seed=1)
        for one, other in zip(fresh.batch(step), in_turn[step], strict=True):
            np.testing.assert_array_equal(one, other)
        assert fresh.ids(step) == plan.ids(step)


def test_the_last_batch_of_an_epoch_is_filled_with_padding_rows() -> None:
    plan = BatchPlan([A, C], rows=4, tokens=9)
    batch = plan.batch(0)
    assert plan.num_rows == 2 and plan.steps_per_epoch == 1
    assert not batch.segment_RT[2:].any() and not batch.is_target_RT[2:].any()


def test_words_are_causal_within_a_segment() -> None:
    batch = BatchPlan(random_answers(20), rows=2, tokens=40).batch(0)
    words_RTC = np.asarray(jax.jit(segment_words)(batch.segment_RT))
    assert words_RTC.shape == (2, 40, 2) and words_RTC.dtype == np.uint32
    for r in range(2):
        for t in range(40):
            sees = [k for k in range(64) if words_RTC[r, t, k // 32] >> (k % 32) & 1]
            assert sees == [k for k in range(t + 1) if batch.segment_RT[r, k] == batch.segment_RT[r, t]]


def write(path: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_answers_are_read_from_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz", A.as_line(), "", B.as_line())
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "answers-00000.jsonl", C.as_line())
    torn = folder / "answers-00001.jsonl"
    torn.write_text(dataclasses.replace(A, id="d").as_line() + "\n" + B.as_line()[:20])  # a writer is at work
    answers = read_answers([tmp_path / "a.jsonl.gz", folder])
    assert [answer.id for answer in answers] == ["a", "b", "c", "d"]
    assert answers[:3] == [A, B, C]
    assert read_answers(folder)[0] == C
    assert A.content_key == answers[3].content_key != B.content_key


def test_ids_are_unique_after_reading(tmp_path: Path) -> None:
    sampled = [dataclasses.replace(C, id="a", response_ids=ids) for ids in ((1,), (2,))]
    one, other = write(tmp_path / "1.jsonl", A.as_line(), sampled[0].as_line()), tmp_path / "2.jsonl"
    write(other, sampled[1].as_line(), A.as_line())
    answers = read_answers([one, other, one])
    assert [(answer.id, answer.response_ids) for answer in answers] == [
        ("a", A.response_ids), ("a#2", (1,)), ("a#3", (2,)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"x.jsonl line 2 is not JSON"),
        ("[]", "line 2 must be an object with id, temperature, prompt_ids, response_ids"),
        ({"id": "a", "prompt_ids": [1], "response_ids": []}, "it lacks temperature"),
        ({"id": 1, "temperature": 0, "prompt_ids": [1], "response_ids": []}, "id must be a string, got 1"),
        ({"id": "a", "temperature": -1, "prompt_ids": [1], "response_ids": []}, "temperature must be"),
        ({"id": "a", "temperature": 0, "prompt_ids": [], "response_ids": []}, "prompt_ids holds nothing"),
        ({"id": "a", "temperature": 0, "prompt_ids": [1], "response_ids": [1.5]}, "response_ids must be a list of"),
        ({"id": "a", "temperature": 0, "prompt_ids": [True], "response_ids": [1]}, "prompt_ids must be a list of"),
    ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(TrainDataError, match=message):
        read_answers(write(tmp_path / "x.jsonl", A.as_line(), line))


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainDataError, match=r"cannot read .*gone.jsonl: No such file"):
        read_answers(tmp_path / "gone.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:-12])
    with pytest.raises(TrainDataError, match="not a whole gzip file"):
        read_answers(tmp_path / "cut.jsonl.gz")
    with pytest.raises(TrainDataError, match="holds no answers"):
        read_answers(tmp_path)
    with pytest.raises(TrainDataError, match="no answers in"):
        read_answers(write(tmp_path / "empty.jsonl"))


def test_held_out_answers_are_chosen_by_prompt() -> None:
    answers = random_answers(400, seed=7)
    again = [dataclasses.replace(answer, id=answer.id + "#2", response_ids=(1, 2)) for answer in answers]
    train, held = split_answers([*answers, *again], held_out=0.25)
    assert len(train) + len(held) == 800
    assert 0.15 < len(held) / 800 < 0.35
    assert not {a.prompt_ids for a in train} & {a.prompt_ids for a in held}
    # Whatever else is read, the same ones.
    assert [a.id for a in split_answers(answers[:100], held_out=0.25)[1]] == [
        a.id for a in held if "#" not in a.id and int(a.id[1:]) < 100
    ]
    assert split_answers(answers, held_out=0.0)[1] == []
