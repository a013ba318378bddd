"""The decode loop: with any speculator, the ids are those of incremental decoding, and every count is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import (
    LLAMA,
    OPT,
    VOCAB,
    chain,
    fixed,
    greedy,
    make_engine,
    params_of,
    plan,
    run,
    self_draft,
    shared_engine,
    tree_of,
    with_params,
)

from specinfer_jax.serving.engine import EngineRequest
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.tree.expand import parse_expansion

PROMPT = [5, 17, 33, 2, 60, 8, 41]


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["rope", "learned positions"])
@pytest.mark.parametrize(
    "right",
    [lambda c: 0, lambda c: 1, lambda c: 9, lambda c: c % 2, lambda c: c * 7 % 5],
    ids=["none", "one", "all", "alternating", "mixed"],
)
def test_forced_acceptance_from_a_one_token_prompt(config, right) -> None:
    # case B004: position of the next input is always committed - 1, whatever was accepted
    prompt = [10]
    expected = greedy(prompt, config=config)
    engine = with_params(shared_engine((chain(4),), config=config), plan(prompt + expected, right))
    [result] = run(engine, [prompt])
    assert result.ids == expected


def test_a_wrong_first_token_is_never_committed() -> None:
    # case B007
    prompt = [1, 1, 1]
    expected = greedy(prompt)
    [result] = run(with_params(shared_engine((chain(1),)), plan(prompt + expected, lambda c: 0)), [prompt])
    assert result.ids == expected
    assert result.stats.steps == len(expected)
    assert result.stats.accepted_by_position == [0]


@pytest.mark.parametrize("tree", [pytest.param("1", marks=pytest.mark.slow), "1,1,1,1,1,1,1,1", "1,1,3,1,1"])
def test_self_draft_is_always_accepted(tree: str) -> None:
    # cases B005, B006: any drop below 100 % is a position, cache or bonus-token fault
    speculator, params = self_draft(tree)
    depth = speculator.depth
    engine = with_params(shared_engine((speculator,), max_model_len=230), params)
    [result] = run(engine, [PROMPT], max_tokens=200)
    assert result.ids == greedy(PROMPT, max_model_len=230, max_tokens=200)
    whole_steps, rest = divmod(200, depth + 1)
    assert result.stats.steps == whole_steps + (rest > 0)
    assert result.stats.accepted_by_position[depth - 1] >= whole_steps


def test_after_injected_errors_the_ssm_is_right_again_at_once() -> None:
    # case B005: the SSM is silent or overruled in a pattern; its cache must hold exactly what was committed
    speculator, params = self_draft("1,1,1")
    expected = greedy(PROMPT, max_model_len=230, max_tokens=200)
    engine = shared_engine((speculator,), max_model_len=230)
    spoiled = jax.tree.map(lambda x: -x, params)
    request = EngineRequest(PROMPT, 200, frozenset())
    with_params(engine, params)
    ids, kept = [], []
    for step, progress in enumerate(engine.run([request], stream=True)):
        ids += progress.new_token_ids
        kept.append(len(progress.new_token_ids))
        state = engine._state
        if progress.finish_reason is None:
            committed = len(PROMPT) + len(ids)
            assert int(state.cache.length_B[0]) == committed - 1
            assert int(state.speculators[0].length_B[0]) <= committed - 1
        # The next step is drafted by a wrong SSM, whose cache rows then are wrong as well: forget and refeed them.
        if step % 5 == 3:
            with_params(engine, spoiled)
        elif step % 5 == 4:
            with_params(engine, params)
            ssm_cache = state.speculators[0]
            engine._state = state._replace(
                speculators=(ssm_cache._replace(length_B=jnp.zeros_like(ssm_cache.length_B)),)
            )
    assert ids == expected
    good = [count for step, count in enumerate(kept[:-1]) if step % 5 != 4]
    assert good == [4] * len(good)


def first_occurrences(ids: list[int]) -> list[int]:
    return [t for t in range(len(ids)) if ids[t] not in ids[:t]]


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_eos_inside_an_accepted_path_stops_there(depth: int) -> None:
    # case B001
    plain = greedy(PROMPT, max_tokens=30)
    speculator, params = self_draft(",".join(["1"] * depth))
    engine = with_params(shared_engine((speculator,)), params)
    for t in first_occurrences(plain):
        # a set of two ends, the other of which never comes first
        stop = [plain[t], next(i for i in range(VOCAB) if i not in plain)]
        [result] = run(engine, [PROMPT], max_tokens=30, stop=stop)
        end = t
        assert result.ids == plain[: end + 1]
        assert result.finish_reason == "stop"
        assert result.stats.tokens == end + 1
        state = engine._state
        # the root's K/V is not in the cache
        assert int(state.cache.length_B[0]) == len(PROMPT) + end + 1 - 1


def test_eos_as_the_very_first_token() -> None:
    # case B052
    plain = greedy(PROMPT, max_tokens=3)
    speculator, params = self_draft("1,1,1")
    [result] = run(with_params(shared_engine((speculator,)), params), [PROMPT], stop=[plain[0]])
    assert (result.ids, result.finish_reason, result.stats.steps) == ([plain[0]], "stop", 1)


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["rope", "learned positions"])
@pytest.mark.parametrize("left", range(1, 10))
def test_the_last_steps_before_the_limit(config, left: int) -> None:
    # cases B002, B024: exactly limit - prompt tokens, reason length, ids equal greedy
    limit = 24
    prompt = [(7 * i + 3) % VOCAB for i in range(limit - left)]
    speculator, params = self_draft("1,2,1,1", config=config)
    engine = with_params(shared_engine((speculator,), config=config, max_model_len=limit), params)
    [result] = run(engine, [prompt])
    assert result.finish_reason == "length"
    assert len(result.ids) == left
    assert result.ids == greedy(prompt, config=config, max_model_len=limit)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_cuts_an_accepted_path(max_tokens: int) -> None:
    speculator, params = self_draft("1,1,1,1,1,1,1,1")
    [result] = run(with_params(shared_engine((speculator,)), params), [PROMPT], max_tokens=max_tokens)
    assert result.ids == greedy(PROMPT, max_tokens=max_tokens)
    assert result.finish_reason == "length"
    assert len(result.ids) == max_tokens


@pytest.mark.parametrize("length", [60, 63, 64, 65, 100])
def test_an_ssm_with_a_shorter_context_falls_silent(length: int) -> None:
    # case B023
    prompt = [(11 * i + 5) % VOCAB for i in range(length)]
    speculator, params = self_draft("1,1,1", max_len=64)
    engine = with_params(shared_engine((speculator,), max_model_len=160), params)
    [result] = run(engine, [prompt], max_tokens=40)
    assert result.ids == greedy(prompt, max_model_len=160, max_tokens=40)
    proposed = result.stats.proposed_by_speculator["ssm"]
    assert (proposed > 0) == (length + 2 <= 64)
    assert result.stats.steps >= 40 - 4 if length >= 63 else result.stats.steps < 40


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "paths",
    [[], [[7], [7], [7], [7]], [[3]], [[1, 2, 3], [9]], [[0, 0, 0], [0]]],
    ids=["empty", "all children equal", "one node", "full", "the padding's id"],
)
def test_degenerate_trees(paths, adaptive: bool) -> None:
    # case B055
    engine = with_params(shared_engine((fixed(4, 3),), adaptive=adaptive), tree_of(paths, 4))
    [result] = run(engine, [PROMPT])
    assert result.ids == greedy(PROMPT)


def test_a_tree_wider_than_the_vocabulary() -> None:
    # case B055
    speculator = SsmSpeculator(LLAMA, parse_expansion("5,1"), 256, vocab_limit=3)
    [result] = run(make_engine([speculator], [params_of(LLAMA)]), [PROMPT])
    assert result.ids == greedy(PROMPT)


def test_only_the_second_branch_is_right() -> None:
    # case B026: the accepted sibling stands behind a whole rejected branch, in another row than its depth says
    plain = greedy(PROMPT)
    right = plain[:3]
    tree = tree_of([[(t + 1) % VOCAB for t in right], right], 6)
    [result] = run(with_params(shared_engine((fixed(6, 3),)), tree), [PROMPT], max_tokens=4)
    assert result.ids == plain[:4]
    assert result.stats.steps == 1
    assert result.stats.accepted_by_position == [1, 1, 1]


def test_prompts_of_different_lengths_side_by_side() -> None:
    # case B037, and B018's kind: slots do not mix
    prompts = [[3], [3, 9, 27, 17, 51], [(5 * i) % VOCAB for i in range(9)], [60, 60, 60, 60, 60, 60], [1, 2]]
    for config in (LLAMA, OPT):
        expected = [greedy(prompt, config=config, max_tokens=30) for prompt in prompts]
        ssm, params = self_draft("1,2,1", config=config)
        engine = make_engine([ssm, NgramSpeculator()], [params, ()], config=config, num_slots=3)
        assert [result.ids for result in run(engine, prompts, max_tokens=30)] == expected


def test_the_gate_changes_no_token_and_saves_rows() -> None:
    prompts = [[4, 5, 6] * 6, PROMPT, [9]]
    adaptive = shared_engine((NgramSpeculator(),), adaptive=True, num_slots=2)
    results = run(with_params(adaptive, ()), prompts)
    assert [result.ids for result in results] == [greedy(prompt) for prompt in prompts]
    assert all(rows <= 16 for result in results for rows in result.stats.steps_by_rows)


def test_a_repeating_text_is_accepted_in_long_runs() -> None:
    # With its layers silenced the model maps each token to one next token and soon goes round in a circle.
    params = params_of(LLAMA)
    silent = {
        name: jax.tree.map(jnp.zeros_like, value) if name.startswith("layers") else value
        for name, value in params.items()
    }
    ids = {}
    for speculators in ((), (NgramSpeculator(),)):
        engine = make_engine(speculators, [()] * len(speculators), max_model_len=200, adaptive=True)
        engine.params = engine.params._replace(llm=silent)
        [result] = run(engine, [PROMPT])
        ids[len(speculators)] = result.ids
    assert ids[1] == ids[0]
    assert result.stats.tokens_per_step > 4
    assert max(rows for rows, steps in result.stats.steps_by_rows.items() if steps) == 16


def test_an_ssm_is_drafted_only_where_ngrams_do_not_offer_more() -> None:
    params = params_of(LLAMA)
    silent = {
        name: jax.tree.map(jnp.zeros_like, value) if name.startswith("layers") else value
        for name, value in params.items()
    }
    ssm, _ = self_draft("1,1")
    engine = make_engine((ssm, NgramSpeculator()), [silent, ()], max_model_len=200, adaptive=True)
    rows = len(engine.program.buckets)
    drafting_pays = StepCosts(jnp.linspace(1.0, 1.1, rows, dtype=jnp.float32), jnp.asarray([0.4, 0.0]))
    engine._costs = drafting_pays
    engine.params = engine.params._replace(llm=silent)
    [circle] = run(engine, [PROMPT], max_tokens=150)
    # At first nothing repeats; once the text goes round in a circle n-grams alone hold ten tokens and more.
    assert 0 < circle.stats.proposed_by_speculator["ssm"] < circle.stats.steps
    assert circle.stats.tokens_per_step > 4
    engine.params = engine.params._replace(llm=params, speculators=(params, ()))
    [varied] = run(engine, [PROMPT], max_tokens=30)
    assert varied.ids == greedy(PROMPT, max_tokens=30)
    assert varied.stats.proposed_by_speculator["ssm"] >= varied.stats.steps


def test_statistics_add_up() -> None:
    # case B081
    speculator, params = self_draft("1,1,1")
    [result] = run(with_params(shared_engine((speculator,)), params), [PROMPT], max_tokens=10)
    stats = result.stats
    # steps keep 4, 4 and, cut by the limit to a room of 2, 1 node and the bonus token
    assert (stats.tokens, stats.steps) == (10, 3)
    assert stats.proposed_by_position == [3, 2, 2]
    assert stats.accepted_by_position == [3, 2, 2]
    assert stats.acceptance_by_position == [1.0, 1.0, 1.0]
    assert stats.tokens == stats.steps + sum(stats.accepted_by_position)
    assert stats.tokens_per_step == pytest.approx(10 / 3)
    [plain] = run(shared_engine(), [PROMPT], max_tokens=10)
    assert plain.stats.acceptance_by_position == []
    assert plain.stats.tokens_per_step == 1.0


def test_an_idle_slot_writes_nothing() -> None:
    # case B019: what nobody holds is poisoned first; a request writes its own pages alone, and reads no others
    engine = make_engine([NgramSpeculator()], [()], num_slots=2)
    run(engine, [PROMPT, [9, 8, 7]], max_tokens=5)
    cache = engine._state.cache
    poisoned = [jnp.full_like(pages, jnp.nan) for pages in cache.k_pages]
    engine._state = engine._state._replace(cache=cache._replace(k_pages=tuple(poisoned)))
    prompt = [1, 2, 3, 4]
    assert run(engine, [prompt], max_tokens=20)[0].ids == greedy(prompt, max_tokens=20)
    written_P = np.isfinite(np.asarray(engine._state.cache.k_pages[0])).any(axis=(0, 2, 3))
    assert written_P.sum() == -(-(len(prompt) + 20 - 1) // 8)
