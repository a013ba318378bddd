"""Rows of docs/scale.md: what one model needs on one mesh, from shallow models to deep ones, and as tables."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

GIB, MIB = 2**30, 2**20


class Chip(NamedTuple):
    """One device of a TPU generation, by the vendor's data sheets."""

    memory: int
    """Bytes."""
    topologies: tuple[tuple[int, str], ...]
    """(devices, name) of slices to compile for, smallest first; fewer devices are the first ones of a slice."""


CHIPS = {
    "v4": Chip(16 * GIB, ((8, "v4:2x2x1"), (16, "v4:2x2x2"))),  # a chip is two devices
    "v5e": Chip(16 * GIB, ((4, "v5e:2x2"), (8, "v5e:2x4"), (16, "v5e:4x4"))),
    "v5p": Chip(95 * GIB, ((4, "v5p:2x2x1"),)),
    "v6e": Chip(32 * GIB, ((4, "v6e:2x2"), (8, "v6e:2x4"))),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One model on one mesh."""

    llm: str
    ssm: str
    target: str
    devices: int
    offload: bool
    layers: int
    """Of the LLM."""
    ssm_layers: int
    """Of the SSM."""
    compiled: tuple[tuple[int, int], ...]
    """Depths of LLM and SSM that were compiled; if not the model's own, the row follows from them."""
    argument_bytes: int
    """Weights, caches and the rest of the state on one device."""
    temporary_bytes: int
    """Everything else that is allocated in a device's main memory."""
    host_bytes: int
    """In the host's memory, for one device."""
    layer_bytes: int
    """Weights of one of the LLM's layers, on one device (or, offloaded, streamed to it)."""
    weight_bytes: int
    """Weights of the LLM that stay on one device."""
    cache_bytes: int
    """The LLM's cache on one device."""
    ssm_bytes: int
    """The SSM's weights and cache on one device."""
    flops: float
    """Floating-point operations of one device in a step, as the compiler counts them; kernels are not in it."""
    bytes_accessed: float
    """Likewise."""
    collectives: dict[str, int]
    """Number by kind in a step."""
    collective_bytes: int
    """Their results on one device."""
    seconds: float
    """Compile time."""


SUMS = ("argument_bytes", "temporary_bytes", "host_bytes", "weight_bytes", "cache_bytes", "ssm_bytes", "flops",
        "bytes_accessed", "collective_bytes")  # fmt: skip
"""What grows by the same amount with every layer."""


def _as_far(first: Row, other: Row, share: float) -> Row:
    """`first`, moved towards (or beyond) `other`: its figures plus `share` times the difference."""

    def line(low: float, high: float) -> float:
        return low + (high - low) * share

    numbers = {
        kind: round(line(first.collectives.get(kind, 0), other.collectives.get(kind, 0)))
        for kind in sorted({*first.collectives, *other.collectives})
    }
    figures = {name: type(getattr(first, name))(line(getattr(first, name), getattr(other, name))) for name in SUMS}
    return dataclasses.replace(first, **figures, collectives=numbers)


def extended(rows: Sequence[Row], layers: int, ssm_layers: int) -> Row:
    """The row of models with so many layers.

    Args:
      rows: of two depths of the LLM, then (if its depth is not yet `ssm_layers`) one more of the first depth and a
        deeper SSM.
      layers: of the LLM.
      ssm_layers: of the SSM.
    """
    first, more, *deeper = rows
    found = _as_far(first, more, (layers - first.layers) / (more.layers - first.layers))
    for other in deeper:
        share = (ssm_layers - first.ssm_layers) / (other.ssm_layers - first.ssm_layers)
        extra = _as_far(first, other, share)
        found = dataclasses.replace(
            found,
            **{name: getattr(found, name) + getattr(extra, name) - getattr(first, name) for name in SUMS},
            collectives={
                kind: count + extra.collectives.get(kind, 0) - first.collectives.get(kind, 0)
                for kind, count in found.collectives.items()
            },
        )
    temporary_bytes = max(found.temporary_bytes, *(row.temporary_bytes for row in rows))
    return dataclasses.replace(
        found, layers=layers, ssm_layers=ssm_layers, temporary_bytes=temporary_bytes,
        compiled=tuple(pair for row in rows for pair in row.compiled), seconds=sum(row.seconds for row in rows),
    )  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """Rows that `--json` wrote."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**(row | {"compiled": tuple(map(tuple, row["compiled"]))})) for row in rows]


def print_rows(rows: Iterable[Row]) -> None:
    """The table of docs/scale.md."""
    print(
        "| LLM + SSM | target | devices | layers compiled | resident | temporaries | of memory | host | GFLOP "
        "| GB moved | exchanges | exchanged | compile |"
    )
    print("|---" * 13 + "|")
    for row in rows:
        exchanges = ", ".join(f"{count} {kind}" for kind, count in sorted(row.collectives.items()) if count) or "none"
        where = f"{row.target}, offloaded" if row.offload else row.target
        is_whole = row.compiled == ((row.layers, row.ssm_layers),)
        depths = "all" if is_whole else ", ".join(f"{llm} + {ssm}" for llm, ssm in row.compiled)
        share = (row.argument_bytes + row.temporary_bytes) / CHIPS[row.target].memory
        print(
            f"| {row.llm} + {row.ssm} | {where} | {row.devices} | {depths} | {row.argument_bytes / GIB:.2f} GiB "
            f"| {row.temporary_bytes / MIB:,.0f} MiB | {share:.0%} | {row.host_bytes / GIB:.2f} GiB "
            f"| {row.flops / 1e9:,.0f} | {row.bytes_accessed / 1e9:,.1f} | {exchanges} "
            f"| {row.collective_bytes / MIB:.1f} MiB | {row.seconds:.0f} s |"
        )


def print_offloaded(rows: Iterable[Row]) -> None:
    """How much of an offloaded LLM is on the device: temporaries and what stays, in layers."""
    print("| LLM | target | a layer | temporaries | resident weights | together, in layers | cache | SSM | host |")
    print("|---" * 9 + "|")
    for row in rows:
        layers = (row.temporary_bytes + row.weight_bytes) / row.layer_bytes
        print(
            f"| {row.llm} | {row.target} | {row.layer_bytes / MIB:,.0f} MiB | {row.temporary_bytes / MIB:,.0f} MiB "
            f"| {row.weight_bytes / MIB:.1f} MiB | {layers:.2f} | {row.cache_bytes / MIB:,.0f} MiB "
            f"| {row.ssm_bytes / MIB:,.0f} MiB | {row.host_bytes / MIB:,.0f} MiB |"
        )


def show(rows: Sequence[Row]) -> None:
    """Both tables."""
    print_rows(rows)
    offloaded = [row for row in rows if row.offload]
    if offloaded:
        print()
        print_offloaded(offloaded)


def check_offloaded(rows: Iterable[Row]) -> None:
    """Ends the program where an offloaded LLM takes more of the device than three of its layers."""
    for row in rows:
        layers = (row.temporary_bytes + row.weight_bytes) / row.layer_bytes
        if row.offload and layers > 3:
            raise SystemExit(f"{row.llm} on {row.target}: {layers:.2f} layers on the device, more than 3")
