"""The longest gap in a running stream while long prompts arrive: at most a chunk and a step, whatever their number.

python -m benchmarks.serving_gap --context 100 --times 10 --prompts 5

One stream decodes behind a short prompt; then prompts of `--times` its length arrive together. Printed: seconds of one
chunk of such a prompt alone, of a step of the stream alone, the stream's longest gap while the prompts are prefilled,
and that gap in chunks. Ids are arbitrary, and no answer ends before its limit.
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specinfer_jax.config import DEFAULT_MODEL, Speculation
from specinfer_jax.llm import LLM
from specinfer_jax.opened import choose_dtype, open_model
from specinfer_jax.serving.engine import Engine
from specinfer_jax.serving.inbox import News
from specinfer_jax.serving.request import EngineRequest

_BEFORE = 24
"""Tokens of the stream before the others arrive."""


class Arrivals:
    """An inbox: a stream, and the others once it has got its first tokens."""

    survives_faults = False

    def __init__(self, stream: EngineRequest, others: Sequence[EngineRequest]) -> None:
        self._stream: EngineRequest | None = stream
        self._others = list(enumerate(others, 1))
        self.times: list[float] = []
        """When the stream got tokens."""
        self.tokens = 0
        self.arrived = self.prefilled = 0.0
        """When the others came, and when the last of them had its first token."""
        self._first: set[int] = set()

    def take(self, *, is_idle: bool) -> News | None:
        """As `Inbox.take`."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            return News([(0, stream)])
        if self._others and self.tokens >= _BEFORE:
            others, self._others = self._others, []
            self.arrived = time.perf_counter()
            return News(others)
        return None if is_idle else News()

    def add(self, index: int, new_tokens: int) -> None:
        """A request has got tokens."""
        if index == 0 and new_tokens:
            self.times.append(time.perf_counter())
            self.tokens += new_tokens
        elif index and index not in self._first:
            self._first.add(index)
            self.prefilled = time.perf_counter()

    def gaps(self) -> tuple[list[float], list[float]]:
        """Seconds between the stream's pieces (before the others came, until the last of them was prefilled)."""
        pairs = list(zip(self.times, self.times[1:], strict=False))
        before = [b - a for a, b in pairs if b <= self.arrived]
        during = [b - a for a, b in pairs if b > self.arrived and a < self.prefilled]
        return before, during


def measure(engine: Engine, *, context: int, times: int, prompts: int, seed: int = 0) -> dict[str, Any]:
    """Seconds; `gap_in_chunks` is the figure in question. Another seed gives prompts that no cache holds."""
    rng = np.random.default_rng(seed)

    def request(length: int, most: int) -> EngineRequest:
        ids = rng.integers(100, engine.program.vocab_size, length).tolist()
        return EngineRequest(ids, most, frozenset())

    long = context * times
    [alone] = [p.stats for p in engine.run([request(long, 1)]) if p.stats is not None]
    largest = max(engine.chunks)
    chunk = alone.prefill_seconds / max((long - 1) // largest + ((long - 1) % largest) / largest, 1)
    arrivals = Arrivals(request(context, 400), [request(long, 2) for _ in range(prompts)])
    for progress in engine.serve(arrivals):
        arrivals.add(progress.index, len(progress.new_token_ids))
    before, during = arrivals.gaps()
    return {
        "context": context, "prompt": long, "prompts": prompts, "rows_of_a_chunk": largest, "chunk_seconds": chunk,
        "step_seconds": float(np.median(before)), "pieces_meanwhile": len(during), "longest_gap": max(during),
        "median_gap": float(np.median(during)), "gap_in_chunks": max(during) / chunk,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-speculation", action="store_true")
    options = parser.parse_args(arguments)
    model = open_model(options.model, dtype=choose_dtype("auto"))
    llm = LLM(
        model, speculation=Speculation.off() if options.no_speculation else None, max_num_seqs=options.prompts + 1,
        max_model_len=options.context * options.times + 512,
    )  # fmt: skip
    for seed in range(options.repeats):
        row = measure(llm.engine, context=options.context, times=options.times, prompts=options.prompts, seed=seed)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
