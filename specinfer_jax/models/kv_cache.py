"""The paged cache of one model: keys and values of committed tokens, written only by `commit`.

Pages of one slot lie wherever its row of the block table says; slots may share pages that are full of the same tokens.
A tree's own rows never enter before they are verified, so there is nothing to roll back:

    block_table[b] = [4, 7, P, P]      prefix_len = 5, page size 4
    page 4: t0 t1 t2 t3    page 7: t4 . . .    entries P (out of range) are pages the slot does not own
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.notation import LayerKV

Rows = TypeVar("Rows")


class KVCache(NamedTuple):
    """Device state of one model's cache; `length` counts the tokens whose K/V is inside."""

    k_pages: tuple[Float[Array, "G P Z K"], ...]
    """Keys, one array per layer: stacking them would copy a layer's pages at every use."""
    v_pages: tuple[Float[Array, "G P Z K"], ...]
    """Values, same layout."""
    block_table: Int[Array, "B pages"]
    """Page ids of every slot in order; P where the slot owns no page."""
    length_B: Int[Array, " B"]
    """Tokens in the cache per slot."""


def pages_per_slot(max_model_len: int, page_size: int) -> int:
    """Pages that hold one slot's longest context."""
    return -(-max_model_len // page_size)


def cache_bytes(
    config: ModelConfig, *, num_slots: int, max_model_len: int, page_size: int, itemsize: int,
    num_pages: int | None = None,
) -> int:  # fmt: skip
    """Bytes of the cache before it is allocated; arguments as for `init_cache`."""
    pages = num_slots * pages_per_slot(max_model_len, page_size) if num_pages is None else num_pages
    tokens = pages * page_size
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * tokens * itemsize


def init_cache(
    config: ModelConfig, *, num_slots: int, max_model_len: int, page_size: int, dtype: DTypeLike,
    num_pages: int | None = None,
) -> KVCache:  # fmt: skip
    """An empty cache.

    Args:
      config: the model.
      num_slots: B.
      max_model_len: longest context of a slot.
      page_size: Z.
      dtype: of keys and values.
      num_pages: P, pages that somebody else hands out, so that no slot owns any; None: as many as all slots can fill,
        and slot b owns the b-th run of them.
    """
    pages = pages_per_slot(max_model_len, page_size)
    P = num_slots * pages if num_pages is None else num_pages
    shape = (config.num_kv_heads, P, page_size, config.head_size)

    # One buffer each: a buffer shared by two leaves cannot be donated twice.
    def arrays() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    if num_pages is None:
        table = jnp.arange(P, dtype=jnp.int32).reshape(num_slots, pages)
    else:
        table = jnp.full((num_slots, pages), P, jnp.int32)
    return KVCache(arrays(), arrays(), table, jnp.zeros((num_slots,), jnp.int32))


def read_first(wanted: Bool[Array, ""], compute: Callable[[], Rows]) -> Rows:
    """`compute()` if wanted, else zeros: for passes that read a cache which `commit` writes right afterwards.

    A layer's rows are known before its attention has read the cache. Without a branch around the pass, XLA keeps the
    freedom to write them at once, and copies the cache to keep the reading right. Where a branch ends, reading is over.
    """

    def nothing() -> Rows:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute))

    return jax.lax.cond(wanted, compute, nothing)


def commit(
    cache: KVCache,
    rows: tuple[LayerKV, ...],
    count_B: Int[Array, " B"],
    slot_B: Int[Array, " B"] | None = None,
) -> KVCache:
    """Append the first `count` rows of every slot behind its cached tokens.

    Args:
      cache: donated by the caller's jit; earlier rows stay bit-identical.
      rows: per layer `[B, A, G, K]`, already in path order.
      count_B: rows to keep, 0 to A; the rest is dropped.
      slot_B: which cache slots the rows belong to; None means all, in order.

    Returns:
      The cache with `length += count`. Rows beyond the slot's pages are dropped, never wrapped or shifted.
    """
    length_B = cache.length_B if slot_B is None else cache.length_B[slot_B]
    table = cache.block_table if slot_B is None else cache.block_table[slot_B]
    page_BA, offset_BA = _write_indices(cache, table, length_B, count_B, rows[0].k_BNGK.shape[1])

    def write(pages: Array, rows_BAGK: Array) -> Array:
        rows_GBAK = jnp.moveaxis(rows_BAGK, 2, 0).astype(pages.dtype)
        return pages.at[:, page_BA, offset_BA].set(rows_GBAK, mode="drop")

    k_pages = tuple(write(pages, row.k_BNGK) for pages, row in zip(cache.k_pages, rows, strict=True))
    v_pages = tuple(write(pages, row.v_BNGK) for pages, row in zip(cache.v_pages, rows, strict=True))
    new_length = length_B + count_B if slot_B is None else cache.length_B.at[slot_B].add(count_B)
    return KVCache(k_pages, v_pages, cache.block_table, new_length)


def _write_indices(
    cache: KVCache, table: Int[Array, "B pages"], length_B: Int[Array, " B"], count_B: Int[Array, " B"], size: int
) -> tuple[Int[Array, "B A"], Int[Array, "B A"]]:
    """Page and offset of every row to write; page P, which `mode="drop"` ignores, for rows not kept."""
    num_pages, page_size = cache.k_pages[0].shape[1:3]
    step_A = jnp.arange(size, dtype=jnp.int32)[None]
    position_BA = length_B[:, None] + step_A
    kept_BA: Bool[Array, "B A"] = step_A < count_B[:, None]
    # fill_value keeps positions past the table out of range instead of clamping them onto the last page.
    page_BA = jnp.take_along_axis(table, position_BA // page_size, axis=1, mode="fill", fill_value=num_pages)
    return jnp.where(kept_BA, page_BA, num_pages), position_BA % page_size


def gather_rows(rows: tuple[LayerKV, ...], index_BA: Int[Array, "B A"]) -> tuple[LayerKV, ...]:
    """Rows of every layer picked by index; an index out of range gives zeros, which `commit` then drops."""

    def pick(x_BNGK: Array) -> Array:
        return jax.vmap(lambda x_NGK, index_A: x_NGK.at[index_A].get(mode="fill", fill_value=0))(x_BNGK, index_BA)

    return tuple(LayerKV(pick(row.k_BNGK), pick(row.v_BNGK)) for row in rows)
