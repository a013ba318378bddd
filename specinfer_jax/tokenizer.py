"""Text to token ids and back, chats to prompts, and ids to text while they are being decoded.

tokenizer = Tokenizer.from_hf_folder(path)          # or Tokenizer.from_gguf(metadata)
ids = tokenizer.encode("two  spaces")
assert tokenizer.decode(ids) == "two  spaces"
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import decoders

from specinfer_jax.chat_template import ChatTemplate
from specinfer_jax.checkpoint.gguf_tokenizer import gguf_tokenizer
from specinfer_jax.checkpoint.hf_tokenizer import hf_tokenizer
from specinfer_jax.checkpoint.tokenizer_parts import TokenizerParts
from specinfer_jax.detokenizer import BYTE_PIECE, byte_level_bytes, text_stream
from specinfer_jax.errors import TokenizerError


class Difference(NamedTuple):
    """An id that two tokenizers give to different pieces."""

    token_id: int
    """The id."""
    piece: str | None
    """What it is here; None if this tokenizer has no such id."""
    other_piece: str | None
    """What it is in the other tokenizer; None likewise."""


class Tokenizer:
    """The tokenizer of one model: `encode` and `decode` give what the model's HF tokenizer gives."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend = parts.backend
        self.eos_token_ids = parts.eos_token_ids
        self._named = parts.named
        self._template = ChatTemplate(parts.chat_template, parts.named)
        added = parts.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.vocab_size = 1 + max(self.ids_by_token().values(), default=-1)

    @classmethod
    def from_hf_folder(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read `tokenizer.json` (or `vocab.json` and `merges.txt`) and its companions from a model folder.

        Raises `TokenizerError` if they are missing or broken; a sentencepiece `tokenizer.model` alone is not enough.
        """
        return cls(hf_tokenizer(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """Build the tokenizer from a GGUF file's metadata, given as plain Python values.

        Raises `TokenizerError` if the file's way to cut text is not one that can be rebuilt exactly.
        """
        return cls(gguf_tokenizer(metadata))

    def save_files(self) -> dict[str, bytes]:
        """File name -> content of a folder from which `from_hf_folder` makes this tokenizer again.

        The template and all ids that end an answer are among them.
        """
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        # A role of an ordinary token is left out: reading it back would make that token special.
        settings: dict[str, object] = {role: token for role, token in self._named.items() if token in added}
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        files: dict[str, object] = {"tokenizer_config.json": settings}
        if self.eos_token_ids:
            files["generation_config.json"] = {"eos_token_id": sorted(self.eos_token_ids)}
        encoded = {name: json.dumps(content, ensure_ascii=False, indent=2).encode() for name, content in files.items()}
        return {"tokenizer.json": self.backend.to_str(pretty=False).encode(), **encoded}

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a text, or None."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own EOS, or None; answers end at any of `eos_token_ids`."""
        return self._named_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of unknown pieces, or None."""
        return self._named_id("unk_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills up batches elsewhere, or None; nothing here needs it."""
        return self._named_id("pad_token")

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, or None."""
        return self._template.source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written out in it count as themselves.

        With `add_special_tokens`, BOS and EOS are added where the model's tokenizer adds them.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"The text holds half a surrogate pair at character {error.start}.") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; padding ids above the vocabulary give nothing."""
        known = [index for index in ids if 0 <= index < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_piece(self, token_id: int) -> str | None:
        """The piece as the vocabulary writes it ("Ġthe", "▁the"), or None for an id without one."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text: maybe half a character; none for an id without a piece."""
        piece = self.token_piece(token_id)
        if piece is None:
            return b""
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return byte_level_bytes(piece)
        if byte := BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode("utf-8")

    def ids_by_token(self) -> dict[str, int]:
        """Every piece with its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def first_differences(self, other: "Tokenizer", *, limit: int = 3) -> list[Difference]:
        """The lowest ids that mean different pieces in the two tokenizers; empty if one can speculate for the other.

        Only ids below both vocabulary sizes are compared: one tokenizer may have more tokens at its end, and an
        embedding may be padded.
        """
        differences = []
        for index in range(min(self.vocab_size, other.vocab_size)):
            pieces = self.token_piece(index), other.token_piece(index)
            if pieces[0] != pieces[1]:
                differences.append(Difference(index, *pieces))
                if len(differences) == limit:
                    break
        return differences

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt text for a chat, by the model's template; see `ChatTemplate.render` for messages and errors."""
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of a chat; special tokens are those that the template writes, and no others."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def _named_id(self, role: str) -> int | None:
        token = self._named.get(role)
        return None if token is None else self.backend.token_to_id(token)


class IncrementalDetokenizer:
    """Text of one sequence while its tokens are committed.

    All that `push` and the final `flush` return, joined, equals `tokenizer.decode` of all ids. No half character is
    ever returned; text is held back only while later tokens could change it. The cost of a token is constant.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._stream = text_stream(tokenizer.backend)

    def push(self, ids: Sequence[int]) -> str:
        """The text that the newly committed `ids` make certain; may be empty."""
        pieces = (self._tokenizer.token_piece(index) for index in ids if index not in self._skipped)
        return "".join(self._stream.push(piece) for piece in pieces if piece is not None)

    def flush(self) -> str:
        """What is still held back at the end of the sequence."""
        return self._stream.flush()
