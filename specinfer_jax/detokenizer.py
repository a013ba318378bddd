"""Text out of token pieces, one piece at a time: each decoder of the `tokenizers` library as a stream.

A stream gives out text as soon as no later piece can change it, and not before. What it has given out when `flush`
returns is, character for character, what the library's decoder makes of all the pieces at once. The cost of a piece
does not depend on how many came before it.
"""

import codecs
import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

from specinfer_jax.errors import TokenizerError


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, are the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How sentencepiece writes a byte of a character that its vocabulary lacks."""


class ByteLevelStream:
    """Byte-level BPE: every piece is bytes, and the text is their UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, piece: str) -> str:
        """The characters that the piece's bytes complete."""
        return self._utf8.decode(byte_level_bytes(piece))

    def flush(self) -> str:
        """U+FFFD if the last character is incomplete."""
        return self._utf8.decode(b"", final=True)


class SentencePieceStream:
    """Sentencepiece BPE with byte fallback: characters, and runs of single bytes.

    A run of bytes is valid UTF-8 as a whole or becomes one U+FFFD per byte, so it is held back until it ends.
    `replacements` are applied to every piece; `strip` spaces are taken from the start of the whole text.
    """

    def __init__(self, *, replacements: tuple[tuple[str, str], ...], byte_fallback: bool, strip: int) -> None:
        self._replacements = replacements
        self._byte_fallback = byte_fallback
        self._strip = strip
        self._run = bytearray()

    def push(self, piece: str) -> str:
        """The piece's text after the byte run that it ends; nothing for a byte."""
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        if self._byte_fallback and (byte := BYTE_PIECE.fullmatch(piece)):
            self._run.append(int(byte[1], 16))
            return ""
        return self._stripped(self._ended_run() + piece)

    def flush(self) -> str:
        """The byte run at the end."""
        return self._stripped(self._ended_run())

    def _ended_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a piece of a byte-level vocabulary; an added token that is plain text is its own UTF-8."""
    values = [BYTE_OF.get(character) for character in piece]
    return piece.encode("utf-8") if None in values else bytes(value for value in values if value is not None)


def text_stream(backend: Backend) -> ByteLevelStream | SentencePieceStream:
    """A fresh stream that decodes as `backend` does; `TokenizerError` for a decoder that is not known."""
    decoder: dict[str, Any] = {"type": None} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelStream()
    replacements = []
    while kinds[:1] == ["Replace"] and "String" in steps[0]["pattern"]:
        replacements.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps, kinds = steps[1:], kinds[1:]
    strip = steps[-1] if kinds[-1:] == ["Strip"] else {"content": " ", "start": 0, "stop": 0}
    known = kinds in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse"], ["Fuse", "Strip"])
    if not known or strip["content"] != " " or strip["stop"] != 0:
        raise TokenizerError(f"This tokenizer's decoder cannot stream: {json.dumps(decoder, ensure_ascii=False)}")
    return SentencePieceStream(
        replacements=tuple(replacements), byte_fallback="ByteFallback" in kinds, strip=strip["start"]
    )
