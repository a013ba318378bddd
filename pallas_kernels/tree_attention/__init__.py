"""Attention of token trees over a paged cache: one entry, several implementations."""

from pallas_kernels.tree_attention.ancestors import ancestor_words, causal_words
from pallas_kernels.tree_attention.api import tree_attention
from pallas_kernels.tree_attention.choose import IMPLEMENTATIONS

__all__ = ["IMPLEMENTATIONS", "ancestor_words", "causal_words", "tree_attention"]
