"""An LLM in host memory: the same tokens, and the device holds the layers in flight alone."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from decode_cases import LLAMA, OPT, PROMPTS, run_requests
from mesh_cases import SSM, UNEVEN, mesh_engine, ssm

from specinfer_jax.errors import ConfigError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.parallel import weights
from specinfer_jax.parallel.offload import to_device
from specinfer_jax.parallel.weights import DEVICE, HOST, find_mesh
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.speculation.state import StepProgram

DRAWS = SamplingParams(temperature=0.9, top_p=0.95, seed=5)


def decoded(config: ModelConfig, data: int, model: int, memory: str):
    speculator, params = ssm("2,1", config=dataclasses.replace(SSM, vocab_size=config.vocab_size))
    engine = mesh_engine(
        data, model, config=config, speculators=[speculator], params=[params], num_slots=2, memory=memory
    )
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(engine.params.llm) if leaf.ndim == 2}
    assert kinds == {memory}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(engine.params.speculators)} == {DEVICE}
    requests = [
        EngineRequest([t % config.vocab_size for t in prompt], 10, frozenset(), sampling, seed=5)
        for prompt in PROMPTS[:3]
        for sampling in (SamplingParams(temperature=0, logprobs=2), DRAWS)
    ]
    return run_requests(engine, requests)


def one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offloaded program has one row bucket, other rows are other sums: from here on all programs have one."""
    buckets = StepProgram.buckets.fget
    assert buckets is not None
    monkeypatch.setattr(StepProgram, "buckets", property(lambda self: buckets(self)[-1:]))


@pytest.mark.parametrize(
    ("config", "data", "model"),
    [
        (LLAMA, 1, 1),
        pytest.param(OPT, 1, 1, marks=pytest.mark.slow),  # a tied head
        pytest.param(UNEVEN, 1, 4, marks=pytest.mark.slow),
        pytest.param(UNEVEN, 2, 2, marks=pytest.mark.slow),
    ],
)
def test_offloaded_is_bit_equal(config: ModelConfig, data: int, model: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got = decoded(config, data, model, HOST)
    one_bucket(monkeypatch)
    want = decoded(config, data, model, DEVICE)
    for one, other in zip(got, want, strict=True):
        assert one.ids == other.ids
        for x, y in zip(one.logprobs, other.logprobs, strict=True):
            assert np.array_equal(x.logprob_T, y.logprob_T)


@pytest.mark.slow
def test_offloaded_gives_the_tokens_of_a_program_with_more_buckets() -> None:
    want = [result.ids for result in decoded(LLAMA, 1, 1, DEVICE)]
    assert [result.ids for result in decoded(LLAMA, 1, 1, HOST)] == want


def test_devices_without_host_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(platform="toy", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh = SimpleNamespace(devices=np.array([device]))
    monkeypatch.setattr(weights, "make_mesh", lambda data, model: mesh)  # case B089
    with pytest.raises(ConfigError, match="offload='host' needs devices with pinned_host memory, which toy lacks here"):
        find_mesh("data=1,model=1", "host")


def test_copies_keep_values() -> None:
    x = jax.device_put(np.arange(6.0, dtype=np.float32), jax.memory.Space.Host)
    y = jax.jit(to_device)({"x": x})["x"]
    assert y.sharding.memory_kind == DEVICE and np.array_equal(x, y)
