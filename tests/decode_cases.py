"""A model small enough to decode in milliseconds, and ways to run it with any speculator."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specinfer_jax.metrics import RequestStats
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params, init_params
from specinfer_jax.outputs import TokenLogprobs
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.speculation.rules import NAIVE
from specinfer_jax.speculation.speculator import Context, ScriptedSpeculator, Speculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.tree.expand import parse_expansion
from specinfer_jax.tree.token_tree import TokenTree

VOCAB = 64
LLAMA = ModelConfig(
    family="llama", vocab_size=VOCAB, width=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, mlp_width=48,
    max_position=256, tied_head=False,
)  # fmt: skip
OPT = ModelConfig(
    family="opt", vocab_size=VOCAB, width=32, num_layers=2, num_heads=4, num_kv_heads=4, head_size=8, mlp_width=48,
    max_position=256, tied_head=True, norm="layer", activation="relu", gated_mlp=False, qkv_bias=True, out_bias=True,
    mlp_bias=True, rope=None, learned_position_offset=2,
)  # fmt: skip


@functools.cache
def params_of(config: ModelConfig, seed: int = 0) -> Params:
    """Random weights, enlarged so that the greedy continuation varies."""
    return jax.tree.map(lambda x: x * 3.0 if x.ndim == 2 else x, init_params(config, jax.random.key(seed)))


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished request."""

    ids: list[int]
    finish_reason: str
    stats: RequestStats
    logprobs: list[TokenLogprobs]
    prompt_logprobs: TokenLogprobs | None
    error: str | None


@functools.cache
def shared_engine(
    speculators: tuple[Speculator, ...] = (), *, config: ModelConfig = LLAMA, adaptive: bool = False,
    num_slots: int = 1, max_model_len: int = 64, verification: str = NAIVE,
) -> Engine:  # fmt: skip
    """One engine per program for all tests: compiling takes longer than running."""
    return make_engine(
        speculators, config=config, adaptive=adaptive, num_slots=num_slots, max_model_len=max_model_len,
        verification=verification,
    )  # fmt: skip


def with_params(engine: Engine, *params: object) -> Engine:
    """The same compiled engine with other parameters of its speculators."""
    engine.params = engine.params._replace(speculators=params)
    return engine


def make_engine(
    speculators: Sequence[Speculator] = (), params: Sequence[object] = (), *, config: ModelConfig = LLAMA,
    adaptive: bool = False, num_slots: int = 1, max_model_len: int = 64, warm: bool = False,
    verification: str = NAIVE, vocab_limit: int | None = None, **pages: Any,
) -> Engine:  # fmt: skip
    program = StepProgram(
        config, tuple(speculators), adaptive=adaptive, max_rows=16, verification=verification, vocab_limit=vocab_limit
    )
    engine = Engine(
        DecodeParams(params_of(config), tuple(params)), program,
        num_slots=num_slots, max_model_len=max_model_len, page_size=8, dtype=jnp.float32, **pages,
    )  # fmt: skip
    if warm:
        engine.warm_up()
    return engine


def run(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int = 1000, stop: Sequence[int] = ()):
    """Results in the order of the prompts, decoded greedily."""
    return run_requests(engine, [EngineRequest(list(prompt), max_tokens, frozenset(stop)) for prompt in prompts])


def run_requests(engine: Engine, requests: Sequence[EngineRequest], *, stream: bool = False) -> list[Result]:
    """Results in the order of the requests."""
    ids: list[list[int]] = [[] for _ in requests]
    logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
    of_prompt: dict[int, TokenLogprobs] = {}
    results: dict[int, Result] = {}
    for progress in engine.run(requests, stream=stream):
        i = progress.index
        assert i not in results, "progress of a finished request"
        ids[i] += progress.new_token_ids
        if progress.logprobs is not None:
            logprobs[i].append(progress.logprobs)
        if progress.prompt_logprobs is not None:
            assert i not in of_prompt, "the prompt's log-probabilities came twice"
            of_prompt[i] = progress.prompt_logprobs
        if progress.finish_reason is not None:
            assert progress.stats is not None
            results[i] = Result(
                ids[i], progress.finish_reason, progress.stats, logprobs[i], of_prompt.get(i), progress.error
            )
    return [results[i] for i in range(len(requests))]


def greedy(prompt: Sequence[int], *, config: ModelConfig = LLAMA, max_model_len: int = 64, **settings) -> list[int]:
    return run(shared_engine(config=config, max_model_len=max_model_len), [prompt], **settings)[0].ids


def self_draft(tree: str, *, config: ModelConfig = LLAMA, max_len: int = 256) -> tuple[SsmSpeculator, Params]:
    """An SSM with the LLM's own weights: everything it proposes first must be accepted."""
    return SsmSpeculator(config, parse_expansion(tree), max_len, config.vocab_size), params_of(config)


class Plan(NamedTuple):
    """Parameters of `chain`: what it proposes."""

    sequence_S: jax.Array
    """Prompt and right continuation."""
    right_S: jax.Array
    """By number of committed tokens: how many nodes of the chain are right."""


def plan(sequence: Sequence[int], right: Callable[[int], int], size: int = 64) -> Plan:
    table = np.zeros(size, np.int32)
    table[: len(sequence)] = sequence
    return Plan(jnp.asarray(table), jnp.asarray([right(c) for c in range(size)], jnp.int32))


@functools.cache
def chain(depth: int) -> ScriptedSpeculator:
    """Proposes a chain out of its `Plan`; from the first wrong node on every token is one too high."""

    def script(params: Plan, context: Context) -> TokenTree:
        step_D = jnp.arange(depth, dtype=jnp.int32)[None]
        token_BD = params.sequence_S.at[context.committed_B[:, None] + step_D].get(mode="clip")
        is_wrong_BD = step_D >= params.right_S[context.committed_B][:, None]
        token_BD = jnp.where(is_wrong_BD, (token_BD + 1) % VOCAB, token_BD)
        B = token_BD.shape[0]
        parent_N = jnp.asarray([depth + 1, *range(depth)], jnp.int32)
        return TokenTree(
            jnp.concatenate([context.root_token_B[:, None], token_BD], axis=1),
            jnp.broadcast_to(parent_N[None], (B, depth + 1)),
            jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32)[None], (B, depth + 1)),
            jnp.ones((B, depth + 1), bool),
        )

    return ScriptedSpeculator(script, depth, depth)


@functools.cache
def fixed(num_nodes: int, depth: int) -> ScriptedSpeculator:
    """Proposes the tree given as its parameters, with the slot's own root."""

    def script(params: TokenTree, context: Context) -> TokenTree:
        return params._replace(token_BN=params.token_BN.at[:, 0].set(context.root_token_B))

    return ScriptedSpeculator(script, num_nodes, depth)


def tree_of(paths: Sequence[Sequence[int]], num_nodes: int) -> TokenTree:
    """A hand-written tree for one slot: one chain per path, nothing shared, duplicates and all."""
    parent, depth, token = [num_nodes + 1], [0], [0]
    for path in paths:
        for level, t in enumerate(path):
            parent.append(len(parent) - 1 if level else 0)
            depth.append(level + 1)
            token.append(t)
    used, N = len(parent), num_nodes + 1

    def padded(values: Sequence[int], fill: int) -> jax.Array:
        return jnp.asarray([[*values, *([fill] * (N - used))]], jnp.int32)

    return TokenTree(padded(token, 0), padded(parent, N), padded(depth, 0), padded([1] * used, 0).astype(bool))


PROMPTS = [[5, 17, 33, 2, 60, 8, 41], [9], [3, 4] * 8, [(7 * i) % VOCAB for i in range(37)], [1, 1, 1]]
"""Short, single, repeating, longer than a prefill chunk, constant."""
