"""One SSM from the LLM's answers: cross-entropy on its tokens, divergence from its distributions.

python -m train.distill configs/train/smoke.toml --out out/smoke

The same command goes on after an interruption, even kill -9, with the same values. FOLDER gets run.json (settings and
draft vocabulary), metrics.jsonl, tensorboard/ and checkpoints/; train.export makes a model of it.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.opened import Model
from train.answers import Answer, TrainDataError, read_answers, split_answers
from train.evaluate import evaluate, numbers
from train.export import open_finished
from train.initial import describe, draft_vocabulary, make_start
from train.loop import Trained, train
from train.packing import BatchPlan
from train.run_file import Weights, check_run
from train.settings import TrainSettings, load_settings
from train.step import TrainBatch, data_mesh, train_batch
from train.top_k import TeacherTopK


class Distilled(NamedTuple):
    """A run of distillation, complete or not."""

    model: Model
    """The SSM, what was trained in float32."""
    trained: Trained
    """How the run ended."""


class PlanBatches:
    """Batches of a plan with the teacher's distributions and the samples' weights; what the loop reads."""

    def __init__(self, plan: BatchPlan, *, teacher: TeacherTopK | None = None, weights: Weights | None = None) -> None:
        """Put together.

        Args:
          plan: which answers are in which batch.
          teacher: rows for all of them, or None.
          weights: of answers that do not count 1.
        """
        self.plan, self.teacher, self.weights = plan, teacher, weights or {}

    def batch(self, step: int) -> TrainBatch:
        """The batch of a step, counted from 0."""
        packed = self.plan.batch(step)
        batch = train_batch(packed, weight_RT=self._weights(step, packed.token_RT.shape) if self.weights else None)
        if self.teacher is None:
            return batch
        id_RTk, logprob_RTk = self.teacher.lookup(self.plan, step)
        return batch._replace(teacher_id_RTk=id_RTk, teacher_logprob_RTk=logprob_RTk)

    def ids(self, step: int) -> list[str]:
        """Ids of the batch's answers."""
        return self.plan.ids(step)

    def _weights(self, step: int, shape: tuple[int, ...]) -> np.ndarray:
        weight_RT = np.ones(shape, np.float32)
        for place in self.plan.places(step):
            size = place.stop - place.first_target
            weight = np.asarray(self.weights.get(self.plan.answers[place.answer].id, 1.0), np.float32)
            weight_RT[place.row, place.first_target : place.stop] = weight[:size] if weight.ndim else weight
        return weight_RT


def distill(
    settings: TrainSettings, folder: Path, *, answers: Sequence[Answer] | None = None,
    weights: Weights | None = None, vocabulary: Sequence[int] | None = None, source: Model | None = None,
    quiet: bool = False,
) -> Distilled:  # fmt: skip
    """Train an SSM in `folder`, or go on with it.

    Args:
      settings: of the run.
      folder: of the run; made if missing.
      answers: instead of those of `settings.data.answers`; held-out ones among them are told by their ids.
      weights: of answers that do not count 1; those that count 0 altogether are left out.
      vocabulary: ids of the reduced head, instead of the most frequent ones of the answers trained on.
      source: what `settings.init.source` names, if it is loaded already, in float32.
      quiet: show nothing.

    Raises:
      ConfigError: settings that do not fit, or other ones than the run in `folder` began with.
      TrainDataError, CheckpointError, ModelNotFoundError, loop.NotFiniteError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers = read_answers(settings.data.answers) if answers is None else answers
    fit, held = split_answers(answers, held_out=settings.data.held_out)
    if settings.init.vocabulary and vocabulary is None:
        vocabulary = draft_vocabulary(fit, describe(settings.llm), settings.init.vocabulary)
    weights = weights or {}
    counting = [answer for answer in fit if np.any(weights.get(answer.id, 1.0))]
    plan = BatchPlan(counting, rows=settings.data.rows, tokens=settings.data.tokens, seed=settings.run.seed)
    check_run(folder, settings, plan, weights, vocabulary)

    source = source or open_finished(settings.init.source, settings.llm)
    start = make_start(settings.init, settings.llm, vocabulary=vocabulary, seed=settings.run.seed, source=source)
    config = start.model.config
    _check_fit(answers, settings, config.vocab_size, config.max_position)
    teacher = TeacherTopK(settings.data.teacher) if settings.loss.kl else None
    measure = _measure(settings, config, held) if held else None
    batches = PlanBatches(plan, teacher=teacher, weights=weights)
    if not quiet:
        print(_summary(start.model, start.trained, plan, held), file=sys.stderr)
    ended = train(config, start.trained, start.frozen, batches, settings, folder, measure=measure, quiet=quiet)
    return Distilled(start.model._replace(params=ended.params, location=str(folder)), ended)


def _measure(settings: TrainSettings, config: Any, held: Sequence[Answer]) -> Any:
    try:
        plan = BatchPlan(held, rows=settings.data.rows, tokens=settings.data.tokens)
    except TrainDataError:
        return None  # none of the held-out answers has a target
    run = settings.run

    def measure(params: Any, is_last: bool) -> dict[str, float]:
        steps = None if is_last else run.eval_batches
        mesh = data_mesh(run.devices)
        return numbers(
            evaluate(
                params, config, plan,
                steps=steps, dtype=run.compute_dtype, logits_mb=settings.loss.logits_mb, mesh=mesh,
            )
        )  # fmt: skip

    return measure


def _check_fit(answers: Sequence[Answer], settings: TrainSettings, vocab_size: int, max_position: int) -> None:
    if settings.data.tokens > max_position:
        raise ConfigError(f"data.tokens {settings.data.tokens} exceeds the SSM's {max_position} positions")
    for answer in answers:
        largest = max(answer.prompt_ids + answer.response_ids)
        if largest >= vocab_size:
            raise ConfigError(f"answer {answer.id!r} holds id {largest}, and the SSM has {vocab_size} ids")


def _summary(model: Model, trained: Any, plan: BatchPlan, held: Sequence[Answer]) -> str:
    def millions(tree: Any) -> str:
        import jax

        return f"{sum(leaf.size for leaf in jax.tree.leaves(tree)) / 1e6:.1f} M"

    return (
        f"{model.location}: {millions(trained)} parameters to train of {millions(model.params)}\n"
        f"{len(plan.answers)} answers with {plan.num_targets:,} response tokens to train on, {len(held)} held out; "
        f"{plan.steps_per_epoch} steps per epoch, {100 * plan.fill:.0f}% of their tokens no padding; "
        f"{plan.num_cut} answers cut, {len(plan.left_out)} left out"
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.distill", description="Train an SSM on the LLM's answers.")
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="one of configs/train/, or your own")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="of the run; given again, it goes on")
    parser.add_argument("--answers", nargs="+", metavar="PATH", help="instead of data.answers")
    parser.add_argument("--max-minutes", type=float, help="instead of run.max_minutes")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    settings = load_settings(options.config)
    if options.answers:
        settings = dataclasses.replace(
            settings, data=dataclasses.replace(settings.data, answers=tuple(options.answers))
        )
    if options.max_minutes is not None:
        settings = dataclasses.replace(settings, run=dataclasses.replace(settings.run, max_minutes=options.max_minutes))
    ended = distill(settings, options.out).trained
    for name, value in ended.measured.items():
        print(f"held-out {name}: {value:.4f}" if name != "targets" else f"held-out targets: {value:.0f}")
    if not ended.is_complete:
        print(f"time is up after step {ended.step}; the same command goes on", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the last measurement."""
    options = parse_arguments(arguments)
    enable_compile_cache()
    try:
        run(options)
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from the last checkpoint in {options.out}", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
