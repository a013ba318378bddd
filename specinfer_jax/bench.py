"""Incremental decoding, sequence speculation and tree speculation on the same prompts, alternating, in one run.

result = run_bench(model, read_prompts("prompts.jsonl"), speculation=Speculation(), max_tokens=64)
for row in result.rows:
    print(row.mode, row.tokens_per_step, row.tokens_per_second, row.speedup)
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specinfer_jax.bench_contenders import MAX_CHAIN_DEPTH, Contender, Mode, make_contenders
from specinfer_jax.config import SamplingParams, Speculation
from specinfer_jax.errors import ConfigError, PromptError
from specinfer_jax.metrics import RequestStats, total
from specinfer_jax.prompts import PromptEntry

if TYPE_CHECKING:
    from specinfer_jax.opened import Model
    from specinfer_jax.serving.engine import Engine

_TRIAL_PROMPTS = 4
"""First prompts, on which the depth of an SSM's chain is chosen."""


@dataclasses.dataclass(frozen=True)
class BenchRow:
    """One mode's figures over all prompts, or over those of one category."""

    mode: Mode
    """incremental; sequence: the best chain of one speculator; tree: all speculators."""
    category: str | None
    """None: all prompts."""
    speculators: list[str]
    """Who proposed."""
    prompts: int
    """Number of prompts."""
    tokens: int
    """Tokens of one repeat."""
    tokens_per_step: float
    """Tokens per LLM pass, bonus token included."""
    tokens_per_second: float
    """Of decoding (prefill not counted); median of the repeats."""
    speedup: float
    """tokens_per_second over that of incremental decoding in the same repeat; median of the repeats."""
    speedup_min: float
    """The least of the repeats."""
    speedup_max: float
    """The most."""
    decode_seconds: float
    """Median of the repeats."""
    prefill_seconds: float
    """Median of the repeats."""
    acceptance_by_position: list[float | None]
    """Share of the trees that reached depth d + 1 of which d + 1 tokens were kept."""
    equal_ids: int | None
    """Prompts whose ids equal incremental decoding's in every repeat; None where only the law must be equal."""


class BenchDifference(NamedTuple):
    """A prompt whose ids are not those of incremental decoding."""

    mode: Mode
    """Of the other ids."""
    prompt: int
    """Its number, from 0."""
    position: int
    """First generated token that differs."""


@dataclasses.dataclass(frozen=True)
class BenchResult:
    """All that a run found out."""

    rows: list[BenchRow]
    """For all prompts; then, if asked for, for every category."""
    differences: list[BenchDifference]
    """Empty if speculation changed no token, or if only the law must be equal."""
    settings: dict[str, Any]
    """Model, device and what was asked for."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        differences = [difference._asdict() for difference in self.differences]
        return {"rows": [vars(row) for row in self.rows], "differences": differences, "settings": self.settings}


class _Block(NamedTuple):
    """Prompts that are decoded side by side; all of one category."""

    category: str | None
    prompts: list[int]


class _Measured(NamedTuple):
    """One block decoded once by one contender."""

    block: _Block
    ids: list[list[int]]
    stats: list[RequestStats]
    decode_seconds: float
    prefill_seconds: float


def run_bench(
    model: "Model", prompts: Sequence[PromptEntry], *, speculation: Speculation, max_tokens: int | None = 64,
    temperature: float | int = 0.0, repeats: int = 3, chat: bool | None = None, by_category: bool = False,
    dtype: str = "auto", max_model_len: int | None = None, max_num_seqs: int | None = None,
    max_chain_depth: int = MAX_CHAIN_DEPTH, on_progress: Callable[[int, int], None] = lambda done, all: None,
) -> BenchResult:  # fmt: skip
    """Decode every prompt in every mode, the modes in turn, prompt by prompt.

    Sequence speculation gets the same speculators one child wide, an SSM's chain at the depth that is fastest on the
    first prompts; of several speculators, the chain that turned out fastest.
    Weights are shared by all modes; compilation and a first pass come before the clock starts.

    Args:
      model: a loaded LLM.
      prompts: texts, shorter than the context.
      speculation: who proposes trees.
      max_tokens: tokens per prompt, fewer where the model ends its answer; None: up to the context's end.
      temperature: of all requests; above 0 prompt i has seed i, so that naive sampling must give incremental
        decoding's tokens, and multi-step speculative sampling its law.
      repeats: times that all is measured.
      chat: wrap prompts as user messages; None: if the model has a chat template.
      by_category: rows for every category too.
      dtype, max_model_len, max_num_seqs: as for `LLM`.
      max_chain_depth: longest chain of an SSM that is tried.
      on_progress: called with the number of answers so far and in all.

    Raises:
      ConfigError: nothing to compare, or no repeats.
      PromptError: a prompt is empty or too long.
    """
    from specinfer_jax.opened import choose_max_model_len

    if not speculation.enabled:
        raise ConfigError("the benchmark compares with speculation; do not switch it off")
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    chat = model.tokenizer.chat_template is not None if chat is None else chat
    sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    encoded = [_encode(model, entry.prompt, chat) for entry in prompts]
    longest = choose_max_model_len(model.config, max_model_len)
    for number, ids in enumerate(encoded, 1):
        if not 0 < len(ids) < longest:
            raise PromptError(
                f"prompt {number} has {len(ids)} tokens; it must have at least 1 and at most {longest - 1}"
            )

    def trial(engine: "Engine") -> float:
        blocks = _blocks(prompts[:_TRIAL_PROMPTS], engine.num_slots, by_category=False)
        return sum(_measure(engine, model, block, encoded, sampling).decode_seconds for block in blocks)

    contenders = make_contenders(
        model, speculation, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        max_chain_depth=max_chain_depth, seconds=trial,
    )  # fmt: skip
    engine = contenders[0].engine
    blocks = _blocks(prompts, engine.num_slots, by_category)
    measured: list[list[list[_Measured]]] = [[[] for _ in range(repeats)] for _ in contenders]
    done, everything = 0, repeats * len(contenders) * len(prompts)
    for repeat in range(repeats):
        for number, block in enumerate(blocks):
            for turn in range(len(contenders)):
                c = (turn + number + repeat) % len(contenders)  # nobody is always first
                result = _measure(contenders[c].engine, model, block, encoded, sampling)
                measured[c][repeat].append(result)
                done += len(block.prompts)
                on_progress(done, everything)
    settings = {
        "model": model.location, "chat": chat, "max_tokens": max_tokens, "repeats": repeats,
        "prompts": len(prompts), "max_num_seqs": engine.num_slots, "max_model_len": engine.max_model_len,
        "tree": speculation.tree, "temperature": sampling.temperature,
        "ssms": "default" if speculation.ssms is None else [getattr(s, "location", str(s)) for s in speculation.ssms],
        **_device_settings(),
    }  # fmt: skip
    has_equal_ids = sampling.is_greedy or not contenders[-1].engine.program.keeps_draws
    return _result(contenders, measured, settings, by_category, has_equal_ids)


def _encode(model: "Model", prompt: str, chat: bool) -> list[int]:
    if chat:
        return model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    return model.tokenizer.encode(prompt)


def _blocks(prompts: Sequence[PromptEntry], size: int, by_category: bool) -> list[_Block]:
    groups: dict[str | None, list[int]] = {}
    for i, entry in enumerate(prompts):
        groups.setdefault(entry.category if by_category else None, []).append(i)
    return [
        _Block(category, group[start : start + size])
        for category, group in groups.items()
        for start in range(0, len(group), size)
    ]


def _measure(
    engine: "Engine", model: "Model", block: _Block, encoded: Sequence[list[int]], sampling: SamplingParams
) -> _Measured:
    from specinfer_jax.serving.request import EngineRequest

    stop_ids = model.stop_ids(sampling)
    max_tokens = sampling.max_tokens or engine.max_model_len
    requests = [EngineRequest(encoded[i], max_tokens, stop_ids, sampling, seed=i) for i in block.prompts]
    ids: list[list[int]] = [[] for _ in requests]
    stats: list[RequestStats] = []
    began = time.perf_counter()
    for progress in engine.run(requests):
        ids[progress.index] += progress.new_token_ids
        if progress.stats is not None:
            stats.append(progress.stats)
    elapsed = time.perf_counter() - began
    prefill = sum(s.prefill_seconds for s in stats)
    return _Measured(block, ids, stats, elapsed - prefill, prefill)


def _result(
    contenders: Sequence[Contender], measured: Sequence[Sequence[Sequence[_Measured]]], settings: dict[str, Any],
    by_category: bool, has_equal_ids: bool = True,
) -> BenchResult:  # fmt: skip
    def seconds(c: int) -> float:
        return sum(block.decode_seconds for repeat in measured[c] for block in repeat)

    chains = [c for c, contender in enumerate(contenders) if contender.mode == "sequence"]
    shown = [0, min(chains, key=seconds), len(contenders) - 1]
    categories: list[str | None] = [None]
    if by_category:
        categories += dict.fromkeys(m.block.category for m in measured[0][0] if m.block.category is not None)
    rows = [
        _row(contenders[c], _of_category(measured[c], category), _of_category(measured[0], category), category)
        for category in categories
        for c in shown
    ]
    if not has_equal_ids:
        return BenchResult([dataclasses.replace(row, equal_ids=None) for row in rows], [], settings)
    differences = [d for c in shown[1:] for d in _differences(contenders[c].mode, measured[c], measured[0])]
    return BenchResult(rows, differences, settings)


def _of_category(repeats: Sequence[Sequence[_Measured]], category: str | None) -> list[list[_Measured]]:
    return [[m for m in repeat if category is None or m.block.category == category] for repeat in repeats]


def _row(
    contender: Contender, mine: Sequence[Sequence[_Measured]], plain: Sequence[Sequence[_Measured]],
    category: str | None,
) -> BenchRow:  # fmt: skip
    def rate(repeat: Iterable[_Measured]) -> float:
        blocks = list(repeat)
        return sum(s.tokens for m in blocks for s in m.stats) / sum(m.decode_seconds for m in blocks)

    everything = total([s for repeat in mine for m in repeat for s in m.stats])
    ratios = [rate(a) / rate(b) for a, b in zip(mine, plain, strict=True)]
    prompts = sum(len(m.block.prompts) for m in mine[0])
    unequal = {d.prompt for d in _differences(contender.mode, mine, plain)}
    return BenchRow(
        mode=contender.mode,
        category=category,
        speculators=[speculator.name for speculator in contender.engine.program.speculators],
        prompts=prompts,
        tokens=sum(s.tokens for m in mine[0] for s in m.stats),
        tokens_per_step=everything.tokens_per_step or 0.0,
        tokens_per_second=statistics.median(rate(repeat) for repeat in mine),
        speedup=statistics.median(ratios),
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        decode_seconds=statistics.median(sum(m.decode_seconds for m in repeat) for repeat in mine),
        prefill_seconds=statistics.median(sum(m.prefill_seconds for m in repeat) for repeat in mine),
        acceptance_by_position=everything.acceptance_by_position,
        equal_ids=prompts - len(unequal),
    )


def _differences(
    mode: Mode, mine: Sequence[Sequence[_Measured]], plain: Sequence[Sequence[_Measured]]
) -> list[BenchDifference]:
    """Every prompt at most once."""
    right = {i: ids for m in plain[0] for i, ids in zip(m.block.prompts, m.ids, strict=True)}
    found: dict[int, int] = {}
    for repeat in mine:
        for m in repeat:
            for i, ids in zip(m.block.prompts, m.ids, strict=True):
                if ids != right[i] and i not in found:
                    pairs = enumerate(zip(ids, right[i], strict=False))
                    shorter = min(len(ids), len(right[i]))
                    found[i] = next((n for n, (a, b) in pairs if a != b), shorter)
    return [BenchDifference(mode, i, found[i]) for i in sorted(found)]


def _device_settings() -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    return {"device": f"{device.platform} ({device.device_kind})", "jax": jax.__version__}
