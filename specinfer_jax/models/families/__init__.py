"""The model families, and which one a checkpoint belongs to. A new family is one file here and one entry below."""

import dataclasses
from collections.abc import Collection, Mapping

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.families import llama, opt, qwen2
from specinfer_jax.models.families.fields import read_ids
from specinfer_jax.models.families.weight_names import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, qwen2.FAMILY, opt.FAMILY)}


def config_from_hf(hf: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
    """Read config.json; the end-of-sequence ids of generation_config.json join its own.

    Raises:
      ConfigError: unsupported architecture, activation, rope type or quantisation; a missing or contradictory field.
    """
    family = _hf_family(hf)
    for key in ("quantization_config", "compression_config"):
        quantisation = hf.get(key)
        if quantisation:
            method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
            raise ConfigError(
                f"the weights are quantised ({method or key}), which is not supported; "
                "use the unquantised model or a GGUF file"
            )
    config = family.config_from_hf(hf)
    eos = dict.fromkeys((*config.eos_token_ids, *read_ids(generation or {}, "eos_token_id")))
    return _checked(dataclasses.replace(config, eos_token_ids=tuple(eos)))


def _hf_family(hf: Mapping[str, object]) -> Family:
    model_type, architectures = hf.get("model_type"), hf.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for family in FAMILIES.values():
        if model_type in family.model_types or (model_type is None and set(names) & set(family.architectures)):
            if names and not set(names) & set(family.architectures):
                raise ConfigError(f"architecture {names[0]!r} is not supported; supported are {_supported()}")
            return family
    found = f"model type {model_type!r}" if model_type is not None else f"architecture {names[0] if names else None!r}"
    raise ConfigError(f"{found} is not supported; supported are {_supported()}")


def _supported() -> str:
    return ", ".join(name for family in FAMILIES.values() for name in family.model_types)


def config_from_gguf(metadata: Mapping[str, object], tensor_names: Collection[str]) -> ModelConfig:
    """Read GGUF metadata; the names of the file's tensors tell what it does not say (tied head, biases).

    Raises:
      ConfigError: unsupported architecture or rope type; a missing or contradictory field.
    """
    architecture = metadata.get("general.architecture")
    for family in FAMILIES.values():
        if architecture in family.gguf_architectures and family.config_from_gguf is not None:
            return _checked(family.config_from_gguf(metadata, tensor_names))
    supported = ", ".join(name for family in FAMILIES.values() for name in family.gguf_architectures)
    raise ConfigError(f"GGUF architecture {architecture!r} is not supported; supported are {supported}")


def _checked(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(f"{config.num_heads} query heads do not share {config.num_kv_heads} key/value heads evenly")
    if config.rope is not None and config.head_size % 2:
        raise ConfigError(f"a rotary embedding needs an even head size, not {config.head_size}")
    return config
