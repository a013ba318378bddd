"""Tokens per second against other systems: same model file, prompts and token counts, alternating in one run.

python -m benchmarks.peers --prompts PROMPTS.jsonl --num-prompts 5 --max-tokens 64 --json peers.json

Compared are this project (incremental and with the n-gram tree), transformers with torch in float32 (plain, prompt
lookup, and assisted if --ssm is given) and llama.cpp through llama-cpp-python. A system that is not installed is left
out by name. Timed is the whole call, prompt included; "decode" takes off the time of a call for one token.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.machine import describe_machine
from benchmarks.peer_systems import Peer, PeerMissingError, SpecInfer, llama_cpp_peer, transformers_peers
from specinfer_jax.checkpoint.resolve import resolve
from specinfer_jax.config import DEFAULT_MODEL, Speculation
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.opened import Model, open_model
from specinfer_jax.prompts import DEFAULT_PROMPTS, read_prompts
from specinfer_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """One line of the table."""

    name: str
    """The system."""
    weights: str
    """What it computed with."""
    tokens_per_second: float
    """New tokens over seconds of whole calls, all prompts together; median of the repeats."""
    decode_tokens_per_second: float | None
    """The same without the time to the first token; None if noise swallowed the difference."""
    same_ids: int
    """Prompts whose ids equal those of this project's incremental decoding."""
    prompts: int
    """Prompts run."""


def open_peers(model: Model, path: Path, ssm: str | None, *, max_model_len: int) -> tuple[list[Peer], dict[str, str]]:
    """Every system that can run here, this project's incremental decoding first, and why others are left out."""

    def specinfer(name: str, speculation: Speculation) -> Callable[[], Peer]:
        return lambda: SpecInfer(name, model, speculation, max_model_len=max_model_len)

    openers = {"incremental": specinfer("specinfer incremental", Speculation.off())}
    openers["n-gram"] = specinfer("specinfer n-gram tree", Speculation(ssms=()))
    if ssm is not None:
        openers["SSM"] = specinfer("specinfer SSM tree", Speculation(ssms=(ssm,)))
    openers |= transformers_peers(path, None if ssm is None else resolve(ssm))
    openers["llama.cpp"] = lambda: llama_cpp_peer(path, max_model_len=max_model_len)
    peers, left_out = [], {}
    for name, opener in openers.items():
        try:
            peers.append(opener())
        except PeerMissingError as error:
            left_out[name] = str(error)
    return peers, left_out


def measure(peers: Sequence[Peer], prompts: Sequence[Sequence[int]], *, num_tokens: int, repeats: int) -> list[PeerRow]:
    """Time every system on every prompt; systems alternate prompt by prompt, so that all meet the same slow moments."""
    ids: dict[tuple[str, int], list[int]] = {}
    for peer in peers:  # first calls set up what a system sets up once
        peer.generate(prompts[0], 2)
    whole: dict[str, list[float]] = {peer.name: [] for peer in peers}
    first: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _ in range(repeats):
        for peer in peers:
            whole[peer.name].append(0.0)
            first[peer.name].append(0.0)
        for number, prompt in enumerate(prompts):
            for peer in peers:
                first[peer.name][-1] += _seconds(lambda p=peer, i=prompt: p.generate(i, 1))[0]
                seconds, got = _seconds(lambda p=peer, i=prompt: p.generate(i, num_tokens))
                whole[peer.name][-1] += seconds
                if len(got) != num_tokens:
                    raise RuntimeError(f"{peer.name} returned {len(got)} tokens instead of {num_tokens}")
                ids[peer.name, number] = got
    count = len(prompts)
    rows = []
    for peer in peers:
        seconds, seconds_first = statistics.median(whole[peer.name]), statistics.median(first[peer.name])
        decode = seconds - seconds_first
        same = sum(ids[peer.name, n] == ids[peers[0].name, n] for n in range(count))
        rows.append(
            PeerRow(
                name=peer.name,
                weights=peer.weights,
                tokens_per_second=count * num_tokens / seconds,
                decode_tokens_per_second=count * (num_tokens - 1) / decode if decode > 0 else None,
                same_ids=same,
                prompts=count,
            )
        )
    return rows


def _seconds(call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    ids = call()
    return time.perf_counter() - began, ids


def print_table(rows: Sequence[PeerRow], left_out: dict[str, str]) -> None:
    """The table on the screen; `x transformers` compares whole calls with plain transformers."""
    plain = next((row for row in rows if row.name == "transformers"), None)
    print(f"{'system':<28} {'weights':<8} {'tok/s':>7} {'decode':>7} {'x transformers':>15} {'same ids':>9}")
    for row in rows:
        decode = "-" if row.decode_tokens_per_second is None else f"{row.decode_tokens_per_second:.1f}"
        ratio = "-" if plain is None else f"{row.tokens_per_second / plain.tokens_per_second:.2f}"
        same = f"{row.same_ids}/{row.prompts}"
        print(f"{row.name:<28} {row.weights:<8} {row.tokens_per_second:7.1f} {decode:>7} {ratio:>15} {same:>9}")
    for row in rows:
        if row.name == "llama.cpp":
            print(f"llama.cpp reads {row.weights} weights, the others the same weights dequantised to float32")
    for name, reason in left_out.items():
        print(f"left out: {name} ({reason})")


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Ids under the model's chat template where it has one."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    return [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Speed against other systems.")
    parser.add_argument("--prompts", type=Path, help='JSONL file, a "prompt" a line')
    parser.add_argument("--num-prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens of every prompt, exactly")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or .gguf file")
    parser.add_argument("--ssm", help="SSM for this project and assistant model for transformers")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the table here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    try:
        result = run(options)
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from None
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole comparison, as it is written to JSON."""
    if min(options.num_prompts, options.repeats) < 1 or options.max_tokens < 2:
        raise ConfigError("num-prompts and repeats must be at least 1, max-tokens at least 2")
    path = resolve(options.model)
    # Loaded once: the project's own entries share the weights.
    model = open_model(path, dtype=jnp.dtype(jnp.float32))
    entries = read_prompts(options.prompts, limit=options.num_prompts) if options.prompts else DEFAULT_PROMPTS
    prompts = encode_prompts(model.tokenizer, [entry.prompt for entry in entries[: options.num_prompts]])
    longest = max(len(ids) for ids in prompts) + options.max_tokens
    if longest > options.max_model_len:
        raise ConfigError(f"the longest prompt and its answer take {longest} tokens; raise --max-model-len")
    peers, left_out = open_peers(model, path, options.ssm, max_model_len=options.max_model_len)
    rows = measure(peers, prompts, num_tokens=options.max_tokens, repeats=options.repeats)
    print_table(rows, left_out)
    return {
        "rows": [dataclasses.asdict(row) for row in rows], "left_out": left_out, "model": str(options.model),
        "prompts": len(prompts), "max_tokens": options.max_tokens, "repeats": options.repeats,
        "machine": describe_machine(), "jax": jax.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
