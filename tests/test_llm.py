"""The Python API: what is accepted, what is returned, and one clear sentence for everything that is refused."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from specinfer_jax import LLM, SamplingParams, Speculation
from specinfer_jax.assemble import check_memory
from specinfer_jax.config import LLMConfig, load_config
from specinfer_jax.errors import (
    ConfigError,
    ModelNotFoundError,
    PromptError,
    SpecInferError,
    SpeculationError,
)
from specinfer_jax.opened import Model, choose_max_model_len, open_model
from specinfer_jax.speculation.state import StepProgram

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_model.write_folder(tmp_path_factory.mktemp("tiny") / "model")
    return open_model(folder, dtype=jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return LLM(model, max_model_len=48, max_num_seqs=2)


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the cat")
    prompts = ["the cat", {"prompt": "the cat"}, {"prompt_token_ids": ids}, ids, np.array(ids)]
    outputs = llm.generate(prompts, SHORT)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3", "4"]
    for one in ("the cat", ids):
        [alone] = llm.generate(one, SHORT)
        assert alone.token_ids == outputs[0].token_ids
    assert outputs[0].text == llm.tokenizer.decode(outputs[0].token_ids)
    assert outputs[0].outputs[0].finish_reason == outputs[0].finish_reason == "length"


def test_an_empty_batch_is_no_error(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([[]], "empty"),
        ([""], "empty"),
        ({"prompt": ""}, "empty"),
        (list(range(3)) * 16, "48 tokens; at most 47"),
        ([1, 10_000], "token id 10000 lies outside the vocabulary"),
        ([1, -1], "token id -1 lies outside"),
        ([1, 2.5], "whole-number token ids"),
        ([None], "must be text or a list of token ids"),
    ],
)
def test_a_refused_prompt_says_why(llm: LLM, prompt, message: str) -> None:
    # cases B024, B052
    with pytest.raises(PromptError, match=message):
        llm.generate(prompt, SHORT)


def test_a_refused_prompt_does_not_hurt_its_neighbours(llm: LLM) -> None:
    # cases B024, B052
    outputs = llm.generate(["the cat", "", "the dog", [5] * 100], SHORT)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length", "error"]
    assert "empty" in (outputs[1].error or "")
    assert "100 tokens" in (outputs[3].error or "")
    assert outputs[0].token_ids == llm.generate("the cat", SHORT)[0].token_ids
    assert outputs[1].token_ids == []
    assert outputs[1].stats is None


def test_whitespace_is_a_prompt(llm: LLM) -> None:
    assert len(llm.generate("   ", SHORT)[0].token_ids) == 8


def test_chats_one_and_several(llm: LLM) -> None:
    [one] = llm.chat(CHAT, SHORT)
    several = llm.chat([CHAT, [{"role": "user", "content": None}]], SHORT)
    assert one.token_ids == several[0].token_ids
    assert one.prompt == llm.tokenizer.apply_chat_template(CHAT)
    with pytest.raises(SpecInferError, match="at least one message"):
        llm.chat([])


def test_a_stream_is_the_answer_in_pieces(llm: LLM) -> None:
    [whole] = llm.chat(CHAT, SHORT)
    pieces = list(llm.stream(CHAT, SHORT))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.token_ids
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].stats is not None
    assert pieces[-1].stats.tokens == 8
    with pytest.raises(PromptError, match="empty"):
        llm.stream("")


def test_one_params_each(llm: LLM) -> None:
    outputs = llm.generate(["the cat"] * 3, [dataclasses.replace(SHORT, max_tokens=n) for n in (1, 5, 3)])
    assert [len(output.token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(ConfigError, match="3 prompts need one SamplingParams or 3"):
        llm.generate(["a", "b", "c"], [SHORT, SHORT])


def test_stop_ids_end_a_request_and_are_reported(llm: LLM) -> None:
    [plain] = llm.generate("the cat", SHORT)
    stop = plain.token_ids[3]
    [stopped] = llm.generate("the cat", dataclasses.replace(SHORT, stop_token_ids=(stop,)))
    end = plain.token_ids.index(stop)
    assert stopped.token_ids == plain.token_ids[: end + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop


def test_speculation_changes_nothing_but_the_steps(model: Model, llm: LLM) -> None:
    off = LLM(model, speculation=Speculation.off(), max_model_len=48)
    prompts = ["one two one two one two one", "the cat"]
    params = dataclasses.replace(SHORT, max_tokens=30)
    expected = [output.token_ids for output in off.generate(prompts, params)]
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    own = LLM(model, speculation=Speculation(ssms=[model], tree="1,1,2", adaptive=False), max_model_len=48)
    outputs = own.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats.tokens_per_step > 3 for output in outputs if output.stats)
    # Wherever in a commit a stop string ends (case B020), and for log-probabilities of every token (case B076).
    whole = outputs[0].text
    for start in range(0, len(whole) - 3, 5):
        stopped = dataclasses.replace(params, stop=[whole[start : start + 3], "never"], logprobs=1)
        [plain], [drafted] = off.generate(prompts[:1], stopped), own.generate(prompts[:1], stopped)
        assert plain.text == whole[: whole.find(whole[start : start + 3])]
        assert (drafted.text, drafted.token_ids) == (plain.text, plain.token_ids)
        assert drafted.outputs[0].stop_reason == plain.outputs[0].stop_reason == whole[start : start + 3]
        assert drafted.stats is not None and drafted.stats.tokens == len(drafted.token_ids)
        [plain_logprobs, drafted_logprobs] = [output.outputs[0].logprobs or [] for output in (plain, drafted)]
        assert len(drafted_logprobs) == len(plain_logprobs) == len(plain.token_ids)
        for ours, theirs in zip(drafted_logprobs, plain_logprobs, strict=True):
            assert {i: entry.rank for i, entry in ours.items()} == {i: entry.rank for i, entry in theirs.items()}
            assert [e.logprob for e in ours.values()] == pytest.approx([e.logprob for e in theirs.values()], abs=1e-4)


def test_seeds_reproduce_and_answers_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True, logprobs=0)
    [first], [again] = llm.generate("the cat", params), llm.generate("the cat", params)
    assert [answer.token_ids for answer in first.outputs] == [answer.token_ids for answer in again.outputs]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) == 3
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for piece in llm.stream("the cat", params):
        streamed[piece.index] += piece.token_ids
    assert list(streamed.values()) == [answer.token_ids for answer in first.outputs]
    unseeded = dataclasses.replace(params, n=1, seed=None)
    assert len({tuple(output.token_ids) for output in llm.generate(["the cat"] * 3, unseeded)}) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_runs_through_trees_of_an_ssm(tmp_path: Path, dtype: str) -> None:
    folder = tiny_model.write_folder(tmp_path / "model")
    llm = LLM(folder, dtype=dtype, speculation=Speculation(ssms=[folder], tree="2,1", ngram=True), max_model_len=32)
    assert llm.model.params["head"]["norm"]["scale"].dtype == jnp.dtype(dtype)
    assert llm.engine.params.llm is llm.engine.params.speculators[0]  # named twice, loaded once
    [output] = llm.generate("the cat", SHORT)
    assert len(output.token_ids) == 8


def test_first_layers_share_their_arrays(model: Model) -> None:
    short = model.first_layers(1)
    assert short.params["layers_0"] is model.params["layers_0"]
    with pytest.raises(ConfigError, match="between 1 and 1"):
        model.first_layers(2)


def test_an_ssm_of_another_vocabulary_is_refused(model: Model, tmp_path: Path) -> None:
    folder = tiny_model.write_folder(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [piece for piece, i in sorted(vocabulary.items(), key=lambda item: item[1])][40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(SpeculationError, match=r"another vocabulary.* id \d+ is .* and "):
        LLM(model, speculation=Speculation(ssms=[folder]), max_model_len=16)


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        (Speculation(tree="1,1"), "needs an SSM"),
        (Speculation(ssms=[3]), "must be a model name"),
        (Speculation(ssms=["./nowhere"]), "there is no file or folder"),
    ],
)
def test_speculation_that_cannot_be(model: Model, speculation: Speculation, message: str) -> None:
    with pytest.raises(SpecInferError, match=message):
        LLM(model, speculation=speculation, max_model_len=16)


@pytest.mark.parametrize("tree", ["x", "0", "128", "9,9,9"])
def test_a_tree_that_does_not_parse_or_fit(model: Model, tree: str) -> None:
    with pytest.raises(SpeculationError, match="tree"):
        LLM(model, speculation=Speculation(ssms=[model], tree=tree), max_model_len=16)


def test_settings_that_cannot_be(model: Model) -> None:
    with pytest.raises(ConfigError, match="exceeds the model's 128 tokens"):
        LLM(model, max_model_len=129)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        LLM(model, dtype="int8")
    with pytest.raises(ConfigError, match="max_num_seqs must be"):
        LLM(model, max_num_seqs=0)
    with pytest.raises(ConfigError, match="must be a list of models"):
        Speculation(ssms="some-model")  # a string is a sequence too
    with pytest.raises(ModelNotFoundError, match="smollm2-135m-instruct"):
        LLM("no-such-model")


def test_a_window_of_attention_limits_the_context(model: Model) -> None:
    config = dataclasses.replace(model.config, sliding_window=64)
    assert choose_max_model_len(config, None) == 64
    with pytest.raises(ConfigError, match="64 tokens \\(the length of its attention window"):
        choose_max_model_len(config, 65)


def test_memory_is_counted_before_it_is_allocated(model: Model) -> None:
    # case B053
    program = StepProgram(model.config)
    needed = check_memory(program, num_slots=2, max_model_len=128, dtype=jnp.dtype(jnp.float32))
    config = model.config
    assert needed == 2 * config.num_layers * config.num_kv_heads * config.head_size * 2 * 128 * 4
    with pytest.raises(ConfigError, match="lower max_model_len"):
        check_memory(program, num_slots=1 << 40, max_model_len=128, dtype=jnp.dtype(jnp.float32))


def test_config_files(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("max_model_len = 64\n[speculation]\nngram = true\n[sampling]\nmax_tokens = 5\n", encoding="utf-8")
    assert load_config(path) == LLMConfig(
        max_model_len=64, speculation=Speculation(ngram=True), sampling=SamplingParams(temperature=0, max_tokens=5)
    )
    for text, message in {
        "modle = 'x'": "unknown key 'modle'; known are model",
        "[speculation]\ntrees = '1'": "unknown key 'speculation.trees'",
        "[sampling]\ntemperature = -1.0": "temperature",
        "speculation = 3": "must be a table",
        "mesh = 'model=2'": "mesh must look like",
        "mesh = 'data=0,model=8'": "mesh must look like",
        "x = ": "not a TOML file",
    }.items():
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml")
