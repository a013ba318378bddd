"""Ahead-of-time targets: what can be checked without their compilers."""

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec

from benchmarks import compile_targets
from benchmarks.gpu_targets import GPU_CHIPS, target_config
from benchmarks.paper_models import PAPER_MODELS
from specinfer_jax.parallel.sharding import make_mesh
from specinfer_jax.speculation.decode import step


def test_the_step_is_traced_with_the_kernel_split_over_the_mesh() -> None:
    mesh = make_mesh(1, 2)
    config = dataclasses.replace(PAPER_MODELS["tiny"], head_size=64)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program, arguments = compile_targets.step_arguments(config, 8, "pallas_tpu", mesh)
        traced = jax.jit(step, static_argnames="program", donate_argnums=1).trace(*arguments, program=program)
    text = str(traced.jaxpr)
    assert text.count("shard_map") >= config.num_layers
    assert "tree_attention" in text
    params, state, _ = arguments
    layer = params.llm["layers_0"]
    assert layer["attention"]["q"]["kernel"].sharding.spec == PartitionSpec("model", None)
    assert layer["mlp"]["down"]["kernel"].sharding.spec == PartitionSpec(None, "model")
    assert layer["mlp_norm"]["scale"].sharding.spec == PartitionSpec()
    assert state.cache.k_pages[0].sharding.spec == PartitionSpec("model", "data")


def test_an_unknown_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compile_targets.main(["--targets", "v5e,v7x"])
    assert "unknown targets v7x; known are v4, v5e, v5p, v6e, sm_80, sm_90" in capsys.readouterr().err


def test_every_gpu_target_has_a_chip() -> None:
    for name in compile_targets.GPU_TARGETS:
        major, minor = name.removeprefix("sm_")
        assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in target_config(GPU_CHIPS[name])
