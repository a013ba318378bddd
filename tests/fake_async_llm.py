"""An `AsyncEngine` without a model, and a server around it: in a thread, or as a process of its own.

The fake commits what a script says, step by step, and ends requests as the real engine does. Run as a program it serves
until SIGTERM: `python tests/fake_async_llm.py --delay 0.05 --drain 30`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import uvicorn
from fake_engine import FakeEngine
from tiny_model import TOKENIZER

from specinfer_jax.completion import Completion
from specinfer_jax.errors import PromptError, SamplingError
from specinfer_jax.outputs import StreamOutput
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import (
    Buckets,
    EngineDeadError,
    EngineSnapshot,
    QueueFullError,
    RequestCancelledError,
    RequestFailedError,
    RequestSpeculation,
    RequestTimeoutError,
)
from specinfer_jax.serving.openai.server import bind, serve
from specinfer_jax.serving.openai.settings import ServerSettings
from specinfer_jax.serving.openai_api import create_app
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.vocabulary import check_token_ids

ANSWER = "The answer is forty-two, as ever; ask again tomorrow."
LONG = " and on" * 2000
VOCAB_SIZE = TOKENIZER.vocab_size
HI = [{"role": "user", "content": "my secret question"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_CHANGED = (
    "text", "script", "size", "delay", "capacity", "fails_behind", "no_token_left", "forgets", "raises",
    "ready", "alive",
)  # fmt: skip


class Asked(NamedTuple):
    """What the fake was asked for."""

    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    timeout: float | None
    speculation: RequestSpeculation | None


@dataclasses.dataclass
class FakeAsyncLLM:
    """Answers with `text`, or with what `script` makes of a request; every attribute may change at any time."""

    text: str = ANSWER
    script: Callable[[EngineRequest], Sequence[int]] | None = None
    size: int = 2
    """Tokens of a step."""
    delay: float = 0.0
    """Seconds of a step."""
    capacity: int = 1000
    """Continuations under way."""
    fails_behind: int | None = None
    """Pieces before the step fails."""
    no_token_left: bool = False
    """Continuations end with "error" in their second step."""
    forgets: bool = False
    """The last piece of a continuation."""
    raises: Exception | None = None
    """What `generate` raises at once."""
    takes_all: bool = False
    """Many ids outside the vocabulary, and empty texts."""
    ready: bool = True
    alive: bool = True
    model_name: str = "fake"
    max_model_len: int = 20_000
    tokenizer: Any = TOKENIZER

    asked: list[Asked] = dataclasses.field(default_factory=list)
    messages: list[Any] = dataclasses.field(default_factory=list)
    active: int = 0
    finished: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self._stop = asyncio.Event()

    def is_ready(self) -> bool:
        return self.ready

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text) or [1] * self.takes_all
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        self.messages.append(messages)
        return self.tokenizer.encode_chat(messages, **options)

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, *, request_id: str, priority: int = 0,
        timeout: float | None = None, speculation: RequestSpeculation | None = None,
    ) -> AsyncIterator[StreamOutput]:  # fmt: skip
        self.asked.append(Asked(prompt_ids, params, request_id, priority, timeout, speculation))
        self._check(prompt_ids, params)
        deadline = None if timeout is None else time.monotonic() + timeout
        self.active += params.n
        try:
            async for output in self._steps(prompt_ids, params, deadline):
                yield output
            self.finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.active -= params.n

    def _check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if self.raises is not None:
            raise self.raises
        if not self.alive:
            raise EngineDeadError("dead")
        if self.active + params.n > self.capacity:
            raise QueueFullError("the queue is full: 1000 requests wait", retry_after=2.5)
        vocab_size = 2**30 if self.takes_all else VOCAB_SIZE
        if max(prompt_ids) >= vocab_size:
            raise PromptError(f"token id {max(prompt_ids)} lies outside the vocabulary of {vocab_size}")
        check_token_ids(params, vocab_size=vocab_size)
        if params.repetition_penalty == 1.23:
            raise SamplingError("repetition_penalty must not be 1.23 here")

    async def _steps(
        self, prompt_ids: list[int], params: SamplingParams, deadline: float | None
    ) -> AsyncIterator[StreamOutput]:
        end_ids = frozenset(params.stop_token_ids)
        room = self.max_model_len - len(prompt_ids)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        rest = dataclasses.replace(params, prompt_logprobs=None)
        jobs = []
        for sample in range(params.n):
            own = params if sample == 0 else rest
            done = Completion(self.tokenizer, own, prompt_ids=prompt_ids, end_ids=end_ids, index=sample)
            watch = done.watch if params.stop else None
            jobs.append((done, EngineRequest(prompt_ids, limit, end_ids, own, params.seed or 0, sample, (), watch)))
        script = self.script or (lambda request: self.tokenizer.encode(self.text))
        engine = FakeEngine(script, size=self.size, fails=lambda request: self.no_token_left)
        for number, progress in enumerate(engine.run([request for _, request in jobs])):
            await self._pause(deadline)
            if self.fails_behind is not None and number >= self.fails_behind:
                raise RequestFailedError("the device is on fire")
            output = jobs[progress.index][0].add(progress)
            if output.finish_reason is None or not self.forgets:
                yield output

    async def _pause(self, deadline: float | None) -> None:
        await asyncio.sleep(0)
        left = self.delay if deadline is None else min(self.delay, deadline - time.monotonic())
        with contextlib.suppress(TimeoutError):
            if left > 0:
                await asyncio.wait_for(self._stop.wait(), left)
        if self._stop.is_set():
            raise RequestCancelledError("given up at the end of the drain")
        if deadline is not None and time.monotonic() >= deadline:
            raise RequestTimeoutError("the request took too long")

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            is_alive=self.alive, queued=max(0, self.active - 8), running=min(self.active, 8), slots=8,
            pages_used=3 * self.active, pages_total=640, steps=7, step_seconds=Buckets((0.1, 0.5), (4, 2, 1), 2.25),
            prompt_tokens=11, generated_tokens=13, cancelled=self.cancelled,
            proposed_by_position=(5, 3), accepted_by_position=(4, 1),
            proposed_by_speculator={"ngram": 6, 'a "b"': 2}, accepted_by_speculator={"ngram": 5, 'a "b"': 0},
        )  # fmt: skip

    async def drain(self, timeout: float | None) -> None:
        end = time.monotonic() + (timeout or 0)
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.01)
        self._stop.set()

    def settles(self, *, within: float = 2.0) -> bool:
        """Whether nothing is under way any more, at the latest after some seconds."""
        end = time.monotonic() + within
        while self.active and time.monotonic() < end:
            time.sleep(0.005)
        return not self.active


@contextlib.contextmanager
def running_server(engine: FakeAsyncLLM, settings: ServerSettings | None = None) -> Iterator[str]:
    """A server in a thread, on a port of its own; gives its address without a path."""
    bound = bind("127.0.0.1", 0)
    app = create_app(engine, settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


class Client:
    """A server's client, and its engine."""

    def __init__(self, http: httpx.Client, engine: FakeAsyncLLM) -> None:
        self.http, self.engine = http, engine

    def chat(self, messages: Any = HI, **fields: Any) -> httpx.Response:
        return self.http.post(CHAT, json={"messages": messages, **fields})

    def complete(self, prompt: Any = "one", **fields: Any) -> httpx.Response:
        return self.http.post(TEXT, json={"prompt": prompt, **fields})

    def events(self, path: str = CHAT, **fields: Any) -> list[dict]:
        """The events of a stream without the [DONE] that must be the last."""
        start = {"messages": HI} if path == CHAT else {"prompt": "one"}
        response = self.http.post(path, json=start | {"stream": True} | fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def asked(self) -> SamplingParams:
        return self.engine.asked[-1].params


def error_of(response: httpx.Response) -> dict:
    """The error of a response; its shape is always the same."""
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "!")) or error["message"]
    return error


@contextlib.contextmanager
def serving_client(settings: ServerSettings | None = None, **fields: Any) -> Iterator[Client]:
    """A client of a server of its own, around a fake with these attributes."""
    engine = FakeAsyncLLM(**fields)
    with running_server(engine, settings) as url, httpx.Client(base_url=url) as http:
        yield Client(http, engine)


@contextlib.contextmanager
def as_made(client: Client) -> Iterator[None]:
    """Undoes what a test does to the engine's attributes."""
    before = {name: getattr(client.engine, name) for name in _CHANGED}
    yield
    assert client.engine.settles()
    vars(client.engine).update(before)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--drain", type=float, default=30.0)
    parser.add_argument("--log-prompts", action="store_true")
    arguments = parser.parse_args()
    engine = FakeAsyncLLM(delay=arguments.delay)
    settings = ServerSettings(drain_timeout=arguments.drain, log_prompts=arguments.log_prompts, api_keys=("secret",))
    return serve(engine, settings, bind("127.0.0.1", 0))


if __name__ == "__main__":
    sys.exit(main())
