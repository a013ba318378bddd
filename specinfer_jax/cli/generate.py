"""`specinfer generate`: continue prompts."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specinfer_jax.cli.options import with_llm_options
from specinfer_jax.cli.screen import build_llm, busy, figures, figures_table, open_model, stats_dict
from specinfer_jax.config import LLMConfig
from specinfer_jax.errors import PromptError
from specinfer_jax.metrics import total
from specinfer_jax.prompts import read_prompts

if TYPE_CHECKING:
    from specinfer_jax.outputs import RequestOutput


@with_llm_options(max_tokens=128)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT...", help='Texts to continue; "-" reads one from stdin.')
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE.jsonl", help='Lines of {"prompt": ...}; "-" is stdin.'),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt as a user message of a chat.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, with ids and counters.")] = False,
    config: LLMConfig,
) -> None:
    """Continue prompts. The text goes to stdout, the figures to stderr.

    Example: `specinfer generate --chat "Name three rivers." --max-tokens 64`
    """
    texts = [sys.stdin.read() if text == "-" else text for text in prompts or []]
    texts += [entry.prompt for entry in read_prompts(file)] if file is not None else []
    if not texts:
        raise PromptError("nothing to continue: give a PROMPT, or --prompts FILE.jsonl")
    llm = build_llm(config, open_model(config))

    def decode() -> "list[RequestOutput]":
        if chat:
            return llm.chat([[{"role": "user", "content": text}] for text in texts], config.sampling)
        return llm.generate(texts, config.sampling)

    outputs = busy("decoding", decode)
    for i, output in enumerate(outputs):
        if as_json:
            print(json.dumps(_as_dict(texts[i], output), ensure_ascii=False))
        elif output.error is None:
            if len(outputs) > 1:
                print(f"{'' if i == 0 else chr(10)}=== {i + 1} ===")
            print(output.text)
    _report(outputs)


def _as_dict(prompt: str, output: "RequestOutput") -> dict[str, object]:
    return {
        "prompt": prompt, "text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason,
        "stats": stats_dict(output.stats), **({} if output.error is None else {"error": output.error}),
    }  # fmt: skip


def _report(outputs: list["RequestOutput"]) -> None:
    """Figures, and what was refused."""
    console = Console(stderr=True, highlight=False)
    stats = [output.stats for output in outputs]
    whole = total([entry for entry in stats if entry is not None])
    if len(outputs) == 1:
        console.print(figures(whole), style="dim", soft_wrap=True)
    else:
        console.print(figures_table(stats, whole))
    refused = [f"prompt {i}: {output.error}" for i, output in enumerate(outputs, 1) if output.error is not None]
    if refused:
        raise PromptError("; ".join(refused))
