"""One entry for every kind of model: look what is at a path, read its config, load its parameters."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from specinfer_jax.checkpoint import gguf, hf_safetensors
from specinfer_jax.checkpoint.assign import weight_dtype
from specinfer_jax.checkpoint.gguf_header import open_gguf
from specinfer_jax.checkpoint.resolve import ModelFormat, location_format
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params
from specinfer_jax.parallel.weights import DEVICE, WeightPlacement


class LoadedModel(NamedTuple):
    """A model in memory, and where its tokenizer is to be had."""

    config: ModelConfig
    """What it computes."""
    params: Params
    """Nested dict of arrays, laid out for the mesh if there is one."""
    source: Path
    """The folder or .gguf file it came from; a folder holds the tokenizer's files."""
    format: ModelFormat
    """What kind of folder or file that is."""
    gguf_metadata: dict[str, object] | None
    """Everything a .gguf file says about model, tokenizer and chat template; None for folders."""


def load_model(
    location: str | os.PathLike[str], *, dtype: Any, mesh: Mesh | None = None, memory: str = DEVICE
) -> LoadedModel:
    """Load config and parameters.

    Args:
      location: a folder (Hugging Face layout, or converted by this project) or a .gguf file, as `resolve` returns it.
      dtype: float32, bfloat16 or float16; every parameter gets it, norms too.
      mesh: devices that share it, each of which gets its part alone (parallel/weights.py); the config stays that of
        the files. None: the default device.
      memory: DEVICE or HOST, for a mesh.

    Returns:
      The model.

    Raises:
      ModelNotFoundError: there is nothing at `location`.
      CheckpointError: a file is missing, damaged, cut off, or holds other tensors than the model needs.
      ConfigError: the architecture or one of its settings is not supported, or `dtype` is not.
    """
    path = Path(location)
    dtype = weight_dtype(dtype)
    kind = location_format(path)

    def place(config: ModelConfig) -> WeightPlacement | None:
        return None if mesh is None else WeightPlacement(mesh, config, memory)

    if kind == "gguf":
        file = open_gguf(path)
        config = gguf.read_config(file)
        params = gguf.load_params(file, config, dtype=dtype, placement=place(config))
        return LoadedModel(config, params, path, kind, file.metadata)
    if kind == "hf":
        config = hf_safetensors.read_config(path)
        params = hf_safetensors.load_params(path, config, dtype=dtype, placement=place(config))
        return LoadedModel(config, params, path, kind, None)
    # Imported late: orbax takes 0.4 s, and most runs load no converted model.
    from specinfer_jax.checkpoint import orbax_io

    config = orbax_io.read_config(path)
    params = orbax_io.load_params(path, config, dtype=dtype, placement=place(config))
    return LoadedModel(config, params, path, kind, None)


def read_config(location: str | os.PathLike[str]) -> ModelConfig:
    """Config alone, without reading any weights; same arguments and errors as `load_model`."""
    path = Path(location)
    kind = location_format(path)
    if kind == "gguf":
        return gguf.read_config(open_gguf(path))
    if kind == "hf":
        return hf_safetensors.read_config(path)
    from specinfer_jax.checkpoint import orbax_io

    return orbax_io.read_config(path)
