"""One model on meshes of fake devices: the same tokens on all of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import LLAMA, OPT, PROMPTS, Result, params_of, run_requests
from jax.sharding import PartitionSpec
from mesh_cases import SSM, UNEVEN, mesh_engine, ssm

from specinfer_jax.errors import ConfigError
from specinfer_jax.outputs import TokenLogprobs
from specinfer_jax.parallel.sharding import Rules, make_mesh, split_config, top_k, weight_spec
from specinfer_jax.parallel.weights import WeightPlacement, place_params
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.speculation.rules import MSS, NAIVE

CONFIGS = {
    "llama": LLAMA,
    "opt": OPT,
    "uneven": UNEVEN,
    "odd heads": dataclasses.replace(LLAMA, num_heads=6, num_kv_heads=3, vocab_size=61),
    "opt, odd heads": dataclasses.replace(OPT, num_heads=6, num_kv_heads=6),
}
SPLITS = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1)]
QUICK = {("uneven", 1, 8), ("opt, odd heads", 2, 4)}
"""KV heads repeated and a vocabulary padded; and attention whole on every device, in two groups of slots."""
CASES = [
    pytest.param(name, *split, marks=() if (name, *split) in QUICK else pytest.mark.slow)
    for name in CONFIGS
    for split in SPLITS
]
SAMPLING = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(temperature=1.3, top_k=11, min_p=0.02, seed=8),
    SamplingParams(
        temperature=1.0, seed=9, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias={3: 4.0, 5: -2.0}
    ),
    SamplingParams(temperature=0, presence_penalty=0.5, min_tokens=9),
)


@functools.cache
def decoded(name: str, data: int, model: int, verification: str = NAIVE) -> list[Result]:
    """Prompts under every kind of sampling, more of them than slots."""
    config = CONFIGS[name]
    children = "iid" if verification == MSS else "top_k"
    speculator, params = ssm("2,1", config=dataclasses.replace(SSM, vocab_size=config.vocab_size), children=children)
    engine = mesh_engine(
        data, model, config=config, speculators=[speculator], params=[params], num_slots=8, verification=verification
    )
    requests = [
        EngineRequest(
            [t % config.vocab_size for t in prompt], 12, frozenset({1}),
            dataclasses.replace(sampling, logprobs=3, prompt_logprobs=2), seed=sampling.seed or 0,
        )
        for prompt, sampling in zip(PROMPTS * 2, SAMPLING + SAMPLING[1:] + SAMPLING[:1], strict=True)
    ]  # fmt: skip
    return run_requests(engine, requests)


def assert_same(got: list[Result], want: list[Result]) -> None:
    assert [result.ids for result in got] == [result.ids for result in want]
    assert [result.finish_reason for result in got] == [result.finish_reason for result in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.stats.steps == theirs.stats.steps
        pairs = [*zip(ours.logprobs, theirs.logprobs, strict=True), (ours.prompt_logprobs, theirs.prompt_logprobs)]
        for one, other in pairs:
            assert (one is None) == (other is None)
            for x, y in zip(_numbers(one), _numbers(other), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def _numbers(logprobs: TokenLogprobs | None) -> list[np.ndarray]:
    """Its floats; of equal log-probabilities the order may change."""
    return [] if logprobs is None else [x for x in vars(logprobs).values() if x.dtype == np.float32]


@pytest.mark.parametrize(("name", "data", "model"), CASES)
def test_every_mesh_gives_the_same_tokens(name: str, data: int, model: int) -> None:
    want = decoded(name, 0, 0)
    assert len({tuple(result.ids) for result in want}) > 5, "the prompts' answers do not differ"
    assert_same(decoded(name, data, model), want)


@pytest.mark.slow
def test_drawn_trees_on_a_mesh() -> None:
    assert_same(decoded("uneven", 2, 4, MSS), decoded("uneven", 0, 0, MSS))


def test_kv_heads_are_repeated_until_every_device_has_one() -> None:
    config = split_config(UNEVEN, 8)
    assert (config.num_kv_heads, config.vocab_size, config.num_padding_ids) == (8, 64, 3)
    assert split_config(LLAMA, 1) is LLAMA
    whole = split_config(CONFIGS["odd heads"], 4)
    assert whole.num_kv_heads == 3
    assert weight_spec("layers_0/attention/q/kernel", whole, 4) == PartitionSpec(None, None)
    assert weight_spec("layers_0/mlp/down/kernel", whole, 4) == PartitionSpec(None, "model")


def test_weights_come_back_as_they_were_stored() -> None:
    placement = WeightPlacement(make_mesh(2, 4), UNEVEN)
    params = place_params(params_of(UNEVEN), placement)
    key = params["layers_0"]["attention"]["k"]["kernel"]
    assert key.shape == (16, 32)
    assert key.addressable_shards[0].data.shape == (4, 32)
    for path in ("embed/embedding", "layers_0/attention/k/kernel", "layers_0/mlp/down/kernel"):
        found, want = params, params_of(UNEVEN)
        for part in path.split("/"):
            found, want = found[part], want[part]
        assert np.array_equal(placement.as_stored(path, found), want), path


@pytest.mark.parametrize("k", [1, 5, 40])
def test_top_k_of_a_split_vocabulary(k: int) -> None:
    mesh = make_mesh(2, 4)
    x_TV = np.random.default_rng(0).integers(0, 9, (6, 64)).astype(np.float32)  # many ties
    x_TV[2, 5] = np.nan
    x_TV[3] = -np.inf
    with jax.set_mesh(mesh):
        best, ids = jax.jit(top_k, static_argnums=1)(jnp.asarray(x_TV), k)
    want, want_ids = jax.lax.top_k(jnp.asarray(x_TV), k)
    assert np.array_equal(best, want, equal_nan=True)
    assert np.array_equal(ids, want_ids)


def test_a_rule_that_would_split_twice_is_refused() -> None:
    rules = Rules({"heads": "model", "mlp": "model"})
    with pytest.raises(ValueError, match="split an array twice over one axis"):
        rules.spec("heads", "mlp")
    with pytest.raises(ValueError, match="unknown logical axis 'width'; known are heads, mlp"):
        rules.spec("width")


def test_a_mesh_needs_its_devices() -> None:
    with pytest.raises(ConfigError, match=r"mesh data=4,model=4 needs 16 devices and there are 8"):
        make_mesh(4, 4)


def test_nothing_compiles_after_warm_up() -> None:
    engine = mesh_engine(2, 2, num_slots=4)
    engine.warm_up()
    run_requests(engine, [EngineRequest([1, 2, 3], 5, frozenset())])
    sizes = _cache_sizes(engine)
    run_requests(engine, [EngineRequest(list(p), 9, frozenset(), s) for p, s in zip(PROMPTS, SAMPLING, strict=True)])
    assert _cache_sizes(engine) == sizes


def _cache_sizes(engine) -> list[int]:
    programs = [engine._burst, engine._admit, engine._place, engine._prompt_logprobs, *engine._prefill.values()]
    return [program._cache_size() for program in programs]
