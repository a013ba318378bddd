"""specinfer_jax: tree-based speculative LLM inference in JAX, for TPU and GPU.

from specinfer_jax import LLM, SamplingParams

print(LLM().generate("The capital of France is", SamplingParams(temperature=0, max_tokens=32))[0].text)
"""

from typing import TYPE_CHECKING, Any

from specinfer_jax.config import SamplingParams, Speculation

if TYPE_CHECKING:
    from specinfer_jax.llm import LLM
    from specinfer_jax.opened import Model

__version__ = "0.1.0"
__all__ = ["LLM", "Model", "SamplingParams", "Speculation", "__version__"]


def __getattr__(name: str) -> Any:
    """Import what needs jax only when it is asked for: importing the package touches no device."""
    if name == "LLM":
        from specinfer_jax.llm import LLM

        return LLM
    if name == "Model":
        from specinfer_jax.opened import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
