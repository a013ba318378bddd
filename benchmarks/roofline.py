"""What a call of tree attention needs, what a device can give, and how short calls are timed.

A call's roofline is the longer of two times: its bytes at the memory bandwidth, its floating-point operations at the
arithmetic rate. Both limits come from the vendor's data sheet where the device is in `PEAKS`, and are measured on the
device in any case (one large copy, one large matrix product), so that an unknown device has a roofline too.

Letters: B slots, Q query rows, N new rows, H query heads, G key/value heads, K head size, C words of a mask row.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

GPU_FLUSH_BYTES = 128 * 2**20
"""Calls of one measurement walk over copies of the cache of this size together; the largest cache, an H200's, has 50
MB. In a model every layer reads keys and values of its own, so none of them comes from a cache either."""
COLD_BYTES = 64 * 2**20
"""From here on a measurement's keys and values count as read from the device's memory. Below, they may stay in its
caches, as they do on a CPU, and shares of the roofline may exceed 100 %."""
MAX_COPIES = 8
MAX_CALLS = 400


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device can do at most."""

    bytes_per_second: float
    """Device memory, reads and writes together."""
    bfloat16_flops: float
    """Dense products of bfloat16 summed in float32, FLOP/s; no structured sparsity."""
    float32_flops: float | None
    """The same in true float32; None where the data sheet tells none (TPUs)."""

    def flops(self, dtype: str) -> float | None:
        """FLOP/s in this dtype."""
        return self.float32_flops if dtype == "float32" else self.bfloat16_flops


PEAKS: Mapping[str, Limits] = {
    # NVIDIA A100 Tensor Core GPU data sheet (nvidia-a100-datasheet, 2022)
    "NVIDIA A100-SXM4-40GB": Limits(1555e9, 312e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": Limits(1555e9, 312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": Limits(2039e9, 312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": Limits(1935e9, 312e12, 19.5e12),
    # NVIDIA H100 Tensor Core GPU data sheet: its bfloat16 figures are with sparsity, half of them here
    "NVIDIA H100 80GB HBM3": Limits(3350e9, 989.5e12, 67e12),
    "NVIDIA H100 PCIe": Limits(2000e9, 756.5e12, 51e12),
    "NVIDIA H100 NVL": Limits(3900e9, 835.5e12, 60e12),
    # NVIDIA H200 Tensor Core GPU data sheet (SXM and NVL), bfloat16 halved likewise
    "NVIDIA H200": Limits(4800e9, 989.5e12, 67e12),
    "NVIDIA H200 NVL": Limits(4800e9, 835.5e12, 60e12),
    # NVIDIA L4 Tensor Core GPU data sheet, bfloat16 halved likewise
    "NVIDIA L4": Limits(300e9, 121e12, 30.3e12),
    # Google Cloud documentation, "TPU v4", "TPU v5e", "TPU v5p" and "TPU v6e": system architecture, one chip
    "TPU v4": Limits(1200e9, 275e12, None),
    "TPU v5 lite": Limits(819e9, 197e12, None),
    "TPU v5e": Limits(819e9, 197e12, None),
    "TPU v5": Limits(2765e9, 459e12, None),
    "TPU v5p": Limits(2765e9, 459e12, None),
    "TPU v6 lite": Limits(1638e9, 918e12, None),
    "TPU v6e": Limits(1638e9, 918e12, None),
}
"""Data sheet limits by jax's `device_kind`; GPU figures at boost clock, which a power limit may not allow."""


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call must move and compute at the least."""

    bytes: int
    """Keys and values once, queries, words, output and log-sum-exp."""
    flops: int
    """Two products of every query with every key; the new rows count whole, masked or not."""

    def seconds(self, limits: Limits, dtype: str) -> float:
        """The roofline; of the memory alone where the arithmetic rate is unknown."""
        rate = limits.flops(dtype)
        return max(self.bytes / limits.bytes_per_second, 0.0 if rate is None else self.flops / rate)


def tree_work(*, prefixes: Sequence[int], Q: int, N: int, H: int, G: int, K: int, itemsize: int) -> Work:
    """Bytes and FLOPs of one call of `tree_attention`; `prefixes` holds the committed tokens of every slot."""
    B, C = len(prefixes), -(-N // 32)
    keys_and_values = 2 * (sum(prefixes) + B * N) * G * K * itemsize
    queries_and_output = 2 * B * Q * H * K * itemsize
    words_and_lse = 4 * B * Q * (C + H)
    pairs = Q * sum(prefixes) + B * Q * N
    return Work(keys_and_values + queries_and_output + words_and_lse, 4 * H * K * pairs)


def causal_work(*, tokens: int, H: int, G: int, K: int, itemsize: int) -> Work:
    """Bytes and FLOPs of one plain causal attention over a prompt."""
    pairs = tokens * (tokens + 1) // 2
    return Work(2 * tokens * (G + H) * K * itemsize, 4 * H * K * pairs)


def find_peaks(device_kind: str) -> Limits | None:
    """Data sheet limits of a device, None if it is not in the table; whole names only, an L40S is no L4."""
    return PEAKS.get(device_kind)


def measure_limits(dtype: str, *, copy_bytes: int | None = None, size: int | None = None) -> Limits:
    """Measure the bandwidth of a large copy and the rate of a large matrix product in `dtype`; the other rate is None.

    `copy_bytes`: bytes of the copied array, `size`: rows and columns of the matrices; by default what suits the device.
    """
    small = jax.default_backend() == "cpu"
    copy_bytes = copy_bytes or (128 if small else 1024) * 2**20
    size = size or (1024 if small else 8192)
    # float32 products at HIGHEST, as in the attention, else a GPU would be judged by its TF32 rate.
    precision = lax.Precision.HIGHEST if dtype == "float32" else None
    # Random values: a GPU takes less power for zeros, and is faster then than it can be with data.
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.float32) / size**0.5
    matrix = matrix.astype(dtype)
    array = jnp.zeros((copy_bytes // 4,), jnp.float32)
    bandwidth = 2 * array.nbytes / seconds_each(jax.jit(lambda x: x + 1), array)
    product = functools.partial(jax.jit(functools.partial(jnp.matmul, precision=precision)), matrix)
    flops = 2 * size**3 / seconds_each(product, matrix)
    return Limits(bandwidth, flops if dtype == "bfloat16" else math.nan, flops if dtype == "float32" else None)


def seconds_each(call: Callable[[jax.Array], jax.Array], x: jax.Array, *, calls: int = 8, repeats: int = 3) -> float:
    """Least seconds of a long call: a chain of them is started at once, so that the host's part is hidden."""
    jax.block_until_ready(call(x))
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(calls):
            x = call(x)
        jax.block_until_ready(x)
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def repeated(call: Callable[..., jax.Array], trips: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`run(q, sets)`: `1 + trips * len(sets)` calls in one program; returns the outputs of the first and of the last.

    `sets` holds the other arguments, several copies of them in turn. Each output is the next queries, so that no call
    can be left out. The number of trips is a constant: a GPU need not ask the host before each.
    """

    def run(q: jax.Array, sets: Sequence[Sequence[jax.Array]]) -> tuple[jax.Array, jax.Array]:
        def body(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            for arguments in sets:
                q = call(q, *arguments).astype(q.dtype)
            return q, None

        first = call(q, *sets[0]).astype(q.dtype)
        return first, lax.scan(body, first, length=trips)[0]

    return run


def alternate(runs: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, list[float]]:
    """Wall seconds of compiled calls, by name; they take turns, so that a slow moment of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(repeats):
        for name, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - began)
    return times


def plan_calls(work: Work, cache_bytes: int, limits: Limits, dtype: str, *, seconds: float) -> tuple[int, int]:
    """(copies of the cache, trips over them) so that a measurement takes about `seconds` at the roofline."""
    copies = 1 if jax.default_backend() == "cpu" else min(MAX_COPIES, max(1, -(-GPU_FLUSH_BYTES // cache_bytes)))
    calls = min(MAX_CALLS, max(1, round(seconds / work.seconds(limits, dtype))))
    return copies, max(1, calls // copies)
