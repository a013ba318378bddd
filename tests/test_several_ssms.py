"""SSMs that differ in everything but what their ids mean, merged into one tree."""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from chi_square import chi_square_p
from decode_cases import LLAMA, OPT, PROMPTS, greedy, make_engine, params_of, run, run_requests, self_draft
from decoder_cases import run_rows

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.checkpoint.load import LoadedModel
from specinfer_jax.errors import ConfigError, SpeculationError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.opened import Model, open_model
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.rules import IID, MSS
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.tree.expand import parse_expansion

PROMPT = PROMPTS[0]
EVEN_IDS = np.arange(0, 64, 2)
SHORT = 30
"""Context of the first SSM."""


def reduced(config: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """The same model with a head for the even ids alone."""
    head = {**params["head"], "kernel": params["head"]["kernel"][EVEN_IDS]}
    config = dataclasses.replace(config, output_vocab_size=len(EVEN_IDS))
    return config, {**params, "head": head, "output_ids": jnp.asarray(EVEN_IDS, jnp.int32)}


@functools.cache
def mixed_engine() -> Engine:
    """A smaller vocabulary and a short context, another family with a larger vocabulary, a reduced head, n-grams."""
    small = dataclasses.replace(LLAMA, vocab_size=56, num_layers=1)
    large = dataclasses.replace(OPT, vocab_size=72)
    few, few_params = reduced(LLAMA, params_of(LLAMA))
    tree = parse_expansion("2")

    def speculator(number: int, config: ModelConfig, max_len: int, vocab_limit: int) -> SsmSpeculator:
        return SsmSpeculator(config, tree, max_len, vocab_limit, children=IID, number=number, name=f"ssm{number}")

    speculators = [
        speculator(0, small, SHORT, 56), speculator(1, large, 256, 64), speculator(2, few, 256, len(EVEN_IDS)),
        NgramSpeculator(max_match=2, branch_depths=(2,)),
    ]  # fmt: skip
    params = [params_of(small), params_of(large), few_params, ()]
    return make_engine(speculators, params, num_slots=4, verification=MSS)


@pytest.mark.parametrize("length", [1, 7, 28, 29, 30, 31, 45])
def test_an_ssm_past_its_context_is_silent_and_the_others_go_on(length: int) -> None:
    # cases B023, B031, B062
    prompt = [(5 * i + 2) % 64 for i in range(length)]
    [result] = run(mixed_engine(), [prompt], max_tokens=18)
    assert result.ids == greedy(prompt, max_tokens=18)
    proposed = result.stats.proposed_by_speculator
    # One level deep: the SSM feeds the root alone, at position committed - 1, so it drafts while committed <= SHORT.
    assert (proposed["ssm0"] > 0) == (length <= SHORT)
    assert proposed["ssm1"] > 0 and proposed["ssm2"] > 0
    # Wherever the LLM's argmax is an even id, the model with its weights and the even ids alone proposes it.
    assert result.stats.accepted_by_speculator["ssm2"] > 0


def test_mixed_vocabularies_leave_the_law_alone() -> None:
    # cases B013, B031, B062: q of a smaller, a larger and a reduced vocabulary in one tree
    count = 1000
    sampling = SamplingParams(temperature=0.8)
    requests = [EngineRequest(PROMPT, 2, frozenset(), sampling, seed) for seed in range(count)]
    results = run_requests(mixed_engine(), requests)
    model = LoadedModel(LLAMA, params_of(LLAMA), Path(), "orbax", None)
    x = run_rows(model, PROMPT)[0][-1].astype(np.float64) / 0.8
    law = np.exp(x - x.max())
    law /= law.sum()
    seen = Counter(result.ids[0] for result in results)
    assert chi_square_p(seen, dict(enumerate(law)), count) > 1e-3
    accepted = sum((Counter(result.stats.accepted_by_speculator) for result in results), Counter())
    assert min(accepted[f"ssm{m}"] for m in range(3)) > 20, "hardly a draw was accepted: the law was not tested"


def test_the_order_of_five_ssms_does_not_matter_at_temperature_0() -> None:
    # case B013: the union of their trees is the same set of nodes
    count = 5
    speculators = [dataclasses.replace(self_draft("2")[0], number=m, name=f"ssm{m}") for m in range(count)]
    # Two of them are the same model.
    params = [params_of(LLAMA, max(seed - 1, 0)) for seed in range(count)]
    [there] = run(make_engine(speculators, params), [PROMPT], max_tokens=20)
    [back] = run(make_engine(speculators[::-1], params[::-1]), [PROMPT], max_tokens=20)
    assert there.ids == back.ids == greedy(PROMPT, max_tokens=20)
    assert there.stats.steps == back.stats.steps == 10  # the LLM is one of them: every tree is accepted
    assert there.stats.accepted_by_speculator == back.stats.accepted_by_speculator
    assert there.stats.proposed_by_speculator == back.stats.proposed_by_speculator


@pytest.mark.parametrize("temperature", [0, 1])
def test_ids_that_no_tokenizer_knows_are_never_emitted(temperature: float) -> None:
    # case B031: the LLM itself prefers id 60, which is padding
    speculator, params = self_draft("2")
    engine = make_engine([speculator], [params], vocab_limit=50)
    loud = {**params["head"], "kernel": params["head"]["kernel"].at[60].set(params["head"]["kernel"][3] * 9)}
    engine.params = engine.params._replace(llm={**params, "head": loud})
    sampling = SamplingParams(temperature=temperature)
    results = run_requests(
        engine, [EngineRequest(prompt, 30, frozenset(), sampling, seed) for seed, prompt in enumerate(PROMPTS)]
    )
    assert all(len(result.ids) >= 27 and max(result.ids) < 50 for result in results)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tiny_model.write_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype=jnp.dtype(jnp.float32))


def test_a_reduced_head_proposes_its_own_ids_only(model: Model) -> None:
    # case B062
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [plain] = LLM(model, speculation=Speculation.off(), max_model_len=64).generate(["the cat"], params)
    some = sorted({*plain.token_ids[::2], 0, 1})
    ssm = model.with_reduced_head(some)
    llm = LLM(model, speculation=Speculation(ssms=[ssm], tree="1", adaptive=False), max_model_len=64)
    [output] = llm.generate(["the cat"], params)
    assert output.token_ids == plain.token_ids
    assert output.stats is not None and output.stats.accepted_by_speculator["ssm"] > 0


def test_a_model_with_a_reduced_head_cannot_be_the_llm(model: Model) -> None:
    with pytest.raises(SpeculationError, match="reduced head; it can propose as an SSM, but not be the LLM"):
        LLM(model.with_reduced_head([1, 2, 3]), max_model_len=64)


@pytest.mark.parametrize("ids", [[], [1, 1], [-1, 2], [10**6]])
def test_a_head_of_wrong_ids_is_refused(model: Model, ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="token_ids must be different ids between 0 and"):
        model.with_reduced_head(ids)
    with pytest.raises(ConfigError, match="reduced already"):
        model.with_reduced_head([1, 2]).with_reduced_head([1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"children": "top_k", "verification": "mss"}, "would change the LLM's distribution: the likeliest tokens"),
        ({"children": "top_k", "verification": "mss_renormalized"}, "the likeliest tokens are not drawn"),
        ({"children": "iid", "verification": "mss_renormalized"}, "independent draws may repeat a token"),
        ({"children": "without_replacement", "verification": "mss"}, "a token once drawn cannot come again"),
        ({"children": "beam"}, "children must be one of top_k, iid, without_replacement, got 'beam'"),
        ({"verification": "typical"}, "verification must be one of greedy, naive, mss, mss_renormalized"),
    ],
)
def test_pairs_that_are_not_exact_are_refused_by_name(settings: dict, message: str) -> None:
    with pytest.raises(SpeculationError, match=message):
        Speculation(**settings)
