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

from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.speculator import Context, SpeculatorState, drop_unwanted
from specinfer_jax.tree.merge import merge_trees
from specinfer_jax.tree.token_tree import TokenTree

# Acceptance of a node given its parent, for the first, the second and later nodes of a continuation; measured on greedy
# answers of the default model to training prompts (docs/log.md). The longest and latest match first, by its length 1-6:
_BEST_MATCH_PRIOR = (
    (0.20, 0.53, 0.72), (0.51, 0.63, 0.76), (0.63, 0.70, 0.79),
    (0.69, 0.76, 0.81), (0.75, 0.80, 0.83), (0.90, 0.91, 0.94),
)  # fmt: skip
# The continuations that differ from it; the match's length says little about them.
_OTHER_MATCH_PRIOR = ((0.12, 0.30, 0.50), (0.06, 0.16, 0.35), (0.04, 0.12, 0.20))


@dataclasses.dataclass(frozen=True)
class NgramSpeculator:
    """Continuations of earlier occurrences that differ, longest and latest match first."""

    max_match: int = 6
    """Longest context suffix compared, in tokens."""
    branch_depths: tuple[int, ...] = (15, 4, 4)
    """Tokens of each continuation: the likeliest may go on for long."""

    @property
    def name(self) -> str:
        """Shown in statistics."""
        return "ngram"

    @property
    def num_nodes(self) -> int:
        """Room for continuations that share nothing."""
        return sum(self.branch_depths)

    @property
    def depth(self) -> int:
        """The longest continuation."""
        return max(self.branch_depths)

    @property
    def num_kinds(self) -> int:
        """(match length, branch, first or second or later node)."""
        return self.max_match * len(self.branch_depths) * 3

    @property
    def cached_model(self) -> None:
        """Runs no model."""
        return None

    def prior_rates(self) -> np.ndarray:
        """float32 `[num_kinds]`."""
        best = [_BEST_MATCH_PRIOR[min(m, len(_BEST_MATCH_PRIOR) - 1)] for m in range(self.max_match)]
        others = [_OTHER_MATCH_PRIOR[min(r, len(_OTHER_MATCH_PRIOR) - 1)] for r in range(len(self.branch_depths) - 1)]
        return np.array([[row, *others] for row in best], np.float32).reshape(-1)

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

        shared_depth = min(self.branch_depths)
        following_DS = [jnp.roll(token_S, -1 - d) for d in range(shared_depth)]
        step_D = jnp.arange(self.depth)
        tokens, lengths = [], []
        for _ in self.branch_depths:
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
        """Every continuation as a chain of its own under one root; those without an occurrence are left out."""
        B, N = root_token_B.shape[0], self.num_nodes + 1
        branch_n = np.repeat(np.arange(len(self.branch_depths)), self.branch_depths)
        level_n = np.concatenate([np.arange(depth) for depth in self.branch_depths])
        parent_n = np.where(level_n == 0, 0, np.arange(self.num_nodes)).astype(np.int32)
        matched_Bn = match_BR[:, branch_n] > 0
        longest_Bn = jnp.maximum(match_BR[:, branch_n] - 1, 0)
        kind_Bn = (longest_Bn * len(self.branch_depths) + branch_n[None]) * 3 + np.minimum(level_n, 2)[None]

        def with_root(root: Any, rest_Bn: Array) -> Array:
            root_B1 = jnp.broadcast_to(jnp.asarray(root, rest_Bn.dtype).reshape(-1, 1), (B, 1))
            return jnp.concatenate([root_B1, rest_Bn], axis=1)

        tree = TokenTree(
            token_BN=with_root(root_token_B, jnp.where(matched_Bn, token_BRD[:, branch_n, level_n], 0)),
            parent_BN=with_root(N, jnp.where(matched_Bn, parent_n[None], N)),
            depth_BN=with_root(0, jnp.where(matched_Bn, level_n[None].astype(np.int32) + 1, 0)),
            valid_BN=with_root(True, matched_Bn),
        )
        return tree, with_root(0, kind_Bn.astype(jnp.int32))
