"""Walks down a tree give what incremental decoding gives, token for token, penalties and bans included."""

import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import BATCH, Proposal, as_drafts, emitted_law, fixed, proposed
from exact_law import Rules, TableModel, independent, likeliest, one_after_the_other, path_number
from table_slots import (
    MOST_CONTEXT,
    PATH_LEN,
    Prepared,
    greedy,
    merged_with_target,
    naive,
    prepare,
    root_history,
    sampling_of,
    walk,
)

from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.sampling import History, in_use
from specinfer_jax.speculation.verifier import Target, Verdict
from specinfer_jax.tree.token_tree import TokenTree, root_only

V = 4
PATHS = 1 + V + V**2 + V**3


def table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=1.2, size=(PATHS, V)).astype(np.float32)


def slots_of(model: TableModel, requests: list[Rules], seed: int) -> Prepared:
    """The model in BATCH slots, requests dealt out in turn, every slot with a random key of its own."""
    rules = [requests[b % len(requests)] for b in range(BATCH)]
    prepared = prepare(model, len(rules))
    key_B2 = jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, (len(rules), 2)), jnp.uint32)
    sampling = sampling_of(rules, V)._replace(key_B2=key_B2)
    is_shaped = np.bool_(any(rule.is_shaped for rule in rules))
    return prepared._replace(sampling=sampling, history=histories(model, np.zeros((len(rules), 0), int), is_shaped))


def histories(model: TableModel, path_Ba: np.ndarray, is_shaped: np.bool_ = np.bool_(True)) -> History:  # noqa: B008
    """Counted afresh from the prompt, the output and a path, as in incremental decoding."""
    B, context = len(path_Ba), [*model.prompt, *model.output]
    token_BS = np.zeros((B, MOST_CONTEXT), np.int32)
    token_BS[:, : len(context)] = context
    token_BS[:, len(context) : len(context) + path_Ba.shape[1]] = path_Ba
    committed_B = np.full(B, len(context) + path_Ba.shape[1], np.int32)
    return root_history(token_BS, committed_B, np.full(B, len(model.prompt), np.int32), vocab_size=V, shaped=is_shaped)


def incremental(model: TableModel, prepared: Prepared, position: int) -> np.ndarray:
    """PATH_LEN tokens of every slot, one at a time: trees of a root alone, histories counted afresh."""
    B = prepared.sampling.key_B2.shape[0]
    use = in_use(prepared.sampling, jnp.ones(B, bool))
    path_Ba = np.zeros((B, 0), int)
    for a in range(PATH_LEN):
        number_B = np.array([path_number(path, V) for path in path_Ba])
        target = Target(prepared.logits_PV[number_B].T, prepared.sampling, prepared.is_stop_BV, use)
        tree = root_only(jnp.zeros(B, jnp.int32), 1)
        verdict = naive(tree, target, histories(model, path_Ba), jnp.full(B, position + a), path_len=1)
        assert not np.asarray(verdict.accepted_B).any()
        path_Ba = np.concatenate([path_Ba, np.asarray(verdict.token_BA)], axis=1)
    return path_Ba


def chain(*tokens: int) -> Proposal:
    """An SSM that is sure of these tokens."""
    return fixed(tokens, (1,) * len(tokens), V)._replace(told=True)


REQUESTS = [
    Rules(),
    Rules(temperature=0.0),
    Rules(temperature=0.6, top_k=2),
    Rules(top_p=0.7),
    Rules(min_p=0.4, min_tokens=4),
    Rules(repetition=1.8, presence=0.5),
    Rules(frequency=-0.7),
    Rules(temperature=0.0, frequency=0.9, bad=((2, 1), (0, 0))),
    Rules(1.3, 3, 0.9, 0.05, 1.3, 0.2, 0.3, 3, ((1, 0.8),), ((0, 3),)),
]


def random_trees(B: int, seed: int) -> tuple[Draft, ...]:
    """Trees of all shapes in the rooms, tokens at random."""
    rng = np.random.default_rng(seed)
    some_q_PV = np.tile(np.array([0.5, 0.25, 0.25, 0]), (PATHS, 1))
    proposals = [Proposal(widths, some_q_PV, independent) for widths in [(2, 2), (1, 1, 1), (4,)]]
    proposals.append(Proposal((3,), some_q_PV, likeliest, told=False))
    token, path = [], []
    for proposal in proposals:
        token_BR, path_BR = (np.zeros((B, len(proposal.parents)), int) for _ in range(2))
        token_BR[:, 1:] = rng.integers(0, 3, (B, len(proposal.parents) - 1))
        for row, parent in enumerate(proposal.parents[1:], start=1):
            path_BR[:, row] = path_BR[:, parent] * V + token_BR[:, row] + 1
        token.append(token_BR)
        path.append(path_BR)
    return as_drafts(proposals, np.concatenate(token, axis=1), np.concatenate(path, axis=1))


def test_naive_sampling_is_incremental_decoding_token_for_token() -> None:
    # cases B008, B028, B029: the same seeds, whatever is drafted and whatever the parameters
    B = BATCH
    model = TableModel(table(1), prompt=(1, 3), output=(2,), stop_ids=(0,))
    prepared = slots_of(model, REQUESTS, seed=2)
    expected_BA = incremental(model, prepared, position=40)
    assert len(np.unique(expected_BA, axis=0)) > 100
    for seed in (3, 4):
        merged, target = merged_with_target(random_trees(B, seed), prepared)
        got = naive(merged.tree, target, prepared.history, jnp.full(B, 40), path_len=PATH_LEN)
        check_against_incremental(merged.tree, got, expected_BA)


def check_against_incremental(tree: TokenTree, verdict: Verdict, expected_BA: np.ndarray) -> None:
    token_BN, parent_BN, _, valid_BN = (np.asarray(x) for x in tree)
    assert set(np.asarray(verdict.accepted_B)) == {0, 1, 2, 3} and not np.asarray(verdict.failed_B).any()
    for b, accepted in enumerate(np.asarray(verdict.accepted_B)):
        expected = expected_BA[b, : accepted + 1].tolist()
        assert np.asarray(verdict.token_BA)[b, : accepted + 1].tolist() == expected
        # As far as the tree goes along, and no further.
        node = 0
        for token in expected:
            children = np.flatnonzero((parent_BN[b] == node) & (token_BN[b] == token) & valid_BN[b])
            node = children[0] if len(children) else None
        assert node is None, "stopped although the tree goes on"


def test_greedy_slots_walk_alike_under_every_rule() -> None:
    # cases B010, B016, B028: the oracle's greedy decoding, whatever the verification rule
    B = BATCH
    rules = [r._replace(temperature=0.0) for r in REQUESTS]
    model = TableModel(table(5), prompt=(1, 3), output=(2,), stop_ids=(0,))
    prepared = slots_of(model, rules, seed=6)
    merged, target = merged_with_target(random_trees(B, 7), prepared)
    uniform_BR = np.random.default_rng(8).random(merged.draws.parent_BR.shape, np.float32)
    by_naive = naive(merged.tree, target, prepared.history, jnp.full(B, 40), path_len=PATH_LEN)
    for b in range(B):
        path: list[int] = []
        for _ in range(int(by_naive.accepted_B[b]) + 1):
            path.append(int(np.argmax(model._replace(rules=rules[b % len(rules)]).law(path))))
        assert np.asarray(by_naive.token_BA)[b, : len(path)].tolist() == path
    for renormalize in (False, True):
        outcome = walk(merged, target, prepared.history, uniform_BR, renormalize=renormalize)
        np.testing.assert_array_equal(outcome.verdict.path_BA, by_naive.path_BA)
        bonus_B = np.argmax(outcome.weight_BV, axis=1)
        np.testing.assert_array_equal((np.asarray(outcome.weight_BV) > 0).sum(axis=1), 1)
        np.testing.assert_array_equal(bonus_B, np.asarray(by_naive.token_BA)[np.arange(B), by_naive.accepted_B])


def walked(verdict: Verdict, slot: int = 0) -> list[int]:
    """A slot's new tokens."""
    return np.asarray(verdict.token_BA)[slot, : int(verdict.accepted_B[slot]) + 1].tolist()


HELLO, WORLD, STOP = 1, 2, 0


@pytest.mark.parametrize(
    ("rules", "expected", "length"),
    [
        (Rules(0.0), [HELLO] * 4, 4),
        (Rules(0.0, frequency=2.0), [WORLD, HELLO, WORLD, HELLO], 4),
        (Rules(0.0, frequency=-2.0), [HELLO] * 4, 4),
        (Rules(0.0, repetition=1.5), [WORLD, HELLO, HELLO, HELLO], 3),
    ],
    ids=["off", "frequency 2", "frequency -2", "repetition 1.5"],
)
def test_repeated_words_on_two_branches(rules, expected, length) -> None:
    # case B028: "hello" was said once; each branch repeats another word, and each node counts its own ancestors
    logits_PV = np.tile(np.array([-9, 3.0, 2.2, -9], np.float32), (PATHS, 1))
    model = TableModel(logits_PV, rules, prompt=(3,), output=(HELLO,))
    prepared = slots_of(model, [rules], seed=1)
    branches = proposed(chain(HELLO, HELLO, HELLO), chain(WORLD, HELLO, WORLD))
    merged, target = merged_with_target(branches, prepared)
    got = walked(naive(merged.tree, target, prepared.history, jnp.full(BATCH, 9), path_len=PATH_LEN))
    assert got == expected[: len(got)] and len(got) == length


def test_the_stop_id_comes_with_the_sixth_token_if_five_must_come_first() -> None:
    # case B029: min_tokens counts tokens, not steps
    logits_PV = np.tile(np.array([9.0, 1, 5, 3], np.float32), (PATHS, 1))
    rules = Rules(0.0, min_tokens=5)
    drafts, answer, steps = proposed(chain(2, 2, 2), chain(STOP, STOP, STOP)), [], 0
    while STOP not in answer:
        model = TableModel(logits_PV, rules, prompt=(3,), output=tuple(answer), stop_ids=(STOP,))
        prepared = slots_of(model, [rules], seed=1)
        merged, target = merged_with_target(drafts, prepared)
        position_B = jnp.full(BATCH, 1 + len(answer))
        answer += walked(naive(merged.tree, target, prepared.history, position_B, path_len=PATH_LEN))
        steps += 1
    assert answer[: answer.index(STOP)] == [2] * 5 and steps == 2


RULES = {"iid": (independent, False), "without replacement": (one_after_the_other, True)}


@pytest.mark.parametrize(("draw", "renormalize"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_follows_a_rejected_token(depth, draw, renormalize) -> None:
    # case B008: drafts always go on with 0; the LLM allows only 1, and behind 1 other tokens than behind 0
    logits_PV = np.full((PATHS, V), -np.inf, np.float32)
    for path in range(PATHS):
        last = (path - 1) % V
        logits_PV[path, {1: [2, 3], 0: [0]}.get(last, [1]) if path else [1]] = 0
    model = TableModel(logits_PV)
    always_0 = np.tile(np.array([1.0, 0, 0, 0]), (PATHS, 1))
    for proposals in (
        [Proposal((1,) * depth, always_0, draw)],
        [fixed([0] * depth, (1,) * depth, V)],
        [Proposal((1,) * depth, always_0, draw), fixed([0, 1], (2,), V)],
    ):
        law = emitted_law(model, proposals, length=depth + 1, renormalize=renormalize)
        expected = model.joint(depth + 1)
        assert not law[expected == 0].any()
        np.testing.assert_allclose(law, expected, atol=1e-6)


def test_at_temperature_0_only_the_argmax_is_accepted() -> None:
    # case B010: p(0) is above the draft's q(0), and 0 is not the argmax
    p, q = np.array([0.3, 0.5, 0.2, 0]), np.array([0.1, 0.3, 0.6, 0])
    with np.errstate(divide="ignore"):
        logits_PV = np.tile(np.log(p), (PATHS, 1)).astype(np.float32)
    prepared = slots_of(TableModel(logits_PV), [Rules(0.0)], seed=1)
    drafts = proposed(Proposal((1,), np.tile(q, (PATHS, 1)), lambda q_V, k: iter([(1.0, (0,))])))
    merged, target = merged_with_target(drafts, prepared)
    zero_BR = np.zeros(merged.draws.parent_BR.shape, np.float32)
    for renormalize in (False, True):
        outcome = walk(merged, target, prepared.history, zero_BR, renormalize=renormalize)
        assert not np.asarray(outcome.verdict.accepted_B).any()
        np.testing.assert_array_equal(np.argmax(outcome.weight_BV, axis=1), 1)
    verdict = naive(merged.tree, target, prepared.history, jnp.full(BATCH, 9), path_len=PATH_LEN)
    assert not np.asarray(verdict.accepted_B).any() and (np.asarray(verdict.token_BA)[:, 0] == 1).all()


X, Y, Z = 1, 2, 3


@pytest.mark.parametrize("paths", [[[X, Y], [X, Z]], [[X, Z], [X, Y]], [[X, Z]], [[X, Y], [X, Y], [X, Z]]], ids=str)
def test_ssms_that_share_a_token(paths) -> None:
    # case B013: the shared node is there once, with both children; only "x z" is right, in any order
    logits_PV = np.full((PATHS, V), 0, np.float32)
    logits_PV[0, X] = logits_PV[path_number([X], V), Z] = logits_PV[path_number([X, Z], V), Y] = 5
    prepared = slots_of(TableModel(logits_PV), [Rules(0.0)], seed=1)
    merged, target = merged_with_target(proposed(*(chain(*path) for path in paths)), prepared)
    names = np.asarray(merged.tree.token_BN)[0][np.asarray(merged.tree.valid_BN)[0]].tolist()
    assert names.count(X) == 1 and names.count(Z) == 1 and len(names) == len({tuple(path) for path in paths}) + 2
    argmax_BN = jnp.argmax(target.logits_VT, axis=0).astype(jnp.int32).reshape(BATCH, -1)
    zero_BR = np.zeros(merged.draws.parent_BR.shape, np.float32)
    for verdict in (
        greedy(merged.tree, argmax_BN, path_len=PATH_LEN, failed_BN=jnp.zeros_like(argmax_BN, bool)),
        naive(merged.tree, target, prepared.history, jnp.full(BATCH, 9), path_len=PATH_LEN),
        walk(merged, target, prepared.history, zero_BR, renormalize=False).verdict,
    ):
        assert (np.asarray(verdict.accepted_B) == 2).all() and walked(verdict)[:2] == [X, Z]


def test_every_draft_banned() -> None:
    # case B092: what may follow depends on the parent
    rules = Rules(1.0, bad=((0, 1), (0, 2), (3, 3)))
    model = TableModel(np.zeros((PATHS, V), np.float32), rules, prompt=(0,))
    proposals = [
        Proposal((2, 1), np.tile(np.array([0.0, 0.5, 0.5, 0]), (PATHS, 1)), one_after_the_other),
        fixed([1, 2], (2,), V),
    ]
    law = emitted_law(model, proposals, length=3, renormalize=True).reshape(V, V, V)
    np.testing.assert_allclose(law.sum(axis=(1, 2)), [0.5, 0, 0, 0.5], atol=1e-6)
    np.testing.assert_allclose(law.ravel(), model.joint(3), atol=1e-6)
    prepared = slots_of(model, [rules], seed=3)
    merged, target = merged_with_target(proposed(fixed([1, 2], (2,), V)), prepared)
    verdict = naive(merged.tree, target, prepared.history, jnp.full(BATCH, 9), path_len=PATH_LEN)
    assert not np.asarray(verdict.accepted_B).any() and not np.asarray(verdict.failed_B).any()
    assert set(np.asarray(verdict.token_BA)[:, 0].tolist()) == {0, 3}
