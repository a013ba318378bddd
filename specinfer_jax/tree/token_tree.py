"""The token tree: what speculators propose and the verifier walks, with static shapes.

    row     0     1     2     3     4     5          root "the" (row 0) is the last committed token
    token  the   cat   dog   sat   ran    -
    parent  6     0     0     1     1     6              the
    depth   0     1     1     2     2     0             /    \\
    valid   1     1     1     1     1     0           cat    dog      (N = 6 rows; row 5 is padding)
                                                     /   \\
                                                   sat   ran

Invariants: `parent[n] < n`; the root's and the padding's parent is N, out of range upward; valid rows come first, so
that a smaller static size holds the first rows of the same tree and never another tree.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 33, 64, 128)
"""Numbers of rows that programs are compiled for; a step runs the smallest that holds its trees."""


class TokenTree(NamedTuple):
    """One tree per slot; row 0 is the root."""

    token_BN: Int[Array, "B N"]
    """Token ids; 0 in padding rows."""
    parent_BN: Int[Array, "B N"]
    """Row of the parent; N for the root and for padding."""
    depth_BN: Int[Array, "B N"]
    """Edges to the root; 0 in padding rows."""
    valid_BN: Bool[Array, "B N"]
    """False in padding rows; the root is always valid."""

    @property
    def num_rows(self) -> int:
        """N, the static number of rows."""
        return self.token_BN.shape[1]


def root_only(root_token_B: Int[Array, " B"], num_rows: int) -> TokenTree:
    """A tree of the last committed token alone, padded to `num_rows`."""
    shape = (root_token_B.shape[0], num_rows)
    is_root_BN = jnp.broadcast_to(jnp.arange(num_rows)[None] == 0, shape)
    return TokenTree(
        token_BN=jnp.where(is_root_BN, root_token_B[:, None], 0),
        parent_BN=jnp.full(shape, num_rows, jnp.int32),
        depth_BN=jnp.zeros(shape, jnp.int32),
        valid_BN=is_root_BN,
    )


def truncate(tree: TokenTree, num_rows: int) -> TokenTree:
    """The first `num_rows` rows; since parents come first, this is again a tree."""
    cut = TokenTree(*(x[:, :num_rows] for x in tree))
    return cut._replace(parent_BN=jnp.minimum(cut.parent_BN, num_rows))


def clip_depth(tree: TokenTree, max_depth_B: Int[Array, " B"]) -> tuple[TokenTree, Int[Array, "B N"]]:
    """Drop rows deeper than a slot has room for, and close the gaps; the root always stays.

    Returns:
      The tree in the same row order, and the old row of every new row (N in padding rows).
    """
    return _keep(tree, tree.depth_BN <= jnp.maximum(max_depth_B, 0)[:, None])


def clip_nodes(tree: TokenTree, max_nodes_B: Int[Array, " B"]) -> tuple[TokenTree, Int[Array, "B N"]]:
    """Keep the root and the first so many rows behind it; since parents come first, this is again a tree.

    Returns:
      As `clip_depth`.
    """
    return _keep(tree, _row_numbers(tree) <= jnp.maximum(max_nodes_B, 0)[:, None])


def _keep(tree: TokenTree, keep_BN: Bool[Array, "B N"]) -> tuple[TokenTree, Int[Array, "B N"]]:
    """Rows that are to stay, none of them below one that is not."""
    keep_BN = tree.valid_BN & keep_BN
    new_row_BN = jnp.where(keep_BN, jnp.cumsum(keep_BN, axis=1, dtype=jnp.int32) - 1, tree.num_rows)
    return _move_rows(tree, new_row_BN)


def order_by(tree: TokenTree, score_BN: Float[Array, "B N"]) -> tuple[TokenTree, Int[Array, "B N"]]:
    """Rows from the highest to the lowest score, so that a cut tree keeps the best; padding stays behind.

    A child may not score above its parent; the root must score highest.

    Returns:
      The reordered tree, and the old row of every new row (N in padding rows).
    """
    N = tree.num_rows
    order_BN = jnp.argsort(jnp.where(tree.valid_BN, -score_BN, jnp.inf), axis=1, stable=True).astype(jnp.int32)
    rank_BN = scatter_rows(jnp.zeros_like(order_BN), order_BN, _row_numbers(tree))
    return _move_rows(tree, jnp.where(tree.valid_BN, rank_BN, N))


def _row_numbers(tree: TokenTree) -> Int[Array, "B N"]:
    return jnp.broadcast_to(jnp.arange(tree.num_rows, dtype=jnp.int32)[None], tree.token_BN.shape)


def _move_rows(tree: TokenTree, new_row_BN: Int[Array, "B N"]) -> tuple[TokenTree, Int[Array, "B N"]]:
    """Every row to its new place (N: dropped, together with all below it); also the old row of every new row."""
    N = tree.num_rows
    parent_BN = jnp.take_along_axis(new_row_BN, tree.parent_BN, axis=1, mode="fill", fill_value=N)
    empty = root_only(tree.token_BN[:, 0], N)
    moved = TokenTree(
        token_BN=scatter_rows(empty.token_BN, new_row_BN, tree.token_BN),
        parent_BN=scatter_rows(empty.parent_BN, new_row_BN, parent_BN),
        depth_BN=scatter_rows(empty.depth_BN, new_row_BN, tree.depth_BN),
        valid_BN=scatter_rows(empty.valid_BN, new_row_BN, tree.valid_BN),
    )
    return moved, scatter_rows(jnp.full_like(new_row_BN, N), new_row_BN, _row_numbers(tree))


def scatter_rows(into_BN: Array, row_BR: Int[Array, "B R"], value_BR: Array) -> Array:
    """Write each value to its row of the same slot; rows out of range upward are dropped."""
    return jax.vmap(lambda into_N, row_R, value_R: into_N.at[row_R].set(value_R, mode="drop"))(
        into_BN, row_BR, value_BR
    )


def check_invariants(tree: TokenTree) -> None:
    """Raise ValueError with the slot and row of the first broken invariant (host side; tests and debugging)."""
    token, parent, depth, valid = (np.asarray(x) for x in tree)
    B, N = token.shape
    for b in range(B):
        count = int(valid[b].sum())
        if count < 1 or not valid[b, :count].all():
            raise ValueError(f"slot {b}: valid rows must be the first ones and include the root, got {valid[b]}")
        for n in range(N):
            is_child = 0 < n < count
            if is_child and not 0 <= parent[b, n] < n:
                raise ValueError(f"slot {b} row {n}: parent {parent[b, n]} must lie in [0, {n})")
            if not is_child and parent[b, n] != N:
                raise ValueError(f"slot {b} row {n}: parent of root and padding must be {N}, got {parent[b, n]}")
            expected = depth[b, parent[b, n]] + 1 if is_child else 0
            if depth[b, n] != expected:
                raise ValueError(f"slot {b} row {n}: depth {depth[b, n]} must be {expected}")
