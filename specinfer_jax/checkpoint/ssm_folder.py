"""An SSM as it ships: only what differs from its LLM, in 8 bits, in a folder of two files.

    ssm.json        what the SSM computes, which LLM it belongs to, where each parameter comes from, acceptance rates
    weights.npz     the parameters that are its own

A parameter is the array of the LLM or of another SSM beside it (shared, not copied), rows of the LLM's embedding (a
reduced head that was not tuned), or stored: matrices as int8 with one float32 scale a row, everything else as float32.
"""

import dataclasses
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int8

from specinfer_jax.checkpoint.resolve import SHIPPED_SSMS, SSM_FILE
from specinfer_jax.errors import CheckpointError
from specinfer_jax.models.config import ModelConfig, RopeConfig
from specinfer_jax.models.transformer import Params

WEIGHTS_FILE = "weights.npz"
FORMAT = 1
_PROBE_VALUES = 32


def shipped_for(llm_params: Params) -> list[Path]:
    """Folders of the shipped SSMs that this LLM takes by default, in order of their names.

    Those made for it that stand alone: what was boosted upon another SSM, and shares arrays with it, is taken by name.
    """
    probe = _probe(np.asarray(llm_params["embed"]["embedding"]))
    folders = sorted(file.parent for file in SHIPPED_SSMS.glob(f"*/{SSM_FILE}"))
    told = {folder: _read_json(folder / SSM_FILE) for folder in folders}
    return [folder for folder in folders if _is_same_llm(probe, told[folder]) and not _shared_ssms(told[folder])]


class SsmFolder(NamedTuple):
    """What `read_ssm` returns."""

    config: ModelConfig
    """What the SSM computes."""
    params: Params
    """Its parameters; those of the LLM are the same arrays."""
    acceptance: Any
    """Acceptance by depth and rank as written, None if it was not measured."""


def quantise(x_OI: Float[np.ndarray, "O I"]) -> tuple[Int8[np.ndarray, "O I"], Float[np.ndarray, " O"]]:
    """int8 `[O, I]` and float32 scales `[O]`: the largest magnitude of a row becomes 127."""
    scale_O = np.abs(x_OI).max(axis=1).astype(np.float32) / 127
    q_OI = np.rint(x_OI / np.where(scale_O > 0, scale_O, 1)[:, None])
    return q_OI.astype(np.int8), scale_O


def write_ssm(
    folder: Path, config: ModelConfig, params: Params, *,
    llm_name: str, llm_params: Params, acceptance: Any = None, beside: Mapping[str, Params] | None = None,
) -> int:  # fmt: skip
    """Write an SSM beside its LLM; parameters that equal one of the LLM's are stored as a reference.

    Args:
      folder: made if missing; files in it are replaced.
      config: what the SSM computes.
      params: its parameter tree.
      llm_name: the LLM's name, for messages.
      llm_params: the LLM's parameter tree.
      acceptance: anything JSON can hold.
      beside: parameter trees, as they were given to this function, of SSMs in the same parent folder, by folder name;
        parameters that equal one of theirs are references too.

    Returns:
      Bytes of both files.
    """
    elsewhere = {_key(leaf): (f"llm:{path}", leaf) for path, leaf in reversed(list(_leaves(llm_params)))}
    for name, other in (beside or {}).items():
        elsewhere = {_key(leaf): (f"ssm:{name}:{path}", leaf) for path, leaf in _leaves(other)} | elsewhere
    embedding = np.asarray(llm_params["embed"]["embedding"])
    sources: dict[str, str] = {}
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in _leaves(params):
        x = np.asarray(leaf)
        shared = elsewhere.get(_key(x))
        if shared is not None and np.array_equal(x, shared[1]):
            sources[path] = shared[0]
        elif path == "head/kernel" and _are_rows(x, embedding, params.get("output_ids")):
            sources[path] = "llm rows"
        elif x.ndim == 2:
            sources[path] = "int8"
            arrays[path], arrays[f"{path}/scale"] = quantise(np.asarray(x, np.float32))
        else:
            sources[path] = "stored"
            arrays[path] = x.astype(np.int32 if np.issubdtype(x.dtype, np.integer) else np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "format": FORMAT, "llm": llm_name, "llm_probe": _probe(embedding), "config": dataclasses.asdict(config),
        "sources": sources, "acceptance": acceptance,
    }  # fmt: skip
    (folder / SSM_FILE).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    np.savez_compressed(folder / WEIGHTS_FILE, **arrays)  # pyright: ignore[reportArgumentType]
    return sum((folder / name).stat().st_size for name in (SSM_FILE, WEIGHTS_FILE))


def read_ssm(
    folder: Path, llm_params: Params, *, dtype: DTypeLike, opened: dict[Path, SsmFolder] | None = None
) -> SsmFolder:
    """Read an SSM written by `write_ssm`; shared parameters are the LLM's arrays themselves.

    Args:
      folder: of the SSM.
      llm_params: of its LLM.
      dtype: of parameters that are its own.
      opened: SSMs read before, to which this one is added; with them it shares arrays too.

    Raises:
      CheckpointError: files are missing or damaged, of a newer format, or the LLM is another one.
    """
    opened = {} if opened is None else opened
    if folder.absolute() in opened:
        return opened[folder.absolute()]
    told = _read_json(folder / SSM_FILE)
    if told.get("format") != FORMAT:
        raise CheckpointError(f"{folder / SSM_FILE} has format {told.get('format')!r}; this version reads {FORMAT}")
    embedding = llm_params["embed"]["embedding"]
    if not _is_same_llm(_probe(np.asarray(embedding)), told):
        raise CheckpointError(f"the SSM in {folder} was made for {told['llm']}; its weights are not this LLM's")
    elsewhere = {f"llm:{path}": leaf for path, leaf in _leaves(llm_params)}
    for name in _shared_ssms(told):
        other = read_ssm(folder.parent / name, llm_params, dtype=dtype, opened=opened)
        elsewhere |= {f"ssm:{name}:{path}": leaf for path, leaf in _leaves(other.params)}
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        flat = {
            path: _read_leaf(path, source, arrays, elsewhere, dtype)
            for path, source in told["sources"].items()
            if source != "llm rows"
        }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE} is missing or damaged: {error}") from None
    if "llm rows" in told["sources"].values():
        flat["head/kernel"] = jnp.asarray(embedding)[flat["output_ids"]]
    found = SsmFolder(_config(told["config"]), _nested(flat), told.get("acceptance"))
    opened[folder.absolute()] = found
    return found


def _read_leaf(
    path: str, source: str, arrays: Mapping[str, np.ndarray], elsewhere: Mapping[str, Any], dtype: DTypeLike
) -> jax.Array:
    if source.startswith(("llm:", "ssm:")):
        return elsewhere[source]
    if source == "int8":
        return jnp.asarray(arrays[path].astype(np.float32) * arrays[f"{path}/scale"][:, None], dtype)
    x = arrays[path]
    return jnp.asarray(x) if np.issubdtype(x.dtype, np.integer) else jnp.asarray(x, dtype)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise CheckpointError(f"{path} holds no table")
    return told


def _config(told: Mapping[str, Any]) -> ModelConfig:
    """The config as `dataclasses.asdict` wrote it, through JSON."""
    values: dict[str, Any] = dict(told)
    if values["rope"] is not None:
        values["rope"] = RopeConfig(**values["rope"])
    values["eos_token_ids"] = tuple(values["eos_token_ids"])
    return ModelConfig(**values)


def _leaves(params: Params, prefix: str = "") -> Any:
    """(path, array) of every parameter, in order."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    tree.setdefault("head", {})
    return tree


def _key(leaf: Any) -> tuple[tuple[int, ...], str, bytes]:
    """Equal for equal arrays, and cheap: a sample of large ones."""
    x = np.asarray(leaf)
    return x.shape, x.dtype.name, x.reshape(-1)[:: max(1, x.size // 2**12)].tobytes()


def _are_rows(x: np.ndarray, embedding: np.ndarray, output_ids: Any) -> bool:
    return output_ids is not None and np.array_equal(x, embedding[np.asarray(output_ids)])


def _shared_ssms(told: Mapping[str, Any]) -> list[str]:
    """Names of the SSMs whose arrays an SSM's file refers to."""
    return sorted({source.split(":")[1] for source in told["sources"].values() if source.startswith("ssm:")})


def _is_same_llm(probe: Sequence[float], told: Mapping[str, Any]) -> bool:
    """Whether an SSM's file tells of the LLM whose embedding gave this probe; other dtypes of it count as the same."""
    wanted = told["llm_probe"]
    return len(probe) == len(wanted) and np.allclose(probe, wanted, rtol=0.02, atol=2e-3)


def _probe(embedding: np.ndarray) -> list[float]:
    """A few numbers by which another LLM is told apart."""
    flat = embedding.reshape(-1)
    return flat[:: max(1, flat.size // _PROBE_VALUES)][:_PROBE_VALUES].astype(np.float32).round(5).tolist()
