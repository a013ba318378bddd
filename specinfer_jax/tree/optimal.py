"""The best tree of n nodes, and the fastest one on this machine, from acceptance by depth and child rank.

A node is committed with the product of the rates along its path, its *value*; a tree gives `1 + sum of its values`
tokens per step. Rates depend on depth and rank alone and fall with the rank, so a node is worth no more than its
parent and its elder siblings. Therefore the n most valuable of all nodes form a tree, no tree of n nodes can be worth
more, and taking nodes from the most valuable down solves the dynamic programme of every n at once, each tree nested
in the next.

That holds too if only the w most valuable nodes of a level may have children. By induction over levels: whatever w
nodes of a level have children, the i-th most valuable of them is worth no more than the level's i-th, so their
children, in pairs, are worth no more than that one's.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specinfer_jax.tree.rates import AcceptanceRates
from specinfer_jax.tree.shape import MAX_TREE_NODES, TreeShape

WIDE_NODES = 32
"""Speculated nodes of the tree with the most tokens per step."""
_UNLIMITED = MAX_TREE_NODES + 1
_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Inner nodes of a level that are tried."""
_ROUNDING = 1e-9
CATCH_UP_ROWS = 2
"""Rows of an SSM's first pass beyond the tree's depth: what its cache lacks after a step, and the root (ssm.py)."""


class BestTree(NamedTuple):
    """A shape and what it is expected to commit per step, bonus token included."""

    shape: TreeShape
    expected_tokens: float


class FastestTree(NamedTuple):
    """The shape with the most tokens per second, and its step as it was reckoned."""

    shape: TreeShape
    expected_tokens: float
    """Per step, bonus token included."""
    seconds: float
    """Of one step: drafting and verification."""

    @property
    def tokens_per_second(self) -> float:
        """What it was chosen for."""
        return self.expected_tokens / self.seconds


class _Node(NamedTuple):
    value: float
    parent: int
    """Index of the parent, in the order taken; the root is -1."""
    depth: int


def expected_tokens(shape: TreeShape, rates: AcceptanceRates) -> float:
    """Tokens per step of any shape, bonus token included."""
    parent_N, depth_N, rank_N = shape.parents(), shape.depths(), shape.child_ranks()
    rate_DR = [rates.at(depth, max(shape.widths)) for depth in range(shape.depth)]
    value_N = np.ones(shape.num_nodes + 1)
    for row in range(1, len(value_N)):
        value_N[row] = value_N[parent_N[row]] * rate_DR[depth_N[row] - 1][rank_N[row]]
    return float(value_N.sum())


def best_trees(rates: AcceptanceRates, *, max_nodes: int = MAX_TREE_NODES, max_depth: int) -> list[BestTree]:
    """The tree with the most tokens per step for every number of nodes: entry n - 1 has n nodes.

    Shorter than `max_nodes` only where every further node has no chance at all. The last entry for `WIDE_NODES` is what
    `tree="wide"` runs.

    Args:
      rates: acceptance by depth and rank.
      max_nodes: speculated nodes, at most MAX_TREE_NODES.
      max_depth: levels below the root, at least 1.
    """
    nodes = list(itertools.islice(_most_valuable(rates, [_UNLIMITED] * (max_depth - 1)), max_nodes))
    tokens_n = 1 + np.cumsum([node.value for node in nodes])
    return [BestTree(_shape_of(nodes[: n + 1]), float(tokens)) for n, tokens in enumerate(tokens_n)]


def fastest_tree(
    rates: AcceptanceRates, *, verify_seconds: Mapping[int, float], draft_seconds: Mapping[int, float],
    max_depth: int = 8, num_ssms: int = 1, need: float = 1.0,
) -> FastestTree | None:  # fmt: skip
    """The tree with the most tokens per second; None where incremental decoding is faster than any.

    A level costs one SSM pass over its inner nodes. For every depth and number of nodes the most valuable tree is
    tried, which is all that matters where the cost of a pass does not depend on its rows; where it does, levels whose
    inner nodes are limited are tried as well, one level after the other until nothing improves.

    Args:
      rates: acceptance by depth and rank; of the union, if several SSMs propose.
      verify_seconds: one LLM pass by row bucket, root included; a tree runs in the smallest that holds it. Entry 1 is
        incremental decoding.
      draft_seconds: one SSM pass by rows, linear in between; of all SSMs together.
      max_depth: most levels tried.
      num_ssms: SSMs that each propose this shape, so that the merged tree has so many times its nodes.
      need: tokens per second over incremental decoding's that are asked for.
    """
    verify_r = _by_bucket(verify_seconds)
    measured = sorted(draft_seconds)
    draft_r = np.interp(np.arange(_UNLIMITED + 1), measured, [draft_seconds[rows] for rows in measured])
    best = None
    for depth in range(1, max_depth + 1):
        costs = _Costs(verify_r, [0.0, *draft_r[1:].tolist()], float(draft_r[depth + CATCH_UP_ROWS]), num_ssms)
        found = _with_limited_levels(rates, costs, depth)
        if best is None or found.tokens_per_second > best.tokens_per_second:
            best = found
    if best is None or best.tokens_per_second <= need / verify_seconds[1]:
        return None
    return FastestTree(_shape_of(best.nodes), best.tokens, best.seconds)


class _Costs(NamedTuple):
    """Seconds by rows; index 0 is no pass."""

    verify_r: Sequence[float]
    draft_r: Sequence[float]
    first_draft: float
    """The pass that feeds what the SSM's cache lacks and drafts the first level."""
    num_ssms: int


class _Candidate(NamedTuple):
    tokens: float
    seconds: float
    nodes: Sequence[_Node]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def _with_limited_levels(rates: AcceptanceRates, costs: _Costs, depth: int) -> _Candidate:
    """The fastest tree of at most `depth` levels, limits of inner nodes being changed level by level."""
    limits = [_UNLIMITED] * (depth - 1)
    best = _fastest(rates, costs, limits)
    is_better = True
    while is_better:
        is_better = False
        for level, limit in itertools.product(range(depth - 1), (*_LIMITS, _UNLIMITED)):
            other = [*limits[:level], limit, *limits[level + 1 :]]
            found = _fastest(rates, costs, other)
            if found.tokens_per_second > best.tokens_per_second * (1 + _ROUNDING):
                best, limits, is_better = found, other, True
    return best


def _fastest(rates: AcceptanceRates, costs: _Costs, limits: Sequence[int]) -> _Candidate:
    """The best number of nodes under limits of inner nodes by level."""
    nodes: list[_Node] = []
    inner_d, has_children = [0] * (len(limits) + 1), set()
    tokens, drafting, best = 1.0, 0.0, (0.0, 0, 1.0, 1.0)
    most = (len(costs.verify_r) - 2) // costs.num_ssms
    for node in itertools.islice(_most_valuable(rates, limits), min(most, MAX_TREE_NODES)):
        nodes.append(node)
        tokens += node.value
        if node.parent not in has_children:
            has_children.add(node.parent)
            level = node.depth - 1
            rows = inner_d[level]
            drafting += costs.draft_r[rows + 1] - costs.draft_r[rows] if level else costs.first_draft
            inner_d[level] += 1
        seconds = drafting + costs.verify_r[1 + len(nodes) * costs.num_ssms]
        best = max(best, (tokens / seconds, len(nodes), tokens, seconds))
    _, count, tokens, seconds = best
    return _Candidate(tokens, seconds, nodes[:count])


def _most_valuable(rates: AcceptanceRates, limits: Sequence[int]) -> Iterator[_Node]:
    """Nodes from the most valuable down, parents and elder siblings first, until no node has a chance.

    Args:
      rates: acceptance by depth and rank.
      limits: how many nodes of depth 1, 2, ... may have children; one entry per level but the last.
    """
    rate_d = [(*row, 0.0) for row in rates.rate]

    def rate(depth: int, rank: int) -> float:
        return rate_d[min(depth, len(rate_d) - 1)][rank]

    # Equal values: the shallower node first, then the elder.
    waiting = [(-rate(0, 0), 1, -1, 0, 1.0)]
    left, taken = list(limits), 0
    while waiting and waiting[0][0] < 0:
        negative, depth, parent, rank, parent_value = heapq.heappop(waiting)
        value = -negative
        yield _Node(value, parent, depth)
        heapq.heappush(waiting, (-parent_value * rate(depth - 1, rank + 1), depth, parent, rank + 1, parent_value))
        if depth <= len(left) and left[depth - 1] > 0:
            # Nodes of a level come in the order of their values, so the limit is used up by the most valuable.
            left[depth - 1] -= 1
            heapq.heappush(waiting, (-value * rate(depth, 0), depth + 1, taken, 0, value))
        taken += 1


def _shape_of(nodes: Sequence[_Node]) -> TreeShape:
    """The tree of nodes whose parents and elder siblings come first."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(index)
    levels, row = [], [-1]
    while any(parent in children for parent in row):
        levels.append(tuple(len(children.get(parent, ())) for parent in row))
        row = [child for parent in row for child in children.get(parent, ())]
    return TreeShape(tuple(levels))


def _by_bucket(seconds: Mapping[int, float]) -> list[float]:
    """Seconds for every number of rows up to the largest bucket: those of the smallest bucket that holds them."""
    return [math.inf, *(seconds[min(b for b in seconds if b >= rows)] for rows in range(1, max(seconds) + 1))]
