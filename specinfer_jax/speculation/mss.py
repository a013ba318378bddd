"""Multi-step speculative sampling (SpecInfer, Algorithm 2): drawn children are accepted with min(1, p/q).

At a node with the LLM's distribution p, and draws x1, x2, ... from q1, q2, ... in this order:

    accept xi with min(1, p(xi) / qi(xi)) and go on from it
    else       p := norm(max(0, p - qi)), next draw
    none left  the bonus token is drawn from p

What is emitted has the law p whatever the q are, as long as each qi is the distribution xi was really drawn from.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specinfer_jax.speculation.randomness import Role, keys_at, uniform
from specinfer_jax.speculation.sampling import History
from specinfer_jax.speculation.verifier import (
    Target,
    Verdict,
    Walk,
    accepted_nodes,
    descend,
    draw_token,
    walk_from_root,
)
from specinfer_jax.tree.token_tree import TokenTree


class DraftDistributions(NamedTuple):
    """Distributions that children were drawn from; E expanded nodes, C candidates each."""

    id_BEC: Int[Array, "B E C"]
    """Candidates' ids in the LLM's vocabulary; V or more is padding."""
    prob_BEC: Float[Array, "B E C"]
    """Their probabilities: 0 where the candidate is never drawn, otherwise summing to 1."""


class Draws(NamedTuple):
    """Children as they were drawn, in the order drawn; draws that name the same token share a node, not a draw."""

    parent_BR: Int[Array, "B R"]
    """Row of the node it was drawn under; N where there is no draw."""
    child_BR: Int[Array, "B R"]
    """Row of the drawn node."""
    chain_BR: Int[Array, "B R"]
    """Index into E of the distribution it was drawn from."""
    slot_BR: Int[Array, "B R"]
    """Index into C of the candidate drawn."""
    is_random_BR: Bool[Array, "B R"]
    """False: chosen without randomness, so its q is 1 for its own token; chain and slot are not read."""


class MssOutcome(NamedTuple):
    """What multi-step speculative sampling decided, and with which probabilities."""

    verdict: Verdict
    """The accepted path; its bonus token is not drawn yet (0)."""
    accept_BR: Float[Array, "B R"]
    """Probability with which each draw that was tried would be accepted; -1 where it was not tried."""
    weight_BV: Float[Array, "B V"]
    """Unnormalised distribution of the bonus token: the LLM's at a leaf, else what the rejected draws left of it."""


def verify_mss(
    tree: TokenTree, draws: Draws, drafts: DraftDistributions, target: Target, history: History,
    position_B: Int[Array, " B"], *, path_len: int, renormalize: bool,
) -> Verdict:  # fmt: skip
    """Multi-step speculative sampling (SpecInfer, Algorithm 2): accepts more than naive sampling where q is near p.

    Exact for i.i.d. draws with `renormalize=False`, and for draws without replacement, in the order drawn, with
    `renormalize=True`; draws of several SSMs may interleave.

    Args:
      tree: `[B, N]`, whole: no draw may be missing because of what it drew.
      draws: in the order drawn.
      drafts: the distributions they were drawn from.
      target: the LLM's distributions; greedy slots follow their argmax.
      history: of the roots.
      position_B: int32, position of the token behind the root.
      path_len: A, at least the tree's depth + 1.
      renormalize: take what a chain drew before out of its q.
    """
    R = draws.parent_BR.shape[1]
    uniform_BR = uniform(keys_at(target.sampling.key_B2, position_B, Role.ACCEPT), R)
    outcome = walk_mss(tree, draws, drafts, target, history, uniform_BR, path_len=path_len, renormalize=renormalize)
    path_BA, token_BA, accepted_B, failed_B = outcome.verdict
    bonus_B = draw_token(jnp.log(outcome.weight_BV), target, position_B + accepted_B)
    is_bonus_BA = jnp.arange(path_len)[None] == accepted_B[:, None]
    return Verdict(path_BA, jnp.where(is_bonus_BA, bonus_B[:, None], token_BA), accepted_B, failed_B)


def walk_mss(
    tree: TokenTree, draws: Draws, drafts: DraftDistributions, target: Target, history: History,
    uniform_BR: Float[Array, "B R"], *, path_len: int, renormalize: bool,
) -> MssOutcome:  # fmt: skip
    """`verify_mss` as a function of its random numbers: a draw is accepted if its uniform is below its probability."""
    B, R = draws.parent_BR.shape
    N = tree.num_rows
    draws = draws._replace(is_random_BR=draws.is_random_BR & target.sampling.is_random_B[:, None])

    def level(carry: tuple[Walk, Array, Array]) -> tuple[Walk, Array, Array]:
        walk, accept_BR, last_weight_BV = carry
        weight_BV = jnp.exp(target.log_weights(walk.row_B, walk.history, N))
        failed_B = weight_BV.max(axis=1) == 0
        is_open_BR = (
            (draws.parent_BR == walk.row_B[:, None]) & (draws.child_BR < N) & ~(walk.done_B | failed_B)[:, None]
        )
        siblings = _try_siblings(draws, drafts, tree, weight_BV, is_open_BR, uniform_BR, accept_BR, renormalize)
        child_B = siblings.child_B
        token_B = jnp.take_along_axis(tree.token_BN, child_B[:, None], axis=1, mode="fill", fill_value=0)[:, 0]
        last_weight_BV = jnp.where(walk.done_B[:, None], last_weight_BV, siblings.weight_BV)
        return descend(walk, tree, child_B, token_B, failed_B), siblings.accept_BR, last_weight_BV

    V = target.logits_VT.shape[0]
    start = (walk_from_root(tree, history, path_len), jnp.full((B, R), -1.0), jnp.zeros((B, V), jnp.float32))
    walk, accept_BR, weight_BV = jax.lax.while_loop(lambda carry: carry[0].goes_on, level, start)
    verdict = Verdict(walk.path_BA, walk.token_BA, accepted_nodes(walk, N), walk.failed_B)
    return MssOutcome(verdict, accept_BR, weight_BV)


class _Siblings(NamedTuple):
    """The draws under one node of every slot, tried one after the other."""

    is_open_BR: Bool[Array, "B R"]
    """Draws still to be tried."""
    child_B: Int[Array, " B"]
    """Row of the accepted draw; N while none is."""
    weight_BV: Float[Array, "B V"]
    """What the rejected draws left of the LLM's distribution, unnormalised."""
    accept_BR: Float[Array, "B R"]
    """As in `MssOutcome`."""


def _try_siblings(
    draws: Draws, drafts: DraftDistributions, tree: TokenTree, weight_BV: Array, is_open_BR: Array, uniform_BR: Array,
    accept_BR: Array, renormalize: bool,
) -> _Siblings:  # fmt: skip
    """Accept or reject in the order drawn, until every slot has accepted one or run out of draws."""
    B, R = is_open_BR.shape
    slots_B = jnp.arange(B)

    def try_next(now: _Siblings) -> _Siblings:
        r_B = jnp.argmax(now.is_open_BR, axis=1)
        tried_B = now.is_open_BR.any(axis=1)
        child_B = draws.child_BR[slots_B, r_B]
        token_B = jnp.take_along_axis(tree.token_BN, child_B[:, None], axis=1, mode="clip")[:, 0]
        id_BC, q_BC, q_B = _draft_of(draws, drafts, r_B, token_B, renormalize)
        total_B = jnp.sum(now.weight_BV, axis=1)
        p_B = now.weight_BV.at[slots_B, token_B].get(mode="fill", fill_value=0.0)  # ids that the LLM never emits
        ratio_B = p_B / jnp.maximum(total_B * q_B, jnp.finfo(jnp.float32).tiny)
        chance_B = jnp.where(q_B > 0, jnp.minimum(ratio_B, 1.0), 0.0)
        accepted_B = tried_B & (uniform_BR[slots_B, r_B] < chance_B)
        left_BV = jax.vmap(lambda w_V, id_C, by_C: w_V.at[id_C].add(-by_C, mode="drop"))(
            now.weight_BV, id_BC, total_B[:, None] * q_BC
        )
        left_BV = jnp.maximum(left_BV, 0.0)
        # Nothing left can only be rounding: then p equals q and rejection has probability 0.
        rejected_B = tried_B & ~accepted_B & (left_BV.max(axis=1) > 0)
        is_this_BR = (jnp.arange(R)[None] == r_B[:, None]) & tried_B[:, None]
        return _Siblings(
            is_open_BR=now.is_open_BR & ~is_this_BR & ~accepted_B[:, None],
            child_B=jnp.where(accepted_B, child_B, now.child_B),
            weight_BV=jnp.where(rejected_B[:, None], left_BV, now.weight_BV),
            accept_BR=jnp.where(is_this_BR, chance_B[:, None], now.accept_BR),
        )

    nobody_B = jnp.full((B,), tree.num_rows, jnp.int32)
    start = _Siblings(is_open_BR, nobody_B, weight_BV, accept_BR)
    return jax.lax.while_loop(lambda now: now.is_open_BR.any(), try_next, start)


def _draft_of(
    draws: Draws, drafts: DraftDistributions, r_B: Int[Array, " B"], token_B: Int[Array, " B"], renormalize: bool
) -> tuple[Int[Array, "B C"], Float[Array, "B C"], Float[Array, " B"]]:
    """Candidates and probabilities that draw r of every slot came from, and the probability of the token drawn."""
    slots_B = jnp.arange(r_B.shape[0])
    C = drafts.id_BEC.shape[2]
    chain_B, slot_B = draws.chain_BR[slots_B, r_B], draws.slot_BR[slots_B, r_B]
    id_BC, q_BC = drafts.id_BEC[slots_B, chain_B], drafts.prob_BEC[slots_B, chain_B]
    if renormalize:
        R = draws.chain_BR.shape[1]
        is_before_BR = (draws.chain_BR == chain_B[:, None]) & (jnp.arange(R)[None] < r_B[:, None]) & draws.is_random_BR
        gone_BC = (is_before_BR[:, :, None] & (draws.slot_BR[:, :, None] == jnp.arange(C)[None, None])).any(axis=1)
        q_BC = jnp.where(gone_BC, 0.0, q_BC)
        q_BC = q_BC / jnp.maximum(jnp.sum(q_BC, axis=1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    is_random_B = draws.is_random_BR[slots_B, r_B]
    q_B = jnp.where(is_random_B, q_BC[slots_B, slot_B], 1.0)
    is_first_1C = jnp.arange(C)[None] == 0
    id_BC = jnp.where(is_random_B[:, None], id_BC, token_B[:, None])
    q_BC = jnp.where(is_random_B[:, None], q_BC, is_first_1C * 1.0)
    return id_BC, q_BC, q_B
