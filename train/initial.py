"""What an SSM is before training: layers of the LLM, another model, or random weights; which ids its head knows."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specinfer_jax.checkpoint.gguf_header import open_gguf
from specinfer_jax.checkpoint.load import read_config
from specinfer_jax.checkpoint.resolve import location_format, resolve
from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import config_from_hf
from specinfer_jax.models.transformer import init_params
from specinfer_jax.opened import Model, open_model
from specinfer_jax.tokenizer import Tokenizer
from train.answers import Answer
from train.parts import split_params
from train.settings import FROM_LLM, FROM_SCRATCH, InitSettings


class Described(NamedTuple):
    """A model without its weights."""

    config: ModelConfig
    """What it computes."""
    tokenizer: Tokenizer
    """Its tokenizer."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset((*self.config.eos_token_ids, *self.tokenizer.eos_token_ids))


class Start(NamedTuple):
    """An SSM about to be trained."""

    model: Model
    """The whole of it."""
    trained: dict[str, Any]
    """The parameters that training changes."""
    frozen: dict[str, Any]
    """The others, which are the source's own arrays."""


def describe(name: str) -> Described:
    """Config and tokenizer of a model by name, folder, .gguf file or hub id; reads no weights."""
    path = resolve(name)
    is_gguf = location_format(path) == "gguf"
    tokenizer = Tokenizer.from_gguf(open_gguf(path).metadata) if is_gguf else Tokenizer.from_hf_folder(path)
    return Described(read_config(path), tokenizer)


def make_start(
    settings: InitSettings,
    llm: str,
    *,
    vocabulary: Sequence[int] | None = None,
    seed: int = 0,
    source: Model | None = None,
) -> Start:
    """The SSM that settings describe.

    Args:
      settings: source, layers, trained parts.
      llm: name of the LLM.
      vocabulary: ids of a reduced head, or None (`draft_vocabulary` chooses them).
      seed: of random weights.
      source: the source if it is loaded already, in float32.

    Raises:
      ConfigError: layers that the source does not have, another vocabulary than the LLM's, or parts that do not fit.
      ModelNotFoundError, CheckpointError, TokenizerError: a model cannot be loaded.
    """
    if settings.source == FROM_SCRATCH:
        model = _from_scratch(settings, describe(llm), llm, seed)
    else:
        name = llm if settings.source == FROM_LLM else settings.source
        model = source or open_model(name, dtype=jnp.dtype(jnp.float32))
        if settings.source != FROM_LLM:
            _check_vocabulary(model, describe(llm), llm)
    if settings.layers:
        model = with_layers(model, settings.layers)
    if vocabulary is not None:
        model = model.with_reduced_head(vocabulary)
    if model.config.tied_head and "head" in settings.train and "embed" not in settings.train:
        model = _untied(model)
    trained, frozen = split_params(model.params, settings.train)
    missing = [part for part in settings.train if part != "norm" and not split_params(trained, [part])[0]]
    missing = [part for part in missing if part != "head" or not model.config.tied_head]
    if missing:
        raise ConfigError(f"train names {', '.join(missing)}, which {model.location} does not have")
    return Start(model, trained, frozen)


def with_layers(model: Model, layers: Sequence[int]) -> Model:
    """The same model with these of its layers, in this order, sharing all arrays.

    Raises:
      ConfigError: a layer that it does not have.
    """
    L = model.config.num_layers
    absent = [l for l in layers if not 0 <= l < L]
    if absent:
        raise ConfigError(f"{model.location} has layers 0 to {L - 1}, not {', '.join(map(str, absent))}")
    params = {name: value for name, value in model.params.items() if not name.startswith("layers_")}
    params |= {f"layers_{new}": model.params[f"layers_{old}"] for new, old in enumerate(layers)}
    return model._replace(
        config=dataclasses.replace(model.config, num_layers=len(layers)),
        params=params,
        location=f"layers {', '.join(map(str, layers))} of {model.location}",
    )


def draft_vocabulary(answers: Iterable[Answer], llm: Described, size: int) -> list[int]:
    """Ids for a reduced head, ascending: those that end answers, then the most frequent ones.

    Ids count by how often the LLM wrote them; among equals, and where it wrote fewer different ones, by how often they
    stand in prompts, then the lower id first (in BPE vocabularies the more common one).

    Raises:
      ConfigError: `size` is more than the LLM has ids.
    """
    known = min(llm.config.vocab_size, llm.tokenizer.vocab_size)
    if size > known:
        raise ConfigError(f"vocabulary {size} exceeds the {known} ids of the LLM; 0 keeps them all")
    answers = list(answers)
    written = collections.Counter(i for answer in answers for i in answer.response_ids)
    read = collections.Counter(i for answer in answers for i in answer.prompt_ids)
    always = llm.stop_ids
    order = sorted(range(known), key=lambda i: (i not in always, -written[i], -read[i], i))
    return sorted(order[:size])


def _from_scratch(settings: InitSettings, llm: Described, name: str, seed: int) -> Model:
    fields = {"architectures": None, **settings.model, "vocab_size": llm.config.vocab_size}
    if "vocab_size" in settings.model:
        raise ConfigError("init.model takes the LLM's vocabulary: leave vocab_size out")
    try:
        config = config_from_hf(fields)
    except ConfigError as error:
        raise ConfigError(f"init.model: {error}") from None
    config = dataclasses.replace(
        config, bos_token_id=llm.config.bos_token_id, eos_token_ids=llm.config.eos_token_ids
    )  # fmt: skip
    params = init_params(config, jax.random.key(seed))
    return Model(config, params, llm.tokenizer, f"a random {config.family} for {name}")


def _check_vocabulary(model: Model, llm: Described, name: str) -> None:
    differences = llm.tokenizer.first_differences(model.tokenizer)
    if differences:
        listed = "; ".join(f"id {d.token_id} is {d.piece!r} and {d.other_piece!r}" for d in differences)
        raise ConfigError(f"{model.location} has another vocabulary than {name}: {listed}")


def _untied(model: Model) -> Model:
    """The same model with a head of its own, for now the embedding itself."""
    head = {**model.params["head"], "kernel": model.params["embed"]["embedding"]}
    return model._replace(
        config=dataclasses.replace(model.config, tied_head=False), params={**model.params, "head": head}
    )
