"""Trees: invariants under every operation, checked against plain Python tries."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.errors import SpeculationError
from specinfer_jax.tree.expand import Expansion, parse_expansion
from specinfer_jax.tree.merge import merge_trees
from specinfer_jax.tree.token_tree import (
    TokenTree,
    check_invariants,
    clip_depth,
    order_by,
    root_only,
    truncate,
)

N = 8


@st.composite
def trees(draw, rows: int = N, vocab: int = 3) -> TokenTree:
    """Two slots of random trees with few different tokens, so that duplicates abound."""
    slots = []
    for _ in range(2):
        count = draw(st.integers(1, rows))
        parent = [rows] + [draw(st.integers(0, n - 1)) for n in range(1, count)] + [rows] * (rows - count)
        depth = [0] * rows
        for n in range(1, count):
            depth[n] = depth[parent[n]] + 1
        token = [9] + [draw(st.integers(0, vocab - 1)) for _ in range(1, count)] + [0] * (rows - count)
        slots.append((token, parent, depth, [n < count for n in range(rows)]))
    token, parent, depth, valid = (np.array(x) for x in zip(*slots, strict=True))
    return TokenTree(
        jnp.asarray(token, jnp.int32), jnp.asarray(parent, jnp.int32), jnp.asarray(depth, jnp.int32), jnp.asarray(valid)
    )


def paths(tree: TokenTree, slot: int) -> list[tuple[int, ...]]:
    """Token path of every valid row, in row order."""
    token, parent, _, valid = (np.asarray(x)[slot] for x in tree)
    result: list[tuple[int, ...]] = []
    for n in range(tree.num_rows):
        if valid[n]:
            result.append(() if n == 0 else (*result[parent[n]], int(token[n])))
    return result


@settings(max_examples=40, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_merge_is_the_union_of_paths(inputs: list[TokenTree]) -> None:
    merged = merge_trees(inputs)
    check_invariants(merged.tree)
    for slot in range(2):
        expected = dict.fromkeys(path for tree in inputs for path in paths(tree, slot))
        got = paths(merged.tree, slot)
        assert len(got) == len(set(got)), "a path appears twice"
        assert got == list(expected), "union in first-come order"
        start = 0
        for m, tree in enumerate(inputs):
            for row, path in enumerate(paths(tree, slot)):
                assert got[int(merged.node_BR[slot, start + row])] == path
            start += tree.num_rows
            for node, path in enumerate(got[1:], 1):
                assert bool(merged.source_BN[slot, node] >> m & 1) == (path in paths(tree, slot))


@settings(max_examples=40, deadline=None)
@given(trees(), st.integers(-1, 4), st.integers(0, 4))
def test_clip_depth_keeps_exactly_the_shallow_rows(tree: TokenTree, depth0: int, depth1: int) -> None:
    clipped, old_row_BN = clip_depth(tree, jnp.asarray([depth0, depth1], jnp.int32))
    check_invariants(clipped)
    for slot, depth in enumerate((depth0, depth1)):
        kept = [path for path in paths(tree, slot) if len(path) <= max(depth, 0)]
        assert paths(clipped, slot) == kept
        rows = np.asarray(old_row_BN)[slot]
        assert [paths(tree, slot)[row] for row in rows[: len(kept)]] == kept
        assert (rows[len(kept) :] == N).all()


@settings(max_examples=40, deadline=None)
@given(trees(), st.data())
def test_order_by_sorts_and_stays_a_tree(tree: TokenTree, data) -> None:
    score = np.zeros((2, N), np.float32)
    parent, valid = np.asarray(tree.parent_BN), np.asarray(tree.valid_BN)
    for slot in range(2):
        for n in range(N):
            if valid[slot, n]:
                above = score[slot, parent[slot, n]] if n else 2.0
                score[slot, n] = above * data.draw(st.sampled_from([0.25, 0.5, 0.75]))
    ordered, old_row_BN = order_by(tree, jnp.asarray(score))
    check_invariants(ordered)
    for slot in range(2):
        count = len(paths(tree, slot))
        rows = np.asarray(old_row_BN)[slot, :count]
        assert paths(ordered, slot) == [paths(tree, slot)[row] for row in rows]
        assert (np.diff(score[slot, rows]) <= 0).all()


@settings(max_examples=20, deadline=None)
@given(trees(), st.integers(1, N))
def test_a_smaller_bucket_holds_the_first_rows_of_the_same_tree(tree: TokenTree, rows: int) -> None:
    cut = truncate(tree, rows)
    check_invariants(cut)
    for slot in range(2):
        assert paths(cut, slot) == paths(tree, slot)[:rows]


def test_root_only_and_broken_trees_are_told_apart() -> None:
    tree = root_only(jnp.asarray([4, 5], jnp.int32), 3)
    check_invariants(tree)
    with pytest.raises(ValueError, match="slot 1 row 1: parent 1"):
        check_invariants(
            tree._replace(parent_BN=tree.parent_BN.at[1, 1].set(1), valid_BN=tree.valid_BN.at[1, 1].set(True))
        )
    with pytest.raises(ValueError, match="valid rows must be the first"):
        check_invariants(tree._replace(valid_BN=tree.valid_BN.at[0, 2].set(True)))
    with pytest.raises(ValueError, match="depth 0 must be 1"):
        check_invariants(
            tree._replace(parent_BN=tree.parent_BN.at[0, 1].set(0), valid_BN=tree.valid_BN.at[0, 1].set(True))
        )


def test_expansion_of_the_paper() -> None:
    expansion = parse_expansion("<1,1,3,1,1,1,1,1>")
    assert expansion.level_sizes == (1, 1, 3, 3, 3, 3, 3, 3)
    assert expansion.num_nodes == 20 and expansion.depth == 8
    small = parse_expansion(" 1, 2 ,1")
    assert small.parents().tolist() == [6, 0, 1, 1, 2, 3]
    assert small.depths().tolist() == [0, 1, 2, 2, 3, 3]
    assert small.child_ranks().tolist() == [0, 0, 0, 1, 0, 0]
    assert str(small) == "<1,2,1>" and small == Expansion((1, 2, 1))


@pytest.mark.parametrize(
    "text", ["", "a", "1,,2", "1;2", "<1,2", "1,0", "-1", "1.5", "9" * 5000, "1," * 200 + "1", "128"]
)
def test_a_tree_that_does_not_parse_or_fit_is_refused(text: str) -> None:
    if text == "<1,2":  # a missing bracket is forgiven: nothing else can be meant
        assert parse_expansion(text).widths == (1, 2)
        return
    with pytest.raises(SpeculationError, match="tree"):
        parse_expansion(text)
