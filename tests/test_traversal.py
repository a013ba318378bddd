"""benchmarks/traversal.py: both laws against vectors worked out elsewhere, by hand, and by exhaustive enumeration."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import write_file

from benchmarks import traversal
from benchmarks.traversal import (
    HOW,
    LAWS,
    Draws,
    ModelTable,
    Node,
    Table,
    all_trees,
    emitted,
    expansion,
    figures,
    main,
    mss_law,
    one_hot,
    random_tables,
    ratio_interval,
    sample_tree,
    settings,
    traversal_law,
    without,
)
from specinfer_jax.opened import open_model

P, QA, QB = np.array([0.35, 0.3, 0.2, 0.15]), np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.3, 0.1, 0.2, 0.4])
Pair = list[tuple[int, np.ndarray]]


def pairs(how: str) -> Iterator[tuple[float, Pair]]:
    """Two children of one node: probability, and (token, q it was drawn from)."""
    for a, b in itertools.product(range(4), repeat=2):
        first, second = {"i.i.d.": (QA, QA), "distinct": (QA, without(QA, [a])), "two SSMs": (QA, QB)}[how]
        if second[b] > 0:
            yield first[a] * second[b], [(a, first), (b, second)]


def with_rows(drawn: Pair, *rows: np.ndarray) -> Pair:
    return [(token, row) for (token, _), row in zip(drawn, rows, strict=True)]


def by_draft(drawn: Pair) -> Pair:
    (a, _), (b, _) = sorted(drawn, key=lambda draw: -QA[draw[0]])
    return [(a, QA), (b, without(QA, [a]))]


def renormalised(drawn: Pair) -> Pair:
    (a, _), (b, _) = drawn
    # A second copy of a rejected a has no q any more. The rule rejects it and takes the residual, as it would for the
    # other one of 2 and 3, which the target owes nothing either once one of them is rejected.
    return [(a, QA), (5 - a if a == b and a > 1 else (a + 1) % 4 if a == b else b, without(QA, [a]))]


# cases B009, B010, B011, B013; wrong rules that come down to wrong draws or a wrong q, with what they emit
VECTORS: dict[str, tuple[str, Callable[[Pair], Pair], list[float]]] = {
    "q kept": ("i.i.d.", list, [0.35, 0.3, 0.2, 0.15]),
    "q renormalised": ("distinct", list, [0.35, 0.3, 0.2, 0.15]),
    "without replacement, q kept": ("distinct", lambda d: with_rows(d, QA, QA), [0.3158, 0.3342, 0.2, 0.15]),
    "with replacement, q renormalised": ("i.i.d.", renormalised, [0.3871, 0.2629, 0.2, 0.15]),
    "second copy skipped": ("i.i.d.", lambda d: d[: len({x for x, _ in d})], [0.3288, 0.3212, 0.2, 0.15]),
    "sorted by target": ("i.i.d.", lambda d: sorted(d, key=lambda draw: -P[draw[0]]), [0.3743, 0.3457, 0.22, 0.06]),
    "sorted by draft": ("distinct", by_draft, [0.3478, 0.2258, 0.1579, 0.2685]),
    "two SSMs": ("two SSMs", list, [0.35, 0.3, 0.2, 0.15]),
    "two SSMs, duplicates skipped": ("two SSMs", lambda d: d[: len({x for x, _ in d})], [0.3529, 0.2971, 0.2, 0.15]),
    "two SSMs, mean q": ("two SSMs", lambda d: with_rows(d, QA, (QA + QB) / 2), [0.3712, 0.2788, 0.2, 0.15]),
    "two SSMs, A's q for both": ("two SSMs", lambda d: with_rows(d, QA, QA), [0.3893, 0.2607, 0.2, 0.15]),
}  # fmt: skip


def first_token(law: Callable, trees: list[tuple[float, Draws]], p_V: np.ndarray) -> np.ndarray:
    return emitted(law, trees, lambda node: p_V, 1)[0].sum(axis=1)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("law", LAWS)  # at depth 1 the two are one rule
def test_two_children(law: str, name: str) -> None:
    how, alter, expected = VECTORS[name]
    trees: list[tuple[float, Draws]] = [(probability, {(): alter(drawn)}) for probability, drawn in pairs(how)]
    np.testing.assert_allclose(first_token(LAWS[law], trees, P), expected, atol=5.1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_children_without_randomness(law: str) -> None:  # case B010
    top = [(3, one_hot(QA)), (2, np.eye(4)[2])]
    np.testing.assert_allclose(first_token(LAWS[law], [(1.0, {(): top})], P), P, atol=1e-15)
    soft = [(3, QA), (2, QA)]
    np.testing.assert_allclose(first_token(LAWS[law], [(1.0, {(): soft})], P), [0.5485, 0.0765, 0, 0.375], atol=5.1e-5)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    np.testing.assert_allclose(first_token(LAWS[law], [(1.0, {(): [(2, q)]})], p), [0.6, 0, 0.4], atol=1e-15)


WRONG: dict[str, Callable[[Pair], Pair]] = {
    "sorted by q": lambda drawn: sorted(drawn, key=lambda draw: -draw[1][draw[0]]),
    "q kept": lambda drawn: [(token, drawn[0][1]) for token, _ in drawn],
    "dropped for its token": lambda drawn: [draw for draw in drawn if draw[0] != 1],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("law", LAWS)
def test_enumeration_sees_what_is_not_exact(law: str, wrong: str) -> None:
    p, q = random_tables(np.random.default_rng(1), 3, spread=1.0, noise=(1.0,))
    right, _ = emitted(mss_law, [(1.0, {})], p, 2)
    drawn_trees = list(all_trees(expansion((2, 2), q, "distinct"), 2))
    trees = [
        (share, {node: WRONG[wrong](list(drawn)) for node, drawn in draws.items()}) for share, draws in drawn_trees
    ]
    assert abs(emitted(LAWS[law], trees, p, 2)[0] - right).sum() / 2 > 1e-3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("law", LAWS)
def test_exact_where_tokens_have_no_probability(law: str, how: str) -> None:  # case B009: filters of p and q differ
    rows = iter([[0.6, 0.4, 0, 0], [0, 0.5, 0.25, 0.25], [0, 0, 0, 1.0], [0.1, 0, 0.9, 0], [0.25, 0.25, 0.25, 0.25]])
    p_rows = {(): np.array(next(rows)), **{(x,): np.array(next(rows)) for x in range(4)}}
    q_rows = {(): [0, 0.2, 0.5, 0.3], (1,): [1.0, 0, 0, 0], (2,): [0, 0, 0, 1.0], (3,): [0.5, 0.5, 0, 0]}
    uniform: Table = lambda node: p_rows.get(node, np.full(4, 0.25))  # noqa: E731
    trees = list(all_trees(expansion((3, 2), lambda node: np.array(q_rows[node]), how), 2))
    assert sum(share for share, _ in trees) == pytest.approx(1)
    right, _ = emitted(mss_law, [(1.0, {})], uniform, 2)
    np.testing.assert_allclose(emitted(LAWS[law], trees, uniform, 2)[0], right, atol=1e-14)


def test_a_chain_of_two_by_hand() -> None:
    rows = {(): [0.5, 0.5], (0,): [2 / 3, 1 / 3], (0, 0): [0.25, 0.75]}
    draws: Draws = {(): [(0, np.array([1.0, 0.0]))], (0,): [(0, np.array([0.5, 0.5]))]}
    target: Table = lambda node: np.array(rows[node])  # noqa: E731
    # MSS: 1/2 accepts the first token, 4/3 the second. The path's weight is 2/3; what it leaves is all owed to token 1.
    mss = {path: share for path, share, *_ in mss_law(draws, target)}
    assert mss == pytest.approx({(0, 0): 0.5, (): 0.5})
    (path, share, next_V, rejected), (root, other, root_V, root_rejected) = traversal_law(draws, target)
    assert (path, share, rejected) == ((0, 0), pytest.approx(2 / 3), 0)
    assert (root, other, root_rejected) == ((), pytest.approx(1 / 3), 2)
    np.testing.assert_allclose([next_V, root_V], [[0.25, 0.75], [0, 1]], atol=1e-15)
    assert figures(draws, target) == pytest.approx([2, 7 / 3, 0.5, 2 / 3])


def block_verification(draws: Draws, target: Table) -> dict[Node, tuple[float, np.ndarray]]:
    """Of a chain, as arXiv 2403.10444 has it: every prefix passes a test of its own, the longest one counts."""
    weights = [1.0]
    nodes: list[Node] = [()]
    while nodes[-1] in draws:
        ((token, q_V),) = draws[nodes[-1]]
        weights.append(min(weights[-1] * target(nodes[-1])[token] / q_V[token], 1.0))
        nodes.append((*nodes[-1], token))
    found, longer = {nodes[-1]: (weights[-1], target(nodes[-1]))}, 1 - weights[-1]
    for weight, node in list(zip(weights, nodes, strict=True))[-2::-1]:
        owed_V = np.maximum(weight * target(node) - draws[node][0][1], 0)
        passes = owed_V.sum() / (owed_V.sum() + (1 - weight))
        found[node] = (longer * passes, owed_V / (owed_V.sum() or 1.0))
        longer *= 1 - passes
    return found


def test_a_chain_is_block_verification() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = random_tables(rng, 6, spread=1.0, noise=(1.0,))
        draws = sample_tree(expansion((1,) * 5, q, "i.i.d."), 5, rng)
        expected = block_verification(draws, p)
        for path, share, next_V, _ in traversal_law(draws, p):
            other, other_V = expected.pop(path)
            assert share == pytest.approx(other, abs=1e-14)
            np.testing.assert_allclose(next_V, other_V, atol=1e-12)
        assert all(share < 1e-14 for share, _ in expected.values())


def test_nothing_to_gain_without_randomness() -> None:
    rng = np.random.default_rng(0)
    p, q = random_tables(rng, 8, spread=2.0, noise=(1.0,))
    draws = sample_tree(expansion((3, 2, 1), q, "top-k"), 3, rng)
    nodes = [(*node, token) for node, drawn in draws.items() for token, _ in drawn]
    assert len(nodes) == 15
    # Every node can at most be accepted with its own probability, and both laws reach that.
    best = 1 + sum(np.prod([p(node[:i])[node[i]] for i in range(len(node))]) for node in nodes)
    assert figures(draws, p)[:2] == pytest.approx([best, best])


def test_ends_of_a_large_tree_sum_to_one() -> None:
    rng = np.random.default_rng(0)
    p, q = random_tables(rng, 50, spread=2.0, noise=(1.0,))
    draws = sample_tree(expansion((2, 2, 3, 1), q, "i.i.d."), 4, rng)
    for law in LAWS.values():
        ends = list(law(draws, p))
        assert sum(share for _, share, *_ in ends) == pytest.approx(1)
        assert all(next_V.sum() == pytest.approx(1) and next_V.min() >= 0 for *_, next_V, _ in ends)


def test_interval() -> None:
    x = np.random.default_rng(0).normal(1, 0.1, size=400)
    mean, half = ratio_interval(x, np.ones(400), np.arange(400))
    assert (mean, half) == (pytest.approx(x.mean()), pytest.approx(1.966 * x.std(ddof=1) / 20, rel=1e-3))  # t(399)
    # Copies of the same values in the same groups tell nothing new.
    assert ratio_interval(np.tile(x, 3), np.ones(1200), np.tile(np.arange(400), 3)) == pytest.approx((mean, half))
    assert ratio_interval(2 * x, x, np.arange(400)) == pytest.approx((2, 0))


def test_the_model_behind_a_path_is_the_model(tmp_path: Path) -> None:
    model = open_model(str(write_file(tmp_path / "tiny.gguf")), dtype=jnp.dtype(jnp.float32))
    ids = [5, 9, 17, 4, 33, 21, 8, 60, 11]
    walked, fed = (ModelTable(model, rows=4, max_model_len=32) for _ in range(2))
    walked.extend(ids[:5])
    walked((1, 2, 3))  # a path that is not committed leaves nothing behind
    walked.extend(ids[5:6])
    fed.extend(ids)
    np.testing.assert_allclose(walked(tuple(ids[6:])), fed(()), rtol=1e-4)
    assert np.abs(walked(()) - fed(())).max() > 1e-5


def test_every_allowed_way_of_drawing_is_exact(capsys: pytest.CaptureFixture[str]) -> None:  # cases B011, B013
    assert main(["--tables", "1", "--trees", "1"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in settings(lambda node: QA, lambda node: QB))
    assert out.count("noise") == 48


def test_a_law_that_is_not_exact_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def correction_from_p(draws: Draws, target: Table) -> Iterator[tuple]:
        yield from ((path, share, target(path), rejected) for path, share, _, rejected in mss_law(draws, target))

    monkeypatch.setattr(traversal, "TREES", ())
    monkeypatch.setattr(traversal, "settings", lambda qa, qb: {"chain": (1, expansion((1,), qa, "i.i.d."))})
    assert main(["--tables", "1"]) == 0
    monkeypatch.setattr(traversal, "LAWS", {"MSS": mss_law, "traversal": correction_from_p})
    assert main(["--tables", "1"]) == 1


def test_a_model_and_its_first_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab ab"}\n{"prompt": "x"}\n')
    files = ["--model", str(write_file(tmp_path / "tiny.gguf")), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert main([*files, "--max-tokens", "2", "--every", "1", "--repeats", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[-len(HOW) :]
    assert [how in row for how, row in zip(HOW, rows, strict=True)] == [True] * len(HOW)
    with pytest.raises(SystemExit, match="2"):
        main(files[:2])
