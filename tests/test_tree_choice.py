"""`tree="auto"` and `tree="wide"`: what is measured, what is kept, and which SSM and tree come out."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import LLAMA, params_of
from tiny_model import write_folder

from specinfer_jax import assemble
from specinfer_jax.assemble import build_program
from specinfer_jax.config import DEFAULT_TREE, Speculation
from specinfer_jax.errors import SpeculationError
from specinfer_jax.opened import Model, open_model
from specinfer_jax.speculation import pass_costs
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import StepProgram
from specinfer_jax.speculation.tree_choice import fastest_ssm, widest_trees
from specinfer_jax.tree.optimal import expected_tokens
from specinfer_jax.tree.rates import AcceptanceRates

GOOD, POOR = AcceptanceRates.from_success(0.6, 0.8, 5), AcceptanceRates.from_success(0.3, 0.5, 5)
FLOAT32 = jnp.dtype(jnp.float32)


def seconds_of(folder: Path, rows: tuple[int, ...] = (1, 4)) -> dict[int, float]:
    return pass_costs.pass_seconds(
        LLAMA, params_of(LLAMA), rows, num_slots=2, page_size=8, dtype=jnp.float32, folder=folder
    )


def test_passes_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = seconds_of(tmp_path / "costs")
    assert list(first) == [1, 4] and 0 < first[1] <= first[4]
    [file] = (tmp_path / "costs").iterdir()
    assert json.loads(file.read_text())["key"]["num_slots"] == 2
    calls = []
    monkeypatch.setattr(pass_costs, "_measure", lambda *args, **settings: calls.append(1) or {1: 1.0, 4: 2.0})
    assert seconds_of(tmp_path / "costs") == first and not calls
    for damaged in ("", "[]", '{"seconds": 3}', '{"seconds": {"1": 0.1}}', '{"seconds": {"1": 0.1, "4": -1}}'):
        file.write_text(damaged)
        assert seconds_of(tmp_path / "costs") == {1: 1.0, 4: 2.0}
    assert len(calls) == 5 and [*(tmp_path / "costs").iterdir()] == [file]
    seconds_of(tmp_path / "costs", (1, 8))  # other rows are another measurement
    assert len(calls) == 6
    (tmp_path / "file").write_text("")
    assert seconds_of(tmp_path / "file") == {1: 1.0, 4: 2.0}  # nowhere to write to


def test_the_faster_of_two_ssms() -> None:
    verify, cheap, dear = {1: 1.0, 4: 1.1, 8: 1.2, 16: 1.5}, {1: 0.02, 16: 0.04}, {1: 0.5, 16: 0.6}
    choice = fastest_ssm([POOR, GOOD], verify_seconds=verify, draft_seconds=[cheap, cheap])
    assert choice is not None and choice.ssm == 1 and choice.tokens_per_second > 1.5
    choice = fastest_ssm([POOR, GOOD], verify_seconds=verify, draft_seconds=[cheap, dear])
    assert choice is not None and choice.ssm == 0
    assert fastest_ssm([POOR, POOR], verify_seconds=verify, draft_seconds=[dear, dear]) is None
    assert fastest_ssm([], verify_seconds=verify, draft_seconds=[]) is None
    gain = choice.tokens_per_second * verify[1]
    assert fastest_ssm([POOR], verify_seconds=verify, draft_seconds=[cheap], need=gain * 0.99) is not None
    assert fastest_ssm([POOR], verify_seconds=verify, draft_seconds=[cheap], need=gain * 1.01) is None


def test_wide_trees_share_the_nodes() -> None:
    [one] = widest_trees([GOOD])
    assert one.num_nodes == 32 and expected_tokens(one, GOOD) > 3.0
    three = widest_trees([GOOD, None, POOR])
    assert [shape.num_nodes for shape in three] == [10] * 3
    assert all(shape.num_nodes == 1 for shape in widest_trees([GOOD] * 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(write_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype=FLOAT32)


def program_of(model: Model, *acceptance: AcceptanceRates | None, **settings) -> StepProgram:
    """The LLM has two layers, the SSMs the first of them."""
    ssms = [model.first_layers(1)._replace(acceptance=own) for own in acceptance]
    return build_program(model, Speculation(ssms=ssms, **settings), dtype=FLOAT32)[0]


def fake_seconds(monkeypatch: pytest.MonkeyPatch, llm: Model, draft: float) -> None:
    def seconds(config, params, rows, **settings) -> dict[int, float]:
        unit = 1.0 if params is llm.params else draft
        return {n: unit * (1 + 0.02 * n) for n in rows}

    monkeypatch.setattr(assemble, "pass_seconds", seconds)


def test_auto_takes_the_best_ssm_and_its_tree(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_seconds(monkeypatch, model, draft=0.03)
    program = program_of(model, POOR, GOOD)
    [ssm] = program.speculators
    assert isinstance(ssm, SsmSpeculator) and (ssm.name, ssm.number) == ("ssm2", 1)
    assert 1 < ssm.num_nodes < assemble.CPU_MAX_ROWS and program.adaptive
    np.testing.assert_allclose(ssm.prior_rates()[:2], GOOD.rate[0][:2], rtol=1e-6)
    assert program_of(model, GOOD, tree="auto").speculators[0].expansion == ssm.expansion
    both = program_of(model, GOOD, ngram=True)
    assert [speculator.name for speculator in both.speculators] == ["ssm", "ngram"]
    monkeypatch.setattr(assemble, "NEED_BESIDE_NGRAMS", 100.0)  # n-grams cost nothing
    assert [type(s) for s in program_of(model, GOOD, ngram=True).speculators] == [NgramSpeculator]
    assert [speculator.name for speculator in program_of(model, GOOD).speculators] == ["ssm"]


def test_auto_takes_no_ssm_where_none_pays(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_seconds(monkeypatch, model, draft=1.0)
    assert [type(s) for s in program_of(model, GOOD).speculators] == [NgramSpeculator]
    assert program_of(model, GOOD, ngram=False).speculators == ()


def test_auto_measures_nothing_for_ssms_that_nobody_knows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "pass_seconds", None)
    program = program_of(model, None)
    assert str(program.speculators[0].expansion) == f"<{DEFAULT_TREE}>"
    assert build_program(model, Speculation(tree="auto"), dtype=FLOAT32)[0].speculators == (NgramSpeculator(),)


def test_wide_is_verified_whole(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "pass_seconds", None)
    program = program_of(model, GOOD, tree="wide")
    assert program.num_rows == 33 and program.buckets == (1, 33) and not program.adaptive
    assert program_of(model, GOOD, POOR, tree="wide").num_rows == 33
    assert program_of(model, None, tree="wide").num_rows == 33


def test_wide_trees_are_drawn(model: Model) -> None:
    def pair(**options: Any) -> tuple[str, str]:
        program = program_of(model, GOOD, ngram=False, **options)
        return program.speculators[0].children, program.verification

    assert pair(tree="wide") == ("without_replacement", "mss_renormalized")
    assert pair(tree="2,1") == pair(tree="wide", verification="naive") == ("top_k", "naive")
    assert pair(tree="wide", children="iid") == ("iid", "mss")
    with pytest.raises(SpeculationError, match="would change the LLM's distribution"):
        Speculation(tree="wide", children="top_k", verification="mss")


def test_a_shape_is_taken_as_it_is(model: Model) -> None:
    program = program_of(model, GOOD, None, tree="2/1,0")
    assert [str(speculator.expansion) for speculator in program.speculators] == ["<2/1,0>"] * 2
    with pytest.raises(SpeculationError, match="needs an SSM"):
        program_of(model, tree="2/1,0")
    with pytest.raises(SpeculationError, match="not a vector"):
        program_of(model, GOOD, tree="fast")
