"""Drives the package through every tree that speculators can draw and every way in which it can be verified.

The probability of a tree comes from the oracle (exact_law.py), as does what the LLM goes on with behind an emitted
token; which draws are tried, how likely each is accepted, and what the bonus token is drawn from, from the package.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from exact_law import NOTHING, TableModel, continued, likeliest
from table_slots import PATH_LEN, merged_with_target, prepare, walk

from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.mss import DraftDistributions, MssOutcome
from specinfer_jax.tree.token_tree import TokenTree

BATCH = 1024
ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))
"""The largest uniform number: rejects every draw that may be rejected."""


class Proposal(NamedTuple):
    """What one speculator proposes: its tree's shape, and how the children of a node come about."""

    widths: tuple[int, ...]
    """Children per node at every level."""
    q_PV: np.ndarray
    """float64 `[P, V]`: its distribution behind every path, by number."""
    draw: Callable[[np.ndarray, int], Iterator[tuple[float, tuple[int, ...]]]]
    """A law of children: exact_law.independent, one_after_the_other or likeliest."""
    told: bool = True
    """The verifier is told q; False: children count as chosen without randomness."""

    @property
    def parents(self) -> list[int]:
        """Row of every row's parent; the root's is 0."""
        parent, start, size = [0], 0, 1
        for k in self.widths:
            parent += [start + i // k for i in range(size * k)]
            start, size = start + size, size * k
        return parent


class Room(NamedTuple):
    """Static size of one speculator's draft: small cases are padded to few sizes, each compiled once."""

    rows: int
    candidates: int
    told: bool = True


ROOMS = (Room(9, 4), Room(7, 3), Room(5, 4), Room(4, 4, told=False))
"""Room for three SSMs, the second with fewer candidates than there are tokens, and an n-gram speculator."""


class Trees(NamedTuple):
    """Every tree that can be drawn; R rows of all speculators side by side."""

    probability_n: np.ndarray
    token_nR: np.ndarray
    """NOTHING where there is no draw."""
    path_nR: np.ndarray
    """Number of the path that a row stands for; NOTHING where there is no draw."""
    parent_R: np.ndarray
    """-1 for roots."""


def padded(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals in the first rooms that suit them, silent speculators in the others."""
    waiting, filled = list(proposals), []
    for room in ROOMS:
        suits = bool(waiting) and waiting[0].told == room.told
        filled.append(waiting.pop(0) if suits else Proposal((), np.zeros((1, 4)), likeliest, told=room.told))
    assert not waiting
    return filled


def all_trees(proposals: Sequence[Proposal], V: int) -> Trees:
    """The product of all speculators' outcomes, which are independent of each other."""
    parts = [_outcomes(proposal, V) for proposal in proposals]
    starts = np.cumsum([0] + [len(proposal.parents) for proposal in proposals])
    index_mn = np.indices([len(part[0]) for part in parts]).reshape(len(parts), -1)
    parent_R = np.concatenate(
        [np.array([-1] + [start + row for row in p.parents[1:]]) for p, start in zip(proposals, starts, strict=False)]
    )
    return Trees(
        np.prod([part[0][i_n] for part, i_n in zip(parts, index_mn, strict=True)], axis=0),
        np.concatenate([part[1][i_n] for part, i_n in zip(parts, index_mn, strict=True)], axis=1),
        np.concatenate([part[2][i_n] for part, i_n in zip(parts, index_mn, strict=True)], axis=1),
        parent_R,
    )


def _outcomes(proposal: Proposal, V: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probability, tokens and path numbers of every tree of one speculator, grown node by node in row order."""
    parents, rows = proposal.parents, len(proposal.parents)
    probability_n, token_nR, path_nR = np.ones(1), np.zeros((1, rows), int), np.zeros((1, rows), int)
    for parent in sorted(set(parents[1:])):
        children = [row for row in range(1, rows) if parents[row] == parent]
        grown = []
        for path in np.unique(path_nR[:, parent]):
            n = np.flatnonzero(path_nR[:, parent] == path)
            nothing = [(1.0, (NOTHING,) * len(children))]
            outcomes = nothing if path == NOTHING else list(proposal.draw(proposal.q_PV[path], len(children)))
            for chance, tokens in outcomes:
                token_mR, path_mR = token_nR[n].copy(), path_nR[n].copy()
                token_mR[:, children] = tokens
                path_mR[:, children] = [NOTHING if t == NOTHING else path * V + t + 1 for t in tokens]
                grown.append((probability_n[n] * chance, token_mR, path_mR))
        probability_n, token_nR, path_nR = (np.concatenate(x) for x in zip(*grown, strict=True))
    return probability_n, token_nR, path_nR


def acceptances(trees: Trees) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """(trees, draws) for every path of draws that could be accepted, the empty one first: the trees that have it.

    Draws that name one token share a node, so that a draw may be accepted below a draw of another speculator.
    """
    parent_path_nR = np.where(trees.parent_R >= 0, trees.path_nR[:, trees.parent_R], NOTHING - 1)

    def below(n: np.ndarray, accepted: tuple[int, ...], path_n: np.ndarray) -> Iterator:
        yield n, accepted
        for r in np.flatnonzero(trees.parent_R >= 0):
            has_it_n = (parent_path_nR[n, r] == path_n) & (trees.path_nR[n, r] != NOTHING)
            if has_it_n.any():
                yield from below(n[has_it_n], (*accepted, int(r)), trees.path_nR[n[has_it_n], r])

    everything = np.arange(len(trees.probability_n))
    yield from below(everything, (), np.zeros(len(everything), int))


class Runs(NamedTuple):
    """Walks of the package, one per tree and accepted path of draws; b counts them."""

    tree_b: np.ndarray
    """Index into `Trees`."""
    accepted_bR: np.ndarray
    """Draws that were to be accepted."""
    outcome: MssOutcome
    """As numpy arrays, draws in the columns of `Trees`."""


def emitted_law(model: TableModel, proposals: Sequence[Proposal], *, length: int, renormalize: bool) -> np.ndarray:
    """float64 `[V ** length]`: law of the next tokens if every step speculates like this and the rest is the LLM's own.

    Args:
      model: the LLM.
      proposals: one per speculator, in the order merged.
      length: tokens; depth + 1 to see everything.
      renormalize: the verification rule.
    """
    V = model.logits_PV.shape[1]
    proposals = padded(proposals)
    trees = all_trees(proposals, V)
    runs = run_all(model, proposals, trees, renormalize=renormalize)
    verdict, accept_bR, weight_bV = runs.outcome
    assert not np.isnan(accept_bR).any() and not np.isnan(weight_bV).any() and not verdict.failed_B.any()
    step_bR = np.where(runs.accepted_bR, accept_bR, 1 - accept_bR.astype(np.float64))
    chance_b = np.prod(np.where(accept_bR >= 0, step_bR, 1.0), axis=1)
    reached_per_tree = np.bincount(runs.tree_b, chance_b, len(trees.probability_n))
    np.testing.assert_allclose(reached_per_tree, 1, atol=2e-6, err_msg="what can happen must add up to 1 in every tree")
    possible_b = chance_b > 0
    assert (verdict.accepted_B == runs.accepted_bR.sum(axis=1))[possible_b].all()

    mass = [np.zeros((V**a, 1)) for a in range(length + 1)]
    chance_b = chance_b * trees.probability_n[runs.tree_b]
    for a in range(PATH_LEN):
        b = np.flatnonzero(possible_b & (verdict.accepted_B == a))
        known = min(a, length)
        prefix_b = np.array(verdict.token_BA[b, :known], int) @ (V ** np.arange(known - 1, -1, -1))
        if a < length:
            bonus_bV = weight_bV[b] / weight_bV[b].sum(axis=1, keepdims=True, dtype=np.float64)
            np.add.at(mass[a + 1].reshape(V**a, V), prefix_b, chance_b[b, None] * bonus_bV)
        else:
            np.add.at(mass[length][:, 0], prefix_b, chance_b[b])
    return continued(mass, model.laws(length - 1), length)


def run_all(model: TableModel, proposals: Sequence[Proposal], trees: Trees, *, renormalize: bool) -> Runs:
    """Every tree with every path of draws accepted."""
    tree_of, accepted_of = [], []
    for n, accepted in acceptances(trees):
        tree_of.append(n)
        accepted_of.append(np.tile(np.isin(np.arange(len(trees.parent_R)), accepted), (len(n), 1)))
    tree_b, accepted_bR = np.concatenate(tree_of), np.concatenate(accepted_of)
    column_R = _columns(proposals)
    prepared = prepare(model, BATCH)
    parts = []
    for start in range(0, len(tree_b), BATCH):
        # The last batch is filled up with runs of the first tree, which are dropped.
        rows_b = np.minimum(np.arange(start, start + BATCH), len(tree_b) - 1)
        uniform_BR = np.full((BATCH, sum(room.rows for room in ROOMS)), ALMOST_ONE)
        uniform_BR[:, column_R] = np.where(accepted_bR[rows_b], np.float32(0), ALMOST_ONE)
        drafts = as_drafts(proposals, trees.token_nR[tree_b[rows_b]], trees.path_nR[tree_b[rows_b]])
        merged, target = merged_with_target(drafts, prepared)
        outcome = walk(merged, target, prepared.history, uniform_BR, renormalize=renormalize)
        parts.append(jax.tree.map(np.asarray, outcome))
    whole = jax.tree.map(lambda *x: np.concatenate(x)[: len(tree_b)], *parts)
    return Runs(tree_b, accepted_bR, whole._replace(accept_BR=whole.accept_BR[:, column_R]))


def _columns(proposals: Sequence[Proposal]) -> np.ndarray:
    """Column of every row of `Trees` in the padded drafts."""
    starts = itertools.accumulate([0] + [room.rows for room in ROOMS])
    return np.concatenate([start + np.arange(len(p.parents)) for p, start in zip(proposals, starts, strict=False)])


def as_drafts(proposals: Sequence[Proposal], token_BR: np.ndarray, path_BR: np.ndarray) -> tuple[Draft, ...]:
    """What the speculators hand over: rows level by level, every row a draw from its parent's distribution."""
    drafts, start = [], 0
    for proposal, room in zip(proposals, ROOMS, strict=True):
        size = len(proposal.parents)
        assert size <= room.rows and proposal.told == room.told
        drafts.append(_as_draft(proposal, room, token_BR[:, start : start + size], path_BR[:, start : start + size]))
        start += size
    return tuple(drafts)


def _as_draft(proposal: Proposal, room: Room, token_Bn: np.ndarray, path_Bn: np.ndarray) -> Draft:
    B, size = token_Bn.shape
    padding = ((0, 0), (0, room.rows - size))
    parent_n = np.array([room.rows, *proposal.parents[1:]])
    depth_n = np.array([0] * size)
    for row in range(1, size):
        depth_n[row] = depth_n[proposal.parents[row]] + 1
    there_Bn = token_Bn != NOTHING
    tree = TokenTree(
        np.pad(np.where(there_Bn, token_Bn, 0), padding).astype(np.int32),
        np.pad(np.tile(parent_n, (B, 1)), padding, constant_values=room.rows).astype(np.int32),
        np.pad(np.tile(depth_n, (B, 1)), padding).astype(np.int32),
        np.pad(there_Bn, padding),
    )
    kind_BN = np.zeros((B, room.rows), np.int32)
    if not proposal.told:
        return Draft(tree, kind_BN)
    # Candidates from the likeliest down, as a speculator has them; the entry of a row that is not there is nonsense.
    id_PC = np.argsort(-proposal.q_PV, axis=1, kind="stable")
    assert not np.take_along_axis(proposal.q_PV, id_PC[:, room.candidates :], axis=1).any(), "q has too many tokens"
    parent_path_Bn = path_Bn[:, proposal.parents]
    is_slot_BnC = id_PC[parent_path_Bn] == token_Bn[:, :, None]
    slot_BN = np.pad(np.argmax(is_slot_BnC, axis=2), padding).astype(np.int32)
    path_BE = np.pad(path_Bn, padding)[:, :-1]  # the last row expands into nothing
    path_BE = np.minimum(path_BE, len(id_PC) - 1)  # leaves may lie deeper than q is given; no child reads theirs
    id_BEC = id_PC[path_BE][:, :, : room.candidates].astype(np.int32)
    prob_BEC = np.take_along_axis(proposal.q_PV[path_BE], id_BEC, axis=2).astype(np.float32)
    return Draft(tree, kind_BN, slot_BN, DraftDistributions(id_BEC, prob_BEC))


def fixed(tokens_by_row: Sequence[int], widths: tuple[int, ...], V: int) -> Proposal:
    """What an n-gram speculator would say: these tokens, without randomness, whatever else happens."""
    proposal = Proposal(widths, np.zeros((0, V)), likeliest, told=False)
    children: dict[int, tuple[int, ...]] = {}
    path_n = [0]
    for row, token in enumerate(tokens_by_row, start=1):
        path = path_n[proposal.parents[row]]
        children[path] = (*children.get(path, ()), token)
        path_n.append(path * V + token + 1)
    q_PV = np.zeros((max(children) + 1, V))
    for path, tokens in children.items():
        q_PV[path, list(tokens)] = 1 - np.arange(len(tokens)) / 8  # likeliest() names them in this order
    return proposal._replace(q_PV=q_PV)


def proposed(*proposals: Proposal) -> tuple[Draft, ...]:
    """The one tree of proposals without randomness, in every slot."""
    filled = padded(proposals)
    trees = all_trees(filled, 4)
    assert len(trees.probability_n) == 1
    return as_drafts(filled, *(np.repeat(x, BATCH, axis=0) for x in (trees.token_nR, trees.path_nR)))
