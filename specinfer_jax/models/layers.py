"""Linear maps, norms, MLP and rotary embedding of the decoder, all feature-major: activations are `[D, T]`.

Feature-major activations under `kernel[out, in] @ x[in, T]` cost half of the usual row-major layout on CPU at 16 rows
(docs/log.md); on TPU and GPU the compiler chooses layouts itself. Norms and rotary angles are float32 inside.
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specinfer_jax.models.config import ModelConfig, RopeConfig
from specinfer_jax.parallel.sharding import constrain

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def matmul_precision(dtype: DTypeLike) -> jax.lax.Precision | None:
    """HIGHEST for float32 weights, so that no device rounds them to TF32 or bfloat16 behind the user's back."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nn.Module):
    """`kernel @ x + bias` with the kernel stored `[out, in]`, as checkpoints store it."""

    features: int
    """Rows of the kernel."""
    use_bias: bool = False
    """Adds a bias per output feature."""

    @nn.compact
    def __call__(self, x_DT: Float[Array, "D T"]) -> Float[Array, "F T"]:
        shape = (self.features, x_DT.shape[0])
        kernel = self.param("kernel", nn.initializers.lecun_normal(in_axis=1, out_axis=0), shape, x_DT.dtype)
        precision = matmul_precision(x_DT.dtype)
        if not self.use_bias:
            return jnp.matmul(kernel, x_DT, precision=precision)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), x_DT.dtype)
        y_FT = jnp.matmul(kernel, x_DT, precision=precision, preferred_element_type=jnp.float32)
        return (y_FT + bias.astype(jnp.float32)[:, None]).astype(x_DT.dtype)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the features of each token, computed in float32."""

    config: ModelConfig
    """Kind and epsilon."""

    @nn.compact
    def __call__(self, x_DT: Float[Array, "D T"]) -> Float[Array, "D T"]:
        width, dtype = x_DT.shape[0], x_DT.dtype
        scale = self.param("scale", nn.initializers.ones_init(), (width,), dtype)
        x32_DT = x_DT.astype(jnp.float32)
        if self.config.norm == "layer":
            bias = self.param("bias", nn.initializers.zeros_init(), (width,), dtype)
            x32_DT = x32_DT - jnp.mean(x32_DT, axis=0, keepdims=True)
        mean_square_1T = jnp.mean(jnp.square(x32_DT), axis=0, keepdims=True)
        x32_DT = x32_DT * jax.lax.rsqrt(mean_square_1T + self.config.norm_eps)
        if self.config.norm == "rms":  # HF casts before the scale; so do we, to agree in bfloat16
            return x32_DT.astype(dtype) * scale[:, None]
        return (x32_DT * scale.astype(jnp.float32)[:, None] + bias.astype(jnp.float32)[:, None]).astype(dtype)


class MLP(nn.Module):
    """Gated or plain two-layer perceptron."""

    config: ModelConfig
    """Widths, biases, activation."""

    @nn.compact
    def __call__(self, x_DT: Float[Array, "D T"]) -> Float[Array, "D T"]:
        config = self.config
        dtype = x_DT.dtype

        def activation(x_FT: Array) -> Array:
            return _ACTIVATIONS[config.activation](x_FT.astype(jnp.float32)).astype(dtype)

        up_FT = Linear(config.mlp_width, config.mlp_bias, name="up")(x_DT)
        if config.gated_mlp:
            gate_FT = Linear(config.mlp_width, config.mlp_bias, name="gate")(x_DT)
            hidden_FT = activation(gate_FT) * up_FT
        else:
            hidden_FT = activation(up_FT)
        hidden_FT = constrain(hidden_FT, "mlp", None)
        return Linear(config.width, config.mlp_bias, name="down")(hidden_FT)


def rope_inverse_frequencies(
    rope: RopeConfig, head_size: int, length: Int[Array, " T"] | None = None
) -> tuple[Float[Array, "#T half"], float]:
    """Inverse frequencies of the rotary embedding and the factor on cos and sin.

    Args:
      rope: base and scaling rule.
      head_size: K.
      length: only read by `dynamic`: the context length each token's angles are computed for. HF recomputes the base
        at every forward pass from the longest position seen, so a token's value is the larger of the prompt's length
        and its own position + 1; given per token, the result does not depend on how a context was cut into passes.

    Returns:
      float32 `[1, K/2]` (`[T, K/2]` for dynamic), and the attention factor (1 except for yarn).
    """
    exponent = (np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)).astype(np.float64)[None]
    # A power in float64 rounds correctly; numpy's own float32 power misses the last bit of every sixth frequency, which
    # at position 20,000 is 1e-3 of the angle.
    wavelength = (rope.theta**exponent).astype(np.float32)
    plain = 1.0 / wavelength
    match rope.rope_type:
        case "default":
            return jnp.asarray(plain), 1.0
        case "linear":
            return jnp.asarray(plain / np.float32(rope.factor)), 1.0
        case "llama3":
            return jnp.asarray(_llama3_frequencies(rope, plain)), 1.0
        case "yarn":
            return jnp.asarray(_yarn_frequencies(rope, wavelength, head_size)), _yarn_attention_factor(rope)
        case "dynamic":
            if length is None:
                raise ValueError("dynamic rope scaling needs the context length of every token")
            return _dynamic_frequencies(rope, length, head_size, exponent), 1.0


def _dynamic_frequencies(
    rope: RopeConfig, length: Int[Array, " T"], head_size: int, exponent: np.ndarray
) -> Float[Array, "T half"]:
    """Powers of a base that grows with the context; in float64 for the last bit, rounded wherever HF's float32 is."""

    def rounded(x: Array) -> Array:
        return x.astype(jnp.float32).astype(jnp.float64)

    with jax.enable_x64(True):
        longest_T1 = jnp.maximum(length, rope.original_max_position).astype(jnp.float64)[:, None]
        ratio_T1 = rounded(rounded(rope.factor * longest_T1) / rope.original_max_position)
        stretch_T1 = rounded(rounded(ratio_T1 - (rope.factor - 1.0)) ** (head_size / (head_size - 2)))
        base_T1 = rounded(rope.theta * stretch_T1)
        return (1.0 / rounded(base_T1 ** jnp.asarray(exponent))).astype(jnp.float32)


def _llama3_frequencies(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths divided by the factor, short ones kept, a linear blend between."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = np.where(wavelength > rope.original_max_position / low, plain / rope.factor, plain)
    medium = (wavelength <= rope.original_max_position / low) & (wavelength >= rope.original_max_position / high)
    return np.where(medium, blended, scaled).astype(np.float32)


def _yarn_frequencies(rope: RopeConfig, wavelength: np.ndarray, head_size: int) -> np.ndarray:
    """Interpolated where a dimension turns seldom, extrapolated where often, a ramp between (YaRN, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_size * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    kept = 1 - np.clip((np.arange(head_size // 2, dtype=np.float32) - low) / (high - low), 0, 1)[None]
    return (1 / (rope.factor * wavelength) * (1 - kept) + 1 / wavelength * kept).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class RopeAngles(NamedTuple):
    """Cosines and sines of every token, computed once a pass and used by every layer."""

    cos_T1h: Float[Array, "T 1 half"]
    """Cosine of position times inverse frequency, float32."""
    sin_T1h: Float[Array, "T 1 half"]
    """Sine of the same."""


def rope_angles(config: ModelConfig, position_T: Int[Array, " T"], length_T: Int[Array, " T"]) -> RopeAngles | None:
    """Angles of every token for one pass; None for a model with learned positions."""
    if config.rope is None:
        return None
    frequency, attention_factor = rope_inverse_frequencies(config.rope, config.head_size, length_T)
    angle_Th = position_T.astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle_Th) * attention_factor, jnp.sin(angle_Th) * attention_factor
    return RopeAngles(cos[:, None, :], sin[:, None, :])


def rotate(x_THK: Float[Array, "T H K"], angles: RopeAngles | None) -> Float[Array, "T H K"]:
    """Rotary embedding in HF's half-split layout, computed in float32."""
    if angles is None:
        return x_THK
    first, second = jnp.split(x_THK.astype(jnp.float32), 2, axis=-1)
    cos, sin = angles.cos_T1h, angles.sin_T1h
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_THK.dtype)
