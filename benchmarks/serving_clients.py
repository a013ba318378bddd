"""Many clients against `specinfer serve` for a while: lost and wrong answers, memory, SIGTERM, `kill -9` and restart.

python -m benchmarks.serving_clients --prompts FILE.jsonl --clients 64 --minutes 10

Every client asks one question after the other, streamed or not, and now and then goes away in the midst of an answer.
Answers are greedy, and each one that ends must be the text that `LLM` gave alone, decoding incrementally. Then, under
load again: SIGTERM (what was accepted must end well, and the process with 0), and `kill -9` with a restart (seconds to
the first /ready and to the first answer). Ends with 1 if something is not as it should be. Linux only (/proc).
"""

import argparse
import asyncio
import contextlib
import functools
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import describe_machine
from specinfer_jax.config import DEFAULT_MODEL, Speculation
from specinfer_jax.llm import LLM
from specinfer_jax.prompts import read_prompts
from specinfer_jax.sampling_params import SamplingParams

PHASES = ("load", "sigterm", "restart")
MOST_GROWTH = 0.02
"""Of the server's memory, from the end of the first minute to the last."""
MOST_RESTART = 20.0
"""Seconds from `kill -9` to the next answer."""
_LEAVES = 0.25
"""Share of requests whose client goes away."""
_CHAT = "/v1/chat/completions"

Question = tuple[str, str]
"""(prompt, right answer)."""


class Server:
    """`specinfer serve` as a process; stderr is read by a thread."""

    def __init__(self, model: str, *options: str) -> None:
        self.began = time.monotonic()
        command = [sys.executable, "-m", "specinfer_jax.cli", "serve", model, "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, Any]] = []
        """Log lines, those of single requests apart."""
        self._port: int | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"event": "text", "text": line.rstrip()}
            if event["event"] == "serving":
                self._port = event["port"]
            if event["event"] != "request":
                self.events.append(event)

    def wait_until_ready(self, seconds: float = 300) -> float:
        """Seconds from the start of the process until /ready says yes."""
        while True:
            if self.process.poll() is not None or time.monotonic() - self.began > seconds:
                raise SystemExit(f"error: the server did not start: {self.events[-3:]}")
            with contextlib.suppress(httpx.TransportError):
                if self._port and httpx.get(f"{self.url}/ready").status_code == 200:
                    return time.monotonic() - self.began
            time.sleep(0.02)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._port}"

    def memory(self) -> int:
        """Resident bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return 1024 * int(text.partition("VmRSS:")[2].split()[0])

    def in_flight(self) -> int:
        """Requests under way, as /metrics has them, itself left out."""
        found = re.search(r"^specinfer_requests_in_flight\S* (\S+)", httpx.get(f"{self.url}/metrics").text, re.M)
        return int(float(found[1])) - 1 if found else 0

    def end(self, number: signal.Signals) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=300)
        self._reader.join(5)
        return code


class Tally:
    """What became of all requests."""

    def __init__(self) -> None:
        self.right = self.left = 0
        self.wrong: list[dict[str, str]] = []
        self.lost: list[str] = []

    def count(self, question: Question, text: str | None) -> None:
        """None: the client went away."""
        if text is None:
            self.left += 1
        elif text == question[1]:
            self.right += 1
        else:
            self.wrong.append({"prompt": question[0], "right": question[1], "got": text})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "right": self.right, "left": self.left, "wrong": len(self.wrong), "lost": len(self.lost),
            "examples": [*self.wrong[:3], *self.lost[:3]],
        }  # fmt: skip


async def ask(
    client: httpx.AsyncClient, question: Question, max_tokens: int, *, streams: bool, patience: float | None
) -> str | None:
    """The answer's text; None: patience (seconds) ended before it did, and the connection was cut."""
    body = {
        "messages": [{"role": "user", "content": question[0]}], "temperature": 0, "max_tokens": max_tokens,
        "stream": streams,
    }  # fmt: skip
    try:
        async with asyncio.timeout(patience):
            if not streams:
                answer = await client.post(_CHAT, json=body)
                answer.raise_for_status()
                return answer.json()["choices"][0]["message"]["content"]
            parts: list[str] = []
            async with client.stream("POST", _CHAT, json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise httpx.HTTPError(event["error"]["message"])
                        parts += [choice["delta"].get("content") or "" for choice in event["choices"]]
                    elif line == "data: [DONE]":
                        return "".join(parts)
            raise httpx.HTTPError("the stream ended without its last event")
    except TimeoutError:
        return None


async def one_client(
    url: str, questions: Sequence[Question], tally: Tally, *, number: int, max_tokens: int, until: float, leaves: float
) -> None:
    """Ask until the clock says so."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(300)) as client:
        while True:
            question, streams = rng.choice(questions), rng.random() < 0.5
            patience = rng.uniform(0.0, 12.0) if rng.random() < leaves else None
            try:
                text = await ask(client, question, max_tokens, streams=streams, patience=patience)
                tally.count(question, text)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                tally.lost.append(f"{type(error).__name__}: {error}")
            if time.monotonic() > until:
                return


async def load(server: Server, questions: Sequence[Question], options: argparse.Namespace) -> dict[str, Any]:
    """All clients for the given time; counts, and the server's memory."""
    tally, began = Tally(), time.monotonic()
    until = began + 60 * options.minutes
    memory: list[tuple[float, int]] = []

    async def watch() -> None:
        while True:
            memory.append((time.monotonic() - began, server.memory()))
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    await asyncio.gather(
        *(
            one_client(
                server.url, questions, tally, number=i, max_tokens=options.max_tokens, until=until, leaves=_LEAVES
            )
            for i in range(options.clients)
        )
    )
    watching.cancel()
    later = [bytes_ for seconds, bytes_ in memory if seconds >= min(60, 30 * options.minutes)]
    size = max(len(later) // 10, 1)
    first, last = sum(later[:size]) / size, sum(later[-size:]) / size
    return tally.as_dict() | {
        "seconds": time.monotonic() - began, "memory_mib": [round(b / 2**20) for _, b in memory[:: max(size, 1)]],
        "memory_growth": last / first - 1, "in_flight_at_the_end": server.in_flight(),
    }  # fmt: skip


async def full_house(server: Server, questions: Sequence[Question], options: argparse.Namespace, then: Any) -> Tally:
    """Every client asks once; `then` happens when the server has all of them."""
    tally = Tally()
    asking = asyncio.gather(
        *(
            one_client(server.url, questions, tally, number=i, max_tokens=options.max_tokens, until=0, leaves=0)
            for i in range(options.clients)
        )
    )
    while await asyncio.to_thread(server.in_flight) < options.clients:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(then)
    await asking
    return tally


def first_answer(server: Server, question: Question, max_tokens: int) -> tuple[float, bool]:
    """(seconds from the start of the process to the whole answer, whether it is right)."""

    async def run() -> str | None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await ask(client, question, max_tokens, streams=False, patience=None)

    text = asyncio.run(run())
    return time.monotonic() - server.began, text == question[1]


def answers_alone(model: str, prompts: Sequence[str], max_tokens: int) -> list[Question]:
    """Each prompt's greedy answer, decoded alone and without speculation."""
    llm = LLM(model, speculation=Speculation.off(), max_num_seqs=1, max_model_len=1024)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=max_tokens))
    return [(prompt, output.text) for prompt, output in zip(prompts, outputs, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it all, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=48)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--phases", type=lambda text: text.split(","), default=list(PHASES))
    parser.add_argument("--out", type=Path, default=Path("out/clients.json"))
    options = parser.parse_args(arguments)
    if unknown := set(options.phases) - set(PHASES):
        parser.error(f"phases are {', '.join(PHASES)}; got {', '.join(sorted(unknown))}")
    prompts = [entry.prompt for entry in read_prompts(options.prompts, limit=options.limit)]
    questions = answers_alone(options.model, prompts, options.max_tokens)
    settings = ("--max-num-seqs", str(options.slots), "--max-model-len", "1024")
    result: dict[str, Any] = {"machine": describe_machine(), "clients": options.clients, "slots": options.slots}
    server = Server(options.model, *settings)
    try:
        result["start_seconds"] = server.wait_until_ready()
        print(f"ready after {result['start_seconds']:.1f} s", flush=True)
        if "load" in options.phases:
            result["load"] = asyncio.run(load(server, questions, options))
            print(json.dumps(result["load"]), flush=True)
        if "sigterm" in options.phases:
            stop = functools.partial(server.process.send_signal, signal.SIGTERM)
            tally = asyncio.run(full_house(server, questions, options, stop))
            result["sigterm"] = tally.as_dict() | {"exit_code": server.process.wait(timeout=300)}
            print(json.dumps(result["sigterm"]), flush=True)
        if "restart" in options.phases:
            if server.process.poll() is not None:
                server = Server(options.model, *settings)
                server.wait_until_ready()
            asyncio.run(full_house(server, questions, options, functools.partial(server.end, signal.SIGKILL)))
            server = Server(options.model, *settings)
            ready = server.wait_until_ready()
            answered, is_right = first_answer(server, questions[0], options.max_tokens)
            result["restart"] = {"ready_seconds": ready, "answer_seconds": answered, "is_right": is_right}
            print(json.dumps(result["restart"]), flush=True)
            server.end(signal.SIGTERM)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.process.kill()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if failed := failures(result):
        raise SystemExit("error: " + "; ".join(failed))


def failures(result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = []
    loaded, stopped, restarted = (result.get(phase) for phase in PHASES)
    for phase, figures in (("load", loaded), ("sigterm", stopped)):
        found += [f"{phase}: {figures[kind]} {kind}" for kind in ("wrong", "lost") if figures and figures[kind]]
    if loaded and loaded["memory_growth"] >= MOST_GROWTH:
        found.append(f"memory grew by {loaded['memory_growth']:.1%}")
    if loaded and loaded["in_flight_at_the_end"]:
        found.append(f"{loaded['in_flight_at_the_end']} requests are under way that nobody waits for")
    if stopped and (stopped["exit_code"] or stopped["right"] != result["clients"]):
        found.append("SIGTERM did not let every accepted request end")
    if restarted and not restarted["is_right"]:
        found.append("the first answer after kill -9 is wrong")
    if restarted and restarted["answer_seconds"] >= MOST_RESTART:
        found.append(f"the first answer after kill -9 came after {restarted['answer_seconds']:.1f} s")
    return found


if __name__ == "__main__":
    main()
