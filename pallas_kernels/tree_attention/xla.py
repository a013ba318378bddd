"""Tree attention in plain XLA: the production path wherever no kernel runs (CPU, older GPUs).

The prefix is read in blocks of whole pages by a loop with a dynamic trip count, so the cost follows the longest prefix
among the slots, never the capacity of the block table, and no page array is ever copied as a whole. All Q queries and
the H / G query heads of a group share one read of K and V. Softmax and sums are float32, whatever the cache's dtype.

Letters beside the project's key: R = Q * H / G, the query rows that share a key/value head; S = positions of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

SCORE_FLOOR = -1e30
"""The running maximum's start. From -inf, a row without keys would give exp(-inf + inf) = NaN; from here it gives 0."""

CPU_BLOCK_TOKENS = 128
OTHER_BLOCK_TOKENS = 512


class Softmax(NamedTuple):
    """An online softmax under way; `acc / total` is the output so far."""

    top_BGR: Float32[Array, "B G R"]
    """Largest score so far."""
    total_BGR: Float32[Array, "B G R"]
    """Sum of exp(score - top)."""
    acc_BGRK: Float32[Array, "B G R K"]
    """Sum of exp(score - top) * value."""


def tree_attention_xla(
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
    block_tokens: int | None = None,
) -> tuple[Float[Array, "B Q H K"], Float32[Array, "B Q H"]]:
    """Attend to the ancestors, then block by block to the prefix; arguments and results as in `api.tree_attention`.

    `block_tokens`: positions of the prefix that one trip of the loop reads, rounded down to whole pages, at least one.
    """
    B, Q, H, K = q_BQHK.shape
    G, _, Z, _ = k_pages_GPZK.shape
    group = H // G
    if block_tokens is None:
        # CPU: small blocks waste little and stay in its cache. On a GPU each trip of a loop waits for the host.
        block_tokens = CPU_BLOCK_TOKENS if jax.default_backend() == "cpu" else OTHER_BLOCK_TOKENS

    q_BQGJK = (q_BQHK.astype(jnp.float32) * scale).reshape(B, Q, G, group, K)
    q_BGRK = q_BQGJK.transpose(0, 2, 1, 3, 4).reshape(B, G, Q * group, K)

    state = attend_tree(q_BGRK, k_new_BNGK, v_new_BNGK, expand_words(ancestors_BQC, k_new_BNGK.shape[1]))
    if block_table.shape[1]:  # without a cache (training) there is no loop, and so a derivative in reverse
        pages = min(max(1, block_tokens // Z), block_table.shape[1])
        state = attend_prefix(state, q_BGRK, k_pages_GPZK, v_pages_GPZK, block_table, prefix_len_B, pages=pages)

    out_BGRK = state.acc_BGRK / jnp.where(state.total_BGR > 0, state.total_BGR, 1.0)[..., None]
    lse_BGR = state.top_BGR + jnp.log(state.total_BGR)
    out_BQHK = out_BGRK.reshape(B, G, Q, group, K).transpose(0, 2, 1, 3, 4).reshape(B, Q, H, K)
    lse_BQH = lse_BGR.reshape(B, G, Q, group).transpose(0, 2, 1, 3).reshape(B, Q, H)
    return out_BQHK.astype(q_BQHK.dtype), lse_BQH


def expand_words(ancestors_BQC: UInt32[Array, "B Q C"], rows: int) -> Bool[Array, "B Q N"]:
    """Turn ancestor words into one flag per tree row."""
    B, Q, C = ancestors_BQC.shape
    shifts = jnp.arange(32, dtype=jnp.uint32).reshape(1, 1, 1, 32)
    bits = (ancestors_BQC[..., None] >> shifts) & 1
    return bits.reshape(B, Q, C * 32)[..., :rows] > 0


def attend_tree(
    q_BGRK: Float32[Array, "B G R K"],
    k_new_BNGK: Float[Array, "B N G K"],
    v_new_BNGK: Float[Array, "B N G K"],
    mask_BQN: Bool[Array, "B Q N"],
) -> Softmax:
    """Start the softmax with the new rows."""
    B, G, R, _ = q_BGRK.shape
    _, Q, N = mask_BQN.shape
    s_BGRN = dot("BGRK,BNGK->BGRN", q_BGRK, k_new_BNGK)
    mask_BGRN = jnp.broadcast_to(mask_BQN[:, None, :, None], (B, G, Q, R // Q, N)).reshape(B, G, R, N)
    s_BGRN = jnp.where(mask_BGRN, s_BGRN, -jnp.inf)
    top_BGR = jnp.maximum(s_BGRN.max(-1), SCORE_FLOOR)
    p_BGRN = jnp.exp(s_BGRN - top_BGR[..., None])
    # A row that no query sees may be unwritten memory, and 0 * NaN is NaN.
    v_new_BNGK = jnp.where(mask_BQN.any(1)[..., None, None], v_new_BNGK, 0)
    return Softmax(top_BGR, p_BGRN.sum(-1), dot("BGRN,BNGK->BGRK", p_BGRN, v_new_BNGK))


def attend_prefix(
    state: Softmax,
    q_BGRK: Float32[Array, "B G R K"],
    k_pages_GPZK: Float[Array, "G P Z K"],
    v_pages_GPZK: Float[Array, "G P Z K"],
    block_table: Int32[Array, "B pages"],
    prefix_len_B: Int32[Array, " B"],
    *,
    pages: int,
) -> Softmax:
    """Continue the softmax over the prefix, `pages` pages of every slot a trip, until the longest prefix ends."""
    B, table_pages = block_table.shape
    G, P, Z, K = k_pages_GPZK.shape
    S = pages * Z
    # Whole blocks only: a slice that hangs over the end of the table would be moved back and read pages twice.
    block_table = jnp.pad(block_table, ((0, 0), (0, -table_pages % pages)), constant_values=P)

    def read(pages_GPZK: Float[Array, "G P Z K"], ids: Int32[Array, "B block"]) -> Float[Array, "G B S K"]:
        return jnp.take(pages_GPZK, ids, axis=1, mode="clip").reshape(G, B, S, K)

    def block(i: Int32[Array, ""], state: Softmax) -> Softmax:
        ids = lax.dynamic_slice(block_table, (0, i * pages), (B, pages))
        seen_BS = i * S + jnp.arange(S, dtype=jnp.int32)[None] < prefix_len_B[:, None]
        s_BGRS = dot("BGRK,GBSK->BGRS", q_BGRK, read(k_pages_GPZK, ids))
        s_BGRS = jnp.where(seen_BS[:, None, None], s_BGRS, -jnp.inf)
        v_GBSK = jnp.where(seen_BS[None, :, :, None], read(v_pages_GPZK, ids), 0)
        top_BGR = jnp.maximum(state.top_BGR, s_BGRS.max(-1))
        p_BGRS = jnp.exp(s_BGRS - top_BGR[..., None])
        shrink_BGR = jnp.exp(state.top_BGR - top_BGR)
        return Softmax(
            top_BGR,
            state.total_BGR * shrink_BGR + p_BGRS.sum(-1),
            state.acc_BGRK * shrink_BGR[..., None] + dot("BGRS,GBSK->BGRK", p_BGRS, v_GBSK),
        )

    trips = jnp.minimum((prefix_len_B.max() + S - 1) // S, block_table.shape[1] // pages)
    return lax.fori_loop(0, trips, block, state)


def dot(dimensions: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Contract in true float32: HIGHEST keeps GPUs from TF32 and TPUs from bfloat16; on CPU it changes nothing."""
    return jnp.einsum(dimensions, left.astype(jnp.float32), right.astype(jnp.float32), precision=lax.Precision.HIGHEST)
