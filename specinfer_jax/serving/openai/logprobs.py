"""Log-probabilities in the shapes of the two endpoints. Free of jax.

Log-probabilities are raw: before penalties, bias and temperature. JSON has no minus infinity; it is -9999, as OpenAI's.
"""

from collections.abc import Mapping, Sequence

from specinfer_jax.outputs import Logprob
from specinfer_jax.serving.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from specinfer_jax.tokenizer import Tokenizer

LOWEST = -9999.0
Entries = Mapping[int, Logprob]
"""The token itself first, then the likeliest, as in `StreamOutput.logprobs`."""


class TokenNames:
    """How tokens are written."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def chat(self, token_id: int) -> str:
        r"""Text; \xf0\x9f for a part of a character."""
        return self._name(token_id, "")

    def completion(self, token_id: int) -> str:
        r"""Text; bytes:\xf0\x9f for a part of a character, so that no two tokens of a list are one."""
        return self._name(token_id, "bytes:")

    def text(self, token_id: int) -> str:
        """What the token adds to a text, U+FFFD for parts of characters."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's bytes; None for an id without text."""
        return (
            list(self._tokenizer.token_bytes(token_id)) if self._tokenizer.token_piece(token_id) is not None else None
        )

    def _name(self, token_id: int, prefix: str) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(names: TokenNames, ids: Sequence[int], logprobs: Sequence[Entries], *, num_top: int) -> ChatLogprobs:
    """The tokens of a chat's answer, each with the `num_top` likeliest at its place."""

    def top(token_id: int, entry: Logprob) -> TopLogprob:
        return TopLogprob(token=names.chat(token_id), logprob=finite(entry.logprob), bytes=names.bytes(token_id))

    content = []
    for token_id, entries in zip(ids, logprobs, strict=True):
        own = top(token_id, entries[token_id])
        likeliest = [top(i, entry) for i, entry in _likeliest(entries)[:num_top]]
        content.append(TokenLogprob(**dict(own), top_logprobs=likeliest))
    return ChatLogprobs(content=content)


class CompletionColumns:
    """Columns of a completion's log-probabilities; a stream takes a few rows at a time."""

    def __init__(self, names: TokenNames, *, num_top: int, hidden: frozenset[int], start: int) -> None:
        """Begin.

        Args:
          names: how tokens are written.
          num_top: likeliest tokens at every place, besides the token itself.
          hidden: ids that add nothing to the text.
          start: characters of the text before the first token.
        """
        self._names, self._num_top, self._hidden, self._offset = names, num_top, hidden, start

    def rows(self, ids: Sequence[int], logprobs: Sequence[Entries | None]) -> CompletionLogprobs:
        """The next tokens; None stands for a prompt's first."""
        columns = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, entries in zip(ids, logprobs, strict=True):
            columns.text_offset.append(self._offset)
            columns.tokens.append(self._names.completion(token_id))
            columns.token_logprobs.append(None if entries is None else finite(entries[token_id].logprob))
            columns.top_logprobs.append(None if entries is None else self._top(token_id, entries))
            self._offset += 0 if token_id in self._hidden else len(self._names.text(token_id))
        return columns

    def _top(self, token_id: int, entries: Entries) -> dict[str, float]:
        shown = dict(_likeliest(entries)[: self._num_top])
        return {self._names.completion(i): finite(e.logprob) for i, e in {**shown, token_id: entries[token_id]}.items()}


def prompt_logprobs(measured: Sequence[Entries | None]) -> PromptLogprobs:
    """A prompt's, in vLLM's form: ids as keys."""

    def entry(logprob: Logprob) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob.logprob), rank=logprob.rank, decoded_token=logprob.decoded_token)

    return [None if row is None else {str(i): entry(logprob) for i, logprob in row.items()} for row in measured]


def finite(logprob: float) -> float:
    """A number that JSON has."""
    return logprob if logprob > LOWEST else LOWEST


def _likeliest(entries: Entries) -> list[tuple[int, Logprob]]:
    return sorted(entries.items(), key=lambda pair: -pair[1].logprob)
