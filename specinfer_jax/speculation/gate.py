"""The acceptance gate: a tree is verified only as far as its expected tokens pay for its measured cost.

Every node belongs to a *kind* (say: first child at level 2; or first token after a match of three). A running average
of how often nodes of a kind are accepted, given that their parent was, lives in the decode state, per slot. The product
along a node's path is the chance that it is committed; a tree cut to n rows yields `1 + sum of its nodes' chances`
tokens, and the step runs the row bucket with the most tokens per second.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specinfer_jax.tree.token_tree import TokenTree

_LEARNING_RATE = 0.15
"""Weight of one observation in the running average."""
_FORGETTING_RATE = 1 / 256
"""Pull towards the prior at every step, so that a kind that was given up is tried again."""
_LARGEST_RATE = 0.99
"""Keeps every child's chance strictly below its parent's."""
_NEED = 1.02
"""A tree must promise this much more than a plain step: its estimate is noisy and drafting is not free."""


class StepCosts(NamedTuple):
    """Measured seconds; only ratios matter."""

    verify_J: Float[Array, " J"]
    """One LLM pass at each row bucket of the program."""
    draft_M: Float[Array, " M"]
    """Drafting by each speculator."""


def path_chances(tree: TokenTree, rate_BN: Float[Array, "B N"], *, depth: int) -> Float[Array, "B N"]:
    """Chance that each node is committed: product of the rates along its path; root 1, padding 0."""
    rate_BN = jnp.minimum(rate_BN, _LARGEST_RATE)
    chance_BN = jnp.where(tree.parent_BN >= tree.num_rows, 1.0, 0.0) * tree.valid_BN

    def level(d: Int[Array, ""], chance_BN: Array) -> Array:
        parent_chance_BN = jnp.take_along_axis(chance_BN, tree.parent_BN, axis=1, mode="fill", fill_value=0.0)
        return jnp.where((tree.depth_BN == d) & tree.valid_BN, parent_chance_BN * rate_BN, chance_BN)

    return jax.lax.fori_loop(1, depth + 1, level, chance_BN)


def token_rates(
    chance_BN: Float[Array, "B N"],
    active_B: Bool[Array, " B"],
    buckets: Sequence[int],
    verify_J: Float[Array, " J"],
    draft_cost: Float[Array, ""] | float = 0.0,
) -> Float[Array, " J"]:
    """Expected tokens per second of all active slots by row bucket; the first is a plain step, with its head start.

    `draft_cost` is added to every bucket but the first (drafting still to be paid for).
    """
    last_row_J = np.minimum(np.array(buckets), chance_BN.shape[1]) - 1
    tokens_BJ = jnp.cumsum(chance_BN, axis=1)[:, last_row_J]
    tokens_J = jnp.sum(jnp.where(active_B[:, None], tokens_BJ, 0.0), axis=0)
    is_plain_J = jnp.arange(len(buckets)) == 0
    rate_J = tokens_J / (verify_J + jnp.where(is_plain_J, 0.0, draft_cost))
    return jnp.where(is_plain_J, rate_J * _NEED, rate_J)


def best_bucket(
    chance_BN: Float[Array, "B N"],
    active_B: Bool[Array, " B"],
    buckets: Sequence[int],
    verify_J: Float[Array, " J"],
    draft_cost: Float[Array, ""] | float = 0.0,
) -> Int[Array, ""]:
    """Index of the bucket with the most expected tokens per second, as `token_rates` has them; 0 is no speculation."""
    return jnp.argmax(token_rates(chance_BN, active_B, buckets, verify_J, draft_cost)).astype(jnp.int32)


def committed_nodes(tree: TokenTree, token_BA: Int[Array, "B A"], count_B: Int[Array, " B"]) -> tuple[Array, Array]:
    """Which nodes the committed tokens bear out, whether or not the LLM saw them.

    Args:
      tree: the whole proposal, also rows cut before verification.
      token_BA: tokens committed this step, bonus included.
      count_B: how many of them count.

    Returns:
      (hit, observed), bool `[B, N]`: the node's whole path was committed; its parent's was and the next token is known.
    """
    A = token_BA.shape[1]
    wanted_BN = jnp.take_along_axis(token_BA, jnp.clip(tree.depth_BN - 1, 0, A - 1), axis=1)
    matches_BN = (tree.token_BN == wanted_BN) & tree.valid_BN
    known_BN = (tree.depth_BN <= count_B[:, None]) & tree.valid_BN & (tree.depth_BN > 0)
    hit_BN = tree.valid_BN & (tree.depth_BN == 0)

    def level(d: Int[Array, ""], hit_BN: Array) -> Array:
        parent_hit_BN = jnp.take_along_axis(hit_BN, tree.parent_BN, axis=1, mode="fill", fill_value=False)
        return jnp.where(tree.depth_BN == d, parent_hit_BN & matches_BN & known_BN, hit_BN)

    hit_BN = jax.lax.fori_loop(1, A + 1, level, hit_BN)
    parent_hit_BN = jnp.take_along_axis(hit_BN, tree.parent_BN, axis=1, mode="fill", fill_value=False)
    return hit_BN & known_BN, parent_hit_BN & known_BN


def update_rates(
    rate_BJ: Float[Array, "B J"],
    prior_J: Float[Array, " J"],
    kind_BN: Int[Array, "B N"],
    hit_BN: Bool[Array, "B N"],
    observed_BN: Bool[Array, "B N"],
) -> Float[Array, "B J"]:
    """Running average of acceptance per kind after one step's observations."""
    J = rate_BJ.shape[1]
    is_kind_BNJ = (kind_BN[:, :, None] == jnp.arange(J)[None, None]) & observed_BN[:, :, None]
    seen_BJ = jnp.sum(is_kind_BNJ, axis=1, dtype=jnp.float32)
    hits_BJ = jnp.sum(is_kind_BNJ & hit_BN[:, :, None], axis=1, dtype=jnp.float32)
    rate_BJ = rate_BJ + _FORGETTING_RATE * (prior_J[None] - rate_BJ)
    weight_BJ = 1.0 - (1.0 - _LEARNING_RATE) ** seen_BJ
    return rate_BJ + weight_BJ * (hits_BJ / jnp.maximum(seen_BJ, 1.0) - rate_BJ)
