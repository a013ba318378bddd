"""Tiny models loaded from folders, and the decoder run on rows of one slot, chains or trees."""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint_cases import write_hf_folder

from pallas_kernels.tree_attention import ancestor_words
from specinfer_jax.checkpoint.load import LoadedModel, load_model
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, init_cache
from specinfer_jax.models.transformer import Params, forward, vocabulary_logits
from specinfer_jax.notation import LayerKV

Rows = tuple[LayerKV, ...]


def tiny_model(hf: dict[str, Any], seed: int = 0, *, dtype: Any = jnp.float32) -> LoadedModel:
    """Load the folder that `write_hf_folder` builds from a config.json; the same arguments share one model."""
    return _tiny_model(json.dumps(hf), seed, jnp.dtype(dtype).name)


@functools.cache
def _tiny_model(hf: str, seed: int, dtype: str) -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        write_hf_folder(Path(folder), json.loads(hf), seed)
        return load_model(folder, dtype=dtype)


def empty_cache(
    config: ModelConfig, *, num_slots: int = 1, max_model_len: int = 64, page_size: int = 8, dtype: Any = jnp.float32
) -> KVCache:
    """A cache that holds nothing."""
    return init_cache(config, num_slots=num_slots, max_model_len=max_model_len, page_size=page_size, dtype=dtype)


@functools.partial(jax.jit, static_argnames="config")
def _run(
    params: Params, token_1Q: Any, position_1Q: Any, cache: KVCache, words: Any, earlier: Rows | None,
    prompt_len_1: Any, *, config: ModelConfig,
) -> tuple[Any, Rows]:  # fmt: skip
    x_DT, rows = forward(
        params, token_1Q, position_1Q, cache, words, config=config, earlier=earlier, prompt_len_B=prompt_len_1
    )
    return vocabulary_logits(params, x_DT, config=config).T, rows


_words = jax.jit(ancestor_words)
_commit = jax.jit(commit)


def run_rows(
    model: LoadedModel, tokens: Sequence[int], *, cache: KVCache | None = None, parents: Sequence[int] | None = None,
    positions: Sequence[int] | None = None, earlier: Rows | None = None, prompt_len: int = 0,
) -> tuple[np.ndarray, Rows]:  # fmt: skip
    """Logits `[rows, V]` of the last `len(tokens)` rows of a tree, and their K/V.

    Args:
      model: the model.
      tokens: ids of the new rows.
      cache: of one slot; None is an empty one.
      parents: of all rows, earlier ones too; a root has a parent out of range. None is a chain.
      positions: of the new rows; None: cache length + depth.
      earlier: K/V of the rows before.
      prompt_len: read by dynamic rope scaling.
    """
    cache = empty_cache(model.config) if cache is None else cache
    done = 0 if earlier is None else earlier[0].k_BNGK.shape[1]
    N = done + len(tokens)
    parents = [N, *range(N - 1)] if parents is None else [p if 0 <= p < N else N for p in parents]
    if positions is None:
        positions = [int(cache.length_B[0]) + depth for depth in depths(parents)][done:]
    words = _words(jnp.asarray([parents], jnp.int32))[:, done:]
    logits, rows = _run(
        model.params, jnp.asarray([tokens], jnp.int32), jnp.asarray([positions], jnp.int32), cache, words, earlier,
        jnp.asarray([prompt_len], jnp.int32), config=model.config,
    )  # fmt: skip
    return np.asarray(logits), rows


def depths(parents: Sequence[int]) -> list[int]:
    """Edges from every row to its root."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent < len(found) else 0)
    return found


def append(cache: KVCache, rows: Rows, count: int) -> KVCache:
    """The cache of one slot with the first `count` rows behind its tokens."""
    return _commit(cache, rows, jnp.asarray([count], jnp.int32))


def filled(model: LoadedModel, tokens: Sequence[int], *, prompt_len: int = 0, **shape: Any) -> KVCache:
    """A cache that holds `tokens`."""
    cache = empty_cache(model.config, dtype=model.params["embed"]["embedding"].dtype, **shape)
    _, rows = run_rows(model, tokens, cache=cache, prompt_len=prompt_len)
    return append(cache, rows, len(tokens))
