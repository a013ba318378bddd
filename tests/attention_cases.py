"""Random tree-attention problems, and their answers in float64 from the definition: walk up the tree, softmax, sum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import ancestor_words

words_of = jax.jit(ancestor_words)

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3}
"""Largest allowed max|d| / max|ref| of an output, by dtype."""


class AttentionCase(NamedTuple):
    """One call of `tree_attention`: its arrays in order, then what the oracle needs besides."""

    q_BQHK: np.ndarray
    k_new_BNGK: np.ndarray
    v_new_BNGK: np.ndarray
    k_pages_GPZK: np.ndarray
    v_pages_GPZK: np.ndarray
    block_table: np.ndarray
    prefix_len_B: np.ndarray
    ancestors_BQC: np.ndarray
    parent_BN: np.ndarray
    row_Q: np.ndarray
    """Tree row of each query."""
    scale: float

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(self[:8])


def random_parents(rng: np.random.Generator, B: int, N: int, *, padding: int = 0) -> np.ndarray:
    """Trees of N rows in an order where parents come first; the last `padding` rows hang nowhere."""
    parent_BN = np.full((B, N), N, np.int32)
    for n in range(1, N - padding):
        parent_BN[:, n] = rng.integers(0, n, B)
    return parent_BN


def make_case(
    *,
    prefix: tuple[int, ...] = (5,),
    N: int = 6,
    Q: int | None = None,
    G: int = 1,
    group: int = 1,
    K: int = 16,
    Z: int = 8,
    table_pages: int = 6,
    padding: int = 0,
    parent_BN: np.ndarray | None = None,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> AttentionCase:
    """Draw a problem: a slot per entry of `prefix`; queries are the last Q of N rows; NaN where none may read."""
    rng = np.random.default_rng(seed)
    B, Q = len(prefix), Q or N
    P = B * table_pages + 3
    if parent_BN is None:
        parent_BN = random_parents(rng, B, N, padding=padding)

    block_table = rng.permutation(P)[: B * table_pages].reshape(B, table_pages).astype(np.int32)
    pages = np.full((2, G, P, Z, K), np.nan, np.float32)
    for b, length in enumerate(prefix):
        for position in range(length):
            pages[:, :, block_table[b, position // Z], position % Z] = rng.standard_normal((2, G, K))
        block_table[b, -(-length // Z) :] = P

    row_Q = np.arange(N - Q, N)
    q = rng.standard_normal((B, Q, G * group, K))
    new = rng.standard_normal((2, B, N, G, K))
    return AttentionCase(
        *(a.astype(dtype) for a in (q, new[0], new[1], pages[0], pages[1])),
        block_table,
        np.array(prefix, np.int32),
        np.asarray(words_of(parent_BN))[:, row_Q],
        parent_BN,
        row_Q,
        K**-0.5,
    )


def random_case(seed: int, *, shapes: int) -> AttentionCase:
    """Case number `seed` of a long series; numbers that are equal modulo `shapes` share their shapes and compile once.

    Trees, padding, prefixes and page tables differ from case to case. Prefix lengths are empty, one token, anywhere
    in a page, on a page's edge, and the whole table.
    """
    draw = np.random.default_rng([shapes, seed % shapes]).choice
    N = int(draw([1, 2, 5, 8, 13, 33, 63]))
    Z, table_pages = int(draw([16, 32, 64])), int(draw([1, 2, 5]))
    shape: dict[str, Any] = {
        "N": N, "Q": int(draw([N, N, -(-N // 3)])), "G": int(draw([1, 2, 3])), "group": int(draw([1, 2, 3, 4, 5, 8])),
        "K": int(draw([16, 48, 64, 80, 96, 128, 256])), "Z": Z, "table_pages": table_pages,
        "dtype": draw(np.array([jnp.float32, jnp.bfloat16])),
    }  # fmt: skip
    slots = int(draw([1, 2, 4]))
    rng = np.random.default_rng(seed)
    full, edge = Z * table_pages, Z * int(rng.integers(table_pages + 1))
    lengths = [0, 1, edge, full, int(rng.integers(full + 1)), int(rng.integers(full + 1))]
    prefix = tuple(int(length) for length in rng.choice(lengths, slots))
    return make_case(prefix=prefix, padding=int(rng.integers(N)), seed=seed, **shape)


def path(parent_N: np.ndarray, row: int) -> list[int]:
    """The row and its ancestors, ascending."""
    rows = []
    while row < len(parent_N):
        rows.append(int(row))
        row = parent_N[row]
    return rows[::-1]


def oracle(case: AttentionCase) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, one query head at a time."""
    q, k_new, v_new, k_pages, v_pages = (np.asarray(a, np.float64) for a in case[:5])
    B, Q, H, K = q.shape
    group = H // k_pages.shape[0]
    out, lse = np.zeros((B, Q, H, K)), np.zeros((B, Q, H))
    for b, i, h in np.ndindex(B, Q, H):
        g, rows = h // group, path(case.parent_BN[b], case.row_Q[i])
        k, v = (
            np.concatenate([prefix_rows(case, pages[g], b), new[b, rows, g]])
            for pages, new in ((k_pages, k_new), (v_pages, v_new))
        )
        s = case.scale * (k @ q[b, i, h])
        lse[b, i, h] = s.max() + np.log(np.exp(s - s.max()).sum())
        out[b, i, h] = np.exp(s - lse[b, i, h]) @ v
    return out, lse


def prefix_rows(case: AttentionCase, pages_PZK: np.ndarray, slot: int) -> np.ndarray:
    """The committed rows of one slot and head, in order of position."""
    position = np.arange(int(case.prefix_len_B[slot]))
    Z = pages_PZK.shape[1]
    return pages_PZK[np.asarray(case.block_table)[slot, position // Z], position % Z]


def assert_matches(result: tuple[jax.Array, jax.Array], case: AttentionCase) -> None:
    """Compare with the oracle by max|d| / max|ref|, and check dtypes."""
    out_BQHK, lse_BQH = result
    ref_out, ref_lse = oracle(case)
    assert out_BQHK.dtype == case.q_BQHK.dtype
    assert lse_BQH.dtype == jnp.float32
    tolerance = TOLERANCE[str(out_BQHK.dtype)]
    assert np.abs(np.asarray(out_BQHK, np.float64) - ref_out).max() <= tolerance * np.abs(ref_out).max()
    assert np.abs(np.asarray(lse_BQH, np.float64) - ref_lse).max() <= 2e-6 * max(1.0, np.abs(ref_lse).max())
