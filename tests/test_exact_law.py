"""Stochastic verification leaves the LLM's distribution unchanged: proved by enumerating everything that can happen.

Small table models; every tree that the draws can give, every way in which it can be verified. The package says how
likely each draw is accepted and what the bonus token is drawn from; the float64 oracle says the rest.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import ALMOST_ONE, BATCH, Proposal, all_trees, as_drafts, emitted_law, fixed
from exact_law import (
    Rules,
    TableModel,
    distance,
    filtered,
    independent,
    one_after_the_other,
)
from jaxtyping import Array
from table_slots import PATH_LEN, merged_with_target, prepare, target_of, walk

from specinfer_jax.speculation.draft import Draft, MergedDraft
from specinfer_jax.speculation.verifier import Target
from specinfer_jax.tree.token_tree import clip_depth, order_by

V = 4
PATHS = 1 + V + V**2 + V**3
PLAIN = Rules()
PROVED = 1e-6
"""Total variation that float32 may cost."""
EXACT = {"iid": (independent, False), "without replacement": (one_after_the_other, True)}
"""How children are drawn, and whether the verifier renormalises."""

exact_rules = pytest.mark.parametrize(("draw", "renormalize"), EXACT.values(), ids=EXACT)


def llm(seed: int, *, vocab: int = V, **settings) -> TableModel:
    """Ids from `vocab` on have probability 0."""
    logits_PV = np.random.default_rng(seed).normal(scale=1.3, size=(PATHS, V)).astype(np.float32)
    logits_PV[:, vocab:] = -np.inf
    return TableModel(logits_PV, **settings)


def ssm(seed: int, *, vocab: int = V, rules: Rules = PLAIN) -> np.ndarray:
    """An SSM's distribution behind every path, after its own filters."""
    return np.stack([filtered(x_V, rules) for x_V in llm(seed, vocab=vocab).logits_PV.astype(np.float64)])


def check(model: TableModel, proposals: list[Proposal], *, renormalize: bool) -> None:
    length = max(len(p.widths) for p in proposals) + 1
    law = emitted_law(model, proposals, length=length, renormalize=renormalize)
    assert law.sum() == pytest.approx(1, abs=1e-5)
    assert distance(law, model.joint(length)) < PROVED


@exact_rules
@pytest.mark.parametrize(
    ("widths", "vocab"),
    [
        ((1,), 4), ((2,), 4), ((3,), 4), ((4,), 4), ((1, 1), 4), ((2, 1), 4), ((3, 1), 3), ((2, 2), 3),
        ((1, 1, 1), 4), ((2, 1, 1), 3), ((1, 2, 1), 3), ((1, 1, 2), 3),
    ],
    ids=str,
)  # fmt: skip
def test_one_ssm(widths, vocab, draw, renormalize) -> None:
    # case B011
    check(llm(1, vocab=vocab), [Proposal(widths, ssm(2, vocab=vocab), draw)], renormalize=renormalize)


@pytest.mark.parametrize("name", ["without replacement", pytest.param("iid", marks=pytest.mark.slow)])
def test_more_children_than_tokens(name) -> None:
    """<4,1> over three tokens: without replacement the surplus draws do not exist."""
    draw, renormalize = EXACT[name]
    check(llm(1, vocab=3), [Proposal((4, 1), ssm(2, vocab=3), draw)], renormalize=renormalize)


SSMS = {
    "2 at one node": [((2,), 11), ((3,), 12)],
    "2 of width 4 and 2": [((4,), 11), ((2,), 12)],
    "3 at one node": [((2,), 11), ((2,), 12), ((2,), 13)],
    "2, two levels": [((2, 1), 11), ((1, 1), 12)],
    "2, different depths": [((1,), 11), ((1, 2), 12)],
    "3, two levels": [((1, 1), 11), ((1, 1), 12), ((1, 1), 13)],
    "2, three levels": [((1, 1, 1), 11), ((1, 1, 1), 12)],
    "2 identical": [((2, 1), 11), ((1, 1), 11)],
    "2 identical, three levels": [((1, 1, 1), 11), ((1, 1, 1), 11)],
    "3, two of them identical": [((1, 1), 11), ((1,), 11), ((2,), 13)],
}


@exact_rules
@pytest.mark.parametrize("ssms", SSMS.values(), ids=SSMS)
def test_several_ssms(ssms, draw, renormalize) -> None:
    # case B013; the second SSM always has fewer candidates than there are tokens
    vocab = 3 if max(len(widths) for widths, _ in ssms) > 1 else 4
    proposals = [
        Proposal(widths, ssm(seed, vocab=3 if m == 1 else vocab), draw) for m, (widths, seed) in enumerate(ssms)
    ]
    check(llm(3, vocab=vocab), proposals, renormalize=renormalize)


def test_wide_nodes_without_replacement() -> None:
    proposals = [Proposal((k,), ssm(20 + k), one_after_the_other) for k in (4, 4)]
    proposals.insert(1, Proposal((3,), ssm(23, vocab=3), one_after_the_other))
    check(llm(4), proposals, renormalize=True)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(4, 4), (4, 2, 3)], ids=str)
def test_wide_nodes_iid(widths) -> None:
    proposals = [Proposal((k,), ssm(30 + m, vocab=3 if m == 1 else 4), independent) for m, k in enumerate(widths)]
    check(llm(4), proposals, renormalize=False)


@pytest.mark.slow
@exact_rules
@pytest.mark.parametrize("seed", range(40, 46))
def test_more_models(seed, draw, renormalize) -> None:
    check(llm(seed, vocab=3), [Proposal((2, 2), ssm(seed + 50, vocab=3), draw)], renormalize=renormalize)
    identical = Proposal((2, 1), ssm(seed + 50, vocab=3), draw)
    check(llm(seed, vocab=3), [identical, identical], renormalize=renormalize)
    with_ngram = [identical, Proposal((1, 1), ssm(seed + 90, vocab=3), draw), fixed([1, 2, 0], (1, 1, 1), V)]
    check(llm(seed, vocab=3), with_ngram, renormalize=renormalize)


@exact_rules
@pytest.mark.parametrize(
    ("tokens", "widths"), [([1, 2, 0], (1, 1, 1)), ([2, 0, 1], (3,)), ([3, 0], (1, 1)), ([0, 0], (2,))], ids=str
)
def test_merged_with_children_chosen_without_randomness(tokens, widths, draw, renormalize) -> None:
    # case B010; id 3 has probability 0, and a token may be named twice
    proposals = [Proposal((2, 1), ssm(5, vocab=3), draw), fixed(tokens, widths, V)]
    check(llm(6, vocab=3), proposals, renormalize=renormalize)


TARGETS = {
    "plain": Rules(),
    "temperature": Rules(temperature=0.6),
    "top-k": Rules(top_k=2),
    "top-p": Rules(top_p=0.75),
    "min-p": Rules(min_p=0.4),
    "repetition": Rules(repetition=1.7),
    "presence": Rules(presence=0.9),
    "frequency": Rules(frequency=-0.6),
    "bias and bans": Rules(bias=((0, 0.7), (1, -np.inf)), bad=((2, 0), (0, 2, 2))),
    "all": Rules(1.4, 2, 0.9, 0.05, 1.2, 0.3, 0.4, 0, ((1, 0.4),), ((2, 2),)),
}


@exact_rules
@pytest.mark.parametrize("rules", TARGETS.values(), ids=TARGETS)
def test_sampling_parameters(rules, draw, renormalize) -> None:
    # cases B009, B028: every node's law follows from its own history; the SSMs' filters are not the LLM's
    model = llm(7, vocab=3, rules=rules, prompt=(1, 0), output=(2, 2))
    first = Proposal((2, 1), ssm(8, vocab=3, rules=Rules(temperature=1.3, top_k=2)), draw)
    second = Proposal((1, 1), ssm(9, vocab=3, rules=Rules(top_p=0.8)), draw)
    check(model, [first, second, fixed([2, 2], (1, 1), V)], renormalize=renormalize)


@exact_rules
def test_min_tokens_inside_a_tree(draw, renormalize) -> None:
    # case B029: one token is out, so the stop id may come behind two more and no sooner
    model = llm(7, vocab=3, rules=Rules(min_tokens=3), prompt=(1,), output=(2,), stop_ids=(0,))
    check(model, [Proposal((2, 1), ssm(8, vocab=3), draw)], renormalize=renormalize)
    assert model.law((2,))[0] == 0 and model.law((2, 2))[0] > 0 == model.law(())[0]


class TestLargeTrees:
    """Trees too large to enumerate are exact if every node is, taken alone, since no node depends on another.

    Induction over levels: a token accepted at an exact node has the LLM's law, and the draws below it, being
    independent of those above, make its node exact in turn.
    """

    TREES, SLOTS = 64, BATCH

    def sampled(self, draw, rng: np.random.Generator) -> tuple[Draft, ...]:
        """Trees of 18 draws by three SSMs and an n-gram speculator, drawn by the oracle; each in many slots."""
        proposals = [
            Proposal(widths, ssm(60 + m, vocab=3), draw) for m, widths in enumerate([(2, 2), (2, 1, 1), (1, 1, 1)])
        ]
        proposals.append(fixed([1, 2, 0], (1, 1, 1), V))
        token, path = [], []
        for proposal in proposals:
            token_nR, path_nR = (np.zeros((self.TREES, len(proposal.parents)), int) for _ in range(2))
            for n, parent in itertools.product(range(self.TREES), sorted(set(proposal.parents[1:]))):
                children = [row for row in range(1, len(proposal.parents)) if proposal.parents[row] == parent]
                outcomes = list(proposal.draw(proposal.q_PV[path_nR[n, parent]], len(children)))
                chances = np.array([chance for chance, _ in outcomes])
                token_nR[n, children] = outcomes[rng.choice(len(outcomes), p=chances / chances.sum())][1]
                path_nR[n, children] = path_nR[n, parent] * V + token_nR[n, children] + 1
            token.append(token_nR)
            path.append(path_nR)
        tree_B = np.arange(self.SLOTS) % self.TREES
        return as_drafts(proposals, np.concatenate(token, axis=1)[tree_B], np.concatenate(path, axis=1)[tree_B])

    @exact_rules
    def test_a_node_in_a_tree_is_a_node_alone(self, draw, renormalize) -> None:
        rng = np.random.default_rng(10)
        prepared = prepare(llm(1, vocab=3), self.SLOTS)
        merged, target = merged_with_target(self.sampled(draw, rng), prepared)
        # Half of the uniforms accept whatever can be accepted, so that walks get to the last level.
        uniform_BR = rng.choice(np.array([0, ALMOST_ONE], np.float32), merged.draws.parent_BR.shape)
        outcome = jax.tree.map(np.asarray, walk(merged, target, prepared.history, uniform_BR, renormalize=renormalize))
        path_BA, accepted_B = outcome.verdict.path_BA, outcome.verdict.accepted_B
        assert {1, 2, 3} <= set(accepted_B)
        slots_B, N = np.arange(self.SLOTS), merged.tree.num_rows
        parent_BR = np.asarray(merged.draws.parent_BR)
        logits_BNV = np.asarray(target.logits_VT).T.reshape(self.SLOTS, N, V)
        is_tried_BR = np.zeros(parent_BR.shape, bool)
        for level in range(PATH_LEN):
            node_B = path_BA[:, level]
            here_b = np.flatnonzero(node_B < N)
            # The same draws under a root with the node's law: those of this node, and no others.
            is_here_BR = (parent_BR == node_B[:, None]) & (parent_BR < N)
            moved = merged.draws._replace(parent_BR=jnp.asarray(np.where(is_here_BR, 0, N), jnp.int32))
            law_BNV = np.tile(logits_BNV[slots_B, np.minimum(node_B, N - 1)][:, None], (1, N, 1))
            as_root = target._replace(logits_VT=jnp.asarray(law_BNV.reshape(-1, V).T))
            alone = walk(merged._replace(draws=moved), as_root, prepared.history, uniform_BR, renormalize=renormalize)
            expected_BR = np.where(is_here_BR, outcome.accept_BR, -1)
            np.testing.assert_array_equal(np.asarray(alone.accept_BR)[here_b], expected_BR[here_b])
            ends_b = np.flatnonzero((node_B < N) & (accepted_B == level))
            np.testing.assert_array_equal(np.asarray(alone.weight_BV)[ends_b], outcome.weight_BV[ends_b])
            is_tried_BR |= is_here_BR
        assert (outcome.accept_BR[~is_tried_BR] == -1).all(), "tried a draw of a node off the path"

    def test_reordered_rows_change_nothing(self) -> None:
        """Draws are tried in the order drawn, wherever their nodes went."""
        rng = np.random.default_rng(11)
        prepared = prepare(llm(1, vocab=3), self.SLOTS)
        merged, target = merged_with_target(self.sampled(one_after_the_other, rng), prepared)
        uniform_BR = rng.uniform(size=merged.draws.parent_BR.shape).astype(np.float32)
        before = walk(merged, target, prepared.history, uniform_BR, renormalize=True)
        factor_BN = rng.uniform(0.1, 0.9, merged.tree.token_BN.shape).astype(np.float32)

        @jax.jit
        def reordered(merged: MergedDraft) -> tuple[Array, MergedDraft, Target]:
            score_BN = jnp.ones_like(factor_BN)
            for _ in range(3):  # a node's score is the product along its path
                parent_BN = jnp.take_along_axis(score_BN, merged.tree.parent_BN, axis=1, mode="fill", fill_value=1)
                score_BN = jnp.where(merged.tree.depth_BN > 0, parent_BN * factor_BN, 1)
            tree, old_row_BN = order_by(merged.tree, score_BN)
            return old_row_BN, merged.moved(tree, old_row_BN), target_of(tree, prepared)

        old_row_BN, moved, target = reordered(merged)
        assert (np.diff(np.asarray(old_row_BN), axis=1) < 0).any(), "no row moved"
        after = walk(moved, target, prepared.history, uniform_BR, renormalize=True)
        np.testing.assert_array_equal(before.accept_BR, after.accept_BR)
        np.testing.assert_array_equal(before.weight_BV, after.weight_BV)
        np.testing.assert_array_equal(before.verdict.token_BA, after.verdict.token_BA)
        assert {1, 2, 3} <= set(np.asarray(after.verdict.accepted_B))

    def test_cut_trees_are_exact_too(self) -> None:
        """Levels beyond a request's last token are dropped; what is above them does not change."""
        rng = np.random.default_rng(12)
        model = llm(1, vocab=3)
        prepared = prepare(model, self.SLOTS)
        merged, target = merged_with_target(self.sampled(independent, rng), prepared)
        uniform_BR = rng.uniform(size=merged.draws.parent_BR.shape).astype(np.float32)
        before = walk(merged, target, prepared.history, uniform_BR, renormalize=False)

        @jax.jit
        def cut(merged: MergedDraft) -> tuple[MergedDraft, Target]:
            tree, old_row_BN = clip_depth(merged.tree, jnp.ones(self.SLOTS, jnp.int32))
            return merged.moved(tree, old_row_BN), target_of(tree, prepared)

        after = walk(*cut(merged), prepared.history, uniform_BR, renormalize=False)
        is_first_BR = np.asarray(merged.draws.parent_BR) == 0
        np.testing.assert_array_equal(after.accept_BR, np.where(is_first_BR, before.accept_BR, -1))
        accepted_B = np.asarray(after.verdict.accepted_B)
        np.testing.assert_array_equal(accepted_B, np.minimum(before.verdict.accepted_B, 1))
        law_TV = np.stack([model.law((token,)) for token in range(V)])
        got_bV = np.asarray(after.weight_BV)[accepted_B == 1]
        expected_bV = law_TV[np.asarray(after.verdict.token_BA)[accepted_B == 1, 0]]
        np.testing.assert_allclose(got_bV / got_bV.sum(axis=1, keepdims=True), expected_bV, atol=1e-6)


def test_the_enumeration_covers_everything() -> None:
    """The oracle's trees have probabilities that add up to 1, and as many as the draws allow."""
    for draw, count in ((independent, 4**3), (one_after_the_other, 4 * 3 * 2)):
        trees = all_trees([Proposal((3,), ssm(2), draw)], V)
        assert len(trees.probability_n) == count and trees.probability_n.sum() == pytest.approx(1, abs=1e-12)
