"""`specinfer serve`: its options become the server's settings."""

import subprocess
import sys
from typing import Any

import pytest
from source_tree import ROOT
from typer.testing import CliRunner

from specinfer_jax import cli
from specinfer_jax.serving.openai import server
from specinfer_jax.serving.openai.settings import ServerSettings

RUNNER = CliRunner()
COMMAND = sys.modules["specinfer_jax.cli.serve"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run would have served."""
    seen: dict[str, Any] = {}

    def serve(engine: Any, settings: ServerSettings, bound: Any, *, log_level: str) -> int:
        bound.close()
        seen.update(config=engine, settings=settings, log_level=log_level)
        return 0

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(COMMAND, "open_model", lambda config: None)

    def build(config: Any, model: Any, **options: Any) -> Any:
        seen.update(options)
        return config

    monkeypatch.setattr(COMMAND, "_build_engine", build)
    return seen


def run(*arguments: str, **env: str) -> Any:
    return RUNNER.invoke(cli.app, ["serve", "--port", "0", *arguments], env=env)


def test_defaults(served: dict[str, Any]) -> None:
    assert run().exit_code == 0
    assert (
        served["settings"] == ServerSettings(model_names=("smollm2-135m-instruct",)) and served["log_level"] == "info"
    )
    assert served["config"].model == "smollm2-135m-instruct"
    assert (served["max_queue"], served["cache_tokens"]) == (1024, None)


def test_every_option(served: dict[str, Any]) -> None:
    result = run(
        "some/model", "--served-model-name", "a", "--served-model-name", "b", "--request-timeout", "0.5",
        "--drain-timeout", "0", "--log-prompts", "--log-level", "warning", "--api-key", "k1", "--api-key", "k2",
        "--max-body-mib", "0.5", "--allowed-origin", "*", "--max-tokens", "7", "--no-speculation", "--max-queue", "5",
        "--cache-tokens", "9000",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert served["settings"] == ServerSettings(
        model_names=("a", "b"), request_timeout=0.5, drain_timeout=0.0, log_prompts=True, api_keys=("k1", "k2"),
        max_body_bytes=2**19, allowed_origins=("*",), max_tokens=7,
    )  # fmt: skip
    assert served["log_level"] == "warning"
    assert (served["max_queue"], served["cache_tokens"]) == (5, 9000)
    assert (served["config"].model, served["config"].speculation.enabled) == ("some/model", False)


def test_keys_from_the_environment_and_no_time_limit(served: dict[str, Any]) -> None:
    assert run("--request-timeout", "0", SPECINFER_API_KEY="one two").exit_code == 0
    assert served["settings"].api_keys == ("one", "two") and served["settings"].request_timeout is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--log-level", "loud"], "log level must be debug, info, warning or error, got 'loud'"),
        (["--request-timeout", "-1"], "request_timeout must be above 0, got -1.0"),
        (["--api-key", "a b"], "an API key must consist of visible ASCII characters"),
        (["--host", "256.0.0.1"], "cannot serve on 256.0.0.1 port 0"),
    ],
    ids=str,
)
def test_what_cannot_be_done(served: dict[str, Any], arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and sentence in result.stderr
    assert not served


def test_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; sys.argv[1:] = ['serve']; import specinfer_jax.cli as c; c.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "error: serving needs fastapi: install specinfer-jax[server]\n"
