"""From logits to the law of a token: thresholds against a sorting float64 oracle, penalties against a recount."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_law import Rules, filtered, shaped
from table_slots import root_history, sampling_of

from specinfer_jax.sampling_params import SamplingParams
from specinfer_jax.speculation.sampling import (
    MAX_BAD_LENGTH,
    History,
    advance,
    chosen_logprobs,
    in_use,
    log_weights,
)

B, V, S = 64, 257, 16
EDGE = 1e-5
"""How near to a threshold float32 may decide otherwise."""

weights = jax.jit(log_weights)
on = jax.jit(in_use)
step_on = jax.jit(advance)


def laws(logits_BV, rules: list[Rules], *, prompts=None, outputs=None, stop_ids=()) -> np.ndarray:
    """The package's laws in float64 `[B, V]`, normalised; zeros where nothing can be chosen."""
    given, V = logits_BV.shape
    full = B if V < 1000 else given  # few shapes, each compiled once; the slots added repeat the others
    logits_BV = jnp.asarray(logits_BV)[np.arange(full) % given]
    rules, prompts, outputs = (
        [values[b % given] for b in range(full)] for values in (rules, prompts or [()] * given, outputs or [()] * given)
    )
    token_BS = np.zeros((full, S), np.int32)
    for b, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_BS[b, : len(prompt) + len(output)] = [*prompt, *output]
    prompt_B = np.array([len(prompt) for prompt in prompts], np.int32)
    committed_B = prompt_B + np.array([len(output) for output in outputs], np.int32)
    sampling = sampling_of(rules, V)
    use = on(sampling, np.ones(full, bool))
    history = root_history(token_BS, committed_B, prompt_B, vocab_size=V, shaped=use.shaped)
    is_stop_BV = np.tile(np.isin(np.arange(V), stop_ids), (full, 1))
    log_weight_BV = np.asarray(weights(logits_BV, sampling, history, is_stop_BV, use), np.float64)
    assert not np.isnan(log_weight_BV).any() and log_weight_BV.max() <= 0
    weight_BV = np.exp(log_weight_BV[:given])
    return weight_BV / np.maximum(weight_BV.sum(axis=1, keepdims=True), 1e-300)


def law(probabilities, rules: Rules, **history) -> np.ndarray:
    """Of one slot, from probabilities."""
    logits_V = np.log(np.array(probabilities))
    return laws(logits_V[None].astype(np.float32), [rules], **{k: [v] for k, v in history.items()})[0]


def is_edge_case(x_V: np.ndarray, rules: Rules) -> bool:
    """Whether a threshold of min-p or top-p lies so near to a token that float32 may decide otherwise."""
    reached = np.cumsum(-np.sort(-filtered(x_V, rules._replace(top_p=1.0))))
    ratio = np.exp((x_V - x_V.max()) / rules.temperature)
    by_top_p = rules.top_p < 1 and (np.abs(reached - rules.top_p) < EDGE).any()
    return bool(by_top_p or (np.abs(ratio - rules.min_p) < EDGE * rules.min_p).any())


def random_rules(rng: np.random.Generator) -> Rules:
    def maybe(neutral, value):
        return value if rng.random() < 0.5 else neutral

    return Rules(
        temperature=float(rng.choice([0.3, 0.7, 1.0, 1.5])),
        top_k=maybe(0, int(rng.integers(1, V + 5))),
        top_p=maybe(1.0, float(rng.uniform(0.05, 0.99))),
        min_p=maybe(0.0, float(rng.uniform(0.001, 0.5))),
        repetition=maybe(1.0, float(rng.uniform(0.5, 2))),
        presence=maybe(0.0, float(rng.uniform(-2, 2))),
        frequency=maybe(0.0, float(rng.uniform(-2, 2))),
        min_tokens=maybe(0, int(rng.integers(0, 8))),
        bias=maybe((), ((int(rng.integers(V)), 3.5), (int(rng.integers(V)), -np.inf))),
        bad=maybe((), ((3, 4), (1, 2, 3), (5,))),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_all_parameters_against_the_oracle(dtype, ties) -> None:
    # case B015: whatever the logits' dtype, everything is computed in float32
    rng = np.random.default_rng(3)
    compared = with_top_p = 0
    for _ in range(4):
        logits_BV = rng.normal(scale=3, size=(B, V))
        logits_BV = jnp.asarray(np.round(logits_BV) if ties else logits_BV, dtype)
        rules = [random_rules(rng) for _ in range(B)]
        prompts = [tuple(rng.integers(0, 7, rng.integers(1, 6)).tolist()) for _ in range(B)]
        outputs = [tuple(rng.integers(0, 7, rng.integers(0, 8)).tolist()) for _ in range(B)]
        got_BV = laws(logits_BV, rules, prompts=prompts, outputs=outputs, stop_ids=(2, 9))
        for b in range(B):
            x_V = shaped(
                np.asarray(logits_BV[b], np.float64), rules[b], prompt=prompts[b], output=outputs[b], stop_ids=(2, 9)
            )
            if not is_edge_case(x_V, rules[b]):
                expected_V = filtered(x_V, rules[b])
                np.testing.assert_array_equal(got_BV[b] > 0, expected_V > 0, err_msg=str(rules[b]))
                np.testing.assert_allclose(got_BV[b], expected_V, rtol=2e-4, atol=1e-7, err_msg=str(rules[b]))
                compared += 1
                with_top_p += rules[b].top_p < 1
    assert compared > 0.9 * 4 * B and with_top_p > 0.4 * 4 * B


def test_bfloat16_logits_are_float32_logits() -> None:
    # case B015
    logits_BV = jnp.asarray(np.random.default_rng(4).normal(scale=3, size=(B, V)), jnp.bfloat16)
    rules = [Rules(0.7, top_p=0.9, repetition=1.3)] * B
    np.testing.assert_array_equal(laws(logits_BV, rules), laws(logits_BV.astype(jnp.float32), rules))


@pytest.mark.parametrize(
    ("p", "rules", "kept"),
    [
        ([0.2, 0.3, 0.3, 0.2], Rules(top_k=1), [1, 2]),
        ([0.4, 0.2, 0.2, 0.2], Rules(top_k=2), [0, 1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], Rules(top_k=3), [1, 2, 3]),
        ([0.1, 0.2, 0.3, 0.4], Rules(top_k=9), [0, 1, 2, 3]),
        ([0.3, 0.4, 0.3, 0.0], Rules(top_p=0.5), [0, 1, 2]),
        ([0.3, 0.4, 0.2, 0.1], Rules(top_p=0.39), [1]),
        ([0.3, 0.4, 0.2, 0.1], Rules(top_p=0.41), [0, 1]),
        ([0.3, 0.4, 0.2, 0.1], Rules(top_p=1e-30), [1]),
        ([0.3, 0.4, 0.2, 0.1], Rules(min_p=0.74), [0, 1]),
        ([0.3, 0.4, 0.2, 0.1], Rules(min_p=0.76), [1]),
        ([0.4, 0.4, 0.1, 0.1], Rules(min_p=1.0), [0, 1]),
        # temperature first: 0.5, 0.3, 0.2 at 0.5 is 0.66, 0.24, 0.11
        ([0.5, 0.3, 0.2, 0.0], Rules(temperature=0.5, top_p=0.65), [0]),
        ([0.5, 0.3, 0.2, 0.0], Rules(temperature=0.5, min_p=0.4), [0]),
        # top-p of what top-k or min-p left: 0.57, 0.43
        ([0.4, 0.3, 0.2, 0.1], Rules(top_k=2, top_p=0.55), [0]),
        ([0.4, 0.3, 0.2, 0.1], Rules(min_p=0.6, top_p=0.55), [0]),
        # penalties before filters
        ([0.4, 0.3, 0.2, 0.1], Rules(bias=((0, -5.0),), top_k=1), [1]),
    ],
)
def test_kept_tokens(p, rules, kept) -> None:
    with np.errstate(divide="ignore"):
        assert np.flatnonzero(law(p, rules)).tolist() == kept


def test_top_p_over_a_large_vocabulary() -> None:
    # case B015: the sum that decides top-p must not lose mass
    rng = np.random.default_rng(5)
    logits_BV = rng.normal(size=(2, 50_000)).astype(np.float32)
    for top_p in (0.5, 0.95, 0.999):
        rules = Rules(top_p=top_p)
        got_BV = laws(logits_BV, [rules] * 2)
        for b in range(2):
            expected_V = filtered(logits_BV[b].astype(np.float64), rules)
            assert abs(int((got_BV[b] > 0).sum()) - int((expected_V > 0).sum())) <= 3
            mass = np.exp(logits_BV[b].astype(np.float64))
            assert mass[got_BV[b] > 0].sum() / mass.sum() == pytest.approx(top_p, abs=5e-5)


def test_temperatures_side_by_side() -> None:
    # case B016
    rng = np.random.default_rng(6)
    assert SamplingParams(temperature=1e-6).is_greedy and not SamplingParams(temperature=1e-4).is_greedy
    logits_BV = rng.normal(scale=2, size=(4, V)).astype(np.float32)
    logits_BV[:, [200, 31, 77]] = 9  # greedy takes the first of these
    rules = [Rules(0.0), Rules(0.0), Rules(0.7), Rules(1.0)]  # 1e-6 reaches the device as 0
    together = laws(logits_BV, rules)
    np.testing.assert_array_equal(together[:2], np.tile((np.arange(V) == 31) * 1.0, (2, 1)))
    for greedy in (Rules(0.0, top_p=0.5), Rules(0.0, top_k=3, min_p=0.9)):
        np.testing.assert_array_equal(laws(logits_BV, [greedy, *rules[1:]]), together)
    for other in (Rules(0.3), Rules(1.0, top_p=0.3, top_k=2), Rules(1.0, repetition=3.0, bias=((0, 4.0),))):
        np.testing.assert_array_equal(laws(logits_BV, [other, *rules[1:]])[1:], together[1:])


def test_greedy_takes_the_best_of_the_penalised_logits() -> None:
    logits_BV = np.array([[1.0, 3.0, 2.0, 2.5], [-1.0, -2.0, -4.0, -3.0]], np.float32)
    rules = [Rules(0.0, frequency=0.5), Rules(0.0, repetition=4.0)]
    got = laws(logits_BV, rules, prompts=[(0,), (0,)], outputs=[(1, 1), (2,)])
    # 3 - 2 * 0.5 = 2 < 2.5; negative logits are multiplied: -1 * 4 and -4 * 4, prompt and answer alike
    np.testing.assert_array_equal(got, [[0, 0, 0, 1], [0, 1, 0, 0]])


def test_presence_and_frequency_leave_the_prompt_alone() -> None:
    rules = Rules(presence=1.0, frequency=0.5)
    got = law([0.25] * 4, rules, prompts=(0, 1, 1), outputs=(1, 2, 2))
    expected = np.exp([0, -1.5, -2, 0])
    np.testing.assert_allclose(got, expected / expected.sum(), atol=1e-6)


class TestHistory:
    """What came before a node."""

    def test_counts_at_every_node_equal_a_recount(self) -> None:
        # cases B028, B029: committed tokens are counted afresh, accepted ones one by one
        rng = np.random.default_rng(7)
        V, prompt_B, output_B = 6, rng.integers(1, 5, B), rng.integers(0, 5, B)
        token_BS = rng.integers(0, V, (B, S)).astype(np.int32)  # what is behind the committed tokens does not count
        committed_B = prompt_B + output_B
        history = root_history(
            token_BS, committed_B.astype(np.int32), prompt_B.astype(np.int32), vocab_size=V, shaped=np.bool_(True)
        )
        context = [token_BS[b, : committed_B[b]].tolist() for b in range(B)]
        for _ in range(6):
            self.check(history, context, prompt_B, V)
            token_B, moved_B = rng.integers(0, V, B).astype(np.int32), rng.random(B) < 0.7
            for b in np.flatnonzero(moved_B):
                context[b].append(int(token_B[b]))
            history = step_on(history, token_B, moved_B)
        assert max(map(len, context)) > min(map(len, context))

    def check(self, history: History, context: list[list[int]], prompt_B: np.ndarray, V: int) -> None:
        count_BV, in_prompt_BV, recent_BY, generated_B = map(np.asarray, history)
        for b, tokens in enumerate(context):
            prompt, output = tokens[: prompt_B[b]], tokens[prompt_B[b] :]
            assert count_BV[b].tolist() == [output.count(token) for token in range(V)]
            assert in_prompt_BV[b].tolist() == [token in prompt for token in range(V)]
            known = tokens[-MAX_BAD_LENGTH:]
            assert recent_BY[b, MAX_BAD_LENGTH - len(known) :].tolist() == known
            assert (recent_BY[b, : MAX_BAD_LENGTH - len(known)] < -1).all(), "before the first token is no token"
            assert generated_B[b] == len(output)

    def test_a_full_context_keeps_the_latest_tokens(self) -> None:
        token_1S = np.arange(40, dtype=np.int32)[None]
        history = root_history(token_1S, np.array([37], np.int32), np.array([3], np.int32), vocab_size=50, shaped=True)
        assert np.asarray(history.recent_BY)[0].tolist() == list(range(37 - MAX_BAD_LENGTH, 37))


class TestBannedSequences:
    # case B092

    def test_the_last_token_is_banned_behind_the_others(self) -> None:
        rules = Rules(bad=((0, 1), (2, 0, 3), (0, 0, 0, 0, 2)))
        for context, banned in (((0,), [1]), ((2,), []), ((2, 0), [1, 3]), ((1, 0), [1]), ((0, 2), []), ((), [])):
            for cut in range(len(context) + 1):  # wherever the prompt ends
                got = law([0.25] * 4, rules, prompts=context[:cut], outputs=context[cut:])
                assert np.flatnonzero(got == 0).tolist() == banned, context

    def test_as_long_as_there_may_be(self) -> None:
        sequence = tuple(np.random.default_rng(8).integers(0, 4, MAX_BAD_LENGTH).tolist())
        *before, last = sequence
        rules = Rules(bad=(sequence,))
        assert law([0.25] * 4, rules, prompts=tuple(before))[last] == 0
        assert law([0.25] * 4, rules, prompts=tuple(before[1:]))[last] > 0
        assert law([0.25] * 4, rules, prompts=((before[0] + 1) % 4, *before[1:]))[last] > 0

    def test_nothing_left(self) -> None:
        assert not law([0.25] * 4, Rules(bad=tuple((1, token) for token in range(4))), prompts=(1,)).any()
        assert law([0.25] * 4, Rules(0.0, bad=((1, 0), (1, 1))), prompts=(1,)).tolist() == [0, 0, 1, 0]


def test_stop_ids_are_banned_until_min_tokens_are_out() -> None:
    # case B029: the fifth token may not end the answer, the sixth may
    rules = Rules(min_tokens=5)
    for out in range(8):
        got = laws(np.zeros((1, 4), np.float32), [rules], prompts=[(1,)], outputs=[(1,) * out], stop_ids=(0, 3))[0]
        assert (got[[0, 3]] == 0).all() == (out < 5) and (got[[1, 2]] > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_mean_nothing(temperature) -> None:
    # case B097: NaN, +inf and all -inf leave nothing to choose, in their own slot alone
    rng = np.random.default_rng(9)
    logits_BV = rng.normal(size=(8, V)).astype(np.float32)
    good_BV = laws(logits_BV, [Rules(temperature, top_k=5)] * 8)
    broken_BV = logits_BV.copy()
    broken_BV[0, 5], broken_BV[2, 7], broken_BV[4] = np.nan, np.inf, -np.inf
    broken_BV[6, 0], broken_BV[6, 1] = np.inf, -np.inf
    got_BV = laws(broken_BV, [Rules(temperature, top_k=5)] * 8)
    assert not got_BV[::2].any()
    np.testing.assert_array_equal(got_BV[1::2], good_BV[1::2])


def test_huge_logits() -> None:
    logits_BV = np.array([[3e38, -3e38, 0, 3e38], [-3e38, -3e38, -3.2e38, -np.inf]], np.float32)
    got = laws(logits_BV, [Rules(0.5, top_p=0.9)] * 2)
    np.testing.assert_allclose(got, [[0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0]])
    assert laws(logits_BV, [Rules(0.0)] * 2).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]


def test_only_active_slots_switch_parts_on() -> None:
    rules = [
        Rules(0.0),
        Rules(0.8, top_k=3),
        Rules(1.0, top_p=0.9),
        Rules(0.0, top_k=3, top_p=0.5),
        Rules(0.0, presence=1),
    ]
    sampling = sampling_of(rules, 4)

    def used(*active: int) -> dict[str, bool]:
        use = in_use(sampling, jnp.isin(jnp.arange(5), jnp.array(active)))
        assert bool(use.plain) == (not (use.shaped or use.random))
        return {name for name, value in use._asdict().items() if value}

    assert used() == used(0) == used(3) == set()
    assert used(0, 1) == {"random", "top_k"}
    assert used(2, 3) == {"random", "top_p"}
    assert used(4) == {"shaped"}


def test_log_probabilities_are_the_raw_models() -> None:
    # case B076
    rng = np.random.default_rng(10)
    logits_VT = rng.normal(scale=2, size=(30, 5)).astype(np.float32)
    logits_VT[:, 4] = np.round(logits_VT[:, 4])
    token_T = np.array([3, int(np.argmax(logits_VT[:, 1])), int(np.argmin(logits_VT[:, 2])), 29, 0], np.int32)
    got = chosen_logprobs(jnp.asarray(logits_VT), jnp.asarray(token_T), num_top=4)
    exact_VT = logits_VT.astype(np.float64)
    exact_VT = exact_VT - np.log(np.exp(exact_VT).sum(axis=0))
    chosen_T = exact_VT[token_T, np.arange(5)]
    np.testing.assert_allclose(got.logprob_T, chosen_T, atol=1e-5)
    assert got.rank_T.tolist() == (1 + (exact_VT > chosen_T).sum(axis=0)).tolist()
    np.testing.assert_allclose(got.top_logprob_TK, -np.sort(-exact_VT, axis=0)[:4].T, atol=1e-5)
    np.testing.assert_allclose(exact_VT[got.top_id_TK, np.arange(5)[:, None]], got.top_logprob_TK, atol=1e-5)
