"""Plain steps in turn with speculation: never much slower than either, the same tokens, right statistics."""

import random
from collections.abc import Callable

import jax
import numpy as np
import pytest
from decode_cases import PROMPTS, greedy, make_engine, run_requests, self_draft
from serving_cases import Script, serve

from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.serving.plain_steps import PlainSteps
from specinfer_jax.serving.request_speculation import RequestSpeculation
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.plain import can_step_plainly
from specinfer_jax.speculation.rules import MSS
from specinfer_jax.speculation.state import StepProgram

SLOTS = 8


class World:
    """Eight slots that never finish, and programs that take as long as it says."""

    def __init__(self, *, most: int = 1, lag: int = 0, noise: float = 0.0) -> None:
        self.choice = PlainSteps()
        self.rng = random.Random(0)
        self.most, self.lag, self.noise = most, lag, noise
        self.tokens = self.seconds = 0.0
        self.steps: list[bool] = []
        """Of every step, whether it was plain."""
        self._on_the_way: list[dict] = []

    def run(self, steps: int, *, plain: float, trees: float, gain: float, is_alone: bool = True) -> "World":
        """So many steps; `gain`: mean tokens of a slot's step with trees; they come in runs of four."""
        end = len(self.steps) + steps
        while len(self.steps) < end:
            count, is_plain = min(self.most, self.choice.steps_left), self.choice.is_plain
            lucky = sum(self.rng.random() < (gain - 1) / 4 for _ in range(count * SLOTS))
            tokens = count * SLOTS + (0 if is_plain else 4 * lucky)
            seconds = count * (plain if is_plain else trees) * (1 + self.noise * self.rng.random())
            self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
            self.steps += [is_plain] * count
            self._on_the_way.append(
                {
                    "is_plain": is_plain, "steps": count, "slot_steps": count * SLOTS, "tokens": tokens,
                    "seconds": seconds if is_alone else None,
                }
            )  # fmt: skip
            if len(self._on_the_way) > self.lag:
                self.choice.seen(**self._on_the_way.pop(0))
        return self

    def against_plain(self, plain: float) -> float:
        """Tokens per second by those of plain steps alone."""
        return self.tokens / self.seconds * plain * (1 + self.noise / 2) / SLOTS


@pytest.mark.parametrize(("most", "lag"), [(1, 0), (1, 1), (1000, 0)])
@pytest.mark.parametrize("gain", [1.0, 1.02])
def test_a_losing_speculator_costs_little_and_is_tried_rarely(most: int, lag: int, gain: float) -> None:
    world = World(most=most, lag=lag, noise=0.1).run(1000, plain=0.086, trees=0.098, gain=gain)
    assert world.against_plain(0.086) > 0.98
    world.steps.clear()
    world.run(1000, plain=0.086, trees=0.098, gain=gain)
    assert world.steps.count(False) < 120


@pytest.mark.parametrize("most", [1, 1000])
def test_a_winning_speculator_is_left_alone(most: int) -> None:
    world = World(most=most, noise=0.1).run(2000, plain=0.086, trees=0.11, gain=2.0)
    assert world.steps.count(True) < 60
    assert world.against_plain(0.086) > 0.96 * 2.0 * 0.086 / 0.11


def test_it_goes_back_to_trees_when_text_becomes_repetitive_and_away_again() -> None:
    world = World(lag=1).run(500, plain=0.086, trees=0.098, gain=1.0)
    world.steps.clear()
    world.run(300, plain=0.086, trees=0.12, gain=3.0)
    assert world.steps[70:].count(True) < 10  # the longest wait, one try, and it stays
    world.steps.clear()
    world.run(300, plain=0.086, trees=0.098, gain=1.0)
    assert world.steps.index(True) <= 34  # a stretch that began while they won, and one more
    assert world.steps[40:].count(False) < 50


def test_trees_that_add_no_token_never_win_by_a_slow_measurement() -> None:
    world = World().run(40, plain=0.3, trees=0.098, gain=1.0)
    assert world.steps.count(True) > 10


def test_a_machine_that_was_slow_when_plain_steps_were_measured_is_measured_again() -> None:
    world = World().run(8, plain=0.3, trees=0.3, gain=1.1)
    world.steps.clear()
    world.run(1000, plain=0.086, trees=0.098, gain=1.05)
    assert world.steps[400:].count(False) < 200


def test_the_first_plain_burst_does_not_count() -> None:
    world = World(most=1000).run(8, plain=20.0, trees=0.098, gain=1.05)  # one burst of four: it was compiled there
    world.steps.clear()
    world.run(400, plain=0.086, trees=0.098, gain=1.05)
    assert world.steps.count(False) < 100


def test_bursts_beside_other_work_end_a_try_as_well() -> None:
    world = World().run(500, plain=0.086, trees=0.098, gain=1.0, is_alone=False)
    assert world.steps.count(True) >= 200
    timed = World().run(100, plain=0.086, trees=0.098, gain=1.0)
    timed.steps.clear()
    timed.run(1000, plain=0.086, trees=0.098, gain=1.0, is_alone=False)
    assert timed.steps.count(False) < 120


def test_which_programs_have_plain_steps() -> None:
    ssm, _ = self_draft("1")
    ngram = NgramSpeculator()
    config = ssm.config
    assert can_step_plainly(StepProgram(config, (ngram,)))
    assert not can_step_plainly(StepProgram(config))
    assert not can_step_plainly(StepProgram(config, (ngram,), adaptive=False))
    assert not can_step_plainly(StepProgram(config, (ngram,), verification=MSS))
    assert not can_step_plainly(StepProgram(config, (ngram, ssm)))


class Clock:
    """Time that passes only while a program runs; counts steps asked of each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, plain: float, trees: float) -> None:
        self.now = 0.0
        self.asked = {"plain_steps": 0, "steps": 0}
        for name, seconds in (("plain_steps", plain), ("steps", trees)):
            monkeypatch.setattr(engine, name, self._timed(name, getattr(engine, name), seconds))
        monkeypatch.setattr(engine, "clock", lambda: self.now)
        monkeypatch.setattr(engine, "_choice", PlainSteps())

    def _timed(self, name: str, original: Callable, seconds: float) -> Callable:
        def run(most: int, **settings):
            self.now += most * seconds
            self.asked[name] += most
            return original(most, **settings)

        return run


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine([NgramSpeculator(branch_depths=(3, 2))], [()], adaptive=True, num_slots=2, warm=True)


SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=7, frequency_penalty=0.3)


@pytest.mark.parametrize("trees", [0.5, 3.0])
def test_tokens_and_statistics_do_not_depend_on_who_takes_the_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trees: float
) -> None:
    clock = Clock(engine, monkeypatch, plain=1.0, trees=trees)
    prompts = [list(prompt) for prompt in PROMPTS[:3]]
    requests = [EngineRequest(prompt, 40, frozenset()) for prompt in prompts]
    requests.append(EngineRequest(prompts[0], 40, frozenset(), SAMPLED))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        results = run_requests(engine, requests)
        served = serve(engine, Script({0: list(enumerate(requests))}))
    assert [record.message for record in caplog.records if "Compiling" in record.message] == []
    plainly = make_engine(num_slots=1)
    [sampled] = run_requests(plainly, [requests[3]])
    expected = [*(greedy(prompt, max_tokens=40) for prompt in prompts), sampled.ids]
    assert [result.ids for result in results] == expected
    assert [served[i].ids for i in range(4)] == expected
    assert min(clock.asked.values()) >= 4  # both had their turn
    if trees > 1:
        assert clock.asked["plain_steps"] > clock.asked["steps"]
    for stats in [*(result.stats for result in results), *(served[i].stats for i in range(4))]:
        assert stats is not None
        assert stats.tokens == 40
        assert sum(stats.steps_by_rows.values()) == stats.steps
        assert stats.steps + sum(stats.accepted_by_position) - 40 in (0, 1)  # a limit may cut the last bonus token
        assert stats.proposed_by_position[0] <= stats.steps - stats.steps_by_rows[1]


def test_logprobs_and_stop_rules_of_the_host_hold_in_plain_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(engine, monkeypatch, plain=1.0, trees=9.0)
    prompt = list(PROMPTS[0])
    own = [
        EngineRequest(prompt, 30, frozenset(), watch=lambda new: 0 if seen(new) else None),
        EngineRequest(prompt, 30, frozenset(), SamplingParams(temperature=0, logprobs=2)),
    ]
    history: list[int] = []

    def seen(new: list[int]) -> bool:
        history.extend(new)
        return len(history) > 20

    [watched, with_logprobs] = run_requests(engine, own)
    [alone] = run_requests(make_engine(), [own[1]])
    assert clock.asked["plain_steps"] > 10
    assert with_logprobs.ids == alone.ids
    found, wanted = (
        np.concatenate([part.top_logprob_TK for part in result.logprobs]) for result in (with_logprobs, alone)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert watched.finish_reason == "stop"
    assert watched.ids == alone.ids[: len(watched.ids)]
    assert watched.stats.tokens == len(watched.ids)


def test_requests_without_trees_take_plain_steps_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(engine, monkeypatch, plain=1.0, trees=0.1)
    off = RequestSpeculation(enabled=False)
    results = run_requests(engine, [EngineRequest(list(p), 20, frozenset(), speculation=off) for p in PROMPTS[:2]])
    assert [result.ids for result in results] == [greedy(p, max_tokens=20) for p in PROMPTS[:2]]
    assert [result.stats.steps for result in results] == [20, 20]
    assert clock.asked["steps"] == 0


def test_one_slot_and_forced_trees_have_one_program() -> None:
    ngram = NgramSpeculator()
    assert not make_engine([ngram], [()], adaptive=True, num_slots=1).has_plain_steps
    assert not make_engine([ngram], [()], adaptive=False, num_slots=2).has_plain_steps
    assert make_engine([ngram], [()], adaptive=True, num_slots=2).has_plain_steps
