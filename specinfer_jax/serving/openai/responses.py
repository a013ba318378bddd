"""What the endpoints answer, as pydantic models: OpenAI's objects, with vLLM's and our own fields. Free of jax.

OpenAI's own fields always appear, null where there is nothing; the others where a request asks for them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


def _on_request(description: str = "If asked for.") -> Any:
    """A field that does not appear where it is None."""
    return Field(default=None, description=description, exclude_if=lambda value: value is None)


class Answer(BaseModel):
    """An object of exactly these fields."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class ErrorDetail(Answer):
    """What is wrong."""

    message: str = Field(description="One sentence.")
    type: str = Field(description="invalid_request_error, authentication_error, rate_limit_error, server_error, ...")
    param: str | None = Field(description="The field that is wrong, such as messages[0].content.")
    code: str | None = Field(description="For programs.")


class ErrorResponse(Answer):
    """Every answer with a status of 400 and above."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    """Where prompt tokens came from."""

    cached_tokens: int = Field(description="Those that a shared prefix spared the LLM.")
    audio_tokens: Literal[0] = 0


class CompletionTokensDetails(Answer):
    """How completion tokens came about."""

    accepted_prediction_tokens: int = Field(description="Tokens of the answer that speculators had proposed.")
    rejected_prediction_tokens: int = Field(description="Proposed and not taken; no part of completion_tokens.")
    reasoning_tokens: Literal[0] = 0
    audio_tokens: Literal[0] = 0


class Usage(Answer):
    """What a request cost, over all its prompts and choices."""

    prompt_tokens: int = Field(description="Each prompt counts once, whatever n is.")
    completion_tokens: int = Field(description="The token that ended an answer included.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails
    tokens_per_step: float | None = Field(description="Tokens per LLM pass; null before the first ends.")


class TopLogprob(Answer):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float = Field(description="Natural logarithm, before penalties, bias and temperature; at least -9999.")
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The token itself."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(Answer):
    """One token at one place of the prompt (vLLM's form)."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatMessage(Answer):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Answer):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(description="The stop string, or the id of stop_token_ids, that ended it.")
    token_ids: list[int] | None = _on_request()


class ChatCompletion(Answer):
    """POST /v1/chat/completions, whole."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_logprobs: PromptLogprobs | None = _on_request()
    prompt_token_ids: list[int] | None = _on_request()


class ChatDelta(Answer):
    """What an event adds to a message."""

    role: Literal["assistant"] | None = _on_request("With the first event of an answer.")
    content: str | None = _on_request("Not with the last one.")


class ChatChunkChoice(Answer):
    """What an event adds to one of the n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = Field(default=None, description="With the last event of an answer.")
    stop_reason: int | str | None = None
    token_ids: list[int] | None = _on_request()


class ChatCompletionChunk(Answer):
    """One event of POST /v1/chat/completions, streamed."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(
        default=None, description="In a stream: only with include_usage, null before its last event."
    )
    system_fingerprint: str | None
    prompt_token_ids: list[int] | None = _on_request()


class CompletionLogprobs(Answer):
    """One entry per token in every list."""

    text_offset: list[int] = Field(description="Where the token begins in the choice's text.")
    token_logprobs: list[float | None]
    tokens: list[str] = Field(description=r'Text; "bytes:\xf0\x9f" for a part of a character.')
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Answer):
    """One of the n continuations of a prompt; those of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None = Field(description="null in a stream before the end.")
    stop_reason: int | str | None = Field(default=None, description="As in a chat.")
    token_ids: list[int] | None = _on_request()
    prompt_token_ids: list[int] | None = _on_request()
    prompt_logprobs: PromptLogprobs | None = _on_request()


class Completion(Answer):
    """POST /v1/completions, whole and as one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = Field(
        default=None, description="In a stream: only with include_usage, null before its last event."
    )
    system_fingerprint: str | None


class ModelCard(Answer):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int = Field(description="Most tokens of one request, prompt included.")


class ModelList(Answer):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Answer):
    """GET /health and /ready."""

    status: Literal["ok", "loading", "draining", "dead"]
