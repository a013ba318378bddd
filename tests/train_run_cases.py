"""A tiny LLM, answers for it, and settings that train an SSM in a second."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from decode_cases import LLAMA
from tiny_model import CONFIG, write_folder

from specinfer_jax.models.transformer import init_params
from train.answers import Answer
from train.distill import PlanBatches
from train.loop import Trained, train
from train.packing import BatchPlan
from train.parts import split_params
from train.record import read_metrics
from train.settings import DataSettings, InitSettings, OptimiserSettings, RunSettings, TrainSettings
from train.step import TrainBatch

SSM = dataclasses.replace(LLAMA, num_layers=1)
"""What is trained in most tests."""
PARAMS = init_params(SSM, jax.random.key(1))
VOCAB = SSM.vocab_size


def make_answers(count: int = 40, *, vocab: int = VOCAB, seed: int = 0) -> list[Answer]:
    """Answers of 3 to 20 tokens that repeat a pattern of their own, greedy and sampled in turn."""
    random = np.random.default_rng(seed)
    answers = []
    for i in range(count):
        prompt, size = random.integers(3, vocab, random.integers(2, 6)), int(random.integers(3, 20))
        response = [int(prompt[0] + (k % 3)) % vocab for k in range(size)]
        answers.append(Answer(f"a-{i}", 0.8 * (i % 2), tuple(map(int, prompt)), (*response, 2)))
    return answers


def make_settings(
    *, steps: int = 20, rows: int = 4, tokens: int = 32, vocabulary: int = 0, answers: tuple[str, ...] = (),
    llm: str = "", train: tuple[str, ...] = ("layers", "norm", "head"), accumulate: int = 1, clip: float = 1.0,
    **run: Any,
) -> TrainSettings:  # fmt: skip
    """One device, no TensorBoard, a checkpoint every five steps."""
    run = {"devices": 1, "tensorboard": False, "save_interval": 5, "eval_interval": 0, **run}
    return TrainSettings(
        llm=llm,
        data=DataSettings(answers, held_out=0.2, rows=rows, tokens=tokens),
        init=InitSettings(vocabulary=vocabulary, train=train),
        optimiser=OptimiserSettings(learning_rate=3e-3, warmup=4, accumulate=accumulate, clip_norm=clip),
        run=RunSettings(steps=steps, **run),
    )


def values(folder: Path) -> list[dict[str, float]]:
    """What a run recorded, but for its speed."""
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(folder)]


def write_toml(path: Path, settings: TrainSettings, more: str = "") -> Path:
    """A settings file that a process of its own can read."""
    run, data = settings.run, settings.data
    path.write_text(
        f"llm = {json.dumps(settings.llm)}\n[data]\nanswers = {json.dumps(list(data.answers))}\nheld_out = 0.2\n"
        f"rows = {data.rows}\ntokens = {data.tokens}\n[optimiser]\nlearning_rate = 3e-3\nwarmup = 4\n"
        f"[run]\nsteps = {run.steps}\nsave_interval = {run.save_interval}\neval_interval = 0\ntensorboard = false\n"
        f"devices = 1\n{more}"
    )
    return path


class Faulty:
    """Batches of which one is spoilt or never comes, and a list of those asked for."""

    def __init__(self, settings: TrainSettings, *, at: int = -1, spoil: Callable[[TrainBatch], TrainBatch]) -> None:
        plan = BatchPlan(make_answers(), rows=settings.data.rows, tokens=settings.data.tokens, seed=settings.run.seed)
        self.inner, self.at, self.spoil = PlanBatches(plan), at, spoil
        self.asked: list[int] = []

    def batch(self, step: int) -> TrainBatch:
        self.asked.append(step)
        batch = self.inner.batch(step)
        return self.spoil(batch) if step == self.at else batch

    def ids(self, step: int) -> list[str]:
        return self.inner.ids(step)


def good(settings: TrainSettings) -> Faulty:
    """Nothing is wrong with these."""
    return Faulty(settings, spoil=lambda batch: batch)


def run(settings: TrainSettings, folder: Path, batches: Faulty | None = None, **options: Any) -> Trained:
    """Train all but the embedding of the small model."""
    trained, frozen = split_params(PARAMS, settings.init.train)
    return train(SSM, trained, frozen, batches or good(settings), settings, folder, quiet=True, **options)


def write_llm(folder: Path) -> Path:
    """A model folder with a tokenizer; its vocabulary is `LLM_VOCAB`."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_folder(folder)


LLM_VOCAB: int = CONFIG["vocab_size"]


def write_answers(path: Path, count: int = 40) -> Path:
    """A file of answers for that model."""
    path.write_text("".join(answer.as_line() + "\n" for answer in make_answers(count, vocab=LLM_VOCAB)))
    return path


def changed(settings: TrainSettings, table: str, **values: Any) -> TrainSettings:
    """Settings with some of one table otherwise."""
    return dataclasses.replace(settings, **{table: dataclasses.replace(getattr(settings, table), **values)})


def distill_settings(folder: Path, **options: Any) -> TrainSettings:
    """Settings whose LLM and answers lie in a folder; written there if they are not yet."""
    llm, answers = folder / "llm", folder / "answers.jsonl"
    if not llm.exists():
        write_llm(llm)
        write_answers(answers)
    return make_settings(llm=str(llm), answers=(str(answers),), **options)


def assert_same(one: Any, other: Any) -> None:
    """The same bits in the same structure."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
