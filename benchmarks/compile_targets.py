"""Compile the attention kernel and the whole verify step ahead of time for chips that are not here.

python -m benchmarks.compile_targets --targets v5e,v6e --json targets.json

Needs no accelerator, only its compiler: `libtpu` for TPUs, the CUDA plugin and `nvidia-cuda-nvcc-cu12` for GPUs
(`.ci/compile-targets` makes both environments). The step is the project's own `step`: tree forward of the LLM,
vocabulary head, verification and commit on a donated state; a TPU target is four chips with the heads split over them,
a GPU one chip. Memory is what the compiler reports for one device.
"""

import argparse
import dataclasses
import functools
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.gpu_targets import gpu_topology
from benchmarks.paper_models import PAPER_MODELS
from benchmarks.verify_cost import tree_program
from pallas_kernels.tree_attention.pallas_gpu import tree_attention_gpu
from pallas_kernels.tree_attention.pallas_tpu import tree_attention_tpu
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import param_shapes
from specinfer_jax.parallel.placement import state_specs
from specinfer_jax.parallel.sharding import MODEL, WHOLE, make_mesh, split_config, weight_spec
from specinfer_jax.parallel.weights import joined
from specinfer_jax.speculation.decode import step
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.slots import init_state
from specinfer_jax.speculation.state import DecodeParams

TPU_TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
GPU_TARGETS = ("sm_80", "sm_90")
TARGETS = (*TPU_TOPOLOGIES, *GPU_TARGETS)
KERNEL_SHAPES = ((64, 1, 3, 3), (64, 64, 3, 3), (80, 64, 8, 1), (96, 64, 8, 1), (128, 1, 8, 4), (128, 64, 8, 4),
                 (128, 64, 32, 1), (128, 256, 8, 4), (256, 64, 4, 8))  # fmt: skip
"""(K, Q, G, H / G) of the kernels compiled alone, in bfloat16 and in float32."""
SLOTS, CONTEXT = 8, 4_096


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled step on one target."""

    target: str
    """Name in `TARGETS`."""
    devices: int
    """Chips that the step is split over."""
    kernels: int
    """Kernels compiled alone."""
    seconds: float
    """Compile time of the step."""
    argument_bytes: int
    """Weights, cache and the rest of the state, of one device."""
    temporary_bytes: int
    """Everything else that the step needs at its peak, of one device."""
    share: float
    """Temporaries over weights and cache."""


def kernel_name(target: str) -> str:
    """The implementation that runs on such a chip."""
    return "pallas_gpu" if target in GPU_TARGETS else "pallas_tpu"


def target_devices(target: str) -> list[Any]:
    """Devices to compile for; raises whatever the missing compiler raises."""
    if target in GPU_TARGETS:
        return list(gpu_topology(target).devices)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # any: libtpu only complains where there is none
    return list(topologies.get_topology_desc(TPU_TOPOLOGIES[target], platform="tpu").devices)


def compile_kernel(target: str, device: Any, dtype: str, K: int, Q: int, G: int, group: int) -> None:
    """Compile one call of tree attention for one device, with the tiles of that chip."""
    pages = CONTEXT // PAGE_SIZE
    place = functools.partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    arrays = [
        place((SLOTS, Q, G * group, K), dtype),
        *[place((SLOTS, Q, G, K), dtype)] * 2,
        *[place((G, SLOTS * pages, PAGE_SIZE, K), dtype)] * 2,
        place((SLOTS, pages), jnp.int32),
        place((SLOTS,), jnp.int32),
        place((SLOTS, Q, -(-Q // 32)), jnp.uint32),
    ]
    run = tree_attention_tpu
    if target in GPU_TARGETS:
        run = functools.partial(tree_attention_gpu, compute_capability=".".join(target.removeprefix("sm_")))
    traced = jax.jit(functools.partial(run, scale=K**-0.5)).trace(*arrays)
    traced.lower(lowering_platforms=(platform_name(kernel_name(target)),)).compile()


def platform_name(kernel: str) -> str:
    """What the kernel is lowered for."""
    return "tpu" if kernel == "pallas_tpu" else "cuda"


def step_arguments(config: ModelConfig, rows: int, kernel: str, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """(program, abstract arguments of `step`), laid out by the rules of the project (parallel/sharding.py)."""
    model = mesh.shape[MODEL]
    config = split_config(config, model)
    program = dataclasses.replace(tree_program(config, rows), implementation=kernel, splits_vocab=model > 1)

    def place(shape: Any, spec: PartitionSpec = WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: place(leaf, weight_spec(joined(path), config, model)),
        param_shapes(config, dtype=jnp.bfloat16),
    )
    make_state = functools.partial(
        init_state, program, num_slots=SLOTS, max_model_len=CONTEXT, page_size=PAGE_SIZE, dtype=jnp.dtype(jnp.bfloat16)
    )
    state = jax.eval_shape(make_state)
    state = jax.tree.map(place, state, state_specs(state, program, model))
    costs = jax.eval_shape(lambda: StepCosts(jnp.ones(len(program.buckets)), jnp.zeros(len(program.speculators))))
    decode_params = DecodeParams(params, ((),) * len(program.speculators))
    return program, (decode_params, state, jax.tree.map(place, costs))


def compile_step(config: ModelConfig, rows: int, kernel: str, devices: Sequence[Any]) -> tuple[float, Any]:
    """(seconds, the compiler's memory analysis) of one verify step."""
    mesh = make_mesh(1, len(devices), devices)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program, arguments = step_arguments(config, rows, kernel, mesh)
        began = time.perf_counter()
        traced = jax.jit(step, static_argnames="program", donate_argnums=1).trace(*arguments, program=program)
        compiled = traced.lower(lowering_platforms=(platform_name(kernel),)).compile()
        return time.perf_counter() - began, compiled.memory_analysis()


def measure(target: str, config: ModelConfig, rows: int) -> Row:
    """Compile everything for one target."""
    devices = target_devices(target)
    kernels = [(dtype, *shape) for dtype in ("bfloat16", "float32") for shape in KERNEL_SHAPES]
    for dtype, *shape in kernels:
        compile_kernel(target, devices[0], dtype, *shape)
    seconds, memory = compile_step(config, rows, kernel_name(target), devices)
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return Row(target, len(devices), len(kernels), seconds, arguments, temporaries, temporaries / arguments)


def print_rows(rows: Sequence[Row]) -> None:
    """The table of docs/kernels.md."""
    print("| target | devices | kernels | weights, cache, state a device | temporaries | share | compile time |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.target} | {row.devices} | {row.kernels} | {row.argument_bytes / 2**20:,.0f} MiB "
            f"| {row.temporary_bytes / 2**20:,.0f} MiB | {row.share:.1%} | {row.seconds:.0f} s |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, print, write; exits with an error where a target does not compile."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compile_targets", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--targets", type=lambda text: text.split(","), default=list(TARGETS), help=",".join(TARGETS))
    parser.add_argument("--model", choices=PAPER_MODELS, default="llama-7b", help="whose step is compiled")
    parser.add_argument("--rows", type=int, default=64, help="tree rows, root included")
    parser.add_argument("--layers", type=int, help="the first layers only: quicker, but memory is another")
    parser.add_argument("--json", type=Path, help="write the table here")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.targets) - set(TARGETS))
    if unknown:
        parser.error(f"unknown targets {', '.join(unknown)}; known are {', '.join(TARGETS)}")
    config = PAPER_MODELS[options.model]
    config = dataclasses.replace(config, num_layers=options.layers or config.num_layers)
    rows = [measure(target, config, options.rows) for target in options.targets]
    print_rows(rows)
    if options.json is not None:
        found = {
            "model": options.model,
            "rows": options.rows,
            "slots": SLOTS,
            "context": CONTEXT,
            "jax": jax.__version__,
        }
        options.json.write_text(
            json.dumps({**found, "targets": [dataclasses.asdict(row) for row in rows]}, indent=1) + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
