"""Decoding at a temperature, through the whole engine: the law, the seeds, who shares a batch, and what comes back."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import chi_square_p
from decode_cases import LLAMA, PROMPTS, VOCAB, greedy, make_engine, params_of, run_requests, self_draft, shared_engine
from decoder_cases import run_rows
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specinfer_jax.checkpoint.load import LoadedModel
from specinfer_jax.errors import SamplingError
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.speculation.children import MAX_CANDIDATES
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.rules import IID, MSS, MSS_RENORMALIZED, TOP_K, WITHOUT_REPLACEMENT
from specinfer_jax.speculation.speculator import Context
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams

PROMPT = PROMPTS[0]
NGRAM = NgramSpeculator(max_match=3, branch_depths=(2,))
SAMPLINGS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.6, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=7, min_p=0.02),
    SamplingParams(temperature=1, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0, repetition_penalty=1.6, frequency_penalty=0.8),
    SamplingParams(temperature=0.9, logit_bias={3: 4.0, 9: -100}, min_tokens=12, stop_token_ids=[6]),
    SamplingParams(temperature=1, allowed_token_ids=[1, 2, 5, 9, 33]),
]


def other_model(seed: int) -> object:
    """Weights near the LLM's, so that its draws are sometimes accepted."""
    return jax.tree.map(lambda a, b: a + 0.15 * b, params_of(LLAMA), params_of(LLAMA, seed))


def ssm(tree: str, children: str, number: int = 0) -> SsmSpeculator:
    return dataclasses.replace(self_draft(tree)[0], children=children, number=number, name=f"ssm{number}")


@functools.cache
def engine_of(children: str, verification: str) -> Engine:
    """Two SSMs and n-grams, merged; the gate on, as by default."""
    speculators = (ssm("2,1", children, 0), ssm("1", children, 1), NGRAM)
    engine = shared_engine(speculators, adaptive=True, num_slots=4, verification=verification)
    engine.params = engine.params._replace(speculators=(other_model(1), other_model(2), ()))
    return engine


def naive() -> Engine:
    return engine_of(TOP_K, "naive")


def drawn() -> Engine:
    return engine_of(WITHOUT_REPLACEMENT, MSS_RENORMALIZED)


def request(sampling: SamplingParams, *, seed: int = 1, prompt: Sequence[int] = PROMPT, max_tokens: int = 24, **more):
    return EngineRequest(list(prompt), max_tokens, frozenset(sampling.stop_token_ids), sampling, seed, **more)


def ids_of(engine: Engine, *requests: EngineRequest) -> list[list[int]]:
    return [result.ids for result in run_requests(engine, requests)]


def plain_logits(ids: Sequence[int]) -> np.ndarray:
    """`[T, V]` of one pass over everything, without a cache."""
    return run_rows(LoadedModel(LLAMA, params_of(LLAMA), Path(), "orbax", None), list(ids))[0].astype(np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_naive_sampling_gives_the_tokens_of_seeded_incremental_decoding(sampling: SamplingParams) -> None:
    # cases B028, B039: any tree, any gate, the same tokens
    requests = [request(sampling, seed=seed, prompt=prompt) for seed, prompt in enumerate(PROMPTS)]
    assert ids_of(naive(), *requests) == ids_of(shared_engine(), *requests)


@pytest.mark.parametrize(
    ("children", "rule"),
    [pytest.param(IID, MSS, marks=pytest.mark.slow), (WITHOUT_REPLACEMENT, MSS_RENORMALIZED)],
)
def test_drawn_trees_leave_the_law_alone(children: str, rule: str) -> None:
    # cases B009, B011, B013: draws of two SSMs and n-grams, through the engine, with a filter on
    sampling = SamplingParams(temperature=0.7, top_k=12)
    count, prompt = 1000, [3, 4, 3, 4, 3]
    found = ids_of(
        engine_of(children, rule), *(request(sampling, seed=s, prompt=prompt, max_tokens=2) for s in range(count))
    )

    def law(ids: list[int]) -> np.ndarray:
        x = plain_logits(ids)[-1]
        return softmax(np.where(x >= np.sort(x)[-12], x, -np.inf) / 0.7)

    first = law(prompt)
    joint = {(a, b): first[a] * q for a in range(VOCAB) if first[a] > 0 for b, q in enumerate(law([*prompt, a])) if q}
    seen = Counter(tuple(ids) for ids in found)
    assert set(seen) <= set(joint)
    assert chi_square_p(seen, joint, count) > 1e-3
    steps = run_requests(engine_of(children, rule), [request(sampling, prompt=prompt, max_tokens=40)])[0].stats
    assert sum(steps.accepted_by_speculator.values()) > 0, "nothing was accepted: the law was not tested"


@pytest.mark.parametrize("engine", [naive, drawn])
def test_a_request_depends_on_nobody_else(engine) -> None:
    # cases B018, B039: alone, with neighbours, in another slot, after other requests
    mine = request(SamplingParams(temperature=1), seed=11)
    [alone] = ids_of(engine(), mine)
    others = [request(SAMPLINGS[i % len(SAMPLINGS)], seed=i, prompt=PROMPTS[i % 5], max_tokens=5 + i) for i in range(7)]
    for place in (0, 2, 5, 7):
        batch = [*others[:place], mine, *others[place:]]
        assert ids_of(engine(), *batch)[place] == alone
    assert ids_of(engine(), mine) == [alone]


def test_seeds_and_samples_tell_requests_apart() -> None:
    sampling = SamplingParams(temperature=1)
    keys = [{"seed": 1}, {"seed": 2}, {"seed": 2**32 + 1}, {"seed": -1}, {"seed": 1, "sample": 1}]
    found = ids_of(drawn(), *(request(sampling, **key) for key in keys))
    assert len({tuple(ids) for ids in found}) == len(keys)


@pytest.mark.parametrize("engine", [naive, drawn])
def test_a_mixed_batch_leaves_the_greedy_row_alone(engine) -> None:
    # case B016
    temperatures = [0, 1e-6, 0.7, 1.0]
    found = ids_of(engine(), *(request(SamplingParams(temperature=t, top_p=0.5)) for t in temperatures))
    assert found[0] == found[1] == greedy(PROMPT, max_tokens=24)
    assert found[2] != found[0] != found[3]


@pytest.mark.parametrize("num_devices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)), 8])
def test_any_number_of_devices_draws_the_same(num_devices: int) -> None:
    # case B042: the vocabulary, over which the noise lies, split over devices
    speculators = (ssm("2", WITHOUT_REPLACEMENT),)
    one = shared_engine(speculators, num_slots=2, verification=MSS_RENORMALIZED)
    one.params = one.params._replace(speculators=(other_model(1),))
    requests = [request(sampling, seed=5, max_tokens=12) for sampling in SAMPLINGS[:3]]
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    split, copied = NamedSharding(mesh, PartitionSpec("model")), NamedSharding(mesh, PartitionSpec())

    def place(params):
        placed = jax.device_put(params, copied)
        placed["embed"]["embedding"] = jax.device_put(params["embed"]["embedding"], split)
        placed["head"]["kernel"] = jax.device_put(params["head"]["kernel"], split)
        return placed

    params = DecodeParams(place(params_of(LLAMA)), (place(other_model(1)),))
    several = Engine(params, one.program, num_slots=2, max_model_len=64, page_size=8, dtype=jnp.float32)
    assert ids_of(several, *requests) == ids_of(one, *requests)


@pytest.mark.parametrize("engine", [shared_engine, naive, drawn])
def test_min_tokens_bans_the_end_for_exactly_so_long(engine) -> None:
    # case B029: counted per token, not per step
    stop = greedy(PROMPT, max_tokens=3)[2]
    for count in (0, 4, 7):
        sampling = SamplingParams(temperature=0, min_tokens=count, stop_token_ids=[stop], logit_bias={stop: 50})
        [result] = run_requests(engine(), [request(sampling)])
        assert len(result.ids) == count + 1
        assert result.ids[-1] == stop and stop not in result.ids[:-1]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("engine", [shared_engine, naive, drawn])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_those_of_a_plain_pass(engine, temperature: float) -> None:
    # case B076: accepted and bonus tokens alike, before temperature, bias and penalties
    sampling = SamplingParams(
        temperature=temperature, logprobs=5, prompt_logprobs=3, repetition_penalty=1.2, logit_bias={7: 3.0}
    )
    prompt = PROMPTS[3]
    neighbour = request(SamplingParams(temperature=1), seed=9)
    result, _ = run_requests(engine(), [request(sampling, prompt=prompt), neighbour])
    whole = [*prompt, *result.ids]
    expected = np.log(softmax(plain_logits(whole)))
    first = len(prompt) - 1
    got = np.concatenate([part.logprob_T for part in result.logprobs])
    assert len(got) == len(result.ids) == 24
    np.testing.assert_allclose(got, expected[range(first, len(whole) - 1), result.ids], atol=1e-4)
    tops = np.concatenate([part.top_logprob_TK for part in result.logprobs])
    top_ids = np.concatenate([part.top_id_TK for part in result.logprobs])
    ranks = np.concatenate([part.rank_T for part in result.logprobs])
    for t, row in enumerate(expected[first : len(whole) - 1]):
        np.testing.assert_allclose(tops[t], np.sort(row)[::-1][: tops.shape[1]], atol=1e-4)
        np.testing.assert_allclose(row[top_ids[t]], tops[t], atol=1e-4)
        assert abs(int(ranks[t]) - (1 + int((row > row[result.ids[t]]).sum()))) <= 1
    of_prompt = result.prompt_logprobs
    assert of_prompt is not None and len(of_prompt.logprob_T) == len(prompt) - 1
    np.testing.assert_allclose(of_prompt.logprob_T, expected[range(len(prompt) - 1), prompt[1:]], atol=1e-4)


@pytest.mark.parametrize("engine", [shared_engine, naive, drawn])
def test_a_request_without_any_token_to_choose_fails_alone(engine) -> None:
    # cases B092, B097: everything is banned from some token on
    stuck = SamplingParams(temperature=1, allowed_token_ids=[4, 5], stop_token_ids=[4, 5], min_tokens=3)
    banned = dataclasses.replace(stuck, stop_token_ids=[], min_tokens=0)
    requests = [
        request(SAMPLINGS[0], seed=3), request(stuck), request(banned, bad_sequences=[[4], [5, 5]], max_tokens=9),
    ]  # fmt: skip
    good, first, later = run_requests(engine(), requests)
    assert good.ids == ids_of(engine(), requests[0])[0] and good.error is None
    assert (first.ids, first.finish_reason) == ([], "error")
    assert "ban every token" in str(first.error)
    # 4 is banned always, 5 behind 5: one token can be chosen, then none
    assert (later.ids, later.finish_reason) == ([5], "error")


def test_banned_sequences_depend_on_the_path() -> None:
    # case B092: at every node by its own parent, whether or not the tree holds the banned child
    free = greedy(PROMPT, max_tokens=24)
    banned = [free[2:4], free[5:8], [free[9]]]
    sampling = SamplingParams(temperature=0)
    expected, *others = (
        ids_of(engine, request(sampling, bad_sequences=banned))[0] for engine in (shared_engine(), naive(), drawn())
    )
    assert expected[:3] == free[:3] and expected[3] != free[3]
    assert others == [expected, expected]
    text = ",".join(map(str, expected))
    assert not any(",".join(map(str, ids)) in text.split() for ids in banned)
    for ids in banned:
        assert all(expected[i : i + len(ids)] != ids for i in range(len(expected)))


def test_too_many_banned_sequences_are_refused_by_name() -> None:
    with pytest.raises(SamplingError, match=r"bad_words come to 65 sequences of up to 2 tokens; at most 64"):
        ids_of(shared_engine(), request(SAMPLINGS[0], bad_sequences=[[i % 64, 1] for i in range(65)]))


def test_a_greedy_rule_refuses_temperatures() -> None:
    # case B017: never silently greedy
    engine = make_engine([NGRAM], [()], verification="greedy")
    with pytest.raises(SamplingError, match=r"temperature=0\.5 needs a stochastic rule"):
        ids_of(engine, request(SamplingParams(temperature=0.5)))


def test_three_equally_likely_tokens_all_come() -> None:
    # case B017
    sampling = SamplingParams(temperature=1, allowed_token_ids=[1, 2, 3], logit_bias=dict.fromkeys((1, 2, 3), 0))
    found = Counter(ids[0] for ids in ids_of(drawn(), *(request(sampling, seed=s, max_tokens=1) for s in range(300))))
    assert set(found) == {1, 2, 3}


def test_what_the_host_cuts_off_is_not_counted() -> None:
    # cases B020, B081: emitted == sum over steps; accepted nodes behind the cut were never kept
    speculator, params = self_draft("1,1,1")
    engine = make_engine([speculator], [params])
    whole = greedy(PROMPT, max_tokens=40)
    for keep in range(1, 10):
        left = [keep]

        def watch(new: list[int], left: list[int] = left) -> int | None:
            left[0] -= len(new)
            return len(new) + left[0] if left[0] <= 0 else None

        [result] = run_requests(engine, [request(SamplingParams(temperature=0), max_tokens=40, watch=watch)])
        assert result.ids == whole[:keep] and result.finish_reason == "stop"
        stats = result.stats
        steps, rest = divmod(keep, 4)
        assert stats.tokens == keep and stats.steps == steps + (rest > 0)
        # each whole step keeps three nodes and a bonus token, the last one `rest` nodes
        assert stats.accepted_by_position == [steps + (rest >= d) for d in (1, 2, 3)]
        assert stats.accepted_by_speculator == {"ssm": 3 * steps + rest}
    assert ids_of(engine, request(SamplingParams(temperature=0), max_tokens=40)) == [whole]


def test_draft_distributions_take_what_the_formula_says() -> None:
    # 8 bytes (id and probability) x candidates x expanded nodes, per slot and SSM; leaves expand into nothing
    speculator, state = ssm("1,3,2", IID), drawn()._state
    context = Context(state.token_BS, state.committed_B, state.prompt_len_B, state.sampling)
    draft, _ = jax.eval_shape(speculator.propose, other_model(1), state.speculators[0], context, state.active_B)
    num_slots, expanded = 4, 1 + 1 + 3
    assert sum(x.size * x.dtype.itemsize for x in draft.drawn_from) == 8 * MAX_CANDIDATES * expanded * num_slots


def test_nothing_compiles_for_any_sampling(caplog: pytest.LogCaptureFixture) -> None:
    # case B045: the first request with log-probabilities, penalties, bans, seeds
    engine = drawn()
    engine.warm_up()
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for sampling in SAMPLINGS:
            for stream in (False, True):
                more = dataclasses.replace(sampling, logprobs=2, prompt_logprobs=0)
                requests = [request(s, prompt=PROMPTS[3], bad_sequences=[[1], [2, 3]]) for s in (sampling, more)]
                run_requests(engine, requests, stream=stream)
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []


def test_stream_and_batch_agree() -> None:
    for engine in (naive(), drawn()):
        requests = [request(sampling, seed=2) for sampling in SAMPLINGS[:3]]
        streamed = [result.ids for result in run_requests(engine, requests, stream=True)]
        assert streamed == ids_of(engine, *requests)
