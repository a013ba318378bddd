"""SSMs as they ship: shared with the LLM by reference, the rest in 8 bits; refused beside another LLM."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from specinfer_jax.assemble import build_program
from specinfer_jax.checkpoint.resolve import SSM_FILE, find_ssm_folder
from specinfer_jax.checkpoint.ssm_folder import (
    WEIGHTS_FILE,
    SsmFolder,
    quantise,
    read_ssm,
    shipped_for,
    write_ssm,
)
from specinfer_jax.config import Speculation
from specinfer_jax.errors import CheckpointError
from specinfer_jax.models.config import ModelConfig, RopeConfig
from specinfer_jax.models.transformer import init_params
from specinfer_jax.opened import open_model, open_ssm
from specinfer_jax.tree.rates import AcceptanceRates

LLM = ModelConfig(
    family="llama", vocab_size=97, width=32, num_layers=3, num_heads=4, num_kv_heads=2, head_size=8, mlp_width=64,
    max_position=128, tied_head=True, rope=RopeConfig(theta=100_000.0), eos_token_ids=(2, 5),
)  # fmt: skip
LLM_PARAMS = init_params(LLM, jax.random.key(0))


def make_ssm(*, head: str = "llm rows") -> tuple[ModelConfig, dict[str, Any]]:
    """Layers 0 (as it is) and 2 (tuned) of the LLM."""
    tuned = jax.tree.map(
        lambda x: x + 0.01 * jax.random.normal(jax.random.key(x.size), x.shape), LLM_PARAMS["layers_2"]
    )
    params = {"embed": LLM_PARAMS["embed"], "layers_0": LLM_PARAMS["layers_0"], "layers_1": tuned}
    config = dataclasses.replace(LLM, num_layers=2)
    if head == "tied":
        return config, params | {"head": LLM_PARAMS["head"]}
    ids = jnp.array([2, 3, 5, 8, 13, 21, 34, 55, 89], jnp.int32)
    kernel = LLM_PARAMS["embed"]["embedding"][ids]
    kernel = kernel * 1.5 if head == "tuned" else kernel
    config = dataclasses.replace(config, tied_head=False, output_vocab_size=9)
    return config, params | {"head": {**LLM_PARAMS["head"], "kernel": kernel}, "output_ids": ids}


def write(folder: Path, config: ModelConfig, params: Any) -> int:
    return write_ssm(folder, config, params, llm_name="the-llm", llm_params=LLM_PARAMS, acceptance=[[0.5, 0.2]])


@pytest.mark.parametrize("head", ["tied", "llm rows", "tuned"])
def test_what_is_read_is_what_was_written(head: str, tmp_path: Path) -> None:
    config, params = make_ssm(head=head)
    size = write(tmp_path / "ssm", config, params)
    assert size == sum(file.stat().st_size for file in (tmp_path / "ssm").iterdir())
    found = read_ssm(tmp_path / "ssm", LLM_PARAMS, dtype=jnp.float32)
    assert found.config == config
    assert found.acceptance == [[0.5, 0.2]]
    assert jax.tree.structure(found.params) == jax.tree.structure(params)
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(found.params), strict=True):
        assert new.dtype == old.dtype
        bound = np.abs(old).max() / 127 / 2 if old.ndim == 2 else 0  # half a step of 8 bits
        np.testing.assert_allclose(new, old, rtol=0, atol=bound * 1.001)


def test_shared_parameters_are_the_llms_arrays(tmp_path: Path) -> None:
    config, params = make_ssm()
    write(tmp_path, config, params)
    found = read_ssm(tmp_path, LLM_PARAMS, dtype=jnp.float32).params
    assert found["embed"]["embedding"] is LLM_PARAMS["embed"]["embedding"]
    of_llm = {id(leaf) for leaf in jax.tree.leaves(LLM_PARAMS)}
    assert all(id(leaf) in of_llm for leaf in jax.tree.leaves(found["layers_0"]))
    np.testing.assert_array_equal(found["head"]["kernel"], params["head"]["kernel"])
    with np.load(tmp_path / WEIGHTS_FILE) as stored:
        assert {name.split("/")[0] for name in stored.files} == {"layers_1", "output_ids"}


def test_the_rounding_of_a_row() -> None:
    q, scale = quantise(np.array([[0.0, 0.0], [1.27, -0.635], [-2.54, 0.01]], np.float32))
    np.testing.assert_array_equal(q, [[0, 0], [127, -64], [-127, 0]])  # -63.5 to even
    np.testing.assert_allclose(scale, [0, 0.01, 0.02], rtol=1e-6)


def test_half_precision(tmp_path: Path) -> None:
    config, params = make_ssm()
    write(tmp_path, config, params)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), LLM_PARAMS)
    found = read_ssm(tmp_path, halved, dtype=jnp.bfloat16).params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"bfloat16", "int32"}


def test_another_llm_is_refused(tmp_path: Path) -> None:
    write(tmp_path, *make_ssm())
    with pytest.raises(CheckpointError, match="made for the-llm; its weights are not this LLM's"):
        read_ssm(tmp_path, init_params(LLM, jax.random.key(1)), dtype=jnp.float32)


def test_what_another_ssm_has_is_shared_with_it(tmp_path: Path) -> None:
    config, first = make_ssm()
    second = first | {"layers_1": jax.tree.map(lambda x: x * 1.01, first["layers_1"])}
    third = second | {"layers_0": jax.tree.map(lambda x: x * 1.01, first["layers_0"])}
    alone = write(tmp_path / "alone", config, second)
    sizes = [
        write_ssm(
            tmp_path / name, config, params, llm_name="the-llm", llm_params=LLM_PARAMS, beside=beside
        )
        for name, params, beside in (
            ("1", first, None), ("2", second, {"1": first}), ("3", third, {"1": first, "2": second})
        )
    ]  # fmt: skip
    assert sizes[1] <= alone
    opened: dict[Path, SsmFolder] = {}
    found = [read_ssm(tmp_path / name, LLM_PARAMS, dtype=jnp.float32, opened=opened).params for name in "312"]
    three, one, two = found
    assert two["output_ids"] is one["output_ids"]
    assert two["layers_0"]["mlp"] is not one["layers_0"]["mlp"]  # other dicts of the same arrays
    for a, b in zip(jax.tree.leaves(three["layers_1"]), jax.tree.leaves(two["layers_1"]), strict=True):
        assert a is b or a.ndim == 1  # norms of equal values may be any of them
    for mine, params in ((one, first), (two, second), (three, third)):
        for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(mine), strict=True):
            assert np.abs(old - new).max() <= max(np.abs(old).max() / 127, 1e-6)
    (tmp_path / "2" / SSM_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"ssm.json cannot be read"):
        read_ssm(tmp_path / "3", LLM_PARAMS, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / SSM_FILE).unlink(), "ssm.json cannot be read: No such file"),
        (lambda folder: (folder / SSM_FILE).write_text("{"), "ssm.json is not JSON"),
        (lambda folder: (folder / SSM_FILE).write_text("[]"), "ssm.json holds no table"),
        (lambda folder: (folder / SSM_FILE).write_text('{"format": 2}'), "has format 2; this version reads 1"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), "weights.npz is missing or damaged"),
        (lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"PK\x03\x04"), "weights.npz is missing or damaged"),
    ],
)
def test_damage_is_named(break_it: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, *make_ssm())
    break_it(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        read_ssm(tmp_path, LLM_PARAMS, dtype=jnp.float32)


def test_an_ssm_is_opened_beside_its_llm(tmp_path: Path) -> None:
    llm = open_model(tiny_model.write_folder(tmp_path / "llm"), dtype=jnp.dtype(jnp.float32))
    own = llm.with_reduced_head(range(3, 40))
    rates = AcceptanceRates.from_success(0.5, 0.7, 5)
    write_ssm(
        tmp_path / "ssm", own.config, own.params, llm_name="tiny", llm_params=llm.params, acceptance=rates.as_dict()
    )  # fmt: skip
    opened = open_ssm(tmp_path / "ssm", llm, dtype=jnp.dtype(jnp.float32))
    assert opened.acceptance == AcceptanceRates.from_dict(rates.as_dict())
    assert opened.params["embed"]["embedding"] is llm.params["embed"]["embedding"]
    assert opened.tokenizer is llm.tokenizer
    program, params = build_program(
        llm, Speculation(ssms=[str(tmp_path / "ssm")], tree="1,1"), dtype=jnp.dtype(jnp.float32)
    )  # fmt: skip
    assert program.speculators[0].num_nodes == 2
    assert jax.tree.leaves(params.speculators[0])[0] is jax.tree.leaves(llm.params)[0]


def test_what_ships_for_an_llm_is_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer_jax.checkpoint.ssm_folder.SHIPPED_SSMS", tmp_path / "ssms")
    dtype = jnp.dtype(jnp.float32)
    llm = open_model(tiny_model.write_folder(tmp_path / "llm"), dtype=dtype)
    rates = AcceptanceRates.from_success(0.5, 0.7, 5).as_dict()
    for name in ("b", "a"):
        own = llm.with_reduced_head(range(3, 40))
        write_ssm(
            tmp_path / "ssms" / name, own.config, own.params, llm_name="tiny", llm_params=llm.params, acceptance=rates
        )  # fmt: skip
    assert shipped_for(llm.params) == [tmp_path / "ssms" / "a", tmp_path / "ssms" / "b"]
    other = jax.tree.map(lambda leaf: leaf + 0.1, llm.params)
    assert shipped_for(other) == []

    def speculators(speculation: Speculation) -> list[tuple[str, int]]:
        program, _ = build_program(llm, speculation, dtype=dtype)
        return [(speculator.name, speculator.num_nodes) for speculator in program.speculators]

    assert speculators(Speculation(tree="1,1")) == [("ssm1", 2), ("ssm2", 2), ("ngram", 23)]
    assert [name for name, _ in speculators(Speculation(ssms=()))] == ["ngram"]
    wide = speculators(Speculation(tree="wide"))
    assert [name for name, _ in wide] == ["ssm1", "ssm2", "ngram"]
    assert sum(nodes for _, nodes in wide) <= 32
    unrelated, _ = build_program(llm._replace(params=other), Speculation(), dtype=dtype)
    assert [speculator.name for speculator in unrelated.speculators] == ["ngram"]


def test_names_that_are_no_such_folder(tmp_path: Path) -> None:
    assert find_ssm_folder("smollm2-135m-instruct") is None
    assert find_ssm_folder(tmp_path) is None
