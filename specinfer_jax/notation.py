"""The dimension key of the whole project: annotations, einsums and local names all use these letters.

Arrays end in their letters: `logits_BNV` is `[slots, tree rows, vocabulary]`.

    B  slots (requests that decode side by side)
    T  tokens of a chunk, all slots flattened: T = B * Q
    Q  query rows of one slot in one pass
    N  tree rows: the root and the speculated nodes ("32 nodes" = 32 speculated, N = 33)
    W  nodes of one tree level
    A  longest path: depth + 1
    M  SSMs (small speculative models)
    P  pages of the cache
    Z  page size in tokens
    S  positions of a context
    L  layers
    H  query heads
    G  key/value heads
    K  head size
    D  model width
    E  embedding width, where it is not D (OPT-350m)
    F  MLP width
    V  vocabulary
    C  32-bit words of an ancestor mask: ceil(N / 32)
    X  stop token ids of a request
"""

from typing import NamedTuple

from jaxtyping import Array, Float

ANCESTOR_WORD_BITS = 32
"""Tree rows that one `uint32` ancestor word tells about."""


class LayerKV(NamedTuple):
    """Keys and values that one layer computed for the rows of one pass, not yet in the cache."""

    k_BNGK: Float[Array, "B N G K"]
    """Keys after the rotary embedding."""
    v_BNGK: Float[Array, "B N G K"]
    """Values."""
