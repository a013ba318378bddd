"""The best trees of several SSMs together, counted on the LLM's own answers.

python -m train.forest out/boost/ssm-1 out/boost/ssm-2 --answers out/answers --held-out 0.03 --nodes 32

Acceptance rates of every SSM alone do not tell what they get right in common. Here every token of an answer is the root
of a step once: an SSM's tree holds the answer's next tokens as far as their ranks form a path in it, and the merged
tree as far as the best of them (SpecInfer, Definition 3.2). Nodes are taken one by one, each where it lets the most
steps commit one token more; so a set of SSMs and a single one are compared at equal numbers of nodes, each at its best.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import SpecInferError
from specinfer_jax.opened import open_model
from specinfer_jax.tree.optimal import WIDE_NODES
from specinfer_jax.tree.shape import TreeShape
from train.answers import read_answers, split_answers
from train.evaluate import answer_ranks
from train.export import open_finished
from train.packing import BatchPlan

MAX_DEPTH = 16
"""Most levels of a tree."""
_NO_RANK = np.iinfo(np.int32).max
ROWS, TOKENS = 4, 512

Ranks = Mapping[str, np.ndarray]
"""By answer id: how many ids an SSM holds for likelier than each response token (`train.evaluate.answer_ranks`)."""


class Forest(NamedTuple):
    """Trees of some SSMs that are verified together."""

    shapes: tuple[TreeShape | None, ...]
    """Of every SSM; None: it has no node."""
    tokens_per_step: float
    """Of the merged tree, bonus token included, on the answers that it was chosen for."""


class _Growing:
    """One SSM's tree, and how far along it every step gets."""

    def __init__(self, rank_T: np.ndarray, padding: int) -> None:
        self.rank_T = np.concatenate([rank_T, np.full(padding, _NO_RANK, np.int32)])
        self.children: list[list[int]] = [[]]
        self.depth = [0]
        steps = len(rank_T)
        self.node_T, self.depth_T = np.zeros(steps, np.int64), np.zeros(steps, np.int64)
        self.next_T = np.arange(steps)
        """Index of the token that the step's next node has to be."""

    def gains(self, covered_T: np.ndarray) -> np.ndarray:
        """By node: steps that commit one token more if it gets another child."""
        count_n = np.array([len(children) for children in self.children])
        is_next_T = self.rank_T[self.next_T] == count_n[self.node_T]
        gain_n = np.bincount(self.node_T[is_next_T & (self.depth_T == covered_T)], minlength=len(self.children))
        return np.where(np.array(self.depth) < MAX_DEPTH, gain_n, -1)

    def add_child(self, node: int) -> None:
        """Give the node its next child; steps whose token that is move on."""
        rank, new = len(self.children[node]), len(self.children)
        self.children[node].append(new)
        self.children.append([])
        self.depth.append(self.depth[node] + 1)
        moves_T = (self.node_T == node) & (self.rank_T[self.next_T] == rank)
        self.node_T[moves_T] = new
        self.depth_T[moves_T] += 1
        self.next_T[moves_T] += 1

    def shape(self) -> TreeShape | None:
        """None without a node."""
        levels, row = [], [0]
        while any(self.children[node] for node in row):
            levels.append(tuple(len(self.children[node]) for node in row))
            row = [child for node in row for child in self.children[node]]
        return TreeShape(tuple(levels)) if levels else None


def grow_forest(ranks: Sequence[Ranks], *, max_nodes: int = WIDE_NODES) -> Forest:
    """Trees with so many nodes in all that commit the most tokens per step, taken greedily.

    Args:
      ranks: of every SSM, on the same answers.
      max_nodes: speculated nodes of all trees together.
    """
    # An answer's end stops every path: nothing is known about what the LLM would write behind it.
    keys = list(ranks[0])
    end = np.array([_NO_RANK], np.int32)
    joined = [np.concatenate([part for key in keys for part in (own[key].astype(np.int32), end)]) for own in ranks]
    is_token_T = joined[0] != _NO_RANK
    trees = [_Growing(rank_T, MAX_DEPTH) for rank_T in joined]
    covered_T = np.zeros(len(joined[0]), np.int64)
    for _ in range(max_nodes):
        gains = [tree.gains(covered_T) for tree in trees]
        best = max(range(len(trees)), key=lambda m: gains[m].max())
        if gains[best].max() <= 0:
            break
        trees[best].add_child(int(gains[best].argmax()))
        covered_T = np.maximum(covered_T, trees[best].depth_T)
    return Forest(tuple(tree.shape() for tree in trees), float(1 + covered_T[is_token_T].mean()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the first SSM, the first two, ... at equal nodes."""
    parser = argparse.ArgumentParser(prog="python -m train.forest", description="Best merged trees of several SSMs.")
    parser.add_argument(
        "ssms", nargs="+", metavar="SSM", help="folder of train.distill or train.pack, or one that ships; best first"
    )
    parser.add_argument("--answers", nargs="+", required=True, metavar="PATH", help="files, or folders of train.data")
    parser.add_argument(
        "--held-out", type=float, default=1.0, help="share of the answers, as in the runs; default: all"
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the LLM: name, folder or .gguf file")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, WIDE_NODES], help="speculated nodes in all")
    options = parser.parse_args(arguments)
    enable_compile_cache()
    try:
        llm = open_model(options.model, dtype=jnp.dtype(jnp.float32))
        ssms = [open_finished(name, llm) or open_model(name, dtype=jnp.dtype(jnp.float32)) for name in options.ssms]
        answers = read_answers(options.answers)
        held = answers if options.held_out == 1 else split_answers(answers, held_out=options.held_out)[1]
        plan = BatchPlan([answer for answer in held if answer.temperature == 0], rows=ROWS, tokens=TOKENS)
        ranks = [answer_ranks(ssm.params, ssm.config, plan) for ssm in ssms]
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for nodes in options.nodes:
        alone = grow_forest(ranks[:1], max_nodes=nodes)
        print(f"{nodes} nodes, the first SSM alone: {alone.tokens_per_step:.3f} tokens per step; {alone.shapes[0]}")
        for count in range(2, len(ranks) + 1):
            found = grow_forest(ranks[:count], max_nodes=nodes)
            ratio = (found.tokens_per_step / alone.tokens_per_step - 1) * 100
            used = [0 if shape is None else shape.num_nodes for shape in found.shapes]
            print(f"  the first {count}: {found.tokens_per_step:.3f} ({ratio:+.1f} %), nodes {used}")


if __name__ == "__main__":
    main()
