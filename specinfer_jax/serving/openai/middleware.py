"""What holds for every HTTP request before an endpoint sees it, as plain ASGI: identity, keys, size. Free of jax.

Not starlette's BaseHTTPMiddleware: behind it a client that goes away is not noticed.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable, MutableMapping
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer_jax.serving.openai.errors import ApiError, as_api_error
from specinfer_jax.serving.openai.logs import begin, log
from specinfer_jax.serving.openai.state import ServerState, draining

LOG = logging.getLogger("specinfer_jax.server")
PUBLIC = frozenset({"/health", "/ready", "/metrics", "/docs", "/openapi.json"})
"""Paths that need no key."""
_QUIET = frozenset({"/health", "/ready", "/metrics"})
"""Paths whose every call is not worth a line of the log, unless it fails."""
_SAFE_ID = re.compile(r"[!-~]{1,128}")


class RequestContext:
    """Outermost: a request's id, its log line, the count of requests under way, and no new work while draining."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and see it to its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        line = begin(scope, request_id=request_id, method=scope["method"], path=scope["path"])
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        is_refused = self._state.is_draining and scope["path"] not in PUBLIC
        self._state.enter()
        try:
            if is_refused:
                await draining().response()(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            told = as_api_error(error)
            line["error"] = told.code
            if not status:
                await told.response()(scope, receive, send_with_id)
        finally:
            self._state.leave()
            self._end(scope, line, status, time.perf_counter() - began)

    def _end(self, scope: Scope, line: MutableMapping[str, Any], status: int, seconds: float) -> None:
        route = scope.get("route")
        endpoint = getattr(route, "path_format", None) or "other"
        self._state.metrics.on_response(endpoint, status, seconds)
        if endpoint not in _QUIET or status >= 400:
            log(LOG, "request", **line, status=status, seconds=round(seconds, 4))


class ApiKeys:
    """Refuses requests without one of the keys."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer with 401."""
        if scope["type"] == "http" and self._digests and scope["path"] not in PUBLIC:
            kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self._is_known(key.strip()):
                given = "Incorrect API key." if key else "No API key; send it as 'Authorization: Bearer KEY'."
                error = ApiError(
                    401, given, kind="authentication_error", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        """Takes the same time whatever the key is: digests are of one length, and all of them are compared."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies that are too large, or too slow in coming."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; reading its body raises where the limits end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            error = ApiError(413, self._too_large(), code="body_too_large", headers={"Connection": "close"})
            await error.response()(scope, receive, send)
            await self._discard(receive)
            return
        deadline = time.monotonic() + self._seconds
        read, is_whole = 0, False

        async def limited() -> Message:
            nonlocal read, is_whole
            if is_whole:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                raise HTTPException(408, "The body took too long.", {"Connection": "close"}) from None
            read += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if read > self._max_bytes:
                raise HTTPException(413, self._too_large(), {"Connection": "close"})
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> str:
        return f"The body must have at most {self._max_bytes} bytes."

    async def _discard(self, receive: Receive) -> None:
        """Read on for a moment: a connection that closes on unread bytes may lose the answer."""
        try:
            async with asyncio.timeout(1):
                while (await receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            pass
