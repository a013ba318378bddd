"""How one request's tokens are chosen and when it ends: `SamplingParams`, checked field by field. Free of jax.

params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop=["\\n\\n"], max_tokens=64)
greedy = SamplingParams(temperature=0, max_tokens=64)
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, no_type_check

import numpy as np

from specinfer_jax.errors import SamplingError
from specinfer_jax.outputs import MAX_LOGPROBS

GREEDY_BELOW = 1e-5
"""Decoding is greedy at a lower temperature."""
_LARGEST_INT = 2**31 - 1
_SMALLEST, _LARGEST = 2.0**-126, 3e38
"""Of the positive numbers that float32, in which the device computes, holds at full precision."""


@no_type_check  # at run time: what is wrong with a value is for the errors below to say
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends; names, defaults and meanings are those of vLLM.

    Numbers may be numpy scalars. Every field is normalised to plain numbers, strings and tuples, so that equal
    parameters compare and hash equal.

    Raises:
      SamplingError: a field has the wrong type or lies out of its range; the message names field, range and value.
    """

    n: int = 1
    """Continuations per prompt, up to 16384."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that were generated before; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens once for each time they were generated; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens of prompt and answer; above 0, 1 is off."""
    temperature: float = 1.0
    """Divides the logits; at least 0. Below 1e-5 decoding is greedy."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum; above 0 and up to 1, 1 is off."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 and -1 are off."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest; 0 to 1, 0 is off."""
    seed: int | None = None
    """Same seed, same answer, at unchanged speculation settings; any 64 bits, signed or not. None: always another."""
    stop: str | Sequence[str] | None = None
    """Strings that end the answer; the text is cut before them."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the answer besides the model's own; one that the vocabulary lacks never does."""
    bad_words: Sequence[str] | None = None
    """Words that are never completed, alone or behind a space."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the token that ended the answer, in the text."""
    ignore_eos: bool = False
    """Go on behind the model's own end-of-sequence ids."""
    max_tokens: int | None = 16
    """Most tokens generated; None: as many as `max_model_len` leaves room for."""
    min_tokens: int = 0
    """Only what comes behind so many tokens may end the answer; at most `max_tokens`."""
    logprobs: int | None = None
    """Return log-probabilities: of every token, and of this many of the likeliest (0 to 20)."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logit_bias: Any = None
    """Mapping of id to a number that is added to its logit, -100 to 100; ids may be strings of digits, as in JSON.
    Normalised to a tuple of (id, number), by id."""
    allowed_token_ids: Sequence[int] | None = None
    """Nothing else is generated; None: anything may be."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.n > 1 and self.is_greedy:
            raise SamplingError(
                f"n must be 1 at temperature {self.temperature:g}, which is greedy and would give the same answer "
                f"{self.n} times, got {self.n}; ask for a temperature above 0"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError(f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken rather than one drawn."""
        return self.temperature < GREEDY_BELOW


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class _Whole(NamedTuple):
    """A whole number."""

    allowed: str
    """Its range, in words."""
    low: int
    high: int | None = None
    """None: more than 32 bits hold means the same as the most that they hold."""

    def __call__(self, name: str, value: Any) -> int:
        number = int(value) if _is_number(value, numbers.Integral) else None
        if number is None or number < self.low or (self.high is not None and number > self.high):
            raise SamplingError(f"{name} must be a whole number {self.allowed}, got {value!r}")
        return number if self.high is not None else min(number, _LARGEST_INT)


class _Real(NamedTuple):
    """A finite number."""

    allowed: str
    """Its range, in words."""
    low: float
    high: float = _LARGEST

    def __call__(self, name: str, value: Any) -> float:
        try:
            number = float(value) if _is_number(value, numbers.Real) else math.nan
        except OverflowError:  # a whole number beyond all floats
            number = math.inf
        if not self.low <= number <= self.high:  # NaN lies in no range
            raise SamplingError(f"{name} must be a finite number {self.allowed}, got {value!r}")
        return number


class _Optional(NamedTuple):
    """None, or what another check lets through."""

    check: Callable[[str, Any], Any]

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else self.check(name, value)


def _top_k(name: str, value: Any) -> int:
    return max(0, _Whole("of at least 1, or 0 or -1 for all tokens", -1)(name, value))


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise SamplingError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _items(name: str, value: Any, kind: str) -> list[Any]:
    """The entries of a list, a tuple or an array; none for None."""
    if isinstance(value, str | bytes | Mapping) or not (value is None or isinstance(value, Iterable)):
        raise SamplingError(f"{name} must be a list of {kind}, got {value!r}")
    return [] if value is None else list(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = _items(name, value, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise SamplingError(f"{name} must hold strings of at least one character, got {string!r}")
    return tuple(strings)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    return _strings(name, [value] if isinstance(value, str) else value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    entry = _Whole("of at least 0", 0)
    return tuple(entry(f"every id of {name}", i) for i in _items(name, value, "token ids"))


def _allowed_ids(name: str, value: Any) -> tuple[int, ...] | None:
    ids = _ids(name, value)
    if value is not None and not ids:
        raise SamplingError(f"{name} must hold at least one token id, got {value!r}; None allows all")
    return ids or None


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else _items(name, value, "(token id, number) pairs")
    bias: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise SamplingError(f"{name} must map token ids to numbers, got {pair!r}")
        key, number = pair
        is_digits = isinstance(key, str) and key.isascii() and key.isdigit()
        token_id = _Whole("of at least 0", 0)(f"every id of {name}", int(key) if is_digits else key)
        if token_id in bias:
            raise SamplingError(f"{name} must name every token id once, got {token_id} again")
        bias[token_id] = _Real("between -100 and 100", -100, 100)(f"{name} of token id {token_id}", number)
    return tuple(sorted(bias.items()))


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "n": _Whole("between 1 and 16384", 1, 16384),
    "presence_penalty": _Real("between -2 and 2", -2, 2),
    "frequency_penalty": _Real("between -2 and 2", -2, 2),
    "repetition_penalty": _Real("above 0", _SMALLEST),
    "temperature": _Real("of at least 0", 0),
    "top_p": _Real("above 0 and at most 1", _SMALLEST, 1),
    "top_k": _top_k,
    "min_p": _Real("between 0 and 1", 0, 1),
    "seed": _Optional(_Whole("of 64 bits", -(2**63), 2**64 - 1)),
    "stop": _stop,
    "stop_token_ids": _ids,
    "bad_words": _strings,
    "include_stop_str_in_output": _flag,
    "ignore_eos": _flag,
    "max_tokens": _Optional(_Whole("of at least 1", 1)),
    "min_tokens": _Whole("of at least 0", 0),
    "logprobs": _Optional(_Whole(f"between 0 and {MAX_LOGPROBS}", 0, MAX_LOGPROBS)),
    "prompt_logprobs": _Optional(_Whole(f"between 0 and {MAX_LOGPROBS}", 0, MAX_LOGPROBS)),
    "skip_special_tokens": _flag,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_ids,
}

GREEDY = SamplingParams(temperature=0)
"""The likeliest token at every place."""
