"""Traversal verification against multi-step speculative sampling (MSS) on the same trees: exact? more tokens a step?

python -m benchmarks.traversal
python -m benchmarks.traversal --model smollm2-135m-instruct --prompts PROMPTS.jsonl

MSS (SpecInfer, Algorithm 2) walks down from the root. Traversal verification (arXiv 2505.12398; on a chain it is block
verification, arXiv 2403.10444) judges the first leaf by the weight of its whole path, takes it off if it is rejected,
and goes on with its next sibling or, where none is left, with its parent. Both are computed as *laws*: the exact
probability of every accepted path of a given tree, without random numbers. First all draws from small tables are
enumerated, and the law of the tokens that come out is compared with the target's. Then trees are sampled, from random
tables or from a model and its first layers, and the expected tokens of a step given each tree are compared.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.model_table import ModelTable, Node, softmax
from benchmarks.peers import encode_prompts
from specinfer_jax.errors import SpecInferError
from specinfer_jax.opened import Model, open_model
from specinfer_jax.prompts import read_prompts

Draws = Mapping[Node, Sequence[tuple[int, np.ndarray]]]
"""(token, q_V it was drawn from) of every draw at every node, in the order drawn."""
Table = Callable[[Node], np.ndarray]
"""float64 `[V]`: distribution of the token behind a node."""
Ask = Callable[[Node, Draws], np.ndarray | None]
"""q_V of the next draw at a node, given all draws before; None where the node has all its draws."""
TREES = ((1, 1, 3, 1, 1), (2, 2, 1), (3, 2), (1,) * 4, (1,) * 8)
HOW = ("i.i.d.", "distinct", "top-k")
"""Children of one SSM: with replacement, without, or its likeliest ones without randomness (q one-hot)."""
SSM_TOP = 64
"""Likeliest ids of a model's SSM that its children are drawn from."""
Outcome = tuple[Node, float, np.ndarray, int]
"""One way in which a step can end: accepted path, probability given the tree, law `[V]` of the one token behind the
path, and draws rejected before, each of which costs one residual over the whole vocabulary."""


def mss_law(draws: Draws, target: Table, node: Node = (), reach: float = 1.0, rejected: int = 0) -> Iterator[Outcome]:
    """Ends of multi-step speculative sampling at or below a node that is reached with probability `reach`."""
    p_V = target(node)
    for token, q_V in draws.get(node, ()):
        accept = min(1.0, float(p_V[token] / q_V[token]))
        if accept > 0:
            yield from mss_law(draws, target, (*node, token), reach * accept, rejected)
        reach, rejected = reach * (1 - accept), rejected + 1
        left_V = np.maximum(p_V - q_V, 0)
        if reach == 0 or not left_V.any():  # certain, but for rounding
            return
        p_V = left_V / left_V.sum()
    yield node, reach, p_V, rejected


def traversal_law(
    draws: Draws, target: Table, node: Node = (), weight: float = 1.0, reach: float = 1.0, rejected: int = 0
) -> Generator[Outcome, None, tuple[float, int]]:
    """Ends of traversal verification at or below a node that is reached, undecided, with probability `reach`.

    Given the node, an end at or below it must have probability `weight`, and the tokens behind it the target's law:
    `weight * p_V` is still owed. Returns, once exhausted, the probability that all was rejected, and `rejected` there.
    """
    p_V = target(node)
    for token, q_V in draws.get(node, ()):
        child = min(1.0, float(weight * p_V[token] / q_V[token]))
        if child > 0:
            reach, rejected = yield from traversal_law(draws, target, (*node, token), child, reach, rejected)
        rejected += 1
        owed_V = np.maximum(weight * p_V - q_V, 0)
        owed = float(owed_V.sum())
        if reach == 0 or owed == 0:
            return reach, rejected
        # Over all its tokens a draw is rejected with probability 1 - sum(min(weight * p, q)) = owed + (1 - weight);
        # without the brackets a small `owed` is rounded away where weight is 1.
        weight, p_V = owed / (owed + (1 - weight)), owed_V / owed
    yield node, reach * weight, p_V, rejected
    return reach * (1 - weight), rejected


LAWS: Mapping[str, Callable[[Draws, Table], Iterable[Outcome]]] = {"MSS": mss_law, "traversal": traversal_law}


def all_trees(
    ask: Ask, depth: int, choose: Callable[[np.ndarray], Iterable[int]] = np.flatnonzero, draws: Draws | None = None
) -> Iterator[tuple[float, Draws]]:
    """Every tree, drawn level by level, and its probability; each draw takes the tokens of `choose(q_V)` in turn."""
    draws, level = draws or {}, [()]
    for _ in range(depth):
        for node in level:
            if (q_V := ask(node, draws)) is not None:
                for token in choose(q_V):
                    more = {**draws, node: (*draws.get(node, ()), (int(token), q_V))}
                    yield from all_trees(ask, depth, choose, more)
                return
        level = [(*node, token) for node in level for token in dict.fromkeys(t for t, _ in draws.get(node, ()))]
    yield float(np.prod([q_V[token] for drawn in draws.values() for token, q_V in drawn])), draws


def sample_tree(ask: Ask, depth: int, rng: np.random.Generator) -> Draws:
    """One tree."""
    return next(all_trees(ask, depth, lambda q_V: [rng.choice(len(q_V), p=q_V)]))[1]


def without(q_V: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """q without these tokens, renormalised; zeros if nothing is left."""
    kept_V = q_V.copy()
    kept_V[list(tokens)] = 0
    return kept_V / (kept_V.sum() or 1.0)


def one_hot(q_V: np.ndarray) -> np.ndarray:
    """All mass on the likeliest token."""
    return np.eye(1, len(q_V), int(q_V.argmax()))[0]


def drawing(sources: Callable[[Node, Draws], Sequence[Table]], how: str) -> Ask:
    """Draws at a node come from `sources(node, draws)` in turn, as `how` of `HOW` says for those of one source."""

    def ask(node: Node, draws: Draws) -> np.ndarray | None:
        drawn, tables = draws.get(node, ()), sources(node, draws)
        if len(drawn) >= len(tables):
            return None
        q = tables[len(drawn)]
        own = [token for (token, _), table in zip(drawn, tables, strict=False) if table is q]
        q_V = q(node) if how == "i.i.d." else without(q(node), own)
        return (one_hot(q_V) if how == "top-k" else q_V) if q_V.any() else None

    return ask


def expansion(widths: Sequence[int], q: Table, how: str) -> Ask:
    """`<k1,k2,...>` children of one SSM."""
    return drawing(lambda node, draws: [q] * widths[len(node)], how)


def random_tables(rng: np.random.Generator, V: int, *, spread: float, noise: Sequence[float]) -> list[Table]:
    """A target with rows softmax(spread * normal), and for every s of `noise` a draft softmax(log p + s * normal)."""

    @functools.cache
    def rows(node: Node) -> list[np.ndarray]:
        logits_V = spread * rng.normal(size=V)
        return [softmax(logits_V + s * rng.normal(size=V)) for s in (0, *noise)]

    return [lambda node, i=i: rows(node)[i] for i in range(len(noise) + 1)]


def settings(qa: Table, qb: Table) -> dict[str, tuple[int, Ask]]:
    """Depth and way of drawing of everything that is allowed."""

    def merged(*order: Table) -> Callable[[Node, Draws], Sequence[Table]]:
        def sources(node: Node, draws: Draws) -> Sequence[Table]:  # every SSM goes on below its own proposals
            above = zip(draws[node[:-1]], sources(node[:-1], draws), strict=False) if node else ()
            own = [table for (token, _), table in above if token == node[-1]]
            return [table for table in order if not node or table in own]

        return sources

    def ngram(node: Node) -> np.ndarray:
        return one_hot(qb(node)[::-1])

    def unequal(node: Node, draws: Draws) -> Sequence[Table]:  # by rank, and by the token of a sibling
        siblings = [token for token, _ in draws.get((), ())]
        return [qa] * (2 - siblings.index(node[0]) + (siblings[-1] == 0) if node else 3)

    return {
        "chain <1,1,1>": (3, expansion((1, 1, 1), qa, "i.i.d.")),
        "a: <3,2>, i.i.d.": (2, expansion((3, 2), qa, "i.i.d.")),
        "b: <3,2>, without replacement": (2, expansion((3, 2), qa, "distinct")),
        "c: SSMs A, B, A": (2, drawing(merged(qa, qb, qa), "distinct")),
        "c: SSMs A, B and n-gram (one-hot)": (2, drawing(merged(qa, qb, ngram), "distinct")),
        "c: <3,2>, top-k (one-hot)": (2, expansion((3, 2), qa, "top-k")),
        "d: 0 to 3 grandchildren, i.i.d.": (2, drawing(unequal, "i.i.d.")),
        "d: 0 to 3 grandchildren, distinct": (2, drawing(unequal, "distinct")),
    }


def emitted(law: Callable, trees: Iterable[tuple[float, Draws]], p: Table, depth: int) -> tuple[np.ndarray, float]:
    """Joint law `[V] * (depth + 1)` of the tokens, shorter ends continued by the target, and expected tokens a step."""

    def extend(node: Node, next_V: np.ndarray) -> np.ndarray:
        if len(node) == depth:
            return next_V
        return np.stack([next_V[x] * extend((*node, x), p((*node, x))) for x in range(len(next_V))])

    tokens, mass, joint = 0.0, {}, np.zeros((len(p(())),) * (depth + 1))
    for probability, draws in trees:
        for path, share, next_V, _ in law(draws, p):
            tokens += probability * share * (len(path) + 1)
            mass[path] = mass.get(path, 0) + probability * share * next_V
    for path, next_V in mass.items():
        joint[path] += extend(path, next_V)
    return joint, tokens


def check_exactness(rng: np.random.Generator, *, tables: int) -> bool:
    """Print total variation and expected tokens of every setting on random tables of 3 tokens; are all exact?"""
    found: dict[str, list] = {}
    for _ in range(tables):
        p, qa, qb = random_tables(rng, 3, spread=1.0, noise=(1.0, 1.0))
        for name, (depth, ask) in settings(qa, qb).items():
            trees, (right, _) = list(all_trees(ask, depth)), emitted(mss_law, [(1.0, {})], p, depth)
            results = [emitted(law, trees, p, depth) for law in LAWS.values()]
            found.setdefault(name, []).append([(abs(joint - right).sum() / 2, tokens) for joint, tokens in results])
    print(f"{'setting, V = 3':<34}  TV: MSS  traversal  tokens: MSS  traversal  least ratio")
    for name, rows in found.items():
        tv, tokens = np.moveaxis(np.array(rows), 2, 0)  # each [tables, laws]
        line = "{:8.1e} {:10.1e} {:12.3f} {:10.3f} {:12.4f}"
        print(f"{name:<34}", line.format(*tv.max(axis=0), *tokens.mean(axis=0), (tokens[:, 1] / tokens[:, 0]).min()))
    return bool(max(tv for rows in found.values() for row in rows for tv, _ in row) < 1e-12)


def figures(draws: Draws, target: Table) -> list[float]:
    """Expected tokens of MSS and of traversal on this tree, then their expected rejected draws."""
    ends = [list(law(draws, target)) for law in LAWS.values()]
    tokens = [sum(share * (len(path) + 1) for path, share, *_ in law_ends) for law_ends in ends]
    return tokens + [sum(share * rejected for _, share, _, rejected in law_ends) for law_ends in ends]


def model_steps(
    model: Model, ssm: Model, prompts: Sequence[list[int]], rng: np.random.Generator, options: argparse.Namespace
) -> Iterator[tuple[str, int, list[float]]]:
    """(how, prompt, figures) of `TREES[0]`, some of each kind at every few tokens of answers sampled from the model."""
    rows, longest = len(TREES[0]) + 1, max(map(len, prompts)) + options.max_tokens
    for number, new in enumerate(prompts):
        llm, draft = (ModelTable(m, rows=rows, max_model_len=longest + rows) for m in (model, ssm))

        def q(node: Node, draft: ModelTable = draft) -> np.ndarray:
            cut = max(0, len(draft(node)) - SSM_TOP)
            return without(draft(node), np.argpartition(draft(node), cut)[:cut])

        for step in range(options.max_tokens):
            llm.extend(new)
            draft.extend(new)
            for how in HOW * options.repeats if step % options.every == 0 else ():
                draws = sample_tree(expansion(TREES[0], q, how), len(TREES[0]), rng)
                nodes = [(*node, token) for node, drawn in draws.items() for token, _ in drawn]
                for node in sorted(nodes, key=len, reverse=True):  # a leaf's pass serves all its ancestors
                    llm(node)
                yield how, number, figures(draws, llm)
            new = [int(rng.choice(len(llm(())), p=llm(())))]
            if new[0] in {*model.config.eos_token_ids, *model.tokenizer.eos_token_ids}:
                break


def ratio_interval(over: np.ndarray, under: np.ndarray, group: np.ndarray) -> tuple[float, float]:
    """Ratio of two means and half its 95 % interval (delta method); values of one group are not independent."""
    ratio, group = over.sum() / under.sum(), np.unique(group, return_inverse=True)[1]
    excess, df, z = np.bincount(group, over - ratio * under), max(int(group.max()), 1), 1.959964
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)  # Student's, to two terms
    return float(ratio), float(t * np.sqrt((df + 1) / df * (excess**2).sum()) / under.sum())


def print_row(name: str, steps: Sequence[tuple[int, list[float]]]) -> None:
    """One line of the table, from the figures of every step and the group that each belongs to."""
    group, rows = np.array([number for number, _ in steps]), np.array([values for _, values in steps])
    one, half_one = ratio_interval(rows[:, 0], np.ones(len(rows)), group)
    ratio, half = ratio_interval(rows[:, 1], rows[:, 0], group)
    line = "{:<50} {:5} {:6.3f} +-{:.3f} {:9.3f} {:8.4f} +-{:.4f} {:9.2f} {:9.2f}"
    print(line.format(name, len(rows), one, half_one, one * ratio, ratio, half, *rows[:, 2:].mean(axis=0)), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and measure; 1 if traversal or MSS is not exact where it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traversal", description="Traversal against MSS.")
    parser.add_argument("--tables", type=int, default=10, help="random tables that are enumerated")
    parser.add_argument("--trees", type=int, default=4000, help="trees sampled for every line")
    parser.add_argument("--model", help="name, folder or .gguf file: measure this model and its first layers instead")
    parser.add_argument("--ssm-layers", type=int, default=27)
    parser.add_argument("--prompts", type=Path, help='JSONL file, a "prompt" a line; goes with --model')
    parser.add_argument("--limit", type=int, default=10, help="prompts from the start of the file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=4, help="tokens from one place of an answer to the next")
    parser.add_argument("--repeats", type=int, default=4, help="trees of every kind at one place")
    options, rng = parser.parse_args(arguments), np.random.default_rng(0)
    if (options.model is None) != (options.prompts is None):
        parser.error("--model and --prompts go together")
    exact = options.model is not None or check_exactness(rng, tables=options.tables)
    print(f"\n{'tree, children':<50} trees tokens: MSS 95 % traversal    ratio   95 %   rejected: MSS  traversal")
    if options.model is not None:
        model = open_model(options.model, dtype=jnp.dtype(jnp.float32))
        entries = read_prompts(options.prompts, limit=options.limit)
        prompts = encode_prompts(model.tokenizer, [entry.prompt for entry in entries])
        ssm = model.first_layers(min(options.ssm_layers, model.config.num_layers))
        steps = list(model_steps(model, ssm, prompts, rng, options))
        for how in HOW:
            print_row(f"{TREES[0]} {how}", [(number, values) for kind, number, values in steps if kind == how])
        return 0
    for widths, how, V, noise in itertools.product(TREES, HOW[:2], (8, 50), (0.5, 1.0, 2.0)):
        if how == HOW[0] or max(widths) > 1:  # one child is drawn alike with and without replacement
            tables = (random_tables(rng, V, spread=2.0, noise=(noise,)) for _ in range(options.trees))
            steps = [figures(sample_tree(expansion(widths, q, how), len(widths), rng), p) for p, q in tables]
            print_row(f"{widths} {how}, V {V}, noise {noise}", list(enumerate(steps)))
    return int(not exact)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
