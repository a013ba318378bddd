"""The persistent compile cache: on by default, small programs too, so that a second start compiles nothing."""

import os
from pathlib import Path

import jax
import platformdirs


def cache_folder() -> Path:
    """Where compiled programs are kept."""
    return Path(platformdirs.user_cache_dir("specinfer_jax")) / "xla"


def enable_compile_cache() -> None:
    """Point jax at the cache folder, unless the user chose a folder or switched the cache off."""
    chosen = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is not None or "JAX_ENABLE_COMPILATION_CACHE" in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
