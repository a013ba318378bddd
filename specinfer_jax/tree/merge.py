"""Merge-based trees (SpecInfer, Definition 3.2): the union of several trees, each shared prefix once.

A: root - x - y        B: root - x - z        merged: root - x - y
                                                              \\- z
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from specinfer_jax.tree.token_tree import TokenTree, root_only, scatter_rows


class MergedTree(NamedTuple):
    """The union, and where every row of every input tree went."""

    tree: TokenTree
    """`[B, 1 + sum of the inputs' speculated rows]`: room for the case without shared rows."""
    node_BR: Int[Array, "B R"]
    """Node of every input row, inputs laid side by side (the inputs' roots map to row 0, padding to N)."""
    row_BN: Int[Array, "B N"]
    """First input row of every node; R in padding rows."""
    source_BN: UInt32[Array, "B N"]
    """Bit m: input tree m proposed this node. 0 for root and padding."""


def merge_trees(trees: Sequence[TokenTree]) -> MergedTree:
    """Union of trees that share a root: equal tokens under equal parents become one node.

    Also removes duplicate siblings inside one tree, so a tree of independent chains becomes a trie. Rows keep their
    order: the first tree's, then what the second adds, and so on.

    Args:
      trees: one or more `[B, N_m]`, all with the same root token.

    Returns:
      A tree of static size `1 + sum(N_m - 1)`.
    """
    sizes = [tree.num_rows for tree in trees]
    starts = [sum(sizes[:m]) for m in range(len(sizes))]
    total, N = sum(sizes), 1 + sum(size - 1 for size in sizes)
    token_BR = jnp.concatenate([tree.token_BN for tree in trees], axis=1)
    depth_BR = jnp.concatenate([tree.depth_BN for tree in trees], axis=1)
    valid_BR = jnp.concatenate([tree.valid_BN for tree in trees], axis=1)
    parent_BR = jnp.concatenate(
        [jnp.where(t.parent_BN < t.num_rows, t.parent_BN + r, total) for t, r in zip(trees, starts, strict=True)],
        axis=1,
    )
    first_BR = _first_equal_row(token_BR, parent_BR, depth_BR, valid_BR, max_depth=max(sizes) - 1)
    is_first_BR = (first_BR == jnp.arange(total)[None]) & valid_BR
    new_row_BR = jnp.where(is_first_BR, jnp.cumsum(is_first_BR, axis=1, dtype=jnp.int32) - 1, N)
    node_BR = jnp.where(valid_BR, jnp.take_along_axis(new_row_BR, first_BR, axis=1), N)
    parent_node_BR = jnp.take_along_axis(node_BR, parent_BR, axis=1, mode="fill", fill_value=N)

    empty = root_only(trees[0].token_BN[:, 0], N)
    merged = TokenTree(
        token_BN=scatter_rows(empty.token_BN, new_row_BR, token_BR),
        parent_BN=scatter_rows(empty.parent_BN, new_row_BR, parent_node_BR),
        depth_BN=scatter_rows(empty.depth_BN, new_row_BR, depth_BR),
        valid_BN=scatter_rows(empty.valid_BN, new_row_BR, is_first_BR),
    )
    rows_BR = jnp.broadcast_to(jnp.arange(total, dtype=jnp.int32)[None], token_BR.shape)
    row_BN = scatter_rows(jnp.full_like(merged.token_BN, total), new_row_BR, rows_BR)
    source_BN = jnp.zeros(merged.token_BN.shape, jnp.uint32)
    for m, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        speculated_BR = node_BR[:, start + 1 : start + size]
        bit_BR = jnp.full(speculated_BR.shape, 1 << m, jnp.uint32)
        source_BN |= scatter_rows(jnp.zeros_like(source_BN), speculated_BR, bit_BR)
    return MergedTree(merged, node_BR, row_BN, source_BN)


def _first_equal_row(
    token_BR: Array, parent_BR: Array, depth_BR: Array, valid_BR: Array, *, max_depth: int
) -> Int[Array, "B R"]:
    """For every row the first row with the same path of tokens from the root, settled level by level."""
    total = token_BR.shape[1]
    rows_R = jnp.arange(total, dtype=jnp.int32)
    # All roots are one node; every other row starts as itself.
    first_BR = jnp.where((depth_BR == 0) & valid_BR, 0, rows_R[None])
    same_token_BRR = (token_BR[:, :, None] == token_BR[:, None, :]) & valid_BR[:, :, None] & valid_BR[:, None, :]
    same_token_BRR &= depth_BR[:, :, None] == depth_BR[:, None, :]

    def settle(depth: Int[Array, ""], first_BR: Array) -> Array:
        parent_first_BR = jnp.take_along_axis(first_BR, parent_BR, axis=1, mode="fill", fill_value=total)
        same_BRR = same_token_BRR & (parent_first_BR[:, :, None] == parent_first_BR[:, None, :])
        candidate_BR = jnp.argmax(same_BRR, axis=2).astype(jnp.int32)
        return jnp.where((depth_BR == depth) & valid_BR, candidate_BR, first_BR)

    return jax.lax.fori_loop(1, max_depth + 1, settle, first_BR)
