"""What the engine has a device do: the compiled programs, the slots' state, and what passes cost. Decides nothing."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specinfer_jax.models.kv_cache import pages_per_slot
from specinfer_jax.parallel.multihost import cluster
from specinfer_jax.parallel.placement import Kind, MeshPrograms
from specinfer_jax.speculation.decode import burst
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.plain import can_step_plainly, plain_burst
from specinfer_jax.speculation.sampling import ChosenLogprobs, SamplingState
from specinfer_jax.speculation.slots import Admission, admit, init_state, place, prefill_chunk, prompt_logprobs
from specinfer_jax.speculation.state import DecodeParams, DecodeState, LastStep, StepProgram, StepStats

PREFILL_CHUNKS = (128, 32)
"""Rows per prefill pass, largest first; a prompt takes the largest that it fills, the rest the smallest."""
UNTIL_FINISHED = int(np.iinfo(np.int32).max)
"""Steps of a burst that ends when a slot finishes."""
NEVER = 1e6
"""Seconds of what the gate is to leave alone."""


class Report(NamedTuple):
    """What the host reads after a burst; copies, so that the next burst may take the state meanwhile."""

    token_BS: Int[Array, "B S"]
    """As in `DecodeState`, and so are the others."""
    committed_B: Int[Array, " B"]
    finish_B: Int[Array, " B"]
    stats: StepStats
    last: LastStep


class Device:
    """One program's compiled calls and the slots that they work on; calls return before the device is done."""

    def __init__(
        self, params: DecodeParams, program: StepProgram, *,
        num_slots: int, max_model_len: int, page_size: int, dtype: DTypeLike, num_pages: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:  # fmt: skip
        """`mesh`: parameters lie on it as parallel/weights.py lays them out; None: one device."""
        self.params, self.program = params, program
        self.num_slots, self.max_model_len, self.page_size = num_slots, max_model_len, page_size
        self._cluster = None if mesh is None else cluster()
        self._table_pages = pages_per_slot(max_model_len, page_size)
        self.num_pages = num_slots * self._table_pages if num_pages is None else num_pages
        self._new_state = functools.partial(
            init_state, program, num_slots=num_slots, max_model_len=max_model_len, page_size=page_size, dtype=dtype,
            num_pages=self.num_pages,
        )  # fmt: skip
        self._on_mesh = None if mesh is None else MeshPrograms(mesh, program, jax.eval_shape(self._new_state))
        # State is donated everywhere: the caches are updated in place.
        self._burst = self._jit(
            functools.partial(_burst_and_report, program=program), "whole", "state", "whole", "whole",
            outputs=("state", "slots"),
        )  # fmt: skip
        # One slot never needs it; several processes would have to agree on when.
        self._plain_burst = (
            self._jit(
                functools.partial(_plain_burst_and_report, program=program), "whole", "state", "whole",
                outputs=("state", "slots"),
            )
            if num_slots > 1 and mesh is None and can_step_plainly(program)
            else None
        )  # fmt: skip
        self._admit = self._jit(functools.partial(admit, program=program), "state", "slot", "whole")
        self._place = self._jit(place, "state", "slots", "slots")
        chunks = tuple(c for c in PREFILL_CHUNKS if c < max_model_len) or (max_model_len,)
        self._prefill = {
            chunk: self._jit(
                functools.partial(prefill_chunk, program=program, chunk=chunk), "whole", "state", "slot",
                outputs=("state", "of slot"),
            )
            for chunk in chunks
        }  # fmt: skip
        self._prompt_logprobs = self._jit(
            functools.partial(prompt_logprobs, program=program), "whole", "state", "slot", "whole", "whole",
            outputs="of slot",
        )  # fmt: skip
        # On the host, as whatever calls are given: an array of one process's own device is not the same everywhere.
        self._costs = step_costs(np.ones(len(program.buckets)), np.zeros(len(program.speculators)))
        self._chunk_seconds = math.inf
        self._device_state: DecodeState | None = None

    def _tell(self, name: str, *arguments: Any) -> None:
        """Have the other processes make the same call; the calls that reach a device, and only they, are told."""
        if self._cluster is not None and self._cluster.is_leader:
            self._cluster.tell(name, *arguments)

    def follow(self) -> None:
        """In every process but 0: make process 0's calls until it ends."""
        assert self._cluster is not None
        x_DT = None
        for name, arguments in self._cluster.calls({"Admission": Admission, "SamplingState": SamplingState}):
            if name == "logprobs_of_prompt":
                slot, start = arguments
                self.logprobs_of_prompt(slot, x_DT, start)
            else:
                result = getattr(self, name)(*arguments)
                x_DT = result if name == "prefill" else x_DT

    def forget_state(self) -> None:
        """The next call starts with empty slots and caches."""
        self._tell("forget_state")
        self._device_state = None

    def _jit(self, run: Callable[..., Any], *inputs: Kind, outputs: Kind | tuple[Kind, ...] = "state") -> Any:
        """Compiled, for the mesh if there is one; a state that comes back is donated."""
        donate = None if outputs == "of slot" else inputs.index("state")
        if self._on_mesh is not None:
            return self._on_mesh.jit(run, inputs=inputs, outputs=outputs, donate=donate)
        return jax.jit(run, donate_argnums=() if donate is None else donate)

    def fetch(self, tree: Any) -> Any:
        """Numpy arrays of what the device has."""
        return jax.device_get(tree) if self._on_mesh is None else self._on_mesh.fetch(tree)

    @property
    def _state(self) -> DecodeState:
        """The slots' device state, empty ones after construction or a fault."""
        if self._device_state is None:
            # One program for all arrays: by themselves they would be two dozen.
            self._device_state = (
                jax.jit(self._new_state)() if self._on_mesh is None else self._on_mesh.new_state(self._new_state)
            )
        return self._device_state

    @_state.setter
    def _state(self, state: DecodeState) -> None:
        self._device_state = state

    @property
    def costs(self) -> StepCosts:
        """Seconds of a verified pass by row bucket and of each speculator's drafting, measured by warm_up.py."""
        return self._costs

    @property
    def chunks(self) -> tuple[int, ...]:
        """Rows that prefill passes may have, largest first."""
        return tuple(self._prefill)

    def hand_out(self, tables: list[list[int] | None]) -> None:
        """Give every slot its pages; slots with None are nobody's and stop decoding."""
        self._tell("hand_out", tables)
        table = np.full((self.num_slots, self._table_pages), self.num_pages, np.int32)
        groups = 1 if self._on_mesh is None else self._on_mesh.groups
        for slot, (row, pages) in enumerate(zip(table, tables, strict=True)):
            first = slot * groups // self.num_slots * (self.num_pages // groups)  # a group counts from its own first
            row[: len(pages or ())] = np.array(pages or (), np.int32) - first
        self._state = self._place(self._state, table, np.array([pages is not None for pages in tables]))

    def enter(self, slot: int, arrays: Admission) -> None:
        """Put a request into a slot."""
        self._tell("enter", slot, arrays)
        self._state = self._admit(self._state, np.int32(slot), arrays)

    def prefill(self, slot: int, chunk: int) -> Float[Array, "D T"]:
        """The next rows of a slot's prompt; returns the LLM's activations behind them."""
        self._tell("prefill", slot, chunk)
        self._state, x_DT = self._prefill[chunk](self.params, self._state, np.int32(slot))
        return x_DT

    def logprobs_of_prompt(self, slot: int, x_DT: Any, start: int) -> ChosenLogprobs:
        """Log-probabilities of the tokens behind a chunk's; `x_DT`: what `prefill` returned."""
        self._tell("logprobs_of_prompt", slot, start)
        return self._prompt_logprobs(self.params, self._state, np.int32(slot), x_DT, np.int32(start))

    def steps(self, most: int, *, is_brief: bool = False) -> Report:
        """At most so many steps of all slots that decode; brief ones take half of a chunk's time or verify no tree."""
        self._tell("steps", most)  # of several processes none goes by costs
        costs = self._brief_costs() if is_brief else self._costs
        self._state, report = self._burst(self.params, self._state, costs, np.int32(most))
        return report

    @property
    def has_plain_steps(self) -> bool:
        """There is a second program that takes steps without speculation."""
        return self._plain_burst is not None

    def plain_steps(self, most: int) -> Report:
        """`steps` of the second program."""
        assert self._plain_burst is not None
        self._state, report = self._plain_burst(self.params, self._state, np.int32(most))
        return report

    def _brief_costs(self) -> StepCosts:
        """Costs that keep the gate from passes that are not brief."""
        verify_J = np.array(self._costs.verify_J)
        is_long_J = verify_J > self._chunk_seconds / 2
        is_long_J[0] = False
        return step_costs(np.where(is_long_J, NEVER, verify_J), np.asarray(self._costs.draft_M))


def step_costs(verify_J: Sequence[float] | np.ndarray, draft_M: Sequence[float] | np.ndarray) -> StepCosts:
    """Costs as calls take them: numpy arrays, which need no program of their own."""
    verify: Any = np.asarray(verify_J, np.float32)
    draft: Any = np.asarray(draft_M, np.float32)
    return StepCosts(verify, draft)


def _burst_and_report(
    params: DecodeParams, state: DecodeState, costs: StepCosts, num_steps: Int[Array, ""], *, program: StepProgram
) -> tuple[DecodeState, Report]:
    state = burst(params, state, costs, num_steps, program=program)
    return state, _report(state)


def _plain_burst_and_report(
    params: DecodeParams, state: DecodeState, num_steps: Int[Array, ""], *, program: StepProgram
) -> tuple[DecodeState, Report]:
    state = plain_burst(params, state, num_steps, program=program)
    return state, _report(state)


def _report(state: DecodeState) -> Report:
    return Report(state.token_BS, state.committed_B, state.finish_B, state.stats, state.last)
