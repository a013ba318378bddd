"""Which SSM proposes which tree where the user names none: `tree="auto"` and `tree="wide"`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from specinfer_jax.tree.optimal import WIDE_NODES, best_trees, fastest_tree
from specinfer_jax.tree.rates import AcceptanceRates
from specinfer_jax.tree.shape import TreeShape

UNKNOWN_RATES = AcceptanceRates.from_success(0.6, 0.8, 5)
"""Of an SSM that nobody measured: hopeful, so that it is tried."""
MAX_DEPTH = 8
"""Most levels of a tree chosen for speed."""
NEED = 1.02
"""What an SSM's tree must promise over incremental decoding: its rates are those of other prompts."""
NEED_BESIDE_NGRAMS = 1.1
"""The same where n-grams propose as well, which cost nothing: less than this was lost again in use (docs/log.md)."""
_WIDE_DEPTH = 16
WIDE_NGRAM = (6, 2)
"""Continuations of n-grams beside SSMs in `tree="wide"`, whose nodes count among WIDE_NODES."""


class Choice(NamedTuple):
    """What `fastest_ssm` found."""

    ssm: int
    """Index of the SSM that proposes."""
    shape: TreeShape
    """Its tree."""
    tokens_per_second: float
    """As reckoned, of one slot."""


def fastest_ssm(
    rates: Sequence[AcceptanceRates], *, verify_seconds: Mapping[int, float],
    draft_seconds: Sequence[Mapping[int, float]], need: float = NEED,
) -> Choice | None:  # fmt: skip
    """The SSM and the tree with the most tokens per second; None where none beats incremental decoding.

    Every SSM is taken alone: what the trees of several have in common their own rates do not tell.

    Args:
      rates: acceptance of every SSM.
      verify_seconds: one LLM pass by row bucket.
      draft_seconds: one pass of every SSM by rows.
      need: tokens per second over incremental decoding's that are asked for.
    """
    choices = []
    for m, (own, seconds) in enumerate(zip(rates, draft_seconds, strict=True)):
        found = fastest_tree(own, verify_seconds=verify_seconds, draft_seconds=seconds, max_depth=MAX_DEPTH, need=need)
        if found is not None:
            choices.append(Choice(m, found.shape, found.tokens_per_second))
    return max(choices, key=lambda choice: choice.tokens_per_second, default=None)


def widest_trees(rates: Sequence[AcceptanceRates | None], *, max_nodes: int = WIDE_NODES) -> list[TreeShape]:
    """For every SSM the tree with the most tokens per step, together at most `max_nodes` speculated nodes."""
    share = max(max_nodes // max(len(rates), 1), 1)
    return [
        best_trees(own or UNKNOWN_RATES, max_nodes=share, max_depth=min(_WIDE_DEPTH, share))[-1].shape for own in rates
    ]
