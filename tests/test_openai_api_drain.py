"""The end of a server: SIGTERM and SIGINT, on a process of its own."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from fake_async_llm import ANSWER

TEXT = "/v1/completions"


def wait_for(condition: Any, *, within: float = 10.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Process:
    """A server in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        script = Path(__file__).with_name("fake_async_llm.py")
        own = [str(script.parent.parent), str(script.parent)]
        paths = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert self.process.stderr is not None
        first = json.loads(self.process.stderr.readline())
        assert first["event"] == "serving" and first["needs_key"] is True
        self.url = f"http://127.0.0.1:{first['port']}"
        self.key = {"authorization": "Bearer secret"}
        wait_for(lambda: self._answers())

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> tuple[int, list[dict]]:
        """Exit code and log lines."""
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, [json.loads(line) for line in errors.splitlines()]


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[Process]:
    running = Process(*arguments)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        assert running.process.stderr is not None
        running.process.stderr.close()


async def _ask(client: httpx.AsyncClient, stream: bool) -> str:
    response = await client.post(TEXT, json={"prompt": "x", "max_tokens": 16, "stream": stream})
    assert response.status_code == 200
    if not stream:
        return response.json()["choices"][0]["text"]
    events = [line for line in response.text.split("\n\n") if line.startswith("data: {")]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)


def test_sigterm_finishes_what_was_accepted() -> None:
    async def load(server: Process) -> tuple[list[str], list[int]]:
        async with httpx.AsyncClient(base_url=server.url, headers=server.key, timeout=20) as client:
            asking = [asyncio.create_task(_ask(client, stream=bool(i % 2))) for i in range(20)]
            await asyncio.sleep(0.4)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            late = [
                (await client.post(TEXT, json={"prompt": "x"})).status_code,
                (await client.get("/ready")).status_code,
                (await client.get("/health")).status_code,
            ]
            return await asyncio.gather(*asking), late

    with process("--delay", "0.15") as server:
        texts, late = asyncio.run(load(server))
        assert len(texts) == 20 and len(set(texts)) == 1 and texts[0] and ANSWER.startswith(texts[0])
        assert late == [503, 503, 200]
        code, lines = server.end()
    assert code == 0
    events = [line["event"] for line in lines]
    assert events.count("draining") == 1 and lines[-1]["event"] == "ended" and lines[-1]["all_answered"] is True
    assert [line["status"] for line in lines if line["event"] == "request"].count(200) == 20


def test_sigterm_of_an_idle_server() -> None:
    with process() as server:
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code, _ = server.end()
        assert code == 0 and time.monotonic() - began < 5


def test_a_drain_that_takes_too_long_cuts_off() -> None:
    with process("--delay", "1", "--drain", "0.3") as server:
        answers: list[Any] = []

        def ask() -> None:
            body = {"prompt": "x", "max_tokens": 200, "stream": True}
            answers.append(httpx.post(f"{server.url}{TEXT}", json=body, headers=server.key, timeout=20))

        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(1.3)
        server.process.send_signal(signal.SIGTERM)
        thread.join(10)
        code, lines = server.end()
    assert code == 1 and lines[-1]["all_answered"] is False
    assert '"code": "cancelled"' in answers[0].text and answers[0].text.endswith("data: [DONE]\n\n")


def test_a_second_signal_ends_at_once() -> None:
    with process("--delay", "30") as server:
        thread = threading.Thread(target=_ask_in_vain, args=(server,))
        thread.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        code, lines = server.end()
        thread.join(5)
    assert code == 1 and [line["event"] for line in lines if "signal" in line] == ["draining", "forced_exit"]


def _ask_in_vain(server: Process) -> None:
    with contextlib.suppress(httpx.TransportError):
        httpx.post(f"{server.url}{TEXT}", json={"prompt": "x"}, headers=server.key, timeout=20)
