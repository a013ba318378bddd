"""Pages in the engine: shared prefixes, preemption, chunks between steps; outputs are those of requests alone."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import VOCAB, greedy, make_engine, run, run_requests, self_draft, shared_engine
from serving_cases import Script, serve

import specinfer_jax.serving.engine
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.speculation.ngram import NgramSpeculator

PREFIX = [(5 * i + 3) % VOCAB for i in range(27)]  # three full pages of 8, and more


def request(prompt: list[int], max_tokens: int = 12, **fields: Any) -> EngineRequest:
    return EngineRequest(prompt, max_tokens, frozenset(), **fields)


@pytest.fixture(scope="module")
def drafting() -> Engine:
    """An SSM with the LLM's weights; 4 slots, and pages for about two whole contexts."""
    speculator, params = self_draft("1,1,1")
    return make_engine([speculator], [params], num_slots=4, num_pages=19, warm=True)


def test_a_shared_prefix_is_prefilled_once_and_accepts_as_ever(drafting: Engine) -> None:
    passes = count_passes(drafting)
    prompts = [[*PREFIX, i] for i in range(4)]
    results = run(drafting, prompts, max_tokens=9)
    assert [result.stats.cached_tokens for result in results] == [0, 24, 24, 24]
    assert passes == [32, 32, 32, 32], "one for the first prompt, one for what each of the others adds"
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids == greedy(prompt, max_tokens=9)
        assert result.stats.acceptance_by_position == [1.0] * 3
    again = run(drafting, prompts[:1], max_tokens=9)[0]
    assert (again.stats.cached_tokens, again.ids) == (24, results[0].ids)
    assert drafting.manager.pages_used == 0


def test_an_ssm_with_a_shorter_context_shares_what_it_has() -> None:
    speculator, params = self_draft("1,1", max_len=20)
    engine = make_engine([speculator], [params], num_slots=2)
    for prompt in ([*PREFIX, 1], [*PREFIX, 2], [*PREFIX[:17], 9]):
        assert run(engine, [prompt], max_tokens=9)[0].ids == greedy(prompt, max_tokens=9)


def test_prompt_logprobs_need_every_token_and_share_nothing(drafting: Engine) -> None:
    asks = request([*PREFIX, 9], 4, sampling=SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0))
    for _ in range(2):
        [result] = run_requests(drafting, [asks])
        assert result.stats.cached_tokens == 0
        assert result.prompt_logprobs is not None
        assert len(result.prompt_logprobs.logprob_T) == len(PREFIX)


def test_preempted_requests_end_as_if_nothing_had_happened(drafting: Engine) -> None:
    # case B049, B039: greedy, seeded, with penalties; 4 slots that would need 32 pages, and there are 19
    sampling = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5, seed=2),
        SamplingParams(temperature=0, presence_penalty=1.0, logit_bias={3: 1.0}, logprobs=0),
    ]
    requests = [
        request([20 + i, 3, i, 7], 58, sampling=dataclasses.replace(own, max_tokens=58), seed=own.seed or 0)
        for i, own in enumerate(sampling)
    ]
    alone = [run_requests(shared_engine(), [one])[0] for one in requests]
    before = drafting.manager.preemptions
    for found in (
        dict(enumerate(run_requests(drafting, requests))),
        serve(drafting, Script({0: list(enumerate(requests))})),
    ):
        for i, expected in enumerate(alone):
            assert found[i].ids == expected.ids
            assert found[i].finish_reason == "length"
            stats = found[i].stats
            assert stats.tokens == 58 == stats.steps + sum(stats.accepted_by_position)
    assert drafting.manager.preemptions >= before + 2
    assert drafting.manager.pages_used == 0


def test_a_running_stream_waits_for_one_chunk_at_most(drafting: Engine) -> None:
    passes = count_passes(drafting)
    done: list[tuple[int, int]] = []
    script = Script(
        {
            0: [(0, request([7, 7], 30))],
            2: [(1 + i, request([(i + 11 * k) % VOCAB for k in range(50)], 4)) for i in range(3)],
        }
    )
    for progress in drafting.serve(script):
        if progress.index == 0:
            done.append((script.iteration, len(passes)))
    iterations, chunks = (np.diff(x) for x in zip(*done, strict=True))
    assert max(iterations) == 1, "tokens in every iteration"
    assert max(chunks) == 1
    assert sum(chunks) >= 4, "prompts came meanwhile"


def test_cancelled_requests_leave_at_once_and_give_their_pages_back(drafting: Engine) -> None:
    script = Script(
        {0: [(i, request([i, 2], 50)) for i in range(6)]},
        {3: [0], 5: [5, 4], 6: [99]},  # running, waiting, unknown
    )
    found = serve(drafting, script)
    assert {i for i in found if found[i].finish_reason == "length"} == {1, 2, 3}
    assert max(found[0].iterations) <= 3
    assert drafting.manager.pages_used == 0


def test_the_host_sees_a_step_while_the_device_takes_the_next(drafting: Engine) -> None:
    """Results are those of a step before, nothing is lost at the end, and stop rules still see every step."""
    for watch in (None, lambda ids: 1 if 1_000 in ids else None):
        plain = greedy([5, 6], max_tokens=20)
        found = serve(drafting, Script({0: [(0, request([5, 6], 20, watch=watch))]}))
        assert found[0].ids == plain
        assert found[0].iterations[0] == (1 if watch is None else 0)
    stops_at = plain[6]
    keep = lambda ids: ids.index(stops_at) + 1 if stops_at in ids else None  # noqa: E731
    found = serve(drafting, Script({0: [(0, request([5, 6], 20, watch=keep))]}))
    assert found[0].ids == plain[: plain.index(stops_at) + 1]


def test_nothing_compiles_while_pages_move(drafting: Engine, caplog: pytest.LogCaptureFixture) -> None:
    # case B045
    with jax.log_compiles(), caplog.at_level("WARNING"):
        requests = [request([*PREFIX[: 9 * i], i], 20 + i) for i in range(5)]
        serve(drafting, Script({0: list(enumerate(requests))}, {4: [1]}))
        run_requests(drafting, requests)
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []


def test_a_fault_on_the_host_fails_one_request(drafting: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original = specinfer_jax.serving.engine.readmission

    def fails(one: EngineRequest, *arguments: Any, **options: Any) -> Any:
        if one.prompt_ids[0] == 13:
            raise MemoryError("no room for the mask")
        return original(one, *arguments, **options)

    monkeypatch.setattr(specinfer_jax.serving.engine, "readmission", fails)
    requests = [request([first, 1], 9) for first in (12, 13, 14)]
    found = serve(drafting, Script({0: list(enumerate(requests))}, survives_faults=True))
    assert found[1].finish_reason == "error"
    assert "no room for the mask" in (found[1].error or "")
    for i in (0, 2):
        assert found[i].ids == greedy(requests[i].prompt_ids, max_tokens=9)


def test_a_fault_on_the_device_fails_what_is_in_the_slots(drafting: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = drafting._burst, []

    def fails_once(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("device lost")
        return original(*arguments)

    monkeypatch.setattr(drafting, "_burst", fails_once)
    requests = [request([*PREFIX, i], 9) for i in range(6)]
    found = serve(drafting, Script({0: list(enumerate(requests))}, survives_faults=True))
    failed = {i for i in found if found[i].finish_reason == "error"}
    assert failed and failed != set(range(6))
    for i in set(range(6)) - failed:
        assert found[i].ids == greedy(requests[i].prompt_ids, max_tokens=9), "nothing is shared with lost caches"
    assert drafting.manager.pages_used == 0


def test_n_grams_look_at_what_was_generated_before_a_preemption() -> None:
    engine = make_engine([NgramSpeculator(branch_depths=(3, 2))], [()], num_slots=3, num_pages=9)
    prompts = [[i, 4, 4] for i in range(3)]
    for prompt, result in zip(prompts, run(engine, prompts, max_tokens=55), strict=True):
        assert result.ids == greedy(prompt, max_tokens=55)
    assert engine.manager.preemptions > 0


def test_shared_pages_are_not_touched_by_those_who_share_them(drafting: Engine) -> None:
    run(drafting, [[*PREFIX, 1]], max_tokens=2)
    keys = drafting.manager.pool_of(0)
    pages = list(keys._kept)
    before = np.asarray(drafting._state.cache.k_pages[0][:, jnp.asarray(pages)]).copy()
    run(drafting, [[*PREFIX, i] for i in range(2, 5)], max_tokens=6)
    after = np.asarray(drafting._state.cache.k_pages[0][:, jnp.asarray(pages)])
    kept = [n for n, page in enumerate(pages) if page in keys._kept]
    assert len(kept) >= 3
    np.testing.assert_array_equal(after[:, kept], before[:, kept])


def count_passes(engine: Engine) -> list[int]:
    """Rows of every prefill pass from now on."""
    passes: list[int] = []

    def prefill(slot: int, chunk: int) -> Any:
        passes.append(chunk)
        return Engine.prefill(engine, slot, chunk)

    engine.prefill = prefill  # type: ignore[method-assign]
    return passes
