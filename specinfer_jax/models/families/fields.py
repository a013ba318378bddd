"""Reading typed values out of config.json or GGUF metadata, with an error that names the field."""

from collections.abc import Mapping
from typing import Literal

from specinfer_jax.errors import ConfigError

Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_int(fields: Mapping[str, object], key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of at least `least`; a missing or null field takes the default, without one it is an error."""
    value = fields.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"the field {key!r} is missing; it must be an integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{key!r} is {value!r}; it must be an integer of at least {least}")
    return value


def read_float(fields: Mapping[str, object], key: str, default: float | None = None) -> float:
    """A positive number; a missing or null field takes the default, without one it is an error."""
    value = fields.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"the field {key!r} is missing; it must be a number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{key!r} is {value!r}; it must be a positive number")
    return float(value)


def read_bool(fields: Mapping[str, object], key: str, default: bool) -> bool:
    """True or false; a missing or null field takes the default."""
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{key!r} is {value!r}; it must be true or false")
    return value


def read_id(fields: Mapping[str, object], key: str, default: int | None = None) -> int | None:
    """A token id, or None if the field is null (or missing, without a default)."""
    value = fields.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key!r} is {value!r}; it must be a token id")
    return value


def read_ids(fields: Mapping[str, object], key: str, default: int | None = None) -> tuple[int, ...]:
    """Token ids given as one id, a list of ids, or null."""
    value = fields.get(key, default)
    tokens: dict[int, None] = {}  # a dict keeps the order
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(f"{key!r} is {value!r}; it must be a token id or a list of token ids")
        tokens[token] = None
    return tuple(tokens)


def read_activation(fields: Mapping[str, object], key: str, default: str) -> Activation:
    """The MLP's non-linearity; one that the decoder does not know is an error."""
    value = fields.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ConfigError(f"{key!r} is {value!r}, which is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]
