"""Clients that go away, keys, limits, probes, figures, logs."""

import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fake_async_llm import ANSWER, CHAT, HI, LONG, TEXT, FakeAsyncLLM, running_server
from prometheus_client.parser import text_string_to_metric_families

from specinfer_jax.errors import ConfigError
from specinfer_jax.serving.openai.logs import JsonFormatter
from specinfer_jax.serving.openai.server import bind
from specinfer_jax.serving.openai.settings import ServerSettings


@contextlib.contextmanager
def serving(settings: ServerSettings | None = None, **fields: Any) -> Iterator[tuple[httpx.Client, FakeAsyncLLM]]:
    engine = FakeAsyncLLM(**fields)
    with running_server(engine, settings) as url, httpx.Client(base_url=url) as client:
        yield client, engine


def wait_for(condition: Any, *, within: float = 5.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def raw_request(client: httpx.Client, path: str, body: dict) -> socket.socket:
    """A request on a connection that the test can cut."""
    address = urlsplit(str(client.base_url))
    connection = socket.create_connection((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


# --- disconnects: case B073


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_before_the_first_token(path: str, stream: bool) -> None:
    with serving(text=LONG, delay=30) as (client, engine):
        body = {"messages": HI} if path == CHAT else {"prompt": ["a", "b"]}
        connection = raw_request(client, path, body | {"stream": stream, "n": 2})
        wait_for(lambda: engine.active == (2 if path == CHAT else 4))
        connection.close()
        began = time.monotonic()
        assert engine.settles(), "given up in the midst of a step of 30 s"
        assert time.monotonic() - began < 1 and engine.cancelled == (1 if path == CHAT else 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_in_the_midst(stream: bool) -> None:
    with serving(text=LONG, delay=0.01) as (client, engine):
        connection = raw_request(client, CHAT, {"messages": HI, "stream": stream, "max_tokens": 4000})
        if stream:
            assert b"200 OK" in connection.recv(200)
        deadline = time.monotonic() + 20
        while not engine.asked and time.monotonic() < deadline:
            time.sleep(0.01)
        connection.close()
        # The answer would take 40 s.
        assert engine.settles(within=10) and engine.cancelled == 1


def test_what_has_ended_is_not_given_up() -> None:
    with serving() as (client, engine):
        for stream in (False, True) * 10:
            connection = raw_request(client, CHAT, {"messages": HI, "stream": stream})
            received = b""
            while b"[DONE]" not in received and b'"usage"' not in received:
                received += connection.recv(65536)
            connection.close()  # just at the end
        assert engine.settles() and (engine.finished, engine.cancelled) == (20, 0)
        assert client.post(CHAT, json={"messages": HI}).status_code == 200


def test_the_others_do_not_notice() -> None:
    """20 clients, every other one leaves; those that stay get all of their answer."""
    with serving(text=LONG, delay=0.002) as (client, engine):

        def stay(results: list[str]) -> None:
            response = httpx.post(f"{client.base_url}{TEXT}", json={"prompt": "x", "max_tokens": 60}, timeout=20)
            results.append(response.json()["choices"][0]["text"])

        results: list[str] = []
        threads = [threading.Thread(target=stay, args=(results,)) for _ in range(10)]
        for thread in threads:
            thread.start()
            raw_request(client, TEXT, {"prompt": "x", "stream": True, "max_tokens": 2000}).close()
        for thread in threads:
            thread.join(20)
        assert len(results) == 10 and len(set(results)) == 1
        assert engine.settles() and engine.finished == 10


def test_a_body_that_never_comes_is_given_up() -> None:
    with serving(ServerSettings(body_timeout=0.2)) as (client, _):
        address = urlsplit(str(client.base_url))
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            connection.settimeout(5)
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")


# --- limits and keys


def test_bodies_have_a_limit() -> None:
    with serving(ServerSettings(max_body_bytes=1000)) as (client, engine):
        declared = client.post(TEXT, json={"prompt": "x" * 5_000_000})
        chunked = client.post(
            TEXT, content=(b"x" * 600 for _ in range(50)), headers={"content-type": "application/json"}
        )  # fmt: skip
        for response in (declared, chunked):
            assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
        assert client.post(TEXT, json={"prompt": "x" * 900}).status_code == 200
        assert len(engine.asked) == 1


def test_requests_have_a_time_limit() -> None:
    with serving(ServerSettings(request_timeout=0.3), text=LONG, delay=0.05) as (client, engine):
        response = client.post(CHAT, json={"messages": HI})
        assert response.status_code == 408 and response.json()["error"]["type"] == "timeout_error"
        streamed = client.post(CHAT, json={"messages": HI, "stream": True}).text
        assert '"code": "timeout"' in streamed and streamed.endswith("data: [DONE]\n\n")
        assert client.post(CHAT, json={"messages": HI, "timeout": 0.1}).status_code == 408
        assert engine.asked[-1].timeout == 0.1 and engine.settles()


def test_answers_have_a_limit() -> None:
    with serving(ServerSettings(max_tokens=5, model_names=("a/b", "alias"))) as (client, engine):
        assert client.post(CHAT, json={"messages": HI}).json()["usage"]["completion_tokens"] == 5
        assert client.post(CHAT, json={"messages": HI, "max_tokens": 9}).json()["model"] == "a/b"
        assert engine.asked[-1].params.max_tokens == 5
        assert client.post(TEXT, json={"prompt": "x", "max_tokens": 2, "model": "alias"}).json()["model"] == "alias"
        assert engine.asked[-1].params.max_tokens == 2
        assert client.get("/v1/models/a/b").json()["id"] == "a/b"


def test_keys() -> None:
    with serving(ServerSettings(api_keys=("one", "two"))) as (client, _):
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/v1/nothing", "/nothing", "//v1/models", "/v1/../v1/models"):
            assert client.get(path).status_code == 401
        for header in ("Bearer one", "bearer two", "Bearer  two"):
            assert client.get("/v1/models", headers={"authorization": header}).status_code == 200
        for header in ("one", "Basic one", "Bearer", "Bearer on", "Bearer one two", "Bearer onetwo"):
            response = client.get("/v1/models", headers={"authorization": header})
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/models", headers={"authorization": b"Bearer \xff\xfe"}).status_code == 401
        assert client.post(CHAT, content=b"{").status_code == 401, "before the body is looked at"


def test_pages_of_other_origins() -> None:
    with serving(ServerSettings(api_keys=("one",), allowed_origins=("https://a.example",))) as (client, _):
        asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = client.options(CHAT, headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert client.options(CHAT, headers=asks | {"origin": "https://b.example"}).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [{"api_keys": ("",)}, {"api_keys": ("a b",)}, {"api_keys": ("ä",)}, {"max_tokens": 0}, {"body_timeout": -1.0}],
    ids=str,
)
def test_settings_that_cannot_be(fields: dict) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**fields)
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


def test_a_port_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot serve on 127\.0\.0\.1 port"):
            bind("127.0.0.1", taken.getsockname()[1])


# --- probes and figures


def test_probes() -> None:
    with serving() as (client, engine):
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]
        engine.ready = False
        assert client.get("/health").json() == {"status": "loading"}
        assert client.get("/ready").status_code == 503
        response = client.post(CHAT, json={"messages": HI})
        assert response.status_code == 503 and response.headers["retry-after"] == "2"
        engine.ready, engine.alive = True, False
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        assert client.post(CHAT, json={"messages": HI}).json()["error"]["code"] == "engine_dead"


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value of everything a scrape shows."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics() -> None:
    with serving() as (client, engine):
        client.post(CHAT, json={"messages": HI})
        client.post(CHAT, json={"messages": HI, "stream": True, "n": 2})
        client.post(CHAT, json={"messages": []})
        response = client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        shown = samples(response.text)
        expected = {
            ("specinfer_queue_length", ""): 0, ("specinfer_pages_used", ""): 0, ("specinfer_pages", ""): 640,
            ("specinfer_steps_total", ""): 7, ("specinfer_step_seconds_bucket", "0.1"): 4,
            ("specinfer_step_seconds_bucket", "0.5"): 6, ("specinfer_step_seconds_bucket", "+Inf"): 7,
            ("specinfer_step_seconds_sum", ""): 2.25, ("specinfer_step_seconds_count", ""): 7,
            ("specinfer_proposed_by_position_total", "1"): 5, ("specinfer_accepted_by_position_total", "2"): 1,
            ("specinfer_proposed_by_speculator_total", "ngram"): 6,
            ("specinfer_accepted_by_speculator_total", 'a "b"'): 0,
            ("specinfer_generated_tokens_total", ""): 13, ("specinfer_requests_total", f"{CHAT},200"): 2,
            ("specinfer_requests_total", f"{CHAT},400"): 1, ("specinfer_time_to_first_token_seconds_count", ""): 3,
            ("specinfer_tokens_per_step_count", ""): 2, ("specinfer_tokens_per_step_sum", ""): 4,
            ("specinfer_requests_in_flight", ""): 1,
        }  # fmt: skip
        assert {key: shown[key] for key in expected} == expected
        count = client.post(CHAT, json={"messages": HI}).json()["usage"]["completion_tokens"]
        assert shown[("specinfer_time_between_tokens_seconds_count", "")] == 3 * (count - engine.size)
        assert shown[("process_resident_memory_bytes", "")] > 0
        newer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert newer.headers["content-type"].startswith("application/openmetrics-text")
        assert newer.text.endswith("# EOF\n")


# --- logs


def lines_of(caplog: pytest.LogCaptureFixture, event: str = "request") -> list[dict]:
    formatter = JsonFormatter()
    lines = [json.loads(formatter.format(record)) for record in caplog.records]
    return [line for line in lines if line["event"] == event]


@pytest.fixture
def info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="specinfer_jax.server")
    return caplog


def test_a_line_for_every_request_and_no_text(info: pytest.LogCaptureFixture) -> None:
    with serving(ServerSettings(api_keys=("key-of-a-user",))) as (client, engine):
        client.headers["authorization"] = "Bearer key-of-a-user"
        response = client.post(CHAT, json={"messages": HI, "n": 2}, headers={"x-request-id": "mine-1"})
        assert response.headers["x-request-id"] == "mine-1"
        client.post(CHAT, json={"messages": HI, "stream": True}, headers={"x-request-id": 'no good "id"'})
        client.post(CHAT, json={"messages": HI, "max_token": 1, "request_id": "mine-2"})
        client.get("/ready")
        engine.raises = KeyError("the device")
        client.post(CHAT, json={"messages": HI})
        wait_for(lambda: len(lines_of(info)) == 4)
    first, streamed, refused, failed = lines_of(info)
    assert first | {"time": 0, "id": 0, "seconds": 0} == {
        "time": 0, "level": "info", "event": "request", "request_id": "mine-1", "method": "POST", "path": CHAT, "id": 0,
        "model": "fake", "stream": False, "n": 2, "prompts": 1, "prompt_tokens": len(engine.asked[0].prompt_ids),
        "completion_tokens": 2 * len(engine.encode(ANSWER)), "finish_reasons": ["length"], "steps": 2,
        "tokens_per_step": 2.0, "status": 200, "seconds": 0,
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert re.fullmatch("[0-9a-f]{32}", streamed["request_id"]) and streamed["completion_tokens"] > 5
    assert (refused["status"], refused["error"], refused["param"]) == (400, "unknown_parameter", "max_token")
    assert (failed["status"], failed["error"]) == (500, "internal_error")
    (unexpected,) = lines_of(info, "unexpected_error")
    assert "KeyError" in unexpected["traceback"] and "the device" in unexpected["traceback"]
    everything = "".join(JsonFormatter().format(record) for record in info.records)
    assert "secret question" not in everything and ANSWER not in everything and "key-of-a-user" not in everything


def test_prompts_are_logged_where_the_operator_wants_it(info: pytest.LogCaptureFixture) -> None:
    with serving(ServerSettings(log_prompts=True)) as (client, _):
        client.post(CHAT, json={"messages": HI})
        client.post(TEXT, json={"prompt": "once", "request_id": "mine-3"})
        wait_for(lambda: len(lines_of(info)) == 2)
    chat, text = lines_of(info)
    assert chat["prompt"] == {"messages": HI} and text["prompt"] == {"prompt": "once"}
    assert text["request_id"] == "mine-3"
