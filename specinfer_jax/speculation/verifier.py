"""Which path of a tree is the LLM's own, and what it says next (SpecInfer, Algorithm 2 and section 4).

Two rules that hold for any tree; mss.py has the one that needs to know how the children were drawn:

    greedy   go to the child that is the LLM's argmax
    naive    draw x from the LLM's distribution p; go to child x if there is one

A walk looks at one node per level only, so filters and penalties cost what they cost in incremental decoding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specinfer_jax.speculation.randomness import Role, gumbel, keys_at
from specinfer_jax.speculation.sampling import History, InUse, SamplingState, advance, log_weights
from specinfer_jax.tree.token_tree import TokenTree


class Verdict(NamedTuple):
    """The accepted path of every slot."""

    path_BA: Int[Array, "B A"]
    """Rows on the path: the root, then the accepted nodes in order; N (out of range) behind them."""
    token_BA: Int[Array, "B A"]
    """Tokens to commit: the accepted nodes', then the bonus token; 0 behind them."""
    accepted_B: Int[Array, " B"]
    """a: accepted nodes; a + 1 tokens are new, bonus token included."""
    failed_B: Bool[Array, " B"]
    """No token could be chosen behind the path: NaN logits, or every id is banned. The bonus token means nothing."""


class Target(NamedTuple):
    """What decides the LLM's distribution at any node of a tree."""

    logits_VT: Float[Array, "V T"]
    """Raw logits after every row; column `slot * N + row`."""
    sampling: SamplingState
    """Parameters of every slot."""
    is_stop_BV: Bool[Array, "B V"]
    """Ids that min_tokens bans for a while."""
    use: InUse
    """What of it is in use."""

    def log_weights(self, row_B: Int[Array, " B"], history: History, num_rows: int) -> Float[Array, "B V"]:
        """Log of the unnormalised distribution behind one row of every slot."""
        B = row_B.shape[0]
        column_B = jnp.arange(B, dtype=jnp.int32) * num_rows + jnp.minimum(row_B, num_rows - 1)
        logits_BV = jnp.take(self.logits_VT, column_B, axis=1).T
        return log_weights(logits_BV, self.sampling, history, self.is_stop_BV, self.use)


def verify_greedy(
    tree: TokenTree, target_BN: Int[Array, "B N"], *, path_len: int, failed_BN: Bool[Array, "B N"] | None = None
) -> Verdict:
    """Walk down while a child equals the LLM's argmax at its parent; the argmax at the end is the bonus token.

    Args:
      tree: `[B, N]`; where siblings repeat a token the first one counts.
      target_BN: int32, the LLM's argmax after every row.
      path_len: A, a static bound on the path; at least the tree's depth + 1.
      failed_BN: rows whose argmax means nothing; None: no such row.

    Returns:
      A `Verdict`; the loop runs A - 1 times whatever the input, so malformed trees cannot hang it.
    """
    B, N = tree.token_BN.shape
    failed_BN = jnp.zeros((B, N), bool) if failed_BN is None else failed_BN

    def descend(row_B: Array, _: None) -> tuple[Array, Array]:
        want_B = jnp.take_along_axis(target_BN, row_B[:, None], axis=1, mode="fill", fill_value=-1)[:, 0]
        blocked_B = jnp.take_along_axis(failed_BN, row_B[:, None], axis=1, mode="fill", fill_value=True)[:, 0]
        child_B = jnp.where(blocked_B, N, _child(tree, row_B, want_B))
        return child_B, child_B

    _, child_AB = jax.lax.scan(descend, jnp.zeros((B,), jnp.int32), None, length=path_len - 1)
    path_BA = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), child_AB.T], axis=1)
    accepted_B = jnp.sum(path_BA < N, axis=1, dtype=jnp.int32) - 1
    # The argmax after row path[i] is the token of path[i + 1], and behind the last accepted row the bonus token.
    token_BA = jnp.take_along_axis(target_BN, path_BA, axis=1, mode="fill", fill_value=0)
    last_B1 = jnp.take_along_axis(path_BA, accepted_B[:, None], axis=1)
    return Verdict(path_BA, token_BA, accepted_B, jnp.take_along_axis(failed_BN, last_B1, axis=1)[:, 0])


def _child(tree: TokenTree, row_B: Int[Array, " B"], token_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """The first child of a row that holds a token; N if none does or the row is padding."""
    N = tree.num_rows
    is_child_BN = (tree.parent_BN == row_B[:, None]) & tree.valid_BN & (row_B[:, None] < N)
    match_BN = is_child_BN & (tree.token_BN == token_B[:, None])
    return jnp.where(match_BN.any(axis=1), jnp.argmax(match_BN, axis=1).astype(jnp.int32), N)


class Walk(NamedTuple):
    """A path in the making."""

    level: Int[Array, ""]
    """Nodes accepted by the slots that still walk."""
    row_B: Int[Array, " B"]
    """The node each slot stands on."""
    done_B: Bool[Array, " B"]
    """The path ends at that node."""
    failed_B: Bool[Array, " B"]
    """As in `Verdict`."""
    path_BA: Int[Array, "B A"]
    """As in `Verdict`."""
    token_BA: Int[Array, "B A"]
    """As in `Verdict`."""
    history: History
    """Of that node."""

    @property
    def goes_on(self) -> Bool[Array, ""]:
        """Some slot still walks; no path has more than A rows, so malformed trees cannot hang the loop."""
        return ~self.done_B.all() & (self.level < self.path_BA.shape[1])


def walk_from_root(tree: TokenTree, history: History, path_len: int) -> Walk:
    """Nothing accepted yet."""
    B, N = tree.token_BN.shape
    zero_B, no_B = jnp.zeros((B,), jnp.int32), jnp.zeros((B,), bool)
    path_BA = jnp.full((B, path_len), N, jnp.int32).at[:, 0].set(0)
    return Walk(jnp.int32(0), zero_B, no_B, no_B, path_BA, jnp.zeros((B, path_len), jnp.int32), history)


def descend(
    walk: Walk, tree: TokenTree, child_B: Int[Array, " B"], token_B: Int[Array, " B"], failed_B: Bool[Array, " B"]
) -> Walk:
    """One level down where there is a child (below N); elsewhere the path ends, `token_B` being its bonus token."""
    N = tree.num_rows
    child_B = jnp.where(walk.done_B | failed_B, N, child_B)
    moves_B = child_B < N
    return Walk(
        level=walk.level + 1,
        row_B=jnp.where(moves_B, child_B, walk.row_B),
        done_B=~moves_B,
        failed_B=walk.failed_B | (failed_B & ~walk.done_B),
        path_BA=walk.path_BA.at[:, walk.level + 1].set(child_B, mode="drop"),
        token_BA=walk.token_BA.at[:, walk.level].set(jnp.where(walk.done_B, 0, token_B), mode="drop"),
        history=advance(walk.history, token_B, moves_B),
    )


def accepted_nodes(walk: Walk, num_rows: int) -> Int[Array, " B"]:
    """Accepted nodes of every slot, the root not counted."""
    return jnp.sum(walk.path_BA < num_rows, axis=1, dtype=jnp.int32) - 1


def verify_naive(
    tree: TokenTree, target: Target, history: History, position_B: Int[Array, " B"], *, path_len: int
) -> Verdict:
    """Naive sampling: at each node draw a token from the LLM; go on where it is a child, else it is the bonus token.

    Exact for every tree chosen without looking at these draws. The noise is keyed by position alone, so the tokens are
    those of incremental decoding with the same seed.

    Args:
      tree: `[B, N]`.
      target: the LLM's distributions; greedy slots follow their argmax.
      history: of the roots.
      position_B: int32, position of the token behind the root (the number of committed tokens).
      path_len: A, at least the tree's depth + 1.
    """
    N = tree.num_rows

    def level(walk: Walk) -> Walk:
        log_weight_BV = target.log_weights(walk.row_B, walk.history, N)
        token_B = draw_token(log_weight_BV, target, position_B + walk.level)
        return descend(walk, tree, _child(tree, walk.row_B, token_B), token_B, log_weight_BV.max(axis=1) == -jnp.inf)

    walk = jax.lax.while_loop(lambda walk: walk.goes_on, level, walk_from_root(tree, history, path_len))
    return Verdict(walk.path_BA, walk.token_BA, accepted_nodes(walk, N), walk.failed_B)


def draw_token(log_weight_BV: Float[Array, "B V"], target: Target, position_B: Int[Array, " B"]) -> Int[Array, " B"]:
    """Gumbel-max: one id per slot, drawn proportionally to its weight."""
    B, V = log_weight_BV.shape

    def noise() -> Array:
        return gumbel(keys_at(target.sampling.key_B2, position_B, Role.TOKEN), V)

    noise_BV = jax.lax.cond(target.use.random, noise, lambda: jnp.zeros((B, V), jnp.float32))
    return jnp.argmax(log_weight_BV + noise_BV, axis=1).astype(jnp.int32)
