"""The one training loop, for distillation and for every round of boost-tuning.

A run is a pure function of (settings, batch by step): a run that was killed goes on from its newest checkpoint and
takes the same values, bit for bit, as one that was not.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import jax
from jax.sharding import Mesh

from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.models.config import ModelConfig
from train.checkpoints import Checkpoints
from train.parts import merge_params
from train.record import Record
from train.settings import TrainSettings
from train.step import (
    Metrics,
    TrainBatch,
    TrainState,
    by_rows,
    cast,
    compute_dtype,
    data_mesh,
    initial_state,
    make_step,
    on_all,
)


class NotFiniteError(SpecInferError):
    """A batch's loss or gradient is not finite; nothing of it was applied."""

    def __init__(self, message: str, *, step: int, ids: list[str]) -> None:
        super().__init__(message)
        self.step = step
        """Which batch, counted from 0."""
        self.ids = ids
        """Its answers."""


@runtime_checkable
class Batches(Protocol):
    """Where batches come from: pure functions of the step."""

    def batch(self, step: int) -> TrainBatch:
        """The batch of a step, counted from 0; always of the same shapes."""
        ...

    def ids(self, step: int) -> list[str]:
        """Ids of its answers."""
        ...


Measure = Callable[[Any, bool], Mapping[str, float]]
"""Gets the whole model's parameters and whether it is the last time; returns what is to be recorded."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """How a run ended."""

    params: Any
    """The whole model: what was trained in float32, what was frozen as it came."""
    trained: Any
    """What was trained alone."""
    step: int
    """Batches applied."""
    measured: Mapping[str, float]
    """The last measurement."""
    is_complete: bool
    """False: the time was up; the same call goes on."""


class _Pending(NamedTuple):
    """A step that was dispatched and whose metrics were not looked at yet."""

    index: int
    metrics: Metrics
    tokens: int


def train(
    config: ModelConfig, trained: Mapping[str, Any], frozen: Mapping[str, Any], batches: Batches,
    settings: TrainSettings, folder: Path, *, measure: Measure | None = None, quiet: bool = False,
) -> Trained:  # fmt: skip
    """Train until the last step or until the time is up, from the newest checkpoint of `folder` if there is one.

    Args:
      config: the SSM.
      trained: parameters to train; copied.
      frozen: the others; neither changed nor saved.
      batches: the data; shapes must not change between steps.
      settings: `optimiser`, `loss` and `run` are read.
      folder: checkpoints, metrics.jsonl and tensorboard/ are in it.
      measure: called every `run.eval_interval` steps and at the end.
      quiet: show nothing.

    Returns:
      The trained model; whatever happens, the last checkpoint is whole on disk when this returns or raises.

    Raises:
      NotFiniteError: names the batch. The newest checkpoint is one from before it.
      ConfigError: rows that the devices cannot share, or no TensorBoard writer.
      CheckpointError: a checkpoint cannot be written or belongs to another model.
    """
    run = settings.run
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    mesh = data_mesh(run.devices)
    first = batches.batch(0)
    rows, tokens = first.token_RT.shape
    _check_rows(rows, settings, mesh)
    step = make_step(config, settings, mesh, rows=rows, tokens=tokens)
    # The model as it is served keeps the given arrays; the step gets them in its dtype, on every device.
    frozen_there = jax.device_put(cast(dict(frozen), compute_dtype(run.compute_dtype)), on_all(mesh))
    state = jax.device_put(initial_state(trained, settings), on_all(mesh))

    with Checkpoints(folder, keep=run.keep) as checkpoints:
        restored = checkpoints.restore(state)
        start = restored.step if restored else 0
        if restored:
            state = jax.device_put(restored.tree, on_all(mesh))
            state = jax.tree.map(lambda leaf: leaf.copy(), state)  # the step may overwrite it
        with Record(folder, start=start, steps=run.steps, tensorboard=run.tensorboard, quiet=quiet) as record:
            if restored and not quiet:
                record.say(f"going on from step {start} of {run.steps}")
            loop = _Loop(settings, batches, mesh, step, frozen_there, frozen, checkpoints, record, measure)
            return loop.run(state, start, deadline=began + 60 * run.max_minutes if run.max_minutes else None)


@dataclasses.dataclass
class _Loop:
    """The pieces of a run that stay the same."""

    settings: TrainSettings
    batches: Batches
    mesh: Mesh
    step: Callable[[TrainState, Any, TrainBatch], tuple[TrainState, Metrics]]
    frozen_there: Any
    frozen: Mapping[str, Any]
    checkpoints: Checkpoints
    record: Record
    measure: Measure | None

    def run(self, state: TrainState, start: int, *, deadline: float | None) -> Trained:
        run = self.settings.run
        end, measured = run.steps, {}
        pending: _Pending | None = None
        for index, batch, tokens in self._prefetched(start, end):
            state, metrics = self.step(state, self.frozen_there, batch)
            self._look_at(pending)  # while the new step is computed
            pending, done = _Pending(index, metrics, tokens), index + 1
            if deadline is not None and time.monotonic() > deadline:
                end = done
            saves = done < end and done % run.save_interval == 0
            measures = done < end and run.eval_interval > 0 and done % run.eval_interval == 0
            if saves or measures or done == end:
                self._look_at(pending)  # nothing is saved or measured before the batch is known to be good
                pending = None
            paused = time.perf_counter()
            if measures:
                measured = self._measure(state, done, is_last=False)
            if saves:
                self.checkpoints.save(done, state)
            self.record.pause(time.perf_counter() - paused)
            if done == end:
                break
        done = max(start, end)
        self.checkpoints.save(done, state)
        is_complete = done >= run.steps
        measured = self._measure(state, done, is_last=is_complete)
        whole = merge_params(state.params, self.frozen)
        return Trained(whole, state.params, done, measured, is_complete)

    def _prefetched(self, start: int, end: int) -> Iterator[tuple[int, TrainBatch, int]]:
        """Batches on the devices, the next ones being made while one is computed."""
        if start >= end:
            return
        plan = grain.MapDataset.range(start, end).map(self.batches.batch)
        batches = plan.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
        for index, batch in zip(range(start, end), batches, strict=True):
            tokens = int((batch.segment_RT > 0).sum())
            yield index, jax.device_put(batch, by_rows(self.mesh)), tokens

    def _look_at(self, pending: _Pending | None) -> None:
        """Wait for a step's metrics and write them down."""
        if pending is None:
            return
        values = {name: float(value) for name, value in jax.device_get(pending.metrics)._asdict().items()}
        if not values.pop("healthy"):
            ids = self.batches.ids(pending.index)
            raise NotFiniteError(
                f"batch {pending.index} has loss {values['loss']} and a gradient of norm {values['gradient_norm']}; "
                f"nothing of it was applied. Its answers: {', '.join(ids)}",
                step=pending.index,
                ids=ids,
            )
        self.record.step(pending.index + 1, values, tokens=pending.tokens)

    def _measure(self, state: TrainState, done: int, *, is_last: bool) -> Mapping[str, float]:
        if self.measure is None:
            return {}
        measured = self.measure(merge_params(state.params, self.frozen_there), is_last)
        self.record.measured(done, measured)
        return measured


def _check_rows(rows: int, settings: TrainSettings, mesh: Mesh) -> None:
    turns = settings.optimiser.accumulate
    if rows % (turns * mesh.size):
        raise ConfigError(
            f"{rows} rows cannot be shared by {mesh.size} devices in {turns} turns; "
            f"data.rows must be a multiple of {turns * mesh.size}, or set run.devices"
        )
