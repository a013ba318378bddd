"""Static tree shapes: how many children every node has, known before anything is drafted.

    "2/2,1/1,0,1"            root                  row 0
                            /    \\
                           a      b                rows 1-2: the root has 2 children
                          / \\     |
                         c   d    e                rows 3-5: a has 2, b has 1
                         |        |
                         f        g                rows 6-7: c has 1, d none, e has 1

A node's children are always its speculator's first ones: ranks 0, 1, ... of the likeliest tokens, or the first draws.
So whether a draw exists never depends on what it drew, and every shape is as exact as a uniform one.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from specinfer_jax.errors import SpeculationError

MAX_TREE_NODES = 127
"""Speculated nodes that the largest row bucket holds beside the root."""


class Level(NamedTuple):
    """How a level comes out of the nodes above that have children (W of them): all indices are static."""

    most: int
    """Most children of one of them."""
    child_n: np.ndarray
    """int32 `[nodes]`: index of every node among the `W * most` candidates, node by node."""
    inner_W: np.ndarray
    """int32: the level's own nodes that have children, as indices into the level."""


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """Number of children of every node; rows are laid out level by level."""

    children: tuple[tuple[int, ...], ...]
    """For every level, the children of each node of the level above in row order; the first entry is the root's."""

    def __post_init__(self) -> None:
        above = 1
        for level, counts in enumerate(self.children, 1):
            if len(counts) != above:
                raise SpeculationError(
                    f"tree {self} tells the children of {len(counts)} nodes where level {level - 1} has {above}"
                )
            if any(count < 0 for count in counts) or not any(counts):
                raise SpeculationError(f"level {level} of tree {self} must have at least one node")
            above = sum(counts)
        if not self.children:
            raise SpeculationError("a tree must have at least one level")
        if self.num_nodes > MAX_TREE_NODES:
            raise too_large(str(self), self.num_nodes)

    def __str__(self) -> str:
        """`<1,2,1>` if the nodes of every level have equally many children, else `<2/2,1/1,0,1>`."""
        is_uniform = all(len(set(counts)) == 1 for counts in self.children)
        if is_uniform:
            return f"<{','.join(str(counts[0]) for counts in self.children)}>"
        return f"<{'/'.join(','.join(map(str, counts)) for counts in self.children)}>"

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.children)

    @property
    def widths(self) -> tuple[int, ...]:
        """By level, the most children of a node; in an expansion, the children of every node."""
        return tuple(max(counts) for counts in self.children)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of every level, without the root."""
        return tuple(sum(counts) for counts in self.children)

    @property
    def num_nodes(self) -> int:
        """Speculated nodes, without the root."""
        return sum(self.level_sizes)

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """For every level, the nodes of the level above that have children: the rows of the pass that drafts it."""
        return tuple(sum(count > 0 for count in counts) for counts in self.children)

    def parents(self) -> np.ndarray:
        """int32 `[num_nodes + 1]`: parent row of every row; the root's is num_nodes + 1, out of range."""
        counts = [count for level in self.children for count in level]
        return np.concatenate([[self.num_nodes + 1], np.repeat(np.arange(len(counts)), counts)]).astype(np.int32)

    def depths(self) -> np.ndarray:
        """int32 `[num_nodes + 1]`: level of every row, the root's is 0."""
        sizes = (1, *self.level_sizes)
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def child_ranks(self) -> np.ndarray:
        """int32 `[num_nodes + 1]`: 0 for the most probable child of its parent, 1 for the next, ...; 0 for the root."""
        return np.array([0, *(rank for level in self.children for count in level for rank in range(count))], np.int32)

    def inner_rows(self) -> np.ndarray:
        """int32: rows that have children, the root's first."""
        counts = [count for level in self.children for count in level]
        return np.flatnonzero(counts).astype(np.int32)

    def levels(self) -> tuple[Level, ...]:
        """How each level is drafted."""
        result = []
        for counts, below in zip(self.children, (*self.children[1:], ()), strict=True):
            inner = [count for count in counts if count]
            most = max(inner)
            child = [parent * most + rank for parent, count in enumerate(inner) for rank in range(count)]
            result.append(Level(most, np.array(child, np.int32), np.flatnonzero(below).astype(np.int32)))
        return tuple(result)


def too_large(tree: str, num_nodes: int) -> SpeculationError:
    """The error for a tree that no pass can hold."""
    return SpeculationError(f"tree {tree} has {num_nodes} nodes; at most {MAX_TREE_NODES} fit into one verified pass")
