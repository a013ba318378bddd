"""Steps without speculation on the state of a program that speculates: one row per slot, nothing drafted or weighed.

The tokens are the same, since a token depends on those before it and on its position, not on trees. What such steps
pass over is what only trees teach: acceptance rates stay as they are.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.sampling import ChosenLogprobs
from specinfer_jax.speculation.state import DecodeParams, DecodeState, LastStep, StepProgram, StepStats


def can_step_plainly(program: StepProgram) -> bool:
    """Whether plain steps may take turns with the program's own: the gate may leave out trees as it likes, and no
    speculator has a cache that would fall behind."""
    has_caches = any(speculator.cached_model is not None for speculator in program.speculators)
    return bool(program.speculators) and program.adaptive and not program.keeps_draws and not has_caches


def plain_burst(
    params: DecodeParams, state: DecodeState, num_steps: Int[Array, ""], *, program: StepProgram
) -> DecodeState:
    """`burst` by incremental decoding, on the state of `program`, for which `can_step_plainly` holds."""
    plain, A = dataclasses.replace(program, speculators=()), program.path_len
    stats, last = state.stats, state.last
    # Bucket 0 of a program with the gate is one row, and entry 0 of every path counts its steps: both are kept up.
    own = state._replace(
        speculators=(),
        allowed_Bn=state.allowed_Bn[:, :0],
        rate_BJ=state.rate_BJ[:, :0],
        stats=StepStats(
            stats.steps_BJ[:, :1], stats.proposed_BA[:, :1], stats.accepted_BA[:, :1],
            stats.proposed_BM[:, :0], stats.accepted_BM[:, :0],
        ),
        last=LastStep(last.source_BA[:, :1], ChosenLogprobs(*(x[::A] for x in last.logprobs))),
    )  # fmt: skip
    costs = StepCosts(jnp.ones(1), jnp.zeros(0))  # of one bucket there is no choice
    done = burst(DecodeParams(params.llm), own, costs, num_steps, program=plain)
    logprobs = ChosenLogprobs(*(x.at[::A].set(new) for x, new in zip(last.logprobs, done.last.logprobs, strict=True)))
    return done._replace(
        speculators=state.speculators,
        allowed_Bn=state.allowed_Bn,
        rate_BJ=state.rate_BJ,
        stats=StepStats(*(x.at[:, : new.shape[1]].set(new) for x, new in zip(stats, done.stats, strict=True))),
        last=LastStep(jnp.zeros_like(last.source_BA), logprobs),
    )
