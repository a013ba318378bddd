"""Merged trees counted on answers: values that can be counted by hand, and the single tree's own optimum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.tree.shape import TreeShape
from train.forest import Forest, Ranks, grow_forest


def ranks(**by_answer: list[int]) -> Ranks:
    return {key: np.array(values, np.int32) for key, values in by_answer.items()}


def test_a_chain_where_the_likeliest_is_always_right() -> None:
    found = grow_forest([ranks(a=[0, 0, 0, 0])], max_nodes=2)
    # Roots before each of the four tokens: 2, 2, 2 and, at the end of the answer, 1 token beside the bonus.
    assert found == Forest((TreeShape(((1,), (1,))),), 1 + 7 / 4)


def test_nodes_go_where_most_steps_gain() -> None:
    # Ranks 0, 1, 0, 1, ...: the second child and its child are worth as much as the first and its child.
    found = grow_forest([ranks(a=[0, 1] * 8)], max_nodes=2)
    assert found.shapes == (TreeShape(((2,),)),)
    assert found.tokens_per_step == 2.0


def test_an_ssm_that_is_right_where_the_other_is_not_gets_nodes() -> None:
    first, second = ranks(a=[0, 9, 0, 9, 0, 9]), ranks(a=[9, 0, 9, 0, 9, 0])
    together = grow_forest([first, second], max_nodes=2)
    assert together.shapes == (TreeShape(((1,),)), TreeShape(((1,),)))
    assert together.tokens_per_step == 2.0
    assert grow_forest([first], max_nodes=2).tokens_per_step == 1.5


def test_an_ssm_that_knows_nothing_more_gets_none() -> None:
    own = ranks(a=[0, 0, 1, 0], b=[1, 0])
    assert grow_forest([own, own], max_nodes=6).shapes[1] is None


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(1, 8))
def test_tokens_per_step_are_those_of_the_shape(answers: list[list[int]], nodes: int) -> None:
    own = ranks(**{str(i): values for i, values in enumerate(answers)})
    found = grow_forest([own], max_nodes=nodes)
    (shape,) = found.shapes
    paths = {()} if shape is None else paths_of(shape)
    assert len(paths) - 1 <= nodes
    depths = []
    for values in answers:
        for start in range(len(values)):
            reached = 0
            while tuple(values[start : start + reached + 1]) in paths and start + reached < len(values):
                reached += 1
            depths.append(reached)
    assert found.tokens_per_step == pytest.approx(1 + np.mean(depths))


def paths_of(shape: TreeShape) -> set[tuple[int, ...]]:
    """Ranks from the root to every node."""
    parent_N, rank_N = shape.parents(), shape.child_ranks()
    paths: list[tuple[int, ...]] = [()]
    for n in range(1, shape.num_nodes + 1):
        paths.append((*paths[parent_N[n]], int(rank_N[n])))
    return set(paths)
