"""Tree-based against sequence-based parallel decoding at equal trees: time, bytes, largest batch (SpecInfer, fig. 11).

python -m benchmarks.parallel_paths --trees 1,2,2,1 --batches 1,2,4,8 --context 256 --out out/paths

Tree-based: a request's whole tree is one pass over one cache. Sequence-based: every path from the root to a leaf is a
sequence of its own with a cache of its own, and shared nodes are computed once for each path. Both verify the same
nodes; the logits of every node are compared, so that the times are of equal work.
"""

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import describe_machine, memory_gib
from benchmarks.serving_plots import plot_paths
from pallas_kernels.tree_attention import ancestor_words, causal_words
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, cache_bytes, commit, init_cache, read_first
from specinfer_jax.models.transformer import Params, forward, vocabulary_logits
from specinfer_jax.opened import Model, choose_dtype, open_model
from specinfer_jax.tree.expand import parse_expansion
from specinfer_jax.tree.shape import TreeShape

_CHUNK = 64


class Measured(NamedTuple):
    """One way of decoding."""

    seconds: float
    """Of a pass; median."""
    bytes: int
    """Cache and temporaries."""
    logits_BNV: np.ndarray
    """Of every node, the root first."""


def paths_of(shape: TreeShape) -> list[list[int]]:
    """Rows from the root to every leaf."""
    parents = shape.parents()
    paths = []
    for leaf in sorted(set(range(len(parents))) - set(shape.inner_rows().tolist())):
        path = [leaf]
        while path[-1]:
            path.append(int(parents[path[-1]]))
        paths.append(path[::-1])
    return paths


def filled_cache(model: Model, slots: int, context: int, room: int, dtype: Any) -> KVCache:
    """The same context of arbitrary tokens in every slot."""
    config, params = model.config, model.params
    cache = init_cache(config, num_slots=slots, max_model_len=context + room, page_size=PAGE_SIZE, dtype=dtype)
    step_1Q = jnp.arange(_CHUNK, dtype=jnp.int32)[None]

    @partial(jax.jit, donate_argnums=1)
    def append(params: Params, cache: KVCache, count_B: jax.Array) -> KVCache:
        position_BQ = cache.length_B[:, None] + step_1Q
        token_BQ = (position_BQ * 7 + 3) % config.vocab_size
        words = jnp.broadcast_to(causal_words(_CHUNK)[None], (slots, *causal_words(_CHUNK).shape))

        def run() -> Any:
            return forward(params, token_BQ, position_BQ, cache, words, config=config, prompt_len_B=cache.length_B)[1]

        return commit(cache, read_first(count_B.sum() > 0, run), count_B)

    for start in range(0, context, _CHUNK):
        cache = append(params, cache, jnp.full((slots,), min(_CHUNK, context - start), jnp.int32))
    return cache


def timed_pass(
    model: Model, cache: KVCache, token_BN: np.ndarray, depth_BN: np.ndarray, words: jax.Array, repeats: int
) -> tuple[float, int, np.ndarray]:
    """(median seconds, bytes of temporaries, logits `[B, N, V]`) of a pass that looks up no other slot's cache."""
    B, N = token_BN.shape

    def run(params: Params, cache: KVCache, config: ModelConfig) -> jax.Array:
        position_BN = cache.length_B[:, None] + depth_BN
        x_DT, _ = forward(
            params, jnp.asarray(token_BN), position_BN, cache, words, config=config, prompt_len_B=cache.length_B
        )
        return vocabulary_logits(params, x_DT, config=config)

    compiled = jax.jit(run, static_argnums=2).lower(model.params, cache, model.config).compile()
    logits_VT = np.asarray(compiled(model.params, cache))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(model.params, cache))
        seconds.append(time.perf_counter() - began)
    memory = compiled.memory_analysis()
    temporaries = 0 if memory is None else int(memory.temp_size_in_bytes + memory.output_size_in_bytes)
    return float(np.median(seconds)), temporaries, logits_VT.T.reshape(B, N, -1)


def measure(model: Model, shape: TreeShape, batch: int, *, context: int, repeats: int, dtype: Any) -> dict[str, Any]:
    """Both ways, and whether they agree."""
    rng = np.random.default_rng(0)
    rows, paths = shape.num_nodes + 1, paths_of(shape)
    depth, longest = shape.depths(), shape.depth + 1
    token_BN = rng.integers(0, model.config.vocab_size, (batch, rows)).astype(np.int32)
    parents = np.tile(shape.parents()[None], (batch, 1))
    depth_BN = np.tile(depth[None], (batch, 1))
    as_tree = _measured(model, batch, token_BN, depth_BN, ancestor_words(jnp.asarray(parents)), context, repeats, dtype)
    padded = np.array([path + [path[-1]] * (longest - len(path)) for path in paths])
    token_CN = token_BN[:, padded].reshape(-1, longest)
    depth_CN = np.tile(np.arange(longest, dtype=np.int32)[None], (len(token_CN), 1))
    words = causal_words(longest)
    as_paths = _measured(
        model, len(token_CN), token_CN, depth_CN, jnp.broadcast_to(words[None], (len(token_CN), *words.shape)), context,
        repeats, dtype,
    )  # fmt: skip
    of_paths = as_paths.logits_BNV.reshape(batch, len(paths), longest, -1)
    difference = max(
        float(np.abs(of_paths[:, p, : len(path)] - as_tree.logits_BNV[:, path]).max()) for p, path in enumerate(paths)
    )
    return {
        "batch": batch, "context": context, "nodes": rows, "paths": len(paths),
        "rows_of_paths": len(paths) * longest, "largest_difference": difference,
        "tree_seconds": as_tree.seconds, "paths_seconds": as_paths.seconds,
        "tree_bytes": as_tree.bytes, "paths_bytes": as_paths.bytes,
    }  # fmt: skip


def _measured(
    model: Model, slots: int, token_BN: np.ndarray, depth_BN: np.ndarray, words: jax.Array, context: int, repeats: int,
    dtype: Any,
) -> Measured:  # fmt: skip
    cache = filled_cache(model, slots, context, token_BN.shape[1], dtype)
    seconds, temporaries, logits_BNV = timed_pass(model, cache, token_BN, depth_BN, words, repeats)
    own = cache_bytes(
        model.config, num_slots=slots, max_model_len=context + token_BN.shape[1], page_size=PAGE_SIZE,
        itemsize=jnp.dtype(dtype).itemsize,
    )  # fmt: skip
    return Measured(seconds, own + temporaries, logits_BNV)


def line(row: dict[str, Any], memory: float) -> str:
    """A row for the screen."""
    tree, paths = (
        f"{1e3 * row[f'{kind}_seconds']:.1f} ms, {row[f'{kind}_bytes'] / 2**20:.0f} MiB, largest batch in "
        f"{memory:.0f} GiB {row[f'{kind}_largest_batch']}"
        for kind in ("tree", "paths")
    )
    return (
        f"<{row['tree']}> batch {row['batch']}: tree {tree}; {row['paths']} paths {paths}; logits differ by at most "
        f"{row['largest_difference']:.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--trees", default="1,2,2,1", help="separated by spaces")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-gib", type=float, help="for the largest batch; None: this machine's")
    parser.add_argument("--out", type=Path, default=Path("out/paths"))
    options = parser.parse_args(arguments)
    enable_compile_cache()
    dtype = choose_dtype("auto")
    model = open_model(options.model, dtype=dtype)
    weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
    memory = options.memory_gib or memory_gib()
    rows = []
    for tree in options.trees.split():
        for batch in map(int, options.batches.split(",")):
            row = measure(
                model, parse_expansion(tree), batch, context=options.context, repeats=options.repeats, dtype=dtype
            )
            room = memory * 2**30 - weights
            largest = {f"{k}_largest_batch": int(room / (row[f"{k}_bytes"] / batch)) for k in ("tree", "paths")}
            rows.append({"tree": tree, **row, **largest})
            print(line(rows[-1], memory), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": describe_machine(), "model": options.model, "rows": rows}
    (options.out / "parallel_paths.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    plot_paths(rows, options.out / "parallel_paths.png")


if __name__ == "__main__":
    main()
