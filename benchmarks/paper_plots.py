"""Figures of benchmarks.paper as PNG; needs matplotlib (the extra `plots`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.drawing import pyplot, save_figure
from benchmarks.paper_tables import PROMPT_SETS, Cell


def plot_cdf(cells: Sequence[Cell], path: Path) -> None:
    """Figure 9: share of the prompts with at most so many tokens per step, one curve a tree width."""
    kinds = list(dict.fromkeys(c.rule.split(",")[0] for c in cells))
    figure, axes = pyplot().subplots(1, len(kinds), figsize=(5 * len(kinds), 3.6), sharey=True, squeeze=False)
    for kind, ax in zip(kinds, axes[0], strict=True):
        for entry in cells:
            if entry.prompt_set == "all" and entry.rule.startswith(f"{kind},"):
                rate = np.sort(np.array(entry.tokens) / np.array(entry.steps))
                share = np.arange(1, len(rate) + 1) / len(rate)
                ax.step(rate, share, where="post", label=entry.rule.removeprefix(f"{kind}, "))
        ax.set(title=kind, xlabel="tokens per step", ylim=(0, 1))
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of prompts")
    axes[0][-1].legend(loc="lower right")
    save_figure(figure, path)


def plot_widths(cells: Sequence[Cell], path: Path) -> None:
    """Table 2: tokens per step by tree width with 95 % intervals, one line a prompt set."""
    kinds = list(dict.fromkeys(c.rule.split(",")[0] for c in cells))
    figure, axes = pyplot().subplots(1, len(kinds), figsize=(5 * len(kinds), 3.6), squeeze=False)
    for kind, ax in zip(kinds, axes[0], strict=True):
        for name in dict.fromkeys(c.prompt_set for c in cells):
            own = [c for c in cells if c.prompt_set == name and c.rule.startswith(f"{kind},")]
            width, value = [int(c.rule.rsplit(" ", 1)[1]) for c in own], np.array([c.value for c in own])
            below, above = value - [c.low for c in own], [c.high for c in own] - value
            style = {"color": "black", "linewidth": 2} if name == "all" else {"alpha": 0.8}
            ax.errorbar(width, value, yerr=[below, above], capsize=2, label=PROMPT_SETS.get(name, name), **style)
        ax.set(title=kind, xlabel="width of the third level", xticks=width)
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens per step")
    axes[0][-1].legend(fontsize="small", loc="center left", bbox_to_anchor=(1.02, 0.5))  # beside it, over no point
    save_figure(figure, path)
