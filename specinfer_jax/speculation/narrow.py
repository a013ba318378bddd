"""One request's part of the compiled trees: which rows it wants, as a mask, so that requests mix freely in a batch.

compiled <1,2,1>      wanted <1,1>        mask over rows 1-5
    root                 root
     |                    |
     1                    1               1  1  0  0  0
    / \\                   |
   2   3                  2
   |   |
   4   5
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from specinfer_jax.errors import SpeculationError
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import StepProgram
from specinfer_jax.tree.expand import parse_expansion
from specinfer_jax.tree.shape import TreeShape
from specinfer_jax.tree.token_tree import TokenTree


class Narrowed(NamedTuple):
    """What a slot's state says of its request's trees."""

    allowed_n: np.ndarray
    """bool `[n]`: rows of all speculators' trees side by side, without their roots."""
    max_nodes: int
    """Most nodes of the merged tree."""


def narrowed(program: StepProgram, wanted: RequestSpeculation | None) -> Narrowed:
    """A request's part of a program's trees.

    Where draws count (multi-step speculative sampling), which of them exist may not depend on what they drew, so there
    `max_nodes` cuts rows beforehand; elsewhere the likeliest nodes of the merged tree are kept.

    Raises:
      SpeculationError: a speculator is unknown, or there is no SSM that could have such a tree.
    """
    total = program.num_rows - 1
    if wanted is None:
        return Narrowed(np.ones(total, bool), total)
    names = [speculator.name for speculator in program.speculators]
    unknown = [name for name in wanted.ssms or () if name not in names]
    if unknown:
        known = f"this LLM has {', '.join(names)}" if names else "this LLM has none"
        raise SpeculationError(f"there is no speculator {unknown[0]!r}; {known}")
    shape = None if wanted.tree is None else parse_expansion(wanted.tree)
    if not wanted.enabled:
        return Narrowed(np.zeros(total, bool), 0)
    taking_part = [s for s in program.speculators if wanted.ssms is None or s.name in wanted.ssms]
    if shape is not None and not any(isinstance(s, SsmSpeculator) for s in taking_part):
        raise SpeculationError(f"tree {shape} needs an SSM, and none takes part")
    parts, depths = [], []
    for speculator in program.speculators:
        part = np.full(speculator.num_nodes, speculator in taking_part)
        depth = np.arange(1, speculator.num_nodes + 1)
        if isinstance(speculator, SsmSpeculator):
            depth = speculator.expansion.depths()[1:]
            part &= True if shape is None else common_rows(speculator.expansion, shape)
        parts.append(part)
        depths.append(depth)
    allowed_n = np.concatenate([np.zeros(0, bool), *parts])
    max_nodes = total if wanted.max_nodes is None else min(wanted.max_nodes, total)
    if not program.keeps_draws:
        return Narrowed(allowed_n, max_nodes)
    # Level by level over all speculators: whatever is cut, what is left are trees with the first draws of each node.
    order_n = np.argsort(np.concatenate([np.zeros(0, int), *depths]), kind="stable")
    kept_n = np.zeros(total, bool)
    kept_n[[n for n in order_n if allowed_n[n]][:max_nodes]] = True
    return Narrowed(kept_n, total)


def common_rows(shape: TreeShape, other: TreeShape) -> np.ndarray:
    """Which rows of `shape`, its root left out, `other` has as well: bool `[num_nodes]`."""
    counts = np.array([count for level in other.children for count in level])
    first_child = np.concatenate([[1], 1 + np.cumsum(counts)])
    row_in_other = {0: 0}
    for row, (parent, rank) in enumerate(zip(shape.parents(), shape.child_ranks(), strict=True)):
        above = row_in_other.get(int(parent))
        if row and above is not None and above < len(counts) and rank < counts[above]:
            row_in_other[row] = int(first_child[above] + rank)
    return np.array([row in row_in_other for row in range(1, shape.num_nodes + 1)], bool)


def allowed_rows(tree: TokenTree, allowed_Bn: Bool[Array, "B n"]) -> TokenTree:
    """A speculator's proposal without rows that are not wanted; invalid rows may lie between valid ones, as there."""
    valid_BN = tree.valid_BN & jnp.pad(allowed_Bn, ((0, 0), (1, 0)), constant_values=True)
    return TokenTree(
        token_BN=jnp.where(valid_BN, tree.token_BN, 0),
        parent_BN=jnp.where(valid_BN, tree.parent_BN, tree.num_rows),
        depth_BN=jnp.where(valid_BN, tree.depth_BN, 0),
        valid_BN=valid_BN,
    )
