"""The systems that peers.py compares, each behind one small protocol: prompt ids in, a fixed number of greedy ids out.

All of them run to the full number of tokens, end-of-sequence ids or not, and keep nothing between two calls.
"""

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.machine import available_cores
from specinfer_jax import LLM, Model, SamplingParams, Speculation

PROMPT_LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup proposes at a time; its documentation's value."""


class PeerMissingError(Exception):
    """A peer cannot run here; the message says why."""


class Peer(Protocol):
    """One way to decode."""

    name: str
    """What the table calls it."""
    weights: str
    """What it computes with."""

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` greedy continuation ids."""
        ...


class SpecInfer:
    """This project, with one choice of speculators."""

    def __init__(self, name: str, model: Model, speculation: Speculation, *, max_model_len: int) -> None:
        self.name = name
        self._llm = LLM(model, speculation=speculation, dtype="float32", max_model_len=max_model_len, max_num_seqs=1)
        self.weights = "float32"

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """One request, in bursts on the device."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return self._llm.generate([list(prompt_ids)], params)[0].token_ids


class Transformers:
    """transformers' generate with torch on the same dequantised weights, with its own key/value cache."""

    def __init__(self, name: str, model: Any, **options: Any) -> None:
        self.name, self._model, self._options = name, model, options
        self.weights = "float32"

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """`options` choose prompt lookup or an assistant model."""
        import torch  # pyright: ignore[reportMissingImports]

        ids = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=num_tokens, max_new_tokens=num_tokens, **self._options,
            )  # fmt: skip
        return out[0, len(prompt_ids) :].tolist()


class LlamaCpp:
    """llama.cpp on the file's own quantised weights: fewer bytes to read, other arithmetic, so other ids in places."""

    def __init__(self, path: Path, *, max_model_len: int) -> None:
        from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

        self.name = "llama.cpp"
        self.weights = quantisation(path)
        cores = available_cores()
        self._llm = Llama(str(path), n_ctx=max_model_len, n_threads=cores, n_threads_batch=cores, verbose=False)

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy, from an empty cache."""
        self._llm.reset()
        ids = []
        for token in self._llm.generate(list(prompt_ids), temp=0.0, repeat_penalty=1.0, reset=True):
            ids.append(int(token))
            if len(ids) == num_tokens:
                break
        return ids


def quantisation(path: Path) -> str:
    """The type most of a GGUF file's weights are stored in, say Q4_1."""
    from gguf import GGUFReader

    parameters: dict[str, int] = {}
    for tensor in GGUFReader(path).tensors:
        name = tensor.tensor_type.name
        parameters[name] = parameters.get(name, 0) + int(tensor.n_elements)
    return max(parameters, key=lambda name: parameters[name])


def torch_model(path: Path) -> Any:
    """A model in transformers, float32, from the same folder or GGUF file.

    Raises:
      PeerMissingError: torch or transformers is not installed, or cannot read the model.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    require("torch", "transformers", "accelerate")
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    logging.disable_progress_bar()

    torch.set_num_threads(available_cores())
    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    except (ImportError, OSError, ValueError) as error:
        raise PeerMissingError(f"cannot read {path.name} ({error})") from error
    model.eval()
    # Nothing ends a continuation early, in any of the systems.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def require(*packages: str) -> None:
    """Raise a PeerMissingError that names the packages that are not installed."""
    missing = []
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise PeerMissingError(f"{' and '.join(missing)} not installed")


def transformers_peers(path: Path, ssm: Path | None) -> dict[str, Callable[[], Peer]]:
    """Plain, with prompt lookup, and with the SSM as assistant model, by name; they share one copy of the weights."""
    loaded: dict[Path, Any] = {}

    def peer(name: str, **options: Any) -> Callable[[], Peer]:
        def opener() -> Peer:
            if ssm is not None and "assisted" in name:
                options["assistant_model"] = model(ssm)
            return Transformers(name, model(path), **options)

        return opener

    def model(which: Path) -> Any:
        if which not in loaded:
            loaded[which] = torch_model(which)
        return loaded[which]

    lookup = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    variants = {"transformers": {}, "transformers prompt lookup": lookup}
    if ssm is not None:
        variants["transformers assisted"] = {}
    return {name: peer(name, **options) for name, options in variants.items()}


def llama_cpp_peer(path: Path, *, max_model_len: int) -> Peer:
    """llama.cpp, where it is installed and the model is a GGUF file."""
    require("llama-cpp-python")
    if not path.is_file():
        raise PeerMissingError(f"{path.name} is no GGUF file")
    return LlamaCpp(path, max_model_len=max_model_len)
