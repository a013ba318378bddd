"""The best tree: against brute force, against published figures, and what it is reckoned from."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.errors import SpeculationError
from specinfer_jax.tree.expand import Expansion, parse_expansion
from specinfer_jax.tree.optimal import CATCH_UP_ROWS, WIDE_NODES, best_trees, expected_tokens, fastest_tree
from specinfer_jax.tree.rates import AcceptanceRates, count_ranks
from specinfer_jax.tree.shape import TreeShape

SUCCESS = AcceptanceRates.from_success(0.55, 0.75, 5)


@functools.cache
def every_shape(max_nodes: int, max_depth: int, max_rank: int = 3) -> tuple[TreeShape, ...]:
    """All of them, by plain recursion over levels."""

    def below(size: int, nodes_left: int, levels_left: int) -> list[tuple[tuple[int, ...], ...]]:
        found: list[tuple[tuple[int, ...], ...]] = [()]
        if levels_left:
            for counts in itertools.product(range(max_rank + 1), repeat=size):
                if 0 < sum(counts) <= nodes_left:
                    found += [(counts, *r) for r in below(sum(counts), nodes_left - sum(counts), levels_left - 1)]
        return found

    return tuple(TreeShape(children) for children in below(1, max_nodes, max_depth) if children)


@st.composite
def rows_of_rates(draw, num_ranks: int = 3):
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        weights = sorted((draw(st.floats(0.01, 1)) for _ in range(num_ranks)), reverse=True)
        total = draw(st.floats(0.2, 1))
        rows.append(tuple(total * weight / sum(weights) for weight in weights))
    return tuple(rows)


@settings(max_examples=30, deadline=None)
@given(rows_of_rates(), st.integers(1, 4))
def test_no_shape_is_better(rows, max_depth: int) -> None:
    rates = AcceptanceRates(rows)
    most = 6
    best = dict.fromkeys(range(1, most + 1), 0.0)
    for shape in every_shape(most, max_depth):
        best[shape.num_nodes] = max(best[shape.num_nodes], expected_tokens(shape, rates))
    found = best_trees(rates, max_nodes=most, max_depth=max_depth)
    assert [tree.shape.num_nodes for tree in found] == list(range(1, len(found) + 1))
    assert len(found) == (most if max_depth > 1 else 3)
    for tree in found:
        assert tree.shape.depth <= max_depth
        assert tree.expected_tokens == pytest.approx(expected_tokens(tree.shape, rates))
        assert tree.expected_tokens == pytest.approx(best[tree.shape.num_nodes])


def paths(shape: TreeShape) -> set[tuple[int, ...]]:
    """Every node as the ranks that lead to it."""
    found: list[tuple[int, ...]] = [()]
    for parent, rank in zip(shape.parents()[1:], shape.child_ranks()[1:], strict=True):
        found.append((*found[parent], int(rank)))
    return set(found)


def test_each_tree_lies_in_the_next() -> None:
    trees = best_trees(SUCCESS, max_depth=8)
    assert len(trees) == 127
    for small, large in itertools.pairwise(trees):
        assert paths(small.shape) < paths(large.shape)
        assert small.expected_tokens < large.expected_tokens


def test_the_figures_of_the_design() -> None:
    """55 % with one child, 75 % with five, growing with the logarithm of their number; at most 5 children per node."""
    assert expected_tokens(Expansion((1, 1, 5, 1, 1, 1, 1, 1)), SUCCESS) == pytest.approx(2.34, abs=0.005)
    [*_, widest] = best_trees(SUCCESS, max_nodes=WIDE_NODES, max_depth=16)
    assert widest.shape.num_nodes == 32
    assert widest.expected_tokens == pytest.approx(2.84, abs=0.005)
    assert parse_expansion(str(widest.shape)) == widest.shape
    [*_, better] = best_trees(AcceptanceRates.from_success(0.58, 0.79, 5), max_nodes=32, max_depth=16)
    assert better.expected_tokens == pytest.approx(3.06, abs=0.01)  # "3.0 needs about 58/79"


def test_nodes_without_a_chance_are_left_out() -> None:
    [one, two] = best_trees(AcceptanceRates(((0.5, 0.2), (0.0,))), max_nodes=9, max_depth=5)
    assert (str(one.shape), str(two.shape), two.expected_tokens) == ("<1>", "<2>", pytest.approx(1.7))
    assert best_trees(AcceptanceRates(((0.0,),)), max_nodes=9, max_depth=5) == []


BUCKETS = (1, 2, 4, 8, 16)


def tokens_per_second(shape: TreeShape, rates: AcceptanceRates, verify: dict, draft: dict, num_ssms: int = 1) -> float:
    rows = 1 + num_ssms * shape.num_nodes
    seconds = verify[min(bucket for bucket in verify if bucket >= rows)]
    passes = (shape.depth + CATCH_UP_ROWS, *shape.inner_sizes[1:])
    seconds += sum(float(np.interp(n, list(draft), list(draft.values()))) for n in passes)
    return expected_tokens(shape, rates) / seconds


@settings(max_examples=30, deadline=None)
@given(rows_of_rates(), st.data())
def test_no_shape_is_faster_where_a_level_costs_the_same_however_wide(rows, data) -> None:
    rates = AcceptanceRates(rows)
    seconds = sorted(data.draw(st.floats(1, 2)) for _ in BUCKETS[:4])
    verify, draft = dict(zip(BUCKETS[:4], seconds, strict=True)), {1: data.draw(st.floats(0, 0.3))}
    best = max((shape for shape in every_shape(6, 4)), key=lambda shape: tokens_per_second(shape, rates, verify, draft))
    found = fastest_tree(rates, verify_seconds=verify, draft_seconds=draft, max_depth=4, need=0.0)
    assert found is not None
    # Brute force looks at six nodes, and the largest bucket has room for seven.
    assert found.tokens_per_second >= tokens_per_second(best, rates, verify, draft) * (1 - 1e-9)
    assert found.tokens_per_second == pytest.approx(tokens_per_second(found.shape, rates, verify, draft))
    assert found.shape.depth <= 4 and found.shape.num_nodes <= 7


@settings(max_examples=30, deadline=None)
@given(rows_of_rates(), st.data())
def test_hardly_a_shape_is_faster_where_wide_levels_cost_more(rows, data) -> None:
    rates = AcceptanceRates(rows)
    slope = data.draw(st.floats(0, 0.1))
    verify, draft = {1: 1.0, 2: 1.05, 4: 1.1, 7: 1.2}, {1: 0.1, 8: 0.1 + slope * 7}
    best = max(tokens_per_second(shape, rates, verify, draft) for shape in every_shape(6, 4))
    found = fastest_tree(rates, verify_seconds=verify, draft_seconds=draft, max_depth=4, need=0.0)
    assert found is not None
    assert found.tokens_per_second == pytest.approx(tokens_per_second(found.shape, rates, verify, draft))
    assert found.tokens_per_second >= best * (1 - 1e-9)


def test_off_where_no_tree_pays() -> None:
    slow = {1: 1.0, 2: 1.9, 4: 3.0}
    assert fastest_tree(SUCCESS, verify_seconds=slow, draft_seconds={1: 0.1}) is None
    free = fastest_tree(SUCCESS, verify_seconds={1: 1.0, 8: 1.0}, draft_seconds={1: 0.0})
    assert free is not None and free.shape.num_nodes == 7 and free.seconds == 1
    # Passes of an SSM that is as slow as the LLM never pay.
    assert fastest_tree(SUCCESS, verify_seconds={1: 1.0, 16: 1.0}, draft_seconds={1: 1.0}) is None


def test_several_ssms_share_the_rows() -> None:
    verify, draft = {1: 1.0, 4: 1.1, 8: 1.2, 16: 1.5}, {1: 0.02, 16: 0.05}
    one = fastest_tree(SUCCESS, verify_seconds=verify, draft_seconds=draft)
    three = fastest_tree(SUCCESS, verify_seconds=verify, draft_seconds=draft, num_ssms=3)
    assert one is not None and three is not None
    assert 1 + 3 * three.shape.num_nodes <= 16 and three.expected_tokens < one.expected_tokens
    reckoned = tokens_per_second(three.shape, SUCCESS, verify, draft, num_ssms=3)
    assert three.tokens_per_second == pytest.approx(reckoned)


class TestRates:
    def test_json_and_back(self) -> None:
        rates = AcceptanceRates(((0.5, 0.25, 0.125), (0.625,)))
        assert AcceptanceRates.from_json(rates.to_json()) == rates
        assert rates.to_json() == '{"rate": [[0.5, 0.25, 0.125], [0.625]]}'
        thirds = AcceptanceRates(((1 / 3,) * 3,))
        assert AcceptanceRates.from_json(thirds.to_json()).rate == ((0.3333,) * 3,)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"rate": 3}', '{"rate": [["a"]]}', '{"rate": [0.5]}', "null"])
    def test_other_json_is_refused(self, text: str) -> None:
        with pytest.raises(SpeculationError, match="acceptance rates must look like"):
            AcceptanceRates.from_json(text)

    @pytest.mark.parametrize("rate", [(), ((),), ((0.2, 0.3),), ((-0.1,),), ((0.9, 0.9),), ((math.nan,),), ((1.1,),)])
    def test_what_cannot_be_is_refused(self, rate) -> None:
        with pytest.raises(SpeculationError, match="acceptance rates"):
            AcceptanceRates(rate)

    def test_deeper_and_wider_than_measured(self) -> None:
        rates = AcceptanceRates(((0.5, 0.2), (0.4,)))
        assert rates.at(0, 3).tolist() == [0.5, 0.2, 0.0]
        assert rates.at(1, 2).tolist() == rates.at(7, 2).tolist() == [0.4, 0.0]
        assert rates.at(0, 1).tolist() == [0.5]
        assert rates.success() == pytest.approx((0.5, 0.7))

    def test_many_observations_are_believed_and_few_are_not(self) -> None:
        hits = [[6000, 1000, 500], [50_000, 12_000, 3000], [3, 0, 0]]
        rates = AcceptanceRates.from_counts(hits, [10_000, 100_000, 3])
        np.testing.assert_allclose(rates.rate[0], [0.6, 0.1, 0.05], atol=2e-3)
        np.testing.assert_allclose(rates.rate[1], [0.5, 0.12, 0.03], atol=2e-3)
        average = np.sum(hits, axis=0) / 110_003
        np.testing.assert_allclose(rates.rate[2], (np.array(hits[2]) + 50 * average) / 53, atol=1e-9)

    def test_ranks_never_rise(self) -> None:
        rates = AcceptanceRates.from_counts([[40, 5, 9, 10, 2]], [100], smoothing=0)
        assert rates.rate[0] == pytest.approx((0.4, 0.08, 0.08, 0.08, 0.02))
        # Each rank with trials of its own: the seldom seen one gives way.
        rates = AcceptanceRates.from_counts([[400, 10, 20]], [[1000, 1000, 100]], smoothing=0)
        assert rates.rate[0] == pytest.approx((0.4, 30 / 1100, 30 / 1100))

    @settings(max_examples=50, deadline=None)
    @given(st.data())
    def test_any_counts_give_rates(self, data) -> None:
        D, R = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
        trials = [[data.draw(st.integers(0, 40)) for _ in range(R)] for _ in range(D)]
        hits = [[data.draw(st.integers(0, n)) for n in row] for row in trials]
        rates = AcceptanceRates.from_counts(hits, trials, smoothing=data.draw(st.floats(0, 9)))
        assert len(rates.rate) == D and len(rates.rate[0]) == R

    @pytest.mark.parametrize(
        ("hits", "trials"), [([[2]], [1]), ([[-1]], [1]), ([1], [1]), ([[1, 1]], [[1]]), ([[1]], [1, 1])]
    )
    def test_wrong_counts_are_refused(self, hits, trials) -> None:
        with pytest.raises(SpeculationError, match="hits must be"):
            AcceptanceRates.from_counts(hits, trials)

    def test_ranks_of_a_pass_are_counted_by_depth(self) -> None:
        #                                rank of every token; 9 is named by no child
        hits, trials = count_ranks([np.array([0, 1, 9, 0, 0]), np.array([1])], num_depths=3, num_ranks=2)
        assert trials.tolist() == [6, 3, 1]  # behind a right token: 1, 9, the last 0; behind two: 9
        assert hits.tolist() == [[3, 2], [1, 1], [0, 0]]
