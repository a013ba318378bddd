"""A model folder in the Hugging Face layout: config.json and model.safetensors, whole or in shards."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specinfer_jax.checkpoint.assign import StoredTensor, assign_params, listed, wanted_shapes
from specinfer_jax.checkpoint.safetensors_file import read_safetensors
from specinfer_jax.errors import CheckpointError, ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import FAMILIES, config_from_hf
from specinfer_jax.models.families.weight_names import Family
from specinfer_jax.models.transformer import Params
from specinfer_jax.parallel.weights import WeightPlacement

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# Things that older versions of transformers and fairseq saved and that are no parameters.
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "attn.masked_bias",
    "decoder.version",
)


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the stop ids of generation_config.json where there is one.

    Raises:
      CheckpointError: config.json is missing or is not JSON.
      ConfigError: the model is not supported; the message names the file and the field.
    """
    path = folder / "config.json"
    generation = folder / "generation_config.json"
    fields = read_json(path)
    try:
        return config_from_hf(fields, read_json(generation) if generation.exists() else None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file.

    Raises:
      CheckpointError: the file is missing, cannot be read or holds something else.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is not valid JSON; download it again") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return fields


def load_params(folder: Path, config: ModelConfig, *, dtype: Any, placement: WeightPlacement | None = None) -> Params:
    """Load all parameters of a folder.

    Args:
      folder: holds model.safetensors, or model.safetensors.index.json and its shards.
      config: what `read_config` made of the same folder.
      dtype: float32, bfloat16 or float16; bits are kept where the file has the same dtype.
      placement: where each part goes; None: everything to the default device.

    Returns:
      Nested dict of arrays.

    Raises:
      CheckpointError: files or tensors are missing, surplus, mis-shaped or cut off; a value overflows `dtype`.
    """
    family = FAMILIES[config.family]
    stored = _canonical(_read_files(folder), family)
    return assign_params(
        wanted_shapes(config, stored, folder),
        _settle_head(stored, family, tied=config.tied_head),
        name_of=lambda path: family.weight_name(path).hf,
        dtype=dtype,
        source=folder,
        placement=placement,
    )


def _read_files(folder: Path) -> list[StoredTensor]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists():
        return list(read_safetensors(single).values())
    if index.exists():
        return _read_shards(folder, index)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds its weights in pickle files only, which are not read because they can run code; "
            "convert them with transformers: model.save_pretrained(folder, safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_shards(folder: Path, index: Path) -> list[StoredTensor]:
    """All tensors of all shards, after index and shards were found to agree."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files; download it again")
    files = sorted(set(weight_map.values()))
    strange = [file for file in files if Path(file).name != file]
    if strange:
        raise CheckpointError(f"{index} names files outside its folder: {listed(strange)}")
    absent = [file for file in files if not (folder / file).exists()]
    if absent:
        raise CheckpointError(f"{folder} lacks files that {index.name} names: {listed(absent)}")
    tensors = []
    for file in files:
        found = read_safetensors(folder / file)
        named = {name for name, where in weight_map.items() if where == file}
        if named - found.keys():
            raise CheckpointError(
                f"{folder / file} lacks tensors that {index.name} names: {listed(named - found.keys())}"
            )
        if found.keys() - named:
            unnamed = listed(found.keys() - named)
            raise CheckpointError(f"{folder / file}: tensors that {index.name} does not name: {unnamed}")
        tensors.extend(found.values())
    return tensors


def _canonical(tensors: list[StoredTensor], family: Family) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name.endswith(_BUFFERS):
            continue
        name = family.canonical_hf_name(tensor.name)
        if name in stored:
            raise CheckpointError(f"{tensor.file}: {tensor.name} and {stored[name].name} are the same parameter")
        stored[name] = tensor
    return stored


def _settle_head(stored: Mapping[str, StoredTensor], family: Family, *, tied: bool) -> Mapping[str, StoredTensor]:
    """Tied: the embedding serves whatever the file holds as the head; if only the head was kept, that one serves."""
    if not tied:
        return stored
    head, embedding = family.weights["head/kernel"].hf, family.weights["embed/embedding"].hf
    rest = {name: tensor for name, tensor in stored.items() if name != head}
    if embedding not in rest and head in stored:
        rest[embedding] = stored[head]
    return rest
