"""Every test runs on 8 fake CPU devices, with shapes checked, rank promotion an error and warnings as errors."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tiny models: compiling takes far longer than running, so the compiler's optimisers are off.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
_FLAGS += " --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):  # compiles in 60 % of the time; later versions end at flags that they lack
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

from jaxtyping import install_import_hook  # noqa: E402

install_import_hook(["specinfer_jax", "pallas_kernels", "train"], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests keep their compiled programs apart from the user's; a second run in the same checkout is several times faster.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(trylast=True)  # behind pytest's own hook for such exceptions
def pytest_configure(config: pytest.Config) -> None:
    # `error` for everything: a warning is a fault of ours until it is named below with its reason.
    config.addinivalue_line("filterwarnings", "error")
    warnings.filterwarnings("error")
    # From jax 0.11 on, lowering the GPU kernel says so; it is there until 0.12 at least.
    config.addinivalue_line("filterwarnings", "ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
    passed_on = sys.unraisablehook

    def report(unraisable: Any) -> None:
        # After a failed read (damaged checkpoints) tensorstore's threads still report to orbax's closed event loop.
        if "Event loop is closed" not in str(unraisable.exc_value):
            passed_on(unraisable)

    sys.unraisablehook = report


@pytest.fixture(scope="module", autouse=True)
def _programs_are_freed() -> Iterator[None]:
    # A compiled program holds memory mappings. Linux allows a process 65,530 of them; beyond, the compiler crashes.
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def default_model_gguf() -> Path:
    """The default model's file, downloaded once; only tests marked `weights` ask for it."""
    from specinfer_jax.checkpoint.resolve import resolve

    return resolve("smollm2-135m-instruct")
