"""Trees whose nodes have different numbers of children: their text, what SSMs make of them, and that they are exact."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chi_square import chi_square_p
from decode_cases import (
    LLAMA,
    PROMPTS,
    VOCAB,
    greedy,
    params_of,
    run,
    run_requests,
    self_draft,
    shared_engine,
    with_params,
)
from decoder_cases import run_rows
from enumeration import Proposal, emitted_law, fixed
from exact_law import TableModel, distance, filtered, independent, one_after_the_other
from test_token_tree import paths

from specinfer_jax.checkpoint.load import LoadedModel
from specinfer_jax.errors import SpeculationError
from specinfer_jax.models.kv_cache import init_cache
from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.serving.engine import EngineRequest
from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.rules import IID, MSS, MSS_RENORMALIZED, NAIVE, TOP_K, WITHOUT_REPLACEMENT
from specinfer_jax.speculation.sampling import neutral_sampling
from specinfer_jax.speculation.speculator import Context
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.tree.expand import Expansion, parse_expansion
from specinfer_jax.tree.shape import TreeShape
from specinfer_jax.tree.token_tree import check_invariants

SHAPE = "3/2,0,1/1,0,2"
"""Childless nodes between and behind those with children, and levels of one, two and three of them."""


def test_rows_of_a_shape() -> None:
    shape = parse_expansion(SHAPE)
    assert shape == TreeShape(((3,), (2, 0, 1), (1, 0, 2))) and str(shape) == f"<{SHAPE}>"
    assert (shape.num_nodes, shape.depth, shape.level_sizes, shape.widths) == (9, 3, (3, 3, 3), (3, 2, 2))
    assert shape.parents().tolist() == [10, 0, 0, 0, 1, 1, 3, 4, 6, 6]
    assert shape.depths().tolist() == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert shape.child_ranks().tolist() == [0, 0, 1, 2, 0, 1, 0, 0, 0, 1]
    assert shape.inner_rows().tolist() == [0, 1, 3, 4, 6] and shape.inner_sizes == (1, 2, 2)
    levels = [(level.most, level.child_n.tolist(), level.inner_W.tolist()) for level in shape.levels()]
    assert levels == [(3, [0, 1, 2], [0, 2]), (2, [0, 1, 2], [0, 2]), (2, [0, 2, 3], [])]


def test_a_vector_is_a_shape() -> None:
    assert parse_expansion("1,2,1") == Expansion((1, 2, 1)) == parse_expansion("1/2/1,1")
    assert str(parse_expansion("1/2/1,1")) == "<1,2,1>" and hash(parse_expansion("2/1,1")) == hash(Expansion((2, 1)))
    assert parse_expansion(" < 3 / 2, 0 ,1/1,0,2> ") == parse_expansion(SHAPE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3/2,1", "tree <3/2,1> tells the children of 2 nodes where level 1 has 3"),
        ("1/1,1", "tells the children of 2 nodes where level 1 has 1"),
        ("2/0,0", "level 2 of tree .* must have at least one node"),
        ("0/1", "level 1 of tree .* must have at least one node"),
        ("2/1,1/", "not a vector of children per level"),
        ("2//1", "not a vector"),
        ("2/1;1", "not a vector"),
        ("64/" + ",".join(["1"] * 64), "has 128 nodes; at most 127 fit"),
        ("9999999/1", "too large"),
        ("/".join(["1"] * 200), "too large"),
    ],
)
def test_shapes_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(SpeculationError, match=message):
        parse_expansion(text)


def test_a_shape_without_levels_is_refused() -> None:
    with pytest.raises(SpeculationError, match="at least one level"):
        TreeShape(())


# What an SSM proposes: compared with passes of its own over every path.


def logits_behind(ids: Sequence[int]) -> np.ndarray:
    return run_rows(LoadedModel(LLAMA, params_of(LLAMA), Path(), "orbax", None), list(ids))[0][-1].astype(np.float64)


@functools.partial(jax.jit, static_argnums=0)
def propose(speculator: SsmSpeculator, params, cache, context: Context) -> Draft:
    return speculator.propose(params, cache, context, jnp.ones(context.committed_B.shape, bool))[0]


def draft_of(children: str, prompts: Sequence[Sequence[int]], temperature: float) -> Draft:
    speculator = dataclasses.replace(self_draft(SHAPE)[0], children=children)
    B, S = len(prompts), 64
    token_BS = np.zeros((B, S), np.int32)
    for b, prompt in enumerate(prompts):
        token_BS[b, : len(prompt)] = prompt
    length_B = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    sampling = neutral_sampling(B, VOCAB)
    sampling = sampling._replace(temperature_B=jnp.full(B, temperature, jnp.float32))
    cache = init_cache(LLAMA, num_slots=B, max_model_len=S, page_size=8, dtype=jnp.float32)
    return propose(speculator, params_of(LLAMA), cache, Context(jnp.asarray(token_BS), length_B, length_B, sampling))


DRAFT_PROMPTS = (PROMPTS[0], PROMPTS[3])


def test_the_likeliest_children_of_every_node() -> None:
    draft = draft_of(TOP_K, DRAFT_PROMPTS, 0.0)
    check_invariants(draft.tree)
    assert draft.drawn_from is None
    shape = parse_expansion(SHAPE)
    assert np.asarray(draft.kind_BN)[0].tolist() == [0, 0, 1, 2, 3, 4, 3, 5, 5, 6]
    for b, prompt in enumerate(DRAFT_PROMPTS):
        for row, path in enumerate(paths(draft.tree, b)[1:], 1):
            ranked = np.argsort(-logits_behind([*prompt, *path[:-1]]))
            assert path[-1] == ranked[shape.child_ranks()[row]]


@pytest.mark.parametrize("children", [IID, WITHOUT_REPLACEMENT])
def test_draws_and_the_distributions_they_are_said_to_come_from(children: str) -> None:
    temperature = 0.8
    draft = jax.tree.map(np.asarray, draft_of(children, DRAFT_PROMPTS, temperature))
    shape = parse_expansion(SHAPE)
    parent_N = shape.parents()
    assert draft.drawn_from.prob_BEC.shape[1] == 7, "rows up to the last that has children"
    for b, prompt in enumerate(DRAFT_PROMPTS):
        paths_N: list[list[int]] = [[]]
        for row in range(1, shape.num_nodes + 1):
            assert draft.tree.valid_BN[b, row] and draft.tree.parent_BN[b, row] == parent_N[row]
            paths_N.append([*paths_N[parent_N[row]], int(draft.tree.token_BN[b, row])])
        for row in shape.inner_rows():
            x_V = logits_behind([*prompt, *paths_N[row]]) / temperature
            q_V = np.exp(x_V - x_V.max())
            told_V = np.zeros(VOCAB)
            told_V[draft.drawn_from.id_BEC[b, row]] = draft.drawn_from.prob_BEC[b, row]
            np.testing.assert_allclose(told_V, q_V / q_V.sum(), atol=2e-6)
        drawn_N = draft.drawn_from.id_BEC[b, parent_N[1:], draft.slot_BN[b, 1:]]
        np.testing.assert_array_equal(drawn_N, draft.tree.token_BN[b, 1:])
        if children == WITHOUT_REPLACEMENT:
            assert len({tuple(path) for path in paths_N}) == shape.num_nodes + 1


# Exactness.


class Shaped(Proposal):
    """A proposal whose `widths` are the children of every node, level by level."""

    @property
    def parents(self) -> list[int]:
        counts = [count for level in self.widths for count in level]
        return [0, *(row for row, count in enumerate(counts) for _ in range(count))]


def shaped(text: str, q_PV: np.ndarray, draw) -> Proposal:
    return Shaped(parse_expansion(text).children, q_PV, draw)  # type: ignore[arg-type]


def table(seed: int, vocab: int) -> TableModel:
    logits_PV = np.random.default_rng(seed).normal(scale=1.3, size=(85, 4)).astype(np.float32)
    logits_PV[:, vocab:] = -np.inf
    return TableModel(logits_PV)


def ssm_table(seed: int, vocab: int) -> np.ndarray:
    return np.stack([filtered(x_V, TableModel(x_V).rules) for x_V in table(seed, vocab).logits_PV.astype(np.float64)])


ENUMERATED = {
    "second child childless": ["2/2,0"],
    "first child childless": ["2/0,2"],
    "three levels": ["2/2,1/0,1,0"],
    "with gaps": ["3/1,0,2"],
    "two SSMs": ["2/0,1", "2/1,0"],
    "two SSMs and n-grams": ["2/1,0", "1/1", "n-grams"],
}


@pytest.mark.parametrize(
    ("draw", "renormalize"),
    [(independent, False), (one_after_the_other, True)],
    ids=["iid", "without replacement"],
)
@pytest.mark.parametrize("trees", ENUMERATED.values(), ids=ENUMERATED)
def test_every_shape_leaves_the_law_alone(trees, draw, renormalize) -> None:
    model = table(1, 3)
    proposals = [
        fixed([1, 2, 0], (1, 1, 1), 4) if text == "n-grams" else shaped(text, ssm_table(2 + m, 3), draw)
        for m, text in enumerate(trees)
    ]
    length = max(len(proposal.widths) for proposal in proposals) + 1
    law = emitted_law(model, proposals, length=length, renormalize=renormalize)
    assert law.sum() == pytest.approx(1, abs=1e-5)
    assert distance(law, model.joint(length)) < 1e-6


def near(seed: int) -> object:
    """Weights near the LLM's, so that its draws are sometimes accepted."""
    return jax.tree.map(lambda a, b: a + 0.15 * b, params_of(LLAMA), params_of(LLAMA, seed))


@functools.cache
def engine_of(children: str, verification: str):
    speculator = dataclasses.replace(self_draft("2/1,0/2")[0], children=children)
    engine = shared_engine((speculator,), adaptive=True, num_slots=2, verification=verification)
    return with_params(engine, near(1))


def test_naive_sampling_gives_the_tokens_of_incremental_decoding() -> None:
    engine, plain = engine_of(TOP_K, NAIVE), shared_engine()
    requests = [
        EngineRequest(list(prompt), 24, frozenset(), SamplingParams(temperature=temperature), seed)
        for seed, prompt in enumerate(PROMPTS)
        for temperature in (0, 0.9)
    ]
    found, expected = ([result.ids for result in run_requests(e, requests)] for e in (engine, plain))
    assert found == expected


@pytest.mark.slow  # the tests above leave only the engine's own wiring to it
@pytest.mark.parametrize(("children", "rule"), [(IID, MSS), (WITHOUT_REPLACEMENT, MSS_RENORMALIZED)])
def test_drawn_shapes_leave_the_law_alone_through_the_engine(children: str, rule: str) -> None:
    sampling, count, prompt = SamplingParams(temperature=0.7), 600, [3, 4, 3, 4, 3]
    engine = engine_of(children, rule)
    requests = [EngineRequest(prompt, 2, frozenset(), sampling, seed) for seed in range(count)]
    results = run_requests(engine, requests)

    def law(ids: list[int]) -> np.ndarray:
        x_V = logits_behind(ids) / 0.7
        p_V = np.exp(x_V - x_V.max())
        return p_V / p_V.sum()

    first_V = law(prompt)
    likely = [token for token in range(VOCAB) if first_V[token] > 0.01]
    joint = {(a, b): first_V[a] * p for a in likely for b, p in enumerate(law([*prompt, a]))}
    joint[()] = 1 - sum(joint.values())
    seen = Counter(tuple(result.ids) if result.ids[0] in likely else () for result in results)
    assert chi_square_p(seen, joint, count) > 1e-3
    [long] = run_requests(engine, [EngineRequest(prompt, 40, frozenset(), sampling, 1)])
    assert sum(long.stats.accepted_by_speculator.values()) > 0, "nothing was accepted: the law was not tested"


def test_the_llm_as_its_own_ssm_is_always_accepted() -> None:
    # Passes over inner nodes alone must still give every node the right positions and ancestors.
    speculator, params = self_draft("2/1,0/2/1,0")
    [result] = run(with_params(shared_engine((speculator,)), params), [PROMPTS[0]], max_tokens=50)
    assert result.ids == greedy(PROMPTS[0], max_tokens=50)
    assert result.stats.steps == 10
