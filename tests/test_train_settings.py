"""Settings of training, and what an SSM is before it: refused values, chosen layers, draft vocabulary."""

import dataclasses
from pathlib import Path

import pytest
from train_run_cases import (
    make_answers,
    make_settings,
    write_llm,
)

from specinfer_jax.errors import ConfigError
from train.initial import describe, draft_vocabulary, make_start
from train.parts import merge_params
from train.settings import InitSettings, load_settings
from train.step import learning_rate

CONFIGS = sorted((Path(__file__).parent.parent / "configs" / "train").glob("*.toml"))


def test_draft_vocabulary_takes_the_most_frequent_ids(tmp_path: Path) -> None:
    llm = describe(write_llm(tmp_path).as_posix())
    answers = [dataclasses.replace(a, prompt_ids=(9, 9, 8), response_ids=(5, 7, 7, 3)) for a in make_answers(3)]
    assert draft_vocabulary(answers, llm, 3) == [2, 3, 7]  # as often as 5, and lower
    assert draft_vocabulary(answers, llm, 2) == [2, 7]
    assert draft_vocabulary(answers, llm, 6) == [2, 3, 5, 7, 8, 9]
    assert draft_vocabulary(answers, llm, 8) == [0, 1, 2, 3, 5, 7, 8, 9]
    with pytest.raises(ConfigError, match="exceeds"):
        draft_vocabulary(answers, llm, 10**6)


def test_start_from_chosen_layers_and_from_scratch(tmp_path: Path) -> None:
    name = write_llm(tmp_path).as_posix()
    start = make_start(InitSettings(layers=(0, 0)), name)
    assert start.model.config.num_layers == 2 and not start.model.config.tied_head
    assert start.model.params["layers_1"] is start.model.params["layers_0"]
    assert start.frozen["embed"]["embedding"] is start.model.params["embed"]["embedding"]
    assert set(start.trained) == {"layers_0", "layers_1", "head"}
    assert set(merge_params(start.trained, start.frozen)) == set(start.model.params)
    with pytest.raises(ConfigError, match="has layers 0 to 0, not 3"):
        make_start(InitSettings(layers=(3,)), name)
    fields = {
        "model_type": "opt", "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    scratch = InitSettings(source="scratch", model=fields, train=("embed", "layers", "norm", "head"))
    model = make_start(scratch, name, seed=3).model
    assert model.config.family == "opt" and model.config.tied_head
    assert model.config.vocab_size == describe(name).config.vocab_size
    again = make_start(scratch, name, seed=4).model
    assert (again.params["embed"]["embedding"] != model.params["embed"]["embedding"]).any()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    assert load_settings(path).data.answers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstep = 3", "unknown key 'run.step'; known are steps, seed"),
        ('[run]\nsteps = "3"', "steps must be of type int"),
        ("[run]\nsteps = true", "steps must be of type int"),
        ("[run]\nsteps = 0", "steps must be at least 1"),
        ("[optimiser]\nlearning_rate = -1", "must not be negative"),
        ("[optimiser]\nlearning_rate = nan", "must not be negative"),
        ('[init]\ntrain = ["layers", "tail"]', "train must name some of embed"),
        ('[init]\nlayers = ["0"]', "layers must be of type"),
        ('[init]\nsource = "scratch"', r"\[init.model\] table"),
        ("[loss]\nkl = 1", "train.teacher"),
        ("[loss]\ncross_entropy = 0", "nothing to minimise"),
        ('[boost]\nmatch = "all"', "number of tokens"),
        ("run = 3", "run must be a table"),
        ("[run", "not a TOML file"),
    ],
)
def test_wrong_settings_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(path)


def test_learning_rate_warms_up_and_ends_low() -> None:
    settings = make_settings().optimiser
    rates = [float(learning_rate(settings, 20)(step)) for step in range(21)]
    assert 0 < rates[0] < rates[3] < rates[4] == pytest.approx(settings.learning_rate)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[20] == pytest.approx(settings.learning_rate * settings.final_share)
    assert float(learning_rate(settings, 1)(0)) == pytest.approx(settings.learning_rate)
