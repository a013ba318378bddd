"""VerifyGreedy (SpecInfer, Algorithm 2): which path of a tree is the LLM's own, and what it says next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specinfer_jax.tree.token_tree import TokenTree


class Verdict(NamedTuple):
    """The accepted path of every slot."""

    path_BA: Int[Array, "B A"]
    """Rows on the path: the root, then the accepted nodes in order; N (out of range) behind them."""
    token_BA: Int[Array, "B A"]
    """Tokens to commit: the accepted nodes', then the bonus token; 0 behind them."""
    accepted_B: Int[Array, " B"]
    """a: accepted nodes; a + 1 tokens are new, bonus token included."""


def verify_greedy(tree: TokenTree, target_BN: Int[Array, "B N"], *, path_len: int) -> Verdict:
    """Walk down while a child equals the LLM's argmax at its parent; the argmax at the end is the bonus token.

    Args:
      tree: `[B, N]`; where siblings repeat a token the first one counts.
      target_BN: int32, the LLM's argmax after every row.
      path_len: A, a static bound on the path; at least the tree's depth + 1.

    Returns:
      A `Verdict`; the loop runs A - 1 times whatever the input, so malformed trees cannot hang it.
    """
    B, N = tree.token_BN.shape

    def descend(row_B: Array, _: None) -> tuple[Array, Array]:
        want_B = jnp.take_along_axis(target_BN, row_B[:, None], axis=1, mode="fill", fill_value=-1)
        match_BN = (tree.parent_BN == row_B[:, None]) & (tree.token_BN == want_B) & tree.valid_BN & (row_B[:, None] < N)
        child_B = jnp.where(match_BN.any(axis=1), jnp.argmax(match_BN, axis=1).astype(jnp.int32), N)
        return child_B, child_B

    _, child_AB = jax.lax.scan(descend, jnp.zeros((B,), jnp.int32), None, length=path_len - 1)
    path_BA = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), child_AB.T], axis=1)
    accepted_B = jnp.sum(path_BA < N, axis=1, dtype=jnp.int32) - 1
    # The argmax after row path[i] is the token of path[i + 1], and behind the last accepted row the bonus token.
    token_BA = jnp.take_along_axis(target_BN, path_BA, axis=1, mode="fill", fill_value=0)
    return Verdict(path_BA, token_BA, accepted_B)
