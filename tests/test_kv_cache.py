"""The paged cache: what a commit writes and what it leaves alone, how large it is, and that no program copies it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import llama_config

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import config_from_hf
from specinfer_jax.models.kv_cache import KVCache, cache_bytes, commit, gather_rows, init_cache, pages_per_slot
from specinfer_jax.models.transformer import param_shapes
from specinfer_jax.notation import LayerKV
from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.slots import init_state, prefill_chunk
from specinfer_jax.speculation.speculator import Speculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.tree.expand import parse_expansion


def marked_rows(B: int, A: int, *, G: int = 2, K: int = 4, layers: int = 2) -> tuple[LayerKV, ...]:
    """K/V rows that all differ."""
    values = jnp.arange(1, 1 + 2 * layers * B * A * G * K, dtype=jnp.float32).reshape(layers, 2, B, A, G, K)
    return tuple(LayerKV(*values[l]) for l in range(layers))


def sentinel_cache(table: list[list[int]], length: list[int], *, num_pages: int, page_size: int = 4) -> KVCache:
    """Pages full of a value that no row has."""
    pages = tuple(jnp.full((2, num_pages, page_size, 4), -7.0) for _ in range(2))
    return KVCache(pages, pages, jnp.asarray(table, jnp.int32), jnp.asarray(length, jnp.int32))


def expected_pages(cache: KVCache, rows: tuple[LayerKV, ...], count: list[int], slots: list[int]) -> list[np.ndarray]:
    """K pages after the commit, row by row as the block table says."""
    result = [np.array(pages) for pages in cache.k_pages]
    table, length, page_size = np.asarray(cache.block_table), np.asarray(cache.length_B), result[0].shape[2]
    for layer, pages in enumerate(result):
        for b, slot in enumerate(slots):
            for step in range(count[b]):
                position = length[slot] + step
                if position < table.shape[1] * page_size and table[slot, position // page_size] < pages.shape[1]:
                    row = np.asarray(rows[layer].k_BNGK)[b, step]
                    pages[:, table[slot, position // page_size], position % page_size] = row
    return result


@pytest.mark.parametrize("length", range(8, 17))
def test_rows_past_the_end_are_dropped_not_moved(length: int) -> None:  # case B002
    """Capacity 16, eight rows: whatever does not fit disappears, and no row before `length` changes."""
    cache = sentinel_cache([[4, 1, 5, 2], [0, 3, 7, 6]], [length, 3], num_pages=8)
    rows = marked_rows(2, 8)
    after = jax.jit(commit)(cache, rows, jnp.asarray([8, 2], jnp.int32))
    for pages, expected in zip(after.k_pages, expected_pages(cache, rows, [8, 2], [0, 1]), strict=True):
        np.testing.assert_array_equal(pages, expected)
        written = int((np.asarray(pages)[0, :, :, 0] != -7).sum())
        assert written == min(8, 16 - length) + 2
    assert after.length_B.tolist() == [length + 8, 5]


@pytest.mark.parametrize("count", [[0, 0], [1, 4], [4, 0], [3, 2]])
def test_rows_from_the_count_on_are_padding(count: list[int]) -> None:  # case B003
    """Last row, last page and every other row keep the sentinel; -1 would have written one of them."""
    cache = sentinel_cache([[0, 2, 6], [5, 6, 6]], [3, 1], num_pages=6)  # 6: pages that the slots do not own
    rows = marked_rows(2, 4)
    after = jax.jit(commit)(cache, rows, jnp.asarray(count, jnp.int32))
    for pages, expected in zip(after.k_pages, expected_pages(cache, rows, count, [0, 1]), strict=True):
        np.testing.assert_array_equal(pages, expected)
    assert (np.asarray(after.v_pages[1])[:, [1, 3, 4]] == -7).all()
    assert after.length_B.tolist() == [3 + count[0], 1 + count[1]]


def test_padding_indices_give_zeros_and_no_other_row() -> None:  # case B003
    rows = marked_rows(1, 3)
    picked = gather_rows(rows, jnp.asarray([[2, 0, 3, 3]], jnp.int32))
    for layer, source in zip(picked, rows, strict=True):
        np.testing.assert_array_equal(layer.k_BNGK[0, :2], source.k_BNGK[0, jnp.asarray([2, 0])])
        assert not layer.k_BNGK[0, 2:].any()
        assert not layer.v_BNGK[0, 2:].any()


def test_one_slot_of_many_is_written() -> None:
    cache = sentinel_cache([[0, 1], [2, 3], [4, 5]], [2, 3, 1], num_pages=6)
    rows = marked_rows(1, 4)
    after = jax.jit(commit)(cache, rows, jnp.asarray([3], jnp.int32), jnp.asarray([1], jnp.int32))
    for pages, expected in zip(after.k_pages, expected_pages(cache, rows, [3], [1]), strict=True):
        np.testing.assert_array_equal(pages, expected)
    assert after.length_B.tolist() == [2, 6, 1]


def test_cache_size_is_known_before_it_is_allocated() -> None:
    config = config_from_hf(llama_config())
    assert [pages_per_slot(tokens, 8) for tokens in (1, 8, 9, 64)] == [1, 1, 2, 8]
    for dtype, itemsize in ((jnp.float32, 4), (jnp.bfloat16, 2)):
        cache = init_cache(config, num_slots=3, max_model_len=20, page_size=8, dtype=dtype)
        arrays = [*cache.k_pages, *cache.v_pages]
        assert sum(x.nbytes for x in arrays) == cache_bytes(
            config, num_slots=3, max_model_len=20, page_size=8, itemsize=itemsize
        )
        assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays) == 2 * config.num_layers
        assert cache.block_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert cache.length_B.tolist() == [0, 0, 0]


LONGEST = 65_536
BIG = ModelConfig(
    family="llama", vocab_size=64, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=64, mlp_width=48,
    max_position=LONGEST, tied_head=True,
)  # fmt: skip
SSM = SsmSpeculator(BIG, parse_expansion("1,2,1"), max_len=LONGEST, vocab_limit=64)
SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


def check_memory(compiled: Any, num_models: int) -> None:
    """Temporaries stay below one layer's cache array, and the donated caches come out in place."""
    memory, one_array = compiled.memory_analysis(), BIG.num_kv_heads * LONGEST * BIG.head_size * 4
    assert memory.temp_size_in_bytes < one_array / 2
    assert memory.alias_size_in_bytes >= num_models * 2 * BIG.num_layers * one_array


def shapes_of(program: StepProgram) -> tuple[DecodeParams, Any]:
    """Parameters and state of a program, nothing allocated."""
    params = param_shapes(BIG)
    state = jax.eval_shape(
        lambda: init_state(program, num_slots=1, max_model_len=LONGEST, page_size=128, dtype=jnp.float32)
    )
    ssm_params = tuple(params if isinstance(s, SsmSpeculator) else () for s in program.speculators)
    return DecodeParams(params, ssm_params), state


@pytest.mark.parametrize(
    ("speculators", "adaptive"),
    [((), False), pytest.param((SSM,), False, marks=pytest.mark.slow), ((SSM, NgramSpeculator()), True)],
    ids=["incremental", "ssm", "ssm and n-gram with the gate"],
)
def test_a_burst_copies_no_cache(speculators: tuple[Speculator, ...], adaptive: bool) -> None:
    program = StepProgram(BIG, speculators, adaptive=adaptive)
    costs = StepCosts(*(jax.ShapeDtypeStruct((n,), jnp.float32) for n in (len(program.buckets), len(speculators))))
    run = jax.jit(functools.partial(burst, program=program), donate_argnums=1)
    check_memory(run.lower(*shapes_of(program), costs, SCALAR).compile(), num_models=1 + (SSM in speculators))


def test_prefill_copies_no_cache() -> None:
    program = StepProgram(BIG, (SSM,))
    run = jax.jit(functools.partial(prefill_chunk, program=program, chunk=32), donate_argnums=1)
    check_memory(run.lower(*shapes_of(program), SCALAR).compile(), num_models=2)
