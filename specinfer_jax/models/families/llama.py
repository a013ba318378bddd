"""Llama and everything with the same tensors: Mistral, SmolLM, TinyLlama."""

from collections.abc import Collection, Mapping

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families.fields import (
    read_activation,
    read_bool,
    read_float,
    read_id,
    read_ids,
    read_int,
)
from specinfer_jax.models.families.rope import rope_from_gguf, rope_from_hf
from specinfer_jax.models.families.weight_names import Family, WeightName

WEIGHTS = {
    "embed/embedding": WeightName("model.embed_tokens.weight", "token_embd.weight"),
    "layers_{i}/attention_norm/scale": WeightName(
        "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"
    ),
    "layers_{i}/attention/q/kernel": WeightName(
        "model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight", "query"
    ),
    "layers_{i}/attention/q/bias": WeightName("model.layers.{i}.self_attn.q_proj.bias", "blk.{i}.attn_q.bias", "query"),
    "layers_{i}/attention/k/kernel": WeightName(
        "model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight", "key"
    ),
    "layers_{i}/attention/k/bias": WeightName("model.layers.{i}.self_attn.k_proj.bias", "blk.{i}.attn_k.bias", "key"),
    "layers_{i}/attention/v/kernel": WeightName("model.layers.{i}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight"),
    "layers_{i}/attention/v/bias": WeightName("model.layers.{i}.self_attn.v_proj.bias", "blk.{i}.attn_v.bias"),
    "layers_{i}/attention/out/kernel": WeightName(
        "model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight"
    ),
    "layers_{i}/attention/out/bias": WeightName("model.layers.{i}.self_attn.o_proj.bias", "blk.{i}.attn_output.bias"),
    "layers_{i}/mlp_norm/scale": WeightName(
        "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"
    ),
    "layers_{i}/mlp/gate/kernel": WeightName("model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight"),
    "layers_{i}/mlp/gate/bias": WeightName("model.layers.{i}.mlp.gate_proj.bias", "blk.{i}.ffn_gate.bias"),
    "layers_{i}/mlp/up/kernel": WeightName("model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight"),
    "layers_{i}/mlp/up/bias": WeightName("model.layers.{i}.mlp.up_proj.bias", "blk.{i}.ffn_up.bias"),
    "layers_{i}/mlp/down/kernel": WeightName("model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight"),
    "layers_{i}/mlp/down/bias": WeightName("model.layers.{i}.mlp.down_proj.bias", "blk.{i}.ffn_down.bias"),
    "head/norm/scale": WeightName("model.norm.weight", "output_norm.weight"),
    "head/kernel": WeightName("lm_head.weight", "output.weight"),
}

# What transformers' config classes assume where config.json is silent.
_MAX_POSITION = {"llama": 2_048, "mistral": 131_072, "qwen2": 32_768}
_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32}
_BOS, _EOS = {"llama": 1, "mistral": 1}, {"llama": 2, "mistral": 2}


def config_from_hf(hf: Mapping[str, object]) -> ModelConfig:
    """Read config.json of a llama-like model (`model_type` llama, mistral; the base of qwen2)."""
    kind = str(hf.get("model_type") or "llama")
    width, heads = read_int(hf, "hidden_size"), read_int(hf, "num_attention_heads")
    kv_heads = read_int(hf, "num_key_value_heads", heads if "num_key_value_heads" in hf else _KV_HEADS[kind] or heads)
    rope, max_position = rope_from_hf(hf, max_position=read_int(hf, "max_position_embeddings", _MAX_POSITION[kind]))
    attention_bias = kind == "llama" and read_bool(hf, "attention_bias", False)
    window = kind == "mistral" and hf.get("sliding_window", 4_096) is not None
    return ModelConfig(
        family="llama",
        vocab_size=read_int(hf, "vocab_size"),
        width=width,
        num_layers=read_int(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=read_int(hf, "head_dim", head_size(width, heads)),
        mlp_width=read_int(hf, "intermediate_size"),
        max_position=max_position,
        tied_head=read_bool(hf, "tie_word_embeddings", False),
        norm_eps=read_float(hf, "rms_norm_eps", 1e-6),
        activation=read_activation(hf, "hidden_act", "silu"),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=kind == "llama" and read_bool(hf, "mlp_bias", False),
        rope=rope,
        sliding_window=read_int(hf, "sliding_window", 4_096) if window else None,
        bos_token_id=read_id(hf, "bos_token_id", _BOS.get(kind)),
        eos_token_ids=read_ids(hf, "eos_token_id", _EOS.get(kind)),
    )


def config_from_gguf(metadata: Mapping[str, object], tensor_names: Collection[str]) -> ModelConfig:
    """Read GGUF metadata of a llama-like model; the names of its tensors tell biases and a tied head.

    Raises:
      ConfigError: a field is missing, or the file asks for experts, per-layer heads or a partial rotary embedding.
    """
    architecture = str(metadata["general.architecture"])

    def field(key: str, default: int | None = None) -> int:
        return read_int(metadata, f"{architecture}.{key}", default)

    if metadata.get(f"{architecture}.expert_count"):
        raise ConfigError("mixture-of-experts models are not supported")
    width, heads, context = field("embedding_length"), field("attention.head_count"), field("context_length")
    size = field("attention.key_length", head_size(width, heads))
    if field("attention.value_length", size) != size or field("rope.dimension_count", size) != size:
        raise ConfigError("heads whose values or rotary part have another size than their keys are not supported")
    window = metadata.get(f"{architecture}.attention.sliding_window")
    return ModelConfig(
        family="llama",
        vocab_size=field("vocab_size", _vocabulary_length(metadata)),
        width=width,
        num_layers=field("block_count"),
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_size=size,
        mlp_width=field("feed_forward_length"),
        max_position=context,
        tied_head="output.weight" not in tensor_names,
        norm_eps=read_float(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        out_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_up.bias" in tensor_names,
        rope=rope_from_gguf(metadata, architecture, context_length=context),
        sliding_window=field("attention.sliding_window") if window else None,
        bos_token_id=read_id(metadata, "tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                token
                for key in ("eos_token_id", "eot_token_id", "eom_token_id")
                for token in read_ids(metadata, f"tokenizer.ggml.{key}")
            )
        ),
    )


def head_size(width: int, heads: int) -> int:
    """The head size of a model that does not state it."""
    if width % heads:
        raise ConfigError(f"a width of {width} does not divide into {heads} heads")
    return width // heads


def _vocabulary_length(metadata: Mapping[str, object]) -> int | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else None


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral"),
    architectures=("LlamaForCausalLM", "LlamaModel", "MistralForCausalLM", "MistralModel", "LLaMAForCausalLM"),
    gguf_architectures=("llama",),
    hf_prefixes=("model.", ""),
    weights=WEIGHTS,
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
)
