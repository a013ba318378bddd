"""Random draws have the law that the verifier is told: chi-square over many fixed keys, so that nothing is flaky."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_law import NOTHING, Rules, TableModel, filtered, independent, one_after_the_other
from scipy import stats
from table_slots import prepare, sampling_of

from specinfer_jax.speculation.children import MAX_CANDIDATES, Children, drawn_children, likeliest_children
from specinfer_jax.speculation.draft import Draft, merge_drafts
from specinfer_jax.speculation.mss import verify_mss
from specinfer_jax.speculation.randomness import Role, gumbel, keys_at, request_key, uniform
from specinfer_jax.speculation.sampling import in_use
from specinfer_jax.speculation.verifier import Target, Verdict, draw_token
from specinfer_jax.tree.token_tree import TokenTree

SEEDS = 20_000
UNLIKELY = 1e-3
"""A right law fails one fixed set of seeds in a thousand."""

children = jax.jit(drawn_children, static_argnames=("k", "rule"))


def fits(outcome_n: np.ndarray, law: dict) -> float:
    """p-value of outcomes (rows) under a law; an outcome of probability 0 fails."""
    seen, counts = np.unique(np.asarray(outcome_n).reshape(len(outcome_n), -1), axis=0, return_counts=True)
    count = {tuple(row.tolist()): n for row, n in zip(seen, counts, strict=True)}
    possible = {outcome: chance for outcome, chance in law.items() if chance > 0}
    assert sum(possible.values()) == pytest.approx(1)
    assert set(count) <= set(possible), f"impossible: {set(count) - set(possible)}"
    pairs = [(count.get(outcome, 0), chance * len(outcome_n)) for outcome, chance in possible.items()]
    rare = [pair for pair in pairs if pair[1] < 10]  # together they are one outcome
    cells = [pair for pair in pairs if pair[1] >= 10] + ([tuple(map(sum, zip(*rare, strict=True)))] if rare else [])
    chi2 = sum((n - expected) ** 2 / expected for n, expected in cells)
    return float(stats.chi2.sf(chi2, max(len(cells) - 1, 1)))


def many_keys(n: int = SEEDS, seed: int = 0) -> jax.Array:
    """Key data of n requests."""
    seed_n2 = jnp.stack([jnp.full(n, seed), jnp.arange(n)], axis=1).astype(jnp.uint32)
    return jax.vmap(request_key)(seed_n2, jnp.zeros(n, jnp.int32))


def same_logits(logits_V: np.ndarray, n: int) -> jax.Array:
    """One model's row in n columns."""
    return jnp.asarray(np.tile(np.asarray(logits_V, np.float32)[:, None], (1, n)))


LOGITS = np.array([0.3, -0.4, 1.2, 0.0, -1.1])
DRAFTS = {
    "plain": Rules(),
    "temperature": Rules(temperature=0.5),
    "top-k": Rules(top_k=3),
    "top-p": Rules(top_p=0.7),
    "min-p": Rules(min_p=0.3),
    "all": Rules(1.4, 4, 0.9, 0.15),
}
LAWS = {"iid": independent, "without_replacement": one_after_the_other}


def drawn_by(logits_V: np.ndarray, rules: Rules, rule: str, seed: int) -> Children:
    """Three children of each of two nodes with the same law, in SEEDS / 2 slots."""
    n = SEEDS // 2
    key_B = jax.random.split(jax.random.key(seed), n)
    drawn = children(same_logits(logits_V, SEEDS), sampling_of([rules] * n, len(logits_V)), key_B, k=3, rule=rule)
    return jax.tree.map(np.asarray, drawn)


@pytest.mark.parametrize("rules", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("rule", LAWS)
def test_children_have_the_law_that_the_verifier_is_told(rule, rules) -> None:
    drawn = drawn_by(LOGITS, rules, rule, seed=1)
    q_V = filtered(LOGITS.astype(np.float32).astype(np.float64), rules)
    told_BEV = np.zeros((SEEDS // 2, 2, 5))
    np.put_along_axis(told_BEV, drawn.drawn_from.id_BEC, drawn.drawn_from.prob_BEC, 2)
    np.testing.assert_allclose(told_BEV, np.tile(q_V, (SEEDS // 2, 2, 1)), atol=1e-6)
    law = {tokens: chance for chance, tokens in LAWS[rule](q_V, 3)}
    token_BWk = np.where(drawn.valid_BWk, drawn.token_BWk, NOTHING)  # surplus draws do not exist
    assert fits(token_BWk.reshape(-1, 3), law) > UNLIKELY
    slot_id_BWk = np.take_along_axis(drawn.drawn_from.id_BEC, drawn.slot_BWk, axis=2)
    np.testing.assert_array_equal(slot_id_BWk, drawn.token_BWk)
    # The nodes of a level draw independently of each other.
    pairs = {(a, b): q_V[a] * q_V[b] for a in range(5) for b in range(5)}
    assert fits(token_BWk[:, :, 0], pairs) > UNLIKELY


@pytest.mark.parametrize("rule", LAWS)
def test_fewer_tokens_than_children(rule) -> None:
    rules = [Rules(), Rules(top_k=2), Rules(0.0), Rules(top_p=1e-6)]
    logits_VT = np.tile(LOGITS[:3, None], (1, 4)).astype(np.float32)
    drawn = children(
        jnp.asarray(logits_VT), sampling_of(rules, 3), jax.random.split(jax.random.key(3), 4), k=5, rule=rule
    )
    valid_Bk, token_Bk = np.asarray(drawn.valid_BWk)[:, 0], np.asarray(drawn.token_BWk)[:, 0]
    support = [{0, 1, 2}, {0, 2}, {0, 1, 2}, {2}]
    for b in range(4):
        tokens = token_Bk[b][valid_Bk[b]].tolist()
        assert set(tokens) <= support[b]
        if rule == "without_replacement" or b == 2:
            assert sorted(tokens) == sorted(support[b]) and not valid_Bk[b, len(tokens) :].any()
        else:
            assert valid_Bk[b].all()
    assert token_Bk[2, :3].tolist() == [2, 0, 1]  # a greedy slot takes the likeliest, in order


@pytest.mark.parametrize("rule", LAWS)
def test_logits_without_a_law_give_no_children(rule) -> None:
    # case B097
    one_token = np.where(np.arange(5) == 1, LOGITS, -np.inf)
    for broken_V, there in (
        (np.where(np.arange(5) == 2, np.nan, LOGITS), 0),
        (np.where(np.arange(5) == 2, np.inf, LOGITS), 0),
        (np.full(5, -np.inf), 0),
        (one_token, 3 if rule == "iid" else 1),
    ):
        drawn = drawn_by(broken_V, Rules(), rule, seed=4)
        assert not np.isnan(drawn.drawn_from.prob_BEC).any()
        assert (drawn.valid_BWk.sum(axis=2) == there).all()
        assert (drawn.token_BWk[drawn.valid_BWk] == 1).all()


def test_only_the_likeliest_candidates_are_drawn_and_told() -> None:
    V = 3 * MAX_CANDIDATES
    logits_VT = np.random.default_rng(5).normal(size=(V, 64)).astype(np.float32)
    rules = [Rules(), Rules(0.7, top_p=0.8)] * 32
    drawn = children(
        jnp.asarray(logits_VT), sampling_of(rules, V), jax.random.split(jax.random.key(5), 64), k=4, rule="iid"
    )
    for b in range(64):
        best_C = np.argsort(-logits_VT[:, b], kind="stable")[:MAX_CANDIDATES]
        assert np.asarray(drawn.drawn_from.id_BEC)[b, 0].tolist() == best_C.tolist()
        expected_C = filtered(logits_VT[best_C, b].astype(np.float64), rules[b])
        np.testing.assert_allclose(np.asarray(drawn.drawn_from.prob_BEC)[b, 0], expected_C, atol=1e-6)
        assert set(np.asarray(drawn.token_BWk)[b, 0].tolist()) <= set(best_C[expected_C > 0].tolist())


def test_likeliest_children() -> None:
    logits_VT = np.array([[0.0, 3, 1, 3], [5.0, 1, 4, 2], [1.0, 1, 1, 1]], np.float32).T
    for k in (1, 2, 4, 6):
        token_BWk, valid_BWk = (np.asarray(x) for x in likeliest_children(jnp.asarray(logits_VT), 1, k))
        expected = [[1, 3, 2, 0], [0, 2, 3, 1], [0, 1, 2, 3]]
        assert token_BWk[0, :, :4].tolist() == [row[:k] for row in expected]
        assert valid_BWk[0].tolist() == [[i < 4 for i in range(k)]] * 3


def target_at_root(logits_V: np.ndarray, n: int, rules: Rules, key_n2: jax.Array) -> Target:
    sampling = sampling_of([rules] * n, len(logits_V))._replace(key_B2=key_n2)
    use = in_use(sampling, jnp.ones(n, bool))
    return Target(same_logits(logits_V, n), sampling, jnp.zeros((n, len(logits_V)), bool), use)


@jax.jit
def token_at_root(target: Target, position_B: jax.Array) -> jax.Array:
    return draw_token(target.logits_VT.T, target, position_B)


def test_a_token_has_the_law_of_its_weights() -> None:
    got = token_at_root(target_at_root(LOGITS, SEEDS, Rules(), many_keys()), jnp.full(SEEDS, 9))
    law = {(token,): chance for token, chance in enumerate(filtered(LOGITS, Rules()))}
    assert fits(np.asarray(got), law) > UNLIKELY


@pytest.mark.parametrize("batches", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_equal_bfloat16_logits_favour_no_id(batches) -> None:
    # case B015: of 2,000 draws with noise in bfloat16, 435 ids differ, and their mean is at 0.003 of the vocabulary
    V, rows = 50_000, 50
    target = target_at_root(np.zeros(1), rows, Rules(), many_keys(rows))

    @jax.jit
    def draw(position_B: jax.Array) -> jax.Array:
        return draw_token(jnp.zeros((rows, V), jnp.bfloat16), target, position_B)

    ids = np.concatenate([np.asarray(draw(jnp.full(rows, i))) for i in range(batches)])
    assert ids.min() >= 0 and ids.max() < V
    assert abs(ids.mean() / V - 0.5) < 4 * (1 / 12 / len(ids)) ** 0.5
    assert len(np.unique(ids)) > 0.95 * len(ids)


class TestKeys:
    """Random numbers depend on what they are for, and on nothing else."""

    def test_every_use_has_its_own_key(self) -> None:
        key_12 = many_keys(1)
        uses = [(Role.TOKEN,), (Role.ACCEPT,), *((Role.DRAFT, m, level) for m in range(3) for level in range(3))]
        data = {
            tuple(np.asarray(jax.random.key_data(keys_at(key_12, jnp.array([position]), *use)))[0].tolist())
            for position in range(5)
            for use in uses
        }
        assert len(data) == 5 * len(uses)

    def test_seeds_and_samples(self) -> None:
        data = {
            tuple(np.asarray(request_key(jnp.array([high, low], jnp.uint32), jnp.int32(sample))).tolist())
            for high, low, sample in itertools.product((0, 1, 2**32 - 1), (0, 1, 2**32 - 1), (0, 1, 2))
        }
        assert len(data) == 27

    def test_a_slot_draws_alone_what_it_draws_beside_others(self) -> None:
        # case B039
        key_B2, position_B = many_keys(6), jnp.array([3, 9, 4, 3, 0, 7])
        for noise in (gumbel, uniform):
            together = np.asarray(noise(keys_at(key_B2, position_B, Role.ACCEPT), 7))
            for b in (0, 4):
                alone = noise(keys_at(key_B2[b : b + 1], position_B[b : b + 1], Role.ACCEPT), 7)
                np.testing.assert_array_equal(np.asarray(alone)[0], together[b])
        assert together.dtype == np.float32 and together.min() >= 0 and together.max() < 1

    def test_positions_are_independent(self) -> None:
        target, law = target_at_root(LOGITS[:3], SEEDS, Rules(), many_keys()), filtered(LOGITS[:3], Rules())
        got = np.stack([token_at_root(target, jnp.full(SEEDS, position)) for position in (4, 5, 6)], axis=1)
        joint = {tokens: float(np.prod(law[list(tokens)])) for tokens in itertools.product(range(3), repeat=3)}
        assert fits(got, joint) > UNLIKELY


P, Q = np.array([0.35, 0.3, 0.2, 0.15]), np.array([0.1, 0.2, 0.3, 0.4])
TABLE = np.log(np.stack([np.roll(P, row) for row in range(5)])).astype(np.float32)
"""The LLM's logits at the root and behind each of four tokens."""


@functools.partial(jax.jit, static_argnames=("rule", "renormalize"))
def one_step(prepared, draft_logits_VT, is_key_shared, *, rule: str, renormalize: bool) -> Verdict:
    """A step as the decoder does it: two SSMs draw two children each, their trees are merged and verified."""
    n, k = prepared.sampling.key_B2.shape[0], 2
    position_B, drafts = jnp.full(n, 5), []
    keys = [keys_at(prepared.sampling.key_B2, position_B, Role.DRAFT, m, 0) for m in range(2)]
    for m in range(2):
        key_B = jnp.where(is_key_shared, keys[0], keys[m])
        drawn = drawn_children(draft_logits_VT, prepared.sampling, key_B, k=k, rule=rule)
        root = jnp.zeros((n, 1), jnp.int32)
        tree = TokenTree(
            jnp.concatenate([root, drawn.token_BWk[:, 0]], axis=1),
            jnp.tile(jnp.array([[k + 1, 0, 0]]), (n, 1)),
            jnp.tile(jnp.array([[0, 1, 1]]), (n, 1)),
            jnp.concatenate([root == 0, drawn.valid_BWk[:, 0]], axis=1),
        )
        slot_BN = jnp.concatenate([root, drawn.slot_BWk[:, 0]], axis=1)
        drafts.append(Draft(tree, tree.depth_BN, slot_BN, drawn.drawn_from))
    merged = merge_drafts(drafts, with_draws=True)
    number_BN = jnp.where(merged.tree.depth_BN == 1, 1 + merged.tree.token_BN, 0)
    logits_VT = jnp.take(prepared.logits_PV, number_BN, axis=0).reshape(-1, 4).T
    use = in_use(prepared.sampling, jnp.ones(n, bool))
    target = Target(logits_VT, prepared.sampling, prepared.is_stop_BV, use)
    return verify_mss(
        merged.tree, merged.draws, merged.drawn_from, target, prepared.history, position_B, path_len=2,
        renormalize=renormalize,
    )  # fmt: skip


def run_one_step(table_PV: np.ndarray, draft_V: np.ndarray, *, rule: str, is_key_shared: bool = False) -> Verdict:
    prepared = prepare(TableModel(table_PV), SEEDS)
    prepared = prepared._replace(sampling=prepared.sampling._replace(key_B2=many_keys()))
    verdict = one_step(
        prepared, same_logits(draft_V, SEEDS), is_key_shared, rule=rule, renormalize=rule == "without_replacement"
    )
    return jax.tree.map(np.asarray, verdict)


@pytest.mark.parametrize("rule", ["iid", pytest.param("without_replacement", marks=pytest.mark.slow)])
def test_a_whole_step_with_the_packages_own_random_numbers(rule) -> None:
    """Draws, acceptances and bonus tokens share no random numbers: identical SSMs would show it."""
    verdict = run_one_step(TABLE, np.log(Q), rule=rule)
    first_B, second_B = verdict.token_BA[:, 0], verdict.token_BA[:, 1]
    assert fits(first_B, {(token,): chance for token, chance in enumerate(P)}) > UNLIKELY
    for token in range(4):  # behind an accepted token the bonus token is the LLM's own
        follows_n = second_B[(first_B == token) & (verdict.accepted_B == 1)]
        assert len(follows_n) > 1000
        law_V = TableModel(TABLE).law((token,))
        assert fits(follows_n, {(t,): chance for t, chance in enumerate(law_V)}) > UNLIKELY
    if rule == "iid":  # and would it?
        shared = run_one_step(TABLE, np.log(Q), rule=rule, is_key_shared=True)
        assert fits(shared.token_BA[:, 0], {(token,): chance for token, chance in enumerate(P)}) < 1e-9


def test_three_equally_likely_tokens_all_appear() -> None:
    # case B017: verification is never silently greedy
    flat_V = np.array([0, 0, 0, -np.inf])
    n = 300
    target = target_at_root(flat_V, SEEDS, Rules(), many_keys())
    by_naive = np.asarray(token_at_root(target, jnp.full(SEEDS, 5)))
    by_mss = run_one_step(np.tile(flat_V, (5, 1)).astype(np.float32), flat_V, rule="iid").token_BA[:, 0]
    for token_n in (by_naive[:n], by_mss[:n]):
        counts = np.bincount(token_n, minlength=3)
        assert len(counts) == 3 and counts.min() > 60
