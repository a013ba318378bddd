"""HF folders: every parameter exactly once, bits preserved, tied heads, and what is refused by file and tensor."""

import contextlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import (
    CONFIGS,
    Tensors,
    llama_config,
    opt_350m_config,
    opt_config,
    qwen2_config,
    random_tensors,
    write_hf_folder,
    write_safetensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.checkpoint.load import load_model, read_config
from specinfer_jax.checkpoint.safetensors_file import read_safetensors
from specinfer_jax.errors import CheckpointError, ConfigError
from specinfer_jax.models.families import config_from_hf
from specinfer_jax.models.transformer import param_shapes

_OUR_NAMES = {
    "embed_tokens.weight": "embed/embedding",
    "embed_positions.weight": "embed/position",
    "project_in.weight": "embed/project_in/kernel",
    "project_out.weight": "head/project_out/kernel",
    "lm_head.weight": "head/kernel",
    "norm.weight": "head/norm/scale",
    "final_layer_norm.weight": "head/norm/scale",
    "final_layer_norm.bias": "head/norm/bias",
}
_OUR_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn_layer_norm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "final_layer_norm": "mlp_norm",
    "self_attn.q_proj": "attention/q",
    "self_attn.k_proj": "attention/k",
    "self_attn.v_proj": "attention/v",
    "self_attn.o_proj": "attention/out",
    "self_attn.out_proj": "attention/out",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/up",
    "fc1": "mlp/up",
    "mlp.down_proj": "mlp/down",
    "fc2": "mlp/down",
}


def our_path(hf_name: str) -> str:
    """Where a tensor belongs in the parameter tree."""
    name = hf_name.removeprefix("model.").removeprefix("decoder.")
    if not name.startswith("layers."):
        return _OUR_NAMES[name]
    _, layer, rest = name.split(".", 2)
    stem, _, kind = rest.rpartition(".")
    leaf = "bias" if kind == "bias" else "scale" if "norm" in stem else "kernel"
    return f"layers_{layer}/{_OUR_LAYER_NAMES[stem]}/{leaf}"


def flat(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Parameters by path, as numpy arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


def assert_holds(params: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: Any = np.float32) -> None:
    """The tree holds exactly these tensors, bit for bit."""
    found = flat(params)
    assert found.keys() == {our_path(name) for name in tensors}
    for name, values in tensors.items():
        assert found[our_path(name)].dtype == dtype
        assert found[our_path(name)].tobytes() == values.tobytes(), name


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_family_loads_bit_for_bit(tmp_path: Path, kind: str, shards: int) -> None:  # cases B064, B065
    tensors = write_hf_folder(tmp_path, CONFIGS[kind](), seed=0, shards=shards)
    model = load_model(tmp_path, dtype="float32")
    assert_holds(model.params, tensors)
    assert (model.source, model.format, model.gguf_metadata) == (tmp_path, "hf", None)
    assert model.config == read_config(tmp_path)
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(model.params))


@pytest.mark.parametrize(
    "hf",
    [
        llama_config(attention_bias=True, mlp_bias=True, head_dim=16),
        llama_config(num_key_value_heads=4),
        opt_config(enable_bias=False, tie_word_embeddings=False),
        opt_config(_remove_final_layer_norm=True),
        opt_350m_config(do_layer_norm_before=True),
    ],
)
def test_variants_load_bit_for_bit(tmp_path: Path, hf: dict[str, Any]) -> None:  # cases B064, B065
    tensors = write_hf_folder(tmp_path, hf, seed=1)
    assert_holds(load_model(tmp_path, dtype=jnp.float32).params, tensors)


def test_stop_ids_of_generation_config_are_read(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, llama_config(), seed=0, generation_config={"eos_token_id": [2, 5]})
    assert load_model(tmp_path, dtype="float32").config.eos_token_ids == (2, 5)


# --- the head ------------------------------------------------------------------------------------------------------


def tied_and_head(tmp_path: Path, *, tied: bool, head: bool, embedding: bool = True) -> tuple[Path, Tensors]:
    """A llama folder with the flag and the file at odds or not."""
    tensors = random_tensors(llama_config(), seed=2)
    kept = {
        name: value
        for name, value in tensors.items()
        if (head or name != "lm_head.weight") and (embedding or name != "model.embed_tokens.weight")
    }
    write_hf_folder(tmp_path, llama_config(tie_word_embeddings=tied), 2, tensors=kept)
    return tmp_path, tensors


def test_untied_head_is_its_own(tmp_path: Path) -> None:  # case B034
    folder, tensors = tied_and_head(tmp_path, tied=False, head=True)
    assert_holds(load_model(folder, dtype="float32").params, tensors)


@pytest.mark.parametrize("head", [False, True])
def test_tied_head_is_the_embedding_whatever_the_file_holds(tmp_path: Path, head: bool) -> None:  # case B034
    folder, tensors = tied_and_head(tmp_path, tied=True, head=head)
    tensors.pop("lm_head.weight")
    assert_holds(load_model(folder, dtype="float32").params, tensors)


def test_tied_where_only_the_head_was_kept(tmp_path: Path) -> None:  # case B034
    folder, tensors = tied_and_head(tmp_path, tied=True, head=True, embedding=False)
    tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    assert_holds(load_model(folder, dtype="float32").params, tensors)


def test_untied_without_a_head_names_the_key(tmp_path: Path) -> None:  # case B034
    folder, _ = tied_and_head(tmp_path, tied=False, head=False)
    with pytest.raises(CheckpointError, match=f"{folder}: tensors that the model needs are missing: lm_head.weight$"):
        load_model(folder, dtype="float32")


def test_untied_without_an_embedding_names_the_key(tmp_path: Path) -> None:  # case B034
    folder, _ = tied_and_head(tmp_path, tied=False, head=True, embedding=False)
    with pytest.raises(CheckpointError, match=r"missing: model.embed_tokens.weight$"):
        load_model(folder, dtype="float32")


def test_a_tied_head_of_another_size_is_not_looked_at(tmp_path: Path) -> None:  # case B034
    tensors = random_tensors(llama_config(), seed=2)
    tensors["lm_head.weight"] = np.zeros((3, 5), np.float32)
    write_hf_folder(tmp_path, llama_config(tie_word_embeddings=True), 2, tensors=tensors)
    assert "kernel" not in load_model(tmp_path, dtype="float32").params["head"]


@pytest.mark.parametrize(
    ("kind", "prefix", "stored"),
    [("opt", "model.decoder.", "decoder."), ("llama", "model.", ""), ("qwen2", "model.", "")],
)
def test_names_of_the_inner_module_are_known(tmp_path: Path, kind: str, prefix: str, stored: str) -> None:  # case B034
    tensors = random_tensors(CONFIGS[kind](), seed=3)
    renamed = {name.replace(prefix, stored, 1): value for name, value in tensors.items()}
    write_hf_folder(tmp_path, CONFIGS[kind](), 3, tensors=renamed)
    assert_holds(load_model(tmp_path, dtype="float32").params, tensors)


def test_the_same_parameter_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(opt_config(), seed=3)
    tensors["decoder.embed_tokens.weight"] = tensors["model.decoder.embed_tokens.weight"]
    write_hf_folder(tmp_path, opt_config(), 3, tensors=tensors)
    with pytest.raises(CheckpointError, match="are the same parameter"):
        load_model(tmp_path, dtype="float32")


# --- dtypes --------------------------------------------------------------------------------------------------------

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
def test_dtype_as_asked_and_bits_as_numpy_casts(tmp_path: Path, stored: str, asked: str) -> None:  # cases B066, B096
    tensors = {name: value.astype(DTYPES[stored]) for name, value in random_tensors(qwen2_config(), seed=4).items()}
    write_hf_folder(tmp_path, qwen2_config(), 4, tensors=tensors)
    model = load_model(tmp_path, dtype=asked)
    assert_holds(model.params, {name: value.astype(DTYPES[asked]) for name, value in tensors.items()}, DTYPES[asked])


def test_every_bfloat16_pattern_survives(tmp_path: Path) -> None:  # case B066
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = patterns[np.isfinite(patterns.view(ml_dtypes.bfloat16).astype(np.float32))]
    hf = llama_config(vocab_size=finite.size // 32, tie_word_embeddings=True)
    tensors = {name: value.astype(ml_dtypes.bfloat16) for name, value in random_tensors(hf, seed=4).items()}
    tensors["model.embed_tokens.weight"] = finite.view(ml_dtypes.bfloat16).reshape(-1, 32)
    write_hf_folder(tmp_path, hf, 4, tensors=tensors)
    embedding = np.asarray(load_model(tmp_path, dtype="bfloat16").params["embed"]["embedding"])
    assert np.array_equal(embedding.view(np.uint16).reshape(-1), finite)
    embedding = np.asarray(load_model(tmp_path, dtype="float32").params["embed"]["embedding"])
    assert np.array_equal(embedding.view(np.uint32).reshape(-1), finite.astype(np.uint32) << 16)


@pytest.mark.parametrize(
    ("stored", "asked"), [("float32", "float16"), ("bfloat16", "float16"), ("float32", "bfloat16")]
)
def test_overflow_names_the_tensor(tmp_path: Path, stored: str, asked: str) -> None:  # case B066
    tensors = {name: value.astype(DTYPES[stored]) for name, value in random_tensors(llama_config(), seed=5).items()}
    largest = 3.4e38 if asked == "bfloat16" else 70_144.0
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = -largest
    write_hf_folder(tmp_path, llama_config(), 5, tensors=tensors)
    message = f"model.safetensors: model.layers.1.mlp.down_proj.weight holds {largest:.6g}, more than {asked} can"
    with pytest.raises(CheckpointError, match=message.replace("+", r"\+")):
        load_model(tmp_path, dtype=asked)
    assert load_model(tmp_path, dtype="float32").config.family == "llama"


@pytest.mark.parametrize("dtype", ["int8", "float64", "bf16", None, 3])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: Any) -> None:
    write_hf_folder(tmp_path, llama_config(), 5)
    with pytest.raises(ConfigError, match="is not supported for weights; use float32, bfloat16 or float16"):
        load_model(tmp_path, dtype=dtype)


# --- files that are not as they should be --------------------------------------------------------------------------


def test_known_buffers_are_passed_over(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(), seed=6)
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_hf_folder(tmp_path, llama_config(), 6, tensors=tensors | buffers)
    assert_holds(load_model(tmp_path, dtype="float32").params, tensors)


@pytest.mark.parametrize("surplus", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "x"])
def test_surplus_tensors_are_named_with_their_file(tmp_path: Path, surplus: str) -> None:  # case B064
    tensors = random_tensors(llama_config(), seed=6) | {surplus: np.ones(32, np.float32)}
    write_hf_folder(tmp_path, llama_config(), 6, tensors=tensors)
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensors that the model does not use: {surplus}$"):
        load_model(tmp_path, dtype="float32")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(qwen2_config(), seed=6)
    kept = {name: value for name, value in tensors.items() if not name.endswith("bias")}
    write_hf_folder(tmp_path, qwen2_config(), 6, tensors=kept)
    with pytest.raises(CheckpointError, match=r"missing: model.layers.0.self_attn.k_proj.bias, .* and 2 more$"):
        load_model(tmp_path, dtype="float32")


def test_mis_shaped_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(), seed=6)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].T
    write_hf_folder(tmp_path, llama_config(), 6, tensors=tensors)
    message = "model.safetensors: tensors have the wrong shape: model.layers.1.mlp.up_proj.weight is "
    with pytest.raises(CheckpointError, match=message + r"\[32, 48\] instead of \[48, 32\]$"):
        load_model(tmp_path, dtype="float32")


def test_a_position_table_of_another_length_is_refused(tmp_path: Path) -> None:  # case B065
    write_hf_folder(tmp_path, opt_config(max_position_embeddings=41), 6)
    (tmp_path / "config.json").write_text(json.dumps(opt_config()))
    with pytest.raises(CheckpointError, match=r"embed_positions.weight is \[43, 32\] instead of \[42, 32\]"):
        load_model(tmp_path, dtype="float32")


def test_a_cut_off_file_names_the_tensors_at_its_end(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, llama_config(), 6)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    last = max(header, key=lambda name: header[name]["data_offsets"][1] if name != "__metadata__" else -1)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"model.safetensors is cut off, the data of {last} is missing"):
        load_model(tmp_path, dtype="float32")


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_damaged_files_never_give_anything_but_a_clear_error(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    write_safetensors(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(5, np.float16)})
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(CheckpointError, match=str(path)):
            read_safetensors(path)
        return
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        for tensor in read_safetensors(path).values():
            assert tensor.read().shape == tensor.shape


def test_other_dtypes_in_the_file_are_named(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = dict(random_tensors(llama_config(), seed=6))
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    write_hf_folder(tmp_path, llama_config(), 6, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"dtype that is not supported: model.norm.weight \(I8\)"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x10", "is cut off inside its header or is no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer"),
        (struct.pack("<Q", 4) + b"nope", "has a damaged header"),
        (struct.pack("<Q", 2) + b"[]", "has a damaged header"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, message: str) -> None:
    write_hf_folder(tmp_path, llama_config(), 6)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"model.safetensors {message}"):
        load_model(tmp_path, dtype="float32")


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, llama_config(), 7, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    second = "model-00002-of-00002.safetensors"

    def refused(weight_map: dict[str, Any], message: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path, dtype="float32")

    refused(good["weight_map"] | {"extra": second}, f"{second} lacks tensors that .*index.json names: extra$")
    moved = next(name for name, file in good["weight_map"].items() if file == second)
    refused({name: file for name, file in good["weight_map"].items() if name != moved}, f"does not name: {moved}$")
    refused(good["weight_map"] | {moved: "../elsewhere.safetensors"}, "files outside its folder: ../elsewhere")
    refused(good["weight_map"] | {moved: 3}, "has no 'weight_map'")
    index.write_text(json.dumps(good))
    (tmp_path / second).unlink()
    with pytest.raises(CheckpointError, match=f"lacks files that model.safetensors.index.json names: {second}$"):
        load_model(tmp_path, dtype="float32")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pickle files only.*convert them with transformers"):
        load_model(tmp_path, dtype="float32")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    with pytest.raises(CheckpointError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize(("content", "message"), [("{", "is not valid JSON"), ("[1]", "holds no JSON object")])
def test_a_broken_config(tmp_path: Path, content: str, message: str) -> None:
    write_hf_folder(tmp_path, llama_config(), 7)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"config.json {message}"):
        load_model(tmp_path, dtype="float32")


def test_a_refused_config_names_the_file(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, llama_config(), 7)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(hidden_act="relu2")))
    with pytest.raises(ConfigError, match=f"^{tmp_path}/config.json: 'hidden_act' is 'relu2'"):
        load_model(tmp_path, dtype="float32")


@pytest.mark.parametrize("padding", range(0, 64, 8))
def test_loaded_arrays_are_copies_of_the_file(tmp_path: Path, padding: int) -> None:
    # The padding moves the data to every alignment that a file can give it; well-aligned memory is what jax would keep.
    tensors = write_hf_folder(tmp_path, llama_config(), 8)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    file.write_bytes(
        struct.pack("<Q", length + padding) + content[8 : 8 + length] + b" " * padding + content[8 + length :]
    )
    params = load_model(tmp_path, dtype="float32").params
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    assert_holds(params, tensors)


def test_loaded_arrays_can_be_donated(tmp_path: Path) -> None:  # jax warns about those that cannot
    write_hf_folder(tmp_path, llama_config(), 8)
    params = load_model(tmp_path, dtype="float32").params
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_importing_touches_no_device() -> None:
    code = (
        "import specinfer_jax.checkpoint.load, specinfer_jax.checkpoint.orbax_io, specinfer_jax.models.families\n"
        "import jax\n"
        "jax.config.update('jax_platforms', 'none_such')\n"  # fails here if a backend exists already
        "try:\n    jax.devices()\nexcept RuntimeError:\n    print('untouched')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "untouched\n", done.stderr


def test_shapes_of_the_decoder_are_those_of_the_files() -> None:
    for kind, make in CONFIGS.items():
        shapes = {path: leaf.shape for path, leaf in _flat_shapes(param_shapes(config_from_hf(make())))}
        assert shapes == {our_path(name): value.shape for name, value in random_tensors(make(), 0).items()}, kind


def _flat_shapes(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [("/".join(str(key.key) for key in path), leaf) for path, leaf in leaves]
