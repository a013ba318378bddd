"""`specinfer pull | info | convert`: model files."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from specinfer_jax.checkpoint.known_models import KNOWN_MODELS
from specinfer_jax.checkpoint.resolve import location_format, resolve
from specinfer_jax.cli.options import ConfigFiles, DTypeName, changed, read_configs
from specinfer_jax.cli.screen import busy, models_to_fetch, open_model
from specinfer_jax.config import DEFAULT_MODEL, LLMConfig
from specinfer_jax.errors import CheckpointError

if TYPE_CHECKING:
    from specinfer_jax.models.config import ModelConfig
    from specinfer_jax.tokenizer import Tokenizer

Name = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help=f"Known name, folder, .gguf file or hub id. [default: {DEFAULT_MODEL}]"),
]


def pull(model: Name = None, config_files: ConfigFiles = None) -> None:
    """Fetch a model, and the SSMs of a --config file, so that later runs need no network.

    Example: `specinfer pull smollm2-135m-instruct`
    """
    config = changed(read_configs(config_files, LLMConfig()), model=model)
    for name in models_to_fetch(config) if model is None else [config.model]:
        print(f"{name}: {resolve(name)}")


def info(model: Name = None, config_files: ConfigFiles = None, dtype: DTypeName = None) -> None:
    """Show what a model is: architecture, parameters, sizes, tokenizer, licence, and where it lies.

    Example: `specinfer info smollm2-135m-instruct`
    """
    settings = changed(read_configs(config_files, LLMConfig()), model=model, dtype=dtype)
    path = resolve(settings.model)
    rows = busy(f"reading {path.name}", lambda: _info_rows(settings.model, path, settings.dtype))
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Known name, folder, .gguf file or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist, or be empty.")],
    config_files: ConfigFiles = None,
    dtype: DTypeName = None,
) -> None:
    """Write a model as an orbax folder that loads without the file it came from, tokenizer included.

    Example: `specinfer convert model.gguf ./converted --dtype bfloat16`
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):  # before the model is loaded
        raise CheckpointError(f"{out} exists already; name a new folder")
    loaded = open_model(changed(read_configs(config_files, LLMConfig()), model=model, dtype=dtype))
    from specinfer_jax.checkpoint.orbax_io import save

    # In this thread: an interrupted save removes what it wrote.
    save(out, loaded.params, loaded.config, tokenizer_files=loaded.tokenizer.save_files())
    print(f"wrote {out} ({_bytes(_size_on_disk(out))})")


def _info_rows(name: str, path: Path, dtype_name: str) -> list[tuple[str, str]]:
    """Everything that is known without reading a weight."""
    import jax

    from specinfer_jax.checkpoint.load import read_config
    from specinfer_jax.models.kv_cache import cache_bytes
    from specinfer_jax.models.transformer import param_shapes
    from specinfer_jax.opened import choose_dtype

    config, dtype = read_config(path), choose_dtype(dtype_name)
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(param_shapes(config)))
    per_token = cache_bytes(config, num_slots=1, max_model_len=1, page_size=1, itemsize=dtype.itemsize)
    known = KNOWN_MODELS.get(name)
    described = [("description", known.description), ("licence", known.licence)] if known else []
    return [
        ("model", name),
        *described,
        ("where", str(path)),
        ("format", f"{location_format(path)}, {_bytes(_size_on_disk(path))} on disk"),
        *_config_rows(config),
        ("parameters", f"{parameters:,} ({_bytes(parameters * dtype.itemsize)} in {dtype.name})"),
        ("cache per token", f"{per_token:,} bytes ({_bytes(per_token * config.max_position)} for the whole context)"),
        ("tokenizer", _describe_tokenizer(_tokenizer(path))),
    ]


def _config_rows(config: "ModelConfig") -> list[tuple[str, str]]:
    heads = f"{config.num_heads} query heads, {config.num_kv_heads} key/value heads of size {config.head_size}"
    window = f", attention window {config.sliding_window:,}" if config.sliding_window else ""
    return [
        ("family", config.family),
        ("layers", str(config.num_layers)),
        ("width", f"{config.width}, MLP {config.mlp_width}"),
        ("attention", heads),
        ("vocabulary", f"{config.vocab_size:,}{', head tied to the embedding' if config.tied_head else ''}"),
        ("context", f"{config.max_position:,} tokens{window}"),
        ("positions", _describe_positions(config)),
    ]


def _describe_positions(config: "ModelConfig") -> str:
    if config.rope is None:
        return "learned"
    defaults = type(config.rope)()
    differing = {
        field.name: getattr(config.rope, field.name)
        for field in dataclasses.fields(config.rope)
        if field.name not in ("rope_type", "original_max_position")
        and getattr(config.rope, field.name) != getattr(defaults, field.name)
    }
    return ", ".join([f"rope {config.rope.rope_type}", *(f"{name} {value:g}" for name, value in differing.items())])


def _tokenizer(path: Path) -> "Tokenizer":
    from specinfer_jax.checkpoint.gguf_header import open_gguf
    from specinfer_jax.tokenizer import Tokenizer

    if location_format(path) == "gguf":
        return Tokenizer.from_gguf(open_gguf(path).metadata)
    return Tokenizer.from_hf_folder(path)


def _describe_tokenizer(tokenizer: "Tokenizer") -> str:
    ends = ", ".join(f"{tokenizer.token_piece(i)} ({i})" for i in sorted(tokenizer.eos_token_ids)) or "none"
    template = "with" if tokenizer.chat_template is not None else "without"
    kind = type(tokenizer.backend.model).__name__
    return f"{kind}, {tokenizer.vocab_size:,} tokens, ends at {ends}, {template} chat template"


def _size_on_disk(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _bytes(count: int) -> str:
    """Decimal units, as file managers show them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
