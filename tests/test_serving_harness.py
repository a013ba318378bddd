"""Requests with alphabets of their own, at random times, with random settings: nobody gets another's ids."""

import dataclasses
import random
from typing import Any

import jax
import pytest
from decode_cases import VOCAB, make_engine, run_requests, self_draft, shared_engine
from serving_cases import Script, serve

from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.speculation.ngram import NgramSpeculator

SLOTS, LETTERS = 8, VOCAB // 8
SPECULATION = (
    None, None, RequestSpeculation(enabled=False), RequestSpeculation(max_nodes=1), RequestSpeculation(max_nodes=3),
    RequestSpeculation(tree="1,1"), RequestSpeculation(ssms=("ngram",)), RequestSpeculation(ssms=("ssm",)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Stop:
    """A stop rule of the host: ends behind the second time that an id comes."""

    token_id: int

    def watch(self) -> Any:
        seen = 0

        def rule(ids: list[int]) -> int | None:
            nonlocal seen
            for number, i in enumerate(ids, 1):
                seen += i == self.token_id
                if seen == 2:
                    return number
            return None

        return rule


def random_request(rng: random.Random, alphabet: list[int]) -> tuple[EngineRequest, Stop | None]:
    """A request that may emit ids of its alphabet only; many begin with the same pages."""
    begin = rng.choice([0, 0, 8, 16, 24])
    prompt = [alphabet[(k * k) % LETTERS] for k in range(begin)] + rng.choices(alphabet, k=rng.randint(1, 9))
    most = rng.choice([1, 3, 10, 20, 1_000])
    temperature = rng.choice([0, 0, 0.7, 1.2])
    sampling = SamplingParams(
        temperature=temperature, max_tokens=most, allowed_token_ids=alphabet,
        frequency_penalty=rng.choice([0, 0, 0.4]), top_k=rng.choice([0, 0, 5]),
        logprobs=rng.choice([None, None, None, 0]),
    )  # fmt: skip
    stops = frozenset(rng.sample(alphabet, rng.choice([0, 0, 1])))
    request = EngineRequest(
        prompt, most, stops, sampling, rng.getrandbits(64), rng.randint(0, 1), speculation=rng.choice(SPECULATION),
        priority=rng.choice([0, 0, 0, 1, -1]),
    )  # fmt: skip
    return request, Stop(rng.choice(alphabet)) if rng.random() < 0.2 else None


def watched(request: EngineRequest, stop: Stop | None) -> EngineRequest:
    return request if stop is None else dataclasses.replace(request, watch=stop.watch())


@pytest.fixture(scope="module")
def engine() -> Engine:
    """8 slots and a third of the pages that they could fill."""
    speculator, params = self_draft("1,2,1")
    return make_engine(
        [speculator, NgramSpeculator(branch_depths=(3, 2))], [params, ()], num_slots=SLOTS, adaptive=True, warm=True,
        num_pages=22,
    )  # fmt: skip


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])
def test_nobody_gets_anothers_tokens(engine: Engine, count: int, caplog: pytest.LogCaptureFixture) -> None:
    # case B018, B039, B049
    rng = random.Random(count)
    requests, arrivals, cancels = [], {}, {}
    now = 0
    for index in range(count):
        now += rng.choice([0, 0, 1, 1, 4])
        alphabet = list(range(LETTERS * (index % 8), LETTERS * (index % 8 + 1)))
        requests.append(random_request(rng, alphabet))
        arrivals.setdefault(now, []).append((index, watched(*requests[-1])))
        if rng.random() < 0.15:
            cancels.setdefault(now + rng.randint(0, 30), []).append(index)
    preempted = engine.manager.preemptions
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found = serve(engine, Script(arrivals, cancels))
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
    assert engine.manager.pages_used == 0
    assert engine.manager.preemptions > preempted, "pages never ran out"
    shared = sum(served.stats.cached_tokens > 0 for served in found.values() if served.stats is not None)
    assert shared > count / 20, "nothing was shared"
    plain = shared_engine()
    ended = 0
    for index, (request, stop) in enumerate(requests):
        served = found.get(index)
        if served is None:
            continue  # cancelled before its first token
        low = LETTERS * (index % 8)
        assert all(low <= i < low + LETTERS for i in served.ids), "a foreign id"
        [alone] = run_requests(plain, [watched(dataclasses.replace(request, speculation=None), stop)])
        if served.finish_reason is None:
            assert alone.ids[: len(served.ids)] == served.ids
        else:
            assert (served.ids, served.finish_reason) == (alone.ids, alone.finish_reason)
            ended += 1
    assert ended > count * 0.7
