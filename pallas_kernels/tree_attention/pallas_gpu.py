"""Tree attention for NVIDIA GPUs: flash decoding over pages and tree rows, Pallas lowered through Triton.

A program holds `rows` of the R query rows that share a key/value head and walks over its share of the slot's keys, a
tile of `tokens` at a time. Tiles are counted over the slot's own prefix, then over the tree rows that any of its query
rows may see, and the splits share them evenly:

    prefix of 200 tokens, 40 tree rows, tiles of 64    | 0 | 1 | 2 | 3.| t |      3. is cut off by the length
    two splits                                         |-- first --| second |

So a long prefix in a small batch still fills the chip; the splits' outputs are merged by log-sum-exp. Tiles that lie
wholly in the prefix carry no mask. Each token of a tile finds its page alone, so that pages of any size work.

Letters beside the project's key: J = H / G query heads of a group, R = Q * J (row r is query r // J, head r % J of the
group), T tokens of a tile, S splits; K in a tile is the head size rounded up to a power of two, the surplus masked.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.tree_attention.block_sizes import GpuBlocks, gpu_blocks
from pallas_kernels.tree_attention.xla import SCORE_FLOOR


class Softmax(NamedTuple):
    """An online softmax under way, to base 2."""

    top_R: Float32[Array, " R"]
    """Largest score so far."""
    total_R: Float32[Array, " R"]
    """Sum of exp2(score - top)."""
    acc_RK: Float32[Array, "R K"]
    """Sum of exp2(score - top) * value."""


def tree_attention_gpu(
    q_BQHK: Float[Array, "B Q H K"],
    k_new_BNGK: Float[Array, "B N G K"],
    v_new_BNGK: Float[Array, "B N G K"],
    k_pages_GPZK: Float[Array, "G P Z K"],
    v_pages_GPZK: Float[Array, "G P Z K"],
    block_table: Int32[Array, "B pages"],
    prefix_len_B: Int32[Array, " B"],
    ancestors_BQC: UInt32[Array, "B Q C"],
    *,
    scale: float,
    interpret: bool = False,
    compute_capability: str | None = None,
    splits: int | None = None,
) -> tuple[Float[Array, "B Q H K"], Float32[Array, "B Q H"]]:
    """Attend to prefix and ancestors in one kernel; arrays, `scale` and results as in `api.tree_attention`.

    `interpret`: run on any device, slowly, as a check of the algorithm.
    `compute_capability`: of the chip, such as "8.0"; tiles are chosen for it. None fits every chip from 8.0 on.
    `splits`: parts that a slot's keys are cut into; None takes as many as fill the chip.

    Raises ValueError for heads of more than 256.
    """
    B, Q, H, K = q_BQHK.shape
    G, _, Z, _ = k_pages_GPZK.shape
    N, C = k_new_BNGK.shape[1], ancestors_BQC.shape[2]
    J, table_pages = H // G, block_table.shape[1]
    dtype = jnp.result_type(q_BQHK, k_pages_GPZK)
    blocks = gpu_blocks(Q * J, K, dtype.itemsize, compute_capability)
    row_blocks = pl.cdiv(Q * J, blocks.rows)
    splits = splits or choose_splits(B * G * row_blocks, table_pages * Z + N, blocks)
    # Triton's integers have no sign of their own, and jax allows fewer operations on unsigned ones.
    words_BQC = lax.bitcast_convert_type(ancestors_BQC, jnp.int32)

    def spec(block: tuple[int | None, ...], index: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec(block, lambda r, bg, s: index(lax.div(bg, G), lax.rem(bg, G), s))

    new = spec((None, N, None, K), lambda b, g, s: (b, 0, g, 0))
    pages = spec((None, k_pages_GPZK.shape[1], Z, K), lambda b, g, s: (g, 0, 0, 0))
    out_SBQGJK, lse_SBQGJ = pl.pallas_call(
        functools.partial(attend, scale=scale, blocks=blocks, dtype=dtype),
        grid=(row_blocks, B * G, splits),
        in_specs=(
            spec((None, Q, None, J, K), lambda b, g, s: (b, 0, g, 0, 0)),
            (new, new),
            (pages, pages),
            spec((None, table_pages), lambda b, g, s: (b, 0)),
            spec((None,), lambda b, g, s: (b,)),
            spec((None, Q, C), lambda b, g, s: (b, 0, 0)),
            spec((None, C), lambda b, g, s: (b, 0)),
        ),
        out_specs=(
            spec((None, None, Q, None, J, K), lambda b, g, s: (s, b, 0, g, 0, 0)),
            spec((None, None, Q, None, J), lambda b, g, s: (s, b, 0, g, 0)),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((splits, B, Q, G, J, K), q_BQHK.dtype if splits == 1 else jnp.float32),
            jax.ShapeDtypeStruct((splits, B, Q, G, J), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="tree_attention_gpu",
    )(
        q_BQHK.reshape(B, Q, G, J, K),
        (k_new_BNGK, v_new_BNGK),
        (k_pages_GPZK, v_pages_GPZK),
        block_table,
        prefix_len_B,
        words_BQC,
        jnp.bitwise_or.reduce(words_BQC, axis=1),
    )
    out_BQHK, lse_BQH = merge(out_SBQGJK.reshape(splits, B, Q, H, K), lse_SBQGJ.reshape(splits, B, Q, H))
    return out_BQHK.astype(q_BQHK.dtype), lse_BQH


def choose_splits(programs: int, keys: int, blocks: GpuBlocks) -> int:
    """Return into how many parts a slot's keys are cut: the fewest that keep three quarters of the chip busy.

    `programs`: without splits. `keys`: what a slot can hold at most; lengths are not known before the program runs. A
    part has at least 256 of them, because its output in float32 goes through memory once more.
    """
    places = blocks.multiprocessors * max(1, 8 // blocks.num_warps)
    counts = range(1, max(1, keys // max(256, 4 * blocks.tokens)) + 1)

    def busy(splits: int) -> float:
        return programs * splits / places / pl.cdiv(programs * splits, places)

    return next((splits for splits in counts if busy(splits) >= 0.75), max(counts, key=busy))


def merge(
    out_SBQHK: Float[Array, "S B Q H K"], lse_SBQH: Float32[Array, "S B Q H"]
) -> tuple[Float[Array, "B Q H K"], Float32[Array, "B Q H"]]:
    """Join the softmaxes of the splits."""
    if len(out_SBQHK) == 1:
        return out_SBQHK[0], lse_SBQH[0]
    top_BQH = jnp.maximum(lse_SBQH.max(axis=0), SCORE_FLOOR)
    weight_SBQH = jnp.exp(lse_SBQH - top_BQH[None])
    total_BQH = weight_SBQH.sum(axis=0)
    out_BQHK = (weight_SBQH[..., None] * out_SBQHK).sum(axis=0)
    return out_BQHK / jnp.where(total_BQH > 0, total_BQH, 1.0)[..., None], top_BQH + jnp.log(total_BQH)


def attend(
    q_ref: Any,
    new_refs: tuple[Any, Any],
    page_refs: tuple[Any, Any],
    table_ref: Any,
    length_ref: Any,
    words_ref: Any,
    used_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    scale: float,
    blocks: GpuBlocks,
    dtype: Any,
) -> None:
    """Run one program: some rows of one slot and key/value head, one share of its keys.

    Blocks: q [Q, J, K], new rows' K and V [N, K], pages of both [P, Z, K], table [pages], length [], words [Q, C],
    used [C] (the words of all queries together), out [Q, J, K], lse [Q, J].
    """
    Q, J, K = q_ref.shape
    N, T = new_refs[0].shape[0], blocks.tokens
    r_R = pl.program_id(0) * blocks.rows + jnp.arange(blocks.rows, dtype=jnp.int32)
    query_R, head_R, here_R = lax.div(r_R, J), lax.rem(r_R, J), r_R < Q * J
    k_K = jnp.arange(pl.next_power_of_2(K), dtype=jnp.int32)
    index_RK = (query_R[:, None], head_R[:, None], k_K[None])
    here_RK = here_R[:, None] & (k_K < K)[None]
    q_RK = pltriton.load(q_ref.at[index_RK], mask=here_RK, other=0).astype(dtype)

    # The splits share the tiles of prefix and tree together.
    length = length_ref[...]
    full, prefix_tiles = lax.div(length, T), lax.div(length + T - 1, T)
    tiles = prefix_tiles + tree_tiles(words_ref, query_R, here_R, T)
    share = lax.div(tiles + pl.num_programs(2) - 1, pl.num_programs(2))
    first = jnp.minimum(pl.program_id(2) * share, tiles)
    last = jnp.minimum(first + share, tiles)

    step = functools.partial(advance, q_RK, scale=scale * math.log2(math.e))
    prefix = functools.partial(read_prefix, page_refs, table_ref, k_K=k_K, tokens=T)
    state = Softmax(
        jnp.full(blocks.rows, SCORE_FLOOR, jnp.float32),
        jnp.zeros(blocks.rows, jnp.float32),
        jnp.zeros((blocks.rows, len(k_K)), jnp.float32),
    )
    state = lax.fori_loop(first, jnp.minimum(full, last), lambda t, state: step(*prefix(t), state=state), state)

    # At most one tile is cut off by the length.
    def cut(t: Int32[Array, ""], state: Softmax) -> Softmax:
        return step(*prefix(t, length=length), state=state)

    state = lax.fori_loop(jnp.maximum(first, full), jnp.minimum(prefix_tiles, last), cut, state)

    def tree(t: Int32[Array, ""], state: Softmax) -> Softmax:
        n_T = t * T + jnp.arange(T, dtype=jnp.int32)
        # A row that no query sees may be unwritten memory, and 0 * NaN is NaN.
        used_T = test_bit(pltriton.load(used_ref.at[lax.div(n_T, 32)], mask=n_T < N, other=0), n_T)
        k_TK, v_TK = read_rows(new_refs, (n_T,), used_T, k_K)
        seen_RT = tree_mask(words_ref, query_R, here_R, t, T)
        return step(k_TK, v_TK, seen_RT, state=state)

    state = lax.fori_loop(jnp.maximum(first - prefix_tiles, 0), last - prefix_tiles, tree, state)

    out_RK = state.acc_RK / jnp.where(state.total_R > 0, state.total_R, 1.0)[:, None]
    lse_R = state.top_R * math.log(2) + jnp.log(state.total_R)
    pltriton.store(out_ref.at[index_RK], out_RK.astype(out_ref.dtype), mask=here_RK)
    pltriton.store(lse_ref.at[query_R, head_R], lse_R, mask=here_R)


def advance(
    q_RK: Float[Array, "R K"],
    k_TK: Float[Array, "T K"],
    v_TK: Float[Array, "T K"],
    seen: Bool[Array, "R T"] | Bool[Array, "1 T"] | None,
    *,
    state: Softmax,
    scale: float,
) -> Softmax:
    """Take one tile of keys and values into the softmax; `seen` None means all of it. `scale` is to base 2."""
    s_RT = dot(q_RK, k_TK.astype(q_RK.dtype), ((1,), (1,))) * scale
    if seen is not None:
        s_RT = jnp.where(jnp.broadcast_to(seen, s_RT.shape), s_RT, -jnp.inf)
    top_R = jnp.maximum(state.top_R, s_RT.max(axis=1))
    p_RT = jnp.exp2(s_RT - top_R[:, None])
    shrink_R = jnp.exp2(state.top_R - top_R)
    return Softmax(
        top_R,
        state.total_R * shrink_R + p_RT.sum(axis=1),
        state.acc_RK * shrink_R[:, None] + dot(p_RT.astype(q_RK.dtype), v_TK.astype(q_RK.dtype), ((1,), (0,))),
    )


def dot(left: Float[Array, "..."], right: Float[Array, "..."], contract: tuple[Any, Any]) -> Float32[Array, "..."]:
    """Contract with float32 sums; HIGHEST keeps float32 operands from TF32 and says nothing to bfloat16 ones."""
    precision = lax.Precision.HIGHEST
    return lax.dot_general(left, right, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def read_prefix(
    page_refs: tuple[Any, Any],
    table_ref: Any,
    t: Int32[Array, ""],
    *,
    k_K: Int32[Array, " K"],
    tokens: int,
    length: Int32[Array, ""] | None = None,
) -> tuple[Float[Array, "T K"], Float[Array, "T K"], Bool[Array, "1 T"] | None]:
    """Load tile `t` of a slot's prefix and its mask; only with a length is anything masked."""
    Z = page_refs[0].shape[1]
    s_T = t * tokens + jnp.arange(tokens, dtype=jnp.int32)
    seen_T = None if length is None else s_T < length
    if Z % tokens == 0:
        page_T = jnp.full(tokens, table_ref[lax.div(t * tokens, Z)])
    else:
        page_T = pltriton.load(table_ref.at[lax.div(s_T, Z)], mask=seen_T, other=None if seen_T is None else 0)
    k_TK, v_TK = read_rows(page_refs, (page_T, lax.rem(s_T, Z)), seen_T, k_K)
    return k_TK, v_TK, None if seen_T is None else seen_T[None]


def read_rows(
    refs: tuple[Any, ...], index: tuple[Array, ...], here_T: Bool[Array, " T"] | None, k_K: Int32[Array, " K"]
) -> list[Float[Array, "T K"]]:
    """Load the rows at `index` from each array, zeros where `here_T` is false and beyond the head size."""
    K = refs[0].shape[-1]
    where = (*(i_T[:, None] for i_T in index), k_K[None])
    masks = [] if here_T is None else [here_T[:, None]]
    masks += [] if len(k_K) == K else [(k_K < K)[None]]
    if not masks:
        return [pltriton.load(ref.at[where]) for ref in refs]
    mask = jnp.broadcast_to(functools.reduce(jnp.bitwise_and, masks), (len(index[0]), len(k_K)))
    return [pltriton.load(ref.at[where], mask=mask, other=0) for ref in refs]


def tree_tiles(words_ref: Any, query_R: Int32[Array, " R"], here_R: Bool[Array, " R"], tokens: int) -> Int32[Array, ""]:
    """Count the tiles of tree rows up to the last one that any of these query rows sees."""
    rows_R = jnp.zeros_like(query_R)
    for c in range(words_ref.shape[1]):
        word_R = pltriton.load(words_ref.at[query_R, jnp.full_like(query_R, c)], mask=here_R, other=0)
        rows_R = jnp.where(word_R != 0, 32 * (c + 1), rows_R)
    return lax.div(rows_R.max() + tokens - 1, tokens)


def tree_mask(
    words_ref: Any, query_R: Int32[Array, " R"], here_R: Bool[Array, " R"], t: Int32[Array, ""], tokens: int
) -> Bool[Array, "R T"]:
    """Expand the ancestor bits of tile `t` of the tree rows."""
    n_1T = (t * tokens + jnp.arange(tokens, dtype=jnp.int32))[None]
    shape = (len(query_R), tokens)
    word_RT = jnp.zeros(shape, jnp.int32)
    for i in range(pl.cdiv(tokens, 32)):
        c = lax.div(t * tokens, 32) + i
        exists_R = here_R & (c < words_ref.shape[1])
        word_R = pltriton.load(words_ref.at[query_R, jnp.full_like(query_R, c)], mask=exists_R, other=0)
        inside_RT = jnp.broadcast_to(lax.div(n_1T, 32) == c, shape)
        word_RT = jnp.where(inside_RT, jnp.broadcast_to(word_R[:, None], shape), word_RT)
    return test_bit(word_RT, jnp.broadcast_to(n_1T, shape))


def test_bit(word: Int32[Array, "*shape"], n: Int32[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Say whether bit n % 32 is set."""
    return (lax.shift_right_logical(word, lax.rem(n, 32)) & 1) == 1
