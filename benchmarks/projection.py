"""Speed-up of tree speculation as it must be on chips that are not here; the same model checked on the machine at hand.

python -m benchmarks.projection --rows scale.json                           the projection in docs/scale.md
python -m benchmarks.projection --check --prompts alpaca.jsonl --limit 8    against decoding of the default model here

One step of tree speculation is a pass of the LLM over the tree's rows and the SSM's passes before it; incremental
decoding is a pass over one row. Tokens per step are given, what a pass takes follows from weights, rows and devices:

    speed-up = tokens per step * LLM(1 row) / (LLM(rows of the tree) + sum over the SSM's passes of SSM(its rows))

Chips: a pass reads its weights once and multiplies every row with them, whichever takes longer, and then exchanges what
`benchmarks.scale` counted. The machine at hand: single passes are timed, and how a step is made up of them is checked.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.machine import describe_machine
from benchmarks.paper_models import PAPER_MODELS
from benchmarks.roofline import PEAKS
from benchmarks.scale import PAPER_TREE, SLOTS
from benchmarks.scale_rows import Row, read_rows
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.config import DEFAULT_MODEL, Speculation
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params, param_shapes
from specinfer_jax.speculation.pass_costs import pass_seconds
from specinfer_jax.tree.expand import parse_expansion
from specinfer_jax.tree.shape import TreeShape

PAPER_TOKENS = {"greedy": (2.86, 3.21, 3.62), "stochastic": (2.08, 2.19, 2.26)}
"""Tokens per step with the paper's tree (SpecInfer, Table 2, k = 3), LLaMA-7B and LLaMA-68M: least, middle and most of
its five data sets."""
CONTEXT = 512
"""Tokens in a slot's cache."""
ITEMSIZE = 2
"""Of bfloat16."""


class Chip(NamedTuple):
    """What one jax device of a TPU generation can do, by the vendor's documentation."""

    bytes_per_second: float
    """Of its memory."""
    flops: float
    """bfloat16."""
    exchange_bytes_per_second: float
    """Over all its links to other chips."""
    host_bytes_per_second: float
    """From the host's memory; assumed, no document tells."""


def _chip(kind: str, gigabits: float, *, devices: int = 1) -> Chip:
    """`gigabits`: interconnect of a chip, which may be several jax devices."""
    peak = PEAKS[kind]
    return Chip(
        peak.bytes_per_second / devices, peak.bfloat16_flops / devices, gigabits / 8 * 1e9 / devices, 16e9 / devices
    )


# Google Cloud documentation, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e": interchip interconnect of one chip
TPUS: Mapping[str, Chip] = {
    "v4": _chip("TPU v4", 2_400, devices=2),
    "v5e": _chip("TPU v5e", 1_600),
    "v5p": _chip("TPU v5p", 4_800),
    "v6e": _chip("TPU v6e", 3_584),
}
EXCHANGE_SECONDS = 5e-6
"""From the start of an exchange to its first byte, and the wait for the slowest device; assumed."""


def draft_passes(expansion: TreeShape) -> list[tuple[int, int]]:
    """(rows through the layers, rows through the head) of the SSM's passes for one tree, root first.

    The first pass feeds a chain long enough for a whole accepted path (speculation/ssm.py); leaves need none.
    """
    return [(expansion.depth + 2, 1), *((size, size) for size in expansion.inner_sizes[1:])]


class Weights(NamedTuple):
    """Bytes that a pass reads."""

    layers: float
    """Of all layers."""
    head: float
    """Of the vocabulary head."""


def weights_of(config: ModelConfig, itemsize: int) -> Weights:
    """Of one model on one device."""
    shapes = param_shapes(config)
    layers = sum(leaf.size for l in range(config.num_layers) for leaf in jax.tree.leaves(shapes[f"layers_{l}"]))
    rows = config.output_vocab_size or config.vocab_size
    return Weights(layers * itemsize, rows * (config.embed_width or config.width) * itemsize)


def cache_bytes_read(config: ModelConfig, slots: int) -> float:
    """Keys and values of `CONTEXT` tokens of every slot."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * CONTEXT * slots * ITEMSIZE


def chip_seconds(chip: Chip, weights: float, cache: float, rows: int, *, from_host: bool = False) -> float:
    """One pass on one device: it reads or it computes, whichever takes longer."""
    reading = (weights + cache) / chip.bytes_per_second
    if from_host:
        reading = max(reading, weights / chip.host_bytes_per_second)
    return max(reading, 2 * rows * weights / ITEMSIZE / chip.flops)


@dataclasses.dataclass(frozen=True)
class Projection:
    """One row of docs/scale.md's projection."""

    row: Row
    """The compiled step."""
    slots: int
    """Requests side by side."""
    incremental_seconds: float
    """A step of incremental decoding."""
    verify_seconds: float
    """The LLM's pass over the tree."""
    draft_seconds: float
    """The SSM's passes."""

    def speedup(self, tokens_per_step: float) -> float:
        """Over incremental decoding."""
        return tokens_per_step * self.incremental_seconds / (self.verify_seconds + self.draft_seconds)


def project(row: Row, slots: int) -> Projection:
    """What a compiled row's step takes with so many slots."""
    llm, ssm, chip = PAPER_MODELS[row.llm], PAPER_MODELS[row.ssm], TPUS[row.target]
    expansion = parse_expansion(PAPER_TREE)
    weights = sum(weights_of(llm, ITEMSIZE)) / row.devices
    cache = cache_bytes_read(llm, slots) / row.devices

    def llm_pass(rows: int) -> float:
        # The compiled step exchanges the activations of its own rows, twice: to the sum and back.
        exchanged = 2 * row.collective_bytes * (row.devices - 1) / row.devices
        share = rows * slots / ((1 + expansion.num_nodes) * SLOTS)
        exchange = exchanged * share / chip.exchange_bytes_per_second
        exchange += EXCHANGE_SECONDS * sum(row.collectives.values())
        return chip_seconds(chip, weights, cache, rows * slots, from_host=row.offload) + exchange

    small, small_cache = weights_of(ssm, ITEMSIZE), cache_bytes_read(ssm, slots)
    draft = sum(
        chip_seconds(chip, small.layers, small_cache, layer_rows * slots)
        + chip_seconds(chip, small.head, 0.0, head_rows * slots)
        for layer_rows, head_rows in draft_passes(expansion)
    )
    return Projection(row, slots, llm_pass(1), llm_pass(1 + expansion.num_nodes), draft)


def print_projections(rows: Sequence[Row]) -> None:
    """The table of docs/scale.md."""
    print(
        "| LLM | target | devices | slots | incremental step | LLM's pass over the tree | SSM's passes "
        "| speed-up, greedy | speed-up, stochastic |"
    )
    print("|---" * 9 + "|")
    for row in rows:
        for slots in (1, 16):
            found = project(row, slots)
            low_high = [
                f"{found.speedup(middle):.2f} ({found.speedup(low):.2f}-{found.speedup(high):.2f})"
                for low, middle, high in PAPER_TOKENS.values()
            ]
            where = f"{row.target}, offloaded" if row.offload else row.target
            print(
                f"| {row.llm} | {where} | {row.devices} | {slots} | {found.incremental_seconds * 1e3:.2f} ms "
                f"| {found.verify_seconds * 1e3:.2f} ms | {found.draft_seconds * 1e3:.2f} ms | {' | '.join(low_high)} |"
            )


class PassTimes:
    """Seconds of one model's passes on the machine at hand, each timed alone, with no step of decoding around it."""

    def __init__(self, config: ModelConfig, params: Params, *, num_slots: int) -> None:
        self._config, self._params, self._num_slots = config, params, num_slots
        self._known: dict[int, float] = {}

    def seconds(self, rows: int) -> float:
        """Of a pass with its head; the least of a few."""
        if rows not in self._known:
            with tempfile.TemporaryDirectory() as folder:  # nothing from earlier runs
                found = pass_seconds(
                    self._config, self._params, [rows], num_slots=self._num_slots, page_size=PAGE_SIZE,
                    dtype=jnp.float32, folder=Path(folder),
                )  # fmt: skip
            self._known[rows] = found[rows]
        return self._known[rows]


def predicted_speedup(llm: PassTimes, ssm: PassTimes, expansion: TreeShape, tokens_per_step: float) -> float:
    """By the same formula, with passes as timed here."""
    draft = sum(ssm.seconds(rows) for rows, _ in draft_passes(expansion))
    return tokens_per_step * llm.seconds(1) / (llm.seconds(1 + expansion.num_nodes) + draft)


def check(prompts: Path | None, *, limit: int, max_tokens: int, trees: Sequence[str]) -> list[dict[str, Any]]:
    """Predicted and measured speed-up of the default model with the SSM that ships, by tree; none is ever cut."""
    from specinfer_jax.bench import run_bench
    from specinfer_jax.compile_cache import enable_compile_cache
    from specinfer_jax.llm import LLM
    from specinfer_jax.opened import choose_dtype, open_model
    from specinfer_jax.prompts import DEFAULT_PROMPTS, read_prompts

    enable_compile_cache()
    entries = list(DEFAULT_PROMPTS[:limit]) if prompts is None else read_prompts(prompts, limit=limit)
    model = open_model(DEFAULT_MODEL, dtype=choose_dtype("float32"))
    found, passes = [], None
    for tree in trees:
        speculation = Speculation(tree=tree, ngram=False, adaptive=False)
        if passes is None:
            engine = LLM(model, speculation=speculation, max_model_len=512).engine
            ssm = engine.program.speculators[0].cached_model
            assert ssm is not None, "an SSM ships for the default model"
            passes = (
                PassTimes(engine.program.llm, engine.params.llm, num_slots=engine.num_slots),
                PassTimes(ssm.config, engine.params.speculators[0], num_slots=engine.num_slots),
            )
        result = run_bench(
            model, entries, speculation=speculation, max_tokens=max_tokens, repeats=1, max_chain_depth=1,
            max_model_len=512,
        )  # fmt: skip
        measured = next(row for row in result.rows if row.mode == "tree")
        predicted = predicted_speedup(*passes, parse_expansion(tree), measured.tokens_per_step)
        found.append(
            {
                "tree": tree, "tokens_per_step": measured.tokens_per_step, "measured": measured.speedup,
                "predicted": predicted, "error": predicted / measured.speedup - 1,
            }
        )  # fmt: skip
        line = ", ".join(
            f"{key} {value if isinstance(value, str) else f'{value:.3f}'}" for key, value in found[-1].items()
        )
        print(line, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was asked for; with `--check` ends with an error where a prediction is off by more than a fifth."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.projection", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, help="what `python -m benchmarks.scale --json` wrote")
    parser.add_argument(
        "--check", action="store_true", help="compare a step made up of timed passes with decoding here"
    )
    parser.add_argument("--prompts", type=Path, help="for the comparison; default: a few of the project's own")
    parser.add_argument("--limit", type=int, default=8, help="first prompts of the file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--trees", type=lambda text: text.split(";"), default=["1", "1,1,1", "2,2,1"],
                        help="separated by semicolons")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the comparison here")
    options = parser.parse_args(arguments)
    if (options.rows is None) != options.check:
        parser.error("give --rows FILE or --check")
    if options.rows is not None:
        return print_projections(read_rows(options.rows))
    found = check(options.prompts, limit=options.limit, max_tokens=options.max_tokens, trees=options.trees)
    if options.json is not None:
        text = json.dumps({"machine": describe_machine(), "trees": found}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    if any(abs(row["error"]) > 0.2 for row in found):
        raise SystemExit("a prediction is off by more than a fifth")


if __name__ == "__main__":
    main()
