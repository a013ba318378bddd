"""The OpenAI-compatible server as an ASGI application. Free of jax.

app = create_app(engine, ServerSettings(api_keys=("secret",)))     # any AsyncEngine; run it with uvicorn

| path | what |
|---|---|
| POST /v1/chat/completions, /v1/completions | answers, whole or as server-sent events |
| GET /v1/models, /v1/models/{model} | the names that requests may use |
| GET /health, /ready | 200 while the engine lives; 200 while requests are taken |
| GET /metrics | Prometheus |
| GET /openapi.json, /docs | the schema |

The parts stand in serving/openai/: requests and responses are the bodies, parameters what they mean to the engine, call
and generation a request under way, chat and completions its answers, streaming its events, errors what goes wrong,
middleware keys, sizes and log lines, server the process with its signals.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import specinfer_jax
from specinfer_jax.errors import SpecInferError
from specinfer_jax.serving.async_protocol import AsyncEngine, ServingError
from specinfer_jax.serving.openai.chat import ChatEndpoint
from specinfer_jax.serving.openai.completions import CompletionEndpoint
from specinfer_jax.serving.openai.errors import ApiError, model_not_found, on_api_error, on_http_error, on_invalid_body
from specinfer_jax.serving.openai.generation import while_connected
from specinfer_jax.serving.openai.logs import fields_of
from specinfer_jax.serving.openai.middleware import ApiKeys, BodyLimit, RequestContext
from specinfer_jax.serving.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from specinfer_jax.serving.openai.responses import ChatCompletion, Completion, Health, ModelCard, ModelList
from specinfer_jax.serving.openai.schema import error_responses, openapi, stream_response
from specinfer_jax.serving.openai.settings import ServerSettings
from specinfer_jax.serving.openai.state import ServerState
from specinfer_jax.serving.openai.streaming import EventStream, EventWriter

_GENERATION_ERRORS = error_responses(400, 401, 404, 408, 413, 415, 429, 500, 503)
_KEY = HTTPBearer(auto_error=False, description="One of the server's API keys, if it has any.")
v1 = APIRouter(prefix="/v1", dependencies=[Depends(_KEY)])
"""The key is checked by `ApiKeys`; here it is described."""
probes = APIRouter()


def _state(http: Request) -> ServerState:
    return http.app.state.serving


State = Annotated[ServerState, Depends(_state)]


def create_app(engine: AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """The application; `app.state.serving` is its `ServerState`. At its end the engine is drained."""
    settings = settings or ServerSettings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.drain(settings.drain_timeout)

    app = FastAPI(
        title="specinfer_jax", version=specinfer_jax.__version__, lifespan=lifespan, redoc_url=None,
        description="An LLM that decodes through token trees, behind OpenAI's API.",
    )  # fmt: skip
    app.state.serving = state = ServerState(engine, settings)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    app.include_router(v1)
    app.include_router(probes)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    for kind in (ApiError, SpecInferError, ServingError):
        app.add_exception_handler(kind, on_api_error)
    # The last is the outermost.
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, seconds=settings.body_timeout)
    app.add_middleware(ApiKeys, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )  # fmt: skip
    app.add_middleware(RequestContext, state=state)
    return app


@v1.post(
    "/chat/completions", response_model=ChatCompletion,
    responses={**_GENERATION_ERRORS, **stream_response("ChatCompletionChunk")},
)  # fmt: skip
async def create_chat_completion(http: Request, body: ChatCompletionRequest) -> Response:
    """Answer a chat."""
    return await _answer(http, body, ChatEndpoint)


@v1.post(
    "/completions", response_model=Completion, responses={**_GENERATION_ERRORS, **stream_response("Completion")}
)  # fmt: skip
async def create_completion(http: Request, body: CompletionRequest) -> Response:
    """Continue texts."""
    return await _answer(http, body, CompletionEndpoint)


async def _answer(http: Request, body: Any, kind: type[ChatEndpoint] | type[CompletionEndpoint]) -> Response:
    state: ServerState = http.app.state.serving
    state.check_can_serve()
    state.model_name(body.model)
    _log_prompt(http, body)
    endpoint: Any = await kind.open(http, body)
    call = endpoint.call
    pieces = call.start()
    is_handed_over = False
    try:
        if call.is_streamed:
            # Only now is it known that nothing is wrong with the request, and a status can be given.
            first = call.take(await while_connected(http.receive, pieces.first()))
            writer = EventWriter(call, endpoint.events, endpoint.usage_event)
            is_handed_over = True
            return EventStream(call, pieces, first, writer)
        answers = await while_connected(http.receive, call.collect(pieces))
        call.finish()
        return Response(endpoint.whole(answers).model_dump_json(), media_type="application/json")
    except Exception as error:
        raise call.error(error) from error
    finally:
        if not is_handed_over:
            await pieces.aclose()


def _log_prompt(http: Request, body: GenerationRequest) -> None:
    line = fields_of(http)
    if body.request_id is not None and "x-request-id" not in http.headers:
        line["request_id"] = body.request_id
    if http.app.state.serving.settings.log_prompts:
        line["prompt"] = body.model_dump(include={"messages", "prompt"}, exclude_unset=True)


@v1.get("/models", responses=error_responses(401))
async def list_models(state: State) -> ModelList:
    """The names that requests may use."""
    return ModelList(data=[_card(state, name) for name in state.model_names])


@v1.get("/models/{model:path}", responses=error_responses(401, 404))
async def retrieve_model(model: str, state: State) -> ModelCard:
    """One of them."""
    if model not in state.model_names:
        raise model_not_found(model)
    return _card(state, model)


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=state.created, owned_by="specinfer_jax", max_model_len=state.engine.max_model_len
    )  # fmt: skip


@probes.get("/health", responses={503: {"model": Health, "description": "Restart it: the engine cannot go on."}})
async def health(state: State) -> JSONResponse:
    """Whether the engine lives."""
    status = state.status()
    return JSONResponse({"status": status}, 503 if status == "dead" else 200)


@probes.get("/ready", responses={503: {"model": Health, "description": "Send requests elsewhere."}})
async def ready(state: State) -> JSONResponse:
    """Whether requests are taken."""
    status = state.status()
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@probes.get(
    "/metrics", response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus's format."}},
)  # fmt: skip
async def metrics(http: Request, state: State) -> Response:
    """Figures of engine and server."""
    text, content_type = state.metrics.render(http.headers.get("accept", ""))
    return Response(text, media_type=None, headers={"content-type": content_type})
