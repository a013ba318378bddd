"""A converted model: a folder with its config and tokenizer as JSON and its parameters as an orbax checkpoint."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp

from specinfer_jax.checkpoint.assign import StoredTensor, assign_params, flat_paths, wanted_shapes
from specinfer_jax.checkpoint.disk import clear_disk_errors, flush_to_disk, full_disk
from specinfer_jax.checkpoint.hf_safetensors import read_json
from specinfer_jax.checkpoint.resolve import CONVERTED_FILE
from specinfer_jax.errors import CheckpointError
from specinfer_jax.models.config import ModelConfig, RopeConfig
from specinfer_jax.models.transformer import Params
from specinfer_jax.parallel.weights import WeightPlacement

_FORMAT_VERSION = 1
_PARAMS = "params"
# Parameters are restored in groups of about this size: one by one takes 0.03 s each, all at once twice the memory.
_GROUP_BYTES = 64 << 20


def save(folder: Path, params: Params, config: ModelConfig, *, tokenizer_files: Mapping[str, bytes]) -> None:
    """Write a model folder that loads without the file it was made from; it appears whole or not at all.

    Args:
      folder: must not exist, or be empty.
      params: the parameter tree; kept in the dtype it has.
      config: what the parameters belong to.
      tokenizer_files: file name -> content, written beside the config (`tokenizer.json`, `tokenizer_config.json`, ...).

    Raises:
      CheckpointError: the folder exists already, cannot be written, or the disk is full.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already; name a new folder")
    for name in tokenizer_files:
        if Path(name).name != name or name in (CONVERTED_FILE, _PARAMS):
            raise CheckpointError(f"{name!r} cannot be the name of a tokenizer file")
    folder = folder.absolute()
    scratch = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    with clear_disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left_over in folder.parent.glob(f".{folder.name}.partial-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            scratch.mkdir()
            _write(scratch, params, config, tokenizer_files)
            os.rename(scratch, folder)
            flush_to_disk(folder.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _write(folder: Path, params: Params, config: ModelConfig, tokenizer_files: Mapping[str, bytes]) -> None:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / _PARAMS, params)
            checkpointer.wait_until_finished()
    except Exception as error:  # tensorstore reports a full disk as a ValueError
        if "No space left on device" in str(error):
            raise full_disk(folder.parent) from None
        raise
    header = {"format": "specinfer_jax", "version": _FORMAT_VERSION, "config": dataclasses.asdict(config)}
    files = {**tokenizer_files, CONVERTED_FILE: (json.dumps(header, indent=2) + "\n").encode()}
    for name, content in files.items():
        (folder / name).write_bytes(content)
        flush_to_disk(folder / name)
    flush_to_disk(folder)


def read_config(folder: Path) -> ModelConfig:
    """The config of a converted model.

    Raises:
      CheckpointError: the folder is not a converted model, or one of another version of this project.
    """
    path = folder / CONVERTED_FILE
    header = read_json(path)
    if header.get("version") != _FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has version {header.get('version')!r} and {_FORMAT_VERSION} is needed; convert the model again"
        )
    try:
        fields: dict[str, Any] = {**cast(Mapping[str, Any], header["config"])}
        rope = fields.pop("rope")
        eos = tuple(fields.pop("eos_token_ids"))
        return ModelConfig(**fields, rope=None if rope is None else RopeConfig(**rope), eos_token_ids=eos)
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} does not describe a model; convert the model again") from None


def load_params(folder: Path, config: ModelConfig, *, dtype: Any, placement: WeightPlacement | None = None) -> Params:
    """Restore the parameters of a converted model.

    Args:
      folder: what `save` wrote.
      config: what `read_config` made of the same folder.
      dtype: float32, bfloat16 or float16; bits are kept where the folder has the same dtype.
      placement: where each part goes; None: everything to the default device.

    Returns:
      Nested dict of arrays.

    Raises:
      CheckpointError: parameters are missing, surplus, mis-shaped or damaged; a value overflows `dtype`.
    """
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restorer = _Restorer(folder / _PARAMS, checkpointer)
        stored = restorer.stored_tensors()
        shapes = wanted_shapes(config, stored, folder)
        return assign_params(shapes, stored, name_of=lambda path: path, dtype=dtype, source=folder, placement=placement)


class _Restorer:
    """Reads an orbax tree group by group, in the order in which its leaves are asked for."""

    def __init__(self, path: Path, checkpointer: ocp.Checkpointer):
        self.path, self.checkpointer = path.absolute(), checkpointer
        try:
            metadata: Any = checkpointer.metadata(self.path)
            self.tree = metadata.item_metadata.tree
            leaves = flat_paths(self.tree)
        except Exception:  # orbax and tensorstore raise many kinds
            raise self.damaged() from None
        self.groups: list[list[str]] = []
        size = _GROUP_BYTES
        for name, leaf in leaves:
            if size >= _GROUP_BYTES:
                self.groups.append([])
                size = 0
            self.groups[-1].append(name)
            size += int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        self.shapes = {name: tuple(leaf.shape) for name, leaf in leaves}
        self.restored: dict[str, np.ndarray] = {}

    def damaged(self) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or incomplete; convert the model again")

    def stored_tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(self.path, name, shape, lambda name=name: self.take(name))
            for name, shape in self.shapes.items()
        }

    def take(self, name: str) -> np.ndarray:
        if name not in self.restored:
            self.restored = self.restore(next(set(group) for group in self.groups if name in group))
        return self.restored.pop(name)

    def restore(self, names: set[str]) -> dict[str, np.ndarray]:
        def wanted(path: tuple[Any, ...], leaf: Any) -> Any:
            return leaf if jax.tree_util.keystr(path, simple=True, separator="/") in names else ocp.PLACEHOLDER

        item = jax.tree_util.tree_map_with_path(wanted, self.tree)
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), self.tree)
        try:
            tree = self.checkpointer.restore(self.path, args=ocp.args.PyTreeRestore(item=item, restore_args=as_numpy))
        except Exception:  # orbax and tensorstore raise many kinds
            raise self.damaged() from None
        return {name: leaf for name, leaf in flat_paths(tree) if name in names}
