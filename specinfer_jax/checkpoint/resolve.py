"""From what a user wrote to a model on this machine: a known name, a folder, a .gguf file or a hub id. Free of jax."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import platformdirs

from specinfer_jax.checkpoint.disk import full_disk, is_full
from specinfer_jax.checkpoint.fetch import fetch, is_intact
from specinfer_jax.checkpoint.known_models import KNOWN_MODELS, KnownModel
from specinfer_jax.errors import CheckpointError, ModelNotFoundError

MODEL_DIR_VARIABLE = "SPECINFER_MODEL_DIR"
CONVERTED_FILE = "specinfer.json"
"""Marks the folder of a converted model."""

SSM_FILE = "ssm.json"
"""Marks the folder of an SSM that shares its LLM's arrays (ssm_folder.py)."""
SHIPPED_SSMS = Path(__file__).parent.parent / "ssms"
"""SSMs that come with the package, a folder each."""

ModelFormat = Literal["hf", "gguf", "orbax"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt", "model*.safetensors",
    "model.safetensors.index.json",
)  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def find_ssm_folder(name: str | os.PathLike[str]) -> Path | None:
    """The folder of a shipped SSM, or `name` itself if it is such a folder; None for anything else."""
    candidates = [Path(name)] if os.sep in os.fspath(name) else [SHIPPED_SSMS / name, Path(name)]
    return next((path for path in candidates if (path / SSM_FILE).is_file()), None)


def resolve(name: str | os.PathLike[str]) -> Path:
    """The model's folder or file, fetched first where it is not on this machine.

    A known name wins over a folder of the same name in the current directory (write `./NAME` for that one); an existing
    path wins over a hub id.

    Args:
      name: known name, model folder, .gguf file, or `organisation/model` of the Hugging Face hub.

    Returns:
      An existing folder or file whose format `location_format` tells.

    Raises:
      ModelNotFoundError: it is none of these, or the hub does not have it or cannot be reached.
      CheckpointError: a path that holds no model, or a download that failed.
    """
    text = os.fspath(name)
    if text in KNOWN_MODELS:
        return fetch(KNOWN_MODELS[text], model_folder())
    path = Path(text).expanduser()
    if text and os.path.exists(path):  # unlike Path.exists, False for names too long to be a file's
        location_format(path)
        return path
    if isinstance(name, os.PathLike) or _is_written_as_path(text):
        raise ModelNotFoundError(f"there is no file or folder {path}")
    if _HUB_ID.fullmatch(text):
        return _from_hub(text)
    raise ModelNotFoundError(
        f"unknown model {text!r}; known names are {', '.join(KNOWN_MODELS)}, "
        "and a model folder, a .gguf file or a hub id (organisation/model) will do"
    )


def cached_path(name: str) -> Path | None:
    """The file of a known model if it is in the cache folder, whole; never fetches."""
    if name not in KNOWN_MODELS:
        raise ModelNotFoundError(f"unknown model {name!r}; known names are {', '.join(KNOWN_MODELS)}")
    path = model_folder() / KNOWN_MODELS[name].file_name
    return path if is_intact(path, KNOWN_MODELS[name]) else None


def known_models() -> tuple[KnownModel, ...]:
    """The models that have a name of their own, the default first."""
    return tuple(KNOWN_MODELS.values())


def model_folder() -> Path:
    """Where known models are kept: `SPECINFER_MODEL_DIR`, else a folder in the platform's cache folder."""
    chosen = os.environ.get(MODEL_DIR_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("specinfer_jax")) / "models"


def location_format(path: Path) -> ModelFormat:
    """What kind of model an existing file or folder holds.

    Raises:
      ModelNotFoundError: there is nothing at `path`.
      CheckpointError: what is there is no model; the message says what would be one.
    """
    if path.is_dir():
        return _folder_format(path)
    if not path.exists():
        raise ModelNotFoundError(f"there is no file or folder {path}")
    if path.suffix == ".gguf" or _begins_with_gguf(path):
        return "gguf"
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} holds weights only; name its folder, which must hold config.json too")
    if path.suffix in _PICKLES:
        raise CheckpointError(
            f"{path} is a pickle file, which is not read because it can run code; convert the model to safetensors"
        )
    raise CheckpointError(f"{path} is no model; name a .gguf file, or a folder with config.json and model.safetensors")


def _folder_format(folder: Path) -> ModelFormat:
    if (folder / CONVERTED_FILE).is_file():
        return "orbax"
    if (folder / "config.json").is_file():
        return "hf"
    inside = sorted(folder.glob("*.gguf"))
    advice = f"name its GGUF file, {inside[0]}" if inside else "a model folder holds config.json and model.safetensors"
    raise CheckpointError(f"{folder} holds no config.json; {advice}")


def _begins_with_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _is_written_as_path(text: str) -> bool:
    return (
        text.startswith((".", "/", "~", "\\"))
        or text.count("/") > 1
        or text.endswith((".gguf", ".safetensors", *_PICKLES))
    )


def _from_hub(name: str) -> Path:
    """Snapshot of a hub model; what is in the hub's cache already is used without asking the network."""
    # Imported late: it takes 0.2 s, and most runs name no hub model.
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=True))
        if _is_complete(folder):
            return folder
    except (LocalEntryNotFoundError, OSError, ValueError):
        pass  # not here yet
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except GatedRepoError:
        raise ModelNotFoundError(f"hub model {name} needs permission: ask for it there, then `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(f"the hub has no model {name} (or it is private and needs `hf auth login`)") from None
    except Exception as error:  # the hub's network layer changed its exceptions between versions
        if is_full(error):
            raise full_disk(Path(HF_HUB_CACHE)) from None
        raise ModelNotFoundError(
            f"hub model {name} is not on this machine and the hub cannot be reached ({type(error).__name__})"
        ) from None
    if not _is_complete(folder):
        raise ModelNotFoundError(f"hub model {name} has no config.json with model.safetensors beside it")
    return folder


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    if (folder / "model.safetensors").is_file():
        return True
    return _all_present(folder, _shard_names(folder / "model.safetensors.index.json"))


def _all_present(folder: Path, files: Iterable[str]) -> bool:
    files = set(files)
    return bool(files) and all((folder / file).is_file() for file in files)


def _shard_names(index: Path) -> set[str]:
    if not index.is_file():
        return set()
    return set(re.findall(r'"(model[^"/\\]*\.safetensors)"', index.read_text(encoding="utf-8")))
