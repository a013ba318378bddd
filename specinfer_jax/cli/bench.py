"""`specinfer bench`: incremental decoding against sequence and tree speculation."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specinfer_jax.cli.options import with_llm_options
from specinfer_jax.cli.screen import check_output, interruptible, number, open_model, write_output
from specinfer_jax.config import LLMConfig
from specinfer_jax.prompts import DEFAULT_PROMPTS, read_prompts

if TYPE_CHECKING:
    from specinfer_jax.bench import BenchResult, BenchRow


@with_llm_options(max_tokens=64, draws=False)
def bench(
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE.jsonl", help='Lines of {"prompt": ..., "category": ...}; "-" is stdin.'
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="K", help="Only the first K prompts.")] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="R", help="Measure all R times; medians are shown.")] = 3,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="T", help="Of all requests; above 0 prompt i has seed i.")
    ] = 0.0,
    max_chain_depth: Annotated[
        int, typer.Option(min=1, metavar="D", help="Longest chain of an SSM that is tried on the first prompts.")
    ] = 8,
    by_category: Annotated[bool, typer.Option("--by-category", help="Figures for every category too.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            show_default=False,
            help="Wrap prompts as user messages. [default: if there is a template]",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="OUT", help="Write the figures there as JSON.")] = None,
    config: LLMConfig,
) -> None:
    """Measure incremental decoding, sequence speculation (the best chain) and tree speculation in one run.

    All modes decode the same prompts in turn, prompt by prompt, and their ids are compared. Of a file's sampling
    settings only max_tokens counts.

    Example: `specinfer bench --prompts prompts.jsonl --limit 20 --max-tokens 64 --json figures.json`
    """
    check_output(out)
    prompts = list(DEFAULT_PROMPTS[:limit]) if file is None else read_prompts(file, limit=limit)
    model = open_model(config)
    from specinfer_jax.bench import run_bench

    with _progress() as on_progress:
        result = interruptible(
            lambda: run_bench(
                model, prompts, speculation=config.speculation, max_tokens=config.sampling.max_tokens,
                temperature=temperature, repeats=repeats, chat=chat, by_category=by_category, dtype=config.dtype,
                max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs,
                max_chain_depth=max_chain_depth, on_progress=on_progress,
            )
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(_headline(result), soft_wrap=True)
    console.print(_table(result))
    console.print(_verdict(result), soft_wrap=True)
    if out is not None:
        write_output(out, json.dumps(result.as_dict(), indent=2) + "\n")
        print(f"wrote {out}", file=sys.stderr)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling", total=None)

        def on_progress(done: int, everything: int) -> None:
            bar.update(task, description="decoding", completed=done, total=everything)

        yield on_progress


def _headline(result: "BenchResult") -> str:
    settings = result.settings
    chain, trees = (", ".join(row.speculators) for row in result.rows[1:3])
    return (
        f"{settings['model']} on {settings['device']}: {settings['prompts']} prompts, up to {settings['max_tokens']} "
        f"tokens each, medians of {settings['repeats']} repeats; sequences by {chain}, trees by {trees}"
    )


def _table(result: "BenchResult") -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    by_category = any(row.category is not None for row in result.rows)
    if by_category:
        table.add_column("prompts", overflow="fold", min_width=14)
    table.add_column("mode", no_wrap=True)
    for heading in ("tok/step", "tok/s", "speed-up", "range", "equal ids"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        category = [row.category or "all"] if by_category else []
        table.add_row(*category, *_cells(row), end_section=row.mode == "tree")
    return table


def _cells(row: "BenchRow") -> list[str]:
    is_baseline = row.mode == "incremental"
    return [
        row.mode,
        number(row.tokens_per_step),
        number(row.tokens_per_second, 1),
        number(row.speedup),
        "-" if is_baseline else f"{row.speedup_min:.2f}-{row.speedup_max:.2f}",
        "-" if row.equal_ids is None else f"{row.equal_ids}/{row.prompts}",
    ]


def _verdict(result: "BenchResult") -> str:
    if result.rows[0].equal_ids is None:
        return "Token ids: drawn from the same law as incremental decoding's, with other random numbers."
    if not result.differences:
        return "Token ids: equal in all modes, for every prompt."
    listed = [f"prompt {d.prompt + 1} at token {d.position + 1} ({d.mode})" for d in result.differences[:5]]
    more = f" and {len(result.differences) - 5} more" if len(result.differences) > 5 else ""
    return f"Token ids: NOT equal to incremental decoding's: {', '.join(listed)}{more}."
