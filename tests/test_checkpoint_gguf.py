"""GGUF files: rows back in HF's order, every quantisation type, metadata, and what is refused before it is read."""

import contextlib
import dataclasses
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from checkpoint_cases import (
    gguf_name,
    llama_config,
    llama_cpp_permute,
    mistral_config,
    qwen2_config,
    random_tensors,
    write_gguf,
    write_hf_folder,
)
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer_jax.checkpoint.gguf import SUPPORTED_TYPES
from specinfer_jax.checkpoint.gguf_header import open_gguf, read_metadata
from specinfer_jax.checkpoint.load import LoadedModel, load_model, read_config
from specinfer_jax.checkpoint.resolve import resolve
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import CheckpointError, ConfigError
from specinfer_jax.models.config import RopeConfig

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}  # rows that hold whole K-quant blocks


def assert_same_params(left: LoadedModel, right: LoadedModel) -> None:
    """Bit-equal trees."""
    pairs = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), left.params, right.params)
    assert jax.tree.all(pairs), pairs


@pytest.mark.parametrize(
    "hf",
    [
        llama_config(),
        llama_config(attention_bias=True, mlp_bias=True),
        llama_config(num_key_value_heads=1, head_dim=16),
        llama_config(tie_word_embeddings=True),
        mistral_config(sliding_window=None),
        qwen2_config(),
        qwen2_config(tie_word_embeddings=True),
    ],
    ids=["llama", "biases", "head_dim", "tied", "mistral", "qwen2", "qwen2-tied"],
)
def test_gguf_is_bit_equal_to_the_hf_folder_it_was_made_of(tmp_path: Path, hf: dict[str, Any]) -> None:  # B035, B064
    tensors = write_hf_folder(tmp_path / "hf", hf, seed=0)
    write_gguf(tmp_path / "model.gguf", hf, 0, tensors=tensors)
    from_hf, from_gguf = (
        load_model(tmp_path / "hf", dtype="float32"),
        load_model(tmp_path / "model.gguf", dtype="float32"),
    )
    assert_same_params(from_hf, from_gguf)
    epsilon = from_gguf.config.norm_eps  # float32 in the file
    assert np.float32(epsilon) == np.float32(from_hf.config.norm_eps)
    assert dataclasses.replace(from_gguf.config, norm_eps=from_hf.config.norm_eps) == from_hf.config
    assert from_gguf.format == "gguf"
    assert from_gguf.gguf_metadata is not None
    assert from_gguf.gguf_metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(64)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6), st.integers(1, 8), st.integers(1, 5))
def test_rows_go_back_where_they_were(heads: int, half: int, columns: int) -> None:  # case B035
    from specinfer_jax.checkpoint.gguf import _with_halves

    matrix = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    for values in (matrix, matrix[:, 0]):
        permuted = llama_cpp_permute(values, heads)
        np.testing.assert_array_equal(_with_halves(lambda permuted=permuted: permuted, heads)(), values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_type_equals_the_gguf_package(tmp_path: Path, kind: str, dtype: str) -> None:  # case B067
    hf, quantisation = qwen2_config(**WIDE), GGMLQuantizationType[kind]
    quantised = _quantisable(quantisation)
    tensors = random_tensors(hf, seed=1)
    writer_types = {gguf_name(name): quantisation for name, value in tensors.items() if value.ndim == 2}
    if quantised:
        write_gguf(tmp_path / "m.gguf", hf, 1, tensors=tensors, type_of=lambda name: writer_types[name])
    else:  # the package dequantises K-quants but does not quantise: random blocks with small scales
        _write_random_blocks(tmp_path / "m.gguf", hf, quantisation)
    model = load_model(tmp_path / "m.gguf", dtype=dtype)
    file = gguf.GGUFReader(tmp_path / "m.gguf")
    expected = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(
            model.params["embed"]["embedding"].dtype
        )
        for tensor in file.tensors
    }
    layer = model.params["layers_0"]
    for name, found in {
        "token_embd.weight": model.params["embed"]["embedding"],
        "output.weight": model.params["head"]["kernel"],
        "output_norm.weight": model.params["head"]["norm"]["scale"],
        "blk.0.attn_q.weight": layer["attention"]["q"]["kernel"],
        "blk.0.attn_k.bias": layer["attention"]["k"]["bias"],
        "blk.0.ffn_down.weight": layer["mlp"]["down"]["kernel"],
    }.items():
        assert np.asarray(found).tobytes() == expected[name].tobytes(), name
        assert np.isfinite(np.asarray(found, np.float32)).all()


def _quantisable(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.quants.quantize(np.zeros((1, 256), np.float32), kind)
    except NotImplementedError:
        return False
    return True


def _write_random_blocks(path: Path, hf: dict[str, Any], kind: GGMLQuantizationType) -> None:
    """A model whose matrices are random bytes with the half-precision scales of every block set to small numbers."""
    random = np.random.RandomState(2)
    write_gguf(path, hf, 1, tensors=random_tensors(hf, 1))
    plain = gguf.GGUFReader(path)
    values = {tensor.name: np.array(tensor.data) for tensor in plain.tensors}
    metadata = plain.fields
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "qwen2")
    for key, field in metadata.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]
    for name, value in values.items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
            continue
        blocks = random.randint(0, 256, (value.shape[0], value.shape[1] // block, size)).astype(np.uint8)
        for at in scales:
            blocks[..., at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        writer.add_tensor(name, blocks.reshape(value.shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").replace(path)


@pytest.mark.parametrize("alignment", [None, 64, 256])
def test_mixed_types_and_alignments(tmp_path: Path, alignment: int | None) -> None:  # case B067
    hf = llama_config(**WIDE)
    kinds = [GGMLQuantizationType[kind] for kind in ("Q8_0", "Q4_0", "Q5_1", "BF16", "F16", "F32")]
    order: dict[str, GGMLQuantizationType] = {}
    tensors = write_gguf(
        tmp_path / "m.gguf", hf, 3, alignment=alignment,
        type_of=lambda name: order.setdefault(name, kinds[len(order) % len(kinds)]),
    )  # fmt: skip
    assert set(order.values()) == set(kinds)
    model = load_model(tmp_path / "m.gguf", dtype="float32")
    for hf_name, heads in (("self_attn.q_proj", 4), ("self_attn.k_proj", 2)):
        name = f"model.layers.0.{hf_name}.weight"
        kind = order[gguf_name(name)]
        through = gguf.quants.dequantize(gguf.quants.quantize(llama_cpp_permute(tensors[name], heads), kind), kind)
        halves = through.reshape(heads, -1, 2, through.shape[1]).swapaxes(1, 2).reshape(through.shape)
        found = model.params["layers_0"]["attention"][hf_name[10]]["kernel"]
        np.testing.assert_array_equal(np.asarray(found), halves)


def test_metadata_is_plain_python_and_equal_to_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint64("u64", 1 << 40)
    writer.add_int8("i8", -3)
    writer.add_int16("i16", -300)
    writer.add_float64("f64", 0.1)
    writer.add_float32("f32", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Ünïcode 😊")
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("ints", [1, -2])
    writer.add_array("texts", ["", "a b", "猫"])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_metadata(path)
    fields = gguf.GGUFReader(path).fields
    assert metadata == {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}
    assert {key: type(value) for key, value in metadata.items()} == {
        "general.architecture": str, "u64": int, "i8": int, "i16": int, "f64": float, "f32": float, "yes": bool,
        "text": str, "floats": list, "ints": list, "texts": list, "flags": list,
    }  # fmt: skip
    assert metadata["flags"] == [True, False]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["IQ4_XS", "TQ1_0", "I32", "Q8_K", "F64"])
def test_unsupported_types_are_named_before_anything_is_read(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case B067
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_config(**WIDE), 4)
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", GGMLQuantizationType[kind]) + content[at + 4 :])
    monkeypatch.setattr(jax, "device_put", None)
    message = rf"m.gguf: tensors of a type that is not supported: blk.0.ffn_up.weight \({kind}\); supported are F32, "
    with pytest.raises(CheckpointError, match=message):
        load_model(path, dtype="float32")
    path.write_bytes(content[:at] + struct.pack("<I", 4711) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_up.weight \(type 4711\)"):
        load_model(path, dtype="float32")


def test_rows_that_hold_no_whole_blocks_are_named(tmp_path: Path) -> None:  # case B067
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_config(), 4)
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    path.write_bytes(content[:at] + struct.pack("<I", GGMLQuantizationType.Q4_0) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"no multiple of their type's block: blk.0.ffn_down.weight \(rows of 48"):
        load_model(path, dtype="float32")


def test_truncated_tensor_data_names_the_tensors(tmp_path: Path) -> None:  # case B067
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_config(), 4)
    file = open_gguf(path)
    last = max(file.tensors, key=lambda name: file.tensors[name].offset)
    end = file.tensors[last].offset + 4 * int(np.prod(file.tensors[last].shape))
    content = path.read_bytes()[:end]
    path.write_bytes(content)
    load_model(path, dtype="float32")
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"m.gguf is cut off, the data of {last} is missing; download it again"):
        load_model(path, dtype="float32")
    path.write_bytes(content[: file.tensors["blk.0.attn_q.weight"].offset])
    with pytest.raises(CheckpointError, match=r"is cut off, the data of .* and [0-9]+ more is missing"):
        load_model(path, dtype="float32")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_headers_never_give_anything_but_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, small_file: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    content = bytearray(small_file)
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(CheckpointError, match=str(path)):
            load_model(path, dtype="float32")
        return
    header_end = small_file.index(b"output.weight") + 60
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_end))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError, ConfigError):
        load_model(path, dtype="float32")


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole GGUF file with one layer, and nothing behind its last tensor."""
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_gguf(path, llama_config(num_hidden_layers=1, vocab_size=8), 4)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GGML" + bytes(40), "is no GGUF file"),
        (b"GGUF", "is cut off inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1 or big-endian"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is GGUF version 50331648 or big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "is cut off inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sII", 1, b"k", 99, 0), "has a damaged header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q2sIQ", 2, b"\xff\xfe", 10, 0), "has a damaged header"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q17sII", 17, b"general.alignment", 4, 0),
            ": 'general.alignment' is 0; it must be a positive integer",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8), ": GGUF architecture None is not supported"),
    ],
)
def test_what_is_no_gguf_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises((CheckpointError, ConfigError), match=f"m.gguf ?{message}"):
        load_model(path, dtype="float32")


def test_surplus_and_missing_tensors_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_config(), 5, extra_tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"m.gguf: tensors that the model does not use: blk.0.attn_sinks.weight$"):
        load_model(path, dtype="float32")
    write_gguf(path, llama_config(), 5, leave_out=("blk.1.ffn_norm.weight",))
    with pytest.raises(
        CheckpointError, match=r"m.gguf: tensors that the model needs are missing: blk.1.ffn_norm.weight$"
    ):
        load_model(path, dtype="float32")
    write_gguf(path, qwen2_config(), 5, leave_out=("blk.0.attn_q.bias", "blk.1.attn_q.bias"))
    with pytest.raises(CheckpointError, match=r"missing: blk.0.attn_q.bias, blk.1.attn_q.bias$"):
        load_model(path, dtype="float32")
    write_gguf(path, llama_config(num_hidden_layers=3_000_000_000), 5, tensors=random_tensors(llama_config(), 5))
    with pytest.raises(CheckpointError, match=r"m.gguf speaks of 3000000000 layers but holds 21 tensors$"):
        load_model(path, dtype="float32")
    write_gguf(path, llama_config(), 5, extra_metadata={"llama.feed_forward_length": 47})
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_down.weight is \[32, 48\] instead of \[32, 47\]"):
        load_model(path, dtype="float32")


def test_half_precision_overflow_names_the_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(llama_config(), 6)
    tensors["lm_head.weight"][0, 0] = 1e6
    write_gguf(tmp_path / "m.gguf", llama_config(), 6, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"m.gguf: output.weight holds 1e\+06, more than float16 can hold"):
        load_model(tmp_path / "m.gguf", dtype="float16")


def test_llama3_rope_factors_become_the_scaling_rule(tmp_path: Path) -> None:  # case B033
    from test_checkpoint_families import llama_cpp_factors

    hf = llama_config(head_dim=64, rope_theta=500_000.0)
    factors = {"rope_freqs.weight": llama_cpp_factors(500_000.0, 64, 8.0, 4.0, 8192)}
    write_gguf(tmp_path / "m.gguf", hf, 7, extra_tensors=factors)
    model = load_model(tmp_path / "m.gguf", dtype="float32")
    assert model.config.rope == RopeConfig(theta=500_000.0, rope_type="llama3", factor=8.0, original_max_position=8192)
    assert model.config == read_config(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", hf, 7, extra_tensors={"rope_freqs.weight": np.linspace(1, 2, 32, dtype=np.float32)})
    with pytest.raises(ConfigError, match=r"m.gguf: 'rope_freqs.weight' does not follow llama3 scaling"):
        load_model(tmp_path / "m.gguf", dtype="float32")


@pytest.mark.weights
def test_the_default_model_equals_the_gguf_package() -> None:
    path = resolve(DEFAULT_MODEL)
    model = load_model(path, dtype="float32")
    assert (model.config.num_layers, model.config.width, model.config.vocab_size) == (30, 576, 49_152)
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.head_size) == (9, 3, 64)
    assert model.config.rope == RopeConfig(theta=100_000.0, original_max_position=8192)
    assert (model.config.tied_head, model.config.max_position, model.config.eos_token_ids) == (True, 8192, (2,))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    embedding = gguf.quants.dequantize(tensors["token_embd.weight"].data, tensors["token_embd.weight"].tensor_type)
    np.testing.assert_array_equal(np.asarray(model.params["embed"]["embedding"]), embedding)
    query = gguf.quants.dequantize(tensors["blk.29.attn_q.weight"].data, tensors["blk.29.attn_q.weight"].tensor_type)
    found = np.asarray(model.params["layers_29"]["attention"]["q"]["kernel"])
    np.testing.assert_array_equal(llama_cpp_permute(found, 9), query)
