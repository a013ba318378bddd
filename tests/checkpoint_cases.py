"""Tiny checkpoints of every family, written with deterministic weights: HF folders and GGUF files.

Tensor names and shapes are spelt out here from transformers' and llama.cpp's conventions, on purpose apart from the
tables in `specinfer_jax/models/families`: a test that used the same table would prove nothing.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of a llama with 4 heads, 2 kv heads and head size 8."""
    return {**_LLAMA, **changes}


def mistral_config(**changes: Any) -> dict[str, Any]:
    """The same as Mistral, with a sliding window of 16."""
    return {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16, **changes}


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """The same as Qwen2."""
    own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    return {**_LLAMA, **own, "sliding_window": 16, "max_window_layers": 2, **changes}


def opt_config(**changes: Any) -> dict[str, Any]:
    """config.json of an OPT that normalises before each block."""
    return {**_OPT, **changes}


def opt_350m_config(**changes: Any) -> dict[str, Any]:
    """OPT-350m's layout: norm after each block, no final norm, embedding narrower than the model."""
    return {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16, **changes}


CONFIGS: dict[str, Callable[..., dict[str, Any]]] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "opt": opt_config,
    "opt-350m": opt_350m_config,
}


def tensor_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of all parameters, the head among them if it is not tied."""
    return _opt_shapes(hf_config) if hf_config["model_type"] == "opt" else _llama_shapes(hf_config)


def _llama_shapes(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, vocab = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    size = hf.get("head_dim") or width // heads
    llama_bias = hf["model_type"] == "llama" and hf.get("attention_bias", False)
    mlp_bias = hf["model_type"] == "llama" and hf.get("mlp_bias", False)
    linears = {
        "self_attn.q_proj": (heads * size, width, llama_bias or hf["model_type"] == "qwen2"),
        "self_attn.k_proj": (kv_heads * size, width, llama_bias or hf["model_type"] == "qwen2"),
        "self_attn.v_proj": (kv_heads * size, width, llama_bias or hf["model_type"] == "qwen2"),
        "self_attn.o_proj": (width, heads * size, llama_bias),
        "mlp.gate_proj": (inner, width, mlp_bias),
        "mlp.up_proj": (inner, width, mlp_bias),
        "mlp.down_proj": (width, inner, mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
    if not hf.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


def _opt_shapes(hf: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, embed = hf["hidden_size"], hf["ffn_dim"], hf["word_embed_proj_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.decoder.embed_tokens.weight": (hf["vocab_size"], embed),
        "model.decoder.embed_positions.weight": (hf["max_position_embeddings"] + 2, width),
    }
    if embed != width:
        shapes["model.decoder.project_in.weight"] = (width, embed)
        shapes["model.decoder.project_out.weight"] = (embed, width)
    norms = ["self_attn_layer_norm", "final_layer_norm"]
    linears = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
    linears |= {"fc1": (inner, width), "fc2": (width, inner)}
    for i in range(hf["num_hidden_layers"]):
        layer = f"model.decoder.layers.{i}"
        for name in norms:
            shapes[f"{layer}.{name}.weight"] = shapes[f"{layer}.{name}.bias"] = (width,)
        for name, shape in linears.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if hf.get("enable_bias", True):
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    if hf["do_layer_norm_before"] and not hf.get("_remove_final_layer_norm", False):
        shapes["model.decoder.final_layer_norm.weight"] = shapes["model.decoder.final_layer_norm.bias"] = (width,)
    if not hf.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (hf["vocab_size"], embed)
    return shapes


def random_tensors(hf_config: Mapping[str, Any], seed: int) -> Tensors:
    """Normal weights of scale 0.2 (norm weights around 1), the same on every machine."""
    random = np.random.RandomState(seed)
    tensors = {}
    for name, shape in tensor_shapes(hf_config).items():
        values = 0.2 * random.standard_normal(shape)
        if "norm" in name and name.endswith("weight"):
            values += 1.0
        tensors[name] = values.astype(np.float32)
    return tensors


def write_hf_folder(
    path: Path,
    hf_config: Mapping[str, Any],
    seed: int,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
) -> Tensors:
    """Write config.json and safetensors, in one file or in shards with an index; return the float32 tensors.

    `tensors` replaces the random ones of `seed`; its dtypes (float32, float16, bfloat16) are kept.
    """
    path.mkdir(parents=True, exist_ok=True)
    written = random_tensors(hf_config, seed) if tensors is None else dict(tensors)
    (path / "config.json").write_text(json.dumps(hf_config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    if shards == 1:
        write_safetensors(path / "model.safetensors", written)
        return written
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: written[name] for name in sorted(written)[shard::shards]}
        write_safetensors(path / file, part)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return written


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file; numpy dtypes as they are, bfloat16 (ml_dtypes) included."""
    safetensors.numpy.save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(hf_name: str) -> str:
    """llama.cpp's name of an HF tensor."""
    stem, _, kind = hf_name.rpartition(".")
    if stem in _GGUF_TOP_NAMES:
        return f"{_GGUF_TOP_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[rest]}.{kind}"


def llama_cpp_permute(values: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of llama's q and k."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    hf_config: Mapping[str, Any],
    seed: int,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    type_of: Callable[[str], GGMLQuantizationType] = lambda name: GGMLQuantizationType.F32,
    alignment: int | None = None,
    extra_metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Tensors:
    """Write a llama, mistral or qwen2 model as llama.cpp's converter would; return the HF tensors behind it.

    `type_of` chooses the type of every tensor by its GGUF name (1-d tensors stay F32); `leave_out` drops GGUF names.
    """
    written = random_tensors(hf_config, seed) if tensors is None else dict(tensors)
    architecture = "qwen2" if hf_config["model_type"] == "qwen2" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    _add_metadata(writer, hf_config)
    for key, value in (extra_metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for hf_name, stored in written.items():
        name, values = gguf_name(hf_name), stored
        if architecture == "llama" and (".q_proj." in hf_name or ".k_proj." in hf_name):
            heads = hf_config["num_attention_heads" if ".q_proj." in hf_name else "num_key_value_heads"]
            values = llama_cpp_permute(stored, heads)
        if name in leave_out:
            continue
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else type_of(name)
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _add_metadata(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_vocab_size(hf["vocab_size"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    if "head_dim" in hf:
        writer.add_key_length(hf["head_dim"])
        writer.add_value_length(hf["head_dim"])
        writer.add_rope_dimension_count(hf["head_dim"])
    writer.add_rope_freq_base(hf["rope_theta"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(hf["vocab_size"])])
    writer.add_bos_token_id(hf["bos_token_id"])
    writer.add_eos_token_id(hf["eos_token_id"])
