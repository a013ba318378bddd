"""Boost-tuning: several SSMs one after the other, each on what those before it miss (SpecInfer, section 4).

python -m train.boost configs/train/smollm2_boost.toml --out out/boost

    round 1   all samples                      -> ssm-1   marks what it gets right
    round 2   samples that nobody got right    -> ssm-2   marks more
    round 3   ...

A sample is a whole answer (`boost.match = "continuation"`: every one of its tokens is the SSM's likeliest one), or a
place in an answer (`boost.match = n`: the next n tokens are). Marked samples are dropped, or count less ("soft"). With
match = 1 and "drop" each SSM learns the tokens that the merged set misses. With `boost.own_layers` the later SSMs are
the first one but for their last layers. `boost.first` names an SSM that is finished already and takes the place of
round 1: its hits should be marked on answers that it was not trained on.

FOLDER gets ssm-1/, ssm-2/, ... (runs of train.distill, which go on after an interruption) and boost.json: after each
round the share marked, what each SSM and the set foresee on held-out answers, and tokens per step of the merged tree.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.metrics import RequestStats, total
from specinfer_jax.opened import Model, open_model
from train.answers import Answer, read_answers, split_answers
from train.distill import distill
from train.evaluate import answer_ranks
from train.export import open_finished
from train.packing import BatchPlan
from train.settings import CONTINUATION, FROM_LLM, BoostSettings, TrainSettings, load_settings

REPORT_FILE = "boost.json"
Hits = dict[str, np.ndarray]
"""By answer id: for every response token that fits a row, whether it is the likeliest one of an SSM."""


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round gave."""

    ssm: int
    """Number of the SSM, from 1."""
    marked: float
    """Share of the samples that some SSM so far gets right."""
    weight_left: float
    """Mean weight of the response tokens in the next round."""
    own_top_1: float
    """Held-out tokens that are this SSM's likeliest ones."""
    set_top_1: float
    """Held-out tokens that are the likeliest ones of some SSM so far: what a tree of one child each holds."""
    tokens_per_step: float | None
    """Of the merged tree on held-out prompts, greedy; None: not measured."""
    served_top_1: float | None
    """Share of the single children of this SSM alone that the engine accepted there."""
    offline_top_1: float | None
    """The same counted teacher-forced on what the engine wrote: if they differ, training and serving do."""


def match_samples(hit_T: np.ndarray, match: str | int) -> np.ndarray:
    """Which samples of an answer an SSM gets right, bool per response token.

    Args:
      hit_T: bool, the token is the SSM's likeliest one.
      match: "continuation": all tokens alike, true if every one is hit; n: the token and the n - 1 behind it are hit
        (at the end of the answer as many as there are).
    """
    if match == CONTINUATION:
        return np.full(hit_T.shape, hit_T.all())
    right_T = hit_T.copy()
    for ahead in range(1, int(match)):
        right_T[:-ahead] &= hit_T[ahead:]
    return right_T


def next_weights(marked: Mapping[str, np.ndarray], settings: BoostSettings) -> dict[str, np.ndarray]:
    """Weights of the response tokens in the next round, by answer id: 1, or what marked ones count."""
    marked_weight = 0.0 if settings.weighting == "drop" else settings.soft_weight
    return {key: np.where(m, np.float32(marked_weight), np.float32(1)) for key, m in marked.items()}


def round_settings(settings: TrainSettings, number: int, first: str, ssms: Sequence[Model]) -> TrainSettings:
    """Settings of one round's run.

    Args:
      settings: of all rounds.
      number: of the round, from 1; each has a seed of its own.
      first: name of the first SSM, or folder of its run.
      ssms: what came out of the rounds before.

    Raises:
      ConfigError: SSMs are to have more layers of their own than they have layers.
    """
    steps = (settings.boost.later_steps if number > 1 else 0) or settings.run.steps
    run = dataclasses.replace(settings.run, seed=settings.run.seed + number - 1, steps=steps)
    settings, own_layers = dataclasses.replace(settings, run=run), settings.boost.own_layers
    if not (ssms and own_layers):
        return settings
    num_layers = ssms[0].config.num_layers
    if own_layers > num_layers:
        raise ConfigError(f"boost.own_layers is {own_layers}, and the first SSM has {num_layers} layers")
    tuned = tuple(f"layers_{l}" for l in range(num_layers - own_layers, num_layers))
    init = dataclasses.replace(
        settings.init, source=first, layers=(), model={}, vocabulary=0, train=(*tuned, "norm")
    )  # fmt: skip
    return dataclasses.replace(settings, init=init)


def boost(settings: TrainSettings, folder: Path, *, quiet: bool = False, prompts: int = 20) -> list[Round]:
    """Tune `settings.boost.rounds` SSMs, or go on with them.

    Args:
      settings: of all rounds; `round_settings` makes those of each.
      folder: of the runs and the report.
      quiet: show nothing.
      prompts: held-out prompts on which the merged tree is measured; 0: none.

    Raises:
      ConfigError, TrainDataError, and what `distill` raises.
    """
    answers = read_answers(settings.data.answers)
    fit, held = split_answers(answers, held_out=settings.data.held_out)
    source = open_model(settings.llm, dtype=jnp.dtype(jnp.float32))
    of_start = source if settings.init.source == FROM_LLM else None
    first = settings.boost.first or str(folder / "ssm-1")
    weights: dict[str, np.ndarray] = {}
    marked: dict[str, np.ndarray] = {}
    held_hits: list[Hits] = []
    ssms: list[Model] = []
    rounds: list[Round] = []
    for number in range(1, settings.boost.rounds + 1):
        if settings.boost.first and not ssms:
            model = open_finished(first, source)
            if model is None:
                raise ConfigError(f"boost.first is {first!r}: neither the folder of an SSM nor one that ships")
        else:
            shares = bool(ssms and settings.boost.own_layers)
            done = distill(
                round_settings(settings, number, first, ssms), folder / f"ssm-{number}", answers=answers,
                weights=weights, source=ssms[0] if shares else of_start, quiet=quiet,
            )  # fmt: skip
            if not done.trained.is_complete:
                break
            model = done.model
        ssms.append(model)
        for key, hit_T in _hits(model, fit, settings).items():
            right_T = match_samples(hit_T, settings.boost.match)
            marked[key] = marked[key] | right_T if key in marked else right_T
        weights = next_weights(marked, settings.boost)
        if held:
            held_hits.append(_hits(model, held, settings))
        served = _serve(source, ssms, held[:prompts], settings) if held and prompts else (None, None, None)
        rounds.append(_round(number, marked, weights, held_hits, served, settings.boost.match))
        _write_report(folder, settings, rounds)
        if not quiet:
            print(_line(rounds[-1]), file=sys.stderr)
    return rounds


def _hits(ssm: Model, answers: Sequence[Answer], settings: TrainSettings) -> Hits:
    """Teacher-forced, as `train.evaluate`."""
    plan = BatchPlan(answers, rows=settings.data.rows, tokens=settings.data.tokens)
    ranks = answer_ranks(
        ssm.params, ssm.config, plan, dtype=settings.run.compute_dtype, logits_mb=settings.loss.logits_mb
    )  # fmt: skip
    return {key: rank_T == 0 for key, rank_T in ranks.items()}


def _serve(
    llm: Model, ssms: Sequence[Model], held: Sequence[Answer], settings: TrainSettings
) -> tuple[float | None, float | None, float | None]:
    """(tokens per step of the merged tree, single children of the newest SSM accepted, the same offline), greedy."""
    longest = settings.data.tokens
    prompts = [list(answer.prompt_ids) for answer in held if len(answer.prompt_ids) < longest // 2]
    if not prompts:
        return None, None, None
    merged, _ = _decode(llm, ssms, settings.boost.tree, prompts, longest)
    alone, answers = _decode(llm, ssms[-1:], "1", prompts, longest)
    hits = _hits(ssms[-1], answers, settings)
    asked = [hit for answer in answers for hit in _asked(hits[answer.id])]
    served = alone.accepted_by_position[0] / max(1, alone.proposed_by_position[0])
    return merged.tokens_per_step, served, float(np.mean(asked))


def _decode(
    llm: Model, ssms: Sequence[Model], tree: str, prompts: Sequence[list[int]], longest: int
) -> tuple[RequestStats, list[Answer]]:
    """Counters and continuations of greedy decoding with these SSMs."""
    speculation = Speculation(ssms=ssms, tree=tree, ngram=False, adaptive=False)
    engine = LLM(llm, speculation=speculation, max_model_len=longest, max_num_seqs=4)
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=longest // 2))
    answers = [
        Answer(str(i), 0.0, tuple(prompt), tuple(output.outputs[0].token_ids))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    return total([output.stats for output in outputs if output.stats is not None]), answers


def _asked(hit_T: np.ndarray) -> list[bool]:
    """Whether the SSM's only child was right, step by step: a hit commits two tokens, a miss one."""
    found, t = [], 0
    while t + 1 < len(hit_T):  # with room for one token no tree is proposed
        found.append(bool(hit_T[t]))
        t += 2 if hit_T[t] else 1
    return found


def _round(
    number: int, marked: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray], held_hits: Sequence[Hits],
    served: tuple[float | None, float | None, float | None], match: str | int,
) -> Round:  # fmt: skip
    by_sample = [m[:1] if match == CONTINUATION else m for m in marked.values()]
    own, together = float("nan"), float("nan")
    if held_hits:
        own = float(np.concatenate(list(held_hits[-1].values())).mean())
        union = {key: functools.reduce(np.logical_or, [hits[key] for hits in held_hits]) for key in held_hits[0]}
        together = float(np.concatenate(list(union.values())).mean())
    return Round(
        number, float(np.concatenate(by_sample).mean()), float(np.concatenate(list(weights.values())).mean()),
        own, together, *served,
    )  # fmt: skip


def _write_report(folder: Path, settings: TrainSettings, rounds: Sequence[Round]) -> None:
    content = {"boost": dataclasses.asdict(settings.boost), "rounds": [dataclasses.asdict(r) for r in rounds]}
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f"{REPORT_FILE}.partial"
    scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, folder / REPORT_FILE)


def _line(done: Round) -> str:
    tree = "" if done.tokens_per_step is None else f", merged tree {done.tokens_per_step:.2f} tokens per step"
    return (
        f"round {done.ssm}: {100 * done.marked:.1f}% of the samples marked; held out: SSM {done.ssm} foresees "
        f"{100 * done.own_top_1:.1f}% of the tokens, all together {100 * done.set_top_1:.1f}%{tree}"
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.boost", description="Boost-tune several SSMs.")
    parser.add_argument("config", type=Path, metavar="CONFIG.toml", help="one of configs/train/, or your own")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="of the runs; given again, they go on"
    )
    parser.add_argument("--answers", nargs="+", metavar="PATH", help="instead of data.answers")
    parser.add_argument("--prompts", type=int, default=20, help="held-out prompts to measure the merged tree on")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, and say where the report is."""
    options = parse_arguments(arguments)
    enable_compile_cache()
    try:
        settings = load_settings(options.config)
        if options.answers:
            data: Any = dataclasses.replace(settings.data, answers=tuple(options.answers))
            settings = dataclasses.replace(settings, data=data)
        options.out.mkdir(parents=True, exist_ok=True)
        rounds = boost(settings, options.out, prompts=options.prompts)
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from the last checkpoint in {options.out}", file=sys.stderr)
        raise SystemExit(130) from None
    if len(rounds) < settings.boost.rounds:
        print(f"time is up in round {len(rounds) + 1}; the same command goes on", file=sys.stderr)
    print(f"{len(rounds)} of {settings.boost.rounds} rounds: {options.out / REPORT_FILE}")


if __name__ == "__main__":
    main()
