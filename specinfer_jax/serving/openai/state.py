"""What all requests of one server share. Free of jax."""

import asyncio
import time

import specinfer_jax
from specinfer_jax.serving.async_protocol import AsyncEngine
from specinfer_jax.serving.openai.errors import ApiError, model_not_found, retry_after
from specinfer_jax.serving.openai.prometheus import ServerMetrics
from specinfer_jax.serving.openai.settings import ServerSettings

FINGERPRINT = f"specinfer_jax-{specinfer_jax.__version__}"
_RETRY_SECONDS = 2.0


class ServerState:
    """The engine, the settings, and how many requests are under way."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = ServerMetrics(engine)
        self.created = int(time.time())
        self.model_names = settings.model_names or (engine.model_name,)
        self.is_draining = False
        self._in_flight = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def enter(self) -> None:
        """A request has come in."""
        self._in_flight += 1
        self._is_idle.clear()
        self.metrics.in_flight.set(self._in_flight)

    def leave(self) -> None:
        """It has had its answer."""
        self._in_flight -= 1
        if not self._in_flight:
            self._is_idle.set()
        self.metrics.in_flight.set(self._in_flight)

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self._in_flight

    async def drain(self) -> bool:
        """Refuse new requests and let the others end; those that the time-out cuts off get an error.

        Returns:
          Whether all of them had their answer.
        """
        self.is_draining = True
        if await self._idle_within(self.settings.drain_timeout):
            return True
        await self.engine.drain(0.0)
        await self._idle_within(1.0)
        return False

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._is_idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def status(self) -> str:
        """ok, loading, draining or dead."""
        if not self.engine.snapshot().is_alive:
            return "dead"
        if self.is_draining:
            return "draining"
        return "ok" if self.engine.is_ready() else "loading"

    def check_can_serve(self) -> None:
        """Refuse a request that would not be served.

        Raises:
          ApiError: 503.
        """
        if self.is_draining:
            raise draining()
        if not self.engine.is_ready():
            headers = retry_after(_RETRY_SECONDS)
            raise ApiError(503, "The model is loading.", kind="server_error", code="loading", headers=headers)

    def model_name(self, asked: str | None) -> str:
        """The name in the answer.

        Raises:
          ApiError: 404, nothing of that name is served.
        """
        if asked is not None and asked not in self.model_names:
            raise model_not_found(asked)
        return asked or self.model_names[0]


def draining() -> ApiError:
    """The server is about to end."""
    headers = retry_after(_RETRY_SECONDS) | {"Connection": "close"}
    return ApiError(503, "The server is shutting down.", kind="server_error", code="draining", headers=headers)
