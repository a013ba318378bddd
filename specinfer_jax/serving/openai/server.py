"""A server process: its socket, uvicorn, and an orderly end on SIGTERM. Free of jax.

The first SIGTERM or SIGINT refuses new requests with 503, lets accepted ones end, then exits with 0; with 1 if the
drain's time-out cut some off, or at once on a second signal.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator

import uvicorn

from specinfer_jax.errors import ConfigError
from specinfer_jax.serving.async_protocol import AsyncEngine
from specinfer_jax.serving.openai.logs import configure, log
from specinfer_jax.serving.openai.settings import ServerSettings
from specinfer_jax.serving.openai.state import ServerState
from specinfer_jax.serving.openai_api import create_app

LOG = logging.getLogger("specinfer_jax.server")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LINGER_SECONDS = 5
"""Time that connections have to close once no request is under way."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without handlers of its own: after a signal it would end by that signal, not with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Leave signals alone."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """The socket, taken before a model is loaded so that a busy port is known at once.

    Raises:
      ConfigError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot serve on {host} port {port}: {error.strerror or error}") from error
    return bound


def serve(engine: AsyncEngine, settings: ServerSettings, bound: socket.socket, *, log_level: str = "info") -> int:
    """Serve until a signal; returns the exit code."""
    configure(log_level)
    return asyncio.run(_serve(engine, settings, bound))


async def _serve(engine: AsyncEngine, settings: ServerSettings, bound: socket.socket) -> int:
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=_LINGER_SECONDS,
        lifespan="on", ws="none",
    )  # fmt: skip
    server = _Uvicorn(config)
    ending: list[asyncio.Task[bool]] = []

    def on_signal(number: int) -> None:
        if ending:
            log(LOG, "forced_exit", signal=signal.Signals(number).name)
            logging.shutdown()
            os._exit(1)  # an orderly exit would wait for threads, and one of them may be why somebody lost patience
        log(LOG, "draining", signal=signal.Signals(number).name, in_flight=app.state.serving.in_flight)
        ending.append(asyncio.create_task(_drain(app.state.serving, server)))

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    host, port = bound.getsockname()[:2]
    log(
        LOG, "serving", host=host, port=port, models=list(app.state.serving.model_names),
        needs_key=bool(settings.api_keys),
    )  # fmt: skip
    try:
        await server.serve(sockets=[bound])
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    is_whole = bool(ending) and await ending[0]
    log(LOG, "ended", all_answered=is_whole)
    return 0 if is_whole else 1


async def _drain(state: ServerState, server: uvicorn.Server) -> bool:
    try:
        return await state.drain()
    finally:
        server.should_exit = True
