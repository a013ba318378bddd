"""The measurements behind benchmarks.paper: success of the SSM's top k, and tokens per LLM pass by tree and rule."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper_counted import Steps, answer_all, count_steps, ranks_of
from benchmarks.paper_draws import draw_ranks_of
from specinfer_jax import LLM, Model, SamplingParams, Speculation
from specinfer_jax.metrics import RequestStats
from specinfer_jax.speculation.rules import IID, MSS, MSS_RENORMALIZED, NAIVE, TOP_K, WITHOUT_REPLACEMENT
from specinfer_jax.tree.expand import parse_expansion
from train.answers import Answer
from train.evaluate import TOP

PROMPT_SETS = {
    "alpaca": "Alpaca", "cp_awesome": "CP (stand-in)", "webqa": "WebQA", "cip_proxy": "CIP (stand-in)", "piqa": "PIQA",
}  # fmt: skip
"""File name without .jsonl, and what it stands for."""
WIDTHS = (1, 2, 3, 4, 5)
SSM_TREES = {1: "3,1,1,1", 2: "2,1,1", 3: "1,1,1,1", 4: "1,1,1"}
"""Each SSM's tree by the number of SSMs: 12 nodes together."""
_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Rule:
    """One row of a table: how trees are grown and verified."""

    name: str
    """As in the table."""
    tree: str
    """Children per node at each level, of every SSM."""
    temperature: float
    """Of all requests."""
    children: str = WITHOUT_REPLACEMENT
    """How children are chosen."""
    verification: str = MSS_RENORMALIZED
    """How they are verified."""
    ssms: int = 1
    """How many of the SSMs take part."""


def rules_of_table_2(temperature: float) -> list[Rule]:
    """Widths 1 to 5 at the third level of the paper's tree, greedy and stochastic by MSS and by naive sampling."""
    return [
        Rule(f"{name}, width {width}", f"1,1,{width},1,1,1,1,1", t, *pair)
        for name, t, pair in (
            ("greedy", 0.0, (TOP_K, NAIVE)),
            ("stochastic NS", temperature, (TOP_K, NAIVE)),
            ("stochastic MSS", temperature, (WITHOUT_REPLACEMENT, MSS_RENORMALIZED)),
        )
        for width in WIDTHS
    ]


def rules_of_table_3(tree: str, temperature: float) -> list[Rule]:
    """Naive against multi-step speculative sampling: the four exact pairs."""
    pairs = {
        "NS, top-k children": (TOP_K, NAIVE),
        "NS, i.i.d. children": (IID, NAIVE),
        "MSS, i.i.d. children": (IID, MSS),
        "MSS, without replacement": (WITHOUT_REPLACEMENT, MSS_RENORMALIZED),
    }
    return [Rule(name, tree, temperature, *pair) for name, pair in pairs.items()]


def rules_of_wide(tree: str, temperature: float) -> list[Rule]:
    """`tree="wide"` without n-grams, greedy and stochastic."""
    return [
        Rule("greedy, wide", tree, 0.0, TOP_K, NAIVE),
        Rule("stochastic NS, wide", tree, temperature, TOP_K, NAIVE),
        Rule("stochastic MSS, wide", tree, temperature),
    ]


def rules_of_ssm_counts(count: int, temperature: float) -> list[Rule]:
    """1 to 4 SSMs with 12 nodes together, greedy and stochastic."""
    return [
        Rule(f"{name}, {m} SSM{'s' if m > 1 else ''}", SSM_TREES[m], t, ssms=m)
        for name, t in (("greedy", 0.0), ("stochastic", temperature))
        for m in range(1, min(count, len(SSM_TREES)) + 1)
    ]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One rule on one prompt set."""

    rule: str
    """Row of the table."""
    prompt_set: str
    """Column of the table."""
    value: float
    """New tokens of all prompts over LLM passes of all prompts, bonus tokens included."""
    low: float
    """Lower end of the 95 % interval (bootstrap over prompts)."""
    high: float
    """Upper end."""
    tokens: tuple[int, ...]
    """New tokens of each prompt."""
    steps: tuple[int, ...]
    """LLM passes of each prompt."""


def pooled(tokens: Sequence[int], steps: Sequence[int]) -> tuple[float, float, float]:
    """(tokens over steps, lower and upper end of its 95 % interval)."""
    tokens_N, steps_N = np.array(tokens), np.array(steps)
    chosen = np.random.default_rng(0).integers(len(tokens_N), size=(_RESAMPLES, len(tokens_N)))
    ratios = tokens_N[chosen].sum(axis=1) / steps_N[chosen].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(tokens_N.sum() / steps_N.sum()), float(low), float(high)


def cell(rule: str, prompt_set: str, stats: Sequence[RequestStats | Steps]) -> Cell:
    """Tokens per step of one rule on one prompt set."""
    tokens, steps = (tuple(getattr(s, name) for s in stats) for name in ("tokens", "steps"))
    return Cell(rule, prompt_set, *pooled(tokens, steps), tokens, steps)


def with_pool(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and for every rule one over all prompt sets."""
    result = list(cells)
    for rule in dict.fromkeys(c.rule for c in cells):
        own = [c for c in cells if c.rule == rule]
        tokens, steps = (tuple(n for c in own for n in getattr(c, name)) for name in ("tokens", "steps"))
        result.append(Cell(rule, "all", *pooled(tokens, steps), tokens, steps))
    return result


@dataclasses.dataclass(frozen=True)
class Measuring:
    """What all tables are measured with."""

    model: Model
    """The LLM."""
    prompt_sets: Mapping[str, list[list[int]]]
    """Token ids of prompts, by set."""
    max_tokens: int
    """Of every answer."""
    max_num_seqs: int
    """Prompts side by side."""
    max_model_len: int
    """Most tokens of prompt and answer."""
    folder: Path | None = None
    """Keeps the LLM's answers for the next run."""
    decode_limit: int | None = None
    """Prompts of each set, from its start, for rules that must be decoded; None: all."""
    stochastic_limit: int | None = None
    """Prompts of each set, from its start, above temperature 0; None: all."""
    _ranks: dict[tuple[int, str, float], list[np.ndarray]] = dataclasses.field(default_factory=dict)
    """What `ranks` has counted."""

    def answers(self, name: str, temperature: float) -> list[Answer]:
        """The LLM's answers to one prompt set."""
        prompts = self.prompt_sets[name][: self.stochastic_limit if temperature > 0 else None]
        return answer_all(
            self.model, prompts, name=name, temperature=temperature, max_tokens=self.max_tokens,
            max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len, folder=self.folder,
        )  # fmt: skip

    def ranks(self, ssm: Model, name: str, temperature: float) -> list[np.ndarray]:
        """`ranks_of` the LLM's answers to one prompt set, counted once for all tables."""
        key = id(ssm), name, temperature
        if key not in self._ranks:
            self._ranks[key] = ranks_of(ssm, self.answers(name, temperature), max_model_len=self.max_model_len)
        return self._ranks[key]


def is_counted(rule: Rule) -> bool:
    """Whether the rule's steps follow from the LLM's answers (paper_counted.py), or their law does (paper_draws.py)."""
    follows = rule.temperature == 0 or (rule.children, rule.verification) == (TOP_K, NAIVE)
    return follows or _counts_draws(rule)


def _counts_draws(rule: Rule) -> bool:
    pair = rule.children, rule.verification
    return rule.temperature > 0 and pair == (WITHOUT_REPLACEMENT, MSS_RENORMALIZED) and rule.ssms == 1


def tokens_per_step(
    measuring: Measuring, ssms: Sequence[Any], rules: Sequence[Rule], *, report: Callable[[Cell], None],
    decodes: bool = False,
) -> list[Cell]:  # fmt: skip
    """Every rule on every prompt set, trees verified whole; prompt i of a set has seed i.

    Args:
      measuring: LLM, prompts, sizes.
      ssms: who proposes; loaded models.
      rules: rows of the table.
      report: gets every cell as it comes.
      decodes: decode also where counting on answers gives the same.
    """
    counted = [rule for rule in rules if is_counted(rule) and not decodes]
    found: dict[tuple[str, str], Cell] = {}

    def add(rule: Rule, name: str, steps: Sequence[RequestStats | Steps]) -> None:
        found[rule.name, name] = cell(rule.name, name, steps)
        report(found[rule.name, name])

    for temperature in dict.fromkeys(rule.temperature for rule in counted):
        for name in measuring.prompt_sets:
            here = [rule for rule in counted if rule.temperature == temperature]
            by_rank = [measuring.ranks(ssm, name, temperature) for ssm in ssms]
            drawn = [rule for rule in here if _counts_draws(rule)]
            if drawn:
                answers = measuring.answers(name, temperature)
                by_draw = draw_ranks_of(
                    measuring.model, ssms[0], answers, temperature=temperature, max_model_len=measuring.max_model_len,
                    draws=max(max(parse_expansion(rule.tree).widths) for rule in drawn),
                )  # fmt: skip
            for rule in here:
                own = [by_draw] if rule in drawn else by_rank[: rule.ssms]
                shapes = [parse_expansion(rule.tree)] * len(own)
                add(rule, name, [count_steps(of_answer, shapes) for of_answer in zip(*own, strict=True)])
    for rule in rules:
        if rule not in counted:
            for name, stats in _decoded(measuring, ssms, rule):
                add(rule, name, stats)
    return [found[rule.name, name] for rule in rules for name in measuring.prompt_sets]


def _decoded(measuring: Measuring, ssms: Sequence[Any], rule: Rule) -> Iterator[tuple[str, list[RequestStats]]]:
    speculation = Speculation(
        ssms=ssms[: rule.ssms], tree=rule.tree, ngram=False, adaptive=False, children=rule.children,
        verification=rule.verification,
    )  # fmt: skip
    llm = LLM(
        measuring.model, speculation=speculation, max_num_seqs=measuring.max_num_seqs,
        max_model_len=measuring.max_model_len,
    )  # fmt: skip
    for name, prompts in measuring.prompt_sets.items():
        prompts = prompts[: measuring.decode_limit]
        params = [
            SamplingParams(temperature=rule.temperature, seed=i, max_tokens=measuring.max_tokens)
            for i in range(len(prompts))
        ]
        outputs = llm.generate(prompts, params)
        yield name, [output.stats for output in outputs if output.stats is not None]


@dataclasses.dataclass(frozen=True)
class Success:
    """How often the LLM's token is among the SSM's k likeliest (SpecInfer, table 1)."""

    prompt_set: str
    """Column of the table."""
    decoding: str
    """"greedy" or "stochastic"."""
    tokens: int
    """Tokens of the LLM looked at."""
    top_k: tuple[float, ...]
    """Shares for k = 1 to 5."""


def top_k_success(
    measuring: Measuring, ssm: Model, *, temperature: float, report: Callable[[Success], None]
) -> list[Success]:
    """Let the LLM answer every prompt, then ask the SSM at every token of the answers."""
    found = []
    for name in measuring.prompt_sets:
        for decoding, t in (("greedy", 0.0), ("stochastic", temperature)):
            rank_X = np.concatenate(measuring.ranks(ssm, name, t))
            top_k = tuple(float((rank_X < k).mean()) for k in range(1, TOP + 1))
            found.append(Success(name, decoding, len(rank_X), top_k))
            report(found[-1])
    return found
