"""Figures of benchmarks.serving and benchmarks.parallel_paths as PNG; needs matplotlib (the extra `plots`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import pyplot, save_figure


def plot_by_batch(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time per token and throughput by batch size, one bar a way of decoding (SpecInfer, figures 7 and 10)."""
    if not rows:
        return
    modes, batches = list(dict.fromkeys(r["mode"] for r in rows)), sorted({r["batch"] for r in rows})
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 3.6))
    for m, mode in enumerate(modes):
        own = {r["batch"]: r for r in rows if r["mode"] == mode and r["time_per_output_token"] is not None}
        at = [i + (m - (len(modes) - 1) / 2) * 0.8 / len(modes) for i, b in enumerate(batches) if b in own]
        shown = [own[b] for b in batches if b in own]
        axes[0].bar(at, [1e3 * r["time_per_output_token"]["p50"] for r in shown], 0.8 / len(modes), label=mode)
        axes[1].bar(at, [r["tokens_per_second"] for r in shown], 0.8 / len(modes))
    for ax, label in zip(axes, ("time per token, median, ms", "tokens per second"), strict=True):
        ax.set(xticks=range(len(batches)), xticklabels=batches, xlabel="batch size", ylabel=label)
        ax.grid(axis="y", alpha=0.3)
    axes[0].legend()
    save_figure(figure, path)


def plot_by_rate(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time to first token and per token by arrivals a second."""
    if not rows:
        return
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 3.6))
    for mode, batch in dict.fromkeys((r["mode"], r["batch"]) for r in rows):
        own = sorted((r for r in rows if (r["mode"], r["batch"]) == (mode, batch)), key=lambda r: r["rate"])
        for ax, name in zip(axes, ("time_to_first_token", "time_per_output_token"), strict=True):
            points = [(r["rate"], 1e3 * r[name]["p50"]) for r in own if r[name] is not None]
            ax.plot(*zip(*points, strict=True), marker="o", label=f"{mode}, {batch} slots")
    for ax, label in zip(axes, ("time to first token, median, ms", "time per token, median, ms"), strict=True):
        ax.set(xlabel="arrivals per second", ylabel=label)
        ax.grid(alpha=0.3)
    axes[0].legend()
    save_figure(figure, path)


def plot_paths(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tree-based against sequence-based parallel decoding: time of a pass and bytes (SpecInfer, figure 11)."""
    figure, axes = pyplot().subplots(1, 2, figsize=(10, 3.6))
    for tree in dict.fromkeys(r["tree"] for r in rows):
        own = [r for r in rows if r["tree"] == tree]
        batches = [r["batch"] for r in own]
        for kind, style in (("tree", "-"), ("paths", "--")):
            label = f"<{tree}> as {'one tree' if kind == 'tree' else 'sequences'}"
            axes[0].plot(batches, [1e3 * r[f"{kind}_seconds"] for r in own], style, marker="o", label=label)
            axes[1].plot(batches, [r[f"{kind}_bytes"] / 2**20 for r in own], style, marker="o")
    for ax, label in zip(axes, ("time of a verified pass, ms", "cache and temporaries, MiB"), strict=True):
        ax.set(xlabel="batch size", ylabel=label)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    axes[0].legend()
    save_figure(figure, path)
