"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) and sentencepiece BPE (`llama`).

A GGUF file keeps vocabulary, merges or scores, and token types, but not the `tokenizer.json` they came from: how text
is normalised and cut before the merges is only named (`tokenizer.ggml.pre`) or implied. What cannot be rebuilt id for
id is refused, and the message asks for the HF tokenizer.
"""

import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specinfer_jax.checkpoint.tokenizer_parts import TokenizerParts, add_bos_and_eos
from specinfer_jax.errors import TokenizerError


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class PreTokenizer(NamedTuple):
    """How byte-level BPE cuts a text before the merges."""

    splits: tuple[str, ...]
    """Patterns applied one after another: each piece so far is cut before and after every match."""
    ignore_merges: bool = False
    """A word that is a token is taken whole, even where no merges lead to it."""
    add_bos: bool = False
    """Whether BOS is added where the file does not say (`tokenizer.ggml.add_bos_token`)."""
    nfc: bool = False
    """Text is brought into Unicode form C first."""


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = CL100K_WORDS.format(digits=r"\p{N}")
LLAMA3_WORDS = CL100K_WORDS.format(digits=r"\p{N}{1,3}")
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = PreTokenizer((LLAMA3_WORDS,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer((GPT2_WORDS,)),
    # Single digits come first, so a space before a number stays with the spaces: "a  1" is "a", "  ", "1".
    "smollm": PreTokenizer((r"\p{N}", GPT2_WORDS)),
    "starcoder": PreTokenizer((r"\p{N}", GPT2_WORDS)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "smaug-bpe": PreTokenizer((LLAMA3_WORDS,)),
    "qwen2": PreTokenizer((QWEN2_WORDS,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((QWEN2_WORDS,)),
    "tekken": PreTokenizer((TEKKEN_WORDS,), ignore_merges=True, add_bos=True),
}

SPACE = "▁"
"""Sentencepiece writes a space as this character."""
PADDING = re.compile(r"\[PAD\d+\]")
"""What converters append, as unused tokens, until the vocabulary is as long as the embedding."""
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn in a chat, even where the file's EOS is the end of a document."""


def gguf_tokenizer(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build a tokenizer from the `tokenizer.*` keys of a GGUF file.

    `metadata` holds plain Python values: `str`, `int`, `bool`, lists of `str`, `int`, `float`. Raises `TokenizerError`
    for a kind of tokenizer or a way to cut text (`tokenizer.ggml.pre`) that is not known exactly, and for missing keys.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _parts(metadata, *_byte_level(metadata))
    if kind == "llama":
        return _parts(metadata, *_sentencepiece(metadata))
    raise TokenizerError(
        f"The GGUF file's tokenizer is {kind!r}, and only 'gpt2' and 'llama' can be rebuilt from a GGUF file: "
        "give the tokenizer.json of the same model."
    )


def _byte_level(metadata: Mapping[str, object]) -> tuple[Backend, bool]:
    """The backend without its added tokens, and whether BOS is added by default."""
    name = metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise TokenizerError(
            f"The GGUF file cuts text by {name!r} (tokenizer.ggml.pre), which is not one of "
            f"{', '.join(PRE_TOKENIZERS)}: an HF tokenizer.json of the same model is needed."
        )
    merges = _merges_in_file(metadata)
    if merges is None:
        raise TokenizerError("The GGUF file has no tokenizer.ggml.merges, which a byte-level BPE tokenizer needs.")
    backend = Backend(_bpe(_vocabulary(metadata), merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(metadata: Mapping[str, object]) -> tuple[Backend, bool]:
    """The backend without its added tokens, and whether BOS is added by default."""
    vocabulary = _vocabulary(metadata)
    merges = _merges_in_file(metadata)
    if merges is None:
        merges = _merges_from_scores(vocabulary, _scores(metadata), _token_types(metadata))
    unknown = _token_named(metadata, "unknown")
    backend = Backend(_bpe(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    # As in the tokenizer.json of llama models, sentencepiece itself and llama.cpp: the prefix comes before every
    # stretch of text between added tokens, in front of spaces of its own too. Metaspace would swallow a leading space.
    to_pieces = [normalizers.Prepend(SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*to_pieces, normalizers.Replace(" ", SPACE)])
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", left=1)] if prefix else to_text)
    return backend, True


def _parts(metadata: Mapping[str, object], backend: Backend, add_bos_by_default: bool) -> TokenizerParts:
    """Add the special tokens and what belongs to them."""
    vocabulary, tokens, types = _vocabulary(metadata), _tokens(metadata), _token_types(metadata)
    named = {role: token for role, key in ROLES.items() if (token := _token_named(metadata, key)) is not None}
    special = {TokenType.CONTROL}
    if metadata["tokenizer.ggml.model"] == "llama":
        special.add(TokenType.UNKNOWN)
    always = {named.get("bos_token"), named.get("eos_token")}
    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in special or token in always:
            added.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=False))
    backend.add_tokens(added)

    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos_by_default)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    add_bos_and_eos(
        backend,
        bos=named.get("bos_token") if add_bos else None,
        eos=named.get("eos_token") if add_eos else None,
    )
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    controls = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL}
    ends = {named.get("eos_token"), _token_named(metadata, "eot"), _token_named(metadata, "eom")}
    ends |= {token for token in TURN_ENDS if token in controls and template is not None and token in template}
    eos_ids = frozenset(vocabulary[token] for token in ends if token is not None)
    return TokenizerParts(backend, named, eos_ids, template)


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **settings: object) -> models.BPE:
    """The model itself, or a `TokenizerError` where merges name tokens that the vocabulary lacks."""
    try:
        return models.BPE(vocabulary, merges, **settings)
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"The GGUF file's vocabulary and merges do not fit together: {error}") from error


def _tokens(metadata: Mapping[str, object]) -> Sequence[str]:
    """The tokens by id, without the padding at the end."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or not tokens:
        raise TokenizerError("The GGUF file has no vocabulary (tokenizer.ggml.tokens).")
    length = len(tokens)
    while length and PADDING.fullmatch(tokens[length - 1]):
        length -= 1
    return tokens[:length]


def _vocabulary(metadata: Mapping[str, object]) -> dict[str, int]:
    return {token: index for index, token in enumerate(_tokens(metadata))}


def _token_types(metadata: Mapping[str, object]) -> Sequence[int]:
    """The type of every token of `_tokens`; all normal where the file does not say."""
    count = len(_tokens(metadata))
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [TokenType.NORMAL] * count
    return _as_long_as_tokens(types, count, "tokenizer.ggml.token_type")


def _scores(metadata: Mapping[str, object]) -> Sequence[float]:
    """The score of every token of `_tokens`."""
    return _as_long_as_tokens(metadata.get("tokenizer.ggml.scores"), len(_tokens(metadata)), "tokenizer.ggml.scores")


def _as_long_as_tokens(values: object, count: int, key: str) -> Sequence:
    if not isinstance(values, Sequence) or len(values) < count:
        raise TokenizerError(f"The GGUF file's {key} must hold one value for each of the {count} tokens.")
    return values[:count]


def _merges_in_file(metadata: Mapping[str, object]) -> list[tuple[str, str]] | None:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, Sequence):
        return None
    # The space that parts the two halves is never the first character: a half may itself begin with one.
    cuts = [merge.find(" ", 1) for merge in merges]
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _merges_from_scores(
    vocabulary: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Sentencepiece merges whichever neighbours form the piece of the best score: list all such pairs, best first."""
    normal = {piece for piece, index in vocabulary.items() if types[index] == TokenType.NORMAL}
    merges = []
    for piece in normal:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                index = vocabulary[piece]
                merges.append((-scores[index], index, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _token_named(metadata: Mapping[str, object], role: str) -> str | None:
    """The token that `tokenizer.ggml.ROLE_token_id` points to; sentencepiece has fixed ids where the file is silent."""
    fixed = {"unknown": 0, "bos": 1, "eos": 2} if metadata["tokenizer.ggml.model"] == "llama" else {}
    key = f"tokenizer.ggml.{role}_token_id"
    index = metadata.get(key, fixed.get(role))
    if index is None:
        return None
    tokens = _tokens(metadata)
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise TokenizerError(f"The GGUF file's {key} is {index}, outside its vocabulary of {len(tokens)} tokens.")
    return tokens[index]
