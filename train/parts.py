"""A parameter tree in two: what is trained and what is frozen; each a tree that lacks the other's leaves."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from specinfer_jax.models.transformer import Params

Split = tuple[dict[str, Any], dict[str, Any]]


def part_of(path: str) -> str:
    """Which of settings.PARTS a parameter belongs to, by its path (`layers_0/attention/q/kernel`).

    The map of a reduced head's ids belongs to none of them ("output_ids").
    """
    top = path.split("/")[0]
    if top.startswith("layers_"):
        return "layers"
    return "norm" if path.startswith("head/norm/") else top


def split_params(params: Params, parts: Collection[str]) -> Split:
    """(trained, frozen) parameters; a part is one of settings.PARTS, or one layer ("layers_3")."""
    return _split(params, lambda path: part_of(path) in parts or path.split("/")[0] in parts, "")


def _split(tree: Mapping[str, Any], is_chosen: Callable[[str], bool], prefix: str) -> Split:
    chosen: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            for side, inner in zip((chosen, rest), _split(value, is_chosen, f"{prefix}{name}/"), strict=True):
                if inner:
                    side[name] = inner
        else:
            (chosen if is_chosen(prefix + name) else rest)[name] = value
    return chosen, rest


def merge_params(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The whole tree again."""
    merged = dict(one)
    for name, value in other.items():
        merged[name] = merge_params(merged[name], value) if name in merged else value
    return merged


def head_part(params: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """What the vocabulary head reads: its own parameters, the map of its ids, and the embedding where it is tied."""
    found = {name: params[name] for name in ("head", "output_ids") if name in params}
    if tied and "embedding" in params.get("embed", {}):
        found["embed"] = {"embedding": params["embed"]["embedding"]}
    return found
