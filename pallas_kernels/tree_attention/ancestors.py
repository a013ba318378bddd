"""Ancestor bit-words: which new rows a query may see, 32 rows to a `uint32`.

Bit k % 32 of word k // 32 is set where row k is the query's own row or one of its ancestors.
Letters: B slots, N tree rows, Q rows of a chunk, C = ceil(rows / 32) words.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32


def ancestor_words(parent_BN: Int32[Array, "B N"]) -> UInt32[Array, "B N C"]:
    """Compute every row's ancestor words from the parents.

    `parent_BN`: int32, `parent[n] < n`; the root and padding rows have parent N. Every row's own bit is set; a padding
    row has no other. Takes ceil(log2(N)) rounds: after each, a row knows its ancestors up to twice as far.
    """
    B, N = parent_BN.shape
    own_NC = np.zeros((N, -(-N // 32)), np.uint32)
    own_NC[np.arange(N), np.arange(N) // 32] = np.uint32(1) << (np.arange(N, dtype=np.uint32) % 32)
    words_BNC = jnp.broadcast_to(own_NC[None], (B, *own_NC.shape))
    above_BN = parent_BN
    for _ in range((N - 1).bit_length()):
        words_BNC |= jnp.take_along_axis(words_BNC, above_BN[..., None], axis=1, mode="fill", fill_value=0)
        above_BN = jnp.take_along_axis(above_BN, above_BN, axis=1, mode="fill", fill_value=N)
    return words_BNC


def causal_words(rows: int) -> UInt32[Array, "Q C"]:
    """Return the words of a chain, as in a prefill chunk: row i sees rows 0 to i."""
    column = np.arange(-(-rows // 32) * 32).reshape(1, -1, 32)
    bits = (column <= np.arange(rows).reshape(-1, 1, 1)).astype(np.uint32) << np.arange(32, dtype=np.uint32)
    return jnp.asarray(bits.sum(axis=2, dtype=np.uint32))
