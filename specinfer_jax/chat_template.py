"""Chat messages to one prompt, by the model's own Jinja template and with the conventions that transformers set."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specinfer_jax.errors import TokenizerError

CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


class GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's words for training; here its content alone counts."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Scope:
        """The block's content, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A model's chat template, compiled in a sandbox when it is first used.

    `named` are the special tokens by role (`bos_token`, `eos_token`, ...), which templates use as variables.
    """

    def __init__(self, source: str | None, named: Mapping[str, str]) -> None:
        self.source = source
        self._named = dict(named)

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for `messages`, each with a `role` and a `content` (text, text parts, None or absent).

        Raises `TokenizerError` for no messages, an unknown role, content that is not text, a model without a
        template, and whatever the template itself refuses.
        """
        if not messages:
            raise TokenizerError("A chat needs at least one message.")
        plain = [_plain_message(message) for message in messages]
        try:
            return self._compiled.render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._named,
            )
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            raise TokenizerError(f"The model's chat template does not accept these messages: {error}") from error

    @cached_property
    def _compiled(self) -> Template:
        if self.source is None:
            raise TokenizerError("This model has no chat template: give it a plain prompt, or choose a chat model.")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise TokenizerError(f"The model's chat template is not valid Jinja: {error}") from error


def _plain_message(message: Mapping[str, object]) -> dict[str, object]:
    """The message with its content as one string and without keys that are None."""
    role = message.get("role")
    if role not in CHAT_ROLES:
        raise TokenizerError(f"A message has the role {role!r}: it must be one of {', '.join(CHAT_ROLES)}.")
    kept = {key: value for key, value in message.items() if value is not None}
    return kept | {"content": _plain_content(message.get("content"))}


def _plain_content(content: object) -> str:
    """The content as one string; parts stand on lines of their own, as vLLM and llama.cpp put them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise TokenizerError(f"A message's content must be text or a list of text parts, not {type(content).__name__}.")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TokenizerError(
                'Parts of a message\'s content must be {"type": "text", "text": ...}: text alone is read.'
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    """`raise_exception(...)` of a template."""
    raise TemplateError(message)
