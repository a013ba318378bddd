"""The SSM speculator: a small model grows the token tree level by level (SpecInfer, section 3, expansion-based).

The SSM's cache holds committed tokens only. Each proposal first feeds what the cache lacks, as chains of rows; the
root rides behind the last chain as row 0 of the tree:

    committed  t0 t1 t2 t3 t4 t5        cache length 3 -> rows [t3 t4 | t5 = root]  -> level 1 -> level 2 -> ...
                        ^ cached to here     caught up, committed

So rejected branches, bonus tokens, nodes of other speculators and steps without speculation need no special case.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import ancestor_words, causal_words
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, read_first
from specinfer_jax.models.transformer import forward, vocabulary_logits
from specinfer_jax.notation import LayerKV
from specinfer_jax.speculation.speculator import CachedModel, Context, Draft, drop_unwanted
from specinfer_jax.tree.expand import Expansion
from specinfer_jax.tree.token_tree import TokenTree

_PRIOR_FIRST_CHILD, _PRIOR_OTHER_CHILD = 0.6, 0.12


@dataclasses.dataclass(frozen=True)
class SsmSpeculator:
    """Expands a static tree from an SSM's most probable tokens; its state is the SSM's KVCache."""

    config: ModelConfig
    """The SSM."""
    expansion: Expansion
    """Children per node at every level."""
    max_len: int
    """Longest context the SSM drafts for; beyond it the speculator is silent."""
    vocab_limit: int
    """Ids from here on are never proposed (padding of either vocabulary)."""
    name: str = "ssm"
    """Shown in statistics."""
    implementation: str | None = None
    """Attention kernel; None picks."""

    @property
    def num_nodes(self) -> int:
        """Nodes of the expansion."""
        return self.expansion.num_nodes

    @property
    def depth(self) -> int:
        """Levels of the expansion."""
        return self.expansion.depth

    @property
    def num_kinds(self) -> int:
        """(level, child rank)."""
        return sum(self.expansion.widths)

    @property
    def cached_model(self) -> CachedModel:
        """The SSM."""
        return CachedModel(self.config, self.max_len)

    def _kinds(self) -> np.ndarray:
        level_start = np.concatenate([[0, 0], np.cumsum(self.expansion.widths)[:-1]])
        return (level_start[self.expansion.depths()] + self.expansion.child_ranks()).astype(np.int32)

    def prior_rates(self) -> np.ndarray:
        """float32 `[num_kinds]`: hopeful, so that an unknown SSM is tried."""
        ranks = np.concatenate([np.arange(k) for k in self.expansion.widths])
        return np.where(ranks == 0, _PRIOR_FIRST_CHILD, _PRIOR_OTHER_CHILD).astype(np.float32)

    def static_tree(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(parent, depth, kind) of every row."""
        return self.expansion.parents(), self.expansion.depths(), self._kinds()

    def propose(
        self, params: Any, state: KVCache, context: Context, want_B: Bool[Array, " B"]
    ) -> tuple[Draft, KVCache]:
        """Catch up, expand, and return the trees; slots past the SSM's context get a lone root."""
        # The deepest row fed is a parent of leaves: position committed - 1 + depth - 1.
        want_B = want_B & (context.committed_B + self.depth - 1 <= self.max_len)
        chain_len = self.depth + 2
        cache = self._catch_up(params, state, context, want_B, chain_len)
        lag_B = jnp.where(want_B, context.committed_B - 1 - cache.length_B, 0)

        def draft() -> tuple[Array, tuple[LayerKV, ...]]:
            return self._expand(params, cache, context, lag_B, chain_len)

        token_Bn, rows = read_first(want_B.any(), draft)
        cache = commit(cache, rows, lag_B)

        parent_N, depth_N, kind_N = self.static_tree()
        shape = (token_Bn.shape[0], self.num_nodes + 1)
        tree = TokenTree(
            token_BN=jnp.concatenate([context.root_token_B[:, None], token_Bn], axis=1),
            parent_BN=jnp.broadcast_to(parent_N[None], shape),
            depth_BN=jnp.broadcast_to(depth_N[None], shape),
            valid_BN=jnp.ones(shape, bool),
        )
        return Draft(drop_unwanted(tree, want_B), jnp.broadcast_to(kind_N[None], shape)), cache

    def _chain_rows(
        self, params: Any, cache: KVCache, context: Context, count_B: Int[Array, " B"], chain_len: int
    ) -> tuple[Float[Array, "D T"], tuple[LayerKV, ...]]:
        """Forward pass over the `chain_len` tokens that follow the cache; rows from `count` on are garbage."""
        step_C = jnp.arange(chain_len, dtype=jnp.int32)[None]
        position_BC = cache.length_B[:, None] + jnp.where(step_C < count_B[:, None], step_C, 0)
        token_BC = jnp.take_along_axis(context.token_BS, position_BC, axis=1, mode="clip")
        words_CC = causal_words(chain_len)
        words = jnp.broadcast_to(words_CC[None], (token_BC.shape[0], *words_CC.shape))
        return forward(
            params, token_BC, position_BC, cache, words,
            config=self.config, prompt_len_B=context.prompt_len_B, implementation=self.implementation,
        )  # fmt: skip

    def _catch_up(
        self, params: Any, cache: KVCache, context: Context, want_B: Bool[Array, " B"], chain_len: int
    ) -> KVCache:
        """Feed committed tokens until the rest, root included, fits one chain. Usually zero rounds."""

        def lag_B(cache: KVCache) -> Array:
            return jnp.where(want_B, context.committed_B - 1 - cache.length_B, 0)

        def feed(cache: KVCache) -> KVCache:
            count_B = jnp.minimum(lag_B(cache), chain_len)
            rows = read_first(
                (count_B > 0).any(), lambda: self._chain_rows(params, cache, context, count_B, chain_len)[1]
            )
            return commit(cache, rows, count_B)

        return jax.lax.while_loop(lambda cache: (lag_B(cache) > chain_len - 1).any(), feed, cache)

    def _expand(
        self, params: Any, cache: KVCache, context: Context, lag_B: Int[Array, " B"], chain_len: int
    ) -> tuple[Int[Array, "B n"], tuple[LayerKV, ...]]:
        """Tokens of all speculated rows, and the K/V of the chain that caught up (lag rows, then the root)."""
        B = lag_B.shape[0]
        x_DT, chain = self._chain_rows(params, cache, context, lag_B + 1, chain_len)
        x_DW = jnp.take_along_axis(x_DT.reshape(-1, B, chain_len), lag_B[None, :, None], axis=2)[:, :, 0]
        # The chain stays uncommitted here: chain and tree together are one tree whose root is the chain's first row.
        words_BRC = ancestor_words(self._parents_behind_chain(lag_B, chain_len))
        rows, level_tokens, start = chain, [], chain_len
        for level, (k, size) in enumerate(zip(self.expansion.widths, self.expansion.level_sizes, strict=True)):
            token_BW = self._children(params, x_DW, B, k).reshape(B, size)
            level_tokens.append(token_BW)
            if level + 1 == self.expansion.depth:
                break  # leaves need no pass of their own
            stop = start + size
            position_BW = jnp.broadcast_to((context.committed_B + level)[:, None], (B, size))
            x_DW, new = forward(
                params, token_BW, position_BW, cache, words_BRC[:, start:stop, : -(-stop // 32)],
                config=self.config, earlier=rows, prompt_len_B=context.prompt_len_B,
                implementation=self.implementation,
            )  # fmt: skip
            rows = jax.tree.map(lambda old, added: jnp.concatenate([old, added], axis=1), rows, new)
            start = stop
        return jnp.concatenate(level_tokens, axis=1), chain

    def _parents_behind_chain(self, lag_B: Int[Array, " B"], chain_len: int) -> Int[Array, "B R"]:
        """Parents of the chain's rows (0 to lag, the last is the tree's root) followed by the tree's other rows."""
        B, R = lag_B.shape[0], chain_len + self.num_nodes
        chain_C = np.concatenate([[R], np.arange(chain_len - 1)]).astype(np.int32)
        parent_n = self.expansion.parents()[1:]
        tree_Bn = jnp.where(parent_n[None] == 0, lag_B[:, None], parent_n[None] + chain_len - 1)
        return jnp.concatenate([jnp.broadcast_to(chain_C[None], (B, chain_len)), tree_Bn], axis=1)

    def _children(self, params: Any, x_DT: Float[Array, "D T"], B: int, k: int) -> Int[Array, "B w k"]:
        """The k most probable ids after every row."""
        logits_VT = vocabulary_logits(params, x_DT, config=self.config)[: self.vocab_limit]
        if k == 1:
            return jnp.argmax(logits_VT, axis=0).astype(jnp.int32).reshape(B, -1, 1)
        _, id_TK = jax.lax.top_k(logits_VT.T, min(k, self.vocab_limit))
        # A vocabulary smaller than k: repeat the last id; the verifier takes the first of equal siblings.
        id_TK = jnp.pad(id_TK, ((0, 0), (0, k - id_TK.shape[1])), mode="edge")
        return id_TK.astype(jnp.int32).reshape(B, -1, k)
