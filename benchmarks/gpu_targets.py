"""NVIDIA chips to compile for without one: descriptions for XLA, and devices made from them.

Needs `jax-cuda12-plugin`, `jax-cuda12-pjrt` and `nvidia-cuda-nvcc-cu12` beside jax, and no GPU. With
`JAX_PLATFORMS=cpu` and `XLA_FLAGS=--xla_gpu_autotune_level=0` (there is nothing to time candidates on):

    chip = jax.sharding.SingleDeviceSharding(gpu_topology("sm_80").devices[0])
    compiled = jax.jit(f, in_shardings=chip).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()

Figures are those of NVIDIA's data sheets, architecture white papers and CUDA programming guide (compute capabilities).
"""

from typing import NamedTuple

from jax.experimental.topologies import TopologyDescription, get_topology_desc

KIB = 1024
GIB = 1024**3


class GpuChip(NamedTuple):
    """What XLA wants to know of a chip beside the limits that all of them share."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    fp32_lanes: int
    """Float32 units of one multiprocessor."""
    threads: int
    """Resident threads of one multiprocessor, at most."""
    shared_kib: int
    """Shared memory of one multiprocessor; a block may ask for 1 KiB less."""
    clock_ghz: float
    l2_kib: int
    memory_gib: int
    bandwidth: float
    """Bytes a second."""


GPU_CHIPS = {
    "sm_80": GpuChip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 1.41, 40 * KIB, 80, 2.039e12),
    "sm_86": GpuChip("NVIDIA RTX A6000", (8, 6), 84, 128, 1536, 100, 1.80, 6 * KIB, 48, 0.768e12),
    "sm_89": GpuChip("NVIDIA L4", (8, 9), 58, 128, 1536, 100, 2.04, 48 * KIB, 24, 0.300e12),
    "sm_90": GpuChip("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 228, 1.98, 50 * KIB, 80, 3.35e12),
}
"""Chips by compute capability, the usual card of each."""


def gpu_topology(name: str) -> TopologyDescription:
    """Return a topology of one GPU that is not there: its only device can be compiled for, and nothing else.

    `name`: a key of `GPU_CHIPS`. Raises ValueError for another name, and jax's RuntimeError without the CUDA plugin.
    """
    if name not in GPU_CHIPS:
        raise ValueError(f"No GPU target {name!r}; known are {', '.join(GPU_CHIPS)}.")
    config = target_config(GPU_CHIPS[name])
    return get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=config)


def target_config(chip: GpuChip) -> str:
    """Write the text form of XLA's `GpuTargetConfigProto`."""
    major, minor = chip.capability
    return f"""
        platform_name: "CUDA"
        device_description_str: "{chip.name}"
        dnn_version_info {{ major: 9 minor: 8 }}
        gpu_device_info {{
            device_vendor: "NVIDIA Corporation"
            name: "{chip.name}"
            model_str: "{chip.name}"
            cuda_compute_capability {{ major: {major} minor: {minor} }}
            threads_per_warp: 32
            threads_per_block_limit: 1024
            threads_per_core_limit: {chip.threads}
            core_count: {chip.multiprocessors}
            fpus_per_core: {chip.fp32_lanes}
            clock_rate_ghz: {chip.clock_ghz}
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            shared_memory_per_block: {48 * KIB}
            shared_memory_per_core: {chip.shared_kib * KIB}
            shared_memory_per_block_optin: {(chip.shared_kib - 1) * KIB}
            l2_cache_size: {chip.l2_kib * KIB}
            device_memory_size: {chip.memory_gib * GIB}
            memory_bandwidth: {int(chip.bandwidth)}
            block_dim_limit_x: 2147483647
            block_dim_limit_y: 65535
            block_dim_limit_z: 65535
            runtime_version: "12.9.0"
            driver_version: "12.9.0"
            compile_time_toolkit_version: "12.9.0"
        }}
    """
