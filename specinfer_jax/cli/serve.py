"""`specinfer serve`: an OpenAI-compatible server. Free of jax."""

from typing import TYPE_CHECKING, Annotated

import typer

from specinfer_jax.cli.options import changed, with_llm_options
from specinfer_jax.cli.screen import busy, open_model
from specinfer_jax.config import DEFAULT_MODEL, LLMConfig
from specinfer_jax.errors import ConfigError
from specinfer_jax.serving.openai.settings import ServerSettings

if TYPE_CHECKING:
    from specinfer_jax.opened import Model
    from specinfer_jax.serving.async_protocol import AsyncEngine

_SERVER, _ACCESS = "Server", "Access"
_NO_LIMIT = 2**31 - 1


@with_llm_options(max_tokens=_NO_LIMIT, draws=False)
def serve(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help=f"As --model. [default: {DEFAULT_MODEL}]", show_default=False)
    ] = None,
    *,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 is all.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What requests call the model; may be repeated.", rich_help_panel=_SERVER),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="Requests that wait; more get 429.", rich_help_panel=_SERVER)
    ] = 1024,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="NUMBER", rich_help_panel=_SERVER, show_default=False,
            help="Tokens that the caches hold for all requests together. [default: max_num_seqs * max_model_len]",
        ),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Then a request is given up; 0: never.", rich_help_panel=_SERVER)
    ] = 600,
    drain_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="What SIGTERM leaves to accepted requests.", rich_help_panel=_SERVER),
    ] = 120,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write what users ask into the log.", rich_help_panel=_SERVER)
    ] = False,
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_SERVER)
    ] = "info",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="SPECINFER_API_KEY", show_envvar=True, rich_help_panel=_ACCESS,
            help="Requests need one of the keys; may be repeated. Better in the environment, with spaces between them.",
        ),
    ] = None,
    max_body_mib: Annotated[
        float, typer.Option(metavar="MIB", help="Largest body of a request.", rich_help_panel=_ACCESS)
    ] = 8,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", rich_help_panel=_ACCESS,
            help='Web page whose scripts may call the server; "*" is all. May be repeated.',
        ),
    ] = None,
    config: LLMConfig,
) -> None:  # fmt: skip
    """Serve a model to OpenAI clients. SIGTERM or Ctrl-C lets accepted requests end.

    Requests bring their own sampling settings; `--max-tokens` is the most that an answer may have.

    Example: `specinfer serve smollm2-135m-instruct --port 8000`
    """
    try:
        from specinfer_jax.serving.openai.server import bind
        from specinfer_jax.serving.openai.server import serve as run
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: install specinfer-jax[server]") from error
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log level must be debug, info, warning or error, got {log_level!r}")
    config = changed(config, model=name)
    limit = config.sampling.max_tokens
    settings = ServerSettings(
        model_names=tuple(served_model_name or [config.model]), api_keys=tuple(api_key or ()),
        max_tokens=None if limit in (None, _NO_LIMIT) else limit, max_body_bytes=int(max_body_mib * 2**20),
        request_timeout=request_timeout or None, drain_timeout=drain_timeout,
        allowed_origins=tuple(allowed_origin or ()), log_prompts=log_prompts,
    )  # fmt: skip
    bound = bind(host, port)
    engine = _build_engine(config, open_model(config), max_queue=max_queue, cache_tokens=cache_tokens)
    raise typer.Exit(run(engine, settings, bound, log_level=log_level))


def _build_engine(config: LLMConfig, model: "Model", *, max_queue: int, cache_tokens: int | None) -> "AsyncEngine":
    """Compile and measure what the settings ask for."""

    def build() -> "AsyncEngine":
        from specinfer_jax.async_llm import AsyncLLM

        return AsyncLLM(
            model, speculation=config.speculation, dtype=config.dtype, max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs, max_queue=max_queue, cache_tokens=cache_tokens,
            mesh=config.mesh, offload=config.offload,
        )  # fmt: skip

    return busy("compiling", build)
