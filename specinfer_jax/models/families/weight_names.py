"""What a family file says about its checkpoints: where every parameter is found, and how the config is read."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

from specinfer_jax.models.config import ModelConfig


class WeightName(NamedTuple):
    """Names of one parameter in the files that may hold it; `{i}` stands for the layer."""

    hf: str
    """Tensor name in safetensors files."""
    gguf: str | None = None
    """Tensor name in GGUF files; None if the family does not come as GGUF."""
    gguf_interleaved: Literal["query", "key"] | None = None
    """The GGUF converter interleaved the two rotary halves of the rows of every head of this kind."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family: everything that the loaders need and nothing that the decoder reads."""

    name: Literal["llama", "qwen2", "opt"]
    """The value of `ModelConfig.family`."""
    model_types: tuple[str, ...]
    """`model_type` values of config.json that belong here."""
    architectures: tuple[str, ...]
    """Classes that config.json's `architectures` may name."""
    gguf_architectures: tuple[str, ...]
    """`general.architecture` values that belong here."""
    hf_prefixes: tuple[str, ...]
    """How the tensor names below may begin in a file; the first is the one that `weights` uses."""
    weights: Mapping[str, WeightName]
    """Parameter path (`layers_{i}/attention/q/kernel`) -> its names."""
    config_from_hf: Callable[[Mapping[str, object]], ModelConfig]
    """Reads config.json."""
    config_from_gguf: Callable[[Mapping[str, object], Collection[str]], ModelConfig] | None
    """Reads GGUF metadata and the names of the file's tensors."""

    def weight_name(self, path: str) -> WeightName:
        """Names of one parameter, with the layer filled in; KeyError if the table lacks it."""
        top, _, rest = path.partition("/")
        if not top.startswith("layers_"):
            return self.weights[path]
        layer = top.removeprefix("layers_")
        row = self.weights[f"layers_{{i}}/{rest}"]
        return row._replace(
            hf=row.hf.replace("{i}", layer), gguf=row.gguf.replace("{i}", layer) if row.gguf is not None else None
        )

    def canonical_hf_name(self, name: str) -> str:
        """The name that the table uses for a tensor that was saved from the model's inner module."""
        first, *others = self.hf_prefixes
        if name.startswith(first) or name.startswith("lm_head."):
            return name
        for prefix in others:
            if name.startswith(prefix):
                return first + name.removeprefix(prefix)
        return name
