"""Which implementation runs: by name, or the fastest one that the device here can compile."""

import functools
import importlib
import re
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

TPU_LANES = 128
"""Numbers side by side in a TPU's tiles."""

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
    """Import the implementation called `name`; the GPU kernel's tiles are those of the GPU that is here, if one is."""
    module, function = IMPLEMENTATIONS[name].split(".")
    implementation = getattr(importlib.import_module(f"pallas_kernels.tree_attention.{module}"), function)
    if name != "pallas_gpu":
        return implementation
    return functools.partial(implementation, compute_capability=compute_capability(default_device()))


def default_device() -> Any:
    """Return the device on which JAX computes unless told otherwise."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue] (set when jax is imported)
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


def compute_capability(device: Any) -> str | None:
    """Return an NVIDIA GPU's capability, such as "9.0"; None for everything else."""
    version = str(getattr(device, "compute_capability", ""))  # of GPUs only NVIDIA's tell it as a number
    return version if re.fullmatch(r"\d+\.\d+", version) else None


def kernel_here() -> str | None:
    """Return the kernel of the default device."""
    device = default_device()
    return kernel_of(device.platform, compute_capability(device))


def kernel_of(platform: str, capability: str | None) -> str | None:
    """Return the name of the kernel written for such a device; None where there is none (CPU, GPUs before sm_80)."""
    if platform == "tpu":
        return "pallas_tpu"
    if platform == "gpu" and capability is not None:
        return "pallas_gpu" if tuple(map(int, capability.split("."))) >= OLDEST_GPU else None
    return None


@functools.cache
def compiles(kernel: str, shapes: tuple[tuple[tuple[int, ...], str], ...]) -> bool:
    """Whether the kernel compiles here for arrays of these shapes and dtypes; one warning a kernel where it does not.

    Tried alone, because in a larger program the failure would come too late to take another path.
    """
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    try:
        if kernel == "pallas_tpu":
            check_pages(shapes[3][0])
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


def check_pages(shape: tuple[int, ...]) -> None:
    """Raise a ValueError where XLA lays pages `[G, P, Z, K]` out so that a TPU kernel cannot read them in place."""
    *_, Z, K = shape
    if K % TPU_LANES != 0 and Z % TPU_LANES != 0:
        raise ValueError(
            f"pages of {Z} tokens with heads of {K} numbers would be copied whole in every call; "
            f"pages of a multiple of {TPU_LANES} tokens are read in place"
        )
