"""The paper's models at full size: the whole step compiled ahead of time for TPUs that are not here.

python -m benchmarks.scale --json scale.json                                 all layers of every model
python -m benchmarks.scale --depths 2,3 --json scale.json                    all models from shallow ones
python -m benchmarks.scale --models llama-7b --targets v5e --offload         weights in host memory
python -m benchmarks.scale --show scale.json                                 the table of docs/scale.md again

A step is speculate, verify and commit, as the engine runs it: the SSM drafts the paper's tree, the LLM verifies it, on
a mesh just large enough. Needs `libtpu` beside jax (`.ci/compile-targets` makes such an environment) and no TPU. Memory
and sums over devices are what the compiler reports for one device.

With `--depths` the LLM is compiled with so few layers (and an SSM of more than two with one and two), and what a layer
adds is multiplied: all layers are equal, so every figure should be linear in depth. Temporaries are a peak, and never
taken for less than they were at one of the depths.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding

from benchmarks.paper_models import PAPER_MODELS
from benchmarks.scale_rows import CHIPS, GIB, Row, check_offloaded, extended, read_rows, show
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
HEADROOM = 0.9
"""Share of a device's memory that weights, caches and temporaries may take."""


@dataclasses.dataclass(frozen=True)
class WholeTree(StepProgram):
    """A step whose tree is never cut: the pass stands in the compiled program once, and is counted once."""

    @property
    def buckets(self) -> tuple[int, ...]:
        """The rows of the whole tree."""
        return super().buckets[-1:]


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
    program = WholeTree(
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


def main_memory_temporaries(dump: Path) -> int:
    """Bytes of temporaries that the compiler's buffer assignment puts into a device's main memory.

    `memory_analysis().temp_size_in_bytes` is more where buffers live across conditionals: it adds what it takes for
    fragmentation, and for that looks at nothing inside of branches (docs/scale.md).

    Raises:
      ValueError: there is no such allocation, so the dump has another form than this reads.
    """
    text = next(dump.glob("*after_optimizations-buffer-assignment.txt")).read_text(encoding="utf-8")
    # Other memories (on-chip, the host's) have a colour.
    found = re.findall(r"^allocation \d+: size (\d+), preallocated-temp:", text, re.MULTILINE)
    if not found:
        raise ValueError("the buffer assignment names no temporaries in main memory")
    return sum(map(int, found))


def shard_bytes(tree: Any, *, memory: str = DEVICE) -> int:
    """Bytes of a tree of abstract arrays on one device, of those in this kind of memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind == memory
    )


def compile_row(name: str, target: str, *, offload: bool, devices: int, layers: int, ssm_layers: int) -> Row:
    """Compile one step of both models' first layers."""
    llm = dataclasses.replace(PAPER_MODELS[name], num_layers=layers)
    ssm = dataclasses.replace(PAPER_MODELS[SSM_OF[name]], num_layers=ssm_layers)
    run, arguments, _ = arguments_of(llm, ssm, tpu_devices(target, devices), offload=offload)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        lowered = run.trace(*arguments).lower(lowering_platforms=("tpu",))
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        temporaries = main_memory_temporaries(Path(folder))
    seconds = time.perf_counter() - began
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    kinds, exchanged = collectives_of(compiled.as_text())
    params, state, _ = arguments
    return Row(
        llm=name, ssm=SSM_OF[name], target=target, devices=devices, offload=offload,
        layers=layers, ssm_layers=ssm_layers, compiled=((layers, ssm_layers),),
        argument_bytes=memory.argument_size_in_bytes, temporary_bytes=temporaries,
        host_bytes=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        layer_bytes=shard_bytes(params.llm["layers_0"], memory=HOST if offload else DEVICE),
        weight_bytes=shard_bytes(params.llm), cache_bytes=shard_bytes(state.cache),
        ssm_bytes=shard_bytes((params.speculators, state.speculators)),
        flops=costs.get("flops", 0.0), bytes_accessed=costs.get("bytes accessed", 0.0),
        collectives=kinds, collective_bytes=exchanged, seconds=seconds,
    )  # fmt: skip


def measure(name: str, target: str, *, offload: bool, devices: int | None = None, depths: Sequence[int] = ()) -> Row:
    """One row, of all layers; `depths`: two depths of the LLM to compile instead."""
    layers, ssm_layers = PAPER_MODELS[name].num_layers, PAPER_MODELS[SSM_OF[name]].num_layers
    count = devices or (1 if offload else fitting_devices(PAPER_MODELS[name], target))
    pairs = [(layers, ssm_layers)]
    if depths:
        shallow = min(ssm_layers, 2)
        pairs = [(depth, shallow) for depth in depths]
        if shallow < ssm_layers:
            pairs = [(depths[0], 1), (depths[1], 1), (depths[0], 2)]
    rows = [
        compile_row(name, target, offload=offload, devices=count, layers=depth, ssm_layers=ssm_depth)
        for depth, ssm_depth in pairs
    ]
    return extended(rows, layers, ssm_layers) if depths else rows[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print, write; ends with an error where a step does not compile."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SSM_OF), help=",".join(SSM_OF))
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(CHIPS), help=",".join(CHIPS))
    parser.add_argument("--offload", action="store_true", help="weights in host memory, on one device")
    parser.add_argument("--devices", type=int, help="instead of as few as hold the model")
    parser.add_argument("--depths", type=lambda text: tuple(map(int, text.split(","))), default=(),
                        help="two depths to compile instead of all layers, as 2,4")  # fmt: skip
    parser.add_argument("--show", type=Path, help="print the tables of such a file, and compile nothing")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args(arguments)
    for given, known in ((options.models, SSM_OF), (options.targets, CHIPS)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"unknown {', '.join(unknown)}; known are {', '.join(known)}")
    if options.depths and len(set(options.depths)) != 2:
        parser.error("--depths takes two different depths")
    if options.show is not None:
        return show(read_rows(options.show))
    rows = []
    for name in options.models:
        for target in options.targets:
            row = measure(name, target, offload=options.offload, devices=options.devices, depths=options.depths)
            rows.append(row)
            if options.json is not None:  # after each one: a later one may not compile
                known = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
                known.append(dataclasses.asdict(row))
                options.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    show(rows)
    check_offloaded(rows)


if __name__ == "__main__":
    main()
