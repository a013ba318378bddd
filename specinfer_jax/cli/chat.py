"""`specinfer chat`: a conversation in the terminal."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specinfer_jax.cli.options import with_llm_options
from specinfer_jax.cli.screen import build_llm, figures, open_model
from specinfer_jax.config import LLMConfig, SamplingParams
from specinfer_jax.errors import PromptError, SamplingError, TokenizerError

if TYPE_CHECKING:
    from specinfer_jax.llm import LLM
    from specinfer_jax.outputs import StreamOutput

_HELP = "/clear forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@with_llm_options(max_tokens=512, draws=True)
def chat(
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="Instructions that precede the chat.")] = None,
    config: LLMConfig,
) -> None:
    """Talk with a chat model. Ctrl-C stops an answer; Ctrl-D or /exit ends.

    Example: `specinfer chat --system "Answer in one sentence."`
    """
    if config.sampling.n > 1:
        raise SamplingError(f"a chat has one answer at a time: n must be 1, got {config.sampling.n}")
    model = open_model(config)
    if model.tokenizer.chat_template is None:
        raise TokenizerError(f"{config.model} has no chat template: use `specinfer generate`, or choose a chat model")
    llm = build_llm(config, model)
    notes = Console(stderr=True, highlight=False, style="dim")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (editing and history for input())
        notes.print(_HELP)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _read_line(is_terminal, notes)) is not None:
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(start)
        elif line.startswith("/"):
            notes.print(_HELP)
        elif line:
            messages += _turn(llm, [*messages, {"role": "user", "content": line}], config.sampling, notes)


def _read_line(is_terminal: bool, notes: Console) -> str | None:
    """The next line without spaces around it, None at the end of the input."""
    while True:
        try:
            return input("> " if is_terminal else "").strip()
        except EOFError:
            if is_terminal:
                print()
            return None
        except KeyboardInterrupt:
            print()
            notes.print("Ctrl-D or /exit ends")


def _turn(llm: "LLM", messages: list[dict[str, str]], sampling: SamplingParams, notes: Console) -> list[dict[str, str]]:
    """Answer the last message; what the conversation gains, nothing if it did not fit."""
    pieces: list[str] = []
    try:
        stream = llm.stream(messages, sampling)
    except PromptError as error:
        notes.print(f"error: {error}; /clear forgets the conversation", style="not dim", soft_wrap=True)
        return []
    with _interrupt_flag() as interrupted:
        for piece in stream:
            pieces.append(piece.text)
            print(piece.text, end="", flush=True)
            if piece.finish_reason is not None:
                print()
                _note_end(piece, notes)
            if interrupted.is_set():
                break
        else:
            return [messages[-1], {"role": "assistant", "content": "".join(pieces)}]
    stream.close()  # type: ignore[attr-defined]
    print()
    notes.print("stopped")
    return [messages[-1], {"role": "assistant", "content": "".join(pieces)}]


def _note_end(last: "StreamOutput", notes: Console) -> None:
    """What the answer cost, and why it ends where it does."""
    if last.error is not None:
        notes.print(f"error: {last.error}", style="not dim", soft_wrap=True)
    if last.stats is not None:
        cut = " · stopped at --max-tokens" if last.finish_reason == "length" else ""
        notes.print(figures(last.stats) + cut, soft_wrap=True)


@contextlib.contextmanager
def _interrupt_flag() -> Iterator[threading.Event]:
    """Ctrl-C sets the flag instead of breaking into a step whose buffers are under way; a second one breaks."""
    flag = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(number: int, frame: object) -> None:
        if flag.is_set():
            raise KeyboardInterrupt
        flag.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)
