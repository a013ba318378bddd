"""Serving under load: throughput, time to first token and per token, by way of decoding and batch size.

python -m benchmarks.serving --prompts FILE.jsonl --limit 32 --batches 1,2,4,8,16 --max-tokens 64 --out out/serving
python -m benchmarks.serving --prompts FILE.jsonl --rates 0.5,1,2 --batches 8                   # Poisson arrivals
python -m benchmarks.serving --prompts FILE.jsonl --ssm FOLDER --widths 1,2,3,4,5 --batches 1,4,16
python -m benchmarks.serving --prompts FILE.jsonl --modes incremental,watched --batches 8       # what overlapping gains

Closed loop: as many clients as there are slots, each with its next request as soon as it has its answer (SpecInfer,
figure 7: time per token by batch size). Poisson: arrivals at random, `--rates` per second. With `--widths`, trees of an
SSM with so many children at the third level, always verified whole (figure 10). Memory and time against decoding each
path as a sequence of its own (figure 11): benchmarks.parallel_paths. With several modes at once they take turns.

"watched" is incremental decoding in which the host looks at each step before the next one begins, as it must where
requests have stop strings. The table is Markdown on the screen; OUT takes all figures as JSON and the plots as PNG,
with those of earlier runs that `--earlier` names.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from benchmarks.peers import encode_prompts
from benchmarks.serving_load import Load, run_load
from benchmarks.serving_plots import plot_by_batch, plot_by_rate
from specinfer_jax.assemble import PAGE_SIZE, build_program
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL, Speculation
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.opened import Model, choose_dtype, choose_max_model_len, open_model
from specinfer_jax.prompts import read_prompts
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import Engine
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams
from specinfer_jax.tree.expand import Expansion

MODES = ("incremental", "sequence", "tree")
WATCHED = "watched"
WIDTH_TREE = "1,1,{},1,1,1,1,1"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""

    def numbers(kind: type) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ssm", action="append", default=[], help="as in Speculation(ssms=[...]); may be repeated")
    parser.add_argument("--tree", help="tree of every SSM")
    parser.add_argument("--widths", type=numbers(int), default=[], help="children at the third level")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--batches", type=numbers(int), default=[1, 2, 4, 8, 16])
    parser.add_argument("--rates", type=numbers(float), default=[], help="Poisson arrivals a second; none: closed loop")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=1, help="of every load, all ways of decoding in turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--cache-tokens", type=int, help="as for LLM; less than all slots need shows preemption")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--earlier", type=Path, action="append", default=[], help="serving.json of another run")
    parser.add_argument("--out", type=Path, default=Path("out/serving"))
    options = parser.parse_args(arguments)
    if unknown := set(options.modes) - {*MODES, WATCHED}:
        parser.error(f"modes are {', '.join(MODES)} and {WATCHED}; got {', '.join(sorted(unknown))}")
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {options.repeats}")
    if options.widths and not options.ssm:
        parser.error("--widths needs --ssm: n-gram trees have no children per level")
    return options


def make_engine(model: Model, mode: str, batch: int, options: argparse.Namespace) -> Engine:
    """An engine of so many slots, compiled and warm; a mode is one of `MODES` or "width N"."""
    width = mode.removeprefix("width ") if mode.startswith("width ") else None
    tree = options.tree if width is None else WIDTH_TREE.format(width)
    if mode in ("incremental", WATCHED):
        speculation = Speculation.off()
    elif width is None:
        speculation = Speculation(ssms=options.ssm or None, tree=tree)
    else:  # as in the paper every tree is verified whole, whether it pays or not
        speculation = Speculation(ssms=options.ssm, tree=tree, ngram=False, adaptive=False)
    dtype = choose_dtype(options.dtype)
    program, params = build_program(model, speculation, dtype=dtype, num_slots=batch)
    if mode == "sequence":
        params = DecodeParams(params.llm, params.speculators[:1])
        program = dataclasses.replace(program, speculators=(chain_of(program.speculators[0]),))
    engine = Engine(
        params, program, num_slots=batch, max_model_len=choose_max_model_len(model.config, options.max_model_len),
        page_size=PAGE_SIZE, dtype=dtype,
        num_pages=None if options.cache_tokens is None else -(-options.cache_tokens // PAGE_SIZE),
    )  # fmt: skip
    engine.warm_up()
    return engine


def chain_of(speculator: Any) -> Any:
    """The speculator one child wide."""
    if isinstance(speculator, SsmSpeculator):
        return dataclasses.replace(speculator, expansion=Expansion((1,) * speculator.depth))
    if isinstance(speculator, NgramSpeculator):
        return dataclasses.replace(speculator, branch_depths=speculator.branch_depths[:1])
    raise ConfigError(f"there is no chain of a {type(speculator).__name__}")


def measure(model: Model, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per mode, batch and load."""
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    requests = [EngineRequest(list(ids), options.max_tokens, model.stop_ids(sampling), sampling) for ids in prompts]
    watched = [dataclasses.replace(request, watch=lambda ids: None) for request in requests]
    modes = [*options.modes, *(f"width {width}" for width in options.widths)]
    rows = []
    for batch in options.batches:
        engines = {mode: make_engine(model, mode, batch, options) for mode in modes}
        for rate in options.rates or [None]:
            found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
            for repeat in range(options.repeats):
                for mode in modes[repeat % len(modes) :] + modes[: repeat % len(modes)]:  # nobody is always first
                    asked = watched if mode == WATCHED else requests
                    load = Load(asked, clients=batch) if rate is None else Load(asked, rate=rate)
                    found[mode].append(run_load(engines[mode], load))
            for mode in modes:
                rows.append({"mode": mode, "batch": batch, "rate": rate, **middle(found[mode], found[modes[0]])})
                print(line(rows[-1]), flush=True)
    return rows


def middle(own: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The repeat of median throughput, and that of all repeats over the first mode's in the same repeat, the median."""
    by_rate = sorted(own, key=lambda found: found["tokens_per_second"])
    ratios = [a["tokens_per_second"] / b["tokens_per_second"] for a, b in zip(own, first, strict=True)]
    return {**by_rate[(len(by_rate) - 1) // 2], "over_first_mode": statistics.median(ratios)}


HEADER = (
    "| decoding | batch | load | tokens/s | over the first | tokens a step | TTFT p50 p99, s | TPOT p50 p99, ms | "
    "gap p99, ms |"
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    load = "closed" if row["rate"] is None else f"{row['rate']:g}/s"
    first, per_token, gap = row["time_to_first_token"], row["time_per_output_token"], row["longest_gap"]
    spent = "" if per_token is None else f"{1e3 * per_token['p50']:.1f} {1e3 * per_token['p99']:.1f}"
    return (
        f"| {row['mode']} | {row['batch']} | {load} | {row['tokens_per_second']:.1f} | "
        f"{row['over_first_mode']:.2f} | {row['tokens_per_step']:.2f} | {first['p50']:.2f} {first['p99']:.2f} | "
        f"{spent} | {1e3 * gap['p99']:.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    enable_compile_cache()
    try:
        model = open_model(options.model, dtype=choose_dtype(options.dtype))
        entries = read_prompts(options.prompts, limit=options.limit)
        prompts = encode_prompts(model.tokenizer, [entry.prompt for entry in entries])
        print(f"{HEADER}\n{'|---' * (HEADER.count('|') - 1)}|")
        rows = measure(model, prompts, options)
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from error
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {
        name: str(value) if name in ("prompts", "out", "earlier") else value for name, value in vars(options).items()
    }
    rows = [row for file in options.earlier for row in json.loads(file.read_text(encoding="utf-8"))["rows"]] + rows
    result = {"machine": describe_machine(), "settings": settings, "rows": rows}
    (options.out / "serving.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot_by_batch([row for row in rows if row["rate"] is None], options.out / "by_batch.png")
    plot_by_rate([row for row in rows if row["rate"] is not None], options.out / "by_rate.png")


if __name__ == "__main__":
    main()
