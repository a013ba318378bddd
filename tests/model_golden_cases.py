"""The models and inputs that the decoder is compared with transformers on; read by the tests and by the golden maker.

Free of jax and torch: both sides build the same folder from `checkpoint_cases` and feed the same ids.
"""

from typing import Any, NamedTuple

import numpy as np
from checkpoint_cases import llama_config, mistral_config, opt_350m_config, opt_config, qwen2_config


class GoldenCase(NamedTuple):
    """One forward pass without a cache."""

    config: dict[str, Any]
    """config.json."""
    tokens: list[int]
    """Ids of the pass."""
    positions: list[int]
    """Their positions; every row sees the rows before it, whatever the positions."""
    seed: int = 0
    """Of the weights."""


TOKENS = [1, 17, 42, 5, 63, 9, 30, 2, 17, 55]
LAST_ROWS = [0, 1, 2, 17, 18, 19, 36, 37, 38, 39]
LONG_POSITIONS = [0, 1, 2, 100, 101, 102, 5000, 5001, 20000, 20001]

# cases B034, B064, B065
FAMILIES: dict[str, GoldenCase] = {
    name: GoldenCase(config, TOKENS, list(range(len(TOKENS))))
    for name, config in {
        "llama": llama_config(),
        "llama_tied_wide_heads": llama_config(tie_word_embeddings=True, head_dim=16),
        "llama_biases": llama_config(attention_bias=True, mlp_bias=True),
        "llama_one_kv_head": llama_config(num_key_value_heads=1, rms_norm_eps=1e-2),
        "mistral": mistral_config(),
        "mistral_wide_heads": mistral_config(head_dim=16, tie_word_embeddings=True),
        "qwen2": qwen2_config(),
        "qwen2_tied": qwen2_config(tie_word_embeddings=True),
    }.items()
} | {
    name: GoldenCase(config, TOKENS, LAST_ROWS)
    for name, config in {
        "opt": opt_config(),
        "opt_350m": opt_350m_config(),
        "opt_350m_pre_norm": opt_config(word_embed_proj_dim=16),
        "opt_no_final_norm": opt_config(_remove_final_layer_norm=True, enable_bias=False),
        "opt_gelu": opt_config(activation_function="gelu"),
    }.items()
}

_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LONG_LLAMA3 = {**_LLAMA3, "original_max_position_embeddings": 8192}
_ROPE_SCALING: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 4.0},
    "linear_odd": {"rope_type": "linear", "factor": 3.7},
    "dynamic": {"type": "dynamic", "factor": 4.0},
    "dynamic_odd": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": _LLAMA3,
    "llama3_odd": {**_LLAMA3, "factor": 5.5, "high_freq_factor": 6.0},
    "yarn": _YARN,
    "yarn_mscale": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
    "yarn_mscale_alone": {**_YARN, "mscale": 0.707},
    "yarn_attention_factor": {**_YARN, "attention_factor": 0.8},
    "yarn_no_truncate": {**_YARN, "truncate": False},
    "yarn_odd": {**_YARN, "beta_fast": 8.0, "beta_slow": 2.0, "factor": 3.3},
}

# case B033; heads of 16 so that every rule has dimensions it treats differently
ROPE: dict[str, GoldenCase] = {
    name: GoldenCase(llama_config(head_dim=16, rope_scaling=scaling), TOKENS, LONG_POSITIONS)
    for name, scaling in _ROPE_SCALING.items()
} | {
    "default_theta": GoldenCase(llama_config(head_dim=64, rope_theta=100_000.0), TOKENS, LONG_POSITIONS),
    "llama3_theta": GoldenCase(
        llama_config(head_dim=64, rope_theta=500_000.0, rope_scaling=_LONG_LLAMA3), TOKENS, LONG_POSITIONS
    ),
}


class GenerateCase(NamedTuple):
    """Greedy decoding of one prompt."""

    config: dict[str, Any]
    """config.json."""
    prompt: list[int]
    """Ids to continue."""
    new_tokens: int = 30
    """How many follow; nothing stops earlier."""
    seed: int = 0
    """Of the weights."""


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Any ids of the tiny vocabulary."""
    return np.random.RandomState(seed).randint(3, 64, length).tolist()


_DYNAMIC = llama_config(
    head_dim=16, max_position_embeddings=32, rope_theta=100.0, rope_scaling={"rope_type": "dynamic", "factor": 4.0}
)

# Case B033: the base moves with the context. Case B037: prompts of 1, 5 and 9 tokens.
GENERATE: dict[str, GenerateCase] = {
    "dynamic_long_prompt": GenerateCase(_DYNAMIC, prompt_ids(45)),
    "dynamic_crossing": GenerateCase(_DYNAMIC, prompt_ids(24)),
    **{f"llama_{n}": GenerateCase(llama_config(), prompt_ids(n, seed=n)) for n in (1, 5, 9)},
    **{f"opt_{n}": GenerateCase(opt_config(), prompt_ids(n, seed=n)) for n in (1, 5, 9)},
    **{f"opt_350m_{n}": GenerateCase(opt_350m_config(), prompt_ids(n, seed=n)) for n in (1, 5, 9)},
}

NEAR_4000 = [0, 1, 2, 3, 3996, 3997, 3998, 3999, 4000, 4001]
_BIGGER = {"hidden_size": 64, "num_hidden_layers": 4}

# case B096
BFLOAT16: dict[str, GoldenCase] = {
    "llama": GoldenCase(llama_config(**_BIGGER, head_dim=64, intermediate_size=96), TOKENS, NEAR_4000),
    "qwen2": GoldenCase(qwen2_config(**_BIGGER, head_dim=64, intermediate_size=96), TOKENS, NEAR_4000),
    "opt": GoldenCase(opt_config(**_BIGGER, word_embed_proj_dim=64, max_position_embeddings=4100), TOKENS, NEAR_4000),
    "opt_350m": GoldenCase(opt_350m_config(**_BIGGER, max_position_embeddings=4100), TOKENS, NEAR_4000),
}
