"""Laws known to four digits, of the right rules and of known mistakes, so that a failure here names the mistake.

Right rules run in the package, wrong ones in the oracle. Vectors: one node, p and q over four tokens, two children.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Proposal, emitted_law
from exact_law import (
    Rules,
    TableModel,
    distance,
    emitted,
    filtered,
    independent,
    kept,
    likeliest,
    mss,
    one_after_the_other,
    renormalised,
)
from table_slots import sampling_of

from specinfer_jax.speculation.children import drawn_children

P = np.array([0.35, 0.3, 0.2, 0.15])
Q = np.array([0.1, 0.2, 0.3, 0.4])
OTHER_Q = np.array([0.3, 0.1, 0.2, 0.4])
CHAIN_P, CHAIN_Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])


def check_printed(law: np.ndarray, printed: str) -> None:
    expected = [float(number) for number in printed.split()]
    np.testing.assert_allclose(law[: len(expected)], expected, atol=5.1e-5)
    assert law.sum() == pytest.approx(1, abs=1e-6)


def package(proposals: list[Proposal], *, p: np.ndarray = P, renormalize: bool = False, rules: Rules = Rules()):  # noqa: B008
    """The emitted token's law, in the package."""
    logits_V = np.log(np.pad(p, (0, 4 - len(p))), where=np.arange(4) < len(p), out=np.full(4, -np.inf))
    model = TableModel(logits_V[None].astype(np.float32), rules)
    return emitted_law(model, proposals, length=1, renormalize=renormalize)


SILENT = Proposal((), np.zeros((1, 4)), likeliest)


def told(q: np.ndarray, k: int, draw) -> Proposal:
    return Proposal((k,), np.pad(q, (0, 4 - len(q)))[None], draw)


# The second SSM of these drafts has room for three candidates only, which both q exceed.
TWO_SSMS = [told(Q, 1, independent), SILENT, told(OTHER_Q, 1, independent)]


@pytest.mark.parametrize(
    ("proposals", "renormalize"),
    [
        ([told(Q, 2, independent)], False),
        ([told(Q, 2, one_after_the_other)], True),
        ([Proposal((2,), Q[None], likeliest, told=False)], False),
        ([Proposal((2,), Q[None], likeliest, told=False)], True),
        ([told(Q, 3, independent)], False),
        ([told(Q, 3, one_after_the_other)], True),
        (TWO_SSMS, False),
        (TWO_SSMS, True),
    ],
    ids=["2 iid", "2 distinct", "top-2", "top-2, renormalised", "3 iid", "3 distinct", "SSMs", "SSMs, renormalised"],
)  # fmt: skip
def test_right_rules(proposals, renormalize) -> None:
    # cases B010, B011, B013
    check_printed(package(proposals, renormalize=renormalize), ".35 .3 .2 .15")


def skipped(tokens: tuple[int, ...]) -> list[int]:
    """Without second copies."""
    return list(dict.fromkeys(tokens))


def by(values: np.ndarray):
    """Sorted by a value of the token, highest first."""
    return lambda tokens: sorted(tokens, key=lambda token: -values[token])


TWO, DISTINCT, TOP = (list(draw(Q, 2)) for draw in (independent, one_after_the_other, likeliest))
WRONG = {
    "without replacement, q kept": (
        DISTINCT, lambda t: mss(P, kept(Q, t)), ".3158 .3342 .2 .15", 0.034),
    "with replacement, q renormalised": (
        TWO, lambda t: mss(P, renormalised(Q, t)), ".3871 .2629 .2 .15", 0.037),
    "second copy of a rejected token skipped": (
        TWO, lambda t: mss(P, kept(Q, skipped(t))), ".3288 .3212 .2 .15", 0.021),
    "correction drawn from p": (
        TWO, lambda t: mss(P, kept(Q, t), correction="p"), ".2207 .3435 .249 .1867", 0.129),
    "p not reduced between siblings": (
        TWO, lambda t: mss(P, kept(Q, t), reduced=False), ".2225 .305 .27 .2025", 0.128),
    "tried in order of target probability": (
        TWO, lambda t: mss(P, kept(Q, by(P)(t))), ".3743 .3457 .22 .06", 0.090),
    "re-sorted by draft probability": (
        DISTINCT, lambda t: mss(P, renormalised(Q, by(Q)(t))), ".3478 .2258 .1579 .2685", 0.119),
    "top-2 with soft q": (
        TOP, lambda t: mss(P, kept(Q, t)), ".5485 .0765 0 .375", 0.424),
}  # fmt: skip


@pytest.mark.parametrize(("outcomes", "rule", "printed", "error"), WRONG.values(), ids=WRONG)
def test_wrong_rules_between_siblings(outcomes, rule, printed, error) -> None:
    # case B011
    law = emitted(outcomes, rule)
    check_printed(law, printed)
    assert distance(law, P) == pytest.approx(error, abs=6e-4)


@pytest.mark.parametrize(
    ("draw", "renormalize", "wrong"),
    [
        (one_after_the_other, False, "without replacement, q kept"),
        (independent, True, "with replacement, q renormalised"),
        (likeliest, False, "top-2 with soft q"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_the_package_under_the_wrong_rule_gives_the_known_error(draw, renormalize, wrong) -> None:
    """So what `exact_pair` refuses is what these vectors name."""
    check_printed(package([told(Q, 2, draw)], renormalize=renormalize), WRONG[wrong][2])


def pairs() -> list[tuple[float, tuple[int, int]]]:
    return [(float(Q[a] * OTHER_Q[b]), (a, b)) for a in range(4) for b in range(4)]


def duplicate_skipped(t: tuple[int, int]) -> np.ndarray:
    return mss(P, [(t[0], Q)] if t[0] == t[1] else [(t[0], Q), (t[1], OTHER_Q)])


MEAN = (Q + OTHER_Q) / 2
TWO_SSMS_WRONG = {
    "duplicate skipped": (duplicate_skipped, ".3529 .2971 .2 .15"),
    "mean q for the second": (lambda t: mss(P, [(t[0], Q), (t[1], MEAN)]), ".3712 .2788 .2 .15"),
    "mean q for both": (lambda t: mss(P, [(t[0], MEAN), (t[1], MEAN)]), ".2788 .3312 .24 .15"),
    "q of the first for both": (lambda t: mss(P, [(t[0], Q), (t[1], Q)]), ".3893 .2607 .2 .15"),
}


@pytest.mark.parametrize(("rule", "printed"), TWO_SSMS_WRONG.values(), ids=TWO_SSMS_WRONG)
def test_wrong_rules_for_two_ssms(rule, printed) -> None:
    # case B013
    law = emitted(pairs(), rule)
    check_printed(law, printed)
    assert distance(law, P) > 0.0025


def test_chain() -> None:
    first = list(independent(CHAIN_Q, 1))
    argmax = list(likeliest(CHAIN_Q, 1))
    for draw in (independent, one_after_the_other):
        for renormalize in (False, True):  # one draw: the rules are the same
            check_printed(package([told(CHAIN_Q, 1, draw)], p=CHAIN_P, renormalize=renormalize), ".5 .3 .2")
    check_printed(emitted(argmax, lambda t: mss(CHAIN_P, kept(CHAIN_Q, t))), ".6 0 .4")
    check_printed(package([told(CHAIN_Q, 1, likeliest)], p=CHAIN_P), ".6 0 .4")
    check_printed(emitted(first, lambda t: mss(CHAIN_P, kept(CHAIN_Q, t), correction="p")), ".35 .39 .26")
    check_printed(emitted(first, lambda t: mss(CHAIN_P, kept(CHAIN_Q, t), correction="swapped")), ".2 .3 .5")


B009_P, B009_Q = np.array([0.1, 0.4, 0.3, 0.2]), np.array([0.4, 0.3, 0.2, 0.1])


def drawn_from(rules: Rules, q: np.ndarray = B009_Q) -> np.ndarray:
    """float64 `[V]`: what the package says that it drew the children from."""
    logits_V1 = jnp.log(jnp.asarray(q, jnp.float32))[:, None]
    children = drawn_children(logits_V1, sampling_of([rules], 4), jax.random.key(0)[None], k=1, rule="iid")
    q_V = np.zeros(4)
    q_V[np.asarray(children.drawn_from.id_BEC)[0, 0]] = np.asarray(children.drawn_from.prob_BEC)[0, 0]
    return q_V


def test_filtered_draft_is_verified_with_its_filtered_q() -> None:
    # case B009
    rules = Rules(top_k=2)
    q_V = drawn_from(rules)
    np.testing.assert_allclose(q_V, [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    check_printed(package([told(q_V, 1, independent)], p=B009_P, rules=rules), "0 .5714 .4286 0")
    target_V = filtered(np.log(B009_P), rules)
    wrong = emitted(independent(q_V, 1), lambda t: mss(target_V, kept(B009_Q, t)))
    check_printed(wrong, "0 .7388 .2612 0")


FILTERS = {
    "plain": Rules(),
    "temperature": Rules(temperature=0.5),
    "top-k": Rules(top_k=3),
    "top-p": Rules(top_p=0.65),
    "min-p": Rules(min_p=0.6),
    "all": Rules(1.5, 3, 0.8, 0.2),
}


@pytest.mark.parametrize("rules", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("of_draft", ["plain", "temperature", "top-p", "all"])
def test_filters_of_draft_and_target_may_differ(rules, of_draft) -> None:
    # case B009
    draft_rules = FILTERS[of_draft]
    q_V = drawn_from(draft_rules)
    np.testing.assert_allclose(q_V, filtered(np.log(B009_Q), draft_rules), atol=1e-6)
    for draw, renormalize in ((independent, False), (one_after_the_other, True)):
        law = package([told(q_V, 2, draw)], p=B009_P, rules=rules, renormalize=renormalize)
        assert distance(law, filtered(np.log(B009_P), rules)) < 1e-6
