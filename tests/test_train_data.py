"""The LLM's answers as training data: the same as serving's, whatever is killed when, and nothing twice."""

import dataclasses
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.opened import Model, open_model
from train import data
from train.answer_store import AnswerStore
from train.answers import Answer, TrainDataError, read_answers, text_hash
from train.packing import BatchPlan
from train.prompts import TrainPrompt, cut_text, mix_prompts, parse_weights, read_train_prompts

ROOT = Path(__file__).parent.parent
SETTINGS = {"model": "m", "temperature": 0.0}
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "ran",
    "over",
    "hill",
    "river",
    "stone",
    "seven",
    "times",
    "before",
    "noon",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder, dtype=jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return LLM(model, speculation=Speculation.off(), max_model_len=120, max_num_seqs=4)


def make_prompts(count: int) -> list[TrainPrompt]:
    choose = random.Random(0)
    return [TrainPrompt(f"p{i}", " ".join(choose.choices(WORDS, k=choose.randint(1, 8)))) for i in range(count)]


def write_prompts(path: Path, prompts: list[TrainPrompt]) -> Path:
    path.write_text("".join(json.dumps(dataclasses.asdict(prompt)) + "\n" for prompt in prompts))
    return path


def command(folder: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    return [
        "--model", str(folder), "--prompts", str(prompts), "--out", str(out), "--dtype", "float32",
        "--max-num-seqs", "4", "--max-model-len", "120", "--max-tokens", "40", *more,
    ]  # fmt: skip


def lines_of(out: Path) -> list[str]:
    return [line for shard in sorted(out.glob("answers-*")) for line in shard.read_text().splitlines()]


def test_ids_and_answers_are_those_of_serving(llm: LLM, tmp_path: Path) -> None:
    # case B072
    prompts = make_prompts(6)
    settings = {"is_chat": True, "max_tokens": 12, "seed": 3}
    for temperature in (0.0, 0.9):
        with AnswerStore(tmp_path / str(temperature), SETTINGS) as store:
            data.answer_prompts(llm, prompts, store, temperature=temperature, **settings)
        answers = {answer.id: answer for answer in read_answers(tmp_path / str(temperature))}
        assert len(answers) == 6
        for prompt in prompts:
            own = SamplingParams(temperature=temperature, max_tokens=12, seed=text_hash(prompt.id, seed=3))
            [served] = llm.chat([{"role": "user", "content": prompt.prompt}], own)
            answer = answers[prompt.id]
            assert list(answer.prompt_ids) == served.prompt_token_ids
            assert list(answer.response_ids) == served.token_ids
            assert answer.temperature == temperature


def test_a_bad_prompt_is_noted_and_stops_nothing(llm: LLM, tmp_path: Path) -> None:
    prompts = [TrainPrompt("empty", " \n"), TrainPrompt("long", "cat " * 500), *make_prompts(2)]
    done = Counter()
    with AnswerStore(tmp_path, SETTINGS) as store:
        data.answer_prompts(
            llm, prompts, store, is_chat=False, temperature=0.0, max_tokens=3, seed=0,
            on_progress=lambda answers, tokens: done.update(answers=answers, tokens=tokens),
        )  # fmt: skip
    assert {answer.id for answer in read_answers(tmp_path)} == {"p0", "p1"}
    assert done["answers"] == 4 and done["tokens"] == sum(len(a.response_ids) for a in read_answers(tmp_path))
    skipped = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in skipped] == ["empty", "long"]
    assert "empty" in skipped[0]["reason"] and "no room within max_model_len 120" in skipped[1]["reason"]


def test_with_everything_there_no_model_is_made(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", [TrainPrompt("empty", ""), *make_prompts(5)])
    arguments = command(folder, prompts, tmp_path / "out")
    data.main([*arguments, "--limit", "3"])
    data.main(arguments)
    lines = lines_of(tmp_path / "out")
    assert len(lines) == len(set(lines)) == 5
    assert "6 prompts, 3 of them done" in capsys.readouterr().err
    monkeypatch.setattr(data, "LLM", None)
    data.main(arguments)
    assert lines_of(tmp_path / "out") == lines


def test_what_other_files_answer_is_left_out(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_prompts(5))
    (tmp_path / "have.jsonl").write_text(Answer("p3", 0.0, (1,), (2,)).as_line() + "\n")
    arguments = ["--prompts", str(prompts), "--out", str(tmp_path), "--have", str(tmp_path / "have.jsonl")]
    chosen = data.select_prompts(data.parse_arguments(arguments))
    assert sorted(prompt.id for prompt in chosen) == ["p0", "p1", "p2", "p4"]


def test_what_another_run_took_first_is_skipped(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_prompts(5))
    arguments = ["--prompts", str(prompts), "--out", str(tmp_path)]
    order = data.select_prompts(data.parse_arguments(arguments))
    behind = data.select_prompts(data.parse_arguments([*arguments, "--skip", "2", "--limit", "2"]))
    assert behind == order[2:4]


def kill_and_resume(folder: Path, tmp_path: Path, kills: int, seed: int, *more: str) -> None:
    """Kill at random moments of writing, resume, and compare with a run that nobody killed."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_prompts(100))
    when = random.Random(seed)
    out = tmp_path / "killed"
    written: list[str] = []
    for _ in range(kills):
        run = [sys.executable, "-m", "train.data", *command(folder, prompts, out, *more)]
        process = subprocess.Popen(run, cwd=ROOT, env=os.environ | CACHE, stderr=subprocess.DEVNULL)
        enough = len(written) + when.randint(1, max(1, 40 // kills))
        deadline = time.monotonic() + 120
        while sum(shard.read_bytes().count(b"\n") for shard in out.glob("answers-*")) < enough:
            assert time.monotonic() < deadline and process.poll() is None, "it did not come to the moment"
            time.sleep(0.002)
        time.sleep(when.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before, written = written, lines_of(out)
        assert written[: len(before)] == before, "a written answer was lost"
        assert enough <= len(written) < 100
    data.main(command(folder, prompts, out, *more))
    lines = lines_of(out)
    assert lines[: len(written)] == written
    data.main(command(folder, prompts, tmp_path / "whole", *more))
    assert Counter(lines) == Counter(lines_of(tmp_path / "whole"))
    assert len(lines) == 100
    # Training sees the same batches, in whatever order answers were finished.
    killed, whole = (BatchPlan(read_answers(f), rows=2, tokens=64, seed=1) for f in (out, tmp_path / "whole"))
    for step in range(killed.steps_per_epoch + 2):
        assert killed.ids(step) == whole.ids(step)
        np.testing.assert_array_equal(killed.batch(step).token_RT, whole.batch(step).token_RT)


def test_killed_and_resumed_is_uninterrupted(folder: Path, tmp_path: Path) -> None:
    kill_and_resume(folder, tmp_path, 1, time.time_ns())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_killed_five_times(folder: Path, tmp_path: Path, temperature: str) -> None:
    kill_and_resume(folder, tmp_path, 5, time.time_ns(), "--temperature", temperature)


def test_a_torn_line_is_dropped_and_made_again(tmp_path: Path) -> None:
    one, two = (Answer(i, 0.0, (1,), (2, 3)) for i in "ab")
    with AnswerStore(tmp_path, SETTINGS) as store:
        store.add(one)
        store.skip("c", "why not")
    for name in ("answers-00000.jsonl", "skipped.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write(two.as_line()[:-3])
    with AnswerStore(tmp_path, SETTINGS) as store:
        assert "a" in store and "b" not in store and store.skipped == {"c": "why not"}
        assert store.num_tokens == 2
        store.add(two)
        with pytest.raises(ValueError, match="there already"):
            store.add(two)
    assert read_answers(tmp_path) == [one, two]


def test_shards_hold_so_many_answers(tmp_path: Path) -> None:
    answers = [Answer(str(i), 0.0, (1,), (2,)) for i in range(5)]
    for start in (0, 3):
        with AnswerStore(tmp_path, SETTINGS, per_shard=2) as store:
            for answer in answers[start : start + 3]:
                store.add(answer)
    assert [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("answers-*"))] == [2, 2, 1]
    assert read_answers(tmp_path) == answers


def test_settings_are_not_mixed_and_a_folder_has_one_writer(tmp_path: Path) -> None:
    with AnswerStore(tmp_path, SETTINGS), pytest.raises(TrainDataError, match="another process is writing"):
        AnswerStore(tmp_path, SETTINGS)
    with AnswerStore(tmp_path, SETTINGS | {"temperature": 1.0}) as store:  # nothing was written: nothing is fixed
        store.add(Answer("a", 1.0, (1,), (2,)))
    with pytest.raises(TrainDataError, match=r"temperature is 1.0 there and 0.0 now; choose another folder"):
        AnswerStore(tmp_path, SETTINGS)
    with pytest.raises(TrainDataError, match=r"top_p is None there and 0.5 now"):
        AnswerStore(tmp_path, SETTINGS | {"temperature": 1.0, "top_p": 0.5})
    (tmp_path / "answers-00000.jsonl").write_text("damaged\n")
    with pytest.raises(TrainDataError, match="line 1 is not JSON"):
        AnswerStore(tmp_path, SETTINGS | {"temperature": 1.0})


def test_the_command_line_says_what_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", make_prompts(2))
    with pytest.raises(SystemExit, match=r"error: cannot read .*gone"):
        data.main(command(folder, tmp_path / "gone", tmp_path / "out"))
    with pytest.raises(SystemExit, match="error: temperature must be a finite number of at least 0"):
        data.main(command(folder, prompts, tmp_path / "out", "--temperature", "-1"))
    no_template = tiny_model.write_folder(tmp_path / "plain", has_template=False)
    with pytest.raises(SystemExit, match="has no chat template; --no-chat"):
        data.main(command(no_template, prompts, tmp_path / "out"))
    for wrong, message in ((["--limit", "0"], "at least 1"), (["--text", "x"], "one of them")):
        with pytest.raises(SystemExit, match="2"):
            data.main(command(folder, prompts, tmp_path / "out", *wrong))
        assert message in capsys.readouterr().err
    data.main(command(folder, prompts, tmp_path / "out", "--max-tokens", "2"))
    with pytest.raises(SystemExit, match="max_tokens is 2 there and 40 now"):
        data.main(command(folder, prompts, tmp_path / "out"))


def test_data_sets_are_mixed_by_weight() -> None:
    sizes = {"dolly_a": 30, "dolly_b": 30, "code": 50, "short": 100}
    prompts = [TrainPrompt(f"{name}-{i}", "x", name) for name, size in sizes.items() for i in range(size)]
    mixed = mix_prompts(prompts, parse_weights("dolly_*=3,code=1"))
    assert len(mixed) == len({p.id for p in mixed}) == 110
    for end in (8, 40, 80):
        share = sum(p.dataset == "code" for p in mixed[:end]) / end
        assert share == pytest.approx(0.25, abs=0.05)
    assert {p.dataset for p in mixed[:8]} == set(sizes) - {"short"}
    assert all(p.dataset == "code" for p in mixed[80:])  # the others are used up
    # The order follows from the ids and the seed.
    assert mix_prompts(prompts[::-1], parse_weights("dolly_*=3,code=1")) == mixed
    assert mix_prompts(prompts, parse_weights("dolly_*=3,code=1"), seed=1) != mixed
    assert sorted(p.id for p in mix_prompts(prompts)) == sorted(p.id for p in prompts)
    with pytest.raises(TrainDataError, match=r"no prompts of a data set 'cod' .* there are code, dolly_a"):
        mix_prompts(prompts, {"cod": 1.0})
    for wrong in ("code", "=2", "code=0", "code=x", "code=nan"):
        with pytest.raises(TrainDataError, match="must read like"):
            parse_weights(wrong)


def test_text_is_cut_at_words(tmp_path: Path) -> None:
    documents = ["one two three four five six", "seven\n\neight nine", "ten"]
    path = tmp_path / "some.book.txt.gz"
    path.write_bytes(gzip.compress("\n<|endoftext|>\n".join(documents).encode()))
    assert [(p.id, p.prompt) for p in cut_text(path, characters=8)] == [
        ("some-0-0", "one two three"),
        ("some-0-14", "four five"),
        ("some-1-1", "seven\n\neight"),
        ("some-1-14", "nine"),
    ]
    assert {p.dataset for p in cut_text(path, characters=8)} == {"some"}
    with pytest.raises(TrainDataError, match="holds no prompts"):
        cut_text(path, characters=100)


def test_prompts_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "prompt": "x", "dataset": "d", "more": 1}\n\n{"id": "b"}\n{"id": "b"}\n')
    assert read_train_prompts(path) == [TrainPrompt("a", "x", "d"), TrainPrompt("b", "")]
    for line, message in (
        ('{"prompt": "x"}', "line 1 must be an object"),
        ('{"id": "a", "prompt": 3}', "line 1: prompt must be a text, got 3"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "two prompts with the id 'a'"),
        ("", "holds no prompts"),
    ):
        path.write_text(line + "\n")
        with pytest.raises(TrainDataError, match=message):
            read_train_prompts(path)
