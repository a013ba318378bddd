"""Random numbers of a request: keyed by what they are for, never by slot, neighbour or step.

`key = fold_in(seed, sample) -> position -> (role, SSM, level)`. Each position is decided once, so a key is used once:
the same request gives the same tokens alone, beside others, in another slot, and on any number of devices.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

_IMPLEMENTATION = "threefry2x32"
_LARGEST_PART = 1024
"""Roles, SSMs and levels of a tree are fewer."""


class Role(enum.IntEnum):
    """What a random number decides."""

    TOKEN = 0
    """The token at a position, drawn from the LLM's distribution or what is left of it."""
    ACCEPT = 1
    """Acceptance of the draws of a tree; the position is its root's."""
    DRAFT = 2
    """An SSM's draws; the position is the tree's root."""


def request_key(seed_2: UInt32[Array, "2"], sample: Int[Array, ""]) -> UInt32[Array, "2"]:
    """Key data of one continuation: the seed's high and low 32 bits, and which of the n samples it is."""
    return jax.random.key_data(jax.random.fold_in(_wrap(seed_2), sample))


def _wrap(data: UInt32[Array, "... 2"]) -> Key[Array, "..."]:
    return jax.random.wrap_key_data(data, impl=_IMPLEMENTATION)


def keys_at(key_B2: UInt32[Array, "B 2"], position_B: Int[Array, " B"], role: Role, *parts: int) -> Key[Array, " B"]:
    """One key per slot for a position, a role, and up to two small numbers that tell it apart further."""
    purpose = 0
    for part in (*parts, int(role)):
        purpose = purpose * _LARGEST_PART + part

    def fold(data: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(_wrap(data), position), purpose)

    return jax.vmap(fold)(key_B2, position_B)


def gumbel(key_B: Key[Array, " B"], *shape: int) -> Float[Array, "B ..."]:
    """Standard Gumbel noise, float32; `argmax(log w + noise)` is a draw proportional to w."""
    return jax.vmap(lambda key: jax.random.gumbel(key, shape, jnp.float32))(key_B)


def uniform(key_B: Key[Array, " B"], *shape: int) -> Float[Array, "B ..."]:
    """Uniform numbers in [0, 1), float32."""
    return jax.vmap(lambda key: jax.random.uniform(key, shape, jnp.float32))(key_B)
