"""Loading onto a mesh: every device gets its part, and the host never holds a second copy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import llama_config, write_gguf, write_hf_folder

from specinfer_jax.checkpoint import orbax_io
from specinfer_jax.checkpoint.assign import flat_paths
from specinfer_jax.checkpoint.load import load_model
from specinfer_jax.parallel.sharding import make_mesh
from specinfer_jax.parallel.weights import DEVICE, HOST, WeightPlacement

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
SCALED_7B = {
    "vocab_size": 4_000, "hidden_size": 512, "intermediate_size": 1_376, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
"""LLaMA-7B with every width divided by 8: 105 M parameters."""

_MEASURE = """
import json, sys
import jax
from specinfer_jax.checkpoint.load import load_model, read_config
from specinfer_jax.models.transformer import param_shapes
from specinfer_jax.parallel.sharding import make_mesh

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

mesh = make_mesh(1, 8)
jax.block_until_ready(jax.numpy.zeros(3))
param_shapes(read_config(sys.argv[1]))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here
before = status("VmRSS")
params = load_model(sys.argv[1], dtype=sys.argv[2], mesh=mesh, memory=sys.argv[3]).params
one_copy = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
parts = [sum(leaf.addressable_shards[d].data.nbytes for leaf in jax.tree.leaves(params)) for d in range(8)]
print(json.dumps({"peak": status("VmHWM") - before, "one_copy": one_copy, "parts": parts}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "memory", "most"), [("float32", DEVICE, 1.2), ("bfloat16", DEVICE, 1.2), ("bfloat16", HOST, 1.1)]
)  # the last one is case B089
def test_the_host_holds_one_copy(tmp_path: Path, dtype: str, memory: str, most: float) -> None:
    write_hf_folder(tmp_path, llama_config(**SCALED_7B, tie_word_embeddings=False), 0, shards=3)
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), dtype, memory],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["one_copy"] <= found["peak"] <= most * found["one_copy"], found
    assert max(found["parts"]) <= 1.01 * found["one_copy"] / 8, found


def write(kind: str, folder: Path) -> Path:
    hf = llama_config(**SMALL, tie_word_embeddings=False)
    if kind == "gguf":
        write_gguf(folder / "m.gguf", hf, 0)
        return folder / "m.gguf"
    write_hf_folder(folder / "hf", hf, 0, shards=2)
    if kind == "converted":
        model = load_model(folder / "hf", dtype="float32")
        orbax_io.save(folder / "converted", model.params, model.config, tokenizer_files={})
    return folder / kind


@pytest.mark.parametrize("kind", ["hf", "gguf", "converted"])
def test_every_format_is_laid_out_alike(tmp_path: Path, kind: str) -> None:
    location = write(kind, tmp_path)
    whole = load_model(location, dtype="float32")
    mesh = make_mesh(2, 4)
    laid_out = load_model(location, dtype="float32", mesh=mesh)
    assert laid_out.config == whole.config
    placement = WeightPlacement(mesh, whole.config)
    for (path, got), (_, want) in zip(flat_paths(laid_out.params), flat_paths(whole.params), strict=True):
        assert got.sharding == placement.sharding(path), path
        assert np.array_equal(placement.as_stored(path, got), want), path
    key = laid_out.params["layers_1"]["attention"]["k"]["kernel"]
    assert key.shape == (16, 32), "two heads for four devices"
    embedding = laid_out.params["embed"]["embedding"]
    assert embedding.shape == (64, 32) and not np.asarray(embedding)[61:].any()


def test_weights_can_stay_on_the_host(tmp_path: Path) -> None:
    location = write("hf", tmp_path)
    params = load_model(location, dtype="bfloat16", mesh=make_mesh(1, 2), memory=HOST).params
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(params) if leaf.ndim == 2} == {HOST}
