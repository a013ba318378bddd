"""Options that commands share, and how they and `--config` files become one `LLMConfig`. Free of jax."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from specinfer_jax.config import DEFAULT_MODEL, LLMConfig, load_config
from specinfer_jax.sampling_params import GREEDY
from specinfer_jax.speculation.rules import CHILDREN, VERIFICATION

_MODEL, _SPECULATION, SAMPLING = "Model", "Speculation", "Sampling"
"""Headings of --help."""

ConfigFiles = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", metavar="FILE.toml", help="Settings; options override it, later files earlier."),
]
DTypeName = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16.", rich_help_panel=_MODEL),
]


def read_configs(files: list[Path] | None, base: LLMConfig) -> LLMConfig:
    """`base` with every file laid over it, one after the other."""
    for file in files or []:
        base = load_config(file, base=base)
    return base


def changed(settings: Any, **values: Any) -> Any:
    """A frozen dataclass with the values that were given; None leaves a field alone."""
    return dataclasses.replace(settings, **{name: value for name, value in values.items() if value is not None})


def _llm_config(
    base: LLMConfig,
    config_files: ConfigFiles = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", rich_help_panel=_MODEL,
            help=f"Known name, folder, .gguf file or hub id. [default: {DEFAULT_MODEL}]",
        ),
    ] = None,
    dtype: DTypeName = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most tokens of one request, prompt included.", rich_help_panel=_MODEL),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", help="Requests decoded side by side.", rich_help_panel=_MODEL)
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="AXES", rich_help_panel=_MODEL,
            help="Devices: data=D,model=M; M share the model, D groups decode requests of their own.",
        ),
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(metavar="WHERE", help="host: stream the weights from host memory.", rich_help_panel=_MODEL),
    ] = None,
    ssm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL", rich_help_panel=_SPECULATION,
            help="Small model that proposes trees; give it again for several. [default: what ships for the model]",
        ),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="TREE", rich_help_panel=_SPECULATION,
            help="An SSM's tree: auto (most tokens per second), wide (most tokens per step), children per node at each "
            "level (1,1,3,1,1) or of every node (2/2,1/1,0,1). [default: auto]",
        ),
    ] = None,
    ngram: Annotated[
        bool | None,
        typer.Option(
            "--ngram/--no-ngram", rich_help_panel=_SPECULATION, show_default=False,
            help="Propose what followed earlier occurrences of the last tokens. [default: unless --ssm is given]",
        ),
    ] = None,
    children: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", rich_help_panel=_SPECULATION,
            help=f"How an SSM's children are chosen at a temperature: {', '.join(CHILDREN)}.",
        ),
    ] = None,
    verification: Annotated[
        str | None,
        typer.Option(
            metavar="RULE", rich_help_panel=_SPECULATION,
            help=f"How trees are verified at a temperature: {', '.join(VERIFICATION)}; pairs that are not exact are "
            "refused.",
        ),
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Incremental decoding.", rich_help_panel=_SPECULATION)
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", metavar="N", help="Most new tokens.", rich_help_panel=SAMPLING)
    ] = None,
) -> LLMConfig:  # fmt: skip
    config = read_configs(config_files, base)
    speculation = changed(
        config.speculation, ssms=tuple(ssm) if ssm else None, tree=tree, ngram=ngram,
        children=children, verification=verification, enabled=False if no_speculation else None,
    )  # fmt: skip
    return changed(
        config, model=model, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        mesh=mesh, offload=offload, speculation=speculation, sampling=changed(config.sampling, max_tokens=max_tokens),
    )  # fmt: skip


def _drawing(
    config: LLMConfig,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="T", rich_help_panel=SAMPLING,
            help="Draw tokens, the more freely the higher; 0 takes the likeliest. [default: 0]",
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Draw from the K likeliest tokens.", rich_help_panel=SAMPLING)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Draw from the likeliest tokens that together reach P.", rich_help_panel=SAMPLING
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Draw from tokens at least P times as likely as the likeliest.", rich_help_panel=SAMPLING
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="R", help="Above 1: avoid tokens of prompt and answer.", rich_help_panel=SAMPLING),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(metavar="R", help="Above 0: avoid tokens of the answer.", rich_help_panel=SAMPLING),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Above 0: avoid tokens the more, the more often they came.", rich_help_panel=SAMPLING
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Draw the same answer every time.", rich_help_panel=SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="End before this text; give it again for several.", rich_help_panel=SAMPLING
        ),
    ] = None,
) -> LLMConfig:  # fmt: skip
    sampling = changed(
        config.sampling, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        seed=seed, stop=tuple(stop) if stop else None,
    )  # fmt: skip
    return changed(config, sampling=sampling)


def _options_of(step: Callable[..., LLMConfig]) -> list[inspect.Parameter]:
    """The options that a step from config to config takes."""
    return list(inspect.signature(step).parameters.values())[1:]


def with_llm_options(*, max_tokens: int, draws: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options above; it gets them as one argument, `config: LLMConfig`.

    Args:
      max_tokens: the command's own default.
      draws: whether it has the options of sampling as well; it is greedy by default even so.
    """
    base = LLMConfig(sampling=changed(GREEDY, max_tokens=max_tokens))
    steps = (_llm_config, _drawing) if draws else (_llm_config,)
    shared = [parameter for step in steps for parameter in _options_of(step)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for name, p in inspect.signature(command).parameters.items() if name != "config"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            config = base
            for step in steps:
                config = step(config, **{option.name: values.pop(option.name) for option in _options_of(step)})
            command(**values, config=config)

        # Typer reads the options off the signature.
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
