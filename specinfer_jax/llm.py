"""The Python API: `LLM(...)`, then `generate`, `chat`, `stream`.

from specinfer_jax import LLM, SamplingParams

llm = LLM()                                            # the default model, n-gram trees
out = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(max_tokens=64))
print(out[0].text, out[0].stats.tokens_per_step)
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specinfer_jax.assemble import PAGE_SIZE, Model, build_program, check_memory, choose_dtype, choose_max_model_len
from specinfer_jax.assemble import open_model as _open_model
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL, LLMConfig, SamplingParams, Speculation
from specinfer_jax.errors import ConfigError, PromptError
from specinfer_jax.outputs import CompletionOutput, RequestOutput, StreamOutput
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.tokenizer import IncrementalDetokenizer, Tokenizer

Prompt = str | Sequence[Any] | np.ndarray | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": ...} / {"prompt_token_ids": [...]}."""
Messages = Sequence[Mapping[str, Any]]
"""A chat: {"role": ..., "content": ...} dicts."""


class LLM:
    """A model that decodes through token trees; its greedy output is the model's own, token for token."""

    def __init__(
        self, model: str | os.PathLike[str] | Model = DEFAULT_MODEL, *, speculation: Speculation | None = None,
        dtype: str = "auto", max_model_len: int | None = None, max_num_seqs: int | None = None,
    ) -> None:  # fmt: skip
        """Load, compile and measure; afterwards no request compiles anything.

        Args:
          model: known name, folder, .gguf file, hub id, or a loaded `Model`.
          speculation: who proposes trees; None is the n-gram tree, `Speculation.off()` incremental decoding.
          dtype: "auto" (bfloat16 on TPU and sm_80 or newer, float16 on older GPUs, float32 on CPU), "float32",
            "bfloat16" or "float16".
          max_model_len: most tokens of one request, prompt included; None: the model's own limit.
          max_num_seqs: requests that decode side by side; None: 1 on CPU, 8 elsewhere.

        Raises:
          ModelNotFoundError, CheckpointError, ConfigError, TokenizerError, SpeculationError: all ValueErrors.
        """
        name = model.location if isinstance(model, Model) else os.fspath(model)
        config = LLMConfig(name, dtype, max_model_len, max_num_seqs)
        speculation = Speculation() if speculation is None else speculation
        if not isinstance(speculation, Speculation):
            raise ConfigError(f"speculation must be a Speculation, got {speculation!r}")
        enable_compile_cache()
        self.dtype = choose_dtype(config.dtype)
        self.model = model if isinstance(model, Model) else _open_model(model, dtype=self.dtype)
        self.max_model_len = choose_max_model_len(self.model.config, max_model_len)
        self.speculation = speculation
        on_cpu = jax.devices()[0].platform == "cpu"
        num_slots = max_num_seqs or (1 if on_cpu else 8)
        program, params = build_program(self.model, speculation, dtype=self.dtype)
        check_memory(program, num_slots=num_slots, max_model_len=self.max_model_len, dtype=self.dtype)
        self.engine = Engine(
            params, program,
            num_slots=num_slots, max_model_len=self.max_model_len, page_size=PAGE_SIZE, dtype=self.dtype,
        )  # fmt: skip
        self.engine.warm_up()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, under vLLM's name."""
        return self.model.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
          prompts: one prompt or a list; a prompt is text or a list of token ids.
          params: for all, or one per prompt; None takes the defaults.

        Returns:
          One `RequestOutput` per prompt, in order. In a list, a prompt that is refused (empty, too long, unknown ids)
          comes back with `finish_reason="error"` and `error`; the others are not affected.

        Raises:
          PromptError: every prompt is refused.
        """
        batch = _as_batch(prompts)
        return self._finish([self._encode(prompt) for prompt in batch], _per_prompt(params, len(batch)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several, rendered with the model's own chat template; otherwise as `generate`."""
        is_one = not messages or isinstance(messages[0], Mapping)
        batch: Sequence[Any] = [messages] if is_one else messages
        return self._finish([self._encode_chat(chat) for chat in batch], _per_prompt(params, len(batch)))

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """Continue one prompt, or answer one chat, piece by piece: one `StreamOutput` per step.

        Raises:
          PromptError: the prompt is refused.
        """
        is_chat = not isinstance(prompt, str | Mapping) and bool(prompt) and isinstance(prompt[0], Mapping)
        encoded = self._encode_chat(prompt) if is_chat else self._encode(prompt)
        if isinstance(encoded, PromptError):
            raise encoded
        return self._stream(encoded[1], params or SamplingParams())

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[StreamOutput]:
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        for progress in self.engine.run([self._request(ids, params)], stream=True):
            text = detokenizer.push(progress.new_token_ids)
            if progress.finish_reason is not None:
                text += detokenizer.flush()
            yield StreamOutput(text, progress.new_token_ids, progress.finish_reason, progress.stats)

    def _finish(
        self, encoded: Sequence[tuple[str | None, list[int]] | PromptError], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        errors = [entry for entry in encoded if isinstance(entry, PromptError)]
        if errors and len(errors) == len(encoded):
            raise errors[0]
        outputs: dict[int, RequestOutput] = {
            i: _refused(i, entry) for i, entry in enumerate(encoded) if isinstance(entry, PromptError)
        }
        accepted = [(i, entry) for i, entry in enumerate(encoded) if not isinstance(entry, PromptError)]
        requests = [self._request(ids, params[i]) for i, (_, ids) in accepted]
        token_ids: list[list[int]] = [[] for _ in requests]
        for progress in self.engine.run(requests):
            token_ids[progress.index] += progress.new_token_ids
            if progress.finish_reason is None:
                continue
            i, (text, prompt_ids) = accepted[progress.index]
            completion = self._completion(token_ids[progress.index], progress.finish_reason, params[i])
            outputs[i] = RequestOutput(str(i), text, prompt_ids, [completion], progress.stats)
        return [outputs[i] for i in range(len(encoded))]

    def _completion(self, ids: list[int], reason: str, params: SamplingParams) -> CompletionOutput:
        text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        asked = reason == "stop" and ids[-1] in params.stop_token_ids
        return CompletionOutput(0, text, ids, reason, ids[-1] if asked else None)

    def _request(self, ids: list[int], params: SamplingParams) -> EngineRequest:
        return EngineRequest(ids, params.max_tokens, self.model.stop_ids(params))

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]] | PromptError:
        """(text, ids), or the reason why the prompt is refused."""
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", "")
        if isinstance(prompt, str):
            return self._checked(prompt, self.tokenizer.encode(prompt))
        if not isinstance(prompt, Sequence | np.ndarray):
            return PromptError(f"a prompt must be text or a list of token ids, got {prompt!r}")
        return self._checked(None, list(prompt))

    def _encode_chat(self, messages: Any) -> tuple[str | None, list[int]] | PromptError:
        text = self.tokenizer.apply_chat_template(messages)
        return self._checked(text, self.tokenizer.encode(text, add_special_tokens=False))

    def _checked(self, text: str | None, ids: list[Any]) -> tuple[str | None, list[int]] | PromptError:
        vocab_size = self.model.config.vocab_size
        if not ids:
            return PromptError("the prompt is empty; give at least one token")
        if len(ids) >= self.max_model_len:
            return PromptError(
                f"the prompt has {len(ids)} tokens; at most {self.max_model_len - 1} leave room for an answer within "
                f"max_model_len {self.max_model_len}"
            )
        for i in ids:
            if isinstance(i, bool) or not hasattr(i, "__index__"):
                return PromptError(f"a prompt must be text or whole-number token ids, got {i!r}")
            if not 0 <= i < vocab_size:
                return PromptError(f"token id {i} lies outside the vocabulary of {vocab_size}")
        return text, [int(i) for i in ids]


def _as_batch(prompts: Any) -> list[Any]:
    """A list of prompts; one prompt becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    batch = list(prompts)
    is_ids = bool(batch) and hasattr(batch[0], "__index__")
    return [batch] if is_ids else batch


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    return list(params)


def _refused(index: int, error: PromptError) -> RequestOutput:
    return RequestOutput(str(index), None, [], [CompletionOutput(0, "", [], "error")], None, str(error))
