"""The engine: nothing compiles after warm-up, faults leave it usable, streams equal batches."""

import jax
import numpy as np
import pytest
from decode_cases import PROMPTS, greedy, make_engine, run, self_draft
from serving_cases import Script

from specinfer_jax.serving.device import step_costs
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.serving.warm_up import ReadyDevice
from specinfer_jax.speculation.ngram import NgramSpeculator


@pytest.fixture(scope="module")
def merging() -> Engine:
    """An SSM and n-grams behind the gate, two slots, compiled and measured."""
    speculator, params = self_draft("1,2")
    return make_engine([speculator, NgramSpeculator()], [params, ()], adaptive=True, num_slots=2, warm=True)


@pytest.fixture(scope="module")
def sharing() -> Engine:
    """An SSM that is the LLM."""
    speculator, params = self_draft("1,1")
    return make_engine([speculator], [params])


def test_nothing_compiles_after_warm_up(merging: Engine, caplog: pytest.LogCaptureFixture) -> None:
    # case B045
    engine = merging
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for count, prompt in enumerate(PROMPTS, 1):
            run(engine, [prompt] * (count % 3 + 1), max_tokens=3 + count, stop=[count])
            list(engine.run([EngineRequest(prompt, 4, frozenset())], stream=True))
    compiled = [record.message for record in caplog.records if "Compiling" in record.message]
    assert compiled == []


def test_a_stream_yields_what_a_batch_returns(sharing: Engine) -> None:
    pieces = list(sharing.run([EngineRequest(PROMPTS[0], 10, frozenset())], stream=True))
    assert [len(piece.new_token_ids) for piece in pieces] == [3, 3, 3, 1]
    assert [i for piece in pieces for i in piece.new_token_ids] == greedy(PROMPTS[0], max_tokens=10)
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]


def test_an_abandoned_stream_leaves_the_engine_usable() -> None:
    engine = make_engine()
    stream = engine.run([EngineRequest(PROMPTS[0], 10, frozenset())], stream=True)
    next(stream)
    with pytest.raises(RuntimeError, match="already running"):
        next(engine.run([EngineRequest([1], 1, frozenset())]))
    stream.close()
    assert run(engine, [PROMPTS[1]], max_tokens=5)[0].ids == greedy(PROMPTS[1], max_tokens=5)


def test_a_failing_step_loses_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    # case B047: the donated cache is gone after an exception; the next call builds a new one
    engine = make_engine(warm=True)
    compiled = engine._burst

    def fails(*args):
        compiled(*args)
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine, "_burst", fails)
    with pytest.raises(RuntimeError, match="device lost"):
        run(engine, [PROMPTS[0]])
    monkeypatch.setattr(engine, "_burst", compiled)
    assert run(engine, [PROMPTS[0]], max_tokens=5)[0].ids == greedy(PROMPTS[0], max_tokens=5)


def test_the_ssm_may_share_the_llms_arrays(sharing: Engine) -> None:
    # case B047: shared parameters are never donated
    assert sharing.params.llm is sharing.params.speculators[0]
    for _ in range(2):
        assert run(sharing, [PROMPTS[2]], max_tokens=9)[0].ids == greedy(PROMPTS[2], max_tokens=9)


@pytest.mark.parametrize("num_slots", [1, pytest.param(2, marks=pytest.mark.slow), 33])
def test_any_number_of_slots(num_slots: int) -> None:
    # case B053
    engine = make_engine([NgramSpeculator(branch_depths=(3,))], [()], num_slots=num_slots, max_model_len=24)
    prompts = [[i % 60, (3 * i) % 60] for i in range(5)]
    expected = [greedy(prompt, max_model_len=24, max_tokens=6) for prompt in prompts]
    assert [result.ids for result in run(engine, prompts, max_tokens=6)] == expected


def test_a_prompt_longer_than_any_chunk_and_as_long_as_the_limit_allows() -> None:
    # case B053
    prompt = [(13 * i + 1) % 64 for i in range(200)]
    speculator, params = self_draft("1,1")
    engine = make_engine([speculator], [params], max_model_len=201)
    assert run(engine, [prompt])[0].ids == greedy(prompt, max_model_len=201)


def test_costs_are_measured_for_every_bucket(merging: Engine) -> None:
    verify = np.asarray(merging.costs.verify_J)
    assert verify.shape == (len(merging.program.buckets),)
    assert ((verify > 0) & (verify < 10)).all()
    draft = np.asarray(merging.costs.draft_M)
    assert draft.shape == (2,)
    assert draft[1] == 0


def test_drafting_is_measured_whatever_n_grams_offer(merging: Engine) -> None:
    """The probe repeats itself, so n-grams promise more than the SSM; it is timed alone all the same."""
    ReadyDevice.warm_up(merging)  # without the end that empties the slots
    proposed_BM = merging.fetch(merging._state.stats.proposed_BM)
    merging._lose_caches()
    assert proposed_BM[0, 0] > 0 and proposed_BM[0, 1] == 0


def test_steps_beside_a_prefill_pass_are_brief(merging: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees pay, but with one a step takes as long as a chunk: while a prompt of two chunks comes in there are none."""
    monkeypatch.setattr(merging, "_costs", step_costs(np.linspace(1.0, 1.01, len(merging.program.buckets)), [0.0, 0.0]))
    only = RequestSpeculation(ssms=("ssm",))
    stream = EngineRequest(PROMPTS[0], 29, frozenset(), speculation=only)
    pieces = {}
    for chunk_seconds in (1.0, 4.0):
        monkeypatch.setattr(merging, "_chunk_seconds", chunk_seconds)
        prompt = [*PROMPTS[3][:36], int(chunk_seconds)]
        script = Script({0: [(0, stream)], 4: [(1, EngineRequest(prompt[::-1], 2, frozenset()))]})
        progress = [p for p in merging.serve(script) if p.index == 0]
        assert [i for p in progress for i in p.new_token_ids] == greedy(PROMPTS[0], max_tokens=29)
        pieces[chunk_seconds] = sorted(len(p.new_token_ids) for p in progress)
    assert pieces == {1.0: [1, 1, *[3] * 9], 4.0: [2, *[3] * 9]}
