"""The command line: results on stdout, figures on stderr, one sentence and exit code 2 for what cannot be done."""

import dataclasses
import json
import signal
import sys
import threading
from pathlib import Path

import pytest
from fake_engine import STATS
from tiny_model import TOKENIZER, write_folder
from typer.testing import CliRunner

import specinfer_jax
from specinfer_jax import cli
from specinfer_jax.cli import screen
from specinfer_jax.config import SamplingParams
from specinfer_jax.errors import ConfigError
from specinfer_jax.outputs import CompletionOutput, Logprob, RequestOutput

RUNNER = CliRunner()
"""Also says that stdin, stdout and stderr are no terminals."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def settings(folder: Path) -> Path:
    """The tiny model without speculation, which compiles fast."""
    file = folder.parent / "tiny.toml"
    file.write_text(f'model = "{folder}"\n[speculation]\nenabled = false\n[sampling]\nmax_tokens = 6\n')
    return file


@pytest.fixture(scope="module")
def compiled() -> dict:
    return {}


@pytest.fixture(autouse=True)
def compile_once(monkeypatch: pytest.MonkeyPatch, compiled: dict) -> None:
    """Commands that differ in their sampling alone share an LLM."""

    def build_llm(config, model):
        key = dataclasses.replace(config, sampling=SamplingParams())
        if key not in compiled:
            compiled[key] = screen.build_llm(config, model)
        return compiled[key]

    for name in ("generate", "chat"):
        monkeypatch.setattr(module(name), "build_llm", build_llm)


def module(command: str):
    """`specinfer_jax.cli.generate` is the command; this is the module of that name."""
    return sys.modules[f"specinfer_jax.cli.{command}"]


def run(*arguments: object, stdin: str = ""):
    return RUNNER.invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def test_version_and_help() -> None:
    assert run("--version").stdout == f"specinfer {specinfer_jax.__version__}\n"
    for command in ("generate", "chat", "serve", "bench", "tree", "info", "pull", "convert"):
        result = run(command, "--help")
        assert result.exit_code == 0
        assert "Example: " in result.stdout
        assert ("--config" in result.stdout) and ("--no-speculation" in result.stdout) == (
            command in ("generate", "chat", "serve", "bench", "tree")
        )


def test_generate_prints_the_text_and_nothing_else_on_stdout(settings: Path) -> None:
    result = run("generate", "one two", "-c", settings)
    assert result.exit_code == 0, result.stderr
    as_json = json.loads(run("generate", "one two", "-c", settings, "--json").stdout)
    assert result.stdout == as_json["text"] + "\n"
    assert len(as_json["token_ids"]) == 6 == as_json["stats"]["tokens"]
    assert as_json["text"] == TOKENIZER.decode(as_json["token_ids"])
    assert as_json["stats"]["tokens_per_step"] == 1.0
    assert result.stderr.startswith("6 tokens in 6 steps · 1.00 tokens per step · ")
    assert "\x1b" not in result.stdout + result.stderr


def test_prompts_come_from_arguments_stdin_and_files(settings: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "three"}\n\n{"prompt": "", "id": 7}\n')
    result = run("generate", "one", "-", "--prompts", file, "-c", settings, "-n", 3, "--json", stdin="two\n")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two\n", "three", ""]
    assert [line["finish_reason"] for line in lines] == ["length", "length", "length", "error"]  # case B052
    assert result.exit_code == 2
    assert result.stderr.endswith("error: prompt 4: the prompt is empty; give at least one token\n")
    # The refused one has no figures, the others and their sum do.
    rows = [line.split() for line in result.stderr.splitlines()]
    assert ["4", "-", "-", "-", "-", "-", "-"] in rows
    assert next(row for row in rows if row[:1] == ["all"])[1] == "9"


def test_chat_template_of_generate(settings: Path) -> None:
    wrapped = json.loads(run("generate", "hi", "--chat", "-c", settings, "--json").stdout)
    text = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])
    plain = json.loads(run("generate", text, "-c", settings, "--json").stdout)
    assert wrapped["token_ids"] == plain["token_ids"]


def test_options_override_files_and_later_files_earlier_ones(settings: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.toml"
    later.write_text("[sampling]\nmax_tokens = 4\n")

    def stats(*arguments: object) -> dict:
        return json.loads(run("generate", "a", "--json", "-c", settings, *arguments).stdout)["stats"]

    assert stats()["tokens"] == 6
    both = stats("-c", later)
    assert both["tokens"] == 4
    assert both["steps_by_rows"] == {"1": 4}  # no speculation: of the first file, which the second does not touch
    assert stats("-c", later, "-n", 2)["tokens"] == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate"], "nothing to continue: give a PROMPT, or --prompts FILE.jsonl"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
        (["generate", "x", "--top-p", "0"], "top_p must be a finite number above 0 and at most 1, got 0.0"),
        (["generate", "x", "--n", "2"], "n must be 1 at temperature 0, which is greedy"),
        (["generate", "x", "--stop", ""], "stop must hold strings of at least one character, got ''"),
        (["generate", "x", "-n", "0"], "max_tokens must be a whole number of at least 1, got 0"),
        (["generate", "x", "-m", "no-such-model"], "unknown model 'no-such-model'; known names are smollm2"),
        (["generate", "x", "-c", "no-such.toml"], "cannot read no-such.toml: No such file or directory"),
        (["generate", "--prompts", "no-such.jsonl"], "cannot read no-such.jsonl: No such file or directory"),
        (["generate", "x", "-m", "FOLDER", "--max-model-len", "129"], "max_model_len 129 exceeds the model's 128"),
        (["generate", "x", "-m", "FOLDER", "--tree", "1,1"], "a tree of children per level needs an SSM"),
        (["generate", "x", "-m", "FOLDER", "--ssm", "FOLDER", "--tree", "1;1"], 'tree "1;1" is not a vector'),
        (["generate", "x", "-m", "FOLDER", "--ssm", "FOLDER", "--tree", "9,9,9"], "tree <9,9,9> has 819 nodes"),
        (["generate", "x", "--children", "top_k", "--verification", "mss"], "would change the LLM's distribution"),
        (["generate", "x", "--verification", "typical"], "verification must be one of greedy, naive, mss"),
        (["tree", "", "-m", "FOLDER"], "the prompt has 0 tokens; it must have at least 1"),
        (["tree", "x", "--svg", "no-such-folder/x.svg"], "cannot write no-such-folder/x.svg: there is no such folder"),
        (["bench", "--no-speculation", "-m", "FOLDER"], "the benchmark compares with speculation"),
        (["bench", "--json", "/"], "cannot write /: it is a folder"),
        (["convert", "FOLDER", "FOLDER"], "exists already; name a new folder"),
        (["info", "no-such-model"], "unknown model 'no-such-model'; known names are smollm2-135m-instruct"),
        (["pull", "./nowhere.gguf"], "there is no file or folder nowhere.gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_sentence(folder: Path, arguments: list[str], sentence: str) -> None:
    result = run(*(str(folder) if argument == "FOLDER" else argument for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1


OPTIONS = {
    "--temperature": ("0.8", {"temperature": 0.8}), "--top-k": ("5", {"top_k": 5}), "--top-p": ("0.9", {"top_p": 0.9}),
    "--min-p": ("0.1", {"min_p": 0.1}), "--repetition-penalty": ("1.1", {"repetition_penalty": 1.1}),
    "--presence-penalty": ("-1", {"presence_penalty": -1}), "--frequency-penalty": ("2", {"frequency_penalty": 2}),
    "--seed": ("7", {"seed": 7}), "--stop": ("\n", {"stop": ["\n"]}), "--max-tokens": ("9", {"max_tokens": 9}),
}  # fmt: skip


def _record_sampling(monkeypatch: pytest.MonkeyPatch, answer) -> list[SamplingParams]:
    """The parameters that `generate` hands to the LLM, which answers with the outputs of `answer(params)`."""
    seen: list[SamplingParams] = []

    class Recorder:
        def generate(self, texts, params):
            seen.append(params)
            return [RequestOutput(str(i), text, [1], answer(params), STATS) for i, text in enumerate(texts)]

    monkeypatch.setattr(module("generate"), "open_model", lambda config: None)
    monkeypatch.setattr(module("generate"), "build_llm", lambda config, model: Recorder())
    return seen


def test_decoding_is_greedy_by_default_and_every_option_reaches_the_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _record_sampling(monkeypatch, lambda params: [CompletionOutput(0, "", [], "length")])
    greedy = SamplingParams(temperature=0, max_tokens=128)
    assert run("generate", "x").exit_code == 0
    assert seen.pop() == greedy
    everything = {}
    for option, (value, setting) in OPTIONS.items():
        assert run("generate", "x", option, value).exit_code == 0
        assert seen.pop() == dataclasses.replace(greedy, **setting)
        everything |= setting
    arguments = [part for option, (value, _) in OPTIONS.items() for part in (option, value)]
    run("generate", "x", *arguments, "--stop", "b", "--n", 3, "--logprobs", 2)
    assert seen == [SamplingParams(**everything | {"stop": ["\n", "b"], "n": 3, "logprobs": 2})]
    for command in ("generate", "chat"):
        text = run(command, "--help").stdout
        assert all(option in text for option in OPTIONS)
        assert "[default: 0]" in text
    assert "--temperature" not in run("tree", "--help").stdout  # it shows greedy steps
    assert "--top-p" not in run("bench", "--help").stdout


def test_several_answers_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(params: SamplingParams) -> list[CompletionOutput]:
        logprobs = [{4: Logprob(-0.5, 1, "a")}]
        answers = [CompletionOutput(k, f"text {k}", [4], "stop", "x", logprobs, -0.5) for k in range(params.n)]
        return [*answers[:-1], dataclasses.replace(answers[-1], finish_reason="error")] if params.n == 3 else answers

    _record_sampling(monkeypatch, answer)
    several = ("--n", 2, "--temperature", 1)
    assert run("generate", "p", *several).stdout == "=== answer 1 ===\ntext 0\n\n=== answer 2 ===\ntext 1\n"
    assert run("generate", "p", "q").stdout == "=== 1 ===\ntext 0\n\n=== 2 ===\ntext 0\n"
    assert run("generate", "p", "q", *several).stdout.startswith("=== 1, answer 1 ===\ntext 0\n\n=== 1, answer 2 ===")
    assert "answer 3" not in run("generate", "p", "--n", 3, "--temperature", 1).stdout  # it failed
    as_json = json.loads(run("generate", "p", *several, "--json").stdout)
    assert (as_json["text"], as_json["token_ids"], as_json["finish_reason"]) == ("text 0", [4], "stop")
    assert [(entry["index"], entry["text"], entry["stop_reason"]) for entry in as_json["outputs"]] == [
        (0, "text 0", "x"), (1, "text 1", "x"),
    ]  # fmt: skip
    assert as_json["outputs"][1]["logprobs"] == [{"4": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]


def test_a_chat_has_one_answer(tmp_path: Path) -> None:
    file = tmp_path / "several.toml"
    file.write_text("[sampling]\nn = 2\ntemperature = 1\n")
    result = run("chat", "-c", file, stdin="hello\n")
    assert (result.exit_code, result.stderr) == (2, "error: a chat has one answer at a time: n must be 1, got 2\n")


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(module("generate"), "open_model", interrupted)
    result = run("generate", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_ctrl_c_does_not_wait_for_the_work() -> None:
    never = threading.Event()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        screen.interruptible(lambda: never.wait(20))
    never.set()


def test_work_in_its_own_thread_returns_and_raises() -> None:
    assert screen.busy("adding", lambda: 2 + 3) == 5

    def fails() -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        screen.interruptible(fails)


def test_chat_answers_remembers_and_forgets(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _record_streams(monkeypatch)
    lines = "hello\n\nagain\n/what\n/clear\nhello\n/exit\nnot read\n"
    result = run("chat", "-c", settings, "-n", 4, "--system", "be brief", stdin=lines)
    assert result.exit_code == 0, result.stderr
    system, hello = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    assert seen[0] == [system, hello] == seen[2]
    assert seen[1][:2] == [system, hello]
    assert [message["role"] for message in seen[1][2:]] == ["assistant", "user"]
    first, second, third = result.stdout.splitlines()
    assert first == third == seen[1][2]["content"]
    assert second != ""
    assert result.stderr.count("4 tokens in ") == 3
    assert "/clear forgets" in result.stderr


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _record_streams(monkeypatch, interrupt_first=True)
    result = run("chat", "-c", settings, "-n", 20, stdin="hello\nagain\n")
    assert result.exit_code == 0, result.stderr
    assert "stopped\n" in result.stderr
    answer = seen[1][1]["content"]
    assert result.stdout.startswith(answer + "\n")
    assert result.stderr.count("20 tokens in ") == 1  # the second answer was whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_chat_that_grew_too_long_says_so_and_goes_on(settings: Path) -> None:
    result = run("chat", "-c", settings, "-n", 4, stdin=f"{'long ' * 200}\nhello\n")
    assert result.exit_code == 0
    assert "leave room for an answer within max_model_len 128; /clear forgets the conversation" in result.stderr
    assert result.stderr.count("4 tokens in ") == 1


def test_chat_needs_a_template(tmp_path: Path) -> None:
    plain = write_folder(tmp_path / "plain", has_template=False)
    result = run("chat", "-m", plain, stdin="hello\n")
    assert result.exit_code == 2
    assert result.stderr == (f"error: {plain} has no chat template: use `specinfer generate`, or choose a chat model\n")


def _record_streams(monkeypatch: pytest.MonkeyPatch, *, interrupt_first: bool = False) -> list:
    """The messages of every `LLM.stream` of `chat`; Ctrl-C is pressed after the first piece of the first answer."""
    seen: list = []
    build_llm = module("chat").build_llm

    class Recorder:
        def __init__(self, llm) -> None:
            self.tokenizer, self.llm = llm.tokenizer, llm

        def stream(self, messages, sampling):
            seen.append([dict(message) for message in messages])
            return self._pieces(self.llm.stream(messages, sampling), is_first=len(seen) == 1)

        def _pieces(self, pieces, *, is_first: bool):
            for piece in pieces:
                yield piece
                if is_first and interrupt_first:
                    signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module("chat"), "build_llm", lambda config, model: Recorder(build_llm(config, model)))
    return seen
