"""`SamplingParams`: vLLM's fields and defaults, plain values, one clear sentence for what cannot be."""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from specinfer_jax import SamplingParams
from specinfer_jax.errors import SamplingError
from specinfer_jax.outputs import MAX_LOGPROBS
from specinfer_jax.sampling_params import GREEDY


def test_defaults_are_vllms() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": (), "stop_token_ids": (), "bad_words": (),
        "include_stop_str_in_output": False, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None,
        "prompt_logprobs": None, "skip_special_tokens": True, "logit_bias": (), "allowed_token_ids": None,
    }  # fmt: skip


NAN, INF = math.nan, math.inf
NO_NUMBERS = ["1", None, True, [1], NAN, INF, -INF, np.float32("nan"), np.bool_(True), 10**400, 1j]
NO_WHOLE_NUMBERS = ["1", True, [1], 1.0, NAN, np.float32(1), np.bool_(True), np.array([1])]


@pytest.mark.parametrize(
    ("name", "low", "high", "wrong"),
    [
        ("presence_penalty", -2, 2, [-2.01, 2.01]),
        ("frequency_penalty", -2, 2, [-2.01, 2.01]),
        ("repetition_penalty", 0.01, 1e30, [0, -1, 1e-40]),
        ("temperature", 0, 1e30, [-1e-9, -1]),
        ("top_p", 1e-6, 1, [0, -0.1, 1.01, 1e-40]),
        ("min_p", 0, 1, [-0.1, 1.01]),
    ],
)
def test_numbers_and_their_ranges(name: str, low: float, high: float, wrong: list[Any]) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in [*wrong, *NO_NUMBERS]:
        with pytest.raises(SamplingError, match=f"{name} must be a finite number .*got "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "low", "high", "wrong"),
    [
        ("n", 1, 16384, [0, -1, 16385, None]),
        ("top_k", 1, 2**31 - 1, [-2, None]),
        ("seed", -(2**63), 2**64 - 1, [-(2**63) - 1, 2**64]),
        ("max_tokens", 1, 2**31 - 1, [0, -1]),
        ("min_tokens", 0, 16, [-1, None]),
        ("logprobs", 0, MAX_LOGPROBS, [-1, MAX_LOGPROBS + 1]),
        ("prompt_logprobs", 0, MAX_LOGPROBS, [-1, MAX_LOGPROBS + 1]),
    ],
)
def test_whole_numbers_and_their_ranges(name: str, low: int, high: int, wrong: list[Any]) -> None:
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in [*wrong, *NO_WHOLE_NUMBERS]:
        with pytest.raises(SamplingError, match=f"{name} must be a whole number .*got "):
            SamplingParams(**{name: value})


def test_a_message_names_field_range_and_value() -> None:
    with pytest.raises(SamplingError) as refusal:
        SamplingParams(top_p=1.5)
    assert str(refusal.value) == "top_p must be a finite number above 0 and at most 1, got 1.5"
    with pytest.raises(SamplingError) as refusal:
        SamplingParams(logprobs=21)
    assert str(refusal.value) == "logprobs must be a whole number between 0 and 20, got 21"


def test_scalars_of_numpy_become_plain_numbers() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float16(0.5), top_p=np.float32(0.25), top_k=np.uint8(7), min_p=Fraction(1, 4),
        seed=np.uint64(2**64 - 1), max_tokens=np.int32(9), ignore_eos=np.bool_(True), stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(5): np.float32(1.5)}, allowed_token_ids=np.array([2], np.int16),
    )  # fmt: skip
    same = SamplingParams(
        n=2, temperature=0.5, top_p=0.25, top_k=7, seed=2**64 - 1, max_tokens=9, min_p=0.25, ignore_eos=True,
        stop_token_ids=[3, 4], logit_bias={5: 1.5}, allowed_token_ids=[2],
    )  # fmt: skip
    assert params == same and hash(params) == hash(same)
    assert type(params.temperature) is float and type(params.top_k) is int and type(params.ignore_eos) is bool
    assert repr(params) == repr(same)


def test_what_means_the_same_is_the_same() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logit_bias={"7": 1, 3: -2.5}) == SamplingParams(logit_bias=[(3, -2.5), (7, 1.0)])
    assert SamplingParams(logit_bias={}) == SamplingParams(logit_bias=None)
    assert SamplingParams(max_tokens=10**12).max_tokens == 2**31 - 1  # more than any context
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    params = SamplingParams(stop=["a"], bad_words=["b"], logit_bias={1: 2}, allowed_token_ids=[1], temperature=0.5)
    assert dataclasses.replace(params, seed=None) == params
    assert hash(params) == hash(dataclasses.replace(params))


def test_greedy_is_below_a_hundred_thousandth() -> None:  # case B016
    assert (
        GREEDY.is_greedy and SamplingParams(temperature=9.9e-6).is_greedy and SamplingParams(temperature=-0.0).is_greedy
    )
    assert not SamplingParams(temperature=1e-5).is_greedy and not SamplingParams().is_greedy
    # What greedy decoding ignores is kept, so that a temperature set later finds it.
    assert dataclasses.replace(GREEDY, top_p=0.5, seed=3).top_p == 0.5


def test_several_greedy_answers_are_refused() -> None:
    for temperature in (0, 1e-6):
        with pytest.raises(SamplingError, match=r"n must be 1 at temperature .* got 3; ask for a temperature above 0"):
            SamplingParams(n=3, temperature=temperature)


def test_fewest_and_most_tokens() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(max_tokens=None, min_tokens=1000).max_tokens is None
    with pytest.raises(SamplingError, match=r"min_tokens must be at most max_tokens \(4\), got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [("x", ("x",)), (["x"], ("x",)), (None, ()), ([], ()), ((), ()), (["a", "b", "c", "d", "e"], tuple("abcde"))],
)
def test_stop_strings(stop: Any, kept: tuple[str, ...]) -> None:  # case B077
    assert SamplingParams(stop=stop).stop == kept


@pytest.mark.parametrize("stop", [[""], "", ["x", ""], 3, [3], [None], b"x", [b"x"], {"x": 1}, [["x"]], True])
def test_stop_strings_that_cannot_be(stop: Any) -> None:  # case B077
    with pytest.raises(SamplingError, match=r"^stop must "):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("words", ["word", [""], [3], 3, {"word": 1}])
def test_bad_words_that_cannot_be(words: Any) -> None:
    with pytest.raises(SamplingError, match=r"^bad_words must "):
        SamplingParams(bad_words=words)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("ids", [3, "3", [-1], [1.0], ["1"], [True], [None], {1: 2}, [[1]]])
def test_ids_that_cannot_be(name: str, ids: Any) -> None:
    with pytest.raises(SamplingError, match=name):
        SamplingParams(**{name: ids})


def test_at_least_one_id_must_be_allowed() -> None:
    for none in ([], (), np.array([], int)):
        with pytest.raises(SamplingError, match="allowed_token_ids must hold at least one token id"):
            SamplingParams(allowed_token_ids=none)


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ({1: 100.5}, r"logit_bias of token id 1 must be a finite number between -100 and 100, got 100.5"),
        ({1: -INF}, "between -100 and 100, got -inf"),
        ({1: NAN}, "between -100 and 100, got nan"),
        ({1: "2"}, "between -100 and 100, got '2'"),
        ({-1: 1}, "every id of logit_bias must be a whole number of at least 0, got -1"),
        ({"-1": 1}, "got '-1'"),
        ({"one": 1}, "got 'one'"),
        ({"²": 1}, "got '²'"),
        ({1.5: 1}, "got 1.5"),
        ({"7": 1, 7: 2}, "must name every token id once, got 7 again"),
        ([7], "must map token ids to numbers, got 7"),
        ("7", "must be a list of"),
        (7, "must be a list of"),
    ],
)
def test_biases_that_cannot_be(bias: Any, sentence: str) -> None:
    with pytest.raises(SamplingError, match=sentence):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens"])
def test_flags(name: str) -> None:
    for value in (1, 0, "yes", None):
        with pytest.raises(SamplingError, match=f"{name} must be True or False, got {value!r}"):
            SamplingParams(**{name: value})
