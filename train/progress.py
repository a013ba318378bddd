"""How far long work has come: a bar, or a line a minute where stderr is no terminal. Free of jax."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

OnProgress = Callable[[int, int], None]
"""Gets how many more things are done, and how many more tokens."""
_REPORT_SECONDS = 60.0
"""Between lines where stderr is no terminal."""


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[OnProgress]:
    """Count things and tokens on stderr: a bar with tokens/s and time left, or a line a minute if it is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    tokens, began, reported = 0, time.perf_counter(), time.perf_counter()
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=total, speed="")

        def on_progress(new: int, new_tokens: int) -> None:
            nonlocal tokens, reported
            tokens += new_tokens
            now = time.perf_counter()
            speed = f"{tokens / (now - began):.0f} tokens/s"
            bar.update(task, advance=new, speed=speed)
            if not console.is_terminal and now - reported > _REPORT_SECONDS:
                reported, done = now, bar.tasks[0].completed
                left = (now - began) / max(done, 1) * (total - done) / 60
                print(f"{what} {done:.0f}/{total}, {speed}, {left:.0f} min left", file=sys.stderr, flush=True)

        yield on_progress
