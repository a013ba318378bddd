"""Tokens per LLM pass counted on the LLM's own answers, where that is exact: what takes hours to decode takes minutes.

Greedy verification and naive sampling accept a node if and only if it is the token that the LLM writes anyway. With the
answers, and the rank that an SSM gives each of their tokens, every step of every tree of likeliest children is known:
the path goes as far as ranks lead along the tree, and the next step begins behind the bonus token.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specinfer_jax import LLM, Model, SamplingParams, Speculation
from specinfer_jax.errors import ConfigError
from specinfer_jax.tree.shape import TreeShape
from train.answer_store import AnswerStore
from train.answers import Answer, read_answers
from train.evaluate import answer_ranks
from train.packing import BatchPlan

_ROWS = 4


class Steps(NamedTuple):
    """One prompt's answer."""

    tokens: int
    """New tokens."""
    steps: int
    """LLM passes."""


def answer_all(
    model: Model, prompts: Sequence[list[int]], *, name: str, temperature: float, max_tokens: int, max_num_seqs: int,
    max_model_len: int, folder: Path | None = None,
) -> list[Answer]:  # fmt: skip
    """The LLM's answers, in the order of the prompts; prompt i has seed i.

    Args:
      model: the LLM.
      prompts: token ids.
      name: of the prompt set; with the temperature it names a folder in `folder`.
      temperature: of all.
      max_tokens, max_num_seqs, max_model_len: as for `LLM` and `SamplingParams`.
      folder: answers of earlier runs are taken from there, new ones added.

    Raises:
      ConfigError: a prompt leaves less room than `max_tokens`.
    """
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    if len(prompts[longest]) + max_tokens > max_model_len:
        raise ConfigError(
            f"prompt {longest} of {name} has {len(prompts[longest])} tokens, and {max_tokens} more do not fit into "
            f"max_model_len {max_model_len}; give at least {len(prompts[longest]) + max_tokens}"
        )
    settings = {"model": model.location, "temperature": temperature, "max_tokens": max_tokens, "len": max_model_len}
    ids = [f"{name}-{i}" for i in range(len(prompts))]
    place = None if folder is None else folder / f"{name}-{temperature:g}"
    known = {a.id: a for a in read_answers([place])} if place is not None and any(place.glob("answers-*")) else {}
    # An answer to another prompt under the same number is none.
    known = {key: a for key, a in known.items() if key in ids and list(a.prompt_ids) == prompts[ids.index(key)]}
    missing = [i for i, key in enumerate(ids) if key not in known]
    if missing:
        llm = LLM(model, speculation=Speculation.off(), max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in missing]
        outputs = llm.generate([prompts[i] for i in missing], params)
        made = [
            Answer(ids[i], temperature, tuple(prompts[i]), tuple(output.outputs[0].token_ids))
            for i, output in zip(missing, outputs, strict=True)
        ]
        known |= {answer.id: answer for answer in made}
        if place is not None:
            with AnswerStore(place, settings) as store:
                for answer in made:
                    if answer.id not in store:
                        store.add(answer)
    return [known[key] for key in ids]


def ranks_of(ssm: Model, answers: Sequence[Answer], *, max_model_len: int) -> list[np.ndarray]:
    """For every answer, how many ids the SSM holds for likelier than each of its tokens."""
    if ssm.config.output_vocab_size is None and ssm.tokenizer.vocab_size < ssm.config.vocab_size:
        ssm = ssm.with_reduced_head(range(ssm.tokenizer.vocab_size))  # ids behind them are padding and never proposed
    found = answer_ranks(ssm.params, ssm.config, BatchPlan(answers, rows=_ROWS, tokens=max_model_len))
    return [found[answer.id] for answer in answers]


def count_steps(ranks: Sequence[np.ndarray], shapes: Sequence[TreeShape]) -> Steps:
    """Steps that write one answer.

    Args:
      ranks: of the answer's tokens, by SSM.
      shapes: the SSMs' trees; they are verified together.
    """
    children = [_children(shape) for shape in shapes]
    total, t, steps = len(ranks[0]), 0, 0
    while t < total:
        deepest = max(
            _depth(rank_T[t : t + shape.depth].tolist(), tree)
            for rank_T, shape, tree in zip(ranks, shapes, children, strict=True)
        )
        t, steps = t + deepest + 1, steps + 1
    return Steps(total, steps)


def _children(shape: TreeShape) -> Mapping[int, Sequence[int]]:
    """Children of every row that has some, likeliest first."""
    found: dict[int, list[int]] = {}
    for row, parent in enumerate(shape.parents().tolist()):
        if row:
            found.setdefault(parent, []).append(row)
    return found


def _depth(ranks: Sequence[int], children: Mapping[int, Sequence[int]]) -> int:
    """How many of the next tokens lie on a path of the tree."""
    node, depth = 0, 0
    for rank in ranks:
        row = children.get(node, ())
        if rank >= len(row):
            break
        node, depth = row[rank], depth + 1
    return depth
