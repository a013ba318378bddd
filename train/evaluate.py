"""How well an SSM foresees the LLM: held-out loss and top-k success (SpecInfer, table 1).

python -m train.evaluate out/ssm --answers out/answers

Teacher-forced: at every token of a response the SSM reads what the LLM had read, and the token that the LLM wrote is
among its k likeliest ones, or not. Tokens written greedily and tokens drawn at a temperature are counted apart.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.errors import SpecInferError
from specinfer_jax.models.config import ModelConfig
from train.answers import Answer, read_answers, split_answers
from train.losses import LossKind, chunk_tokens, token_scores
from train.packing import BatchPlan
from train.parts import head_part
from train.step import TrainBatch, by_rows, cast, compute_dtype, data_mesh, hidden, on_all, train_batch

TOP = 5
"""Largest k of the top-k success."""
EVERY, GREEDY, SAMPLED = "all", "greedy", "sampled"


@dataclasses.dataclass(frozen=True)
class Quality:
    """An SSM on some answers of the LLM."""

    targets: int
    """Response tokens."""
    cross_entropy: float
    """Nats per response token that the SSM's head has a row for."""
    top_k: tuple[float, ...]
    """Share of all response tokens among the SSM's k likeliest, k = 1 to 5."""
    outside: float
    """Share of response tokens that a reduced head has no row for."""


class AnswerScores(NamedTuple):
    """What an SSM makes of one answer."""

    answer: Answer
    """It."""
    ce_N: np.ndarray
    """Cross-entropy of every response token that fits a row; NaN without a row in a reduced head."""
    rank_N: np.ndarray
    """How many ids the SSM holds for likelier."""


def score_answers(
    params: Any, config: ModelConfig, plan: BatchPlan, *, steps: int | None = None, dtype: str = "auto",
    logits_mb: int = 64, mesh: Mesh | None = None,
) -> Iterator[AnswerScores]:  # fmt: skip
    """Feed an SSM the answers of one epoch of a plan, each once.

    Args:
      params: of the SSM; computed with in `dtype`.
      config: of the SSM.
      plan: the answers.
      steps: only so many batches.
      dtype: "auto", "float32" or "bfloat16".
      logits_mb: most MiB of logits per device at a time.
      mesh: whose data axis shares the rows; None: one device.
    """
    mesh = data_mesh(1) if mesh is None else mesh
    params = jax.device_put(cast(params, compute_dtype(dtype)), on_all(mesh))
    vocab_size = config.output_vocab_size or config.vocab_size
    chunk = chunk_tokens(plan.rows * plan.tokens // mesh.size, vocab_size=vocab_size, logits_mb=logits_mb)
    kind = LossKind(config, 1.0, 0.0, chunk, mesh.size, compute_dtype(dtype))
    for step in range(min(steps or plan.steps_per_epoch, plan.steps_per_epoch)):
        batch = jax.device_put(train_batch(plan.batch(step)), by_rows(mesh))
        ce_RT, rank_RT = map(np.asarray, _scores(params, batch, kind=kind))
        for place in plan.places(step):
            at = place.row, slice(place.first_target, place.stop)
            yield AnswerScores(plan.answers[place.answer], ce_RT[at], rank_RT[at])


def answer_ranks(params: Any, config: ModelConfig, plan: BatchPlan, **options: Any) -> dict[str, np.ndarray]:
    """By answer id: int32 per response token that fits a row, how many ids the SSM holds for likelier (0: none).

    Arguments as for `score_answers`.
    """
    return {scores.answer.id: scores.rank_N for scores in score_answers(params, config, plan, **options)}


def evaluate(params: Any, config: ModelConfig, plan: BatchPlan, **options: Any) -> dict[str, Quality]:
    """Measure an SSM on one epoch of a plan; arguments as for `score_answers`.

    Returns:
      "all", and "greedy" and "sampled" where there are such answers.
    """
    scores = list(score_answers(params, config, plan, **options))
    groups = {
        EVERY: scores,
        GREEDY: [score for score in scores if score.answer.temperature == 0],
        SAMPLED: [score for score in scores if score.answer.temperature > 0],
    }
    return {name: _quality(group) for name, group in groups.items() if group}


def numbers(found: Mapping[str, Quality]) -> dict[str, float]:
    """The same as flat numbers for a record: "cross_entropy", "top_1", ..., "greedy_top_1", ..."""
    flat = {}
    for name, quality in found.items():
        prefix = "" if name == EVERY else f"{name}_"
        flat[f"{prefix}cross_entropy"] = quality.cross_entropy
        flat |= {f"{prefix}top_{k}": share for k, share in enumerate(quality.top_k, 1)}
    return flat | {"outside": found[EVERY].outside, "targets": float(found[EVERY].targets)}


@functools.partial(jax.jit, static_argnames="kind")
def _scores(params: Any, batch: TrainBatch, *, kind: LossKind) -> tuple[jax.Array, jax.Array]:
    x_DN = hidden(params, batch, kind.config)
    return token_scores(head_part(params, tied=kind.config.tied_head), x_DN, batch.target_RT, kind)


def _quality(scores: Sequence[AnswerScores]) -> Quality:
    ce_N = np.concatenate([score.ce_N for score in scores]).astype(np.float64)
    rank_N = np.concatenate([score.rank_N for score in scores])
    is_inside_N = ~np.isnan(ce_N)
    top_k = tuple(float((is_inside_N & (rank_N < k)).mean()) for k in range(1, TOP + 1))
    ce = float(ce_N[is_inside_N].mean()) if is_inside_N.any() else float("nan")
    return Quality(len(ce_N), ce, top_k, float((~is_inside_N).mean()))


def print_qualities(found: Mapping[str, Quality], title: str) -> None:
    """A table on stdout."""
    table = Table(title=title, title_justify="left")
    table.add_column("answers")
    for name in ("tokens", "loss", *(f"k={k}" for k in range(1, TOP + 1)), "outside"):
        table.add_column(name, justify="right")
    for name, quality in found.items():
        shares = [f"{100 * share:.1f}%" for share in quality.top_k]
        outside = f"{100 * quality.outside:.1f}%"
        table.add_row(name, f"{quality.targets:,}", f"{quality.cross_entropy:.3f}", *shares, outside)
    Console(highlight=False).print(table)


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    from train.export import open_trained

    trained = open_trained(options.folder, step=options.step)
    answers = read_answers(options.answers)
    if not options.every:
        answers = split_answers(answers, held_out=trained.settings.data.held_out)[1]
    plan = BatchPlan(answers, rows=options.rows, tokens=options.tokens)
    found = evaluate(trained.model.params, trained.model.config, plan, steps=options.batches)
    print_qualities(found, f"{options.folder}, step {trained.step}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluate", description="How well an SSM foresees the LLM.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of train.distill")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="files, or folders of train.data")
    parser.add_argument("--every", action="store_true", help="all answers, not only those held out of the training")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--batches", type=int, help="only so many batches")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a row; longer answers are cut")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse_arguments(arguments)
    enable_compile_cache()
    try:
        run(options)
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
