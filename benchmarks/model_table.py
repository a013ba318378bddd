"""What a real model says behind any path of tokens, computed when asked for: for studies of verification rules."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tree_attention import causal_words
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, init_cache
from specinfer_jax.models.transformer import forward, vocabulary_logits
from specinfer_jax.opened import Model

Node = tuple[int, ...]
"""A node by the tokens that lead to it from the root (), so that draws of the same token share a node."""


def softmax(logits: np.ndarray) -> np.ndarray:
    """float64 softmax over the last axis."""
    raised = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


@functools.partial(jax.jit, static_argnames="config")
def run_chain(
    params: Any, cache: KVCache, token_1Q: Any, keep_1: Any, *, config: ModelConfig
) -> tuple[jax.Array, KVCache]:
    """Logits `[V, Q]` of a chain behind the cache, and the cache with the first `keep` of its rows."""
    rows = token_1Q.shape[1]
    position_1Q = cache.length_B[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    x_DT, new = forward(params, token_1Q, position_1Q, cache, causal_words(rows)[None], config=config)
    return vocabulary_logits(params, x_DT, config=config), commit(cache, new, keep_1)


class ModelTable:
    """What a model says, at temperature 1, behind its committed tokens and a node's; a pass for every new path."""

    def __init__(self, model: Model, *, rows: int, max_model_len: int) -> None:
        config, self._rows = model.config, rows
        self._root: list[int] = []
        self._known: dict[Node, np.ndarray] = {}
        self._cache = init_cache(config, num_slots=1, max_model_len=max_model_len, page_size=128, dtype=jnp.float32)
        self._run = functools.partial(run_chain, model.params, config=config)

    def _pass(self, tokens: Sequence[int], *, keep: int) -> tuple[jax.Array, KVCache]:
        padded = [*tokens, *[0] * (self._rows - len(tokens))]
        return self._run(self._cache, np.array([padded], np.int32), np.array([keep], np.int32))

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit tokens; the last one stays outside the cache, as the root."""
        ids = [*self._root, *tokens]
        for start in range(0, len(ids) - 1, self._rows):
            chunk = ids[start:-1][: self._rows]
            _, self._cache = self._pass(chunk, keep=len(chunk))
        self._root, self._known = ids[-1:], {}

    def __call__(self, node: Node) -> np.ndarray:
        if node not in self._known:
            logits_VQ, _ = self._pass([*self._root, *node], keep=0)
            rows = softmax(np.asarray(logits_VQ).T[: len(node) + 1])
            self._known |= {node[:depth]: p_V for depth, p_V in enumerate(rows)}
        return self._known[node]
