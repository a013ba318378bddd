"""A tokenizer from a Hugging Face model folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specinfer_jax.checkpoint.tokenizer_parts import TokenizerParts, add_bos_and_eos
from specinfer_jax.errors import TokenizerError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")


def hf_tokenizer(folder: Path) -> TokenizerParts:
    """Read the tokenizer of a model folder.

    `tokenizer.json` is taken as it stands: its post-processor decides about BOS and EOS, and `add_bos_token` of
    `tokenizer_config.json` counts only beside `vocab.json` and `merges.txt` (GPT-2, OPT), as in transformers 5. Spaces
    are not cleaned up after decoding: transformers does not do so for BPE either. Raises `TokenizerError` if files
    are missing or broken.
    """
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    if (folder / "tokenizer.json").is_file():
        backend = _whole(folder / "tokenizer.json")
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _gpt2(folder, config)
        config = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"} | config
    elif (folder / "tokenizer.model").is_file():
        raise TokenizerError(
            f"{folder} has only a sentencepiece tokenizer.model: tokenizer.json is needed "
            "(transformers writes one: AutoTokenizer.from_pretrained(...).save_pretrained(...))."
        )
    else:
        raise TokenizerError(f"{folder} has no tokenizer.json.")
    named = _add_special_tokens(backend, config)
    if not (folder / "tokenizer.json").is_file():
        add_bos_and_eos(
            backend,
            bos=named.get("bos_token") if config.get("add_bos_token") else None,
            eos=named.get("eos_token") if config.get("add_eos_token") else None,
        )
    return TokenizerParts(backend, named, _eos_ids(folder, backend, named), _chat_template(folder, config))


def _read_json(path: Path) -> dict:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object.")
    return content


def _whole(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from error
    # Left over from training: a prompt is neither cut nor filled up here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _gpt2(folder: Path, config: Mapping) -> Backend:
    if config.get("tokenizer_class") not in GPT2_CLASSES:
        raise TokenizerError(
            f"{folder} has vocab.json and merges.txt of a {config['tokenizer_class']}: tokenizer.json is needed."
        )
    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"{folder}: vocab.json and merges.txt cannot be read: {error}") from error
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    return backend


def _add_special_tokens(backend: Backend, config: Mapping) -> dict[str, str]:
    """Add what the configuration names and `tokenizer.json` lacks; return the special tokens by role."""
    wanted = [_added_token(token, special=False) for _, token in _by_id(config.get("added_tokens_decoder", {}))]
    named = {role: _added_token(config[role], special=True) for role in ROLES if config.get(role) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    wanted += [*named.values(), *(_added_token(token, special=True) for token in extra)]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in wanted if token.content not in known])
    return {role: token.content for role, token in named.items()}


def _by_id(tokens: Mapping) -> Iterator[tuple[int, Mapping]]:
    yield from sorted((int(index), token) for index, token in tokens.items())


def _added_token(token: str | Mapping, *, special: bool) -> AddedToken:
    """A token as the configuration writes it: its text alone, or an object with its flags."""
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in token}
    return AddedToken(token["content"], special=special or bool(token.get("special")), **flags)


def _eos_ids(folder: Path, backend: Backend, named: Mapping[str, str]) -> frozenset[int]:
    """EOS of the tokenizer and of `generation_config.json`; of `config.json` where neither names one."""
    own = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    ids = {own} if own is not None else set()
    for file in ("generation_config.json", "config.json"):
        value = _read_json(folder / file).get("eos_token_id")
        if value is not None and (file == "generation_config.json" or not ids):
            ids |= set(value) if isinstance(value, list) else {value}
    return frozenset(ids)


def _chat_template(folder: Path, config: Mapping) -> str | None:
    """The template's own file before the configuration's entry; of several named ones, `default`."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    return template.get("default") if isinstance(template, dict) else template
