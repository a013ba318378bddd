"""The paper's tables: rules, pooling and intervals, Markdown, and a run on a model that drafts for itself."""

import dataclasses
import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model

from benchmarks import paper, paper_tables
from benchmarks.paper_counted import Steps, answer_all, count_steps
from benchmarks.paper_draws import Places, draw_ranks, draw_ranks_of
from benchmarks.paper_plots import plot_cdf, plot_widths
from benchmarks.paper_tables import (
    Measuring,
    Rule,
    Success,
    cell,
    pooled,
    rules_of_ssm_counts,
    rules_of_table_2,
    with_pool,
)
from benchmarks.traversal import mss_law
from specinfer_jax.errors import ConfigError
from specinfer_jax.metrics import RequestStats
from specinfer_jax.opened import Model, open_model
from specinfer_jax.speculation.rules import exact_pair
from specinfer_jax.tree.expand import parse_expansion


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_model.write_folder(tmp_path_factory.mktemp("model"))
    return open_model(folder, dtype=jnp.dtype(jnp.float32))


def stats(tokens: int, steps: int) -> RequestStats:
    return RequestStats(tokens, steps, {1: steps}, [], [], {}, {}, 0.0, 1.0)


def test_rules_are_the_papers() -> None:
    widths = rules_of_table_2(1.0)
    assert [rule.tree for rule in widths[:5]] == [f"1,1,{k},1,1,1,1,1" for k in (1, 2, 3, 4, 5)]
    assert {rule.temperature for rule in widths[:5]} == {0.0}
    assert {rule.temperature for rule in widths[5:]} == {1.0}
    assert [paper_tables.is_counted(rule) for rule in widths] == [True] * 15
    for rule in paper_tables.rules_of_table_3("1,3", 1.0):
        assert exact_pair(rule.children, rule.verification) == (rule.children, rule.verification)
    counts = rules_of_ssm_counts(3, 1.0)
    assert [rule.ssms for rule in counts] == [1, 2, 3, 1, 2, 3]
    assert [paper_tables.is_counted(rule) for rule in counts] == [True] * 4 + [False] * 2
    assert {parse_expansion(rule.tree).num_nodes * rule.ssms for rule in counts} == {12}


def test_prompts_by_set_and_by_category(tmp_path: Path) -> None:
    lines = [f'{{"prompt": "{text}", "category": "{text[0]}"}}' for text in ("a1", "b1", "a2", "a3")]
    (tmp_path / "mixed.jsonl").write_text("\n".join(lines))
    assert paper.read_sets(tmp_path, ["mixed"], limit=3, by_category=False) == {"mixed": ["a1", "b1", "a2"]}
    by_category = paper.read_sets(tmp_path, ["mixed"], limit=2, by_category=True)
    assert by_category == {"mixed: a": ["a1", "a2"], "mixed: b": ["b1"]}


def test_a_pool_weighs_by_steps() -> None:
    cells = [cell("r", "a", [stats(30, 10), stats(10, 10)]), cell("r", "b", [stats(8, 2)])]
    assert [c.value for c in cells] == [2.0, 4.0]
    assert (cells[0].low, cells[0].high) == (1.0, 3.0)  # both prompts twice the one or the other
    assert cells[1].low == cells[1].high == 4.0
    *_, pool = with_pool(cells)
    assert (pool.prompt_set, pool.value, pool.tokens) == ("all", 48 / 22, (30, 10, 8))
    assert pooled([5], [2]) == (2.5, 2.5, 2.5)


def test_tables_are_markdown() -> None:
    text = paper.table_of_cells([cell("r", "alpaca", [stats(30, 10)]), cell("r", "all", [stats(30, 10)])])
    assert text.splitlines() == [
        "| tokens per step | Alpaca | all |",
        "|---|---|---|",
        "| r | 3.00 [3.00, 3.00] | 3.00 [3.00, 3.00] |",
    ]
    text = paper.table_of_success([Success("cip_proxy", "greedy", 1234, (0.5, 0.625))])
    assert text.splitlines()[2] == "| greedy CIP (stand-in) | 1,234 | 50 | 62 |"


def test_a_model_foresees_itself(model: Model) -> None:
    prompts = {"alpaca": [[3, 4, 5], [6, 7]]}
    measuring = Measuring(model, prompts, max_tokens=9, max_num_seqs=2, max_model_len=32)
    lines: list[object] = []
    found = paper_tables.top_k_success(measuring, model, temperature=1.0, report=lines.append)
    assert [entry.decoding for entry in found] == ["greedy", "stochastic"]
    assert found[0].top_k == (1.0,) * 5
    assert found[1].top_k[0] < 1
    assert found == lines
    for decodes in (False, True):
        [own] = paper_tables.tokens_per_step(
            measuring, [model], [Rule("greedy", "1,1", 0.0)], report=lines.append, decodes=decodes
        )  # fmt: skip
        assert (own.tokens, own.steps) == ((9, 9), (3, 3))  # two nodes and the bonus token in every step


def test_counted_steps_are_those_of_decoding(model: Model, tmp_path: Path) -> None:
    prompts = {"alpaca": [[3 + i, 5, 9 + i] for i in range(6)]}
    measuring = Measuring(model, prompts, max_tokens=12, max_num_seqs=3, max_model_len=32, folder=tmp_path)
    ssms = [model.first_layers(1), model.first_layers(1).with_reduced_head(range(0, model.config.vocab_size, 2))]
    rules = [
        Rule(f"{t}, {count}", tree, t, "top_k", "naive", ssms=count)
        for t in (0.0, 0.7) for tree, count in (("2,2", 1), ("3,1,1", 2))
    ]  # fmt: skip
    counted, decoded = (
        paper_tables.tokens_per_step(measuring, ssms, rules, report=lambda cell: None, decodes=decodes)
        for decodes in (False, True)
    )
    assert counted == decoded
    assert any(sum(c.tokens) > sum(c.steps) for c in counted)
    # A second run takes the answers from the folder.
    again = dataclasses.replace(measuring, model=model._replace(params={}))
    assert again.answers("alpaca", 0.7) == measuring.answers("alpaca", 0.7)


def test_draws_have_the_law_of_mss() -> None:
    p_V, q_V = np.array([0.15, 0.05, 0.2, 0.3, 0.3]), np.array([0.4, 0.3, 0.2, 0.1, 0.0])  # id 4 is none of the SSM's
    V, k, samples = 5, 3, 40_000
    expected_Vj = np.zeros((V, k + 1))
    for order in itertools.permutations(range(4), k):
        left_V, draws, chance = q_V, [], 1.0
        for token in order:
            left_V = left_V / left_V.sum()
            draws.append((token, left_V))
            chance *= left_V[token]
            left_V = np.where(np.arange(V) == token, 0, left_V)
        for path, reach, bonus_V, rejected in mss_law({(): draws}, lambda node: p_V if not node else np.ones(V) / V):
            if path:
                expected_Vj[path[0], rejected] += chance * reach
            else:
                expected_Vj[:, k] += chance * reach * bonus_V
    np.testing.assert_allclose(expected_Vj.sum(axis=1), p_V, atol=1e-12)
    token_N = np.random.default_rng(1).choice(V, size=samples, p=p_V)
    tile = np.ones((samples, 1))
    places = Places(p_V[None, :4] * tile, q_V[None, :4] * tile, p_V[token_N], token_N)
    rank_N = draw_ranks(places, draws=k, rng=np.random.default_rng(2))
    found_Vj = np.array([[np.mean((token_N == v) & (rank_N == j)) for j in range(k + 1)] for v in range(V)])
    np.testing.assert_allclose(found_Vj, expected_Vj, atol=4 * 0.5 / samples**0.5)
    assert (expected_Vj[:4, :k] > 0.01).sum() >= 6  # the law has something to say


def test_draws_of_the_llm_itself_are_accepted(model: Model) -> None:
    measuring = Measuring(model, {"alpaca": [[3, 4], [9]]}, max_tokens=5, max_num_seqs=2, max_model_len=16)
    answers = measuring.answers("alpaca", 0.0)
    ssms = [model, model.with_reduced_head([a for answer in answers for a in dict.fromkeys(answer.response_ids)][:3])]
    same, reduced = (
        draw_ranks_of(model, ssm, answers, temperature=1e-3, max_model_len=16, draws=2)  # as good as greedy
        for ssm in ssms
    )
    assert [rank_N.tolist() for rank_N in same] == [[0] * 5] * 2
    assert 0 < np.mean(np.concatenate(reduced) == 0) < 1  # what the head lacks is never drawn


def test_counted_draws_are_those_of_decoding(model: Model) -> None:
    prompts = {"alpaca": [[3 + i % 40, 5, 9 + i % 7] for i in range(160)]}
    measuring = Measuring(model, prompts, max_tokens=12, max_num_seqs=8, max_model_len=32)
    rules = [Rule("MSS", "2,1", 1.0)]
    [counted], [decoded] = (
        paper_tables.tokens_per_step(measuring, [model.first_layers(1)], rules, report=lambda cell: None, decodes=d)
        for d in (False, True)
    )
    assert max(counted.low, decoded.low) < min(counted.high, decoded.high)
    assert counted.value > 1.1


def test_steps_along_ranks() -> None:
    shape = parse_expansion("2,1")
    assert count_steps([np.array([0, 0, 5])], [shape]) == Steps(3, 1)
    assert count_steps([np.array([1, 0, 0, 1, 1])], [shape]) == Steps(5, 2)  # the last step's second node has rank 1
    assert count_steps([np.array([2, 2, 2])], [shape]) == Steps(3, 3)
    assert count_steps([np.array([2, 2, 2]), np.array([0, 2, 0])], [shape, parse_expansion("1")]) == Steps(3, 2)


def test_figures_are_drawn(tmp_path: Path) -> None:
    cells = with_pool(
        [cell(rule.name, name, [stats(20 + i, 10), stats(31, 10)])
         for i, rule in enumerate(rules_of_table_2(1.0)) for name in ("alpaca", "piqa")]
    )  # fmt: skip
    for draw, name in ((plot_cdf, "cdf.png"), (plot_widths, "widths.png")):
        draw(cells, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "4"], "--table takes some of 1, 2, 3, wide, ssms, got 4"),
        ([], "got none"),
        (["--figure", "9"], "needs --out"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paper.main([*arguments, "--data", "folder"])
    assert message in capsys.readouterr().err


def test_a_prompt_without_room_is_named_before_any_work(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"prompt 1 of some has 7 tokens, .* give at least 15"):
        answer_all(
            model, [[3] * 5, [3] * 7], name="some", temperature=0.0, max_tokens=8, max_num_seqs=2, max_model_len=14
        )  # fmt: skip
