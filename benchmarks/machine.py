"""What a measurement ran on, for the JSON files beside the figures."""

import os
import platform
from pathlib import Path

import jax


def describe_machine() -> str:
    """Device, processor, cores and memory in one line; no host name."""
    device = jax.devices()[0]
    kind = device.device_kind if device.platform != "cpu" else processor_name()
    return f"{device.platform} {kind}, {available_cores()} cores, {memory_gib():.0f} GiB, {platform.system()}"


def processor_name() -> str:
    """The processor's model name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    """Physical memory in GiB, NaN where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return float("nan")
