"""The decoder equals transformers: logits of every family, greedy ids, and bfloat16 within its own noise.

The goldens come from tests/golden/make_model_golden.py.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import random_tensors, write_hf_folder
from decoder_cases import append, empty_cache, run_rows, tiny_model
from model_golden_cases import BFLOAT16, FAMILIES, GENERATE, GenerateCase

from specinfer_jax.checkpoint.load import LoadedModel, load_model
from specinfer_jax.errors import ConfigError
from specinfer_jax.models.layers import Norm
from specinfer_jax.opened import choose_max_model_len
from specinfer_jax.serving.engine import Engine, EngineRequest
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.tree.expand import parse_expansion

HERE = Path(__file__).parent


@functools.cache
def golden(group: str) -> dict[str, np.ndarray]:
    with np.load(HERE / "golden" / f"model_{group}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str) -> None:  # cases B034, B064, B065
    case = FAMILIES[name]
    logits, _ = run_rows(tiny_model(case.config, case.seed), case.tokens, positions=case.positions)
    np.testing.assert_allclose(logits, golden("families")[name], rtol=0, atol=1e-5)


def test_every_bias_counts() -> None:  # case B064
    case = FAMILIES["llama_biases"]
    model = tiny_model(case.config, case.seed)
    expected = golden("families")["llama_biases"]
    for block, part in [("attention", "q"), ("attention", "v"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")]:
        layer = model.params["layers_1"]
        without = {**layer[block][part], "bias": jnp.zeros_like(layer[block][part]["bias"])}
        params = {**model.params, "layers_1": {**layer, block: {**layer[block], part: without}}}
        logits, _ = run_rows(model._replace(params=params), case.tokens, positions=case.positions)
        assert np.abs(logits - expected).max() > 1e-2, (block, part)


@pytest.mark.parametrize("stored", ["no head", "another head", "only the head"])
def test_tied_head_gives_the_logits_of_the_embedding(tmp_path: Path, stored: str) -> None:  # case B034
    case = FAMILIES["llama_tied_wide_heads"]
    tensors = random_tensors(case.config, case.seed)
    embedding = tensors["model.embed_tokens.weight"]
    if stored == "another head":
        tensors["lm_head.weight"] = embedding[::-1].copy()
    if stored == "only the head":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_hf_folder(tmp_path, case.config, case.seed, tensors=tensors)
    logits, _ = run_rows(load_model(tmp_path, dtype="float32"), case.tokens, positions=case.positions)
    np.testing.assert_allclose(logits, golden("families")["llama_tied_wide_heads"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "longest"), [("opt", 40), ("mistral", 16), ("qwen2", 128)])
def test_positions_past_the_last_row_or_the_window_are_refused(name: str, longest: int) -> None:  # case B065
    config = tiny_model(FAMILIES[name].config).config
    assert choose_max_model_len(config, None) == choose_max_model_len(config, longest) == longest
    with pytest.raises(ConfigError, match=f"max_model_len {longest + 1} exceeds the model's {longest} tokens"):
        choose_max_model_len(config, longest + 1)


def decode(model: LoadedModel, cases: Sequence[GenerateCase], *, speculate: bool) -> list[list[int]]:
    """Greedy ids of every prompt, decoded side by side, incrementally or through self-drafted trees."""
    speculator = SsmSpeculator(model.config, parse_expansion("2,1"), max_len=200, vocab_limit=64)
    engine = Engine(
        DecodeParams(model.params, (model.params,) if speculate else ()),
        StepProgram(model.config, (speculator,) if speculate else (), adaptive=False),
        num_slots=len(cases), max_model_len=76, page_size=8, dtype=jnp.float32,
    )  # fmt: skip
    ids: list[list[int]] = [[] for _ in cases]
    for progress in engine.run([EngineRequest(case.prompt, case.new_tokens, frozenset()) for case in cases]):
        ids[progress.index] += progress.new_token_ids
    return ids


def check_ids(names: Sequence[str], *, speculate: bool) -> None:
    cases = [GENERATE[name] for name in names]
    found = decode(tiny_model(cases[0].config), cases, speculate=speculate)
    for name, ids in zip(names, found, strict=True):
        assert golden("generate")[f"{name}.margins"].min() > 1e-4, "the greedy choice is a matter of rounding"
        assert ids == golden("generate")[f"{name}.ids"].tolist(), name


@pytest.mark.parametrize(("family", "speculate"), [("llama", True), ("opt", True), ("opt_350m", False)])
def test_prompts_of_different_lengths_side_by_side(family: str, speculate: bool) -> None:  # cases B037, B065
    check_ids([f"{family}_{length}" for length in (5, 1, 9)], speculate=speculate)


def test_dynamic_rope_decodes_as_transformers_does() -> None:  # case B033
    long, crossing = GENERATE["dynamic_long_prompt"], GENERATE["dynamic_crossing"]
    original = long.config["max_position_embeddings"]
    assert len(crossing.prompt) < original < len(crossing.prompt) + crossing.new_tokens
    assert original < len(long.prompt)
    check_ids(["dynamic_long_prompt", "dynamic_crossing"], speculate=True)


@pytest.mark.parametrize(("name", "chunk"), [("dynamic_long_prompt", 7), ("dynamic_crossing", 1)])
def test_dynamic_rope_logits_do_not_depend_on_how_the_context_was_cut(name: str, chunk: int) -> None:  # case B033
    case = GENERATE[name]
    model = tiny_model(case.config)
    empty = empty_cache(model.config, max_model_len=80)
    new = golden("generate")[f"{name}.ids"].tolist()
    logits, rows = run_rows(model, case.prompt, cache=empty, prompt_len=len(case.prompt))
    cache, found = append(empty, rows, len(case.prompt)), [logits[-1:]]
    for start in range(0, case.new_tokens - 1, chunk):
        part = new[start : min(start + chunk, case.new_tokens - 1)]
        logits, rows = run_rows(model, part, cache=cache, prompt_len=len(case.prompt))
        cache = append(cache, rows, len(part))
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found), golden("generate")[f"{name}.logits"], rtol=0, atol=1e-5)


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_stays_within_the_noise_of_transformers(name: str) -> None:  # case B096
    """Ours lies no farther from float32 than transformers does, and the two differ by no more than both noises."""
    case = BFLOAT16[name]
    model = tiny_model(case.config, case.seed, dtype=jnp.bfloat16)
    cache = empty_cache(model.config, dtype=jnp.bfloat16)
    logits, rows = run_rows(model, case.tokens, positions=case.positions, cache=cache)
    theirs, exact = golden("bfloat16")[f"{name}.logits"], golden("bfloat16")[f"{name}.float32_logits"]
    assert logits.dtype == np.float32
    assert rows[0].k_BNGK.dtype == jnp.bfloat16
    # one sample of each noise: the ratio is 0.9 to 1.2 over versions of jax
    assert rms(logits - exact) <= 1.25 * rms(theirs - exact)
    assert rms(logits - theirs) <= 1.5 * rms(theirs - exact)  # two independent noises: the root of 2
    assert np.abs(logits - theirs).max() <= 2 * np.abs(theirs - exact).max()


@pytest.mark.parametrize("name", BFLOAT16)
def test_norms_round_as_transformers_does(name: str) -> None:  # case B096
    case = BFLOAT16[name]
    model = tiny_model(case.config, case.seed, dtype=jnp.bfloat16)
    x_D1 = jnp.linspace(-3, 5, model.config.width, dtype=jnp.float32).astype(jnp.bfloat16)[:, None]
    normed_D1 = Norm(model.config).apply({"params": model.params["layers_0"]["attention_norm"]}, x_D1)
    found = np.asarray(normed_D1[:, 0].astype(jnp.float32))
    np.testing.assert_array_equal(found, golden("bfloat16")[f"{name}.norm"])
