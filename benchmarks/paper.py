"""The paper's tables 1, 2 and 3 and its figure 9 for any model and SSM (SpecInfer, section 6).

python -m benchmarks.paper --table 1,2,3 --figure 9 --data FOLDER --limit 20 --out out/paper

Table 1: how often the LLM's token is among the SSM's k likeliest. Table 2: tokens per step by the width of the tree's
third level. Table 3: naive against multi-step speculative sampling; the paper compares naive sampling on top-k children
with its Algorithm 2, here are all four exact pairs. Table "wide": the tree of 32 nodes with the most tokens per step.
Table "ssms": 1 to 4 SSMs with the same number of nodes together. Figure 9: how tokens per step are distributed over
prompts, from table 2. Trees are always verified whole. What follows from the LLM's own answers is counted on them:
greedy, naive sampling of top-k children, multi-step sampling of one SSM's draws without replacement. All else is
decoded.

Tables are Markdown on the screen; OUT takes them with their numbers as JSON, and the figures as PNG.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.machine import describe_machine
from benchmarks.paper_plots import plot_cdf, plot_widths
from benchmarks.paper_tables import (
    PROMPT_SETS,
    Cell,
    Measuring,
    Success,
    is_counted,
    rules_of_ssm_counts,
    rules_of_table_2,
    rules_of_table_3,
    rules_of_wide,
    tokens_per_step,
    top_k_success,
    with_pool,
)
from benchmarks.peers import encode_prompts
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import SpecInferError
from specinfer_jax.opened import Model, open_model, open_ssm
from specinfer_jax.prompts import read_prompts
from specinfer_jax.speculation.tree_choice import widest_trees

TABLES = ("1", "2", "3", "wide", "ssms")
OPTIONS = ("limit", "decode_limit", "stochastic_limit", "max_tokens", "temperature", "tree")
"""What a report says of how it was made."""


def table_of_cells(cells: Sequence[Cell]) -> str:
    """Markdown: rules down, prompt sets across, 95 % intervals."""
    sets = list(dict.fromkeys(c.prompt_set for c in cells))
    lines = ["| tokens per step | " + " | ".join(_title(name) for name in sets) + " |", "|---" * (len(sets) + 1) + "|"]
    for rule in dict.fromkeys(c.rule for c in cells):
        found = {c.prompt_set: f"{c.value:.2f} [{c.low:.2f}, {c.high:.2f}]" for c in cells if c.rule == rule}
        lines.append(f"| {rule} | " + " | ".join(found[name] for name in sets) + " |")
    return "\n".join(lines)


def table_of_success(found: Sequence[Success]) -> str:
    """Markdown: prompt sets down, k across, in percent."""
    ks = range(1, len(found[0].top_k) + 1)
    lines = ["| success of the top k, % | tokens | " + " | ".join(f"k = {k}" for k in ks) + " |"]
    lines.append("|---" * (len(ks) + 2) + "|")
    for entry in found:
        shares = " | ".join(f"{100 * share:.0f}" for share in entry.top_k)
        lines.append(f"| {entry.decoding} {_title(entry.prompt_set)} | {entry.tokens:,} | {shares} |")
    return "\n".join(lines)


def _title(prompt_set: str) -> str:
    return PROMPT_SETS.get(prompt_set, prompt_set)


def _line(entry: Cell | Success) -> None:
    """Progress on the screen."""
    if isinstance(entry, Success):
        shares = " ".join(f"{100 * share:.1f}" for share in entry.top_k)
        print(f"{_title(entry.prompt_set):16} {entry.decoding:26} {shares} % of {entry.tokens}", flush=True)
    else:
        print(
            f"{_title(entry.prompt_set):16} {entry.rule:26} {entry.value:.2f}  [{entry.low:.2f}, {entry.high:.2f}]  "
            f"{sum(entry.steps)} steps",
            flush=True,
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def names(text: str) -> list[str]:
        return [part.strip() for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description="The paper's tables.")
    parser.add_argument("--table", type=names, default=[], help=f"of {', '.join(TABLES)}: 1,2,3")
    parser.add_argument("--figure", type=int, choices=[9], help="number in the paper; needs table 2")
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {', '.join(PROMPT_SETS)} as .jsonl")
    parser.add_argument("--sets", type=names, default=list(PROMPT_SETS), help="only these prompt sets")
    parser.add_argument("--by-category", action="store_true", help="each category of a set is a set")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each set, from its start")
    parser.add_argument(
        "--decode-limit", type=int, help="prompts of each set where counting will not do; 0: no such rows"
    )
    parser.add_argument("--stochastic-limit", type=int, help="prompts of each set above temperature 0; default: all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="of what is stochastic")
    parser.add_argument("--tree", default="1,1,3,1,1", help="of table 3: children per node and level")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the LLM: name, folder or .gguf file")
    parser.add_argument("--ssm", action="append", default=[], help="an SSM likewise, again for several")
    parser.add_argument("--ssm-layers", type=int, default=27, help="without --ssm: the LLM's own first layers")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="prompts side by side")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--decode", action="store_true", help="decode also what can be counted on the answers")
    parser.add_argument("--out", type=Path, help="folder for the numbers, the figures and the answers")
    options = parser.parse_args(arguments)
    tables = [*options.table, *(["2"] if options.figure and "2" not in options.table else [])]
    if not tables or set(tables) - set(TABLES):
        parser.error(f"--table takes some of {', '.join(TABLES)}, got {', '.join(options.table) or 'none'}")
    if options.figure and options.out is None:
        parser.error("--figure needs --out, a folder to draw into")
    options.table = tables
    return options


def open_ssms(options: argparse.Namespace, model: Model) -> list[Model]:
    """The SSMs asked for."""
    if not options.ssm:
        return [model.first_layers(options.ssm_layers)]
    return [open_ssm(name, model, dtype=jnp.dtype(jnp.float32)) for name in options.ssm]


def read_sets(folder: Path, names: Sequence[str], *, limit: int, by_category: bool) -> dict[str, list[str]]:
    """Prompts by set, or by set and category, so many of each."""
    found: dict[str, list[str]] = {}
    for name in names:
        for entry in read_prompts(folder / f"{name}.jsonl"):
            group = found.setdefault(f"{name}: {entry.category}" if by_category else name, [])
            if len(group) < limit:
                group.append(entry.prompt)
    return found


def measure(options: argparse.Namespace, model: Model, ssms: Sequence[Model]) -> dict[str, Any]:
    """All tables asked for, printed as they come; their entries by table."""
    texts = read_sets(options.data, options.sets, limit=options.limit, by_category=options.by_category)
    prompt_sets = {name: encode_prompts(model.tokenizer, group) for name, group in texts.items()}
    sizes = {name: getattr(options, name) for name in ("max_tokens", "max_num_seqs", "max_model_len")}
    limits = {name: getattr(options, name) for name in ("decode_limit", "stochastic_limit")}
    measuring = Measuring(model, prompt_sets, folder=options.out and options.out / "answers", **limits, **sizes)
    rules = {
        "2": rules_of_table_2(options.temperature),
        "3": rules_of_table_3(options.tree, options.temperature),
        "wide": rules_of_wide(str(widest_trees([ssms[0].acceptance])[0]), options.temperature),
        "ssms": rules_of_ssm_counts(len(ssms), options.temperature),
    }
    found: dict[str, Any] = {}
    if "1" in options.table:
        found["1"] = top_k_success(measuring, ssms[0], temperature=options.temperature, report=_line)
        print("\n" + table_of_success(found["1"]) + "\n", flush=True)
    # All at once: what is counted for one table is counted for all.
    asked = [rule for table in options.table if table != "1" for rule in rules[table]]
    asked = [rule for rule in asked if is_counted(rule) or options.decode_limit != 0]
    cells = tokens_per_step(measuring, ssms, asked, report=_line, decodes=options.decode)
    for table in [table for table in options.table if table != "1"]:
        names = [rule.name for rule in rules[table]]
        found[table] = with_pool([c for c in cells if c.rule in names])
        if found[table]:
            print("\n" + table_of_cells(found[table]) + "\n", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write, draw."""
    options = parse_arguments(arguments)
    try:
        model = open_model(options.model, dtype=jnp.dtype(jnp.float32))
        ssms = open_ssms(options, model)
        found = measure(options, model, ssms)
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from None
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "model": model.location, "ssms": [ssm.location for ssm in ssms], "machine": describe_machine(),
        **{name: getattr(options, name) for name in OPTIONS},
        "tables": {table: [dataclasses.asdict(entry) for entry in entries] for table, entries in found.items()},
    }  # fmt: skip
    (options.out / "paper.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if "2" in found:
        plot_widths(found["2"], options.out / "table2.png")
    if options.figure:
        plot_cdf(found["2"], options.out / "figure9.png")


if __name__ == "__main__":
    main()
