"""The benchmark: the same prompts in all modes, ids compared, figures that follow from the counters."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_model import write_folder
from typer.testing import CliRunner

from specinfer_jax import bench, cli
from specinfer_jax.bench import BenchDifference, BenchResult, run_bench
from specinfer_jax.bench_contenders import Contender, make_contenders
from specinfer_jax.config import Speculation
from specinfer_jax.errors import ConfigError, PromptError
from specinfer_jax.metrics import RequestStats
from specinfer_jax.opened import Model, open_model
from specinfer_jax.prompts import PromptEntry, read_prompts
from specinfer_jax.serving.engine import Engine
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.tree.rates import AcceptanceRates

PROMPTS = [PromptEntry("one two three", "a"), PromptEntry("def format", "b"), PromptEntry("one", "a")]
TOKENS, REPEATS = 12, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(folder, dtype=np.dtype("float32"))


@pytest.fixture(scope="module")
def progress() -> list[tuple[int, int]]:
    return []


@pytest.fixture(scope="module")
def result(model: Model, progress: list[tuple[int, int]]) -> BenchResult:
    """The SSM is the LLM: every first child is accepted."""
    return run_bench(
        model, PROMPTS, speculation=Speculation(ssms=(model,), tree="1,2", adaptive=False), max_tokens=TOKENS,
        repeats=REPEATS, by_category=True, max_chain_depth=1,
        on_progress=lambda done, everything: progress.append((done, everything)),
    )  # fmt: skip


def test_rows_are_the_modes_of_all_prompts_and_of_each_category(result: BenchResult) -> None:
    modes = ["incremental", "sequence", "tree"]
    assert [(row.category, row.mode) for row in result.rows] == [(c, m) for c in (None, "a", "b") for m in modes]
    assert [row.prompts for row in result.rows] == [3] * 3 + [2] * 3 + [1] * 3
    assert [row.tokens for row in result.rows] == [TOKENS * row.prompts for row in result.rows]


def test_figures_of_a_perfect_ssm(result: BenchResult) -> None:
    for row in result.rows:
        # 12 tokens: of the tree 4 passes of two accepted nodes and a bonus token, of the chain 6 of one node.
        assert row.tokens_per_step == {"incremental": 1.0, "sequence": 2.0, "tree": 3.0}[row.mode]
        assert row.acceptance_by_position == {"incremental": [], "sequence": [1.0], "tree": [1.0, 1.0]}[row.mode]
        assert row.speculators == ([] if row.mode == "incremental" else ["ssm"])
        assert row.speedup_min <= row.speedup <= row.speedup_max
        assert row.tokens_per_second > 0
        if row.mode == "incremental":
            assert row.speedup == row.speedup_min == row.speedup_max == 1.0


def test_ids_of_all_modes_are_equal_and_counted(result: BenchResult) -> None:
    assert result.differences == []
    assert [row.equal_ids for row in result.rows] == [row.prompts for row in result.rows]


@pytest.mark.parametrize(("verification", "equal"), [("naive", 3), ("mss", None)])
def test_drawn_tokens_are_compared_where_they_must_be_equal(model: Model, verification: str, equal: int | None) -> None:
    speculation = Speculation(verification=verification, adaptive=False)
    drawn = run_bench(model, PROMPTS, speculation=speculation, max_tokens=6, temperature=1, repeats=1)
    assert [row.equal_ids for row in drawn.rows] == [equal] * 3
    assert drawn.differences == []
    assert drawn.settings["temperature"] == 1


def test_progress_and_settings(result: BenchResult, progress: list[tuple[int, int]], model: Model) -> None:
    everything = len(PROMPTS) * 3 * REPEATS
    assert progress == [(n, everything) for n in range(1, everything + 1)]
    assert result.settings["model"] == model.location
    assert result.settings["chat"] is True  # the tiny model has a template
    assert json.loads(json.dumps(result.as_dict()))["rows"][2]["mode"] == "tree"


def test_sequences_are_the_fastest_chains_of_the_same_speculators(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer_jax.serving.engine.Engine.warm_up", lambda engine: None)
    tried = []

    def seconds(engine: Engine) -> float:
        tried.append(engine.program.speculators[0].depth)
        return {1: 3.0, 2: 1.0}.get(tried[-1], 2.0)

    found = make_contenders(
        model, Speculation(ssms=(model,), tree="1,2,3", ngram=True), dtype="float32", max_model_len=None,
        max_num_seqs=None, max_chain_depth=4, seconds=seconds,
    )  # fmt: skip
    assert [contender.mode for contender in found] == ["incremental", "sequence", "sequence", "tree"]
    programs = [contender.engine.program for contender in found]
    ssm, ngram = programs[1].speculators[0], programs[2].speculators[0]
    assert isinstance(ssm, SsmSpeculator)
    assert isinstance(ngram, NgramSpeculator)
    assert tried == [1, 2, 3, 4, ngram.depth]
    assert str(ssm.expansion) == "<1,1>"
    assert (ngram.num_nodes, ngram.depth) == (ngram.depth, NgramSpeculator().depth)  # one branch
    assert [len(program.speculators) for program in programs] == [0, 1, 1, 2]
    weights = [contender.engine.params.llm for contender in found]
    assert all(params is model.params for params in weights)


def test_chains_of_an_ssm_that_auto_declines_take_part(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer_jax.serving.engine.Engine.warm_up", lambda engine: None)
    monkeypatch.setattr("specinfer_jax.assemble.fastest_ssm", lambda rates, **costs: None)
    monkeypatch.setattr("specinfer_jax.assemble.pass_seconds", lambda config, params, rows, **sizes: {})
    rated = model._replace(acceptance=AcceptanceRates.from_success(0.5, 0.7, 5))
    found = make_contenders(
        model, Speculation(ssms=(rated,)), dtype="float32", max_model_len=None, max_num_seqs=None, max_chain_depth=2,
        seconds=lambda engine: float(engine.program.speculators[0].depth == 1),
    )  # fmt: skip
    *chains, trees = [contender.engine.program.speculators for contender in found[1:]]
    assert [(type(chain), chain.depth) for (chain,) in chains] == [
        (SsmSpeculator, 2), (NgramSpeculator, NgramSpeculator().depth)
    ]  # fmt: skip
    assert [type(speculator) for speculator in trees] == [NgramSpeculator]


def _measured(seconds: float, *ids: list[int]) -> list[bench._Measured]:
    stats = [RequestStats(len(i), len(i), {}, [], [], {}, {}, 0.0, seconds) for i in ids]
    return [bench._Measured(bench._Block(None, list(range(len(ids)))), list(ids), stats, seconds, 0.0)]


def test_differences_name_the_first_token_that_differs() -> None:
    plain = [_measured(1.0, [1, 2, 3], [4, 5])] * 2
    other = [_measured(1.0, [1, 2, 3], [4, 5]), _measured(1.0, [1, 9, 3], [4])]
    assert bench._differences("tree", plain, plain) == []
    assert bench._differences("tree", other, plain) == [BenchDifference("tree", 0, 1), BenchDifference("tree", 1, 1)]


def test_the_fastest_chain_is_shown_and_ratios_are_taken_repeat_by_repeat(model: Model) -> None:
    class Fake:
        def __init__(self, *names: str) -> None:
            self.program = self
            self.speculators = [type("Named", (), {"name": name})() for name in names]

    def contender(mode: str, *names: str) -> Contender:
        return Contender._make((mode, Fake(*names)))

    contenders = [contender("incremental"), contender("sequence", "slow"), contender("sequence", "fast")]
    contenders.append(contender("tree", "slow", "fast"))
    ids = [7] * 10
    seconds = [(1.0, 2.0, 4.0), (2.0, 2.0, 2.0), (0.5, 2.0, 1.0), (0.5, 1.0, 1.0)]
    measured = [[_measured(s, ids) for s in of_mode] for of_mode in seconds]
    rows = bench._result(contenders, measured, {}, by_category=False).rows
    assert [row.speculators for row in rows] == [[], ["fast"], ["slow", "fast"]]
    assert [row.tokens_per_second for row in rows] == [5.0, 10.0, 10.0]
    assert [(row.speedup_min, row.speedup, row.speedup_max) for row in rows] == [(1, 1, 1), (1, 2, 4), (2, 2, 4)]


def test_what_cannot_be_measured(model: Model) -> None:
    with pytest.raises(ConfigError, match="do not switch it off"):
        run_bench(model, PROMPTS, speculation=Speculation.off())
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        run_bench(model, PROMPTS, speculation=Speculation(), repeats=0)


def test_the_command_writes_its_table_and_its_json(
    result: BenchResult, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict = {}

    def run_bench(model, prompts, **settings):
        asked.update(settings, prompts=prompts)
        unequal = dataclasses.replace(result, differences=[BenchDifference("tree", 1, 4)])
        return unequal if settings["repeats"] == 1 else result

    monkeypatch.setattr("specinfer_jax.bench.run_bench", run_bench)
    file, out = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    file.write_text("".join(json.dumps({"prompt": p.prompt, "category": p.category}) + "\n" for p in PROMPTS))
    command = ["bench", "-m", str(folder), "--prompts", str(file), "--limit", "2", "--by-category", "-n", "9"]
    ran = CliRunner().invoke(cli.app, [*command, "--no-chat", "--json", str(out)])
    assert ran.exit_code == 0, ran.stderr
    assert asked["prompts"] == PROMPTS[:2]
    assert (asked["max_tokens"], asked["repeats"], asked["chat"], asked["by_category"]) == (9, 3, False, True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows[:3]] == ["incremental", "sequence", "tree"]
    assert rows[2]["tokens_per_step"] == 3.0
    table = [line.split() for line in ran.stdout.splitlines()]
    assert [line[:3] for line in table if line[1:2] == ["tree"]] == [
        ["all", "tree", "3.00"],
        ["a", "tree", "3.00"],
        ["b", "tree", "3.00"],
    ]
    assert max(len(line) for line in ran.stdout.splitlines()[1:]) <= 80
    assert "Token ids: equal in all modes, for every prompt." in ran.stdout
    ran = CliRunner().invoke(cli.app, [*command, "--repeats", "1"])
    assert "Token ids: NOT equal to incremental decoding's: prompt 2 at token 5 (tree)." in ran.stdout


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"text": "a"}', 'line 1 must be an object with a text under "prompt"'),
        ('\n["a"]', 'line 2 must be an object with a text under "prompt"'),
        ("\n \n", "holds no prompts"),
        (b"\xff\xfe", "cannot read .*: it is not UTF-8 text"),
    ],
)
def test_prompt_files_that_are_refused(content: str | bytes, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PromptError, match=sentence):
        read_prompts(file)


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    # U+2028 ends a line for Python, not for JSON.
    file.write_text('{"prompt": "a\u2028b", "category": 3, "id": "x"}\r\n\n{"prompt": "c"}\n{"prompt": "d"}', "utf-8")
    assert read_prompts(file, limit=2) == [PromptEntry("a\u2028b", "3"), PromptEntry("c")]
    assert len(read_prompts(file)) == 3
