"""The default model end to end: the ids are transformers' own, with trees and without."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.checkpoint.ssm_folder import SsmFolder, shipped_for
from specinfer_jax.opened import Model, open_model, open_ssm
from specinfer_jax.speculation.gate import StepCosts

pytestmark = pytest.mark.weights

GOLDEN = json.loads((Path(__file__).parent / "golden" / "default_model.json").read_text(encoding="utf-8"))
PROMPTS = [case["prompt_ids"] for case in GOLDEN]
IDS = [case["ids"] for case in GOLDEN]
PARAMS = SamplingParams(temperature=0, max_tokens=len(IDS[0]), ignore_eos=True)


@pytest.fixture(scope="module")
def model(default_model_gguf: Path) -> Model:
    return open_model(default_model_gguf, dtype=jnp.dtype(jnp.float32))


def test_the_goldens_leave_no_room_for_rounding() -> None:
    assert min(case["smallest_margin"] for case in GOLDEN) > 1e-3


def test_ids_are_transformers_with_trees_and_without_and_nothing_compiles(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    # cases B025, B045
    for speculation in (Speculation.off(), Speculation()):
        llm = LLM(model, speculation=speculation, max_model_len=256)
        # What was measured on a busy machine must not decide how many nodes are proposed here, and when.
        J, M = llm.engine.costs.verify_J.shape[0], llm.engine.costs.draft_M.shape[0]
        llm.engine._choice = None
        llm.engine._costs = StepCosts(jnp.linspace(1.0, 2.0, J, dtype=jnp.float32), jnp.zeros(M, jnp.float32))
        with jax.log_compiles(), caplog.at_level("WARNING"):
            outputs = llm.generate(PROMPTS, PARAMS)
            short = SamplingParams(temperature=0, max_tokens=3)
            many = llm.generate([IDS[0][:1] * length for length in range(1, 240, 8)], short)
            streamed = [i for piece in llm.stream(PROMPTS[0], PARAMS) for i in piece.token_ids]
        assert [output.token_ids for output in outputs] == IDS
        assert streamed == IDS[0]
        assert len(many) == 30
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
    repeating = outputs[2].stats
    assert repeating is not None
    assert repeating.tokens_per_step is not None
    assert repeating.tokens_per_step > 1.2


def test_the_boosted_set_shares_what_it_did_not_tune(model: Model) -> None:
    opened: dict[Path, SsmFolder] = {}
    names = ("smollm2-135m-ssm", "smollm2-135m-boost2", "smollm2-135m-boost3")
    first, *boosted = (open_ssm(name, model, dtype=jnp.dtype(jnp.float32), opened=opened) for name in names)
    for ssm in boosted:
        assert ssm.params["layers_0"]["mlp"]["up"]["kernel"] is first.params["layers_0"]["mlp"]["up"]["kernel"]
        assert (ssm.params["layers_3"]["mlp"]["up"]["kernel"] != first.params["layers_3"]["mlp"]["up"]["kernel"]).any()
        assert ssm.acceptance is not None and ssm.acceptance.success()[0] > 0.4
    assert [folder.name for folder in shipped_for(model.params)] == ["smollm2-135m-ssm"], "the set is asked for by name"


def test_self_draft_accepts_everything(model: Model) -> None:
    # cases B005, B006; two layers keep the compiler's time short, the whole model runs in benchmarks/equality.py
    short = model.first_layers(2)
    llm = LLM(short, speculation=Speculation(ssms=[short], tree="1,1,3,1", adaptive=False), max_model_len=256)
    plain = LLM(short, speculation=Speculation.off(), max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    [output] = llm.generate([PROMPTS[0]], params)
    assert output.token_ids == plain.generate([PROMPTS[0]], params)[0].token_ids
    assert output.stats is not None
    assert output.stats.steps == 10
    assert output.stats.accepted_by_position == [10, 10, 10, 10]
