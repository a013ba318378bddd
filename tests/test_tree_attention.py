"""Tree attention: every implementation against a float64 oracle, its mask, its memory and its split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AttentionCase, assert_matches, make_case, path, random_parents
from attention_variants import RUN
from jax.sharding import Mesh

from pallas_kernels.tree_attention import ancestor_words, causal_words, tree_attention
from pallas_kernels.tree_attention.xla import tree_attention_xla

CASES = {
    "one_row_no_prefix": {"prefix": (0,), "N": 1},
    "one_row": {"prefix": (13,), "N": 1, "G": 3, "group": 3},
    "empty_inside_edge_full": {"prefix": (0, 5, 16, 48), "N": 7, "G": 2, "group": 2},
    "one_token": {"prefix": (1, 0), "N": 3},
    "group_of_8": {"prefix": (9, 20), "N": 5, "group": 8},
    "group_of_5": {"prefix": (9,), "N": 5, "G": 2, "group": 5},
    "padding_rows": {"prefix": (7, 0, 30), "N": 8, "padding": 3, "G": 2},
    "two_words": {"prefix": (11,), "N": 33, "G": 3, "group": 3},
    "five_words": {"prefix": (3, 40), "N": 130, "K": 8},
    "tree_level": {"prefix": (12, 0), "N": 12, "Q": 4, "G": 2, "group": 2},
    "page_of_1": {"prefix": (5, 3), "Z": 1, "N": 4},
    "one_page": {"prefix": (4, 64), "Z": 64, "table_pages": 1, "N": 4},
    "bfloat16": {"prefix": (21, 0, 8), "N": 9, "G": 2, "group": 3, "K": 64, "dtype": jnp.bfloat16},
}


KINDS = ("reference", "xla", "simulated_tpu", "pallas_gpu")
"""One variant of each implementation."""

attend = jax.jit(tree_attention, static_argnames=("scale", "mesh", "kv_axis", "implementation"))


def run(case: AttentionCase, name: str = "xla") -> list[np.ndarray]:
    return [np.asarray(a) for a in RUN[name](*case.arrays, scale=case.scale)]


@pytest.mark.parametrize("implementation", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_definition(name: str, implementation: str) -> None:
    # NaN fills everything outside the prefixes: one that gets through fails the comparison.
    case = make_case(**CASES[name])
    assert_matches(run(case, implementation), case)


@pytest.mark.parametrize("block_tokens", [1, 16, 40])
@pytest.mark.parametrize("name", ["empty_inside_edge_full", "bfloat16"])
def test_block_size_does_not_matter(name: str, block_tokens: int) -> None:
    # 40 tokens are 5 of 6 pages: the last block hangs over the end of the table.
    case = make_case(**CASES[name])
    blocked = jax.jit(functools.partial(tree_attention_xla, scale=case.scale, block_tokens=block_tokens))
    assert_matches(blocked(*case.arrays), case)


def test_large_scores_stay_finite() -> None:
    case = make_case(prefix=(20, 0), N=5, G=2, group=2)._replace(scale=300.0)
    assert_matches(run(case), case)


@pytest.mark.parametrize("implementation", KINDS)
def test_only_key_gives_its_value(implementation: str) -> None:
    case = make_case(prefix=(0,), N=4, padding=2)
    out, _ = run(case, implementation)
    alone = np.array([0, 2, 3])  # root and padding rows
    np.testing.assert_array_equal(out[:, alone, 0], case.v_new_BNGK[:, alone, 0])


@pytest.mark.parametrize("implementation", KINDS)
def test_empty_row_gives_zero(implementation: str) -> None:
    case = make_case(prefix=(0, 9), N=3)
    case.ancestors_BQC[:, 1] = 0
    out, lse = run(case, implementation)
    assert np.all(out[0, 1] == 0)
    assert np.all(lse[0, 1] == -np.inf)
    assert np.isfinite(out).all()
    assert np.isfinite(lse[1]).all()


@pytest.mark.parametrize("implementation", KINDS)
def test_unwritten_rows_may_hold_nan(implementation: str) -> None:
    # A speculator's later levels are not computed yet while an early level attends.
    case = make_case(prefix=(6,), N=8, padding=3)
    out, lse = run(case, implementation)

    def with_nan(new_BNGK: np.ndarray) -> np.ndarray:
        return np.where(np.arange(8)[None, :, None, None] < 5, new_BNGK, np.float32(np.nan))

    unwritten = case._replace(
        q_BQHK=case.q_BQHK[:, :5],
        ancestors_BQC=case.ancestors_BQC[:, :5],
        k_new_BNGK=with_nan(case.k_new_BNGK),
        v_new_BNGK=with_nan(case.v_new_BNGK),
    )
    early_out, early_lse = run(unwritten, implementation)
    np.testing.assert_allclose(early_out, out[:, :5], rtol=0, atol=1e-6)
    np.testing.assert_allclose(early_lse, lse[:, :5], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", KINDS)
def test_non_ancestors_do_not_matter(implementation: str) -> None:
    # case B026: a changed row leaves every row that is not below it bit-equal, above and below the diagonal.
    case = make_case(prefix=(10,), N=9, G=2, group=2, seed=3)
    before = run(case, implementation)
    for changed in range(9):
        k_new, v_new = case.k_new_BNGK.copy(), case.v_new_BNGK.copy()
        k_new[:, changed] += 2.0
        v_new[:, changed] += 1.0
        after = run(case._replace(k_new_BNGK=k_new, v_new_BNGK=v_new), implementation)
        for row in range(9):
            same = all(np.array_equal(a[:, row], b[:, row]) for a, b in zip(before, after, strict=True))
            assert same == (changed not in path(case.parent_BN[0], row))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6), (0, 1, 3, 4, 2, 5, 6)])
def test_each_node_equals_its_path_alone(order: tuple[int, ...]) -> None:
    # case B026: a root, two children and two grandchildren under each, breadth first and depth first.
    parent_of = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2}
    place = {node: row for row, node in enumerate(order)}
    parent_BN = np.array([[7] + [place[parent_of[node]] for node in order[1:]]], np.int32)
    case = make_case(prefix=(11,), N=7, G=2, group=2, parent_BN=parent_BN)
    out, lse = run(case)
    for row in range(7):
        rows = np.array(path(parent_BN[0], row))
        alone = case._replace(
            q_BQHK=case.q_BQHK[:, rows],
            k_new_BNGK=case.k_new_BNGK[:, rows],
            v_new_BNGK=case.v_new_BNGK[:, rows],
            ancestors_BQC=np.asarray(causal_words(len(rows)))[None],
        )
        path_out, path_lse = run(alone)
        np.testing.assert_allclose(out[:, row], path_out[:, -1], rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[:, row], path_lse[:, -1], rtol=0, atol=1e-6)


def test_chunks_equal_one_chain() -> None:
    # The same 24 tokens: all new, and 16 of them in the cache already.
    chain = np.arange(-1, 23, dtype=np.int32)[None]
    chain[0, 0] = 24
    whole = make_case(prefix=(0,), N=24, G=2, group=2, parent_BN=chain)
    pages = np.full((2, 2, 4, 8, 16), np.nan, np.float32)
    for array, new in zip(pages, (whole.k_new_BNGK, whole.v_new_BNGK), strict=True):
        array[:, [3, 1]] = new[0, :16].transpose(1, 0, 2).reshape(2, 2, 8, 16)
    out, lse = attend(
        whole.q_BQHK[:, 16:],
        whole.k_new_BNGK[:, 16:],
        whole.v_new_BNGK[:, 16:],
        *pages,
        np.array([[3, 1, 4]], np.int32),
        np.array([16], np.int32),
        np.asarray(causal_words(8))[None],
        scale=whole.scale,
    )
    whole_out, whole_lse = run(whole)
    np.testing.assert_allclose(out, whole_out[:, 16:], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse[:, 16:], rtol=0, atol=1e-6)


def test_slots_do_not_see_each_other() -> None:
    case = make_case(prefix=(5, 40, 0), N=6, G=2)
    out, lse = run(case)
    for b in range(3):
        one = [a[b : b + 1] if i not in (3, 4) else a for i, a in enumerate(case.arrays)]
        alone_out, alone_lse = attend(*one, scale=case.scale)
        np.testing.assert_allclose(out[b : b + 1], alone_out, rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[b : b + 1], alone_lse, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("G", "devices"), [(8, 8), (4, 2), (3, 8)])
def test_split_heads_equal_one_device(G: int, devices: int) -> None:
    # 3 heads do not divide over 8 devices: computed whole on each.
    case = make_case(prefix=(0, 21), N=6, G=G, group=2)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("model",))
    out, lse = attend(*case.arrays, scale=case.scale, mesh=mesh, kv_axis="model")
    assert_matches((out, lse), case)
    assert len(out.sharding.device_set) == devices
    assert out.sharding.shard_shape(out.shape)[2] == (2 * G // devices if G % devices == 0 else 2 * G)


def test_cost_does_not_follow_capacity() -> None:
    def temporaries(implementation: str, table_pages: int) -> int:
        case = make_case(prefix=(20,), N=4, G=2, Z=16, K=32, table_pages=table_pages)
        f = jax.jit(functools.partial(tree_attention, scale=case.scale, implementation=implementation))
        return f.lower(*case.arrays).compile().memory_analysis().temp_size_in_bytes

    one_array = 2 * 512 * 16 * 32 * 4
    assert temporaries("xla", 512) - temporaries("xla", 16) < one_array // 64
    assert temporaries("reference", 512) > one_array  # the measure sees a gather of the whole table


def test_caches_are_not_copied_in_a_step() -> None:
    # As in decoding: branches read the donated cache inside a while loop, and one commit follows.
    case = make_case(prefix=(20,), N=4, G=2, Z=16, K=32, table_pages=256)

    def branch(rows: int, k_pages, v_pages, q):
        new = (case.k_new_BNGK[:, :rows], case.v_new_BNGK[:, :rows], k_pages, v_pages)
        slot = (case.block_table, case.prefix_len_B, case.ancestors_BQC[:, :rows])
        out, _ = tree_attention(q[:, :rows], *map(jnp.asarray, new + slot), scale=case.scale)
        return jnp.pad(out, ((0, 0), (0, 4 - rows), (0, 0), (0, 0)))

    def step(carry):
        i, *pages, q = carry
        q = jax.lax.switch(i % 2, [functools.partial(branch, 1), functools.partial(branch, 4)], *pages, q)
        return i + 1, *(a.at[:, case.block_table[0, 1], 5].set(q[0, 0]) for a in pages), q

    def decode(k_pages, v_pages):
        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, k_pages, v_pages, jnp.asarray(case.q_BQHK)))

    pages = case.arrays[3:5]
    compiled = jax.jit(decode, donate_argnums=(0, 1)).lower(*pages).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages[0].nbytes // 4
    _, _, _, q = compiled(*map(jnp.asarray, pages))
    assert np.isfinite(q).all()


def test_ancestor_words_of_a_drawn_tree() -> None:
    # 0 -> (1 -> 3, 2), row 4 is padding
    words = ancestor_words(jnp.array([[5, 0, 0, 1, 5]], jnp.int32))
    np.testing.assert_array_equal(words[0, :, 0], np.array([0b1, 0b11, 0b101, 0b1011, 0b10000]))


@pytest.mark.parametrize("N", [1, 2, 31, 32, 33, 64, 65, 130])
def test_ancestor_words_equal_walks(N: int) -> None:
    parent_BN = random_parents(np.random.default_rng(N), 3, N, padding=N // 4)
    parent_BN[0] = np.arange(-1, N - 1)  # the deepest tree there is
    parent_BN[0, 0] = N
    words = np.asarray(ancestor_words(jnp.asarray(parent_BN)))
    assert words.dtype == np.uint32
    assert words.shape == (3, N, -(-N // 32))
    flags = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    for b, n in np.ndindex(3, N):
        assert list(np.flatnonzero(flags[b, n])) == path(parent_BN[b], n)
    np.testing.assert_array_equal(causal_words(N), words[0])


def test_unknown_implementation_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"'cuda'; known are pallas_gpu, pallas_tpu, reference, xla"):
        attend(*make_case().arrays, scale=1.0, implementation="cuda")


def test_contradicting_arguments_are_refused() -> None:
    case = make_case(N=3, G=2)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    with pytest.raises(ValueError, match="both mesh and kv_axis"):
        attend(*case.arrays, scale=case.scale, mesh=mesh)
    with pytest.raises(ValueError, match="no axis 'tensor'; its axes are model"):
        attend(*case.arrays, scale=case.scale, mesh=mesh, kv_axis="tensor")
    with pytest.raises(ValueError, match="1 ancestor words a query, not 2"):
        run(case._replace(ancestors_BQC=np.zeros((1, 3, 2), np.uint32)))
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        run(case._replace(q_BQHK=np.zeros((1, 3, 3, 16), np.float32)))


def test_without_a_cache_there_is_a_derivative() -> None:
    # Training: no pages at all; the derivative along a random direction equals a finite difference.
    case = make_case(prefix=(0,), N=6, G=2, group=2)
    empty = np.zeros((2, 0, 8, 16), np.float32)
    table = np.zeros((1, 0), np.int32)
    weight = np.random.default_rng(1).standard_normal(case.q_BQHK.shape).astype(np.float32)

    @jax.jit
    def loss(q, k_new, v_new):
        rest = (empty, empty, table, case.prefix_len_B, case.ancestors_BQC)
        out, _ = tree_attention(q, k_new, v_new, *map(jnp.asarray, rest), scale=case.scale, implementation="xla")
        return (out * weight).sum()

    at = case.arrays[:3]
    np.testing.assert_allclose(loss(*at), (run(case)[0] * weight).sum(), rtol=1e-5)
    step = [1e-2 * np.random.default_rng(2).standard_normal(a.shape).astype(np.float32) for a in at]
    ahead, behind = ([a + sign * d for a, d in zip(at, step, strict=True)] for sign in (1, -1))
    slopes = jax.grad(loss, argnums=(0, 1, 2))(*at)
    predicted = 2 * sum(float((slope * d).sum()) for slope, d in zip(slopes, step, strict=True))
    np.testing.assert_allclose(float(loss(*ahead) - loss(*behind)), predicted, rtol=1e-3)
