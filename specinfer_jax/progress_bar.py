"""A progress bar on the standard error stream, as vLLM's `use_tqdm` shows one. Free of jax."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(is_shown: bool, total: int, description: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how many of `total` requests have ended, and the tokens so far.

    Args:
      is_shown: False shows nothing.
      total: requests.
      description: in front of the bar.

    Yields:
      A function that is told of (requests that have ended, new tokens).
    """
    if not is_shown:
        yield lambda ended, tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, tokens=0)
        tokens_so_far = 0

        def tell(ended: int, tokens: int) -> None:
            nonlocal tokens_so_far
            tokens_so_far += tokens
            bar.update(task, advance=ended, tokens=tokens_so_far)

        yield tell
