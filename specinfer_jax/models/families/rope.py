"""Rotary embedding settings from config.json (both generations of its fields) and from GGUF metadata."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import RopeConfig
from specinfer_jax.models.families.fields import read_bool, read_float, read_int

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_GGUF_TYPES = ("none", "linear", "yarn")


class ScaledRope(NamedTuple):
    """Rotary settings and the context length that they are good for."""

    rope: RopeConfig
    """Base and scaling rule."""
    max_position: int
    """Longest context in tokens, scaling included."""


def rope_from_hf(hf: Mapping[str, object], *, max_position: int) -> ScaledRope:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` (keyed by `rope_type` or, older, by `type`).

    Args:
      hf: config.json.
      max_position: its `max_position_embeddings`.

    Returns:
      The settings; the context is stretched by the factor where `max_position_embeddings` is the length before
      scaling (linear, dynamic, and yarn over `original_max_position_embeddings`), as vLLM does.

    Raises:
      ConfigError: an unknown scaling type, a missing factor, or a partial rotary embedding.
    """
    scaling = _scaling_fields(hf)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in _TYPES:
        raise ConfigError(f"rope type {rope_type!r} is not supported; supported are {', '.join(_TYPES)}")
    if read_float(scaling, "partial_rotary_factor", read_float(hf, "partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("'partial_rotary_factor' other than 1 is not supported")
    rope = RopeConfig(theta=read_float(scaling, "rope_theta", read_float(hf, "rope_theta", 10_000.0)))
    match rope_type:
        case "linear" | "dynamic":
            factor = read_float(scaling, "factor")
            # HF's dynamic rule starts from max_position_embeddings whatever original_max_position_embeddings says.
            rope = dataclasses.replace(rope, rope_type=rope_type, factor=factor, original_max_position=max_position)
            return ScaledRope(rope, int(max_position * factor))
        case "llama3":
            return ScaledRope(_llama3(scaling, hf, rope, max_position), max_position)
        case "yarn":
            rope = _yarn(scaling, hf, rope, max_position)
            return ScaledRope(rope, max(max_position, int(rope.original_max_position * rope.factor)))
        case _:
            return ScaledRope(dataclasses.replace(rope, original_max_position=max_position), max_position)


def _scaling_fields(hf: Mapping[str, object]) -> Mapping[str, object]:
    for key in ("rope_parameters", "rope_scaling"):
        fields = hf.get(key)
        if fields is None:
            continue
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{key!r} is {fields!r}; it must be an object or null")
        if any(isinstance(value, Mapping) for value in fields.values()):
            raise ConfigError(f"{key!r} differs between layers, which is not supported")
        return fields
    return {}


def _original_length(scaling: Mapping[str, object], hf: Mapping[str, object], max_position: int) -> int:
    key = "original_max_position_embeddings"
    return read_int(hf, key, read_int(scaling, key, max_position))


def _llama3(scaling: Mapping[str, object], hf: Mapping[str, object], rope: RopeConfig, max_position: int) -> RopeConfig:
    rope = dataclasses.replace(
        rope,
        rope_type="llama3",
        factor=read_float(scaling, "factor"),
        low_freq_factor=read_float(scaling, "low_freq_factor"),
        high_freq_factor=read_float(scaling, "high_freq_factor"),
        original_max_position=_original_length(scaling, hf, max_position),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError("llama3 rope scaling needs 'high_freq_factor' above 'low_freq_factor'")
    return rope


def _yarn(scaling: Mapping[str, object], hf: Mapping[str, object], rope: RopeConfig, max_position: int) -> RopeConfig:
    def optional(key: str) -> float | None:
        return read_float(scaling, key) if scaling.get(key) else None

    original = _original_length(scaling, hf, max_position)
    return dataclasses.replace(
        rope,
        rope_type="yarn",
        factor=read_float(scaling, "factor", max_position / original),
        original_max_position=original,
        beta_fast=optional("beta_fast") or 32.0,
        beta_slow=optional("beta_slow") or 1.0,
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=read_bool(scaling, "truncate", True),
    )


def rope_from_gguf(metadata: Mapping[str, object], architecture: str, *, context_length: int) -> RopeConfig:
    """Read `{architecture}.rope.*`: base, and linear or yarn scaling (llama3's is a tensor, `rope_from_factors`).

    Raises:
      ConfigError: a scaling type or a yarn setting that llama.cpp knows and the decoder does not.
    """
    prefix = f"{architecture}.rope"
    rope = RopeConfig(theta=read_float(metadata, f"{prefix}.freq_base", 10_000.0), original_max_position=context_length)
    scaling = f"{prefix}.scaling"
    rope_type = metadata.get(f"{scaling}.type", "linear" if f"{prefix}.scale_linear" in metadata else "none")
    if rope_type not in _GGUF_TYPES:
        raise ConfigError(f"rope type {rope_type!r} is not supported in GGUF; supported are {', '.join(_GGUF_TYPES)}")
    factor = read_float(metadata, f"{scaling}.factor", read_float(metadata, f"{prefix}.scale_linear", 1.0))
    if rope_type == "none" or factor == 1.0:
        return rope
    if rope_type == "linear":
        return dataclasses.replace(rope, rope_type="linear", factor=factor)
    for key in ("yarn_log_multiplier", "yarn_ext_factor"):
        if metadata.get(f"{scaling}.{key}"):
            raise ConfigError(f"'{scaling}.{key}' is set, which is not supported")
    attention = read_float(metadata, f"{scaling}.yarn_attn_factor", read_float(metadata, f"{scaling}.attn_factor", 1.0))
    return dataclasses.replace(
        rope,
        rope_type="yarn",
        factor=factor,
        original_max_position=read_int(metadata, f"{scaling}.original_context_length", context_length),
        beta_fast=read_float(metadata, f"{scaling}.yarn_beta_fast", 32.0),
        beta_slow=read_float(metadata, f"{scaling}.yarn_beta_slow", 1.0),
        # llama.cpp multiplies its own logarithmic factor by this one.
        attention_factor=None if attention == 1.0 else attention * (1.0 + 0.1 * math.log(factor)),
    )


def rope_from_factors(rope: RopeConfig, factors: Float32[np.ndarray, " half"], *, head_size: int) -> RopeConfig:
    """Recover llama3 scaling from GGUF's `rope_freqs.weight`, the divisors of the plain inverse frequencies.

    The rule has four numbers, of which the divisors fix three; Llama 3's own `low_freq_factor` of 1 is taken for the
    fourth, then original length and `high_freq_factor` follow from any two frequencies of the blended range.

    Raises:
      ConfigError: the divisors follow no llama3 rule (longrope and the like).
    """
    refusal = ConfigError("'rope_freqs.weight' does not follow llama3 scaling; other rope factors are not supported")
    divisors = factors.astype(np.float64)
    if divisors.shape != (head_size // 2,) or not np.all(divisors >= 1.0):
        raise refusal
    factor = float(divisors.max())
    if factor == 1.0:
        return rope
    if rope.rope_type != "default":
        raise ConfigError(f"'rope_freqs.weight' and {rope.rope_type} rope scaling cannot both apply")
    turns = 1.0 / (2 * math.pi * rope.theta ** (np.arange(0, head_size, 2) / head_size))  # per token
    blend = (1.0 / divisors - 1.0 / factor) / (1.0 - 1.0 / factor)
    found = _llama3_from_blend(blend, turns)
    if found is None:
        raise refusal
    original, high = found
    again = np.clip((original * turns - 1.0) / (high - 1.0), 0.0, 1.0)
    if not np.allclose((1 - again) / factor + again, 1.0 / divisors, rtol=1e-5, atol=0.0):
        raise refusal
    return dataclasses.replace(
        rope,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=high,
        original_max_position=original,
    )


def _llama3_from_blend(blend: np.ndarray, turns: np.ndarray) -> tuple[int, float] | None:
    """Original length and high_freq_factor from `blend = (original * turns - 1) / (high - 1)` inside (0, 1)."""
    inside = (blend > 1e-6) & (blend < 1.0 - 1e-6)
    if inside.sum() < 2:
        # Too few blended frequencies to solve for both: Llama 3's own numbers, which the caller checks.
        return 8192, 4.0
    slope, offset = np.polyfit(turns[inside], blend[inside], 1)
    if not (slope > 0.0 > offset):
        return None
    width = -1.0 / offset
    # Both are whole numbers in every published model; rounding removes the float32 noise of the divisors.
    high = float(round(1.0 + width, 3))
    return round(slope * width), high
