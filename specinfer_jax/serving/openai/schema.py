"""The OpenAPI schema as the server really behaves. Free of jax."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from specinfer_jax.serving.openai.responses import ChatCompletionChunk, ErrorResponse
from specinfer_jax.serving.openai.streaming import MEDIA_TYPE

_WHY = {
    400: "A field is wrong, or the model cannot do what is asked.", 401: "No API key, or an unknown one.",
    404: "No such model.", 408: "The request or its body took too long.", 413: "The body is too large.",
    415: "The body is not declared as JSON.", 429: "The queue is full.", 500: "A fault ended the request.",
    503: "Loading, shutting down, or dead.",
}  # fmt: skip
_REF = "#/components/schemas/{model}"


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's description of what an endpoint answers with these statuses."""
    return {status: {"model": ErrorResponse, "description": _WHY[status]} for status in statuses}


def stream_response(event: str) -> dict[int | str, dict[str, Any]]:
    """FastAPI's description of an endpoint that may answer with events."""
    answer = {"anyOf": [{"$ref": _REF.format(model=name)} for name in (event, "ErrorResponse")]}
    data = {
        "anyOf": [
            {"const": "[DONE]"},
            {"type": "string", "contentMediaType": "application/json", "contentSchema": answer},
        ]
    }
    item = {"type": "object", "properties": {"data": data, "event": {"const": "message"}}, "required": ["data"]}
    return {
        200: {
            "description": f"The answer. With `stream` it is server-sent events: `data: ` and a {event}, an "
            "ErrorResponse if something goes wrong on the way, and `data: [DONE]` at the end.",
            "content": {MEDIA_TYPE: {"itemSchema": item}},
        }
    }


def openapi(app: FastAPI) -> dict[str, Any]:
    """The schema, made once: errors in OpenAI's shape, models of events among the components."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
        )  # fmt: skip
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own shape of an error, which is never sent
        models = schema["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            models.pop(unused, None)
        _, events = models_json_schema([(ChatCompletionChunk, "serialization")], ref_template=_REF)
        schema["components"]["schemas"] = {**events["$defs"], **models}
        app.openapi_schema = schema
    return app.openapi_schema
