"""A request decoded step by step, every step's tree and verdict kept: what `specinfer tree` draws."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from specinfer_jax.assemble import PAGE_SIZE, build_program
from specinfer_jax.config import Speculation
from specinfer_jax.errors import PromptError
from specinfer_jax.opened import Model, choose_max_model_len
from specinfer_jax.sampling_params import GREEDY
from specinfer_jax.serving.request import EngineRequest, admission
from specinfer_jax.speculation.decode import traced_step
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.slots import admit, init_state, prefill_chunk
from specinfer_jax.speculation.state import DecodeParams, DecodeState, StepProgram, StepTrace

NodeState = Literal["root", "accepted", "proposed"]
_PREFILL_CHUNK = 32
_LENGTH_STEP = 512
"""Lengths are rounded up to a multiple of this: prompts of about the same length share their compiled programs."""


@dataclasses.dataclass(frozen=True)
class TracedNode:
    """One row of a step's tree."""

    token_id: int
    """The token."""
    parent: int | None
    """Index of its parent among the step's nodes, which comes before it; None for the root."""
    state: NodeState
    """root: the last committed token; accepted: proposed and committed; proposed: proposed and not committed."""
    speculators: tuple[str, ...]
    """Who proposed it; none for the root."""


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """One LLM pass."""

    nodes: list[TracedNode]
    """The tree, root first."""
    committed: list[int]
    """The tokens that the step added: the accepted ones, then the bonus token."""
    bonus: int | None
    """The LLM's own token behind the accepted path; None if a stop token or the limit came first."""


def trace_steps(
    model: Model, prompt_ids: Sequence[int], *, speculation: Speculation, num_steps: int, dtype: jnp.dtype,
    max_model_len: int | None = None,
) -> Iterator[TracedStep]:  # fmt: skip
    """Continue a prompt for a few steps; every tree is verified whole, as with `adaptive=False`.

    Args:
      model: the LLM.
      prompt_ids: at least one id.
      speculation: who proposes.
      num_steps: most steps; fewer if the model ends its answer.
      dtype: of the caches, as that of the weights.
      max_model_len: most tokens, prompt included; None: the model's own limit.

    Yields:
      One `TracedStep` after the other.

    Raises:
      PromptError: no ids, or no room behind them.
      SpeculationError, ConfigError: as for `LLM`.
    """
    limit, count = choose_max_model_len(model.config, max_model_len), len(prompt_ids)
    if not 0 < count < limit:
        raise PromptError(f"the prompt has {count} tokens; it must have at least 1 and at most {limit - 1}")
    program, params = build_program(model, dataclasses.replace(speculation, adaptive=False), dtype=dtype)
    needed = count + num_steps * program.path_len
    longest = min(limit, -(-needed // _LENGTH_STEP) * _LENGTH_STEP)
    return _run(model, program, params, prompt_ids, num_steps, longest, dtype)


def _run(
    model: Model, program: StepProgram, params: DecodeParams, prompt_ids: Sequence[int], num_steps: int, longest: int,
    dtype: jnp.dtype,
) -> Iterator[TracedStep]:  # fmt: skip
    step = jax.jit(functools.partial(traced_step, program=program), donate_argnums=1)
    # The gate is off, so costs are never looked at.
    costs = StepCosts(jnp.ones(len(program.buckets)), jnp.zeros(len(program.speculators)))
    state = _prefilled(model, program, params, prompt_ids, longest, dtype)
    names = tuple(speculator.name for speculator in program.speculators)
    for _ in range(num_steps):
        state, trace = step(params, state, costs)
        yield _as_traced_step(jax.device_get(trace), names)
        if not np.asarray(state.active_B).any():
            return


def _prefilled(
    model: Model, program: StepProgram, params: DecodeParams, prompt_ids: Sequence[int], longest: int,
    dtype: jnp.dtype,
) -> DecodeState:  # fmt: skip
    """The state of one slot with the prompt in the caches."""
    state = init_state(program, num_slots=1, max_model_len=longest, page_size=PAGE_SIZE, dtype=dtype)
    slot = jnp.int32(0)
    request = EngineRequest(prompt_ids, longest, model.stop_ids(GREEDY))
    state = jax.jit(functools.partial(admit, program=program), donate_argnums=0)(
        state, slot, admission(request, max_model_len=longest, vocab_size=program.vocab_size)
    )
    chunk = min(_PREFILL_CHUNK, longest)
    prefill = jax.jit(functools.partial(prefill_chunk, program=program, chunk=chunk), donate_argnums=1)
    for _ in range(0, len(prompt_ids) - 1, chunk):
        state, _ = prefill(params, state, slot)
    return state


def _as_traced_step(trace: StepTrace, names: tuple[str, ...]) -> TracedStep:
    """Slot 0 of a step, as plain Python."""
    token_N, parent_N, depth_N, valid_N = (np.asarray(x[0]) for x in trace.tree)
    kept = int(trace.kept_B[0])
    on_path = {int(n) for n in trace.verdict.path_BA[0]}
    nodes = []
    for n in range(int(valid_N.sum())):
        is_accepted = n in on_path and depth_N[n] <= kept
        state: NodeState = "root" if n == 0 else "accepted" if is_accepted else "proposed"
        sources = tuple(name for m, name in enumerate(names) if int(trace.source_BN[0, n]) >> m & 1)
        nodes.append(TracedNode(int(token_N[n]), int(parent_N[n]) if n else None, state, sources))
    committed = [int(i) for i in trace.verdict.token_BA[0, :kept]]
    has_bonus = kept == int(trace.verdict.accepted_B[0]) + 1
    return TracedStep(nodes, committed, committed[-1] if has_bonus else None)
