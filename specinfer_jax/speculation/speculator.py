"""What every speculator offers: a tree for the next tokens, and a state that learns which of them were committed."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.sampling import SamplingState
from specinfer_jax.tree.token_tree import TokenTree, root_only

SpeculatorState = Any
"""Pytree of arrays that belongs to one speculator, `()` if it has none."""


class Context(NamedTuple):
    """What is committed so far, and how tokens are to be chosen; all a speculator may look at."""

    token_BS: Int[Array, "B S"]
    """Prompt and committed tokens of every slot, 0 behind them."""
    committed_B: Int[Array, " B"]
    """Number of those tokens; the last one is the tree's root."""
    prompt_len_B: Int[Array, " B"]
    """Tokens of the prompt (dynamic rope scaling reads it)."""
    sampling: SamplingState
    """Temperature, filters and random key of every slot."""

    @property
    def root_token_B(self) -> Int[Array, " B"]:
        """The last committed token of every slot."""
        return jnp.take_along_axis(self.token_BS, self.committed_B[:, None] - 1, axis=1, mode="clip")[:, 0]


class CachedModel(NamedTuple):
    """A model that a speculator runs; the engine keeps its cache, prefills it, and hands it over as state."""

    config: ModelConfig
    """What it computes."""
    max_len: int
    """Longest context it can draft for."""


@runtime_checkable
class Speculator(Protocol):
    """Proposes trees; frozen and hashable, so that it can be a static argument of the step."""

    @property
    def name(self) -> str:
        """Shown in statistics."""
        ...

    @property
    def num_nodes(self) -> int:
        """Most nodes it proposes, without the root."""
        ...

    @property
    def depth(self) -> int:
        """Deepest level it proposes."""
        ...

    @property
    def num_kinds(self) -> int:
        """Number of acceptance statistics its nodes are told apart by."""
        ...

    @property
    def cached_model(self) -> CachedModel | None:
        """The model it runs, None if it runs none (its state is `()` then)."""
        ...

    def prior_rates(self) -> np.ndarray:
        """float32 `[num_kinds]`: acceptance of a node of each kind, given its parent, before anything was seen."""
        ...

    def static_tree(self) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """(parent, depth, kind) of every row if known before drafting, else None (drafting is then always done)."""
        ...

    def propose(
        self, params: Any, state: SpeculatorState, context: Context, want_B: Bool[Array, " B"]
    ) -> tuple[Draft, SpeculatorState]:
        """Trees for the slots that want one (a lone root elsewhere) and the state after drafting."""
        ...


class ScriptedSpeculator(NamedTuple):
    """Proposes what a function says: forces acceptance of none, some or all in tests and benchmarks."""

    script: Callable[[Any, Context], TokenTree]
    """Pure jax function from its parameters and the context to trees of `num_nodes + 1` rows."""
    num_nodes: int
    """Nodes of the script's trees."""
    depth: int
    """Depth of the script's trees."""
    name: str = "scripted"
    """Shown in statistics."""

    @property
    def num_kinds(self) -> int:
        """One statistic per level."""
        return self.depth

    @property
    def cached_model(self) -> None:
        """Runs no model."""
        return None

    def prior_rates(self) -> np.ndarray:
        """Full trust: a script knows what it does."""
        return np.ones(self.num_kinds, np.float32)

    def static_tree(self) -> None:
        """Only the script knows."""
        return None

    def propose(
        self, params: Any, state: SpeculatorState, context: Context, want_B: Bool[Array, " B"]
    ) -> tuple[Draft, SpeculatorState]:
        """The script's trees."""
        tree = self.script(params, context)
        return Draft(drop_unwanted(tree, want_B), jnp.maximum(tree.depth_BN - 1, 0)), state


def drop_unwanted(tree: TokenTree, want_B: Bool[Array, " B"]) -> TokenTree:
    """The tree where it is wanted, a lone root elsewhere."""
    lone = root_only(tree.token_BN[:, 0], tree.num_rows)
    return TokenTree(*(jnp.where(want_B[:, None], full, root) for full, root in zip(tree, lone, strict=True)))
