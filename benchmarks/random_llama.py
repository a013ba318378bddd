"""LLaMA-7B's shapes with random weights: what a verified tree costs, and tokens per second end to end.

python -m benchmarks.random_llama --shape llama-7b --json llama.json

For devices without the weights: speed hangs on shapes alone, and how much of a tree is accepted is set here. First the
steps of benchmarks.verify_cost, 1, 16 and 64 rows; then the engine decodes greedily, token by token and with a scripted
tree of which `--hits` nodes in a row are the model's own next tokens (known from earlier runs), all others wrong.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import describe_machine
from benchmarks.paper_models import PAPER_MODELS
from benchmarks.verify_cost import CHAINS, VerifyCost, measure, print_rows, tree_shape
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.errors import ConfigError
from specinfer_jax.metrics import RequestStats
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params, param_shapes
from specinfer_jax.serving.device import PREFILL_CHUNKS
from specinfer_jax.serving.engine import Engine
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.speculation.speculator import Context, ScriptedSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.tree.token_tree import TokenTree

SHAPES = ("llama-7b", "tiny")
NODES = (1, 16, 64)
SETTLING_RUNS = 4


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normals(key: jax.Array, scale: float, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def random_params(config: ModelConfig, *, dtype: str, seed: int = 0) -> Params:
    """Weights of deviation 1 / sqrt(inputs), norms of 1, made on the device one array at a time.

    `init_params` makes the same tree, but as one program of all layers, which takes long to compile.
    """
    leaves, tree = jax.tree.flatten(param_shapes(config, dtype=dtype))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [
        jnp.ones(leaf.shape, leaf.dtype) if len(leaf.shape) == 1
        else _normals(key, leaf.shape[-1] ** -0.5, shape=leaf.shape, dtype=leaf.dtype.name)
        for key, leaf in zip(keys, leaves, strict=True)
    ]  # fmt: skip
    return jax.tree.unflatten(tree, made)


def verify_steps(
    params: Params, config: ModelConfig, contexts: Sequence[int], *, dtype: str, repeats: int, steps: int
) -> list[dict[str, Any]]:
    """Seconds of a step by rows and context, and their ratio to one row."""
    longest = -(-(max(contexts) + steps * max(NODES) + 1) // PAGE_SIZE) * PAGE_SIZE
    cost = VerifyCost(params, config, max_model_len=longest, dtype=jnp.dtype(dtype))
    rows = measure(cost, NODES, contexts, repeats=repeats, steps=steps)
    print_rows(rows)
    return [dataclasses.asdict(row) for row in rows]


def scripted_program(config: ModelConfig, rows: int, hits: int) -> StepProgram:
    """Trees of `rows` rows, `CHAINS` chains under the root; the first `hits` nodes of one chain are right.

    The speculator's parameters are the whole text that the model is known to write, int32 `[S]`.
    """
    parent_N, depth_N = tree_shape(rows)
    right_N = (np.arange(rows) % CHAINS == 1) & (depth_N <= hits)

    def script(known_S: jax.Array, context: Context) -> TokenTree:
        position_BN = context.committed_B[:, None] - 1 + depth_N[None]
        true_BN = jnp.take(known_S, position_BN, mode="clip")
        # Off by the row number: wrong, and different among siblings.
        wrong_BN = (true_BN + 1 + np.arange(rows, dtype=np.int32)[None] % (config.vocab_size - 1)) % config.vocab_size
        token_BN = jnp.where(jnp.asarray(right_N)[None], true_BN, wrong_BN).at[:, 0].set(context.root_token_B)
        shape = token_BN.shape
        return TokenTree(
            token_BN=token_BN,
            parent_BN=jnp.broadcast_to(jnp.asarray(parent_N)[None], shape),
            depth_BN=jnp.broadcast_to(jnp.asarray(depth_N)[None], shape),
            valid_BN=jnp.ones(shape, bool),
        )

    return StepProgram(config, (ScriptedSpeculator(script, rows - 1, int(depth_N[-1])),), adaptive=False)


def padded(ids: Sequence[int], rows: int) -> jax.Array:
    """int32 ids with room behind them for a tree's depth."""
    return jnp.asarray(np.pad(np.array(ids, np.int32), (0, rows)))


def continue_prompt(engine: Engine, request: EngineRequest) -> tuple[list[int], RequestStats]:
    """Ids and counters of one request."""
    ids: list[int] = []
    for progress in engine.run([request]):
        ids += progress.new_token_ids
        if progress.stats is not None:
            return ids, progress.stats
    raise RuntimeError("the engine ended without a last progress")


def end_to_end(
    params: Params, config: ModelConfig, *, dtype: str, prompt: int, tokens: int, rows: int, hits: int, repeats: int
) -> dict[str, Any]:
    """Tokens per second of incremental and of tree decoding; the two take turns."""
    # Whole chunks and the root: one prefill program.
    prompt_len = -(-prompt // PREFILL_CHUNKS[0]) * PREFILL_CHUNKS[0] + 1
    longest = -(-(prompt_len + tokens + rows) // PAGE_SIZE) * PAGE_SIZE
    prompt_ids = np.random.default_rng(0).integers(0, config.vocab_size, prompt_len).tolist()
    request = EngineRequest(prompt_ids, tokens, frozenset())

    def engine(program: StepProgram, *speculators: Any) -> Engine:
        return Engine(
            DecodeParams(params, speculators), program,
            num_slots=1, max_model_len=longest, page_size=PAGE_SIZE, dtype=jnp.dtype(dtype),
        )  # fmt: skip

    incremental = engine(StepProgram(config))
    written, _ = continue_prompt(incremental, request)  # compiles
    tree = engine(scripted_program(config, rows, hits), padded(prompt_ids + written, rows))
    of_tree, _ = continue_prompt(tree, request)
    same = of_tree == written
    for _ in range(SETTLING_RUNS):
        # bfloat16 breaks a near-tie differently in passes of different size; what the tree then proposes is all wrong.
        tree.params = DecodeParams(params, (padded(prompt_ids + of_tree, rows),))
        before, (of_tree, _) = of_tree, continue_prompt(tree, request)
        if of_tree == before:
            break
    engines = {"incremental": incremental, "tree": tree}
    found: dict[str, list[RequestStats]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, one in engines.items():
            found[name].append(continue_prompt(one, request)[1])

    def median(name: str, value: Callable[[RequestStats], float]) -> float:
        return statistics.median(map(value, found[name]))

    result: dict[str, Any] = {
        name: {
            "tokens_per_second": median(name, lambda stats: stats.tokens / stats.decode_seconds),
            "tokens_per_step": median(name, lambda stats: stats.tokens / stats.steps),
            "prefill_seconds": median(name, lambda stats: stats.prefill_seconds),
        }
        for name in engines
    }
    speedup = result["tree"]["tokens_per_second"] / result["incremental"]["tokens_per_second"]
    return result | {
        "speedup": speedup, "same_ids": same, "prompt_tokens": prompt_len, "tokens": tokens, "rows": rows, "hits": hits,
    }  # fmt: skip


def print_decoding(found: dict[str, Any]) -> None:
    """Both ways on the screen."""
    for name in ("incremental", "tree"):
        part = found[name]
        print(
            f"{name:12} {part['tokens_per_second']:8.1f} tokens/s, {part['tokens_per_step']:.2f} tokens a step, "
            f"prefill of {found['prompt_tokens']} tokens {part['prefill_seconds'] * 1e3:.0f} ms"
        )
    print(f"speed-up {found['speedup']:.2f}, {'same' if found['same_ids'] else 'DIFFERENT'} ids", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write after each part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_llama", description="Random LLaMA weights.")
    parser.add_argument("--shape", default="llama-7b", choices=SHAPES)
    parser.add_argument("--context", default="512,4096", help="tokens in the cache of the verify steps")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the decoded prompt, rounded up to chunks")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to decode")
    parser.add_argument("--rows", type=int, default=64, help="rows of the scripted tree")
    parser.add_argument("--hits", type=int, default=2, help="accepted nodes of every tree; the paper's trees: about 2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="passes per burst of the verify steps")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    try:
        contexts = [int(part) for part in options.context.split(",")]
        check_options(options, contexts)
    except (ConfigError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    config = PAPER_MODELS[options.shape]
    result: dict[str, Any] = {
        "shape": options.shape, "dtype": options.dtype, "machine": describe_machine(), "jax": jax.__version__,
    }  # fmt: skip

    def write() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    params = random_params(config, dtype=options.dtype)
    # One context at a time: a time limit then costs the last one only.
    result["verify"] = []
    for context in contexts:
        result["verify"] += verify_steps(
            params, config, [context], dtype=options.dtype, repeats=options.repeats, steps=options.steps
        )
        sys.stdout.flush()
        write()
    result["decoding"] = end_to_end(
        params, config, dtype=options.dtype, prompt=options.prompt, tokens=options.tokens,
        rows=options.rows, hits=options.hits, repeats=options.repeats,
    )  # fmt: skip
    print_decoding(result["decoding"])
    write()


def check_options(options: argparse.Namespace, contexts: Sequence[int]) -> None:
    """Refuse what cannot be measured.

    Raises:
      ConfigError: a size out of range, more hits than the tree is deep, or more tokens than the shape has positions.
    """
    if min(options.prompt, options.tokens, options.repeats, options.steps) < 1 or min(contexts) < 0:
        raise ConfigError("prompt, tokens, repeats and steps must be at least 1, context at least 0")
    if options.rows < 2:
        raise ConfigError(f"a tree needs at least 2 rows, got {options.rows}")
    deepest = -(-(options.rows - 1) // CHAINS)
    if not 0 <= options.hits <= deepest:
        raise ConfigError(f"hits must be from 0 to {deepest}, the depth of {options.rows} rows; got {options.hits}")
    longest = max(max(contexts) + options.steps * max(NODES), options.prompt + PREFILL_CHUNKS[0] + options.tokens)
    most = PAPER_MODELS[options.shape].max_position - PAGE_SIZE
    if longest > most:
        raise ConfigError(f"the sizes come to {longest} tokens; at most {most} fit")


if __name__ == "__main__":
    main()
