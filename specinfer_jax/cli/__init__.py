"""The command line: `specinfer generate | chat | serve | pull | info | convert | tree | bench`.

Commands import jax when they run, so that `specinfer --help` is quick.
"""

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import specinfer_jax
from specinfer_jax.cli.bench import bench
from specinfer_jax.cli.chat import chat
from specinfer_jax.cli.generate import generate
from specinfer_jax.cli.models import convert, info, pull
from specinfer_jax.cli.serve import serve
from specinfer_jax.cli.tree import tree
from specinfer_jax.errors import SpecInferError

_INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended, as shells have it."""


class _Group(TyperGroup):
    """Turns what a user did wrong into one sentence and exit code 2, and Ctrl-C into 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SpecInferError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    name="specinfer",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, bench, tree, info, pull, convert):
    app.command()(command)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"specinfer {specinfer_jax.__version__}")
        raise typer.Exit()
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM inference through token trees: the model's own text in fewer passes.

    Try `specinfer generate "The capital of France is"` and `specinfer chat`.
    """


def main() -> None:
    """Entry point of the `specinfer` program."""
    try:
        app()
    except SystemExit as end:
        if end.code != _INTERRUPTED:
            raise
        # What was interrupted may still be compiling in a thread of its own, which an orderly exit would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)
