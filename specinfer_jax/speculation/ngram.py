"""The n-gram speculator: a tree of what followed earlier occurrences of the last tokens.

    context  ... the cat sat on | ... the cat ran to | ... the cat       (last two tokens match twice)
    tree     cat - ran - to                                              (most recent occurrence first)
                \\- sat - on

Costs a few vector comparisons over the context and no model; works at once on any LLM.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specinfer_jax.speculation.speculator import Context, Draft, SpeculatorState, drop_unwanted
from specinfer_jax.tree.merge import merge_trees
from specinfer_jax.tree.token_tree import TokenTree

# Acceptance of a node given its parent, by length of the matched context (1, 2, 3, ...), first node of its
# continuation and later ones; measured on the default model's answers to training prompts (docs/log.md).
_FIRST_NODE_PRIOR = (0.10, 0.30, 0.45, 0.55)
_LATER_NODE_PRIOR = (0.45, 0.60, 0.70, 0.75)
_RANK_DISCOUNT = 0.5


@dataclasses.dataclass(frozen=True)
class NgramSpeculator:
    """Continuations of up to `branches` earlier occurrences that differ, longest and latest match first."""

    max_match: int = 3
    """Longest context suffix compared, in tokens."""
    branches: int = 3
    """Continuations proposed."""
    depth: int = 5
    """Tokens of each continuation."""

    @property
    def name(self) -> str:
        """Shown in statistics."""
        return "ngram"

    @property
    def num_nodes(self) -> int:
        """Room for continuations that share nothing."""
        return self.branches * self.depth

    @property
    def num_kinds(self) -> int:
        """(match length, branch, first or later node)."""
        return self.max_match * self.branches * 2

    def prior_rates(self) -> np.ndarray:
        """float32 `[num_kinds]`."""
        match = np.minimum(np.arange(self.max_match), len(_FIRST_NODE_PRIOR) - 1)
        first = np.array(_FIRST_NODE_PRIOR)[match][:, None] * _RANK_DISCOUNT ** np.arange(self.branches)[None]
        later = np.broadcast_to(np.array(_LATER_NODE_PRIOR)[match][:, None], first.shape)
        return np.stack([first, later], axis=-1).reshape(-1).astype(np.float32)

    def static_tree(self) -> None:
        """Depends on the context; drafting is nearly free, so it is always done."""
        return None

    def propose(
        self, params: Any, state: SpeculatorState, context: Context, want_B: Bool[Array, " B"]
    ) -> tuple[Draft, SpeculatorState]:
        """Trees from the context alone."""
        token_BRD, match_BR = jax.vmap(self._continuations)(context.token_BS, context.committed_B)
        tree, kind_BN = self._chains(context.root_token_B, token_BRD, match_BR)
        merged = merge_trees([tree])
        kind_BN = jnp.take_along_axis(kind_BN, merged.row_BN, axis=1, mode="fill", fill_value=0)
        return Draft(drop_unwanted(merged.tree, want_B), kind_BN), state

    def _continuations(self, token_S: Int[Array, " S"], committed: Int[Array, ""]) -> tuple[Array, Array]:
        """Token ids `[branches, depth]` and matched length `[branches]` (0: no such occurrence) of one slot."""
        S = token_S.shape[0]
        end_S = jnp.arange(S, dtype=jnp.int32)
        equal_S, match_S = jnp.ones((S,), bool), jnp.zeros((S,), jnp.int32)
        for back in range(self.max_match):
            suffix_token = token_S.at[committed - 1 - back].get(mode="fill", fill_value=-1)
            reaches_S = (end_S >= back) & (committed - 1 >= back)
            equal_S = equal_S & (jnp.roll(token_S, back) == suffix_token) & reaches_S
            match_S = match_S + equal_S
        match_S = jnp.where(end_S < committed - 1, match_S, 0)

        following_DS = [jnp.roll(token_S, -1 - d) for d in range(self.depth)]
        step_D = jnp.arange(self.depth)
        tokens, lengths = [], []
        for _ in range(self.branches):
            best = jnp.argmax(match_S * S + end_S * (match_S > 0)).astype(jnp.int32)
            # An occurrence that overlaps the end goes on with its own period.
            period = jnp.maximum(committed - 1 - best, 1)
            tokens.append(token_S[(best + 1 + step_D % period) % S])
            lengths.append(match_S[best])
            same_S = jnp.ones((S,), bool)
            for following_S in following_DS:
                same_S = same_S & (following_S == following_S[best])
            match_S = jnp.where(same_S, 0, match_S)
        return jnp.stack(tokens), jnp.stack(lengths)

    def _chains(self, root_token_B: Array, token_BRD: Array, match_BR: Array) -> tuple[TokenTree, Array]:
        """Every continuation as a chain of its own under one root, rows in the order of `_row_order`."""
        B, N = root_token_B.shape[0], self.num_nodes + 1
        branch_n, level_n, parent_n = self._row_order()
        matched_Bn = match_BR[:, branch_n] > 0
        token_Bn = jnp.where(matched_Bn, token_BRD[:, branch_n, level_n], 0)
        kind_Bn = (jnp.maximum(match_BR[:, branch_n] - 1, 0) * self.branches + branch_n[None]) * 2 + (level_n > 0)[None]

        def with_root(root_B: Array, rest_Bn: Array) -> Array:
            return jnp.concatenate([root_B[:, None], rest_Bn], axis=1)

        none_B, true_B = jnp.zeros((B,), jnp.int32), jnp.ones((B,), bool)
        tree = TokenTree(
            token_BN=with_root(root_token_B, token_Bn),
            parent_BN=with_root(none_B + N, jnp.where(matched_Bn, parent_n[None], N)),
            depth_BN=with_root(none_B, jnp.where(matched_Bn, level_n[None] + 1, 0)),
            valid_BN=with_root(true_B, matched_Bn),
        )
        # Branches without an occurrence leave gaps in this order; merging closes them.
        return tree, with_root(none_B, kind_Bn.astype(jnp.int32))

    def _row_order(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Branch, level and parent row of rows 1..num_nodes: likeliest first, so that a cut tree keeps the best."""
        weight = {
            (r, d): _RANK_DISCOUNT**r * _LATER_NODE_PRIOR[-1] ** d
            for r in range(self.branches)
            for d in range(self.depth)
        }
        order = sorted(weight, key=lambda key: -weight[key])
        row = {key: n + 1 for n, key in enumerate(order)}
        parents = [row[r, d - 1] if d else 0 for r, d in order]
        return np.array([r for r, _ in order]), np.array([d for _, d in order]), np.array(parents, np.int32)
