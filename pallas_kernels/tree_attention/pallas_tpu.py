"""Tree attention as one Mosaic kernel for TPUs.

One grid step serves a block of query rows of one slot and KV head: first the tree, then the prefix block by block. The
pages of a block are copied from the cache in HBM into one half of a buffer while the other half is computed with, and
the first block of the slot's next step while this step's last is, so only a slot's first block is waited for:

    KV head     0                                            1
    compute     tree         block 0      block 1, masked    tree         block 0      block 1, masked
    copies      block 0 ->   block 1 ->   block 0 of head 1 -> ->         block 1 ->

Only the last block of a prefix looks at the length. The tree's mask is expanded in registers from ancestor words.

A TPU keeps arrays in tiles of 128 lanes. XLA lays a cache with K a multiple of 128 out row by row, as the kernel reads
it. With other head sizes it puts another dimension into the lanes: the tokens of a page if they are a multiple of 128.
The kernel then reads pages of [K, Z], at no padding and no cost. For pages of other sizes XLA chooses a layout that no
kernel can read pages from, and copies the whole cache in every call, unless the caller pins the cache to rows with
`jax.experimental.layout.Format`, which pads it to 128 lanes.

Letters beside the project's key: R = Q * H / G, the query rows that share a KV head, padded to whole blocks; S, the
tokens of a prefix block.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32, Num, UInt32

from pallas_kernels.tree_attention.block_sizes import tpu_blocks
from pallas_kernels.tree_attention.pallas_tpu_prefix import LANES, Prefix
from pallas_kernels.tree_attention.xla import SCORE_FLOOR


def tree_attention_tpu(
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
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B Q H K"], Float32[Array, "B Q H"]]:
    """Attend to tree and prefix in one pass of one kernel; arguments and results as in `api.tree_attention`.

    bfloat16 arrays are multiplied as bfloat16 and summed in float32; if any array is wider, all are taken as float32.
    `interpret`: run on a CPU, for tests; `InterpretParams` also simulates the chip's memories and looks for races.
    """
    _, Q, H, K = q_BQHK.shape
    G, P, Z, _ = k_pages_GPZK.shape
    _, table_pages = block_table.shape
    group = H // G
    if tokens_in_lanes(K, Z):
        k_pages_GPZK, v_pages_GPZK = k_pages_GPZK.swapaxes(2, 3), v_pages_GPZK.swapaxes(2, 3)
    arrays = (q_BQHK, k_new_BNGK, v_new_BNGK, k_pages_GPZK, v_pages_GPZK)
    compute_dtype = jnp.bfloat16 if all(a.dtype == jnp.bfloat16 for a in arrays) else jnp.float32

    row_block, block_pages = tpu_blocks(
        rows=Q * group, page_size=Z, head_size=K, table_pages=table_pages, itemsize=jnp.dtype(compute_dtype).itemsize
    )
    q_BGRK = fold_queries(q_BQHK.astype(compute_dtype), G)
    words_BRC = jnp.repeat(lax.bitcast_convert_type(ancestors_BQC, jnp.int32), group, axis=1)
    q_BGRK, words_BRC = pad_to(q_BGRK, row_block, axis=2), pad_to(words_BRC, row_block, axis=1)

    # A row that no query sees may be unwritten memory: its scores are masked, but 0 * NaN would get through its value.
    v_new_BNGK = jnp.where(seen_by_any(ancestors_BQC, k_new_BNGK.shape[1])[:, :, None, None], v_new_BNGK, 0)
    k_new_BGNK, v_new_BGNK = (
        pad_to(a.astype(compute_dtype).transpose(0, 2, 1, 3), 32, axis=2) for a in (k_new_BNGK, v_new_BNGK)
    )

    out_BGRK, lse_BG1R = call_kernel(
        # No copy may start outside the cache, whatever the table holds.
        jnp.minimum(block_table, P - 1).reshape(-1),
        jnp.minimum(prefix_len_B, table_pages * Z),
        q_BGRK,
        words_BRC,
        k_new_BGNK,
        v_new_BGNK,
        k_pages_GPZK,
        v_pages_GPZK,
        scale=scale,
        token_axis=1 if tokens_in_lanes(K, Z) else 0,
        row_block=row_block,
        block_pages=block_pages,
        out_dtype=q_BQHK.dtype,
        interpret=interpret,
    )
    out_BQHK = unfold_queries(out_BGRK, Q, group)
    return out_BQHK, unfold_queries(lse_BG1R.transpose(0, 1, 3, 2), Q, group)[..., 0]


def tokens_in_lanes(head_size: int, page_size: int) -> bool:
    """Tell whether XLA keeps a page as [K, Z] on a TPU, the transpose of the cache's own order."""
    return head_size % LANES != 0 and page_size % LANES == 0


def fold_queries(q_BQHK: Float[Array, "B Q H K"], kv_heads: int) -> Float[Array, "B G R K"]:
    """Lay the queries and query heads of each KV head out as rows of one matrix."""
    B, Q, H, K = q_BQHK.shape
    q_BQGJK = q_BQHK.reshape(B, Q, kv_heads, H // kv_heads, K)
    return q_BQGJK.transpose(0, 2, 1, 3, 4).reshape(B, kv_heads, Q * (H // kv_heads), K)


def unfold_queries(rows_BGRK: Float[Array, "B G R K"], queries: int, group: int) -> Float[Array, "B Q H K"]:
    """Undo `fold_queries` and drop padding rows."""
    B, G, _, K = rows_BGRK.shape
    rows_BGQJK = rows_BGRK[:, :, : queries * group].reshape(B, G, queries, group, K)
    return rows_BGQJK.transpose(0, 2, 1, 3, 4).reshape(B, queries, G * group, K)


def pad_to(array: Num[Array, "..."], multiple: int, *, axis: int) -> Num[Array, "..."]:
    """Append zeros until the axis is a multiple."""
    widths = [(0, -size % multiple if i == axis else 0) for i, size in enumerate(array.shape)]
    return jnp.pad(array, widths)


def seen_by_any(ancestors_BQC: UInt32[Array, "B Q C"], new_rows: int) -> Bool[Array, "B N"]:
    """Tell which new rows at least one query of the slot sees."""
    words_BC = lax.reduce_or(ancestors_BQC, axes=(1,))
    bits_BC32 = (words_BC[..., None] >> jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 32)) & 1
    return bits_BC32.reshape(words_BC.shape[0], -1)[:, :new_rows] > 0


def call_kernel(
    table: Int32[Array, " entries"],
    prefix_len_B: Int32[Array, " B"],
    q_BGRK: Float[Array, "B G R K"],
    words_BRC: Int32[Array, "B R C"],
    k_new_BGNK: Float[Array, "B G N K"],
    v_new_BGNK: Float[Array, "B G N K"],
    k_pages: Float[Array, "G P _ _"],
    v_pages: Float[Array, "G P _ _"],
    *,
    scale: float,
    token_axis: int,
    row_block: int,
    block_pages: int,
    out_dtype: Any,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[Float[Array, "B G R K"], Float32[Array, "B G 1 R"]]:
    """Run the kernel over slots, KV heads and row blocks.

    Rows and new rows come padded, values that no query sees as 0. Pages are [Z, K] for `token_axis` 0, [K, Z] for 1.
    """
    B, G, R, K = q_BGRK.shape
    N, C = k_new_BGNK.shape[2], words_BRC.shape[2]
    block = (2, block_pages, *k_pages.shape[2:]) if token_axis == 0 else (2, K, block_pages * k_pages.shape[3])

    rows = pl.BlockSpec((None, None, row_block, K), lambda b, g, r, *_: (b, g, r, 0))
    words = pl.BlockSpec((None, row_block, C), lambda b, g, r, *_: (b, r, 0))
    new = pl.BlockSpec((None, None, N, K), lambda b, g, r, *_: (b, g, 0, 0))
    cache = pl.BlockSpec(memory_space=pl.ANY)
    row_lse = pl.BlockSpec((None, None, 1, row_block), lambda b, g, r, *_: (b, g, 0, r))
    return pl.pallas_call(
        functools.partial(attend_rows, scale=scale, token_axis=token_axis),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, G, R // row_block),
            in_specs=[rows, words, new, new, cache, cache],
            out_specs=[rows, row_lse],
            scratch_shapes=[
                pltpu.VMEM(block, k_pages.dtype),
                pltpu.VMEM(block, v_pages.dtype),
                pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.VMEM((row_block, 1), jnp.float32),
                pltpu.VMEM((row_block, 1), jnp.float32),
                pltpu.VMEM((row_block, K), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((B, G, R, K), out_dtype),
            jax.ShapeDtypeStruct((B, G, 1, R), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="tree_attention",
    )(table, prefix_len_B, q_BGRK, words_BRC, k_new_BGNK, v_new_BGNK, k_pages, v_pages)


class Softmax(NamedTuple):
    """References to an online softmax under way; `acc / total` is the output so far."""

    top_R1: Any
    """Largest score so far."""
    total_R1: Any
    """Sum of exp(score - top)."""
    acc_RK: Any
    """Sum of exp(score - top) * value."""

    def clear(self) -> None:
        self.top_R1[...] = jnp.full(self.top_R1.shape, SCORE_FLOOR, jnp.float32)
        self.total_R1[...] = jnp.zeros(self.total_R1.shape, jnp.float32)
        self.acc_RK[...] = jnp.zeros(self.acc_RK.shape, jnp.float32)

    def add(self, s_RS: Float32[Array, "R S"], v: Float[Array, "..."], *, token_axis: int) -> None:
        """Take in a block of scores, -inf where masked, and its values, finite everywhere."""
        before_R1 = self.top_R1[...]
        top_R1 = jnp.maximum(before_R1, s_RS.max(axis=1, keepdims=True))
        p_RS = jnp.exp(s_RS - top_R1)
        shrink_R1 = jnp.exp(before_R1 - top_R1)
        self.top_R1[...] = top_R1
        self.total_R1[...] = self.total_R1[...] * shrink_R1 + p_RS.sum(axis=1, keepdims=True)
        self.acc_RK[...] = self.acc_RK[...] * shrink_R1 + dot(p_RS.astype(v.dtype), v, (1, token_axis))


def attend_rows(
    table: Any,
    prefix_len_B: Any,
    q_ref: Any,
    words_ref: Any,
    k_new_ref: Any,
    v_new_ref: Any,
    k_pages_ref: Any,
    v_pages_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    k_buffer: Any,
    v_buffer: Any,
    semaphores: Any,
    top_R1: Any,
    total_R1: Any,
    acc_RK: Any,
    *,
    scale: float,
    token_axis: int,
) -> None:
    """The kernel: one slot, KV head and block of rows."""
    slot, row_blocks = pl.program_id(0), pl.num_programs(2)
    prefix = Prefix(
        table=table,
        first_entry=slot * (table.shape[0] // prefix_len_B.shape[0]),
        length=prefix_len_B[slot],
        step=pl.program_id(1) * row_blocks + pl.program_id(2),
        steps=pl.num_programs(1) * row_blocks,
        row_blocks=row_blocks,
        pages=(k_pages_ref, v_pages_ref),
        buffers=(k_buffer, v_buffer),
        semaphores=semaphores,
        token_axis=token_axis,
    )

    @pl.when(prefix.step == 0)
    def _() -> None:
        prefix.start(0)

    q_RK = q_ref[...]
    softmax = Softmax(top_R1, total_R1, acc_RK)
    softmax.clear()
    s_RN = scale * dot(q_RK, k_new_ref[...], (1, 1))
    s_RN = jnp.where(expand_words(words_ref[...], s_RN.shape[1]), s_RN, -jnp.inf)
    softmax.add(s_RN, v_new_ref[...], token_axis=0)

    whole_blocks = lax.div(prefix.length, prefix.block_tokens)
    rest = lax.rem(prefix.length, prefix.block_tokens)

    def whole_block(block: Any, _: None) -> None:
        prefix.start(block + 1)
        prefix.wait(block, whole=True)
        k, v = prefix.read(block, q_RK.dtype)
        softmax.add(scale * dot(q_RK, k, (1, 1 - token_axis)), v, token_axis=token_axis)

    lax.fori_loop(0, whole_blocks, whole_block, None)

    @pl.when(rest > 0)
    def _() -> None:
        prefix.start(whole_blocks + 1)
        prefix.wait(whole_blocks, whole=False)
        k, v = prefix.read(whole_blocks, q_RK.dtype)
        s_RS = scale * dot(q_RK, k, (1, 1 - token_axis))
        s_RS = jnp.where(lax.broadcasted_iota(jnp.int32, s_RS.shape, 1) < rest, s_RS, -jnp.inf)
        # Behind the prefix lies whatever memory held: 0 * NaN is NaN.
        v = jnp.where(lax.broadcasted_iota(jnp.int32, v.shape, token_axis) < rest, v, jnp.zeros_like(v))
        softmax.add(s_RS, v, token_axis=token_axis)

    total = total_R1[...]
    out_ref[...] = (acc_RK[...] / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
    lse = jnp.where(total > 0, top_R1[...] + jnp.log(total), -jnp.inf)
    # Rows become lanes, so that the result is not padded from 1 to 128 of them.
    lse_ref[...] = jnp.broadcast_to(lse, (lse.shape[0], LANES)).T[:1]


def expand_words(words_RC: Int32[Array, "R C"], new_rows: int) -> Bool[Array, "R N"]:
    """Turn ancestor words into one flag per new row, without a mask in memory."""
    R, C = words_RC.shape
    row_RN = lax.broadcasted_iota(jnp.int32, (R, new_rows), 1)
    word_RN = jnp.broadcast_to(words_RC[:, :1], (R, new_rows))
    for c in range(1, C):
        word_RN = jnp.where(row_RN >= 32 * c, words_RC[:, c : c + 1], word_RN)
    return (word_RN & (1 << (row_RN & 31))) != 0


def dot(left: Float[Array, "..."], right: Float[Array, "..."], contract: tuple[int, int]) -> Float32[Array, "..."]:
    """Contract one dimension of each with float32 sums; HIGHEST keeps float32 from being rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)
