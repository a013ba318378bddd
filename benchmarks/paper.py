"""The paper's tables for any model: tokens per LLM pass by rule, with intervals (SpecInfer, section 6).

python -m benchmarks.paper --table 3 --data FOLDER --limit 20 --max-tokens 64 --json table3.json

Table 3: naive sampling against multi-step speculative sampling, same tree shape, temperature 1. The paper compares
naive sampling on top-k children with its Algorithm 2; here all four exact pairs of choosing and verifying children.
Trees are always verified whole, so that the shape is the same everywhere.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.peers import encode_prompts
from specinfer_jax import LLM, Model, SamplingParams, Speculation
from specinfer_jax.assemble import open_model
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import SpecInferError
from specinfer_jax.metrics import RequestStats
from specinfer_jax.prompts import read_prompts
from specinfer_jax.speculation.rules import IID, MSS, MSS_RENORMALIZED, NAIVE, TOP_K, WITHOUT_REPLACEMENT

PROMPT_SETS = {
    "alpaca": "Alpaca", "cp_awesome": "CP (stand-in)", "webqa": "WebQA", "cip_proxy": "CIP (stand-in)", "piqa": "PIQA",
}  # fmt: skip
"""File name without .jsonl, and what it stands for."""
PAIRS = {
    "NS, top-k children": (TOP_K, NAIVE),
    "NS, i.i.d. children": (IID, NAIVE),
    "MSS, i.i.d. children": (IID, MSS),
    "MSS, without replacement": (WITHOUT_REPLACEMENT, MSS_RENORMALIZED),
}
"""Rows of table 3: how children are chosen and verified."""
_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Cell:
    """One rule on one prompt set."""

    rule: str
    """Row of the table."""
    prompt_set: str
    """Column of the table."""
    prompts: int
    """How many prompts."""
    tokens: int
    """New tokens of all of them."""
    steps: int
    """LLM passes of all of them."""
    tokens_per_step: float
    """tokens / steps, bonus tokens included."""
    low: float
    """Lower end of the 95 % interval (bootstrap over prompts)."""
    high: float
    """Upper end."""


def cell(rule: str, prompt_set: str, stats: Sequence[RequestStats]) -> Cell:
    """Pooled tokens per step and its interval."""
    tokens, steps = (np.array([getattr(s, name) for s in stats]) for name in ("tokens", "steps"))
    chosen = np.random.default_rng(0).integers(len(stats), size=(_RESAMPLES, len(stats)))
    low, high = np.percentile(tokens[chosen].sum(axis=1) / steps[chosen].sum(axis=1), [2.5, 97.5])
    total_tokens, total_steps = int(tokens.sum()), int(steps.sum())
    return Cell(
        rule, prompt_set, len(stats), total_tokens, total_steps, total_tokens / total_steps, float(low), float(high)
    )


def table_3(
    model: Model, ssm: Model, prompt_sets: dict[str, list[list[int]]], *, tree: str, temperature: float,
    max_tokens: int, max_num_seqs: int, max_model_len: int,
) -> list[Cell]:  # fmt: skip
    """Every pair on every prompt set; prompt i of a set has seed i."""
    cells = []
    for rule, (children, verification) in PAIRS.items():
        speculation = Speculation(
            ssms=[ssm], tree=tree, ngram=False, adaptive=False, children=children, verification=verification
        )
        llm = LLM(model, speculation=speculation, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        for name, prompts in prompt_sets.items():
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))
            ]
            stats = [output.stats for output in llm.generate(prompts, params)]
            cells.append(cell(rule, name, [s for s in stats if s is not None]))
            print(_line(cells[-1]), flush=True)
    return cells


def _line(cell: Cell) -> str:
    name = PROMPT_SETS.get(cell.prompt_set, cell.prompt_set)
    return f"{name:16} {cell.rule:26} {cell.tokens_per_step:.2f}  [{cell.low:.2f}, {cell.high:.2f}]  {cell.steps} steps"


def print_table(cells: Sequence[Cell]) -> None:
    """Rules down, prompt sets across."""
    sets = list(dict.fromkeys(c.prompt_set for c in cells))
    print(f"{'tokens per step':26} " + " ".join(f"{PROMPT_SETS.get(name, name):>20}" for name in sets))
    for rule in dict.fromkeys(c.rule for c in cells):
        found = {c.prompt_set: f"{c.tokens_per_step:.2f} [{c.low:.2f}, {c.high:.2f}]" for c in cells if c.rule == rule}
        print(f"{rule:26} " + " ".join(f"{found[name]:>20}" for name in sets))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description="The paper's tables.")
    parser.add_argument("--table", type=int, choices=[3], required=True, help="number in the paper")
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {', '.join(PROMPT_SETS)} as .jsonl")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each set, from its start")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tree", default="1,1,3,1,1", help="children per node and level")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the LLM: name, folder or .gguf file")
    parser.add_argument("--ssm", help="the SSM likewise; without it the LLM's own first layers")
    parser.add_argument("--ssm-layers", type=int, default=27, help="how many of them")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="prompts side by side")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the cells here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    try:
        model = open_model(options.model, dtype=jnp.dtype(jnp.float32))
        ssm = model.first_layers(options.ssm_layers) if options.ssm is None else options.ssm
        prompt_sets = {
            name: encode_prompts(
                model.tokenizer,
                [entry.prompt for entry in read_prompts(options.data / f"{name}.jsonl", limit=options.limit)],
            )
            for name in PROMPT_SETS
        }
        cells = table_3(
            model, ssm, prompt_sets, tree=options.tree, temperature=options.temperature,
            max_tokens=options.max_tokens, max_num_seqs=options.max_num_seqs, max_model_len=options.max_model_len,
        )  # fmt: skip
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from None
    print_table(cells)
    if options.json is not None:
        report = {
            "table": options.table, "model": model.location, "ssm": getattr(ssm, "location", ssm),
            "tree": options.tree, "temperature": options.temperature, "max_tokens": options.max_tokens,
            "machine": describe_machine(), "cells": [dataclasses.asdict(c) for c in cells],
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
