"""specinfer_jax: tree-based speculative LLM inference in JAX, for TPU and GPU."""

__version__ = "0.1.0"
