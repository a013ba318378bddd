"""How far long work has come: a bar; where stderr is no terminal, a line a minute and one at the end. Free of jax."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

OnProgress = Callable[[int, int], None]
"""Gets how many more things are done, and how many more tokens."""
_REPORT_SECONDS = 60.0
"""Between lines where stderr is no terminal."""


@contextmanager
def progress_bar(what: str, total: int, *, is_shown: bool = True) -> Iterator[OnProgress]:
    """Count things and tokens on stderr: a bar with tokens/s and time left, or lines if it is no terminal.

    Args:
      what: is counted.
      total: how many there are.
      is_shown: False shows nothing.

    Yields:
      A function to be told of (things done, new tokens).
    """
    if not is_shown:
        yield lambda new, new_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )  # fmt: skip
    done, tokens, began, reported = 0, 0, time.perf_counter(), time.perf_counter()

    def line(ending: str) -> None:
        print(f"{what} {done}/{total}, {tokens} tokens, {ending}", file=sys.stderr, flush=True)

    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=300) as bar:
        task = bar.add_task(what, total=total, speed="")

        def on_progress(new: int, new_tokens: int) -> None:
            nonlocal done, tokens, reported
            done, tokens = done + new, tokens + new_tokens
            now = time.perf_counter()
            speed = f"{tokens / (now - began):.0f} tokens/s"
            bar.update(task, advance=new, speed=speed)
            if not console.is_terminal and now - reported > _REPORT_SECONDS:
                reported = now
                line(f"{speed}, {(now - began) / max(done, 1) * (total - done) / 60:.0f} min left")

        yield on_progress
    if not console.is_terminal:
        line(f"{time.perf_counter() - began:.1f} s")
