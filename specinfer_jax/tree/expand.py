"""Expansion-based trees (SpecInfer, Definition 3.1): a static vector <k1,k2,...> of children per node and level."""

import dataclasses
import re

import numpy as np

from specinfer_jax.errors import SpeculationError

MAX_TREE_NODES = 127
"""Speculated nodes that the largest row bucket holds beside the root."""


@dataclasses.dataclass(frozen=True)
class Expansion:
    """Children per node at every level; rows are laid out level by level.

    `<1,2,1>`: row 0 root; row 1 its child; rows 2-3 that one's children; rows 4-5 one child of each.
    """

    widths: tuple[int, ...]
    """k1, k2, ..., one entry per level, each at least 1."""

    def __post_init__(self) -> None:
        if not self.widths or any(k < 1 for k in self.widths):
            raise SpeculationError(
                f"tree <{','.join(map(str, self.widths))}> must name at least one level and at least 1 child per node"
            )
        if self.num_nodes > MAX_TREE_NODES:
            raise SpeculationError(
                f"tree {self} has {self.num_nodes} nodes; at most {MAX_TREE_NODES} fit into one verified pass"
            )

    def __str__(self) -> str:
        return f"<{','.join(map(str, self.widths))}>"

    @property
    def depth(self) -> int:
        """Levels below the root."""
        return len(self.widths)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of every level, without the root."""
        sizes, size = [], 1
        for k in self.widths:
            size *= k
            sizes.append(size)
        return tuple(sizes)

    @property
    def num_nodes(self) -> int:
        """Speculated nodes, without the root."""
        return sum(self.level_sizes)

    def parents(self) -> np.ndarray:
        """int32 `[num_nodes + 1]`: parent row of every row; the root's is num_nodes + 1, out of range."""
        parent, first, start = [self.num_nodes + 1], 0, 1
        for k, size in zip(self.widths, self.level_sizes, strict=True):
            parent += [first + i // k for i in range(size)]
            first, start = start, start + size
        return np.array(parent, np.int32)

    def depths(self) -> np.ndarray:
        """int32 `[num_nodes + 1]`: level of every row, the root's is 0."""
        sizes = (1, *self.level_sizes)
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def child_ranks(self) -> np.ndarray:
        """int32 `[num_nodes + 1]`: 0 for the most probable child of its parent, 1 for the next, ...; 0 for the root."""
        ranks = [0]
        for k, size in zip(self.widths, self.level_sizes, strict=True):
            ranks += [i % k for i in range(size)]
        return np.array(ranks, np.int32)


def parse_expansion(text: str) -> Expansion:
    """Read "1,1,3,1,1" or "<1,1,3,1,1>".

    Raises:
      SpeculationError: not a list of whole numbers, or too many nodes.
    """
    inner = re.fullmatch(r"\s*<?\s*(\d+(?:\s*,\s*\d+)*)\s*>?\s*", text)
    if inner is None:
        raise SpeculationError(f'tree "{text}" is not a vector of children per level, such as "1,1,3,1,1"')
    numbers = [number.strip() for number in inner.group(1).split(",")]
    if len(numbers) > MAX_TREE_NODES or any(len(number) > 6 for number in numbers):
        raise SpeculationError(f'tree "{text}" is too large; at most {MAX_TREE_NODES} nodes fit into one verified pass')
    return Expansion(tuple(int(number) for number in numbers))
