"""What a run tells while it goes on: lines of JSON, TensorBoard, and a bar with tokens/s and the time left."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specinfer_jax.errors import ConfigError

METRICS_FILE = "metrics.jsonl"
_REPORT_SECONDS = 60.0
"""Between lines where stderr is no terminal."""
_SPEED_STEPS = 20
"""Steps over which the speed is averaged."""


class Record:
    """Writes the metrics of a run; a context.

    Lines of metrics.jsonl are {"step": n, "loss": ...} for every batch and {"step": n, "held_out_...": ...} for every
    measurement; n counts batches applied. Numbers are written so that they read back as the same floats.
    """

    def __init__(self, folder: Path, *, start: int, steps: int, tensorboard: bool, quiet: bool = False) -> None:
        """Continue the records of `folder` behind step `start`; what a killed run wrote about later steps is dropped.

        Raises:
          ConfigError: TensorBoard is asked for and its writer is not installed.
        """
        self.steps = steps
        self._file = _continued(folder / METRICS_FILE, start, is_complete=start >= steps)
        self._board = _board(folder / "tensorboard", start) if tensorboard else None
        console = Console(stderr=True)
        self._lines = not console.is_terminal and not quiet
        columns = (
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        self._bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task("training", total=steps, completed=start, text="")
        self._times = [(time.perf_counter(), 0)]
        self._reported = time.perf_counter()

    def __enter__(self) -> "Record":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def step(self, step: int, metrics: Mapping[str, float], *, tokens: int) -> None:
        """One batch was applied; `tokens` of it were no padding."""
        self._times.append((time.perf_counter(), tokens))
        self._times = self._times[-_SPEED_STEPS - 1 :]
        seconds = max(self._times[-1][0] - self._times[0][0], 1e-9)
        speed = sum(count for _, count in self._times[1:]) / seconds
        self._write(step, {**metrics, "tokens_per_second": round(speed, 1)})
        text = f"loss {metrics['loss']:.3f}, {speed:.0f} tokens/s"
        self._bar.update(self._task, completed=step, text=text)
        now = time.perf_counter()
        if self._lines and now - self._reported > _REPORT_SECONDS:
            self._reported = now
            left = seconds / max(len(self._times) - 1, 1) * (self.steps - step) / 60
            self.say(f"step {step}/{self.steps}, {text}, {left:.0f} min left")

    def measured(self, step: int, measurement: Mapping[str, float]) -> None:
        """Held-out answers were measured."""
        self._write(step, {f"held_out_{name}": value for name, value in measurement.items()})

    def pause(self, seconds: float) -> None:
        """Time that belongs to no step: measurements, checkpoints."""
        self._times = [(at + seconds, count) for at, count in self._times]

    def say(self, text: str) -> None:
        """A line on stderr, above the bar where there is one."""
        if self._bar.disable:
            print(text, file=sys.stderr, flush=True)
        else:
            self._bar.console.print(text, highlight=False)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        # JSON knows neither NaN nor infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name.replace("held_out_", "held_out/"), value, step)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that was being written when the run was killed is left out."""
    path = folder / METRICS_FILE
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]


def _continued(path: Path, start: int, *, is_complete: bool) -> Any:
    """The file without what is behind step `start`; a complete run is measured once more at its end."""
    kept = [line for line in read_metrics(path.parent) if line["step"] <= start]
    if is_complete:
        kept = [line for line in kept if line["step"] < start or "loss" in line]
    scratch = path.with_suffix(".partial")
    scratch.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(scratch, path)
    return path.open("a", encoding="utf-8")


def _board(folder: Path, start: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ConfigError(
            "run.tensorboard needs tensorboardX: install the extra [train], or set tensorboard = false"
        ) from None
    return SummaryWriter(str(folder), purge_step=start + 1)
