"""Seconds of one LLM pass by tree rows and context length: what a verified tree costs against incremental decoding.

python -m benchmarks.verify_cost --nodes 1,16 --context 256 --json verify_cost.json

Every pass is a decode step of the project: a scripted speculator proposes a tree of the wanted size, the acceptance
gate is off, and the compiled burst that `LLM.generate` runs does the rest on donated buffers (tree forward, vocabulary
head, argmax, verification, commit). The sizes alternate, so that a slow moment of the machine hits all of them.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import describe_machine
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache
from specinfer_jax.models.transformer import Params, forward, vocabulary_logits
from specinfer_jax.opened import choose_dtype, choose_max_model_len, open_model
from specinfer_jax.sampling_params import GREEDY, SamplingParams
from specinfer_jax.serving.request import EngineRequest, admission
from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.rules import NAIVE
from specinfer_jax.speculation.slots import admit, init_state, prefill_chunk
from specinfer_jax.speculation.speculator import Context, ScriptedSpeculator
from specinfer_jax.speculation.state import DecodeParams, DecodeState, StepProgram
from specinfer_jax.tree.token_tree import TokenTree

CHAINS = 3
"""Chains side by side under the root, as in the n-gram speculator's tree."""
PREFILL_CHUNK = 128
_ADMIT = jax.jit(admit, static_argnames="program", donate_argnums=0)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    nodes: int
    """Tree rows of the pass, root included; 1 is incremental decoding."""
    context: int
    """Tokens in the cache before the pass."""
    seconds: float
    """Median of the repeats."""
    seconds_min: float
    """Minimum of the repeats."""
    ratio: float | None
    """Median over the median of one row at the same context; None if one row was not asked for."""


class VerifyCost:
    """One model, one cache, one compiled burst per tree size."""

    def __init__(self, params: Params, config: ModelConfig, *, max_model_len: int, dtype: jnp.dtype) -> None:
        self._params, self._config = params, config
        self._max_model_len, self._dtype = max_model_len, dtype
        self._plain = StepProgram(config)
        self._cache: KVCache | None = self._new_state(self._plain).cache
        self._bursts: dict[StepProgram, Callable[..., DecodeState]] = {}
        self._empty: dict[int, DecodeState] = {}
        self._token_S = np.random.default_rng(0).integers(0, config.vocab_size, max_model_len).astype(np.int32)

    def fill(self, context: int) -> None:
        """Prefill so that any context up to this one can be timed."""
        prefill = jax.jit(functools.partial(prefill_chunk, program=self._plain, chunk=PREFILL_CHUNK), donate_argnums=1)
        state = self._admitted(self._plain, context)
        state = state._replace(cache=state.cache._replace(length_B=jnp.zeros((1,), jnp.int32)))
        for _ in range(-(-context // PREFILL_CHUNK)):
            state, _ = prefill(DecodeParams(self._params), state, jnp.int32(0))
        self._cache = state.cache

    def seconds(
        self, nodes: int, context: int, *, steps: int, sampling: SamplingParams = GREEDY, verification: str = NAIVE
    ) -> float:
        """Seconds of one step that verifies `nodes` rows behind `context` cached tokens, the mean of one burst."""
        program = tree_program(self._config, nodes, verification)
        if program not in self._bursts:
            self._bursts[program] = jax.jit(functools.partial(burst, program=program), donate_argnums=1)
        params = DecodeParams(self._params, ((),) * len(program.speculators))
        costs = StepCosts(jnp.ones(len(program.buckets), jnp.float32), jnp.zeros(len(program.speculators), jnp.float32))
        state = jax.block_until_ready(self._admitted(program, context, sampling))
        began = time.perf_counter()
        state = jax.block_until_ready(self._bursts[program](params, state, costs, jnp.int32(steps)))
        elapsed = time.perf_counter() - began
        passes = np.asarray(state.stats.steps_BJ)[0]
        if passes[-1] != steps:
            raise RuntimeError(f"asked for {steps} passes of {nodes} rows, ran {passes} in buckets {program.buckets}")
        self._cache = state.cache
        return elapsed / steps

    def parts(self, nodes: int, context: int, *, repeats: int) -> dict[str, float]:
        """Seconds of the vocabulary head and of all layers run alone, and of the attention inside the layers."""
        # Imported here: only this rough breakdown calls the kernel by itself.
        from pallas_kernels.tree_attention import ancestor_words, tree_attention

        config, params = self._config, self._params
        cache = self._admitted(self._plain, context).cache
        token_BQ = jnp.asarray(self._token_S[None, :nodes])
        parent_BN, depth_BN = (jnp.asarray(x[None]) for x in tree_shape(nodes))
        q_BQHK = jnp.ones((1, nodes, config.num_heads, config.head_size), self._dtype)
        new_BNGK = jnp.ones((1, nodes, config.num_kv_heads, config.head_size), self._dtype)

        def layers(params: Params, cache: KVCache) -> Any:
            position_BQ = cache.length_B[:, None] + depth_BN
            return forward(params, token_BQ, position_BQ, cache, ancestor_words(parent_BN), config=config)

        def head(params: Params, x_DT: Any) -> Any:
            return jnp.argmax(vocabulary_logits(params, x_DT, config=config), axis=0)

        def attention(q_BQHK: Any, cache: KVCache) -> Any:
            for l in range(config.num_layers):  # each layer reads the one before, as in the model
                q_BQHK, _ = tree_attention(
                    q_BQHK, new_BNGK, new_BNGK, cache.k_pages[l], cache.v_pages[l], cache.block_table, cache.length_B,
                    ancestor_words(parent_BN), scale=config.head_size**-0.5,
                )  # fmt: skip
            return q_BQHK

        x_DT = jnp.ones((config.width, nodes), self._dtype)
        pieces = {
            "layers": functools.partial(jax.jit(layers), params, cache),
            "attention": functools.partial(jax.jit(attention), q_BQHK, cache),
            "head": functools.partial(jax.jit(head), params, x_DT),
        }
        found = {name: median_seconds(piece, repeats=repeats) for name, piece in pieces.items()}
        self._cache = cache
        return {
            "attention": found["attention"],
            "matmuls and norms": max(found["layers"] - found["attention"], 0.0),
            "head": found["head"],
        }

    def _new_state(self, program: StepProgram) -> DecodeState:
        return init_state(
            program, num_slots=1, max_model_len=self._max_model_len, page_size=PAGE_SIZE, dtype=self._dtype
        )

    def _admitted(self, program: StepProgram, context: int, sampling: SamplingParams = GREEDY) -> DecodeState:
        """A request whose first `context` tokens are in the shared cache, with room for more; takes the cache."""
        assert self._cache is not None
        cache, self._cache = self._cache, None
        if program.num_rows not in self._empty:  # kept on the host and without a cache: a burst donates its state
            self._empty[program.num_rows] = jax.device_get(self._new_state(program)._replace(cache=()))
        state = jax.tree.map(jnp.asarray, self._empty[program.num_rows])._replace(cache=cache)
        request = EngineRequest(self._token_S[: context + 1].tolist(), self._max_model_len, frozenset(), sampling)
        arrays = admission(request, max_model_len=self._max_model_len, vocab_size=program.vocab_size)
        state = _ADMIT(state, jnp.int32(0), arrays, program=program)
        return state._replace(cache=state.cache._replace(length_B=jnp.full((1,), context, jnp.int32)))


def tree_shape(nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(parent, depth) of a tree of `nodes` rows: `CHAINS` chains side by side under the root."""
    row_N = np.arange(nodes, dtype=np.int32)
    parent_N = np.where(row_N == 0, nodes, np.maximum(row_N - CHAINS, 0)).astype(np.int32)
    return parent_N, -(-row_N // CHAINS)


@functools.cache  # the same program every time: it is a static argument, and a new one would be compiled again
def tree_program(config: ModelConfig, nodes: int, verification: str = NAIVE) -> StepProgram:
    """A step whose every pass verifies exactly `nodes` rows."""
    if nodes == 1:
        return StepProgram(config, verification=verification)
    parent_N, depth_N = tree_shape(nodes)

    def script(params: Any, context: Context) -> TokenTree:
        root_B1 = context.root_token_B[:, None]
        shape = (root_B1.shape[0], nodes)
        return TokenTree(
            token_BN=(root_B1 + jnp.arange(nodes, dtype=jnp.int32)[None]) % config.vocab_size,
            parent_BN=jnp.broadcast_to(parent_N[None], shape),
            depth_BN=jnp.broadcast_to(depth_N[None], shape),
            valid_BN=jnp.ones(shape, bool),
        )

    speculator = ScriptedSpeculator(script, nodes - 1, int(depth_N[-1]))
    return StepProgram(config, (speculator,), adaptive=False, verification=verification)


def median_seconds(run: Callable[[], Any], *, repeats: int) -> float:
    """Median wall time of a call, compiled beforehand."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(cost: VerifyCost, nodes: Sequence[int], contexts: Sequence[int], *, repeats: int, steps: int) -> list[Row]:
    """Time every pair of tree rows and context; sizes alternate within each repeat."""
    cost.fill(max(contexts))
    pairs = [(n, context) for context in contexts for n in nodes]
    times: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
    for n, context in pairs:  # compiles
        cost.seconds(n, context, steps=1)
    for _ in range(repeats):
        for n, context in pairs:
            times[n, context].append(cost.seconds(n, context, steps=steps))
    medians = {pair: statistics.median(found) for pair, found in times.items()}
    return [
        Row(n, context, medians[n, context], min(times[n, context]), _ratio(medians, n, context))
        for n, context in pairs
    ]


def _ratio(medians: dict[tuple[int, int], float], nodes: int, context: int) -> float | None:
    base = medians.get((1, context))
    return None if base is None else medians[nodes, context] / base


def print_rows(rows: Sequence[Row]) -> None:
    """The table on the screen."""
    print(f"{'rows':>5} {'context':>8} {'median ms':>10} {'min ms':>8} {'x one row':>10}")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        print(f"{row.nodes:5} {row.context:8} {row.seconds * 1e3:10.2f} {row.seconds_min * 1e3:8.2f} {ratio:>10}")


def print_parts(parts: Sequence[dict[str, Any]]) -> None:
    """The breakdown; pieces run alone, so they need not add up to the whole."""
    names = [name for name in parts[0] if name not in ("nodes", "context")]
    print("pieces run alone, ms:")
    print(f"{'rows':>5} {'context':>8} " + " ".join(f"{name:>18}" for name in names))
    for part in parts:
        numbers = " ".join(f"{part[name] * 1e3:18.2f}" for name in names)
        print(f"{part['nodes']:5} {part['context']:8} {numbers}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_cost", description="Seconds of one LLM pass.")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--nodes", type=numbers, default=[1, 4, 8, 16], help="tree rows, root included: 1,16")
    parser.add_argument("--context", type=numbers, default=[256], help="tokens in the cache: 256,1024")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder, .gguf file or hub id")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, help="capacity of the cache; the model's own limit by default")
    parser.add_argument("--repeats", type=int, default=15, help="bursts per size")
    parser.add_argument("--steps", type=int, default=4, help="passes per burst")
    parser.add_argument("--by-part", action="store_true", help="also time attention, matmuls and head alone (rough)")
    parser.add_argument("--json", type=Path, help="write the table here")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = parse_arguments(arguments)
    try:
        enable_compile_cache()
        dtype = choose_dtype(options.dtype)
        model = open_model(options.model, dtype=dtype)
        max_model_len = choose_max_model_len(model.config, options.max_model_len)
        check_options(options, max_model_len)
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from None
    cost = VerifyCost(model.params, model.config, max_model_len=max_model_len, dtype=dtype)
    rows = measure(cost, options.nodes, options.context, repeats=options.repeats, steps=options.steps)
    print_rows(rows)
    result: dict[str, Any] = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "model": model.location, "dtype": dtype.name, "max_model_len": max_model_len, "repeats": options.repeats,
        "machine": describe_machine(), "jax": jax.__version__,
    }  # fmt: skip
    if options.by_part:
        result["parts"] = [
            {"nodes": n, "context": context, **cost.parts(n, context, repeats=options.repeats)}
            for context in options.context
            for n in options.nodes
        ]
        print_parts(result["parts"])
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def check_options(options: argparse.Namespace, max_model_len: int) -> None:
    """Refuse what cannot be measured.

    Raises:
      ConfigError: a size below 1, or a context that leaves no room for a burst.
    """
    if min(*options.nodes, options.repeats, options.steps) < 1 or min(options.context) < 0:
        raise ConfigError("nodes, repeats and steps must be at least 1, context at least 0")
    longest = max(options.context) + options.steps * max(options.nodes) + 1
    if longest > max_model_len:
        raise ConfigError(
            f"context {max(options.context)} with {options.steps} passes of {max(options.nodes)} rows needs "
            f"max_model_len {longest}; it is {max_model_len}"
        )


if __name__ == "__main__":
    main()
