"""Shapes of the paper's LLMs (SpecInfer, section 6), for studies that need no weights."""

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import llama, opt


def _llama(width: int, mlp_width: int, layers: int, heads: int, vocab_size: int = 32_000) -> ModelConfig:
    """A first-generation LLaMA, as its config.json would say it."""
    return llama.config_from_hf(
        {
            "model_type": "llama", "vocab_size": vocab_size, "hidden_size": width, "intermediate_size": mlp_width,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
            "max_position_embeddings": 8_192, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        }
    )  # fmt: skip


def _opt(width: int, mlp_width: int, layers: int, heads: int) -> ModelConfig:
    """An OPT that normalises first, as its config.json would say it."""
    return opt.config_from_hf(
        {
            "model_type": "opt", "vocab_size": 50_272, "hidden_size": width, "word_embed_proj_dim": width,
            "ffn_dim": mlp_width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "max_position_embeddings": 2_048, "activation_function": "relu", "do_layer_norm_before": True,
            "tie_word_embeddings": True,
        }
    )  # fmt: skip


PAPER_MODELS: dict[str, ModelConfig] = {
    "tiny": _llama(32, 64, 1, 2, vocab_size=64),
    "llama-7b": _llama(4_096, 11_008, 32, 32),
    "opt-13b": _opt(5_120, 20_480, 40, 40),
    "opt-30b": _opt(7_168, 28_672, 48, 56),
    "llama-65b": _llama(8_192, 22_016, 80, 64),
    "llama-68m": _llama(768, 3_072, 2, 12),
    "opt-125m": _opt(768, 3_072, 12, 12),
}  # fmt: skip
"""By name; "tiny" is for trying a study out. LLaMA's positions reach 8,192 here: random weights know no difference."""
