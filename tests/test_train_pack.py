"""From a run to the shipped form and back into a served tree."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny_model import CONFIG, write_folder
from train_run_cases import make_answers, make_settings

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.checkpoint.ssm_folder import SsmFolder, shipped_for
from specinfer_jax.opened import Model, open_model, open_ssm
from train import pack
from train.distill import distill
from train.export import open_trained
from train.settings import InitSettings


def test_a_run_becomes_an_ssm_that_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm_folder, answers = write_folder(tmp_path / "llm"), tmp_path / "answers.jsonl"
    made = make_answers(60, vocab=CONFIG["vocab_size"])
    answers.write_text("\n".join(answer.as_line() for answer in made) + "\n")
    settings = make_settings(steps=30, llm=str(llm_folder), answers=(str(answers),), vocabulary=40)
    distill(settings, tmp_path / "run", quiet=True)

    pack.main([str(tmp_path / "run"), "--out", str(tmp_path / "ssm"), "--answers", str(answers)])
    told = capsys.readouterr().out
    llm = open_model(llm_folder, dtype=jnp.dtype(jnp.float32))
    ssm = open_ssm(tmp_path / "ssm", llm, dtype=jnp.dtype(jnp.float32))
    assert ssm.params["embed"]["embedding"] is llm.params["embed"]["embedding"]
    assert ssm.config.output_vocab_size == 40
    assert ssm.acceptance is not None and len(ssm.acceptance.rate) == pack.DEPTHS
    assert f"success of the first 1 to 5 children {100 * ssm.acceptance.success()[0]:.1f}" in told

    prompts, params = [list(answer.prompt_ids) for answer in made[:3]], SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(llm, speculation=Speculation.off(), max_model_len=64).generate(prompts, params)
    wide = LLM(llm, speculation=Speculation(ssms=[str(tmp_path / "ssm")], tree="2,1"), max_model_len=64)
    assert [o.outputs[0].token_ids for o in wide.generate(prompts, params)] == [o.outputs[0].token_ids for o in plain]


def test_what_was_boosted_upon_another_refers_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm_folder, answers, ssms = write_folder(tmp_path / "llm"), tmp_path / "answers.jsonl", tmp_path / "ssms"
    answers.write_text("\n".join(answer.as_line() for answer in make_answers(60, vocab=CONFIG["vocab_size"])) + "\n")
    settings = make_settings(steps=5, llm=str(llm_folder), answers=(str(answers),), vocabulary=40)
    distill(settings, tmp_path / "run-1", quiet=True)
    pack.main([str(tmp_path / "run-1"), "--out", str(ssms / "one"), "--answers", str(answers)])
    later = dataclasses.replace(settings, init=InitSettings(source=str(ssms / "one"), train=("norm",)))
    distill(later, tmp_path / "run-2", quiet=True)
    wanted = ["--answers", str(answers), "--beside", str(ssms / "one")]
    pack.main([str(tmp_path / "run-2"), "--out", str(ssms / "two"), *wanted])

    llm = open_model(llm_folder, dtype=jnp.dtype(jnp.float32))
    one, two = open_several([str(ssms / "one"), str(ssms / "two")], llm)
    assert two.params["layers_0"]["mlp"]["gate"]["kernel"] is one.params["layers_0"]["mlp"]["gate"]["kernel"]
    assert (two.params["head"]["norm"]["scale"] != one.params["head"]["norm"]["scale"]).any()
    trained = open_trained(tmp_path / "run-2").model.params["head"]["norm"]["scale"]
    assert (two.params["head"]["norm"]["scale"] == trained).all()
    assert (ssms / "two" / "weights.npz").stat().st_size < (ssms / "one" / "weights.npz").stat().st_size / 2
    # A set is asked for by name; by default the LLM takes the SSM that stands alone.
    monkeypatch.setattr("specinfer_jax.checkpoint.ssm_folder.SHIPPED_SSMS", ssms)
    assert shipped_for(llm.params) == [ssms / "one"]

    with pytest.raises(SystemExit):
        pack.main([str(tmp_path / "run-2"), "--out", str(tmp_path / "elsewhere" / "two"), *wanted])
    assert "where two would look for it" in capsys.readouterr().err


def open_several(names: list[str], llm: Model) -> list[Model]:
    """As an LLM opens them: what they share is loaded once."""
    opened: dict[Path, SsmFolder] = {}
    return [open_ssm(name, llm, dtype=jnp.dtype(jnp.float32), opened=opened) for name in names]


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(make_answers(1)[0].as_line() + "\n")
    with pytest.raises(SystemExit):
        pack.main([str(tmp_path), "--out", str(tmp_path / "ssm"), "--answers", str(answers)])
    assert "holds no run of train.distill" in capsys.readouterr().err
