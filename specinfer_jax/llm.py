"""The Python API: `LLM(...)`, then `generate`, `chat`, `stream`.

from specinfer_jax import LLM, SamplingParams

llm = LLM()                                            # the default model, n-gram trees
out = llm.chat([{"role": "user", "content": "Name three rivers."}], SamplingParams(temperature=0, max_tokens=64))
print(out[0].text, out[0].stats.tokens_per_step)
"""

import atexit
import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specinfer_jax.assemble import PAGE_SIZE, build_program, check_memory
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.completion import Completion
from specinfer_jax.config import DEFAULT_MODEL, ONE_DEVICE, LLMConfig, SamplingParams, Speculation, mesh_shape
from specinfer_jax.errors import ConfigError, PromptError
from specinfer_jax.metrics import total
from specinfer_jax.opened import Model, choose_dtype, choose_max_model_len
from specinfer_jax.opened import open_model as _open_model
from specinfer_jax.outputs import CompletionOutput, RequestOutput, StreamOutput
from specinfer_jax.parallel.multihost import cluster
from specinfer_jax.parallel.weights import find_mesh
from specinfer_jax.progress_bar import progress_bar
from specinfer_jax.serving.engine import Engine
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.tokenizer import Tokenizer
from specinfer_jax.vocabulary import bad_sequences, check_token_ids

Prompt = str | Sequence[Any] | np.ndarray | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": ...} / {"prompt_token_ids": [...]}."""
Messages = Sequence[Mapping[str, Any]]
"""A chat: {"role": ..., "content": ...} dicts."""


class Job(NamedTuple):
    """One of the n continuations of a prompt."""

    request: EngineRequest
    completion: Completion


class LLM:
    """A model that decodes through token trees; what it writes is the model's own."""

    def __init__(
        self, model: str | os.PathLike[str] | Model = DEFAULT_MODEL, *, speculation: Speculation | None = None,
        dtype: str = "auto", max_model_len: int | None = None, max_num_seqs: int | None = None,
        cache_tokens: int | None = None, shares_prefixes: bool = True, prefill_tokens: int | None = None,
        mesh: str = ONE_DEVICE, offload: str = "none",
    ) -> None:  # fmt: skip
        """Load, compile and measure; afterwards no request compiles anything.

        Args:
          model: known name, folder, .gguf file, hub id, or a loaded `Model`.
          speculation: who proposes trees; None is the n-gram tree, `Speculation.off()` incremental decoding.
          dtype: "auto" (bfloat16 on TPU and sm_80 or newer, float16 on older GPUs, float32 on CPU), "float32",
            "bfloat16" or "float16".
          max_model_len: most tokens of one request, prompt included; None: the model's own limit.
          max_num_seqs: requests that decode side by side; None: 1 on CPU, 8 elsewhere.
          cache_tokens: tokens that the caches hold for all requests together, at least max_model_len; None: enough for
            max_num_seqs requests of max_model_len. With less, requests wait or are put back when it runs out.
          shares_prefixes: prompts that begin in the same way share the cache of what they share.
          prefill_tokens: as for `Engine`; for requests that come and go.
          mesh: devices by axis, "data=1,model=8": "model" devices share the LLM, "data" groups of them decode requests
            of their own; max_num_seqs is then a multiple of "data".
          offload: "host": the LLM's weights stay in host memory and are streamed layer by layer.

        Raises:
          ModelNotFoundError, CheckpointError, ConfigError, TokenizerError, SpeculationError: all ValueErrors.
        """
        name = model.location if isinstance(model, Model) else os.fspath(model)
        config = LLMConfig(name, dtype, max_model_len, max_num_seqs, mesh=mesh, offload=offload)
        speculation = Speculation() if speculation is None else speculation
        if not isinstance(speculation, Speculation):
            raise ConfigError(f"speculation must be a Speculation, got {speculation!r}")
        enable_compile_cache()
        self.dtype = choose_dtype(config.dtype)
        devices, memory = find_mesh(mesh, offload)
        self.model = (
            model if isinstance(model, Model) else _open_model(model, dtype=self.dtype, mesh=devices, memory=memory)
        )
        self.max_model_len = choose_max_model_len(self.model.config, max_model_len)
        self.speculation = speculation
        on_cpu = jax.devices()[0].platform == "cpu"
        groups = mesh_shape(mesh)[0]
        num_slots = max_num_seqs or (groups if on_cpu else 8 * groups)
        program, params = build_program(
            self.model, speculation, dtype=self.dtype, num_slots=num_slots, mesh=devices, memory=memory
        )
        num_pages = None if cache_tokens is None else -(-cache_tokens // PAGE_SIZE)
        check_memory(
            program, num_slots=num_slots, max_model_len=self.max_model_len, dtype=self.dtype, num_pages=num_pages,
            mesh=devices,
        )  # fmt: skip
        self.engine = Engine(
            params, program,
            num_slots=num_slots, max_model_len=self.max_model_len, page_size=PAGE_SIZE, dtype=self.dtype,
            num_pages=num_pages, shares_prefixes=shares_prefixes, prefill_tokens=prefill_tokens, mesh=devices,
        )  # fmt: skip
        self._start_engine()

    def _start_engine(self) -> None:
        """Compile and measure; of several processes, all but the first serve that one until it ends."""
        together = cluster()
        if together is not None and not together.is_leader:
            self.engine.follow()
            raise SystemExit(0)
        self.engine.warm_up()
        if together is not None:
            together.ready()
            atexit.register(together.close)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.model.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, under vLLM's name."""
        return self.model.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        use_tqdm: bool = False, speculation: RequestSpeculation | Sequence[RequestSpeculation | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Continue prompts.

        Args:
          prompts: one prompt or a list, of thousands if need be; a prompt is text or a list of token ids.
          params: for all, or one per prompt; None takes the defaults, which draw at temperature 1 as vLLM's do.
          use_tqdm: show a progress bar, under vLLM's name; a library writes nothing unless it is asked to.
          speculation: for all, or one per prompt: which part of the trees to use; None: all.

        Returns:
          One `RequestOutput` per prompt, in order. In a list, a prompt that is refused (empty, too long, unknown ids)
          comes back with `finish_reason="error"` and `error`, and so does one that fails later; the others are not
          affected.

        Raises:
          PromptError: every prompt is refused.
          SamplingError: parameters do not fit the model: ids outside its vocabulary, or more than it was made for.
          SpeculationError: `speculation` asks for what the LLM's trees do not have.
        """
        batch = _as_batch(prompts)
        return self._finish([self._encode(prompt) for prompt in batch], params, speculation, use_tqdm)

    def chat(
        self, messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        use_tqdm: bool = False, speculation: RequestSpeculation | Sequence[RequestSpeculation | None] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answer one chat or several, rendered with the model's own chat template; otherwise as `generate`."""
        is_one = not messages or isinstance(messages[0], Mapping)
        batch: Sequence[Any] = [messages] if is_one else messages
        return self._finish([self._encode_chat(chat) for chat in batch], params, speculation, use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, *,
        speculation: RequestSpeculation | None = None,
    ) -> Iterator[StreamOutput]:  # fmt: skip
        """Continue one prompt, or answer one chat, piece by piece: one `StreamOutput` per step and continuation.

        Raises:
          PromptError: the prompt is refused.
          SamplingError, SpeculationError: as for `generate`.
        """
        is_chat = not isinstance(prompt, str | Mapping) and bool(prompt) and isinstance(prompt[0], Mapping)
        encoded = self._encode_chat(prompt) if is_chat else self._encode(prompt)
        if isinstance(encoded, PromptError):
            raise encoded
        return self._stream(self.jobs(encoded[1], *_per_prompt(params, 1), speculation=speculation))

    def _stream(self, jobs: Sequence[Job]) -> Iterator[StreamOutput]:
        for progress in self.engine.run([job.request for job in jobs], stream=True):
            yield jobs[progress.index].completion.add(progress)

    def _finish(
        self, encoded: Sequence[tuple[str | None, list[int]] | PromptError], params: Any, speculation: Any,
        use_tqdm: bool,
    ) -> list[RequestOutput]:  # fmt: skip
        errors = [entry for entry in encoded if isinstance(entry, PromptError)]
        if errors and len(errors) == len(encoded):
            raise errors[0]
        jobs_of = [
            [] if isinstance(entry, PromptError) else self.jobs(entry[1], own, speculation=part)
            for entry, own, part in zip(
                encoded, _per_prompt(params, len(encoded)), _parts(speculation, len(encoded)), strict=True
            )
        ]
        jobs = [job for group in jobs_of for job in group]
        with progress_bar("continuations", len(jobs), is_shown=use_tqdm) as tell:
            for progress in self.engine.run([job.request for job in jobs]):
                jobs[progress.index].completion.add(progress)
                tell(progress.finish_reason is not None, len(progress.new_token_ids))
        return [
            _refused(i, entry) if isinstance(entry, PromptError) else _finished(i, *entry, group)
            for i, (entry, group) in enumerate(zip(encoded, jobs_of, strict=True))
        ]

    def check_prompt(self, ids: Sequence[Any]) -> list[int]:
        """The ids of a prompt as the engine takes them.

        Raises:
          PromptError: empty, too long, or ids outside the vocabulary.
        """
        checked = self._checked(None, list(ids))
        if isinstance(checked, PromptError):
            raise checked
        return checked[1]

    def jobs(
        self, ids: list[int], params: SamplingParams, *, speculation: RequestSpeculation | None = None,
        priority: int = 0,
    ) -> list[Job]:  # fmt: skip
        """The n continuations of a checked prompt, each a request and what becomes of it.

        Raises:
          SamplingError: parameters do not fit the model.
        """
        vocab_size = self.model.config.vocab_size
        check_token_ids(params, vocab_size=vocab_size)
        banned = bad_sequences(params, self.tokenizer, vocab_size=vocab_size)
        end_ids = self.model.stop_ids(params)
        max_tokens = self.max_model_len - len(ids) if params.max_tokens is None else params.max_tokens
        seed = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        # The prompt is the same for all, so its log-probabilities are measured once.
        rest = dataclasses.replace(params, prompt_logprobs=None)
        jobs = []
        for sample in range(params.n):
            own = params if sample == 0 else rest
            completion = Completion(self.tokenizer, own, prompt_ids=ids, end_ids=end_ids, index=sample)
            watch = completion.watch if params.stop else None
            request = EngineRequest(
                ids, max_tokens, end_ids, own, seed, sample, banned, watch, priority=priority, speculation=speculation
            )
            jobs.append(Job(request, completion))
        return jobs

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


def _per_prompt(params: Any, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts need one SamplingParams or {count} of them, got {len(params)}")
    for own in params:
        if not isinstance(own, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, got {own!r}")
    return list(params)


def _parts(speculation: Any, count: int) -> list[RequestSpeculation | None]:
    """One `RequestSpeculation` for each of `count` prompts, or None."""
    if speculation is None or isinstance(speculation, RequestSpeculation):
        return [speculation] * count
    parts = list(speculation)
    if len(parts) != count:
        raise ConfigError(f"{count} prompts need one RequestSpeculation or {count} of them, got {len(parts)}")
    return parts


def _finished(index: int, text: str | None, prompt_ids: list[int], jobs: Sequence[Job]) -> RequestOutput:
    done = [job.completion for job in jobs]
    stats = [completion.stats for completion in done if completion.stats is not None]
    return RequestOutput(
        str(index), text, prompt_ids, [completion.output() for completion in done], total(stats) if stats else None,
        error=next((completion.error for completion in done if completion.error is not None), None),
        prompt_logprobs=done[0].prompt_logprobs,
    )  # fmt: skip


def _refused(index: int, error: PromptError) -> RequestOutput:
    return RequestOutput(str(index), None, [], [CompletionOutput(0, "", [], "error")], None, str(error))
