"""Qwen2 and Qwen2.5: llama with biases on q, k and v, and rotary rows that GGUF leaves in place."""

import dataclasses
from collections.abc import Collection, Mapping

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import llama
from specinfer_jax.models.families.fields import read_bool, read_int
from specinfer_jax.models.families.weight_names import Family

WEIGHTS = {path: name._replace(gguf_interleaved=None) for path, name in llama.WEIGHTS.items()}


def config_from_hf(hf: Mapping[str, object]) -> ModelConfig:
    """Read config.json of a Qwen2 model."""
    config = llama.config_from_hf(hf)
    return dataclasses.replace(
        config, family="qwen2", qkv_bias=True, sliding_window=_sliding_window(hf, config.num_layers)
    )


def _sliding_window(hf: Mapping[str, object], num_layers: int) -> int | None:
    """The window, if any layer uses it: `layer_types` says so, else layers from `max_window_layers` on."""
    if not read_bool(hf, "use_sliding_window", False) or hf.get("sliding_window", 4_096) is None:
        return None
    layer_types = hf.get("layer_types")
    if isinstance(layer_types, list):
        windowed = "sliding_attention" in layer_types
    else:
        windowed = read_int(hf, "max_window_layers", 28, least=0) < num_layers
    return read_int(hf, "sliding_window", 4_096) if windowed else None


def config_from_gguf(metadata: Mapping[str, object], tensor_names: Collection[str]) -> ModelConfig:
    """Read GGUF metadata of a Qwen2 model."""
    return dataclasses.replace(llama.config_from_gguf(metadata, tensor_names), family="qwen2", qkv_bias=True)


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    gguf_architectures=("qwen2",),
    hf_prefixes=llama.FAMILY.hf_prefixes,
    weights=WEIGHTS,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
)
