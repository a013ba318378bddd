"""Everything that can go wrong with a request, in OpenAI's shape and with the right status. Free of jax.

{"error": {"message": "...", "type": "invalid_request_error", "param": "messages[0].role", "code": "invalid_value"}}
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from specinfer_jax.errors import PromptError, SpecInferError, SpeculationError, TokenizerError
from specinfer_jax.serving.async_protocol import (
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ServingError,
)
from specinfer_jax.serving.openai.logs import fields_of
from specinfer_jax.serving.openai.requests import UNSUPPORTED, ChatCompletionRequest, CompletionRequest

LOG = logging.getLogger("specinfer_jax.server")
INVALID, SERVER = "invalid_request_error", "server_error"
_FIELDS = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
_CODES = {
    "missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter",
    "greater_than_equal": "number_below_min_value", "less_than_equal": "number_above_max_value",
    "finite_number": "number_not_finite", "literal_error": "invalid_enum_value",
    "string_too_short": "string_below_min_length", "string_too_long": "string_above_max_length",
    "string_pattern_mismatch": "invalid_format", "too_short": "array_below_min_length",
    "too_long": "array_above_max_length",
}  # fmt: skip
"""Pydantic's names of faults to ours, which are OpenAI's where it has one; the rest are wrong types."""
BODY_CODES = frozenset({*_CODES.values(), "invalid_type", "unsupported_parameter"})
"""Codes of bodies that do not fit the schema; no other error has one of them."""


class ApiError(Exception):
    """A request that ends with an error."""

    def __init__(
        self, status: int, message: str, *, kind: str = INVALID, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> str:
        """The JSON; ASCII, so that no half of a surrogate pair out of a request can break it."""
        detail = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": detail})

    def response(self) -> Response:
        """The answer, for those that have not begun."""
        return Response(self.body(), self.status, self.headers, "application/json")


def retry_after(seconds: float) -> dict[str, str]:
    """The header, in whole seconds."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def not_found(path: str, method: str) -> ApiError:
    """There is nothing at this address."""
    return ApiError(404, f"Unknown request URL: {method} {path}.", code="unknown_url")


def model_not_found(name: str) -> ApiError:
    """The model is not served here."""
    return ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")


def as_api_error(error: Exception, *, prompt_field: str | None = None) -> ApiError:
    """What a client is told of an error; `prompt_field` is where the endpoint has its prompt."""
    match error:
        case ApiError():
            return error
        case PromptError() | TokenizerError():
            return ApiError(400, str(error), param=prompt_field, code="invalid_prompt")
        case SpeculationError():
            return ApiError(400, str(error), param="speculation", code="invalid_value")
        case SpecInferError():
            return ApiError(400, str(error), param=_named_field(str(error)), code="invalid_value")
        case QueueFullError():
            headers = retry_after(error.retry_after)
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
        case RequestTimeoutError():
            return ApiError(408, str(error) or "the request took too long", kind="timeout_error", code="timeout")
        case RequestCancelledError():
            return ApiError(503, str(error) or "the request was given up", kind=SERVER, code="cancelled")
        case EngineDeadError():
            return ApiError(503, "The engine has stopped.", kind=SERVER, code="engine_dead")
        case ServingError():
            LOG.error("request_failed", exc_info=error)
            return ApiError(500, "A fault ended this request; try again.", kind=SERVER, code="request_failed")
    LOG.error("unexpected_error", exc_info=error)
    return ApiError(500, "The server had an error; its log says more.", kind=SERVER, code="internal_error")


def _named_field(message: str) -> str | None:
    """The first field of a request that an error names."""
    return next((word for word in re.findall(r"\w+", message) if word in _FIELDS), None)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Handler of everything that `as_api_error` knows."""
    return _told(request, as_api_error(error))


def _told(request: Request, error: ApiError) -> Response:
    fields_of(request).update(error=error.code, param=error.param)
    return error.response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of what the framework refuses: no such address, another method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _told(request, not_found(request.url.path, request.method))
    code = {405: "method_not_allowed", 408: "timeout", 413: "body_too_large"}.get(error.status_code, "invalid_body")
    return _told(request, ApiError(error.status_code, str(error.detail), code=code, headers=error.headers))


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """Handler of bodies that do not fit the schema."""
    assert isinstance(error, RequestValidationError)
    return _told(request, _body_error(error.errors(), error.body))


def _body_error(faults: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    if isinstance(body, bytes):
        return ApiError(415, "The Content-Type must be application/json.", code="unsupported_media_type")
    if faults[0]["type"] == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", code="invalid_json")
    located = [(_path(fault, body), fault) for fault in faults]
    # Of a union's alternatives, the one that got furthest says best what is wrong.
    deepest = max((path for path, _ in located), key=len)
    if not deepest:
        is_key = faults[0]["type"] == "string_unicode"
        message = "A key of the body is not Unicode text." if is_key else "The body must be a JSON object."
        return ApiError(400, message, code="invalid_type")
    here = [fault for path, fault in located if path == deepest]
    param, kind = _spelled(deepest), here[0]["type"]
    if kind == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: {param!r}.", param=param, code=_CODES[kind])
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: {param!r}.", param=param, code=_CODES[kind])
    if deepest[0] in UNSUPPORTED:
        message = f"{deepest[0]!r} is not supported here; leave it out."
        return ApiError(400, message, param=param, code="unsupported_parameter")
    wanted = ", or ".join(dict.fromkeys(fault["msg"] for fault in here))
    return ApiError(400, f"Invalid {param!r}: {wanted}.", param=param, code=_CODES.get(kind, "invalid_type"))


def _path(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """Where the fault lies in the body; pydantic's own names of alternatives are left out."""
    path: list[str | int] = []
    value = body
    for step in fault["loc"][1:]:
        is_index = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if is_index or (isinstance(value, dict) and step in value):
            value = value[step]
        elif fault["type"] != "missing" or step != fault["loc"][-1]:
            continue
        path.append(step)
    return path


def _spelled(path: Sequence[str | int]) -> str:
    """messages[0].content"""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
