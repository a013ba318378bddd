"""How often what followed an earlier occurrence follows again: where the n-gram speculator's priors come from.

python -m benchmarks.ngram_acceptance --answers ANSWERS.jsonl.gz --limit 400

Reads answers that a model gave (`{"prompt_ids": [...], "response_ids": [...], "temperature": 0.0}`, a line each; only
greedy ones count) and needs no model: at every answer token it asks what the speculator would have proposed, and
counts, by length of the match, rank of the continuation and depth of the node, how often the node was right given that
its parent was.
"""

import argparse
import collections
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from specinfer_jax.speculation.ngram import NgramSpeculator

Kind = tuple[int, int, int]
"""Length of the match, rank of the continuation, depth of the node (0: first; 2: third or later)."""


def continuations(context: Sequence[int], *, max_match: int, branches: int, depth: int) -> list[tuple[int, list[int]]]:
    """(length of the match, tokens) of the best earlier occurrences whose continuations differ."""
    ids = np.asarray(context)
    last = len(ids) - 1
    match, equal = np.zeros(len(ids), int), np.ones(len(ids), bool)
    for back in range(min(max_match, len(ids))):
        shifted = np.concatenate([np.full(back, -1), ids[: len(ids) - back]])
        equal &= shifted == ids[last - back]
        match += equal
    match[last] = 0
    found: list[tuple[int, list[int]]] = []
    for end in sorted(np.flatnonzero(match), key=lambda end: (-match[end], -end)):
        period = last - end
        tokens = [int(ids[end + 1 + step % period]) for step in range(depth)]
        if all(tokens != other for _, other in found):
            found.append((int(match[end]), tokens))
            if len(found) == branches:
                break
    return found


def count(answers: Iterator[tuple[list[int], list[int]]], speculator: NgramSpeculator) -> tuple[dict, dict, int]:
    """(nodes right, nodes whose parent was right) by kind, and the number of answer tokens."""
    right: dict[Kind, int] = collections.Counter()
    seen: dict[Kind, int] = collections.Counter()
    tokens = 0
    depth, branches = min(speculator.depth, 6), len(speculator.branch_depths)
    for prompt, response in answers:
        ids = prompt + response
        for position in range(len(prompt), len(ids)):
            tokens += 1
            future, known = ids[position : position + depth], set()
            proposed = continuations(ids[:position], max_match=speculator.max_match, branches=branches, depth=depth)
            for rank, (match, path) in enumerate(proposed):
                for level, token in enumerate(future):
                    node = tuple(path[: level + 1])
                    if node not in known:
                        known.add(node)
                        kind = (match, rank, min(level, 2))
                        seen[kind] += 1
                        right[kind] += path[level] == token
                    if path[level] != token:
                        break
    return right, seen, tokens


def read_answers(path: Path, limit: int) -> Iterator[tuple[list[int], list[int]]]:
    """Prompt and response ids of greedy answers."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        rows = (json.loads(line) for line in lines)
        greedy = (row for row in rows if row.get("temperature", 0.0) == 0.0)
        for _, row in zip(range(limit), greedy, strict=False):
            yield row["prompt_ids"], row["response_ids"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ngram_acceptance", description="N-gram priors.")
    parser.add_argument("--answers", type=Path, required=True, help="JSONL or JSONL.gz of prompt_ids and response_ids")
    parser.add_argument("--limit", type=int, default=400, help="answers read")
    options = parser.parse_args(arguments)
    speculator = NgramSpeculator()
    right, seen, tokens = count(read_answers(options.answers, options.limit), speculator)
    print(f"{tokens} answer tokens; share of nodes right given their parent (and how many were looked at)")
    print("match  rank   first node    second node   later nodes")
    for match in range(1, speculator.max_match + 1):
        for rank in range(len(speculator.branch_depths)):
            cells = [(right[match, rank, level], seen[match, rank, level]) for level in range(3)]
            shown = "  ".join(f"{a / b:.2f} ({b:5})" if b else "   -        " for a, b in cells)
            print(f"{match:5}  {rank:4}   {shown}")


if __name__ == "__main__":
    main()
