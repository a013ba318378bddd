"""The SSM speculator: a small model grows the token tree level by level (SpecInfer, section 3, expansion-based).

The SSM's cache holds committed tokens only. Each proposal first feeds what the cache lacks, as chains of rows; the
root rides behind the last chain as row 0 of the tree:

    committed  t0 t1 t2 t3 t4 t5        cache length 3 -> rows [t3 t4 | t5 = root]  -> level 1 -> level 2 -> ...
                        ^ cached to here     caught up, committed

So rejected branches, bonus tokens, nodes of other speculators and steps without speculation need no special case.
At a temperature, children may be drawn (rules.py); a draw that does not exist because q has no more tokens leaves an
invalid row, and its subtree with it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.tree_attention import ancestor_words, causal_words
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, commit, read_first
from specinfer_jax.models.transformer import forward, vocabulary_logits
from specinfer_jax.notation import LayerKV
from specinfer_jax.speculation.children import drawn_children, likeliest_children
from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.mss import DraftDistributions
from specinfer_jax.speculation.randomness import Role, keys_at
from specinfer_jax.speculation.rules import TOP_K
from specinfer_jax.speculation.speculator import CachedModel, Context, drop_unwanted
from specinfer_jax.tree.rates import AcceptanceRates
from specinfer_jax.tree.shape import Level, TreeShape
from specinfer_jax.tree.token_tree import TokenTree

_PRIOR_FIRST_CHILD, _PRIOR_OTHER_CHILD = 0.6, 0.12


@dataclasses.dataclass(frozen=True)
class SsmSpeculator:
    """Expands a static tree from an SSM's most probable tokens; its state is the SSM's KVCache."""

    config: ModelConfig
    """The SSM."""
    expansion: TreeShape
    """Children of every node."""
    max_len: int
    """Longest context the SSM drafts for; beyond it the speculator is silent."""
    vocab_limit: int
    """Ids from here on are never proposed (padding of either vocabulary)."""
    children: str = TOP_K
    """How children are chosen in slots with a temperature (rules.py); in greedy slots always the likeliest."""
    number: int = 0
    """Which of the SSMs it is: SSMs draw with different keys, or their trees would be correlated."""
    name: str = "ssm"
    """Shown in statistics."""
    rates: AcceptanceRates | None = None
    """Acceptance as measured beforehand; None: unknown."""
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
        """float32 `[num_kinds]`: as measured; of an unknown SSM hopeful, so that it is tried."""
        if self.rates is not None:
            by_level = [self.rates.at(depth, k) for depth, k in enumerate(self.expansion.widths)]
            return np.concatenate(by_level).astype(np.float32)
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

        def draft() -> tuple[_Expanded, tuple[LayerKV, ...]]:
            return self._expand(params, cache, context, lag_B, chain_len)

        expanded, rows = read_first(want_B.any(), draft)
        cache = commit(cache, rows, lag_B)

        parent_N, depth_N, kind_N = self.static_tree()
        B = want_B.shape[0]
        root_B1 = context.root_token_B[:, None]
        valid_BN = jnp.concatenate([jnp.ones((B, 1), bool), expanded.valid_Bn], axis=1)
        tree = TokenTree(
            token_BN=jnp.concatenate([root_B1, jnp.where(expanded.valid_Bn, expanded.token_Bn, 0)], axis=1),
            parent_BN=jnp.where(valid_BN, parent_N[None], len(parent_N)),
            depth_BN=jnp.where(valid_BN, depth_N[None], 0),
            valid_BN=valid_BN,
        )
        kind_BN = jnp.broadcast_to(kind_N[None], valid_BN.shape)
        slot_BN = None
        if expanded.drawn_from is not None:
            slot_BN = jnp.concatenate([jnp.zeros((B, 1), jnp.int32), expanded.slot_Bn], axis=1)
        return Draft(drop_unwanted(tree, want_B), kind_BN, slot_BN, expanded.drawn_from), cache

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
    ) -> tuple["_Expanded", tuple[LayerKV, ...]]:
        """All speculated rows, and the K/V of the chain that caught up (lag rows, then the root)."""
        B = lag_B.shape[0]
        x_DT, chain = self._chain_rows(params, cache, context, lag_B + 1, chain_len)
        x_DW = jnp.take_along_axis(x_DT.reshape(-1, B, chain_len), lag_B[None, :, None], axis=2)[:, :, 0]
        # The chain stays uncommitted here: chain and tree together are one tree whose root is the chain's first row.
        words_BRC = ancestor_words(self._parents_behind_chain(lag_B, chain_len))
        rows, levels, start = chain, [], chain_len
        parent_valid_BW = jnp.ones((B, 1), bool)
        for depth, level in enumerate(self.expansion.levels()):
            nodes = self._children(params, x_DW, context, level, depth, parent_valid_BW)
            levels.append(nodes)
            W = len(level.inner_W)
            if W == 0:
                break  # leaves need no pass of their own
            stop = start + W
            position_BW = jnp.broadcast_to((context.committed_B + depth)[:, None], (B, W))
            x_DW, new = forward(
                params, _columns(nodes.token_Bn, level.inner_W), position_BW, cache,
                words_BRC[:, start:stop, : -(-stop // 32)],
                config=self.config, earlier=rows, prompt_len_B=context.prompt_len_B,
                implementation=self.implementation,
            )  # fmt: skip
            rows = jax.tree.map(lambda old, added: jnp.concatenate([old, added], axis=1), rows, new)
            parent_valid_BW = _columns(nodes.valid_Bn, level.inner_W)
            start = stop
        # None (no distributions) is an empty pytree, so all levels have the same structure.
        expanded = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *levels)
        return expanded._replace(drawn_from=self._by_row(expanded.drawn_from)), chain

    def _parents_behind_chain(self, lag_B: Int[Array, " B"], chain_len: int) -> Int[Array, "B R"]:
        """Parents of the chain's rows (0 to lag, the last is the tree's root) followed by the tree's inner rows."""
        inner_W = self.expansion.inner_rows()
        B, R = lag_B.shape[0], chain_len + len(inner_W) - 1
        chain_C = np.concatenate([[R], np.arange(chain_len - 1)]).astype(np.int32)
        # Index of every inner row's parent among the inner rows; the root is number 0.
        parent_w = np.searchsorted(inner_W, self.expansion.parents()[inner_W[1:]]).astype(np.int32)
        tree_Bw = jnp.where(parent_w[None] == 0, lag_B[:, None], parent_w[None] + chain_len - 1)
        return jnp.concatenate([jnp.broadcast_to(chain_C[None], (B, chain_len)), tree_Bw], axis=1)

    def _by_row(self, drawn_from: DraftDistributions | None) -> DraftDistributions | None:
        """Entries for all rows up to the last one with children; those of rows without are never read."""
        if drawn_from is None:
            return None
        inner_W = self.expansion.inner_rows()
        entry_E = np.searchsorted(inner_W, np.arange(inner_W[-1] + 1)).astype(np.int32)
        return DraftDistributions(*(_columns(x_BWC, entry_E) for x_BWC in drawn_from))

    def _children(
        self, params: Any, x_DT: Float[Array, "D T"], context: Context, level: Level, depth: int,
        parent_valid_BW: Bool[Array, "B W"],
    ) -> "_Expanded":  # fmt: skip
        """The nodes of one level, out of W nodes of the level above."""
        B, k = context.committed_B.shape[0], level.most
        logits_VT = vocabulary_logits(params, x_DT, config=self.config)[: self.vocab_limit]
        # Without the barrier XLA gives the matmul the layout that top_k wants: 20 times slower for 2 to 6 rows on CPU.
        logits_VT = jax.lax.optimization_barrier(logits_VT)
        if self.children == TOP_K:
            token_BWk, valid_BWk = likeliest_children(logits_VT, B, k)
            slot_BWk, drawn_from = jnp.zeros_like(token_BWk), None
        else:
            key_B = keys_at(context.sampling.key_B2, context.committed_B, Role.DRAFT, self.number, depth)
            drawn = drawn_children(logits_VT, context.sampling, key_B, k=k, rule=self.children)
            token_BWk, valid_BWk, slot_BWk, drawn_from = drawn
        if "output_ids" in params:  # a reduced head: its rows stand for these ids of the LLM
            id_V = params["output_ids"]
            token_BWk = id_V[token_BWk]
            drawn_from = None if drawn_from is None else drawn_from._replace(id_BEC=id_V[drawn_from.id_BEC])
        valid_BWk = valid_BWk & parent_valid_BW[:, :, None]
        # Of nodes that have fewer children than k the first draws count: the others were never drawn, as it were.
        token_Bn, valid_Bn, slot_Bn = (
            _columns(x_BWk.reshape(B, -1), level.child_n) for x_BWk in (token_BWk, valid_BWk, slot_BWk)
        )
        return _Expanded(token_Bn, valid_Bn, slot_Bn, drawn_from)


class _Expanded(NamedTuple):
    """Speculated rows, the root not among them, and what they were drawn from."""

    token_Bn: Int[Array, "B n"]
    """Ids."""
    valid_Bn: Bool[Array, "B n"]
    """False: no such draw, or none above it."""
    slot_Bn: Int[Array, "B n"]
    """Candidates drawn."""
    drawn_from: DraftDistributions | None
    """q of every row with children, the root's first; None: chosen without randomness."""


def _columns(x_BX: Array, index_n: np.ndarray) -> Array:
    """`x[:, index]` for a static, rising index."""
    is_everything = len(index_n) == x_BX.shape[1]
    return x_BX if is_everything else x_BX[:, index_n]
