"""The one entry to tree attention: checks, choice of implementation, and the split over KV heads on a mesh.

Letters, the same as in the whole project: B slots, Q query rows of one slot, N new (tree) rows, H query heads,
G key/value heads, K head size, P pages of the cache, Z page size in tokens, C 32-bit words of an ancestor mask.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.tree_attention.choose import find_implementation

KV_AXIS = "model"
"""Mesh axis over which heads are split unless the caller names another."""


def tree_attention(
    q_BQHK: Float[Array, "B Q H K"],
    k_new_BNGK: Float[Array, "B N G K"],
    v_new_BNGK: Float[Array, "B N G K"],
    k_pages_GPZK: Float[Array, "G P Z K"],
    v_pages_GPZK: Float[Array, "G P Z K"],
    block_table: Int32[Array, "B pages"],
    prefix_len_B: Int32[Array, " B"],
    ancestors_BQC: UInt32[Array, "B Q C"],
    *,
    scale: float,
    mesh: Mesh | AbstractMesh | None = None,
    kv_axis: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q H K"], Float32[Array, "B Q H"]]:
    """Attend from Q query rows of every slot to the slot's paged prefix and to their ancestors among the N new rows.

    Queries see the first `prefix_len_B` tokens of their slot (0 is allowed) and the new rows whose bit is set in their
    ancestor words, whatever the order of the rows; positions are the caller's. One function serves a decoding step
    (Q = N = 1), a verified tree (Q = N), a tree level (Q new nodes against the N rows so far) and a prefill chunk
    (a chain: `causal_words`).

    `q_BQHK`: queries; query head h reads key/value head h // (H / G).
    `k_new_BNGK`, `v_new_BNGK`: keys and values of this pass's rows, not in the cache; finite where a query sees them.
    `k_pages_GPZK`, `v_pages_GPZK`: the cache of one layer. Memory outside the prefixes may hold anything, NaN too.
    `block_table`: int32, the pages of each slot in order. Entries past the prefix are ignored; P marks unused ones.
    `ancestors_BQC`: uint32, C = ceil(N / 32). Bit k % 32 of word k // 32 says that row k is query i's own or above it.
    `scale`: what scores are multiplied with before the softmax, usually 1 / sqrt(K).
    `mesh`, `kv_axis`: split the key/value heads, and the query heads with them, over this axis of the mesh; where the
    axis does not divide G, every device computes all heads. Without them the mesh that `jax.set_mesh` has set is used,
    as by `jax.shard_map`, and its axis "model"; without any mesh there is no split.
    `implementation`: a name of `IMPLEMENTATIONS`, which raises where it cannot run; None picks the kernel where one
    runs (TPU; NVIDIA sm_80 and newer) and "xla" elsewhere.

    Returns the output in q's dtype and the log-sum-exp of the scores in float32. A row that sees nothing gives 0 and
    -inf. Scores, softmax and sums are float32.

    Raises ValueError where shapes contradict each other, the implementation's name is unknown, the mesh has no such
    axis, or only one of `mesh` and `kv_axis` is given.
    """
    check_shapes(q_BQHK.shape, k_new_BNGK.shape, k_pages_GPZK.shape, ancestors_BQC.shape)
    mesh, kv_axis = find_mesh(mesh, kv_axis)
    arrays = (q_BQHK, k_new_BNGK, v_new_BNGK, k_pages_GPZK, v_pages_GPZK, block_table, prefix_len_B, ancestors_BQC)
    run = functools.partial(_run_local, scale=scale, implementation=implementation)
    if mesh is not None:
        run = split_heads(run, mesh=mesh, kv_axis=kv_axis, kv_heads=k_pages_GPZK.shape[0])
    return run(*arrays)


def _run_local(*arrays: Array, scale: float, implementation: str | None) -> tuple[Array, Array]:
    """One device's share of the heads; the choice sees the shapes that the device sees."""
    return find_implementation(implementation, arrays)(*arrays, scale=scale)


def find_mesh(mesh: Mesh | AbstractMesh | None, kv_axis: str | None) -> tuple[Mesh | AbstractMesh | None, str | None]:
    """Return the mesh and axis to split over: the caller's, or those of `jax.set_mesh`; None without a mesh.

    Raises ValueError where only one of the two is given.
    """
    if (mesh is None) != (kv_axis is None):
        raise ValueError("tree_attention needs both mesh and kv_axis, or neither.")
    if mesh is not None:
        return mesh, kv_axis
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty or len(ambient.manual_axes) == len(ambient.axis_names):  # the caller has split already
        return None, None
    if KV_AXIS in ambient.manual_axes:
        return None, None
    return ambient, KV_AXIS if KV_AXIS in ambient.shape else None


def split_heads(
    run: Callable[..., Any], *, mesh: Mesh | AbstractMesh, kv_axis: str | None, kv_heads: int
) -> Callable[..., Any]:
    """Wrap `run` so that each device along `kv_axis` computes its share of the heads; without an axis, all of them."""
    if kv_axis is not None and kv_axis not in mesh.shape:
        raise ValueError(f"The mesh has no axis {kv_axis!r}; its axes are {', '.join(map(str, mesh.axis_names))}.")
    axis = kv_axis if kv_axis is not None and kv_heads % mesh.shape[kv_axis] == 0 else None
    rows = PartitionSpec(None, None, axis, None)
    pages = PartitionSpec(axis, None, None, None)
    whole = PartitionSpec()
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(rows, rows, rows, pages, pages, whole, whole, whole),
        out_specs=(rows, PartitionSpec(None, None, axis)),
        # Axes that a shard_map around this one has split are gone from the arrays here.
        axis_names=set(mesh.axis_names) - set(getattr(mesh, "manual_axes", ())),
        # Heads never exchange anything, and outputs that no axis splits are computed alike on every device.
        check_vma=False,
    )


def check_shapes(
    q_shape: tuple[int, ...], new_shape: tuple[int, ...], pages_shape: tuple[int, ...], words_shape: tuple[int, ...]
) -> None:
    """Raise a ValueError where heads, head sizes or mask words do not fit together."""
    H, K = q_shape[2:]
    N = new_shape[1]
    G = pages_shape[0]
    if H % G or new_shape[2] != G:
        raise ValueError(f"{H} query heads cannot share {G} cached and {new_shape[2]} new key/value heads evenly.")
    if not K == new_shape[3] == pages_shape[3]:
        raise ValueError(
            f"Head sizes differ: {K} for queries, {new_shape[3]} for new rows, {pages_shape[3]} in the cache."
        )
    if words_shape[2] != -(-N // 32):
        raise ValueError(f"{N} new rows need {-(-N // 32)} ancestor words a query, not {words_shape[2]}.")
