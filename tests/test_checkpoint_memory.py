"""Peak memory of loading: at most 1.3 times the final weights plus the file, measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import llama_config, random_tensors, write_gguf, write_hf_folder
from gguf.constants import GGMLQuantizationType

from specinfer_jax.checkpoint import orbax_io
from specinfer_jax.checkpoint.load import load_model
from specinfer_jax.checkpoint.resolve import resolve
from specinfer_jax.config import DEFAULT_MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")

BIG = {
    "vocab_size": 16_384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""About 40 M parameters, so that the program's own memory does not blur the figures."""

_MEASURE = """
import json, sys
import jax
from specinfer_jax.checkpoint import orbax_io
from specinfer_jax.checkpoint.load import load_model, read_config
from specinfer_jax.models.transformer import param_shapes

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

location, dtype = sys.argv[1:]
jax.block_until_ready(jax.numpy.zeros(3))
param_shapes(read_config(location))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here
before = status("VmRSS")
model = load_model(location, dtype=dtype)
jax.block_until_ready(model.params)
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(json.dumps({"peak": status("VmHWM") - before, "weights": weights}))
"""


def assert_within_bound(location: Path, dtype: str) -> None:
    """Load in a fresh process and compare its peak with the bound."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(location), dtype], capture_output=True, text=True, check=True
    )
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    files = [location] if location.is_file() else [path for path in location.rglob("*") if path.is_file()]
    bound = 1.3 * measured["weights"] + sum(path.stat().st_size for path in files)
    assert measured["weights"] <= measured["peak"] <= bound, (measured, bound)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("stored", "asked"), [(np.float32, "float32"), (ml_dtypes.bfloat16, "float32"), (np.float32, "bfloat16")]
)
def test_safetensors(tmp_path: Path, stored: Any, asked: str, tied: bool) -> None:
    hf = llama_config(**BIG, tie_word_embeddings=tied)
    tensors = {name: value.astype(stored) for name, value in random_tensors(hf, 0).items()}
    write_hf_folder(tmp_path, hf, 0, tensors=tensors, shards=2)
    assert_within_bound(tmp_path, asked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_gguf(tmp_path: Path, kind: str) -> None:
    write_gguf(tmp_path / "m.gguf", llama_config(**BIG), 0, type_of=lambda name: GGMLQuantizationType[kind])
    assert_within_bound(tmp_path / "m.gguf", "float32")


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_converted_model(tmp_path: Path, asked: str) -> None:
    write_hf_folder(tmp_path / "hf", llama_config(**BIG), 0)
    model = load_model(tmp_path / "hf", dtype="float32")
    orbax_io.save(tmp_path / "converted", model.params, model.config, tokenizer_files={})
    assert_within_bound(tmp_path / "converted", asked)


@pytest.mark.weights
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model(dtype: str) -> None:
    assert_within_bound(resolve(DEFAULT_MODEL), dtype)
