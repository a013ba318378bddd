"""The studies of a server under load: what they count is what clients saw, and what they call a failure is one."""

import argparse
import asyncio
import copy
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from fake_async_llm import ANSWER, FakeAsyncLLM, running_server
from tiny_model import TOKENIZER

from benchmarks import serving_clients
from benchmarks.serving_clients import Question, Server, Tally
from benchmarks.serving_gap import Arrivals
from specinfer_jax.serving.request import EngineRequest

ENGINE = FakeAsyncLLM()
QUESTION: Question = ("hi", ANSWER)
MOST = 200


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One that was not started by `Server`."""
    with running_server(ENGINE) as url:
        server = object.__new__(Server)
        server._port = urlsplit(url).port
        yield server


def asked(server: Server, questions: list[Question], **options: Any) -> Tally:
    tally = Tally()
    settings = {"number": 0, "max_tokens": MOST, "until": 0, "leaves": 0} | options
    asyncio.run(serving_clients.one_client(server.url, questions, tally, **settings))
    return tally


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "streamed"])
def test_answers_are_compared(server: Server, number: int) -> None:
    tally = asked(server, [QUESTION], number=number)
    assert (tally.right, tally.left, tally.wrong, tally.lost) == (1, 0, [], [])
    tally = asked(server, [("hi", "another answer")], number=number)
    assert tally.wrong == [{"prompt": "hi", "right": "another answer", "got": ANSWER}] and not tally.right


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "streamed"])
def test_what_fails_in_the_midst_is_lost(server: Server, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "fails_behind", 2)
    tally = asked(server, [QUESTION], number=number)
    assert len(tally.lost) == 1 and not tally.right and not tally.wrong


def test_clients_that_leave(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "delay", 30.0)
    for streams in (False, True):

        async def leave(streams: bool = streams) -> str | None:
            async with serving_clients.httpx.AsyncClient(base_url=server.url) as client:
                return await serving_clients.ask(client, QUESTION, MOST, streams=streams, patience=0.3)

        assert asyncio.run(leave()) is None
        assert ENGINE.settles()


def test_all_clients_at_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINE, "delay", 0.05)
    seen = []
    options = argparse.Namespace(clients=6, max_tokens=MOST)
    tally = asyncio.run(
        serving_clients.full_house(server, [QUESTION], options, lambda: seen.append(server.in_flight()))
    )
    assert seen == [6] and tally.right == 6


GOOD = {
    "clients": 2,
    "load": {"wrong": 0, "lost": 0, "memory_growth": 0.01, "in_flight_at_the_end": 0},
    "sigterm": {"wrong": 0, "lost": 0, "right": 2, "exit_code": 0},
    "restart": {"is_right": True, "answer_seconds": 12.0},
}


@pytest.mark.parametrize(
    ("phase", "name", "value"),
    [
        ("load", "wrong", 1), ("load", "lost", 1), ("load", "memory_growth", 0.02), ("load", "in_flight_at_the_end", 1),
        ("sigterm", "right", 1), ("sigterm", "exit_code", 1), ("restart", "is_right", False),
        ("restart", "answer_seconds", 20.0),
    ],
)  # fmt: skip
def test_what_is_a_failure(phase: str, name: str, value: Any) -> None:
    assert serving_clients.failures(GOOD) == []
    result = copy.deepcopy(GOOD)
    result[phase][name] = value
    assert len(serving_clients.failures(result)) == 1


def test_gaps_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    request = EngineRequest([1], 100, frozenset())
    arrivals = Arrivals(request, [request, request])
    first = arrivals.take(is_idle=True)
    assert first is not None and [index for index, _ in first.requests] == [0]
    clock = iter([1.0, 2.0, 2.5, 4.0, 5.0, 7.0, 9.0])
    monkeypatch.setattr("benchmarks.serving_gap.time.perf_counter", lambda: next(clock))
    arrivals.add(0, 23)  # at 1
    waiting = arrivals.take(is_idle=False)
    assert waiting is not None and not waiting.requests
    arrivals.add(0, 1)  # at 2
    others = arrivals.take(is_idle=False)  # at 2.5
    assert others is not None and [index for index, _ in others.requests] == [1, 2]
    for index in (0, 1, 0, 2):  # at 4, 5, 7, 9
        arrivals.add(index, 1)
    arrivals.times.append(10.0)
    arrivals.times.append(15.0)
    assert arrivals.gaps() == ([1.0], [2.0, 3.0, 3.0])
    assert arrivals.take(is_idle=True) is None


def test_the_fake_speaks_the_tokenizers_language() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(ANSWER)) == ANSWER
