"""What `LLM` asks the engine for and makes of what comes back: n, seeds, stop strings, bans, logprobs, failures."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import pytest
import tiny_model
from fake_engine import STATS, FakeEngine

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.errors import ConfigError, SamplingError
from specinfer_jax.llm import _per_prompt
from specinfer_jax.metrics import total
from specinfer_jax.opened import Model, open_model
from specinfer_jax.outputs import Logprob
from specinfer_jax.serving.request import EngineRequest
from specinfer_jax.vocabulary import bad_sequences

TOKENIZER = tiny_model.TOKENIZER
VOCABULARY = TOKENIZER.ids_by_token()
ONE, SPACE_ONE, NAME, EOS = VOCABULARY["one"], VOCABULARY["Ġone"], VOCABULARY["name"], VOCABULARY["<|im_end|>"]
MAX_MODEL_LEN = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(tiny_model.write_folder(tmp_path_factory.mktemp("tiny") / "model"), dtype=jnp.dtype(jnp.float32))


@pytest.fixture
def make_llm(model: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """An LLM whose engine commits what a script says."""

    def make(script: Callable[[EngineRequest], Sequence[int]] = lambda request: [ONE, NAME], **settings: Any) -> LLM:
        engine = FakeEngine(script, **settings)
        engine.warm_up = lambda: None  # type: ignore[attr-defined]
        monkeypatch.setattr("specinfer_jax.llm.Engine", lambda *args, **options: engine)
        return LLM(model, speculation=Speculation.off(), max_model_len=MAX_MODEL_LEN)

    return make


def requests(llm: LLM) -> list[EngineRequest]:
    return llm.engine.requests  # type: ignore[attr-defined]


def test_n_answers_per_prompt_come_back_in_order(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda request: [NAME] * (4 - request.sample) + [ONE] * len(request.prompt_ids))
    outputs = llm.generate([[5], [6, 7]], [SamplingParams(n=3), SamplingParams(n=2)])
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1, 2], [0, 1]]
    assert [[answer.text for answer in output.outputs] for output in outputs] == [
        ["name" * 4 + "one", "name" * 3 + "one", "name" * 2 + "one"],
        ["name" * 4 + "oneone", "name" * 3 + "oneone"],
    ]
    assert [output.stats for output in outputs] == [total([STATS] * 3), total([STATS] * 2)]
    assert [request.sample for request in requests(llm)] == [0, 1, 2, 0, 1]


def test_a_stream_of_n_answers_says_which_a_piece_belongs_to(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda request: [ONE, NAME] if request.sample else [NAME, NAME, ONE])
    pieces = list(llm.stream([5], SamplingParams(n=2, logprobs=0)))
    assert [(piece.index, piece.text) for piece in pieces] == [
        (0, "name"), (1, "one"), (0, "name"), (1, "name"), (0, "one"),
    ]  # fmt: skip
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length", "length"]
    assert [[list(entry) for entry in piece.logprobs or []] for piece in pieces] == [
        [[NAME]], [[ONE]], [[NAME]], [[NAME]], [[ONE]],
    ]  # fmt: skip


def test_a_given_seed_is_the_same_for_every_run(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for _ in range(2):
        llm.generate([[5], [6]], SamplingParams(seed=7, n=2))
    assert {request.seed for request in requests(llm)} == {7}
    llm.generate([5], SamplingParams(seed=-1))
    assert requests(llm)[-1].seed == 2**64 - 1


def test_without_a_seed_no_two_requests_share_one(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for _ in range(2):
        llm.generate([[5], [5]], SamplingParams(n=2))
    seeds = [request.seed for request in requests(llm)]
    assert len(set(seeds)) == 4  # of two runs with two prompts
    assert seeds[0::2] == seeds[1::2]  # the answers of one prompt differ in their number
    assert all(0 <= seed < 2**64 for seed in seeds) and max(seeds) >= 2**32


def test_the_host_watches_only_where_there_are_stop_strings(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda request: [ONE, NAME, SPACE_ONE, NAME], size=4)
    whole, cut = llm.generate([[5], [5]], [SamplingParams(), SamplingParams(stop=["e o", "never"])])
    assert [request.watch is None for request in requests(llm)] == [True, False]
    assert (whole.text, whole.finish_reason) == ("onename onename", "length")
    assert (cut.text, cut.token_ids) == ("onenam", [ONE, NAME, SPACE_ONE])
    assert (cut.finish_reason, cut.outputs[0].stop_reason) == ("stop", "e o")
    pieces = list(llm.stream([5], SamplingParams(stop="e o")))
    assert "".join(piece.text for piece in pieces) == "onenam"
    assert pieces[-1].stop_reason == "e o"


def test_the_text_ends_before_the_end_token(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda request: [ONE, EOS, NAME])
    shown = SamplingParams(skip_special_tokens=False)
    for params, text in {
        SamplingParams(): "one", shown: "one",
        dataclasses.replace(shown, include_stop_str_in_output=True): "one<|im_end|>",
        dataclasses.replace(shown, ignore_eos=True): "one<|im_end|>name",
    }.items():  # fmt: skip
        [output] = llm.generate([5], params)
        assert output.text == text
        assert output.token_ids == ([ONE, EOS, NAME] if params.ignore_eos else [ONE, EOS])
        assert output.outputs[0].stop_reason is None


def test_as_many_tokens_as_fit(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(lambda request: [ONE] * 100)
    [output] = llm.generate([5] * 10, SamplingParams(max_tokens=None))
    assert len(output.token_ids) == MAX_MODEL_LEN - 10
    assert output.finish_reason == "length"


@pytest.mark.parametrize("num_top", [0, 2])
def test_logprobs_of_answers_and_of_the_prompt(make_llm: Callable[..., LLM], num_top: int) -> None:  # case B076
    llm = make_llm(size=2)
    [output] = llm.generate([5, ONE, 0], SamplingParams(n=2, logprobs=num_top, prompt_logprobs=num_top))

    def entries(own: int) -> dict[int, Logprob]:
        return {
            i: Logprob(-(i + 1) / 2, i + 1, TOKENIZER.decode([i], skip_special_tokens=False))
            for i in (own, *range(num_top))
        }

    for answer in output.outputs:
        assert answer.logprobs == [entries(ONE), entries(NAME)]
        assert answer.cumulative_logprob == -(ONE + NAME + 2) / 2
    assert output.prompt_logprobs == [None, entries(ONE), entries(0)]
    # They are the same for all answers and measured once.
    assert [request.sampling.prompt_logprobs for request in requests(llm)] == [num_top, None]
    [plain] = llm.generate([5], SamplingParams())
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob) == (None,) * 3
    pieces = list(llm.stream([5, ONE], SamplingParams(prompt_logprobs=num_top)))
    assert pieces[0].prompt_logprobs == [None, entries(ONE)]


def test_bad_words_are_banned_alone_and_behind_a_space(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.generate([5], SamplingParams(bad_words=["one", " one", "<|im_end|>", "\n"]))
    newline = VOCABULARY["Ċ"]
    # Behind a space, "one" is another token; for the others the space would be a token of its own.
    assert requests(llm)[0].bad_sequences == [[ONE], [SPACE_ONE], [EOS], [newline]]
    letters = [VOCABULARY[piece] for piece in ("t", "w", "o")]
    assert bad_sequences(SamplingParams(bad_words=["two"]), TOKENIZER, vocab_size=702) == [
        letters, [VOCABULARY["Ġt"], *letters[1:]],
    ]  # fmt: skip


def test_bad_words_that_the_model_cannot_write_need_no_ban() -> None:
    assert bad_sequences(SamplingParams(bad_words=["one"]), TOKENIZER, vocab_size=SPACE_ONE) == []
    assert bad_sequences(SamplingParams(), TOKENIZER, vocab_size=702) == []


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused_before_anything_runs(make_llm: Callable[..., LLM], name: str) -> None:
    llm = make_llm()
    vocab_size = llm.model.config.vocab_size
    for i in (vocab_size - 1, vocab_size):
        params = SamplingParams(**{name: [i, 0] if name == "allowed_token_ids" else {i: 1, 0: 1}})
        if i < vocab_size:
            assert len(llm.generate([5], params)) == 1
            continue
        with pytest.raises(SamplingError, match=f"{name} holds token id {i}, which lies outside the vocabulary of {i}"):
            llm.generate([[5], [5]], [SamplingParams(), params])
        with pytest.raises(SamplingError, match=name):
            llm.stream([5], params)
    assert len(requests(llm)) == 1
    # A stop id that the model lacks never comes up.
    assert llm.generate([5], SamplingParams(stop_token_ids=[vocab_size]))[0].finish_reason == "length"


def test_a_failed_request_does_not_hurt_its_neighbours(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(fails=lambda request: list(request.prompt_ids) == [6] and request.sample == 1)
    good, refused, bad = llm.generate([[5], [], [6]], SamplingParams(n=2))
    assert [answer.finish_reason for answer in good.outputs] == ["length", "length"]
    assert good.error is None
    assert (refused.finish_reason, refused.stats) == ("error", None)
    assert [answer.finish_reason for answer in bad.outputs] == ["length", "error"]
    assert (bad.error, bad.text) == ("the device is on fire", "onename")
    last = list(llm.stream([6], SamplingParams(n=2)))[-1]
    assert (last.index, last.finish_reason, last.error) == (1, "error", "the device is on fire")


def test_the_defaults_draw(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.generate([5])
    list(llm.stream([5]))
    assert [request.sampling for request in requests(llm)] == [SamplingParams(temperature=1.0, max_tokens=16)] * 2


@pytest.mark.parametrize("params", [[3], {"temperature": 0}])
def test_parameters_of_another_kind_are_refused(params: Any) -> None:
    # Not by way of `generate`, whose annotations are checked before it under these tests.
    with pytest.raises(ConfigError, match="params must be SamplingParams, got"):
        _per_prompt(params, 1)
