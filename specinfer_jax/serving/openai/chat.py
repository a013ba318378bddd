"""POST /v1/chat/completions. Free of jax."""

from collections.abc import Iterator, Sequence

from fastapi import Request

from specinfer_jax.outputs import Logprob
from specinfer_jax.serving.openai.call import Call, Continuation, encoded
from specinfer_jax.serving.openai.generation import Piece
from specinfer_jax.serving.openai.logprobs import chat_logprobs, prompt_logprobs
from specinfer_jax.serving.openai.parameters import chat_params
from specinfer_jax.serving.openai.requests import ChatCompletionRequest
from specinfer_jax.serving.openai.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from specinfer_jax.serving.openai.state import FINGERPRINT, ServerState


class ChatEndpoint:
    """Answers of one call, whole or as events."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._wants_ids = bool(call.body.return_token_ids)
        self._begun: set[int] = set()

    @classmethod
    async def open(cls, http: Request, body: ChatCompletionRequest) -> "ChatEndpoint":
        """Check a request.

        Raises:
          ApiError, SpecInferError: what is wrong with it.
        """
        state: ServerState = http.app.state.serving
        params = chat_params(body, cap=state.settings.max_tokens)
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        is_new = body.add_generation_prompt is not False
        ids = await encoded(
            state.engine.encode_chat, messages, add_generation_prompt=is_new, prompt_field="messages"
        )  # fmt: skip
        return cls(Call(http, body, params, [ids], prompt_field="messages", prefix="chatcmpl"))

    def whole(self, answers: Sequence[Sequence[Continuation]]) -> ChatCompletion:
        """The answer in one piece."""
        call, (group,) = self.call, answers
        of_prompt = call.prompt_logprobs.get(0)
        return ChatCompletion(
            id=call.id, created=call.created, model=call.model, system_fingerprint=FINGERPRINT,
            choices=[self._choice(i, answer) for i, answer in enumerate(group)],
            usage=call.tally.usage(),
            prompt_logprobs=None if of_prompt is None else prompt_logprobs(of_prompt),
            prompt_token_ids=call.prompts[0] if self._wants_ids else None,
        )  # fmt: skip

    def _choice(self, index: int, answer: Continuation) -> ChatChoice:
        return ChatChoice(
            index=index, message=ChatMessage(content=answer.text),
            logprobs=self._logprobs(answer.token_ids, answer.logprobs),
            finish_reason=answer.finish_reason,  # type: ignore[arg-type]
            stop_reason=answer.stop_reason, token_ids=answer.token_ids if self._wants_ids else None,
        )  # fmt: skip

    def events(self, piece: Piece) -> Iterator[ChatCompletionChunk]:
        """The role before a choice's first text, then its text, then its reason to end."""
        output = piece.output
        if output.index not in self._begun:
            self._begun.add(output.index)
            role = self._chunk(
                ChatChunkChoice(index=output.index, delta=ChatDelta(role="assistant", content=""))
            )  # fmt: skip
            if self._wants_ids:
                role.prompt_token_ids = self.call.prompts[0]
            yield role
        logprobs = self._logprobs(output.token_ids, output.logprobs)
        ids = output.token_ids if self._wants_ids else None
        if output.text or ids or (logprobs is not None and logprobs.content):
            delta = ChatDelta(content=output.text)
            yield self._chunk(ChatChunkChoice(index=output.index, delta=delta, logprobs=logprobs, token_ids=ids))
        if output.finish_reason is not None:
            last = ChatChunkChoice(
                index=output.index, delta=ChatDelta(),
                finish_reason=output.finish_reason,  # type: ignore[arg-type]
                stop_reason=output.stop_reason,
            )  # fmt: skip
            yield self._chunk(last)

    def usage_event(self) -> ChatCompletionChunk:
        """The last event, without choices."""
        return self._chunk()

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        call = self.call
        return ChatCompletionChunk(
            id=call.id, created=call.created, model=call.model, choices=list(choices), system_fingerprint=FINGERPRINT
        )  # fmt: skip

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None) -> ChatLogprobs | None:
        num_top = self.call.params.logprobs
        if num_top is None or logprobs is None:
            return None
        return chat_logprobs(self.call.names, ids, logprobs, num_top=num_top)
