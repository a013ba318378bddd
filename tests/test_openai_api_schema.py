"""The OpenAPI schema says exactly what the server takes and answers; requests of every kind get no 5xx."""

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_async_llm import FakeAsyncLLM, running_server
from pydantic import ValidationError

from specinfer_jax.errors import SamplingError
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.async_protocol import AsyncEngine
from specinfer_jax.serving.openai.errors import BODY_CODES
from specinfer_jax.serving.openai.parameters import completion_params
from specinfer_jax.serving.openai.requests import UNSUPPORTED, ChatCompletionRequest, CompletionRequest
from specinfer_jax.serving.openai.settings import ServerSettings

ENGINE = FakeAsyncLLM(text="a short answer", size=4, takes_all=True)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_server(ENGINE, ServerSettings(api_keys=("secret",), max_body_bytes=200_000)) as url:
        yield url


@pytest.fixture(scope="module")
def schema(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/openapi.json").json()


def test_the_fake_is_an_engine() -> None:
    assert isinstance(ENGINE, AsyncEngine)


def test_addresses_and_statuses(schema: dict[str, Any]) -> None:
    paths = {f"{method} {path}" for path, methods in schema["paths"].items() for method in methods}
    assert paths == {
        "post /v1/chat/completions", "post /v1/completions", "get /v1/models", "get /v1/models/{model}", "get /health",
        "get /ready", "get /metrics",
    }  # fmt: skip
    for path in ("/v1/chat/completions", "/v1/completions"):
        responses = schema["paths"][path]["post"]["responses"]
        assert set(responses) == {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert schema["paths"][path]["post"]["security"]
    assert not {"HTTPValidationError", "ValidationError"} & set(schema["components"]["schemas"])


def test_every_field_of_a_request_is_described(schema: dict[str, Any]) -> None:
    for model in (ChatCompletionRequest, CompletionRequest):
        described = schema["components"]["schemas"][model.__name__]
        assert set(described["properties"]) == set(model.model_fields)
        assert described["additionalProperties"] is False
    assert {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields} >= UNSUPPORTED
    missing = {*SamplingParams.__dataclass_fields__} - {*CompletionRequest.model_fields}
    assert not missing, "each field of SamplingParams can be asked for"


VALUES = [
    -(2**63), -101, -2.5, -2, -1, 0, 0.0, 1e-9, 0.5, 1, 1.0, 2, 2.5, 20, 21, 128, 129, 2**31, 1e6, 1e9, 2**64 - 1,
    2**64, True, "1", [], [0], [2**70], [-1], ["a"], [""], {}, {"5": 1}, {"5": 101}, {"x": 1},
]  # fmt: skip


@pytest.mark.parametrize("name", sorted({*SamplingParams.__dataclass_fields__} - {"logprobs", "max_tokens"}))
def test_what_the_schema_takes_the_parameters_take(name: str) -> None:
    taken = 0
    for value in VALUES:
        try:
            request = CompletionRequest(prompt="x", max_tokens=2**31, **{name: value})
        except ValidationError:
            continue
        taken += 1
        try:
            completion_params(request, cap=None)
        except SamplingError as error:
            pytest.fail(f"{name}={value!r}: {error}")
    assert taken


def fuzz(url: str, *options: str) -> str:
    """Run schemathesis; what it says if it found something."""
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--header",
        "Authorization: Bearer secret", "--checks", "all", "--phases", "fuzzing", "--seed", "1",
        # Fields contradict each other, or the model: this is 400 for bodies that the schema allows.
        "--exclude-checks", "positive_data_acceptance", "--continue-on-failure", *options,
    ]  # fmt: skip
    environment = os.environ | {"NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    with tempfile.TemporaryDirectory() as folder:  # schemathesis leaves files behind
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900, cwd=folder)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert ENGINE.settles()
    return result.stdout


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Codes and fields of the requests that were refused."""
    lines = [getattr(record, "fields", {}) for record in caplog.records]
    return [f"{line['error']} {line.get('param')}" for line in lines if line.get("status") == 400]


def test_requests_of_every_kind(url: str) -> None:
    pytest.importorskip("schemathesis")
    asked = len(ENGINE.asked)
    fuzz(url, "--max-examples", "20")
    assert len(ENGINE.asked) > asked + 5


def test_bodies_that_fit_the_schema_are_not_refused_for_their_form(url: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("schemathesis")
    caplog.set_level("INFO", logger="specinfer_jax.server")
    fuzz(url, "--max-examples", "40", "--mode", "positive", "--include-method", "POST")
    assert not [reason for reason in refused(caplog) if reason.split()[0] in BODY_CODES]


@pytest.mark.slow
def test_requests_of_every_kind_for_five_minutes(url: str) -> None:
    pytest.importorskip("schemathesis")
    seed = str(random.randrange(2**32))
    print(fuzz(url, "--phases", "coverage,fuzzing,stateful", "--max-time", "300", "--seed", seed))
