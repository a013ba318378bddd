"""Speculation by request: which part of the trees a request wants, mixed in one batch; answers never change."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from decode_cases import VOCAB, Result, greedy, make_engine, params_of, run_requests, self_draft, shared_engine

from specinfer_jax.errors import SpeculationError
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.speculation.narrow import common_rows, narrowed
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.rules import MSS_RENORMALIZED, WITHOUT_REPLACEMENT
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.tree.expand import parse_expansion

PROMPT = [3, 4] * 6
OFF = RequestSpeculation(enabled=False)


def requests_of(parts: list[RequestSpeculation | None], **fields: Any) -> list[EngineRequest]:
    return [EngineRequest(PROMPT, 16, frozenset(), speculation=part, **fields) for part in parts]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """An SSM with the LLM's weights and an n-gram, trees verified whole."""
    speculator, params = self_draft("1,2,1")
    return make_engine([speculator, NgramSpeculator(branch_depths=(2,))], [params, ()], num_slots=5)


def proposed(result: Result) -> tuple[dict[str, int], list[int]]:
    return dict(result.stats.proposed_by_speculator), list(result.stats.proposed_by_position)


def test_requests_of_all_kinds_in_one_batch(engine: Engine) -> None:
    parts = [
        None, OFF, RequestSpeculation(tree="1,1"), RequestSpeculation(ssms=("ngram",)),
        RequestSpeculation(ssms=("ssm",), max_nodes=1),
    ]  # fmt: skip
    results = run_requests(engine, requests_of(parts))
    expected = greedy(PROMPT, max_tokens=16)
    assert [result.ids for result in results] == [expected] * len(parts)
    whole, off, narrow, ngram, one = results
    assert whole.stats.acceptance_by_position[0] == 1
    assert whole.stats.proposed_by_speculator["ssm"] > 3 * whole.stats.steps
    assert proposed(off) == ({"ssm": 0, "ngram": 0}, [0, 0, 0])
    assert (off.stats.steps, off.stats.tokens) == (16, 16)
    assert narrow.stats.proposed_by_speculator["ssm"] <= 2 * narrow.stats.steps
    assert narrow.stats.acceptance_by_position[0] == 1
    assert narrow.stats.proposed_by_position[2] == 0
    assert ngram.stats.proposed_by_speculator["ssm"] == 0 < ngram.stats.proposed_by_speculator["ngram"]
    assert one.stats.steps == 8
    assert proposed(one) == ({"ssm": 8, "ngram": 0}, [8, 0, 0])
    # the same alone: neighbours change neither tokens nor steps
    for part, beside in zip(parts, results, strict=True):
        [alone] = run_requests(engine, requests_of([part]))
        assert (alone.ids, alone.stats.steps, proposed(alone)) == (beside.ids, beside.stats.steps, proposed(beside))


@pytest.mark.slow
def test_the_gate_respects_every_slots_own_limits() -> None:
    speculator, params = self_draft("1,2,1")
    engine = make_engine(
        [speculator, NgramSpeculator()], [params, ()], num_slots=4, adaptive=True, max_model_len=128, warm=True
    )
    parts = [OFF, RequestSpeculation(max_nodes=2), None, RequestSpeculation(ssms=("ngram",))]
    results = run_requests(engine, requests_of(parts))
    assert [result.ids for result in results] == [greedy(PROMPT, max_model_len=128, max_tokens=16)] * 4
    assert sum(results[0].stats.proposed_by_speculator.values()) == 0
    assert sum(results[1].stats.proposed_by_position) <= 2 * results[1].stats.steps
    assert results[3].stats.proposed_by_speculator["ssm"] == 0


def test_draws_are_those_of_the_request_alone() -> None:
    # where draws count, a request's tokens depend on its own trees and on nothing else
    draft = params_of(self_draft("1")[0].config, seed=5)
    speculator = SsmSpeculator(
        self_draft("1")[0].config, parse_expansion("2,2"), 256, VOCAB, children=WITHOUT_REPLACEMENT
    )
    engine = make_engine([speculator], [draft], num_slots=4, verification=MSS_RENORMALIZED)
    parts = [None, RequestSpeculation(max_nodes=3), RequestSpeculation(tree="1,2"), OFF]
    requests = [
        EngineRequest([9, 8], 20, frozenset(), SamplingParams(temperature=1.0), 7, speculation=part) for part in parts
    ]
    beside = run_requests(engine, requests)
    alone = [run_requests(engine, [request])[0] for request in requests]
    assert [result.ids for result in beside] == [result.ids for result in alone]
    assert beside[1].stats.proposed_by_speculator["ssm"] <= 3 * beside[1].stats.steps
    assert beside[3].stats.steps == 20
    assert beside[3].ids == run_requests(shared_engine(), [dataclasses.replace(requests[3], speculation=None)])[0].ids


def test_rows_of_narrower_trees() -> None:
    shape = parse_expansion("1,2,1")
    for tree, rows in (("1,1", [1, 2]), ("1,2", [1, 2, 3]), ("3,3,3,3", [1, 2, 3, 4, 5]), ("2/1,0/1", [1, 2, 4])):
        assert (np.flatnonzero(common_rows(shape, parse_expansion(tree))) + 1).tolist() == rows, tree


def test_what_does_not_fit_is_refused(engine: Engine) -> None:
    for wrong, message in (
        (RequestSpeculation(ssms=("ssm9",)), "no speculator 'ssm9'; this LLM has ssm, ngram"),
        (RequestSpeculation(tree="one"), 'tree "one" is not'),
        (RequestSpeculation(tree="1,1", ssms=("ngram",)), "needs an SSM"),
    ):
        with pytest.raises(SpeculationError, match=message):
            engine.check(EngineRequest(PROMPT, 4, frozenset(), speculation=wrong))
    for fields, message in (
        ({"max_nodes": 0}, "at least 1"), ({"max_nodes": True}, "whole number"), ({"ssms": ()}, "at least one"),
        ({"ssms": "ssm"}, "list of names"),
    ):  # fmt: skip
        with pytest.raises(SpeculationError, match=message):
            RequestSpeculation(**fields)
    with pytest.raises(SpeculationError, match="this LLM has none"):
        narrowed(make_engine().program, RequestSpeculation(ssms=("ssm",)))
