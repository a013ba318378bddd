"""The decoder: every way of feeding rows gives what one plain pass gives, whatever else lies in the cache."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import llama_config, opt_config
from decoder_cases import append, depths, empty_cache, filled, run_rows, tiny_model

from pallas_kernels.tree_attention import causal_words
from specinfer_jax.checkpoint.load import LoadedModel
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, gather_rows
from specinfer_jax.models.transformer import forward, param_shapes, vocabulary_logits

CONFIGS = {"llama": llama_config(), "opt": opt_config()}
TEXT = [7, 42, 3, 19, 60, 5, 5, 33, 21, 8, 50, 14, 2, 61, 39, 27]
PREFIX, TOLERANCE = TEXT[:11], 1e-5

# A root, two children, two grandchildren under each and one row below the first of those.
TREE = {"root": None, "a": "root", "b": "root", "aa": "a", "ab": "a", "ba": "b", "bb": "b", "aaa": "aa"}
TOKENS = {"root": 9, "a": 11, "b": 12, "aa": 21, "ab": 22, "ba": 21, "bb": 24, "aaa": 31}
BREADTH_FIRST = ["root", "a", "b", "aa", "ab", "ba", "bb", "aaa"]
DEPTH_FIRST = ["root", "b", "bb", "ba", "a", "ab", "aa", "aaa"]


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny_model(CONFIGS[request.param])


def tree_in(order: list[str]) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree's rows in this order; the root's parent is out of range."""
    return [TOKENS[name] for name in order], [order.index(TREE[name]) if TREE[name] else -1 for name in order]


def path_to(name: str) -> list[str]:
    above = TREE[name]
    return [*path_to(above), name] if above else [name]


def test_chunks_of_a_prompt_equal_one_pass(model: LoadedModel) -> None:
    whole, rows = run_rows(model, TEXT)
    for chunk in (3, 8):
        cache, found = empty_cache(model.config), []
        for start in range(0, len(TEXT), chunk):
            part = TEXT[start : start + chunk]
            logits, new = run_rows(model, part, cache=cache)
            cache = append(cache, new, len(part))
            found.append(logits)
        np.testing.assert_allclose(np.concatenate(found), whole, rtol=0, atol=TOLERANCE)
        stored = np.asarray(cache.k_pages[1])[:, :2].reshape(model.config.num_kv_heads, 16, -1)
        np.testing.assert_allclose(stored, np.asarray(rows[1].k_BNGK)[0].swapaxes(0, 1), rtol=0, atol=TOLERANCE)


def test_one_token_at_a_time_equals_one_pass(model: LoadedModel) -> None:
    whole, _ = run_rows(model, TEXT)
    cache = empty_cache(model.config)
    for i, token in enumerate(TEXT):
        logits, rows = run_rows(model, [token], cache=cache)
        cache = append(cache, rows, 1)
        np.testing.assert_allclose(logits[0], whole[i], rtol=0, atol=TOLERANCE)
    assert cache.length_B.tolist() == [len(TEXT)]


@pytest.mark.parametrize("order", [BREADTH_FIRST, DEPTH_FIRST], ids=["breadth first", "depth first"])
def test_a_node_sees_its_path_and_nothing_else(model: LoadedModel, order: list[str]) -> None:  # case B026
    tokens, parents = tree_in(order)
    logits, _ = run_rows(model, tokens, cache=filled(model, PREFIX), parents=parents)
    for row, name in enumerate(order):
        path = [TOKENS[above] for above in path_to(name)]
        plain, _ = run_rows(model, pad(PREFIX + path))
        np.testing.assert_allclose(logits[row], plain[len(PREFIX) + len(path) - 1], rtol=0, atol=TOLERANCE)


def pad(tokens: list[int]) -> list[int]:
    """To the length of TEXT, so that every path runs in the same program; later rows change nothing before them."""
    return tokens + [0] * (len(TEXT) - len(tokens))


@pytest.mark.parametrize("order", [BREADTH_FIRST, DEPTH_FIRST], ids=["breadth first", "depth first"])
def test_other_branches_leave_a_node_bit_equal(model: LoadedModel, order: list[str]) -> None:  # case B026
    tokens, parents = tree_in(order)
    cache = filled(model, PREFIX)
    before, rows_before = run_rows(model, tokens, cache=cache, parents=parents)
    for changed in order:
        other = [63 if name == changed else token for name, token in zip(order, tokens, strict=True)]
        after, rows_after = run_rows(model, other, cache=cache, parents=parents)
        below = np.array([changed in path_to(name) for name in order])
        np.testing.assert_array_equal(after[~below], before[~below])
        assert (np.abs(after[below] - before[below]).max(axis=1) > 1e-3).all()
        for layer_before, layer_after in zip(rows_before, rows_after, strict=True):
            np.testing.assert_array_equal(layer_after.k_BNGK[0, ~below], layer_before.k_BNGK[0, ~below])
            np.testing.assert_array_equal(layer_after.v_BNGK[0, ~below], layer_before.v_BNGK[0, ~below])


def test_positions_come_from_the_depth(model: LoadedModel) -> None:  # case B026
    """Counting rows instead of levels moves every second sibling's logits by far more than rounding."""
    tokens, parents = tree_in(BREADTH_FIRST)
    cache = filled(model, PREFIX)
    right, _ = run_rows(model, tokens, cache=cache, parents=parents)
    by_row, _ = run_rows(model, tokens, cache=cache, parents=parents, positions=[len(PREFIX) + n for n in range(8)])
    assert [len(PREFIX) + depth for depth in depths([8, 0, 0, 1, 1, 2, 2, 3])] == [11, 12, 12, 13, 13, 13, 13, 14]
    np.testing.assert_array_equal(by_row[:2], right[:2])
    assert (np.abs(by_row[2:] - right[2:]).max(axis=1) > 1e-3).all()


def test_level_by_level_equals_all_at_once(model: LoadedModel) -> None:
    tokens, parents = tree_in(BREADTH_FIRST)
    cache = filled(model, PREFIX)
    whole, whole_rows = run_rows(model, tokens, cache=cache, parents=parents)
    found, earlier = [], None
    for start, stop in itertools.pairwise([0, 1, 3, 7, 8]):
        logits, new = run_rows(model, tokens[start:stop], cache=cache, parents=parents[:stop], earlier=earlier)
        earlier = new if earlier is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), earlier, new)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found), whole, rtol=0, atol=TOLERANCE)
    for layer, whole_layer in zip(earlier, whole_rows, strict=True):
        np.testing.assert_allclose(layer.k_BNGK, whole_layer.k_BNGK, rtol=0, atol=TOLERANCE)


def test_committing_a_path_out_of_a_tree_equals_a_plain_context(model: LoadedModel) -> None:
    tokens, parents = tree_in(BREADTH_FIRST)
    cache = filled(model, PREFIX)
    _, rows = run_rows(model, tokens, cache=cache, parents=parents)
    path = [BREADTH_FIRST.index(name) for name in ("root", "a", "aa", "aaa")]
    picked = gather_rows(rows, jnp.asarray([[*path, 8, 8]], jnp.int32))  # 8: out of range, padding
    cache = append(cache, picked, 4)
    after, _ = run_rows(model, [50], cache=cache)
    plain, _ = run_rows(model, [*PREFIX, 9, 11, 21, 31, 50])
    np.testing.assert_allclose(after[0], plain[-1], rtol=0, atol=TOLERANCE)


def test_rows_before_the_end_stay_bit_equal_over_a_decoded_context(model: LoadedModel) -> None:  # case B002
    """Context 16 of 16: a tree of eight rows is committed at 13, 15 and 16 tokens."""
    tokens, parents = tree_in(BREADTH_FIRST)
    for length in (13, 15, 16):
        cache = filled(model, TEXT[:length], max_model_len=16)
        before = [np.array(pages) for pages in (*cache.k_pages, *cache.v_pages)]
        positions = [min(length + depth, 15) for depth in (0, 1, 1, 2, 2, 2, 2, 3)]
        _, rows = run_rows(model, tokens, cache=cache, parents=parents, positions=positions)
        after = append(cache, rows, 8)
        for old, new in zip(before, (*after.k_pages, *after.v_pages), strict=True):
            flat_old, flat_new = (np.asarray(x).reshape(x.shape[0], 16, -1) for x in (old, new))
            np.testing.assert_array_equal(flat_new[:, :length], flat_old[:, :length])
            assert (flat_new[:, length:] != flat_old[:, length:]).any(axis=-1).all()


def test_what_lies_outside_the_prefix_never_matters(model: LoadedModel) -> None:  # case B019
    """NaN in pages nobody owns, behind the last token, and in the pages of a stale table entry."""
    config, page_size = model.config, 4
    clean = filled(model, PREFIX, max_model_len=24, page_size=page_size)
    shape = (config.num_kv_heads, 9, page_size, config.head_size)
    home = [6, 2, 7]  # 11 tokens: two pages and three rows of the third
    table = jnp.asarray([[*home, 9, 4, 1]], jnp.int32)  # 9: not owned; 4 and 1: left over from another request

    def scattered(pages: Any) -> Any:
        poisoned = jnp.full(shape, jnp.nan).at[:, jnp.asarray(home)].set(pages[:, :3])
        return poisoned.at[:, 7, 3].set(jnp.nan)

    k_pages, v_pages = (tuple(scattered(pages) for pages in part) for part in (clean.k_pages, clean.v_pages))
    poisoned = KVCache(k_pages, v_pages, table, clean.length_B)
    tokens, parents = tree_in(BREADTH_FIRST)
    expected, _ = run_rows(model, tokens, cache=clean, parents=parents)
    found, rows = run_rows(model, tokens, cache=poisoned, parents=parents)
    np.testing.assert_array_equal(found, expected)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(rows))


def test_slots_do_not_see_each_other(model: LoadedModel) -> None:  # case B037
    """Four slots of different lengths, one of them empty, in one pass: bit-equal whatever the others hold."""
    prefixes = [TEXT[:5], TEXT[:1], [], TEXT[:11]]
    config = model.config
    cache = empty_cache(config, num_slots=4, max_model_len=16)
    for slot, prefix in enumerate(prefixes):
        if prefix:
            _, rows = run_rows(model, prefix)
            cache = commit(cache, rows, jnp.asarray([len(prefix)]), jnp.asarray([slot]))
    token_BQ = jnp.asarray([[9, 11], [9, 11], [9, 11], [9, 11]], jnp.int32)

    @jax.jit
    def both(cache: KVCache, token_BQ: Any) -> Any:
        position_BQ = cache.length_B[:, None] + jnp.arange(2)[None]
        words = jnp.broadcast_to(causal_words(2)[None], (4, 2, 1))
        x_DT, _ = forward(model.params, token_BQ, position_BQ, cache, words, config=config)
        return vocabulary_logits(model.params, x_DT, config=config).T.reshape(4, 2, -1)

    together = both(cache, token_BQ)
    for slot, prefix in enumerate(prefixes):
        plain, _ = run_rows(model, pad([*prefix, 9, 11]))
        np.testing.assert_allclose(together[slot], plain[len(prefix) : len(prefix) + 2], rtol=0, atol=TOLERANCE)
    changed = both(cache, token_BQ.at[0].set(40))
    np.testing.assert_array_equal(changed[1:], together[1:])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_logits_of_half_precision_weights_are_float32_in_either_layout(dtype: Any) -> None:  # case B096
    model = tiny_model(CONFIGS["llama"], dtype=dtype)
    x_DT = jax.random.normal(jax.random.key(0), (32, 5)).astype(dtype)
    straight_VT = jax.jit(lambda x: vocabulary_logits(model.params, x, config=model.config))(x_DT)
    turned_TV = jax.jit(lambda x: vocabulary_logits(model.params, x, config=model.config).T)(x_DT)
    assert straight_VT.dtype == turned_TV.dtype == jnp.float32
    np.testing.assert_array_equal(straight_VT, turned_TV.T)
    assert (straight_VT != straight_VT.astype(dtype).astype(jnp.float32)).any()


def test_parameter_shapes_allocate_nothing() -> None:
    config = ModelConfig(
        family="llama", vocab_size=128_256, width=16_384, num_layers=16, num_heads=128, num_kv_heads=8,
        head_size=128, mlp_width=53_248, max_position=131_072, tied_head=False,
    )  # fmt: skip
    before = len(jax.live_arrays())
    shapes = jax.tree.leaves(param_shapes(config, dtype=jnp.bfloat16))
    assert len(jax.live_arrays()) <= before + 1  # the key it is called with
    assert 50e9 < sum(int(np.prod(shape.shape)) for shape in shapes) < 60e9
    assert all(isinstance(shape, jax.ShapeDtypeStruct) and shape.dtype == jnp.bfloat16 for shape in shapes)
