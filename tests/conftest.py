"""Every test runs on 8 fake CPU devices, with shapes checked, rank promotion an error and warnings as errors."""

import os
import warnings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

from jaxtyping import install_import_hook

install_import_hook(["specinfer_jax", "pallas_kernels"], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    # `error` for everything: a warning is a fault of ours until it is named below with its reason.
    config.addinivalue_line("filterwarnings", "error")
    warnings.filterwarnings("error")
