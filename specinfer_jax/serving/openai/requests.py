"""The bodies that the two completion endpoints take, as strict pydantic models: types are not converted. Free of jax.

A field that no model here knows is refused, as OpenAI does; a misspelt `max_token` would else be wrong in silence.
Known fields without a function here (`user`, `metadata`, ...) are accepted, and those that would change the answer
(`tools`, `response_format`, ...) in their neutral form alone.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from specinfer_jax.outputs import MAX_LOGPROBS

MAX_CHOICES, MAX_PROMPTS, MAX_STOPS = 128, 2048, 4
"""Most continuations of a prompt, prompts and stop strings of one request, as OpenAI has them."""


def _whole(value: Any) -> Any:
    """JSON's 5.0 is a whole number, and 5 the same one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
"""Stands behind the limits of a number: what stands behind it does not appear in the schema."""
Id = Annotated[int, Field(ge=0), WHOLE]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[Finite, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
]
Priority = Annotated[int, Field(ge=-(2**31), le=2**31 - 1), WHOLE]
Whole = Annotated[int, WHOLE]
NoItems = Annotated[list[Any], Field(max_length=0)]
NoText = Annotated[str, Field(max_length=0)]
NoEntries = Annotated[dict[str, Any], Field(max_length=0)]


class Strict(BaseModel):
    """An object of exactly these fields and types."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class Open(BaseModel):
    """An object that may hold more than these fields."""

    model_config = ConfigDict(strict=True, extra="allow", hide_input_in_errors=True)


class TextPart(Open):
    """A part of a message's content; text is the one kind there is."""

    type: Literal["text"]
    text: str


class Message(Open):
    """One message of a chat. What it holds besides (`name`, `tool_calls`, ...) is for the model's template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(default=None, description="null and absent are an empty text.")


class StreamOptions(Strict):
    """How a stream reports what it costs."""

    include_usage: bool | None = Field(
        default=None, description="One more event at the end, with the usage and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        default=None, description="The usage so far in every event (vLLM's field)."
    )


class SpeculationOptions(Strict):
    """How this request is speculated on; it changes the speed, never the answer."""

    enabled: bool = Field(True, description="false is incremental decoding.")
    max_nodes: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        default=None, description="Most speculated nodes of a tree."
    )
    ssms: Annotated[list[Text], Field(min_length=1)] | None = Field(
        default=None, description="Speculators that take part."
    )
    tree: Text | None = Field(default=None, description='Tree of an SSM, such as "1,1,3,1,1".')


class TextFormat(Strict):
    """The one format of answers there is."""

    type: Literal["text"]


class Ignored(Strict):
    """Known fields that change nothing here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    spaces_between_special_tokens: bool | None = None
    length_penalty: Finite | None = Field(default=None, description="Matters to beam search alone.")
    cache_salt: str | None = None


class Neutral(Ignored):
    """Known fields that are not supported, in the one form that asks for nothing."""

    use_beam_search: Literal[False] | None = None
    chat_template: None = None
    chat_template_kwargs: NoEntries | None = None
    documents: NoItems | None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None
    logits_processors: NoItems | None = None
    truncate_prompt_tokens: None = None
    response_format: TextFormat | None = None


class GenerationRequest(Neutral):
    """What both endpoints take. Meanings are those of OpenAI's and vLLM's fields of the same name."""

    model: Text | None = Field(
        default=None, description="A name of /v1/models; absent or null is the model that is served."
    )
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = Field(default=None, description="Token id to a number between -100 and 100.")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        default=None, description="Continuations of a prompt; more than one needs a temperature above 0."
    )
    seed: Whole | None = Field(
        default=None, description="Same seed, same answer, at unchanged speculation settings; its last 64 bits count."
    )
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    temperature: Annotated[Finite, Field(ge=0, le=1e6)] | None = Field(
        default=None, description="1 if absent; 0 is greedy."
    )
    top_p: Annotated[Finite, Field(ge=1e-9, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = Field(default=None, description="0 and -1 are off.")
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=1e-9, le=1e9)] | None = None
    min_tokens: Id | None = Field(default=None, description="At most max_tokens.")
    stop_token_ids: list[Id] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: Annotated[list[Id], Field(min_length=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None, description="Not with stream."
    )
    return_token_ids: bool | None = Field(default=None, description="token_ids and prompt_token_ids in the answer.")
    return_tokens_as_token_ids: bool | None = Field(default=None, description='Tokens of logprobs as "token_id:7".')
    priority: Priority | None = Field(default=None, description="Lower numbers go first.")
    request_id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")] | None = Field(
        default=None, description="For the logs; the header X-Request-Id comes before it."
    )
    timeout: Annotated[Finite, Field(ge=0.1, le=1e9)] | None = Field(
        default=None, description="Seconds until the request is given up, at most the server's own limit."
    )
    speculation: SpeculationOptions | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        default=None, description="Most tokens of an answer; absent: as many as the context has room for."
    )
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = Field(
        default=None, description="Older name of max_completion_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        default=None, description="Only with logprobs."
    )
    add_generation_prompt: bool | None = Field(default=None, description="true if absent: the answer is a new message.")
    continue_final_message: Literal[False] | None = None
    tools: NoItems | None = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: NoItems | None = None
    function_call: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description="A text, token ids, or a list of either.")
    max_tokens: Id | None = Field(default=None, description="Most tokens of an answer, 16 if absent.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    echo: bool | None = Field(default=None, description="The prompt before the answer, in text and logprobs.")
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        default=None, description="Only if it equals n."
    )
    suffix: NoText | None = None


UNSUPPORTED = frozenset(
    {*Neutral.model_fields} - {*Ignored.model_fields}
    | {
        "continue_final_message", "tools", "tool_choice", "functions", "function_call", "modalities", "audio",
        "prediction", "web_search_options", "reasoning_effort", "verbosity", "suffix",
    }
)  # fmt: skip
"""Fields that are refused in any other form than the neutral one."""
