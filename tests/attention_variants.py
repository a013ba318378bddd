"""Every implementation of tree attention as tests run it on a CPU: kernels are interpreted, on a simulated chip too."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.pallas_gpu import tree_attention_gpu
from pallas_kernels.tree_attention.pallas_tpu import tree_attention_tpu

# Uninitialised memory is NaN; copies finish as late as they may, when somebody waits for them.
SIMULATED_TPU = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", dma_execution_mode="on_wait")

VARIANTS: dict[str, Callable[..., Any]] = {
    "reference": functools.partial(tree_attention, implementation="reference"),
    "xla": functools.partial(tree_attention, implementation="xla"),
    "pallas_tpu": functools.partial(tree_attention_tpu, interpret=True),
    "simulated_tpu": functools.partial(tree_attention_tpu, interpret=SIMULATED_TPU),
    "pallas_gpu": functools.partial(tree_attention_gpu, interpret=True),
    "pallas_gpu_split": functools.partial(tree_attention_gpu, interpret=True, splits=3),
}
"""By name; each takes the arrays of a case and `scale`."""

RUN = {name: jax.jit(variant, static_argnames="scale") for name, variant in VARIANTS.items()}
"""The same, compiled once for each shape."""
