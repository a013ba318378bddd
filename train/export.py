"""From a training run to a model: a full Hugging Face folder that this project and transformers both load.

python -m train.export out/ssm --out out/ssm-hf

A reduced head cannot be written in that layout, where every id has a row and no row a bias: whatever stood in the rows
of the other ids would get probability. If the head was only cut out of the source's and not trained, the source's
whole head is written (the logits of the reduced head's ids are the same); if it was trained, the export is refused,
and `open_trained` gives the model with its reduced head, as `Speculation(ssms=[...])` takes it.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specinfer_jax.checkpoint.assign import flat_paths, weight_dtype
from specinfer_jax.checkpoint.disk import check_free_space, clear_disk_errors, flush_to_disk
from specinfer_jax.checkpoint.hf_safetensors import SINGLE_FILE
from specinfer_jax.checkpoint.resolve import find_ssm_folder
from specinfer_jax.errors import CheckpointError, ConfigError, SpecInferError
from specinfer_jax.models.config import ModelConfig, RopeConfig
from specinfer_jax.models.families import FAMILIES
from specinfer_jax.opened import Model, open_model, open_ssm
from train.checkpoints import FOLDER, Checkpoints
from train.initial import make_start
from train.parts import merge_params
from train.run_file import RUN_FILE, VOCABULARY, read_run
from train.settings import TrainSettings, settings_from
from train.step import initial_state

_ACTIVATIONS = {"silu": "silu", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Opened(NamedTuple):
    """A trained model as a run left it."""

    model: Model
    """The SSM, float32; its head is reduced where the run's was."""
    trained: Any
    """The trained parameters alone."""
    settings: TrainSettings
    """Of the run."""
    step: int
    """Batches applied."""


def open_trained(
    folder: Path, *, step: int | None = None, source: Model | None = None, has_full_head: bool = False
) -> Opened:
    """The model of a run's checkpoint.

    Args:
      folder: of `train.distill`, or of one round of `train.boost`.
      step: which checkpoint; None: the newest.
      source: what the run's `init.source` names, if it is loaded already, in float32.
      has_full_head: give a head that was reduced and not trained back its source's other rows.

    Raises:
      ConfigError: the folder holds no run, or a full head is asked for and the reduced one was trained.
      CheckpointError: it holds no such checkpoint.
    """
    run = read_run(folder)
    settings = settings_from(run["settings"], str(folder))
    vocabulary = run["compared"][VOCABULARY]
    if has_full_head and vocabulary is not None:
        if "head" in settings.init.train:
            raise ConfigError(
                f"{folder} trained a head of {len(vocabulary)} ids, and a Hugging Face folder must have one row for "
                'each id of the vocabulary. Train with init.vocabulary = 0, or without "head" in init.train, to '
                "export; train.export.open_trained(FOLDER).model is an SSM for Speculation as it is"
            )
        vocabulary = None
    source = source or open_finished(settings.init.source, settings.llm)
    start = make_start(settings.init, settings.llm, vocabulary=vocabulary, seed=settings.run.seed, source=source)
    if not (folder / FOLDER).is_dir():
        raise CheckpointError(f"{folder} holds no checkpoint yet")
    with Checkpoints(folder, keep=1, read_only=True) as checkpoints:
        template = jax.eval_shape(lambda: initial_state(start.trained, settings))
        restored = checkpoints.restore(template, step=step)
    if restored is None:
        raise CheckpointError(f"{folder} holds no checkpoint yet")
    trained = jax.tree.map(jnp.asarray, restored.tree.params)
    model = start.model._replace(params=merge_params(trained, start.frozen), location=str(folder))
    return Opened(model, trained, settings, restored.step)


def open_finished(name: str | os.PathLike[str], llm: str | Model) -> Model | None:
    """An SSM that training has made already, float32; None if the name is of something else.

    Args:
      name: folder of a run, folder of `train.pack`, or an SSM that ships (specinfer_jax/ssms).
      llm: the model that it was made for.
    """
    if (Path(name) / RUN_FILE).is_file():
        return open_trained(Path(name)).model
    if find_ssm_folder(name) is None:
        return None
    float32 = jnp.dtype(jnp.float32)
    return open_ssm(name, llm if isinstance(llm, Model) else open_model(llm, dtype=float32), dtype=float32)


def save_hf_folder(folder: Path, model: Model, *, dtype: Any = "float32") -> None:
    """Write config.json, model.safetensors and the tokenizer's files; the folder appears whole or not at all.

    Args:
      folder: must not exist, or be empty.
      model: with a full head.
      dtype: float32, bfloat16 or float16, of all weights.

    Raises:
      CheckpointError: the folder exists, cannot be written, or the disk is full.
      ConfigError: a model that Hugging Face's config.json cannot describe.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already; name a new folder")
    dtype = weight_dtype(dtype)
    config = {**hf_config(model.config), "torch_dtype": dtype.name}
    family = FAMILIES[model.config.family]
    tensors = {family.weight_name(path).hf: leaf for path, leaf in flat_paths(model.params)}
    files = model.tokenizer.save_files()
    tokenizer_config = {
        **json.loads(files["tokenizer_config.json"]),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position,
    }
    files |= {"tokenizer_config.json": _json(tokenizer_config), "config.json": _json(config)}

    folder = folder.absolute()
    scratch = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    with clear_disk_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_free_space(folder.parent, sum(leaf.size for leaf in tensors.values()) * dtype.itemsize)
        try:
            scratch.mkdir()
            _write_safetensors(scratch / SINGLE_FILE, tensors, dtype)
            for name, content in files.items():
                (scratch / name).write_bytes(content)
            for path in (*scratch.iterdir(), scratch):
                flush_to_disk(path)
            if folder.exists():
                folder.rmdir()
            os.rename(scratch, folder)
            flush_to_disk(folder.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json from which `config_from_hf` makes this config again.

    Raises:
      ConfigError: the family has no fields for it (a reduced head, biases in unusual places).
    """
    if config.output_vocab_size is not None:
        raise ConfigError("a reduced head cannot be written to a Hugging Face folder")
    eos = list(config.eos_token_ids)
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }
    return shared | (_opt_fields(config) if config.family == "opt" else _llama_fields(config))


def _llama_fields(config: ModelConfig) -> dict[str, Any]:
    kind = config.family if config.sliding_window is None or config.family != "llama" else "mistral"
    is_expressible = config.qkv_bias if kind == "qwen2" else config.qkv_bias == config.out_bias
    if not is_expressible or (kind != "llama" and (config.out_bias or config.mlp_bias)):
        raise ConfigError(f"config.json of a {kind} has no fields for this model's biases")
    fields: dict[str, Any] = {
        "architectures": [{"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[kind] + "ForCausalLM"],
        "model_type": kind,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _ACTIVATIONS[config.activation],
    }
    if kind == "llama":
        fields |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if kind == "mistral":
        fields["sliding_window"] = config.sliding_window
    if kind == "qwen2":
        fields |= {"use_sliding_window": config.sliding_window is not None, "max_window_layers": 0}
        fields |= {} if config.sliding_window is None else {"sliding_window": config.sliding_window}
    return fields | _rope_fields(config.rope or RopeConfig())


def _rope_fields(rope: RopeConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.rope_type == "default":
        return fields
    scaling: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type in ("linear", "dynamic"):
        fields["max_position_embeddings"] = rope.original_max_position  # the factor stretches it again
    else:
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.rope_type == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.rope_type == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {"attention_factor", "mscale", "mscale_all_dim"}
        scaling |= {name: getattr(rope, name) for name in sorted(optional) if getattr(rope, name) is not None}
    return {**fields, "rope_scaling": scaling}


def _opt_fields(config: ModelConfig) -> dict[str, Any]:
    if not config.qkv_bias == config.out_bias == config.mlp_bias:
        raise ConfigError("config.json of an OPT has no fields for this model's biases")
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": config.mlp_width,
        "max_position_embeddings": config.max_position,
        "word_embed_proj_dim": config.embed_width or config.width,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": config.norm_first and not config.final_norm,
        "enable_bias": config.mlp_bias,
        "activation_function": _ACTIVATIONS[config.activation],
        "dropout": 0.0,
        "pad_token_id": 1,
    }


def _write_safetensors(path: Path, tensors: Mapping[str, Any], dtype: np.dtype) -> None:
    """A safetensors file, tensor after tensor; transformers looks for {"format": "pt"}."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, leaf in tensors.items():
        end = offset + leaf.size * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype.name], "shape": list(leaf.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, leaf in tensors.items():
            values = np.asarray(leaf).astype(dtype)
            if not np.isfinite(values.astype(np.float32)).all():
                raise CheckpointError(f"{name} holds values that {dtype.name} cannot hold; export as float32")
            file.write(values.tobytes())


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2, ensure_ascii=False).encode()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.export", description="Write a trained SSM as an HF folder.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of train.distill")
    parser.add_argument("--out", type=Path, required=True, metavar="HF_FOLDER", help="must not exist, or be empty")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--dtype", default="float32", choices=tuple(_DTYPE_NAMES), help="of the weights written")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Export."""
    options = parse_arguments(arguments)
    try:
        opened = open_trained(options.folder, step=options.step, has_full_head=True)
        save_hf_folder(options.out, opened.model, dtype=options.dtype)
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"wrote {options.out}: step {opened.step} of {options.folder}")


if __name__ == "__main__":
    main()
