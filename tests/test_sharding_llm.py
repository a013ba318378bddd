"""`LLM(mesh=..., offload=...)`: settings, errors, and the same text as on one device."""

from pathlib import Path

import pytest
from tiny_model import write_file, write_folder

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.config import LLMConfig, load_config, mesh_shape
from specinfer_jax.errors import ConfigError
from specinfer_jax.opened import choose_dtype, open_model
from specinfer_jax.parallel.weights import find_mesh

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.mark.parametrize("mesh", ["model=8", "data=0,model=1", "data=1,model=x", "8", ""])
def test_a_mesh_is_written_in_one_way(mesh: str) -> None:
    with pytest.raises(ConfigError, match='mesh must look like "data=1,model=8"'):
        LLMConfig(mesh=mesh)


def test_settings_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('mesh = "data=2,model=4"\noffload = "host"\n')
    config = load_config(tmp_path / "c.toml")
    assert mesh_shape(config.mesh) == (2, 4) and config.offload == "host"
    with pytest.raises(ConfigError, match="offload must be one of none, host, got 'disk'"):
        LLMConfig(offload="disk")


def test_more_devices_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 9 devices and there are 8"):
        LLM(write_folder(tmp_path), mesh="data=1,model=9")


def test_slots_must_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must divide into 2 groups"):
        LLM(write_folder(tmp_path), mesh="data=2,model=1", max_num_seqs=3, speculation=Speculation.off())


def test_a_model_loaded_whole_is_laid_out_and_one_on_another_mesh_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    model = LLM(path, mesh="data=1,model=2", speculation=Speculation.off(), max_model_len=64).model
    with pytest.raises(ConfigError, match="was loaded for a mesh"):
        LLM(model, speculation=Speculation.off())
    with pytest.raises(ConfigError, match="cannot be reduced"):
        model.with_reduced_head([1, 2])


@pytest.mark.parametrize(
    ("kind", "mesh", "offload"),
    [
        ("folder", "data=2,model=2", "host"),
        pytest.param("gguf", "data=2,model=2", "host", marks=pytest.mark.slow),
        pytest.param("folder", "data=1,model=4", "none", marks=pytest.mark.slow),
        pytest.param("gguf", "data=1,model=4", "none", marks=pytest.mark.slow),
    ],
)
def test_the_same_text_as_on_one_device(tmp_path: Path, kind: str, mesh: str, offload: str) -> None:
    path = write_folder(tmp_path / "m") if kind == "folder" else write_file(tmp_path / "m.gguf")
    ssm = write_folder(tmp_path / "ssm", seed=1)
    speculation = Speculation(ssms=[str(ssm)], tree="2,1", ngram=True)
    prompts = ["one two three one two", "x", "the the the"]
    want = LLM(path, speculation=Speculation.off(), max_model_len=64).generate(prompts, GREEDY)
    llm = LLM(path, speculation=speculation, max_model_len=64, mesh=mesh, offload=offload)
    assert [out.token_ids for out in _first(llm.generate(prompts, GREEDY))] == [out.token_ids for out in _first(want)]


@pytest.mark.slow
def test_an_ssm_made_of_the_llm_on_a_mesh(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    want = LLM(path, speculation=Speculation.off(), max_model_len=64).generate(["a b c a b"], GREEDY)
    llm = LLM(
        path, speculation=Speculation(ssms=[str(path)], tree="1,1", adaptive=False), max_model_len=64,
        mesh="data=1,model=4",
    )  # fmt: skip
    out = llm.generate(["a b c a b"], GREEDY)
    assert _first(out)[0].token_ids == _first(want)[0].token_ids
    assert out[0].stats is not None and out[0].stats.tokens_per_step > 2.5, "its own weights predict it"


def test_opening_keeps_the_stored_config(tmp_path: Path) -> None:
    mesh, memory = find_mesh("data=1,model=8", "none")
    model = open_model(write_folder(tmp_path), dtype=choose_dtype("float32"), mesh=mesh, memory=memory)
    assert model.placement is not None and model.config == model.placement.stored


def _first(outputs):
    return [output.outputs[0] for output in outputs]
