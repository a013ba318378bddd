"""What a speculator proposes, and one tree out of several speculators' proposals (SpecInfer, Definition 3.2).

Merging shares nodes and never draws: where SSM A and SSM B (or two i.i.d. draws of one SSM) name the same token, the
tree holds it once, and the verifier still sees two draws, each with the distribution it came from.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from specinfer_jax.speculation.mss import DraftDistributions, Draws
from specinfer_jax.tree.merge import MergedTree, merge_trees
from specinfer_jax.tree.token_tree import TokenTree, scatter_rows

_NO_ID = jnp.iinfo(jnp.int32).max


class Draft(NamedTuple):
    """A proposed tree, what each row counts towards, and what it was drawn from.

    Every row behind the root is one draw, in the order drawn; equal siblings and invalid rows are allowed.
    """

    tree: TokenTree
    """`[B, 1 + num_nodes]`; here alone invalid rows may lie between valid ones."""
    kind_BN: Int[Array, "B N"]
    """Index into the speculator's acceptance rates (see gate.py); any value for root and padding."""
    slot_BN: Int[Array, "B N"] | None = None
    """Candidate that each row drew from its parent's distribution; None: chosen without randomness."""
    drawn_from: DraftDistributions | None = None
    """Distribution of the children of every expanded row; row e expands into entry e."""


class MergedDraft(NamedTuple):
    """One tree per slot out of all speculators' proposals."""

    tree: TokenTree
    """`[B, N]`."""
    kind_BN: Int[Array, "B N"]
    """Acceptance statistic of every node, over all speculators."""
    source_BN: UInt32[Array, "B N"]
    """Bit m: speculator m proposed the node."""
    draws: Draws | None = None
    """Every draw of every speculator, if the verification rule needs them."""
    drawn_from: DraftDistributions | None = None
    """Distributions of all SSMs side by side."""

    def moved(self, tree: TokenTree, old_row_BN: Int[Array, "B N"]) -> "MergedDraft":
        """The same draft after its tree's rows moved; draws whose nodes were dropped are no draws any more."""

        def take(x_BN: Array) -> Array:
            return jnp.take_along_axis(x_BN, old_row_BN, axis=1, mode="fill", fill_value=0)

        draws = self.draws
        if draws is not None:
            N = tree.num_rows
            row_BN = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None], old_row_BN.shape)
            new_row_BN = scatter_rows(jnp.full_like(row_BN, N), old_row_BN, row_BN)

            def renumber(row_BR: Array) -> Array:
                return jnp.take_along_axis(new_row_BN, row_BR, axis=1, mode="fill", fill_value=N)

            draws = draws._replace(parent_BR=renumber(draws.parent_BR), child_BR=renumber(draws.child_BR))
        return MergedDraft(tree, take(self.kind_BN), take(self.source_BN), draws, self.drawn_from)


def merge_drafts(drafts: Sequence[Draft], *, with_draws: bool) -> MergedDraft:
    """The union of all proposals.

    Args:
      drafts: one per speculator, all with the same roots; kinds numbered over all speculators.
      with_draws: keep every draw and its distribution.
    """
    merged = merge_trees([draft.tree for draft in drafts])
    kind_BR = jnp.concatenate([draft.kind_BN for draft in drafts], axis=1)
    kind_BN = jnp.take_along_axis(kind_BR, merged.row_BN, axis=1, mode="fill", fill_value=0)
    whole = MergedDraft(merged.tree, kind_BN, merged.source_BN)
    return whole._replace(draws=_all_draws(drafts, merged), drawn_from=_side_by_side(drafts)) if with_draws else whole


def _all_draws(drafts: Sequence[Draft], merged: MergedTree) -> Draws:
    """One draw per input row; roots are none."""
    N = merged.tree.num_rows
    columns: list[Draws] = []
    start = first_chain = 0
    for draft in drafts:
        parent_BN, size = draft.tree.parent_BN, draft.tree.num_rows
        node_BN = merged.node_BR[:, start : start + size]
        # The root's own parent is out of range, which makes it no draw.
        parent_node_BN = jnp.take_along_axis(node_BN, parent_BN, axis=1, mode="fill", fill_value=N)
        is_draw_BN = (parent_node_BN < N) & (node_BN < N)
        nothing_BN = jnp.zeros_like(node_BN)
        is_random = draft.slot_BN is not None and draft.drawn_from is not None
        columns.append(
            Draws(
                parent_BR=jnp.where(is_draw_BN, parent_node_BN, N),
                child_BR=jnp.where(is_draw_BN, node_BN, N),
                chain_BR=jnp.where(is_draw_BN, parent_BN + first_chain, 0) if is_random else nothing_BN,
                slot_BR=nothing_BN if draft.slot_BN is None else draft.slot_BN,
                is_random_BR=is_draw_BN & is_random,
            )
        )
        start += size
        first_chain += 0 if draft.drawn_from is None else draft.drawn_from.prob_BEC.shape[1]
    return Draws(*(jnp.concatenate(parts, axis=1) for parts in zip(*columns, strict=True)))


def _side_by_side(drafts: Sequence[Draft]) -> DraftDistributions:
    """All SSMs' distributions along E, narrower ones padded with candidates that are never drawn."""
    given = [draft.drawn_from for draft in drafts if draft.drawn_from is not None]
    if not given:
        B = drafts[0].tree.token_BN.shape[0]
        return DraftDistributions(jnp.full((B, 1, 1), _NO_ID, jnp.int32), jnp.zeros((B, 1, 1), jnp.float32))
    widest = max(q.prob_BEC.shape[2] for q in given)

    def padded(x_BEC: Array, fill: int) -> Array:
        return jnp.pad(x_BEC, ((0, 0), (0, 0), (0, widest - x_BEC.shape[2])), constant_values=fill)

    return DraftDistributions(
        jnp.concatenate([padded(q.id_BEC, _NO_ID) for q in given], axis=1),
        jnp.concatenate([padded(q.prob_BEC, 0) for q in given], axis=1),
    )
