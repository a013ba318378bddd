"""Tree attention as plainly as it can be written: the oracle that every implementation is compared with.

Which keys a query sees, for a slot with three committed tokens and five new rows, row 0 the root:

    row       parent    prefix    tree         word
                        0 1 2     0 1 2 3 4
    0 root    N         x x x     x . . . .    0b00001
    1         0         x x x     x x . . .    0b00011
    2         0         x x x     x . x . .    0b00101
    3         1         x x x     x x . x .    0b01011
    4 padding N         x x x     . . . . x    0b10000

Every row sees the whole prefix of its slot, itself and its ancestors; siblings never see each other. The word of row n
has bit k set where the tree part has an x in column k.

Letters as in `api.tree_attention`; S here is the prefix capacity of the block table in tokens plus the N new rows.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32


def tree_attention_reference(
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
) -> tuple[Float[Array, "B Q H K"], Float32[Array, "B Q H"]]:
    """Gather all keys and values, mask, softmax in float32; arguments and results as in `api.tree_attention`."""
    B, Q, H, _ = q_BQHK.shape
    N = k_new_BNGK.shape[1]
    capacity = block_table.shape[1] * k_pages_GPZK.shape[2]

    k_BSHK = all_rows(k_pages_GPZK, k_new_BNGK, block_table, heads=H)
    v_BSHK = all_rows(v_pages_GPZK, v_new_BNGK, block_table, heads=H)

    in_prefix_BS = jnp.arange(capacity)[None] < prefix_len_B[:, None]
    n = jnp.arange(N)
    in_tree_BQN = ((ancestors_BQC[:, :, n // 32] >> (n % 32).astype(jnp.uint32)[None, None]) & 1) == 1
    seen_BQS = jnp.concatenate(
        [jnp.broadcast_to(in_prefix_BS[:, None], (B, Q, capacity)), in_tree_BQN],
        axis=2,
    )

    # Rows that no query sees may hold anything, NaN too, and 0 * NaN is NaN.
    used_BS11 = seen_BQS.any(axis=1)[:, :, None, None]
    k_BSHK = jnp.where(used_BS11, k_BSHK, 0.0)
    v_BSHK = jnp.where(used_BS11, v_BSHK, 0.0)

    q32_BQHK = q_BQHK.astype(jnp.float32)
    s_BQHS = scale * jnp.einsum("BQHK,BSHK->BQHS", q32_BQHK, k_BSHK, precision=lax.Precision.HIGHEST)
    seen_BQHS = jnp.broadcast_to(seen_BQS[:, :, None], s_BQHS.shape)
    lse_BQH = jax.nn.logsumexp(s_BQHS, axis=-1, where=seen_BQHS)

    finite_lse_BQH = jnp.where(jnp.isneginf(lse_BQH), 0.0, lse_BQH)
    p_BQHS = jnp.where(seen_BQHS, jnp.exp(s_BQHS - finite_lse_BQH[..., None]), 0.0)
    out_BQHK = jnp.einsum("BQHS,BSHK->BQHK", p_BQHS, v_BSHK, precision=lax.Precision.HIGHEST)
    return out_BQHK.astype(q_BQHK.dtype), lse_BQH


def all_rows(
    pages_GPZK: Float[Array, "G P Z K"],
    new_BNGK: Float[Array, "B N G K"],
    block_table: Int32[Array, "B pages"],
    *,
    heads: int,
) -> Float32[Array, "B S H K"]:
    """Lay out every page of the table and then the new rows, one copy for each query head."""
    B, table_pages = block_table.shape
    G, P, Z, K = pages_GPZK.shape
    paged_GBSK = pages_GPZK[:, jnp.minimum(block_table, P - 1)].reshape(G, B, table_pages * Z, K)
    paged_BSGK = paged_GBSK.transpose(1, 2, 0, 3)
    rows_BSGK = jnp.concatenate([paged_BSGK.astype(jnp.float32), new_BNGK.astype(jnp.float32)], axis=1)
    return jnp.repeat(rows_BSGK, heads // G, axis=2)
