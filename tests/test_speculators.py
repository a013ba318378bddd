"""What the n-gram speculator proposes, what the gate makes of it, and how the verifier walks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import tree_of
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.speculation import gate
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.sampling import neutral_sampling
from specinfer_jax.speculation.speculator import Context
from specinfer_jax.speculation.verifier import verify_greedy
from specinfer_jax.tree.token_tree import check_invariants, root_only

SMALL = NgramSpeculator(max_match=3, branch_depths=(4, 2))
SIZE = 24


@functools.partial(jax.jit, static_argnums=0)
def _propose(speculator: NgramSpeculator, context: Context):
    return speculator.propose((), (), context, jnp.asarray([True]))[0]


def propose(ids: list[int], speculator: NgramSpeculator = SMALL):
    token_BS = jnp.asarray([ids + [0] * (SIZE - len(ids))], jnp.int32)
    count_B, prompt_len_B = jnp.asarray([len(ids)], jnp.int32), jnp.asarray([1], jnp.int32)
    context = Context(token_BS, count_B, prompt_len_B, neutral_sampling(1, 16))
    return _propose(speculator, context)


def paths_of(tree) -> list[tuple[int, ...]]:
    token, parent, _, valid = (np.asarray(x)[0] for x in tree)
    result: list[tuple[int, ...]] = []
    for n in range(int(valid.sum())):
        result.append(() if n == 0 else (*result[parent[n]], int(token[n])))
    return result


def occurrences(ids: list[int]) -> list[tuple[int, ...]]:
    """Plain Python: continuations by match length, then recency; an occurrence near the end repeats its period."""
    last = len(ids) - 1
    found = []
    for end in range(last):
        length = 0
        while length < 3 and length <= end and ids[end - length] == ids[last - length]:
            length += 1
        if length:
            follow = tuple(ids[end + 1 + d % (last - end)] for d in range(4))
            literal = tuple((ids + [0] * SIZE)[end + 1 + d] for d in range(2))
            found.append((length, end, follow, literal))
    found.sort(key=lambda entry: (-entry[0], -entry[1]))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=SIZE - 3))
def test_ngram_proposes_what_followed_before(ids: list[int]) -> None:
    draft = propose(ids)
    check_invariants(draft.tree)
    found = occurrences(ids)
    chains = []
    if found:
        chains.append(found[0][2])
        others = [entry for entry in found if entry[3] != found[0][3]]
        if others:
            chains.append(others[0][2][:2])
    expected = {()} | {chain[:d] for chain in chains for d in range(1, len(chain) + 1)}
    assert set(paths_of(draft.tree)) == expected


def test_several_continuations_where_they_differ() -> None:
    draft = propose([1, 2, 3, 9, 9, 1, 2, 7, 8, 8, 1, 2])
    assert paths_of(draft.tree) == [(), (7,), (7, 8), (7, 8, 8), (7, 8, 8, 1), (3,), (3, 9)]
    # match of two: kinds of its first, second, later nodes; then the second branch's
    kinds = np.asarray(draft.kind_BN)[0, 1:7].tolist()
    first = 1 * 2 * 3
    assert kinds == [first, first + 1, first + 2, first + 2, first + 3, first + 4]


def test_a_context_that_never_repeats_proposes_nothing() -> None:
    assert paths_of(propose([1, 2, 3, 4]).tree) == [()]
    assert paths_of(propose([5]).tree) == [()]


def test_priors_fit_the_kinds() -> None:
    for speculator in (SMALL, NgramSpeculator(), NgramSpeculator(max_match=9, branch_depths=(2, 2, 2, 2, 2, 2))):
        prior = speculator.prior_rates()
        assert prior.shape == (speculator.num_kinds,)
        assert ((prior > 0) & (prior < 1)).all()


def test_chances_multiply_along_the_path() -> None:
    tree = tree_of([[1, 2], [3]], 4)
    rate = jnp.asarray([[0.9, 0.5, 0.25, 0.75, 0.9]])
    chance = gate.path_chances(tree, rate, depth=2)
    np.testing.assert_allclose(chance, [[1, 0.5, 0.125, 0.75, 0]])


@pytest.mark.parametrize(
    ("cost", "draft_cost", "expected"),
    [([1, 1, 1], 0, 2), ([1, 1.4, 2.2], 0, 1), ([1, 2, 3], 0, 0), ([1, 1, 1], 2, 0), ([1, 1, 1], 0.5, 2)],
)
def test_the_gate_takes_the_most_tokens_per_second(cost, draft_cost, expected: int) -> None:
    # expected tokens: 1 row 1.0, 2 rows 1.6, 4 rows 2.1
    chance = jnp.asarray([[1, 0.6, 0.3, 0.2]])
    bucket = gate.best_bucket(chance, jnp.asarray([True]), (1, 2, 4), jnp.asarray(cost, jnp.float32), float(draft_cost))
    assert int(bucket) == expected


def test_the_gate_looks_at_all_active_slots_and_at_no_other() -> None:
    chance = jnp.asarray([[1, 0.1], [1, 0.9], [1, 0.9]])
    cost = jnp.asarray([1.0, 1.3])
    assert int(gate.best_bucket(chance, jnp.asarray([True, False, False]), (1, 2), cost)) == 0
    assert int(gate.best_bucket(chance, jnp.asarray([True, True, True]), (1, 2), cost)) == 1


def test_committed_tokens_bear_out_nodes_that_were_never_verified() -> None:
    tree = tree_of([[4, 5, 6], [7]], 6)
    token_BA = jnp.asarray([[4, 5, 9, 0]])
    hit, observed = gate.committed_nodes(tree, token_BA, jnp.asarray([3]))
    # rows: root, 4, 5, 6, 7, padding; 6 was contradicted by 9, 7 by 4
    assert np.asarray(hit)[0].tolist() == [False, True, True, False, False, False, False]
    assert np.asarray(observed)[0].tolist() == [False, True, True, True, True, False, False]
    hit, observed = gate.committed_nodes(tree, token_BA, jnp.asarray([1]))
    assert np.asarray(hit)[0].tolist() == [False, True, False, False, False, False, False]
    assert np.asarray(observed)[0].tolist() == [False, True, False, False, True, False, False]


def test_rates_follow_what_is_seen_and_forget_what_is_not() -> None:
    prior = jnp.asarray([0.5, 0.5])
    rate = jnp.asarray([[0.5, 0.1]])
    kind = jnp.asarray([[0, 0, 1]])
    up = gate.update_rates(rate, prior, kind, jnp.asarray([[True, True, False]]), jnp.asarray([[True, True, False]]))
    assert 0.6 < float(up[0, 0]) < 0.8
    assert 0.1 < float(up[0, 1]) < 0.11
    down = gate.update_rates(rate, prior, kind, jnp.zeros((1, 3), bool), jnp.asarray([[True, False, False]]))
    assert 0.4 < float(down[0, 0]) < 0.5


def test_the_verifier_walks_to_the_deepest_match() -> None:
    tree = tree_of([[4, 5], [7, 8, 9]], 6)
    target = jnp.asarray([[7, 0, 0, 8, 3, 0, 0]])
    verdict = verify_greedy(tree, target, path_len=4)
    assert np.asarray(verdict.path_BA)[0].tolist() == [0, 3, 4, 7]
    assert np.asarray(verdict.token_BA)[0].tolist() == [7, 8, 3, 0]
    assert int(verdict.accepted_B[0]) == 2


def test_the_verifier_never_hangs_on_a_malformed_tree() -> None:
    # case B097: cycles and self-parents end after the static number of steps
    tree = root_only(jnp.asarray([1], jnp.int32), 3)._replace(
        token_BN=jnp.asarray([[1, 1, 1]], jnp.int32),
        parent_BN=jnp.asarray([[2, 0, 1]], jnp.int32),
        valid_BN=jnp.ones((1, 3), bool),
    )
    verdict = verify_greedy(tree, jnp.asarray([[1, 1, 1]]), path_len=3)
    assert int(verdict.accepted_B[0]) == 2
