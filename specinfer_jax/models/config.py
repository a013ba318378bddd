"""What a decoder computes, as one frozen dataclass: the only thing the model code reads."""

import dataclasses
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding and its scaling, with the field names of HF's `rope_scaling`."""

    theta: float = 10_000.0
    """Base of the inverse frequencies (`rope_theta`)."""
    rope_type: RopeType = "default"
    """Scaling rule."""
    factor: float = 1.0
    """Context extension factor (linear, dynamic, llama3, yarn)."""
    original_max_position: int = 0
    """Context length before scaling (`original_max_position_embeddings`, else `max_position_embeddings`)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original / this are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original / this are left alone."""
    beta_fast: float = 32.0
    """yarn: rotations at which extrapolation ends."""
    beta_slow: float = 1.0
    """yarn: rotations at which interpolation begins."""
    attention_factor: float | None = None
    """yarn: multiplier of cos and sin; None computes it from factor, mscale and mscale_all_dim."""
    mscale: float | None = None
    """yarn (DeepSeek's extension)."""
    mscale_all_dim: float | None = None
    """yarn (DeepSeek's extension)."""
    truncate: bool = True
    """yarn: round the correction range to whole dimensions."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder-only transformer; families fill it from HF's config.json or from GGUF metadata."""

    family: Literal["llama", "qwen2", "opt"]
    """Which weight-name table the checkpoint follows."""
    vocab_size: int
    """V, rows of the embedding (may be padded beyond the tokenizer)."""
    width: int
    """D."""
    num_layers: int
    """L."""
    num_heads: int
    """H."""
    num_kv_heads: int
    """G."""
    head_size: int
    """K."""
    mlp_width: int
    """F."""
    max_position: int
    """Longest context the model was made for, in tokens."""
    tied_head: bool
    """The vocabulary head is the embedding matrix; whatever the file holds under the head's name is not used."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm with bias."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    norm_first: bool = True
    """Normalise before each block (False: after it, OPT-350m)."""
    final_norm: bool = True
    """A norm before the vocabulary head."""
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"] = "silu"
    """MLP non-linearity."""
    gated_mlp: bool = True
    """`down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`."""
    qkv_bias: bool = False
    """Biases on q, k and v."""
    out_bias: bool = False
    """Bias on the attention's output projection."""
    mlp_bias: bool = False
    """Biases inside the MLP."""
    rope: RopeConfig | None = RopeConfig()
    """Rotary embedding; None means learned positions."""
    learned_position_offset: int = 0
    """First row of the learned position table in use (OPT: 2)."""
    embed_width: int | None = None
    """E, the embedding's own width if projections stand between it and the model (OPT-350m); None means D."""
    sliding_window: int | None = None
    """Longest context that full attention equals the model's own windowed attention on; longer is refused."""
    output_vocab_size: int | None = None
    """Rows of a reduced head, whose ids lie in `params["output_ids"]` (an SSM's only); None: one per id."""
    num_padding_ids: int = 0
    """Last ids of `vocab_size` that only make it divide among devices; they are never likely."""
    bos_token_id: int | None = None
    """Beginning of sequence."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end a sequence."""
