"""config.json and GGUF metadata to ModelConfig, field by field, and what is refused."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_cases import llama_config, mistral_config, opt_350m_config, opt_config, qwen2_config
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig, RopeConfig
from specinfer_jax.models.families import FAMILIES, config_from_gguf, config_from_hf
from specinfer_jax.models.families.rope import rope_from_factors
from specinfer_jax.models.transformer import param_shapes


def test_llama_config_is_read_field_by_field() -> None:
    assert config_from_hf(llama_config()) == ModelConfig(
        family="llama",
        vocab_size=64,
        width=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        mlp_width=48,
        max_position=128,
        tied_head=False,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0, original_max_position=128),
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def test_head_dim_counts_more_than_width_over_heads() -> None:
    assert config_from_hf(llama_config(head_dim=16)).head_size == 16
    assert config_from_hf(llama_config(head_dim=None)).head_size == 8


def test_llama_biases() -> None:  # case B064
    config = config_from_hf(llama_config(attention_bias=True, mlp_bias=True))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, True, True)
    config = config_from_hf(qwen2_config())
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    ("hf", "window"),
    [
        (mistral_config(), 16),
        (mistral_config(sliding_window=None), None),
        ({key: value for key, value in mistral_config().items() if key != "sliding_window"}, 4096),
        (llama_config(sliding_window=16), None),
        (qwen2_config(), None),
        (qwen2_config(use_sliding_window=True), None),  # max_window_layers = num_layers: no layer has a window
        (qwen2_config(use_sliding_window=True, max_window_layers=1), 16),
        (qwen2_config(use_sliding_window=True, max_window_layers=0, sliding_window=None), None),
        (qwen2_config(use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]), 16),
        (qwen2_config(use_sliding_window=True, max_window_layers=0, layer_types=["full_attention"] * 2), None),
    ],
)
def test_sliding_window(hf: dict[str, Any], window: int | None) -> None:
    assert config_from_hf(hf).sliding_window == window


def test_opt_config() -> None:  # case B065
    assert config_from_hf(opt_config()) == ModelConfig(
        family="opt",
        vocab_size=64,
        width=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_size=8,
        mlp_width=48,
        max_position=40,
        tied_head=True,
        norm="layer",
        norm_eps=1e-5,
        activation="relu",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rope=None,
        learned_position_offset=2,
        bos_token_id=2,
        eos_token_ids=(2,),
    )
    config = config_from_hf(opt_350m_config())
    assert (config.norm_first, config.final_norm, config.embed_width) == (False, False, 16)
    config = config_from_hf(opt_config(_remove_final_layer_norm=True))
    assert (config.norm_first, config.final_norm, config.embed_width) == (True, False, None)
    assert not config_from_hf(opt_config(enable_bias=False)).qkv_bias
    assert config_from_hf(opt_config(activation_function="gelu")).activation == "gelu"
    assert not config_from_hf(opt_config(tie_word_embeddings=False)).tied_head


def test_stop_ids_of_both_files_join() -> None:
    assert config_from_hf(llama_config(eos_token_id=[2, 7])).eos_token_ids == (2, 7)
    assert config_from_hf(llama_config(eos_token_id=None)).eos_token_ids == ()
    assert config_from_hf(llama_config(), {"eos_token_id": [9, 2]}).eos_token_ids == (2, 9)
    assert config_from_hf(llama_config(), {"eos_token_id": 3}).eos_token_ids == (2, 3)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "rope", "max_position"),
    [
        (None, RopeConfig(original_max_position=128), 128),
        ({"type": "default"}, RopeConfig(original_max_position=128), 128),
        (
            {"type": "linear", "factor": 2},
            RopeConfig(rope_type="linear", factor=2.0, original_max_position=128),
            256,
        ),
        (
            {"type": "dynamic", "factor": 2.5, "original_max_position_embeddings": 64},  # HF starts from 128
            RopeConfig(rope_type="dynamic", factor=2.5, original_max_position=128),
            320,
        ),
        (
            LLAMA3,
            RopeConfig(rope_type="llama3", factor=8.0, original_max_position=64),
            128,
        ),
        (YARN, RopeConfig(rope_type="yarn", factor=4.0, original_max_position=64), 256),
        (
            {**YARN, "factor": None, "type": "default"},  # rope_type counts more than the older key
            RopeConfig(rope_type="yarn", factor=2.0, original_max_position=64),
            128,
        ),
        (
            {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16, "beta_slow": 2,
             "attention_factor": 1.1, "truncate": False},
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position=128, mscale=0.7, mscale_all_dim=0.9,
                       beta_fast=16.0, beta_slow=2.0, attention_factor=1.1, truncate=False),
            512,
        ),
    ],
)  # fmt: skip
def test_rope_scaling_in_both_generations(
    scaling: dict[str, Any] | None, rope: RopeConfig, max_position: int
) -> None:  # case B033
    old = config_from_hf(llama_config(rope_scaling=scaling))
    assert (old.rope, old.max_position) == (rope, max_position)
    hf = llama_config(rope_parameters={"rope_theta": 10_000.0, **(scaling or {"rope_type": "default"})})
    del hf["rope_theta"]
    assert config_from_hf(hf) == old


def test_rope_theta_is_read_from_either_place() -> None:
    assert config_from_hf(llama_config(rope_theta=5e5)).rope == RopeConfig(theta=5e5, original_max_position=128)
    hf = llama_config(rope_parameters={"rope_type": "default", "rope_theta": 500_000})
    assert config_from_hf(hf).rope == RopeConfig(theta=5e5, original_max_position=128)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (llama_config(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "rope type 'longrope' is not supported"),
        (llama_config(rope_scaling={"type": "su"}), "rope type 'su' is not supported"),
        (llama_config(rope_scaling={"type": "linear"}), "'factor' is missing"),
        (llama_config(rope_scaling={"type": "linear", "factor": "2"}), "'factor' is '2'; it must be a positive number"),
        (llama_config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "'low_freq_factor' is missing"),
        (llama_config(rope_scaling=3), "'rope_scaling' is 3"),
        (llama_config(rope_parameters={"full_attention": {"rope_type": "default"}}), "differs between layers"),
        (llama_config(partial_rotary_factor=0.5), "'partial_rotary_factor' other than 1"),
        (
            llama_config(model_type="gemma3"),
            "model type 'gemma3' is not supported; supported are llama, mistral, qwen2",
        ),
        (llama_config(architectures=["LlamaForSequenceClassification"]), "'LlamaForSequenceClassification' is not"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({}, "architecture None is not supported"),
        (llama_config(hidden_act="relu2"), "'hidden_act' is 'relu2', which is not supported"),
        (opt_config(activation_function="swiglu"), "'activation_function' is 'swiglu'"),
        (opt_config(layer_norm_elementwise_affine=False), "'layer_norm_elementwise_affine' false is not supported"),
        (llama_config(quantization_config={"quant_method": "gptq"}), "quantised \\(gptq\\), which is not supported"),
        (llama_config(num_key_value_heads=3), "4 query heads do not share 3 key/value heads"),
        (llama_config(num_attention_heads=5, num_key_value_heads=5), "width of 32 does not divide into 5 heads"),
        (llama_config(head_dim=7), "even head size, not 7"),
        (llama_config(hidden_size="32"), "'hidden_size' is '32'; it must be an integer"),
        (llama_config(num_hidden_layers=0), "'num_hidden_layers' is 0; it must be an integer of at least 1"),
        (llama_config(eos_token_id=["</s>"]), "'eos_token_id' is \\['</s>'\\]"),
        (llama_config(tie_word_embeddings="yes"), "'tie_word_embeddings' is 'yes'; it must be true or false"),
        ({key: value for key, value in llama_config().items() if key != "vocab_size"}, "'vocab_size' is missing"),
    ],
)
def test_what_is_refused(hf: dict[str, Any], message: str) -> None:  # case B033
    with pytest.raises(ConfigError, match=message):
        config_from_hf(hf)


def test_every_parameter_has_a_row_in_the_table_and_every_row_a_parameter() -> None:
    configs = {
        "llama": [llama_config(attention_bias=True, mlp_bias=True)],
        "qwen2": [qwen2_config()],
        "opt": [opt_350m_config(tie_word_embeddings=False), opt_config()],
    }
    for name, cases in configs.items():
        used = {
            row
            for hf in cases
            for row in (
                FAMILIES[name].weight_name("/".join(str(key.key) for key in path))
                for path, _ in _leaves(config_from_hf(hf))
            )
        }
        spare = (
            {"o_proj.bias", "mlp.gate_proj.bias", "mlp.up_proj.bias", "mlp.down_proj.bias"} if name == "qwen2" else ()
        )
        expected = {
            row._replace(hf=row.hf.replace("{i}", str(i)), gguf=row.gguf and row.gguf.replace("{i}", str(i)))
            for row in FAMILIES[name].weights.values()
            for i in range(2)
            if not row.hf.endswith(tuple(spare))
        }
        assert used == expected


def _leaves(config: ModelConfig) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(param_shapes(config))


GGUF = {
    "general.architecture": "llama",
    "llama.vocab_size": 64,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10_000.0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_gguf_config_equals_that_of_config_json() -> None:
    assert config_from_gguf(GGUF, {"output.weight"}) == config_from_hf(llama_config())
    assert config_from_gguf(GGUF, set()) == config_from_hf(llama_config(tie_word_embeddings=True))
    biased = {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias"}
    assert config_from_gguf(GGUF, biased) == config_from_hf(
        llama_config(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    )
    stops = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 2}
    assert config_from_gguf(GGUF | stops, {"output.weight"}).eos_token_ids == (2, 5)
    without = {key: value for key, value in GGUF.items() if key != "llama.vocab_size"}
    assert config_from_gguf(without | {"tokenizer.ggml.tokens": ["a"] * 64}, {"output.weight"}).vocab_size == 64


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"type": "none", "factor": 2.0}, RopeConfig(original_max_position=128)),
        ({"type": "linear", "factor": 2.0}, RopeConfig(rope_type="linear", factor=2.0, original_max_position=128)),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32},
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position=32),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5, "yarn_beta_fast": 8.0},
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position=32, beta_fast=8.0,
                       attention_factor=0.5 * (1 + 0.1 * math.log(4.0))),
        ),
    ],
)  # fmt: skip
def test_gguf_rope_scaling(scaling: dict[str, Any], rope: RopeConfig) -> None:  # case B033
    metadata = GGUF | {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    assert config_from_gguf(metadata, set()).rope == rope


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "GGUF architecture 'gemma' is not supported; supported are llama, qwen2"),
        ({"general.architecture": "opt"}, "GGUF architecture 'opt' is not supported"),
        ({"general.architecture": None}, "GGUF architecture None is not supported"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 4}, "another size than their keys"),
        ({"llama.attention.head_count": [4, 4]}, "'llama.attention.head_count' is \\[4, 4\\]"),
        ({"llama.rope.scaling.type": "longrope"}, "rope type 'longrope' is not supported in GGUF"),
        ({"llama.embedding_length": None}, "'llama.embedding_length' is missing"),
    ],
)
def test_what_gguf_metadata_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_gguf(GGUF | changes, set())


def llama_cpp_factors(theta: float, size: int, factor: float, high: float, original: int) -> np.ndarray:
    """The divisors that llama.cpp's converter writes for llama3 scaling with low_freq_factor 1."""
    factors = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (i / size)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (high - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([32, 64, 80, 128]),
    st.sampled_from([10_000.0, 500_000.0]),
    st.floats(1.5, 64.0, width=32),
    st.sampled_from([2.0, 4.0, 8.0]),
    st.sampled_from([2048, 4096, 8192]),
)
def test_llama3_rope_is_recovered_from_gguf_factors(
    size: int, theta: float, factor: float, high: float, original: int
) -> None:  # case B033
    divisors = llama_cpp_factors(theta, size, factor, high, original)
    plain = RopeConfig(theta=theta, original_max_position=131_072)
    if (np.abs(divisors - 1) > 1e-6).sum() < 1:
        return
    try:
        rope = rope_from_factors(plain, divisors, head_size=size)
    except ConfigError:
        # Fewer than two blended frequencies cannot tell these numbers from others: refused unless they are Llama's.
        inside = (divisors > 1.0) & (divisors < divisors.max())
        assert inside.sum() < 2
        return
    again = llama_cpp_factors(theta, size, rope.factor, rope.high_freq_factor, rope.original_max_position)
    np.testing.assert_allclose(again, divisors, rtol=2e-5)


def test_rope_factors_of_llama_3_and_of_other_kinds() -> None:  # case B033
    plain = RopeConfig(theta=500_000.0, original_max_position=131_072)
    llama_3_2 = llama_cpp_factors(500_000.0, 64, 32.0, 4.0, 8192)
    assert rope_from_factors(plain, llama_3_2, head_size=64) == RopeConfig(
        theta=500_000.0, rope_type="llama3", factor=32.0, original_max_position=8192
    )
    assert rope_from_factors(plain, np.ones(32, np.float32), head_size=64) == plain
    for wrong in (np.linspace(1, 9, 32, dtype=np.float32), llama_3_2[:16], 0.5 * llama_3_2):
        with pytest.raises(ConfigError, match="does not follow llama3 scaling"):
            rope_from_factors(plain, wrong, head_size=64)
    yarn = RopeConfig(theta=500_000.0, rope_type="yarn", factor=4.0)
    with pytest.raises(ConfigError, match="cannot both apply"):
        rope_from_factors(yarn, llama_3_2, head_size=64)
