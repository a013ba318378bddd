"""What commands show besides their results: what they are busy with, and figures, on stderr. Free of jax."""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

from specinfer_jax.checkpoint.disk import clear_disk_errors
from specinfer_jax.checkpoint.resolve import find_ssm_folder, resolve
from specinfer_jax.config import LLMConfig
from specinfer_jax.errors import ConfigError
from specinfer_jax.metrics import RequestStats

if TYPE_CHECKING:
    from specinfer_jax.llm import LLM
    from specinfer_jax.opened import Model


Result = TypeVar("Result")


def busy(message: str, work: Callable[[], Result]) -> Result:
    """Do some work under a spinner with a message; no spinner where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return interruptible(work)
    with console.status(message):
        return interruptible(work)


def interruptible(work: Callable[[], Result]) -> Result:
    """Do some work in a thread of its own, so that Ctrl-C ends the wait at once.

    In the main thread Python would hear of it only when the compiler or a compiled program is done.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result()


def models_to_fetch(config: LLMConfig) -> list[str]:
    """Names of the LLM and of the SSMs that do not ship with this package and take part."""
    ssms = (config.speculation.ssms or ()) if config.speculation.enabled else ()
    return [config.model, *(name for name in ssms if find_ssm_folder(name) is None)]


def open_model(config: LLMConfig) -> "Model":
    """Fetch what is not on this machine, then load the LLM."""
    for name in models_to_fetch(config):
        resolve(name)  # shows a progress bar of its own if it has to download

    def load() -> "Model":
        from specinfer_jax.compile_cache import enable_compile_cache
        from specinfer_jax.opened import choose_dtype, open_model
        from specinfer_jax.parallel.weights import find_mesh

        enable_compile_cache()
        mesh, memory = find_mesh(config.mesh, config.offload)
        return open_model(config.model, dtype=choose_dtype(config.dtype), mesh=mesh, memory=memory)

    return busy(f"loading {config.model}", load)


def build_llm(config: LLMConfig, model: "Model") -> "LLM":
    """Compile and measure what the settings ask for."""

    def build() -> "LLM":
        from specinfer_jax.llm import LLM

        return LLM(
            model, speculation=config.speculation, dtype=config.dtype, max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs, mesh=config.mesh, offload=config.offload,
        )  # fmt: skip

    return busy("compiling", build)


def figures(stats: RequestStats) -> str:
    """One line: what an answer cost and gained."""
    parts = [
        f"{stats.tokens} tokens in {stats.steps} steps",
        f"{number(stats.tokens_per_step)} tokens per step",
        f"{number(stats.tokens_per_second, 1)} tokens/s",
        f"prefill {stats.prefill_seconds:.2f} s",
        f"decode {stats.decode_seconds:.2f} s",
    ]
    return " · ".join(parts)


def figures_table(stats: Sequence[RequestStats | None], whole: RequestStats) -> Table:
    """The same for several answers, and their sum; None is a refused prompt."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    footer = _cells(whole)
    for heading, total in zip(("prompt", *_HEADINGS), ("all", *footer), strict=True):
        table.add_column(heading, footer=total, justify="right")
    for i, entry in enumerate(stats, 1):
        table.add_row(str(i), *(_cells(entry) if entry is not None else ["-"] * len(_HEADINGS)))
    return table


_HEADINGS = ("tokens", "steps", "tokens/step", "tokens/s", "prefill s", "decode s")


def _cells(stats: RequestStats) -> list[str]:
    return [
        str(stats.tokens), str(stats.steps), number(stats.tokens_per_step), number(stats.tokens_per_second, 1),
        f"{stats.prefill_seconds:.2f}", f"{stats.decode_seconds:.2f}",
    ]  # fmt: skip


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def stats_dict(stats: RequestStats | None) -> dict[str, Any] | None:
    """Counters and rates for JSON."""
    if stats is None:
        return None
    rates = {"tokens_per_step": stats.tokens_per_step, "tokens_per_second": stats.tokens_per_second}
    return {**dataclasses.asdict(stats), **rates}


def check_output(path: Path | None) -> None:
    """Refuse a file that cannot be written before the work for it begins."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"cannot write {path}: " + ("it is a folder" if path.is_dir() else "there is no such folder"))


def write_output(path: Path, text: str) -> None:
    """Write a result; a disk error becomes one clear sentence."""
    with clear_disk_errors(path.absolute().parent):
        path.write_text(text, encoding="utf-8")
