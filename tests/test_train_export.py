"""A trained SSM as a Hugging Face folder: names, shapes and fields by convention, logits equal after loading."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_cases import CONFIGS, llama_config, opt_config, tensor_shapes
from train_run_cases import make_settings, write_answers, write_llm

from specinfer_jax.errors import CheckpointError, ConfigError
from specinfer_jax.models.families import config_from_hf
from specinfer_jax.models.transformer import init_params, vocabulary_logits
from specinfer_jax.opened import Model, open_model
from specinfer_jax.tokenizer import Tokenizer
from train import evaluate, export
from train.distill import distill
from train.export import hf_config, open_trained, save_hf_folder
from train.packing import BatchPlan
from train.settings import TrainSettings
from train.step import hidden, train_batch

ROPE = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5}},
    "theta": {"rope_theta": 5e5},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: make() for name, make in CONFIGS.items()},
    **{name: llama_config(**fields) for name, fields in ROPE.items()},
    "tied": llama_config(tie_word_embeddings=True, eos_token_id=[2, 3]),
    "biases": llama_config(attention_bias=True, mlp_bias=True, hidden_act="gelu_new"),
    "windowed qwen2": CONFIGS["qwen2"](use_sliding_window=True, max_window_layers=0),
    "untied opt": opt_config(tie_word_embeddings=False, enable_bias=False, activation_function="gelu"),
    "opt without a last norm": opt_config(_remove_final_layer_norm=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_config_comes_back(name: str) -> None:
    config = config_from_hf(VARIANTS[name])
    fields = json.loads(json.dumps(hf_config(config)))
    assert config_from_hf(fields) == config
    # The fields that transformers reads as well, apart from this project's reader.
    for key in ("model_type", "architectures", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id"):
        assert fields[key] == VARIANTS[name][key]


def test_config_that_no_field_describes_is_refused() -> None:
    config = config_from_hf(llama_config())
    for change in ({"out_bias": True}, {"output_vocab_size": 3}):
        with pytest.raises(ConfigError):
            hf_config(dataclasses.replace(config, **change))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "bfloat16"), ("qwen2", "float32"), ("opt", "float32"), ("opt-350m", "float32"), ("tied", "float16")],
)
def test_folder_has_the_conventional_names_and_shapes(name: str, dtype: str, tmp_path: Path) -> None:
    config = config_from_hf(VARIANTS[name])
    tokenizer = Tokenizer.from_hf_folder(write_llm(tmp_path / "llm"))
    model = Model(config, init_params(config, jnp.zeros((2,), jnp.uint32)), tokenizer, "a test")
    save_hf_folder(tmp_path / "hf", model, dtype=dtype)
    header_size = int.from_bytes((tmp_path / "hf" / "model.safetensors").read_bytes()[:8], "little")
    assert header_size % 8 == 0
    stored = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert {key: value.shape for key, value in stored.items()} == tensor_shapes(VARIANTS[name])
    embedding = next(value for key, value in stored.items() if key.endswith("embed_tokens.weight"))
    assert embedding.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(embedding, np.asarray(model.params["embed"]["embedding"]).astype(dtype))
    loaded = open_model(tmp_path / "hf", dtype=jnp.dtype(dtype))
    assert loaded.config == dataclasses.replace(config, eos_token_ids=loaded.config.eos_token_ids)
    assert not loaded.tokenizer.first_differences(tokenizer)
    with pytest.raises(CheckpointError, match="exists already"):
        save_hf_folder(tmp_path / "hf", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "llm"]


def logits(model: Model, plan: BatchPlan) -> np.ndarray:
    batch = jax.tree.map(jnp.asarray, train_batch(plan.batch(0)))
    return np.asarray(vocabulary_logits(model.params, hidden(model.params, batch, model.config), config=model.config))


def trained(folder: Path, **options: Any) -> tuple[TrainSettings, Path]:
    answers = write_answers(folder / "answers.jsonl")
    settings = make_settings(llm=str(write_llm(folder / "llm")), answers=(str(answers),), steps=3, **options)
    distill(settings, folder / "run", quiet=True)
    return settings, folder / "run"


def plan_of(folder: Path) -> BatchPlan:
    from train.answers import read_answers

    return BatchPlan(read_answers(folder / "answers.jsonl"), rows=2, tokens=32)


def test_trained_model_exports_with_equal_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, run = trained(tmp_path)
    opened = open_trained(run)
    assert opened.settings == settings and opened.step == 3
    export.main([str(run), "--out", str(tmp_path / "hf")])
    assert "step 3" in capsys.readouterr().out
    plan, llm = plan_of(tmp_path), open_model(tmp_path / "llm", dtype=jnp.dtype(jnp.float32))
    right = logits(opened.model, plan)
    np.testing.assert_array_equal(logits(open_model(tmp_path / "hf", dtype=jnp.dtype(jnp.float32)), plan), right)
    assert np.abs(logits(llm, plan) - right).max() > 1e-3  # it was trained
    for text in ("two  spaces", "<|im_start|>user"):
        exported = Tokenizer.from_hf_folder(tmp_path / "hf")
        assert exported.encode(text) == llm.tokenizer.encode(text)
    assert exported.eos_token_ids == llm.tokenizer.eos_token_ids
    assert exported.chat_template == llm.tokenizer.chat_template

    evaluate.main([str(run), "--answers", str(tmp_path / "answers.jsonl")])
    printed = capsys.readouterr().out
    assert "greedy" in printed and "k=5" in printed
    with pytest.raises(CheckpointError, match="no checkpoint 2"):
        open_trained(run, step=2)
    with pytest.raises(ConfigError, match="holds no run"):
        open_trained(tmp_path)


def test_trained_reduced_head_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = trained(tmp_path, vocabulary=12)
    with pytest.raises(SystemExit) as end:
        export.main([str(run), "--out", str(tmp_path / "hf")])
    assert end.value.code == 2 and "trained a head of 12 ids" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    model = open_trained(run).model
    assert model.config.output_vocab_size == 12 and model.params["output_ids"].shape == (12,)


def test_head_that_was_only_cut_is_whole_again(tmp_path: Path) -> None:
    _, run = trained(tmp_path, vocabulary=12, train=("layers", "norm"))
    reduced = open_trained(run).model
    whole = open_trained(run, has_full_head=True).model
    save_hf_folder(tmp_path / "hf", whole)
    loaded = open_model(tmp_path / "hf", dtype=jnp.dtype(jnp.float32))
    plan = plan_of(tmp_path)
    rows = np.asarray(reduced.params["output_ids"])
    np.testing.assert_allclose(logits(loaded, plan)[rows], logits(reduced, plan), atol=1e-5)
