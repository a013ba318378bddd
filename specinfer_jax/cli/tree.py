"""`specinfer tree`: draw the token trees of a few steps."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specinfer_jax.cli.options import with_llm_options
from specinfer_jax.cli.screen import busy, check_output, open_model, write_output
from specinfer_jax.config import LLMConfig


@with_llm_options(max_tokens=512, draws=False)
def tree(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='Text to continue; "-" reads it from stdin.')],
    *,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps to draw.")] = 4,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt as a user message of a chat.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write the picture there as well.")] = None,
    config: LLMConfig,
) -> None:
    """Draw the token trees of a few greedy steps: what was proposed, what was accepted, the bonus token.

    Example: `specinfer tree "one two three one two" --steps 3 --svg trees.svg`
    """
    check_output(svg)
    model = open_model(config)
    text = sys.stdin.read() if prompt == "-" else prompt
    tokenizer = model.tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    from specinfer_jax.opened import choose_dtype
    from specinfer_jax.trace import TracedStep, trace_steps
    from specinfer_jax.visualize import draw_step, legend, to_svg, to_terminal

    def decode() -> list[TracedStep]:
        return list(
            trace_steps(
                model, ids, speculation=config.speculation, num_steps=steps, dtype=choose_dtype(config.dtype),
                max_model_len=config.max_model_len,
            )
        )  # fmt: skip

    traced = busy("compiling", decode)
    drawn = [draw_step(number, step, tokenizer.token_bytes) for number, step in enumerate(traced, 1)]
    console = Console(highlight=False)
    console.print(legend())
    for picture in drawn:
        console.print()
        console.print(to_terminal(picture))
    if len(traced) < steps:
        console.print("\nthe answer ended here")
    if svg is not None:
        write_output(svg, to_svg(drawn))
        print(f"wrote {svg}", file=sys.stderr)
