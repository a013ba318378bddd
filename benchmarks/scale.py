"""The paper's models at full size: the whole step compiled ahead of time for TPUs that are not here.

python -m benchmarks.scale --json scale.json                                 every row of docs/scale.md
python -m benchmarks.scale --models llama-7b --targets v5e --offload         weights in host memory

A step is speculate, verify and commit, as the engine runs it: the SSM drafts the paper's tree, the LLM verifies it, on
a mesh just large enough. Needs `libtpu` beside jax (`.ci/compile-targets` makes such an environment) and no TPU. Memory
and sums over devices are what the compiler reports for one device.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from benchmarks.paper_models import PAPER_MODELS
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import param_shapes
from specinfer_jax.parallel.placement import MeshPrograms
from specinfer_jax.parallel.sharding import WHOLE, make_mesh
from specinfer_jax.parallel.weights import DEVICE, HOST, WeightPlacement, joined
from specinfer_jax.speculation.decode import step
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.slots import init_state
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.tree.expand import parse_expansion

SSM_OF = {"llama-7b": "llama-68m", "llama-65b": "llama-68m", "opt-13b": "opt-125m", "opt-30b": "opt-125m"}
"""The paper's pairs (SpecInfer, section 6.1)."""
PAPER_TREE = "1,1,3,1,1,1,1,1"
SLOTS, CONTEXT = 4, 2_048
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
HEADROOM = 0.9
"""Share of a device's memory that weights, caches and temporaries may take."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One model on one mesh."""

    llm: str
    ssm: str
    target: str
    devices: int
    offload: bool
    argument_bytes: int
    """Weights, caches and the rest of the state on one device."""
    temporary_bytes: int
    """Everything else at the peak, on one device."""
    host_bytes: int
    """In the host's memory, for one device."""
    layer_bytes: int
    """Weights of one of the LLM's layers, on one device."""
    flops: float
    """Floating-point operations of one device in a step, as the compiler counts them; kernels are not in it."""
    bytes_accessed: float
    """Likewise."""
    collectives: dict[str, int]
    """Number by kind, in the pass that verifies the tree and everything around it."""
    collective_bytes: int
    """Their results on one device."""
    seconds: float
    """Compile time."""


def tpu_devices(target: str, count: int) -> list[Any]:
    """The first `count` devices of the smallest slice that has them."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # any: libtpu only complains where there is none
    name = next(name for size, name in CHIPS[target].topologies if size >= count)
    return list(topologies.get_topology_desc(name, platform="tpu").devices)[:count]


def fitting_devices(config: ModelConfig, target: str) -> int:
    """The smallest power of two of devices that hold weights, cache and some room, and share the heads evenly."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config))) * 2
    cache = 4 * config.num_layers * config.num_kv_heads * config.head_size * SLOTS * CONTEXT
    most = CHIPS[target].topologies[-1][0]
    for count in (1, 2, 4, 8, 16):
        fits = (weights + cache) / count + 0.5 * GIB <= HEADROOM * CHIPS[target].memory
        if count <= most and fits and config.num_kv_heads % count == 0:
            return count
    raise ValueError(f"no slice of {target} of up to {most} devices holds the model")


def arguments_of(llm: ModelConfig, ssm: ModelConfig, devices: Sequence[Any], *, offload: bool) -> tuple[Any, Any, Any]:
    """(the step to compile, its abstract arguments, the placement of the LLM's weights)."""
    mesh = make_mesh(1, len(devices), devices)
    placement = WeightPlacement(mesh, llm, HOST if offload else DEVICE)
    speculator = SsmSpeculator(ssm, parse_expansion(PAPER_TREE), CONTEXT, ssm.vocab_size, implementation="pallas_tpu")
    program = StepProgram(
        placement.config, (speculator,), adaptive=False, implementation="pallas_tpu", vocab_limit=llm.vocab_size,
        splits_vocab=len(devices) > 1, offloads=offload,
    )  # fmt: skip
    make = functools.partial(
        init_state, program, num_slots=SLOTS, max_model_len=CONTEXT, page_size=PAGE_SIZE, dtype=jnp.dtype(jnp.bfloat16)
    )
    shapes = jax.eval_shape(make)
    programs = MeshPrograms(mesh, program, shapes)
    whole = NamedSharding(mesh, WHOLE)

    def place(leaf: Any, sharding: NamedSharding = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    weights = jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(leaf, placement.sharding(joined(path))),
        param_shapes(placement.config, dtype=jnp.bfloat16),
    )
    small = jax.tree.map(place, param_shapes(ssm, dtype=jnp.bfloat16))
    state = jax.tree.map(place, shapes, programs.state_shardings)
    buckets = len(program.buckets)
    costs = jax.tree.map(place, jax.eval_shape(lambda: StepCosts(jnp.ones(buckets), jnp.zeros(1))))
    run = programs.jit(
        functools.partial(step, program=program), inputs=("whole", "state", "whole"), outputs="state", donate=1
    )
    return run, (DecodeParams(weights, (small,)), state, costs), placement


def collectives_of(text: str) -> tuple[dict[str, int], int]:
    """(number by kind, bytes of their results) in a compiled program."""
    found: dict[str, int] = {}
    total = 0
    widths = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for shape, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        found[kind] = found.get(kind, 0) + 1
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
        # What starts an asynchronous one returns its operands and then its results.
        results = arrays[len(arrays) // 2 :] if shape.startswith("((") else arrays
        for dtype, dims in results:
            total += functools.reduce(lambda n, d: n * int(d), filter(None, dims.split(",")), widths.get(dtype, 4))
    return found, total


def measure(name: str, target: str, *, offload: bool, devices: int | None = None, layers: int | None = None) -> Row:
    """Compile one step."""
    llm, ssm = PAPER_MODELS[name], PAPER_MODELS[SSM_OF[name]]
    count = devices or (1 if offload else fitting_devices(llm, target))
    llm = dataclasses.replace(llm, num_layers=layers or llm.num_layers)
    run, arguments, _ = arguments_of(llm, ssm, tpu_devices(target, count), offload=offload)
    began = time.perf_counter()
    compiled = run.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    seconds = time.perf_counter() - began
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    kinds, exchanged = collectives_of(compiled.as_text())
    layer = arguments[0].llm["layers_0"]
    return Row(
        llm=name, ssm=SSM_OF[name], target=target, devices=count, offload=offload,
        argument_bytes=memory.argument_size_in_bytes, temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        layer_bytes=sum(
            leaf.sharding.shard_shape(leaf.shape)[0] * leaf.size // leaf.shape[0] * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(layer)
        ),
        flops=costs.get("flops", 0.0), bytes_accessed=costs.get("bytes accessed", 0.0),
        collectives=kinds, collective_bytes=exchanged, seconds=seconds,
    )  # fmt: skip


def print_rows(rows: Sequence[Row]) -> None:
    """The table of docs/scale.md."""
    print("| LLM + SSM | target | devices | resident | temporaries | host | GFLOP | GB moved | exchanges | exchanged |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        exchanges = ", ".join(f"{count} {kind}" for kind, count in sorted(row.collectives.items())) or "none"
        where = f"{row.target}, offloaded" if row.offload else row.target
        print(
            f"| {row.llm} + {row.ssm} | {where} | {row.devices} | {row.argument_bytes / GIB:.2f} GiB "
            f"| {row.temporary_bytes / MIB:,.0f} MiB | {row.host_bytes / GIB:.2f} GiB | {row.flops / 1e9:,.0f} "
            f"| {row.bytes_accessed / 1e9:,.1f} | {exchanges} | {row.collective_bytes / MIB:.1f} MiB |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print, write; ends with an error where a step does not compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SSM_OF), help=",".join(SSM_OF))
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(CHIPS), help=",".join(CHIPS))
    parser.add_argument("--offload", action="store_true", help="weights in host memory, on one device")
    parser.add_argument("--devices", type=int, help="instead of as few as hold the model")
    parser.add_argument("--layers", type=int, help="the first layers only: quicker, but memory is another")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args(arguments)
    for given, known in ((options.models, SSM_OF), (options.targets, CHIPS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
    rows = []
    for name in options.models:
        for target in options.targets:
            row = measure(name, target, offload=options.offload, devices=options.devices, layers=options.layers)
            rows.append(row)
            if options.json is not None:  # after each one: a later one may not compile
                known = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
                known.append(dataclasses.asdict(row))
                options.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print_rows(rows)


if __name__ == "__main__":
    main()
