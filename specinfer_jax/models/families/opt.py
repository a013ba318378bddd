"""OPT: learned positions from row 2 on, LayerNorm, biases, and OPT-350m's projections and post-norm."""

from collections.abc import Mapping

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families.fields import read_activation, read_bool, read_id, read_ids, read_int
from specinfer_jax.models.families.llama import head_size
from specinfer_jax.models.families.weight_names import Family, WeightName

WEIGHTS = {
    "embed/embedding": WeightName("model.decoder.embed_tokens.weight"),
    "embed/position": WeightName("model.decoder.embed_positions.weight"),
    "embed/project_in/kernel": WeightName("model.decoder.project_in.weight"),
    "layers_{i}/attention_norm/scale": WeightName("model.decoder.layers.{i}.self_attn_layer_norm.weight"),
    "layers_{i}/attention_norm/bias": WeightName("model.decoder.layers.{i}.self_attn_layer_norm.bias"),
    "layers_{i}/attention/q/kernel": WeightName("model.decoder.layers.{i}.self_attn.q_proj.weight"),
    "layers_{i}/attention/q/bias": WeightName("model.decoder.layers.{i}.self_attn.q_proj.bias"),
    "layers_{i}/attention/k/kernel": WeightName("model.decoder.layers.{i}.self_attn.k_proj.weight"),
    "layers_{i}/attention/k/bias": WeightName("model.decoder.layers.{i}.self_attn.k_proj.bias"),
    "layers_{i}/attention/v/kernel": WeightName("model.decoder.layers.{i}.self_attn.v_proj.weight"),
    "layers_{i}/attention/v/bias": WeightName("model.decoder.layers.{i}.self_attn.v_proj.bias"),
    "layers_{i}/attention/out/kernel": WeightName("model.decoder.layers.{i}.self_attn.out_proj.weight"),
    "layers_{i}/attention/out/bias": WeightName("model.decoder.layers.{i}.self_attn.out_proj.bias"),
    "layers_{i}/mlp_norm/scale": WeightName("model.decoder.layers.{i}.final_layer_norm.weight"),
    "layers_{i}/mlp_norm/bias": WeightName("model.decoder.layers.{i}.final_layer_norm.bias"),
    "layers_{i}/mlp/up/kernel": WeightName("model.decoder.layers.{i}.fc1.weight"),
    "layers_{i}/mlp/up/bias": WeightName("model.decoder.layers.{i}.fc1.bias"),
    "layers_{i}/mlp/down/kernel": WeightName("model.decoder.layers.{i}.fc2.weight"),
    "layers_{i}/mlp/down/bias": WeightName("model.decoder.layers.{i}.fc2.bias"),
    "head/norm/scale": WeightName("model.decoder.final_layer_norm.weight"),
    "head/norm/bias": WeightName("model.decoder.final_layer_norm.bias"),
    "head/project_out/kernel": WeightName("model.decoder.project_out.weight"),
    "head/kernel": WeightName("lm_head.weight"),
}


def config_from_hf(hf: Mapping[str, object]) -> ModelConfig:
    """Read config.json of an OPT model.

    Raises:
      ConfigError: a field is missing, or the layer norms have no parameters.
    """
    if not read_bool(hf, "layer_norm_elementwise_affine", True):
        raise ConfigError("OPT with 'layer_norm_elementwise_affine' false is not supported")
    width, heads = read_int(hf, "hidden_size"), read_int(hf, "num_attention_heads")
    embed_width = read_int(hf, "word_embed_proj_dim", width)
    norm_first, bias = read_bool(hf, "do_layer_norm_before", True), read_bool(hf, "enable_bias", True)
    return ModelConfig(
        family="opt",
        vocab_size=read_int(hf, "vocab_size"),
        width=width,
        num_layers=read_int(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=head_size(width, heads),
        mlp_width=read_int(hf, "ffn_dim"),
        max_position=read_int(hf, "max_position_embeddings", 2_048),
        tied_head=read_bool(hf, "tie_word_embeddings", True),
        norm="layer",
        norm_eps=1e-5,
        norm_first=norm_first,
        final_norm=norm_first and not read_bool(hf, "_remove_final_layer_norm", False),
        activation=read_activation(hf, "activation_function", "relu"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        rope=None,
        learned_position_offset=2,
        embed_width=None if embed_width == width else embed_width,
        bos_token_id=read_id(hf, "bos_token_id", 2),
        eos_token_ids=read_ids(hf, "eos_token_id", 2),
    )


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    architectures=("OPTForCausalLM", "OPTModel"),
    gguf_architectures=(),
    hf_prefixes=("model.decoder.", "decoder."),
    weights=WEIGHTS,
    config_from_hf=config_from_hf,
    config_from_gguf=None,
)
