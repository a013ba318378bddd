"""What `SamplingParams` says of tokens and words, held against one model's vocabulary."""

from specinfer_jax.errors import SamplingError
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.tokenizer import Tokenizer


def check_token_ids(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse allowed or biased ids that the model lacks; stop ids that it lacks just never come up.

    Raises:
      SamplingError: names the field and the first such id.
    """
    named = {"allowed_token_ids": params.allowed_token_ids or (), "logit_bias": dict(params.logit_bias)}
    for field, ids in named.items():
        outside = [i for i in ids if i >= vocab_size]
        if outside:
            raise SamplingError(
                f"{field} holds token id {outside[0]}, which lies outside the vocabulary of {vocab_size}"
            )


def bad_sequences(params: SamplingParams, tokenizer: Tokenizer, *, vocab_size: int) -> list[list[int]]:
    """`bad_words` as ids: every word as it begins a text and, where that is another word to the model, behind a space.

    Raises:
      SamplingError: a word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        bare = word.lstrip() or word
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        if not plain:
            raise SamplingError(f"bad_words must hold words of at least one token, got {word!r}")
        found[plain] = None
        spaced = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        # Where the space is a token of its own, the word behind it is banned already.
        if not bare.isspace() and spaced[-len(plain) :] != plain:
            found[spaced] = None
    # A sequence with an id that the model lacks is never completed.
    return [list(ids) for ids in found if max(ids, default=vocab_size) < vocab_size]
