"""Does speculation leave the distribution of a real model's tokens alone, and greedy rows of a mixed batch?

python -m benchmarks.sampling_law --draws 4000

Draws the first two tokens of one prompt's answer many times, once incrementally and once with trees of the LLM's first
layers under each stochastic rule, with other seeds; compares the counts of token pairs by a chi-square test of two
samples, rare pairs pooled. Then decodes batches of temperatures 0, 1e-6, 0.7 and 1.0 and compares row 0 with plain
greedy decoding.

Ends with status 1 if a p-value is at most 0.01 or a greedy row differs.
"""

import argparse
import functools
import math
import sys
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specinfer_jax import LLM, Model, SamplingParams, Speculation
from specinfer_jax.assemble import PAGE_SIZE
from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import SpecInferError
from specinfer_jax.opened import open_model
from specinfer_jax.serving.request import EngineRequest, admission
from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.randomness import request_key
from specinfer_jax.speculation.rules import IID, MSS, MSS_RENORMALIZED, NAIVE, TOP_K, WITHOUT_REPLACEMENT
from specinfer_jax.speculation.slots import admit, init_state, prefill_chunk
from specinfer_jax.speculation.state import DecodeState

PAIRS = [(TOP_K, NAIVE), (IID, MSS), (WITHOUT_REPLACEMENT, MSS_RENORMALIZED)]
PROMPT = "Name three rivers of Europe."
GREEDY_PROMPTS = (PROMPT, "Why is the sky blue?", "Write a haiku about snow.", "What is 12 times 12?")
_LOOKED_AT = 2
"""Tokens whose law is compared."""
_SMALLEST_CELL = 10


def pooled_cells(a: Mapping[Hashable, int], b: Mapping[Hashable, int]) -> list[tuple[int, int]]:
    """Counts of both samples; outcomes rare in both together share one cell."""
    common = [key for key in {*a, *b} if a.get(key, 0) + b.get(key, 0) >= _SMALLEST_CELL]
    cells = [(a.get(key, 0), b.get(key, 0)) for key in sorted(common, key=repr)]
    rest = tuple(sum(x.values()) - sum(x.get(key, 0) for key in common) for x in (a, b))
    return [*cells, (rest[0], rest[1])] if sum(rest) else cells


def two_sample_p(cells: Sequence[tuple[int, int]]) -> float:
    """Chi-square p-value of the two samples having one law (Wilson and Hilferty's normal approximation)."""
    total_a, total_b = (sum(cell[i] for cell in cells) for i in (0, 1))
    total = total_a + total_b
    statistic = sum(
        (count - (x + y) * size / total) ** 2 / ((x + y) * size / total)
        for x, y in cells
        for count, size in ((x, total_a), (y, total_b))
    )
    freedom = len(cells) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def pairs_of_tokens(llm: LLM, prompt: list[int], draws: int, first_seed: int) -> Counter:
    """How often each pair of first tokens came.

    The prompt is put into every slot once; then the compiled steps that `LLM.generate` runs go on from there with ever
    new seeds.
    """
    program, params = llm.engine.program, llm.engine.params
    slots, longest = llm.engine.num_slots, len(prompt) + 64
    state = init_state(program, num_slots=slots, max_model_len=longest, page_size=PAGE_SIZE, dtype=llm.dtype)
    request = EngineRequest(prompt, longest, frozenset(), SamplingParams(temperature=1))
    arrays = admission(request, max_model_len=longest, vocab_size=program.vocab_size)
    for slot in range(slots):
        state = jax.jit(functools.partial(admit, program=program))(state, jnp.int32(slot), arrays)
        prefill = jax.jit(functools.partial(prefill_chunk, program=program, chunk=len(prompt)))
        state, _ = prefill(params, state, jnp.int32(slot))
    costs = llm.engine.costs

    @jax.jit
    def first_tokens(params: Any, state: DecodeState, seed_B: jax.Array) -> jax.Array:
        seed_B2 = jnp.stack([jnp.zeros_like(seed_B), seed_B], axis=1).astype(jnp.uint32)
        key_B2 = jax.vmap(lambda seed_2: request_key(seed_2, jnp.int32(0)))(seed_B2)
        state = state._replace(sampling=state.sampling._replace(key_B2=key_B2))
        state = burst(params, state, costs, jnp.int32(_LOOKED_AT), program=program)
        return state.token_BS[:, len(prompt) : len(prompt) + _LOOKED_AT]

    found: Counter = Counter()
    for first in range(first_seed, first_seed + draws, slots):
        seed_B = jnp.arange(first, first + slots)
        tokens = np.asarray(first_tokens(params, state, seed_B))[: first_seed + draws - first]
        found.update(map(tuple, tokens.tolist()))
    return found


def greedy_rows_differ(llm: LLM, plain: LLM, prompts: Sequence[list[int]], max_tokens: int) -> int:
    """Prompts whose greedy ids in a mixed batch are not those of plain greedy decoding."""
    differ = 0
    for prompt in prompts:
        params = [SamplingParams(temperature=t, seed=1, max_tokens=max_tokens) for t in (0, 1e-6, 0.7, 1.0)]
        mixed = llm.generate([prompt] * 4, params)[0].token_ids
        differ += mixed != plain.generate(prompt, params[0])[0].token_ids
    return differ


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling_law", description="Is the law left alone?")
    parser.add_argument("--draws", type=int, default=4000, help="seeds of each kind of decoding")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name, folder or .gguf file")
    parser.add_argument("--ssm-layers", type=int, default=27, help="layers of the model that draft")
    parser.add_argument("--tree", default="2,2", help="children per node and level")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="draws side by side")
    rules = [rule for _, rule in PAIRS]
    parser.add_argument("--rules", nargs="+", choices=rules, default=rules, help="verification rules; all by default")
    return parser.parse_args(arguments)


def speculations(model: Model, options: argparse.Namespace) -> dict[str, Speculation]:
    """The exact pairs asked for, by name."""
    ssm = model.first_layers(min(options.ssm_layers, model.config.num_layers))
    return {
        f"{children}, {rule}": Speculation(
            ssms=[ssm], tree=options.tree, ngram=False, adaptive=False, children=children, verification=rule
        )
        for children, rule in PAIRS
        if rule in options.rules
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, compare, print."""
    options = parse_arguments(arguments)
    model = open_model(options.model, dtype=jnp.dtype(jnp.float32))
    encode = model.tokenizer.encode_chat if model.tokenizer.chat_template else None
    chats = [
        encode([{"role": "user", "content": text}]) if encode else model.tokenizer.encode(text)
        for text in GREEDY_PROMPTS
    ]

    def llm_with(speculation: Speculation) -> LLM:
        return LLM(model, speculation=speculation, max_num_seqs=options.max_num_seqs, max_model_len=256)

    plain = llm_with(Speculation.off())
    expected = pairs_of_tokens(plain, chats[0], options.draws, first_seed=0)
    print(f"incremental: {options.draws} draws, {len(expected)} different pairs", flush=True)
    bad = 0
    for number, (name, speculation) in enumerate(speculations(model, options).items(), 1):
        llm = llm_with(speculation)
        found = pairs_of_tokens(llm, chats[0], options.draws, first_seed=number * 10**6)
        cells = pooled_cells(expected, found)
        p = two_sample_p(cells)
        differ = greedy_rows_differ(llm, plain, chats, 48)
        print(f"{name}: p = {p:.3f} over {len(cells)} cells; greedy rows that differ: {differ}", flush=True)
        bad += p <= 0.01 or differ > 0
    return int(bad > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
