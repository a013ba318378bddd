"""The engine: nothing compiles after warm-up, faults leave it usable, streams equal batches."""

import jax
import numpy as np
import pytest
from decode_cases import PROMPTS, greedy, make_engine, run, self_draft

from specinfer_jax.serving.engine import EngineRequest
from specinfer_jax.speculation.ngram import NgramSpeculator


def test_nothing_compiles_after_warm_up(caplog: pytest.LogCaptureFixture) -> None:
    # case B045
    speculator, params = self_draft("1,2")
    engine = make_engine([speculator, NgramSpeculator()], [params, ()], adaptive=True, num_slots=2, warm=True)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for count, prompt in enumerate(PROMPTS, 1):
            run(engine, [prompt] * (count % 3 + 1), max_tokens=3 + count, stop=[count])
            list(engine.run([EngineRequest(prompt, 4, frozenset())], stream=True))
    compiled = [record.message for record in caplog.records if "Compiling" in record.message]
    assert compiled == []


def test_a_stream_yields_what_a_batch_returns() -> None:
    speculator, params = self_draft("1,1")
    engine = make_engine([speculator], [params])
    pieces = list(engine.run([EngineRequest(PROMPTS[0], 10, frozenset())], stream=True))
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


def test_the_ssm_may_share_the_llms_arrays() -> None:
    # case B047: shared parameters are never donated
    speculator, params = self_draft("1,1")
    engine = make_engine([speculator], [params])
    assert engine.params.llm is engine.params.speculators[0]
    for _ in range(2):
        assert run(engine, [PROMPTS[2]], max_tokens=9)[0].ids == greedy(PROMPTS[2], max_tokens=9)


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


def test_costs_are_measured_for_every_bucket() -> None:
    speculator, params = self_draft("1,2")
    engine = make_engine([speculator, NgramSpeculator()], [params, ()], adaptive=True, warm=True)
    verify = np.asarray(engine.costs.verify_J)
    assert verify.shape == (len(engine.program.buckets),)
    assert ((verify > 0) & (verify < 10)).all()
    draft = np.asarray(engine.costs.draft_M)
    assert draft.shape == (2,)
    assert draft[1] == 0
