"""Models as they are opened: by name, folder or hub id, with their tokenizer; SSMs that share an LLM's arrays."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specinfer_jax.checkpoint.load import LoadedModel, load_model
from specinfer_jax.checkpoint.resolve import find_ssm_folder, resolve
from specinfer_jax.checkpoint.ssm_folder import SsmFolder, read_ssm
from specinfer_jax.config import SamplingParams
from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.parallel.weights import DEVICE, WeightPlacement, stored_views
from specinfer_jax.tokenizer import Tokenizer
from specinfer_jax.tree.rates import AcceptanceRates


class Model(NamedTuple):
    """A loaded model with its tokenizer; also accepted as an SSM in `Speculation(ssms=[...])`."""

    config: ModelConfig
    """What it computes."""
    params: Any
    """Parameter tree."""
    tokenizer: Tokenizer
    """Its tokenizer."""
    location: str
    """Where it came from, for messages."""
    acceptance: AcceptanceRates | None = None
    """As an SSM, measured beforehand; None: unknown."""
    placement: WeightPlacement | None = None
    """How the parameters lie on a mesh; None: whole, on the default device. The config is the stored one either way."""

    def first_layers(self, num_layers: int) -> "Model":
        """The same model cut off after its first layers, sharing all arrays; a cheap SSM to experiment with."""
        if not 1 <= num_layers <= self.config.num_layers:
            raise ConfigError(f"num_layers must lie between 1 and {self.config.num_layers}, got {num_layers}")
        kept = {f"layers_{l}" for l in range(num_layers)} | {"embed", "head", "output_ids"}
        return self._replace(
            config=dataclasses.replace(self.config, num_layers=num_layers),
            params={name: value for name, value in self.params.items() if name in kept},
            location=f"first {num_layers} layers of {self.location}",
            acceptance=None,
        )

    def with_reduced_head(self, token_ids: Sequence[int]) -> "Model":
        """The same model with a head for these ids alone: a cheaper SSM that proposes nothing else.

        Raises:
          ConfigError: no ids, ids outside the vocabulary, or an id twice.
        """
        ids, V = np.asarray(token_ids), self.config.vocab_size
        if ids.size == 0 or len(set(ids.tolist())) != ids.size or ids.min() < 0 or ids.max() >= V:
            raise ConfigError(f"token_ids must be different ids between 0 and {V - 1}, at least one")
        if self.config.output_vocab_size is not None:
            raise ConfigError("the model's head is reduced already")
        if self.placement is not None:
            raise ConfigError("the head of a model on a mesh cannot be reduced; load it without a mesh")
        head = dict(self.params["head"])
        full_VE = self.params["embed"]["embedding"] if self.config.tied_head else head["kernel"]
        head["kernel"] = full_VE[ids]
        return self._replace(
            config=dataclasses.replace(self.config, tied_head=False, output_vocab_size=ids.size),
            params={**self.params, "head": head, "output_ids": jnp.asarray(ids, jnp.int32)},
            location=f"{self.location} with a head of {ids.size} ids",
            acceptance=None,
        )

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Ids that end a request: the model's own unless they are ignored, and those asked for."""
        own = () if params.ignore_eos else (*self.config.eos_token_ids, *self.tokenizer.eos_token_ids)
        return frozenset((*own, *params.stop_token_ids))


def open_model(
    name: str | os.PathLike[str], *, dtype: jnp.dtype, mesh: Mesh | None = None, memory: str = DEVICE
) -> Model:
    """Resolve, load, and find the tokenizer of a model given by name, path or hub id.

    `mesh`, `memory`: as `parallel.weights.find_mesh` returns them; each device loads its part alone.
    """
    path = resolve(name)
    loaded = load_model(path, dtype=dtype, mesh=mesh, memory=memory)
    placement = None if mesh is None else WeightPlacement(mesh, loaded.config, memory)
    return Model(loaded.config, loaded.params, tokenizer_of(loaded), str(name), placement=placement)


def open_ssm(
    name: str | os.PathLike[str], llm: Model, *, dtype: jnp.dtype, opened: dict[Path, SsmFolder] | None = None
) -> Model:
    """An SSM by name or path: one made for this LLM, which shares its arrays, or any model with its vocabulary.

    Args:
      name: of a shipped SSM, or as for `open_model`.
      llm: its LLM.
      dtype: of its own parameters.
      opened: as for `read_ssm`.

    Raises:
      CheckpointError: it was made for another LLM, or is damaged.
      ModelNotFoundError, TokenizerError: as `open_model`.
    """
    folder = find_ssm_folder(name)
    if folder is None:
        return open_model(name, dtype=dtype)
    found = read_ssm(folder, stored_params(llm), dtype=dtype, opened=opened)
    acceptance = None if found.acceptance is None else AcceptanceRates.from_dict(found.acceptance)
    return Model(found.config, found.params, llm.tokenizer, str(name), acceptance)


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The tokenizer beside a loaded model."""
    if loaded.gguf_metadata is not None:
        return Tokenizer.from_gguf(loaded.gguf_metadata)
    return Tokenizer.from_hf_folder(loaded.source)


def choose_dtype(name: str) -> jnp.dtype:
    """The dtype of weights and caches; "auto" asks the default device."""
    if name != "auto":
        return jnp.dtype(name)
    device = jax.devices()[0]
    if device.platform == "cpu":
        return jnp.dtype(jnp.float32)
    if device.platform in ("gpu", "cuda"):
        capability = float(getattr(device, "compute_capability", "8.0"))
        return jnp.dtype(jnp.bfloat16 if capability >= 8.0 else jnp.float16)
    return jnp.dtype(jnp.bfloat16)


def choose_max_model_len(config: ModelConfig, asked: int | None) -> int:
    """Most tokens of one request; a window of attention counts as the model's limit, since windows are not computed."""
    longest = min(config.max_position, config.sliding_window or config.max_position)
    if asked is not None and asked > longest:
        window = " (the length of its attention window)" if longest == config.sliding_window else ""
        raise ConfigError(f"max_model_len {asked} exceeds the model's {longest} tokens{window}")
    return asked or longest


def stored_params(model: Model) -> Any:
    """Parameters as their files hold them; those of a model on a mesh are gathered when they are looked at."""
    return model.params if model.placement is None else stored_views(model.params, model.placement)
