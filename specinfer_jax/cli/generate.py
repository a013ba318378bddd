"""`specinfer generate`: continue prompts."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from specinfer_jax.cli.options import SAMPLING, changed, with_llm_options
from specinfer_jax.cli.screen import build_llm, busy, figures, figures_table, open_model, stats_dict
from specinfer_jax.config import LLMConfig
from specinfer_jax.errors import PromptError
from specinfer_jax.metrics import total
from specinfer_jax.prompts import read_prompts

if TYPE_CHECKING:
    from specinfer_jax.outputs import RequestOutput


@with_llm_options(max_tokens=128, draws=True)
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
    n: Annotated[
        int | None, typer.Option("--n", metavar="N", help="Answers per prompt.", rich_help_panel=SAMPLING)
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            rich_help_panel=SAMPLING,
            help="With --json: log-probabilities of every token, and of the K likeliest at its place.",
        ),
    ] = None,
    config: LLMConfig,
) -> None:
    """Continue prompts. The text goes to stdout, the figures to stderr.

    Example: `specinfer generate --chat "Name three rivers." --max-tokens 64`
    """
    texts = [sys.stdin.read() if text == "-" else text for text in prompts or []]
    texts += [entry.prompt for entry in read_prompts(file)] if file is not None else []
    if not texts:
        raise PromptError("nothing to continue: give a PROMPT, or --prompts FILE.jsonl")
    sampling = changed(config.sampling, n=n, logprobs=logprobs)
    llm = build_llm(config, open_model(config))

    def decode() -> "list[RequestOutput]":
        if chat:
            return llm.chat([[{"role": "user", "content": text}] for text in texts], sampling)
        return llm.generate(texts, sampling)

    outputs = busy("decoding", decode)
    if as_json:
        for text, output in zip(texts, outputs, strict=True):
            print(json.dumps(_as_dict(text, output), ensure_ascii=False))
    else:
        _print_texts(outputs)
    _report(outputs)


def _print_texts(outputs: list["RequestOutput"]) -> None:
    """The answers, each under a heading where there are several."""
    shown = [
        (i, answer) for i, output in enumerate(outputs, 1) for answer in output.outputs
        if answer.finish_reason != "error"
    ]  # fmt: skip
    for number, (i, answer) in enumerate(shown):
        names = [str(i)] if len(outputs) > 1 else []
        names += [f"answer {answer.index + 1}"] if len(outputs[i - 1].outputs) > 1 else []
        if names:
            print(f"{chr(10) if number else ''}=== {', '.join(names)} ===")
        print(answer.text)


def _as_dict(prompt: str, output: "RequestOutput") -> dict[str, object]:
    """The first answer, all answers with everything about them, and what was asked for or went wrong besides."""
    whole = dataclasses.asdict(output)
    return {
        "prompt": prompt, "text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason,
        "outputs": whole["outputs"], "stats": stats_dict(output.stats),
        **{name: whole[name] for name in ("prompt_logprobs", "error") if whole[name] is not None},
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
