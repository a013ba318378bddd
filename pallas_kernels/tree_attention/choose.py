"""Which implementation runs: by name, or the fastest one that the device here can compile."""

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

IMPLEMENTATIONS = {
    "reference": "reference.tree_attention_reference",
    "xla": "xla.tree_attention_xla",
    "pallas_tpu": "pallas_tpu.tree_attention_tpu",
    "pallas_gpu": "pallas_gpu.tree_attention_gpu",
}
"""Every implementation by name, and where it is; all take the same arrays and `scale`. Imported at first use."""

OLDEST_GPU = (8, 0)
"""NVIDIA compute capability from which on the GPU kernel runs."""

_WARNED: set[str] = set()
"""Kernels whose failure has been told; every program would tell it again."""


def find_implementation(name: str | None, arrays: Sequence[Array]) -> Callable[..., Any]:
    """Return the implementation called `name`, or the one to use on the default device for these arrays.

    None picks the kernel of the device where it compiles for these shapes, else "xla", with a warning.

    Raises ValueError for an unknown name; the message lists the known ones.
    """
    if name is None:
        kernel = kernel_here()
        shapes = tuple((array.shape, array.dtype.name) for array in arrays)
        name = kernel if kernel is not None and compiles(kernel, shapes) else "xla"
    if name not in IMPLEMENTATIONS:
        known = ", ".join(sorted(IMPLEMENTATIONS))
        raise ValueError(f"Tree attention has no implementation {name!r}; known are {known}, or None to choose.")
    return load(name)


def load(name: str) -> Callable[..., Any]:
    """Import the implementation called `name`."""
    module, function = IMPLEMENTATIONS[name].split(".")
    return getattr(importlib.import_module(f"pallas_kernels.tree_attention.{module}"), function)


def kernel_here() -> str | None:
    """Return the kernel of the device on which JAX computes unless told otherwise."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue] (set when jax is imported)
    device = chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]
    return kernel_of(device.platform, str(getattr(device, "compute_capability", "")))


def kernel_of(platform: str, compute_capability: str) -> str | None:
    """Return the name of the kernel written for such a device; None where there is none (CPU, GPUs before sm_80)."""
    if platform == "tpu":
        return "pallas_tpu"
    # Of GPUs only NVIDIA's tell their capability as a number: "8.0", "9.0".
    version = compute_capability.split(".")
    if platform == "gpu" and all(part.isdecimal() for part in version):
        return "pallas_gpu" if tuple(map(int, version)) >= OLDEST_GPU else None
    return None


@functools.cache
def compiles(kernel: str, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> bool:
    """Whether the kernel compiles here for arrays of these shapes and dtypes; one warning a kernel where it does not.

    Tried alone, because in a larger program the failure would come too late to take another path.
    """
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    try:
        jax.jit(functools.partial(load(kernel), scale=1.0)).lower(*arrays).compile()
    except Exception as error:  # whatever a compiler raises: too little shared memory, an unknown layout, a bug
        if kernel not in _WARNED:
            _WARNED.add(kernel)
            reason = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            warnings.warn(
                f"The attention kernel {kernel} does not compile here, plain XLA is used: {reason}", stacklevel=2
            )
        return False
    return True
