"""Attention of the decoder: projections around the one call of the tree attention kernel."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.tree_attention import tree_attention
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.layers import Linear, RopeAngles, rotate
from specinfer_jax.notation import LayerKV


class Attention(nn.Module):
    """Grouped-query attention of a pass's rows to the committed prefix and to their own ancestors."""

    config: ModelConfig
    """Heads, head size, biases."""
    implementation: str | None = None
    """Kernel to use; None picks."""

    @nn.compact
    def __call__(
        self,
        x_DT: Float[Array, "D T"],
        angles: RopeAngles | None,
        earlier: LayerKV | None,
        k_pages: Float[Array, "G P Z K"],
        v_pages: Float[Array, "G P Z K"],
        block_table: Int[Array, "B pages"],
        prefix_len_B: Int[Array, " B"],
        ancestors_BQC: UInt32[Array, "B Q C"],
    ) -> tuple[Float[Array, "D T"], LayerKV]:
        """Returns the block's output and the K/V of this pass's rows (not those of `earlier`)."""
        config = self.config
        B, Q, _ = ancestors_BQC.shape
        H, G, K = config.num_heads, config.num_kv_heads, config.head_size
        q_THK = Linear(H * K, config.qkv_bias, name="q")(x_DT).T.reshape(B * Q, H, K)
        k_TGK = Linear(G * K, config.qkv_bias, name="k")(x_DT).T.reshape(B * Q, G, K)
        v_TGK = Linear(G * K, config.qkv_bias, name="v")(x_DT).T.reshape(B * Q, G, K)
        q_BQHK = rotate(q_THK, angles).reshape(B, Q, H, K)
        new = LayerKV(rotate(k_TGK, angles).reshape(B, Q, G, K), v_TGK.reshape(B, Q, G, K))
        k_new, v_new = new
        if earlier is not None:
            k_new = jnp.concatenate([earlier.k_BNGK, k_new], axis=1)
            v_new = jnp.concatenate([earlier.v_BNGK, v_new], axis=1)
        out_BQHK, _ = tree_attention(
            q_BQHK, k_new, v_new, k_pages, v_pages, block_table, prefix_len_B, ancestors_BQC,
            scale=K**-0.5, implementation=self.implementation,
        )  # fmt: skip
        out_FT = out_BQHK.reshape(B * Q, H * K).T
        return Linear(config.width, config.out_bias, name="out")(out_FT), new
