"""What a tokenizer is made of, whichever file it comes from."""

from typing import NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import processors


class TokenizerParts(NamedTuple):
    """A tokenizer as its files describe it."""

    backend: Backend
    """Normaliser, splits, merges, added tokens, decoder; it adds BOS and EOS itself where the model wants them."""
    named: dict[str, str]
    """Special tokens by role, under the names that chat templates use: `bos_token`, `eos_token`, ..."""
    eos_token_ids: frozenset[int]
    """Ids that end an answer: the tokenizer's own EOS and those that the model's files name beside it."""
    chat_template: str | None
    """Jinja source, or None for a model without one."""


def add_bos_and_eos(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Let `backend` put `bos` before and `eos` after a text encoded with special tokens; None adds nothing."""
    pattern = [token for token in (bos, "$A", eos) if token is not None]
    named = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=named)
