"""One call of a completion endpoint, from its checked body to the pieces of its answers. Free of jax."""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request

from specinfer_jax.errors import SpecInferError
from specinfer_jax.outputs import Logprob, StreamOutput
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import RequestFailedError
from specinfer_jax.serving.openai.errors import ApiError, as_api_error
from specinfer_jax.serving.openai.generation import Piece, Pieces, Tally, check_piece
from specinfer_jax.serving.openai.logprobs import TokenNames
from specinfer_jax.serving.openai.logs import fields_of
from specinfer_jax.serving.openai.parameters import speculation, time_limit
from specinfer_jax.serving.openai.requests import GenerationRequest
from specinfer_jax.serving.openai.state import ServerState


@dataclasses.dataclass
class Continuation:
    """One answer, put together from its pieces."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, output: StreamOutput) -> None:
        """Append a piece."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


class Call:
    """A request of either endpoint while it runs."""

    def __init__(
        self, http: Request, body: GenerationRequest, params: SamplingParams, prompts: Sequence[list[int]], *,
        prompt_field: str, prefix: str, drops_tokens: bool = False,
    ) -> None:  # fmt: skip
        """Check that the prompts fit; nothing is started.

        Args:
          http: the request.
          body: its body.
          params: what it asks for.
          prompts: ids.
          prompt_field: where the body has its prompt, for errors.
          prefix: of the answer's id.
          drops_tokens: no tokens are asked for, and the one that the engine must choose is left out.

        Raises:
          ApiError: a prompt is too long.
        """
        self.http, self.body, self.params, self.prompts = http, body, params, prompts
        self.state: ServerState = http.app.state.serving
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = self.state.model_name(body.model)
        self.tokenizer = self.state.engine.tokenizer
        self.names = TokenNames(self.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self.tally = Tally([len(ids) for ids in prompts])
        self.prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}
        self._prompt_field, self._drops_tokens = prompt_field, drops_tokens
        self._reasons: list[str] = []
        longest = max(map(len, prompts))
        if longest >= self.state.engine.max_model_len:
            raise ApiError(
                400, f"The context has room for {self.state.engine.max_model_len} tokens; the prompt has {longest}, "
                "which leaves none for an answer.", param=prompt_field, code="context_length_exceeded",
            )  # fmt: skip
        fields_of(http).update(
            id=self.id, model=self.model, stream=bool(body.stream), n=params.n, prompts=len(prompts),
            prompt_tokens=sum(map(len, prompts)),
        )  # fmt: skip

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.stream)

    def start(self) -> Pieces:
        """Hand all prompts to the engine."""
        body, settings = self.body, self.state.settings
        streams = [
            self.state.engine.generate(
                ids, self.params, request_id=f"{self.id}-{i}", priority=body.priority or 0,
                timeout=time_limit(body, settings.request_timeout), speculation=speculation(body),
            )
            for i, ids in enumerate(self.prompts)
        ]  # fmt: skip
        return Pieces(streams, self.state.metrics)

    def take(self, piece: Piece) -> Piece:
        """Count a piece, and make of it what the client is to see.

        Raises:
          ApiError: its continuation could not go on.
        """
        output = piece.output
        check_piece(output, self.params)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[piece.prompt] = output.prompt_logprobs
        if self._drops_tokens:
            reason = None if output.finish_reason is None else "length"
            output = dataclasses.replace(
                output, text="", token_ids=[], logprobs=None if output.logprobs is None else [], finish_reason=reason,
                stop_reason=None, stats=None,
            )  # fmt: skip
        self.tally.add(output)
        if output.finish_reason is not None:
            self._reasons.append(output.finish_reason)
        return Piece(piece.prompt, output)

    async def collect(self, pieces: AsyncIterator[Piece]) -> list[list[Continuation]]:
        """The answers of every prompt, whole.

        Raises:
          ApiError: one of them could not go on.
          Exception: whatever the engine raises, or `check_whole`.
        """
        answers = [[Continuation() for _ in range(self.params.n)] for _ in self.prompts]
        async for piece in pieces:
            prompt, output = self.take(piece)
            answers[prompt][output.index].add(output)
        self.check_whole()
        return answers

    def check_whole(self) -> None:
        """All continuations must have ended.

        Raises:
          RequestFailedError: the engine has left one without its last piece.
        """
        if len(self._reasons) != self.params.n * len(self.prompts):
            raise RequestFailedError("the engine ended a request without its last piece")

    def error(self, error: Exception) -> ApiError:
        """What the client is told of an error."""
        told = as_api_error(error, prompt_field=self._prompt_field)
        fields_of(self.http).update(error=told.code, param=told.param)
        return told

    def finish(self) -> None:
        """Tell log and metrics what it has cost."""
        stats, usage = self.tally.stats, self.tally.usage()
        if stats is not None:
            self.state.metrics.on_stats(stats)
        per_step = usage.tokens_per_step
        fields_of(self.http).update(
            completion_tokens=usage.completion_tokens, finish_reasons=sorted(set(self._reasons)),
            steps=None if stats is None else stats.steps,
            tokens_per_step=None if per_step is None else round(per_step, 3),
        )  # fmt: skip


async def encoded(encode: Any, *arguments: Any, prompt_field: str, **options: Any) -> list[int]:
    """A prompt's ids, worked out beside the event loop.

    Raises:
      ApiError: the prompt is refused.
    """
    try:
        return await asyncio.to_thread(encode, *arguments, **options)
    except SpecInferError as error:
        raise as_api_error(error, prompt_field=prompt_field) from error
