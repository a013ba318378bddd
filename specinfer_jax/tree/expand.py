"""Expansion-based trees (SpecInfer, Definition 3.1), a vector <k1,k2,...> of children per level, and shapes as text."""

import re
from collections.abc import Sequence

from specinfer_jax.errors import SpeculationError
from specinfer_jax.tree.shape import MAX_TREE_NODES, TreeShape, too_large

_MAX_DIGITS = 6


def Expansion(widths: Sequence[int]) -> TreeShape:
    """The shape in which every node of a level has the same number of children.

    `<1,2,1>`: row 0 root; row 1 its child; rows 2-3 that one's children; rows 4-5 one child of each.

    Args:
      widths: k1, k2, ..., one entry per level, each at least 1.

    Raises:
      SpeculationError: no level, a level without nodes, or too many nodes.
    """
    text = f"<{','.join(map(str, widths))}>"
    if not widths or any(k < 1 for k in widths):
        raise SpeculationError(f"tree {text} must name at least one level and at least 1 child per node")
    children, size, num_nodes = [], 1, 0
    for k in widths:
        num_nodes += size * k
        if num_nodes > MAX_TREE_NODES:  # before building what could be of any size
            raise too_large(text, num_nodes)
        children.append((k,) * size)
        size *= k
    return TreeShape(tuple(children))


def parse_expansion(text: str) -> TreeShape:
    """Read a tree's shape.

    "1,1,3,1,1" or "<1,1,3,1,1>": children of every node, level by level.
    "2/2,1/1,0,1": children of each node of the level above, in row order; levels are separated by "/".

    Raises:
      SpeculationError: neither of these, levels that do not fit together, or too many nodes.
    """
    number_list = r"\s*\d+\s*(?:,\s*\d+\s*)*"
    inner = re.fullmatch(rf"\s*<?({number_list}(?:/{number_list})*)>?\s*", text)
    if inner is None:
        raise SpeculationError(
            f'tree "{text}" is not a vector of children per level, such as "1,1,3,1,1", nor the children of every '
            'node, level by level, such as "2/2,1/1,0,1"'
        )
    levels = [[number.strip() for number in level.split(",")] for level in inner.group(1).split("/")]
    numbers = [number for level in levels for number in level]
    if len(numbers) > MAX_TREE_NODES + 1 or any(len(number) > _MAX_DIGITS for number in numbers):
        raise SpeculationError(f'tree "{text}" is too large; at most {MAX_TREE_NODES} nodes fit into one verified pass')
    if len(levels) == 1:
        return Expansion(tuple(map(int, numbers)))
    return TreeShape(tuple(tuple(map(int, level)) for level in levels))
