"""What a user chooses, as frozen dataclasses, and a TOML loader that rejects unknown keys. Free of jax.

# configs/serve.toml
model = "smollm2-135m-instruct"
max_model_len = 4096
[speculation]
ngram = true
[sampling]
max_tokens = 128
"""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specinfer_jax.errors import ConfigError
from specinfer_jax.sampling_params import GREEDY, SamplingParams
from specinfer_jax.speculation.rules import MSS_RENORMALIZED, WITHOUT_REPLACEMENT, exact_pair

DEFAULT_MODEL = "smollm2-135m-instruct"
AUTO, WIDE = "auto", "wide"
"""Trees that are chosen by acceptance: the most tokens per second, the most tokens per step."""
DEFAULT_TREE = "1,1,3,1,1"
"""What `AUTO` takes for SSMs whose acceptance nobody measured."""

ONE_DEVICE = "data=1,model=1"
OFFLOADS = ("none", "host")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Which speculators propose trees. Without arguments: SSMs that ship for the LLM, if any, and the n-gram tree."""

    ssms: Sequence[Any] | None = None
    """Small speculative models: names, folders, .gguf files, hub ids or loaded models; same vocabulary as the LLM.
    None: those that ship for the LLM (specinfer_jax/ssms); (): none."""
    tree: str | None = None
    """Tree of each SSM. "auto", or None: the SSM and the shape with the most tokens per second here, or none at all.
    "wide": the most tokens per step within 32 speculated nodes, always verified whole. "1,1,3,1,1": children per node
    and level. "2/2,1/1,0,1": children of every node, level by level."""
    ngram: bool | None = None
    """Propose what followed earlier occurrences of the last tokens; None: unless `ssms` names SSMs."""
    children: str | None = None
    """How an SSM's children are chosen at a temperature: "top_k", "iid" or "without_replacement"; None picks."""
    verification: str | None = None
    """How they are verified at a temperature: "naive", "mss", "mss_renormalized", or "greedy" (temperature 0 only);
    None picks. Pairs that would change the LLM's distribution are refused (speculation/rules.py). With both None
    "wide" trees are drawn without replacement and verified with "mss_renormalized", others are "top_k" and "naive"."""
    adaptive: bool = True
    """Cut or skip trees that would cost more than they are expected to gain; False verifies every tree whole, as
    "mss" and "mss_renormalized" do at a temperature in any case."""
    enabled: bool = True
    """False is incremental decoding, whatever else is set."""

    def __post_init__(self) -> None:
        if isinstance(self.ssms, str | Path):
            raise ConfigError(f"ssms must be a list of models, got {self.ssms!r}; write [{str(self.ssms)!r}]")
        if self.ssms is not None:
            object.__setattr__(self, "ssms", tuple(self.ssms))
        if self.tree is not None and not isinstance(self.tree, str):
            raise ConfigError(f'tree must be a string such as "1,1,3,1,1", got {self.tree!r}')
        self.pair  # noqa: B018  (refuses what is not exact)

    @classmethod
    def off(cls) -> "Speculation":
        """Incremental decoding: one token per LLM pass."""
        return cls(enabled=False)

    @property
    def cuts_trees(self) -> bool:
        """Whether trees may be cut to what pays."""
        return self.adaptive and self.tree != WIDE

    @property
    def pair(self) -> tuple[str, str]:
        """How children are chosen and verified at a temperature, None filled in."""
        if self.tree == WIDE and self.children is None and self.verification is None:
            return WITHOUT_REPLACEMENT, MSS_RENORMALIZED  # 1.2 times the tokens per step (docs/log.md)
        return exact_pair(self.children, self.verification)

    @property
    def uses_ngram(self) -> bool:
        """Whether the n-gram speculator takes part."""
        return self.enabled and (not self.ssms if self.ngram is None else self.ngram)


@dataclasses.dataclass(frozen=True)
class LLMConfig:
    """Everything `specinfer --config FILE.toml` and `LLM(...)` can set."""

    model: str = DEFAULT_MODEL
    """Name, folder, .gguf file or hub id."""
    dtype: str = "auto"
    """auto: bfloat16 on TPU and NVIDIA sm_80 or newer, float16 on older GPUs, float32 on CPU."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt included; None: what the model was made for."""
    max_num_seqs: int | None = None
    """Requests that decode side by side; None: 1 on CPU, 8 elsewhere."""
    speculation: Speculation = Speculation()
    """Speculators."""
    sampling: SamplingParams = GREEDY
    """Of the command line's requests, which are greedy unless a temperature is set; `LLM` takes its own per call."""
    mesh: str = ONE_DEVICE
    """Devices by axis: "data" groups decode requests of their own, "model" devices share the LLM."""
    offload: str = "none"
    """"host": the LLM's weights lie in host memory and are streamed through the device layer by layer."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        mesh_shape(self.mesh)
        if self.offload not in OFFLOADS:
            raise ConfigError(f"offload must be one of {', '.join(OFFLOADS)}, got {self.offload!r}")
        for name in ("max_model_len", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")


def mesh_shape(text: str) -> tuple[int, int]:
    """(data, model) of a mesh written as in `LLMConfig.mesh`.

    Raises:
      ConfigError: it is written otherwise.
    """
    axes = re.fullmatch(r"data=([1-9]\d*),model=([1-9]\d*)", text) if isinstance(text, str) else None
    if axes is None:
        raise ConfigError(f'mesh must look like "data=1,model=8", got {text!r}')
    return int(axes[1]), int(axes[2])


def load_config(path: str | Path, *, base: LLMConfig = LLMConfig()) -> LLMConfig:
    """Read an `LLMConfig` from a TOML file.

    Args:
      path: the file.
      base: what holds for every key that the file does not set; so several files can be laid over each other.

    Raises:
      ConfigError: the file is missing or no TOML, or a key is unknown (the message lists the known ones).
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    return _from_table(base, values, str(path), "")


def _from_table(base: Any, values: dict[str, Any], path: str, prefix: str) -> Any:
    """The dataclass with what a TOML table sets; nested tables change nested dataclasses."""
    fields = [field.name for field in dataclasses.fields(base)]
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{path}: unknown key {prefix + key!r}; known are {', '.join(fields)}")
        inner = getattr(base, key)
        if dataclasses.is_dataclass(inner):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {prefix + key} must be a table, got {value!r}")
            value = _from_table(inner, value, path, f"{prefix}{key}.")
        arguments[key] = tuple(value) if isinstance(value, list) else value
    try:
        return dataclasses.replace(base, **arguments)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
