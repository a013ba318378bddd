"""Logits without a law, trees that are none, ids that do not exist: every walk ends, and says so."""

import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import BATCH, proposed
from exact_law import Rules, TableModel
from table_slots import PATH_LEN, greedy, merged_with_target, naive, prepare, walk

from specinfer_jax.speculation.verifier import Verdict
from specinfer_jax.tree.token_tree import TokenTree

V = 4
PATHS = 1 + V + V**2 + V**3
HANDS, ROWS = 8, 4
"""Slots and rows of trees written by hand; more of both are padding."""


def walks_by_hand(
    parents: list[list[int]], logits_BNV: np.ndarray, rules: Rules, *, token: int = 1
) -> dict[str, Verdict]:
    """Trees written by hand; every row is a child that holds `token`, chosen without randomness.

    A parent of 4 or more is out of range. Uniform numbers accept whatever can be accepted.
    """
    model = TableModel(np.zeros((PATHS, V), np.float32), rules, prompt=(0,))
    prepared = prepare(model, BATCH)
    merged, target = merged_with_target(proposed(), prepared)
    N, R = merged.tree.num_rows, merged.draws.parent_BR.shape[1]
    parent_BN = np.full((BATCH, N), N, np.int32)
    parent_BN[: len(parents), :ROWS] = np.array(parents)
    parent_BN[parent_BN >= ROWS] += N
    written_BN = np.tile(np.arange(N) < ROWS, (BATCH, 1))
    tree = TokenTree(np.full((BATCH, N), token, np.int32), parent_BN, written_BN.astype(np.int32), written_BN)
    draw_row_R = np.minimum(np.arange(R), N - 1).astype(np.int32)
    draws = merged.draws._replace(
        parent_BR=np.where(np.arange(R) < ROWS, parent_BN[:, draw_row_R], N).astype(np.int32),
        child_BR=np.tile(draw_row_R, (BATCH, 1)),
        is_random_BR=np.zeros((BATCH, R), bool),
    )
    full_BNV = np.zeros((BATCH, N, V), np.float32)
    full_BNV[:HANDS, :ROWS] = logits_BNV
    target = target._replace(logits_VT=jnp.asarray(full_BNV.reshape(-1, V).T))
    failed_BN = ~np.isfinite(full_BNV).any(axis=2) | np.isnan(full_BNV).any(axis=2)
    argmax_BN = np.argmax(full_BNV, axis=2).astype(np.int32)
    zeros_BR = np.zeros((BATCH, R), np.float32)
    verdicts = {
        "greedy": greedy(tree, argmax_BN, path_len=PATH_LEN, failed_BN=failed_BN),
        "naive": naive(tree, target, prepared.history, jnp.full(BATCH, 9), path_len=PATH_LEN),
        "mss": walk(
            merged._replace(tree=tree, draws=draws), target, prepared.history, zeros_BR, renormalize=True
        ).verdict,
    }
    return {name: Verdict(*(np.asarray(x)[:HANDS] for x in verdict)) for name, verdict in verdicts.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_law_end_the_path_and_raise_the_flag(temperature) -> None:
    # case B097: rows 0 - 1 - 2 - 3 are a chain of likely tokens, one of them broken in every slot but the last
    B, N = HANDS, ROWS
    logits_BNV = np.full((B, N, V), -30, np.float32)
    logits_BNV[:, :, 1] = 9
    broken = [0, 1, 2, 3, 0, 1, 3]
    for b, row in enumerate(broken):
        if b < 4:
            logits_BNV[b, row, 2] = np.nan
        else:
            logits_BNV[b, row] = -np.inf
    verdicts = walks_by_hand([[N, 0, 1, 2]] * B, logits_BNV, Rules(temperature))
    for name, verdict in verdicts.items():
        if name == "greedy" and temperature:
            continue
        assert verdict.failed_B.tolist() == [True] * 7 + [False], name
        assert verdict.accepted_B.tolist() == [*broken, 3], name
        for b, accepted in enumerate(verdict.accepted_B):
            assert verdict.path_BA[b, : accepted + 1].tolist() == list(range(accepted + 1)), name
            assert (verdict.path_BA[b, accepted + 1 :] > N).all(), name
            assert verdict.token_BA[b, :accepted].tolist() == [1] * accepted, name


def test_malformed_trees_end_after_the_longest_path() -> None:
    # case B097: parents in a circle, a row that is its own parent, a root with a parent
    parents = [[4, 0, 1, 2], [2, 0, 1, 2], [0, 0, 0, 0], [1, 0, 3, 2], [4, 1, 2, 3], [3, 2, 1, 0], [9, 9, 9, 9]]
    logits_BNV = np.zeros((HANDS, ROWS, V), np.float32)
    logits_BNV[:, :, 1] = 40
    for temperature in (0.0, 1.0):
        for verdict in walks_by_hand(parents, logits_BNV, Rules(temperature)).values():
            assert verdict.accepted_B.tolist() == [3, 3, 3, 3, 0, 3, 0, 0]
            assert verdict.path_BA.shape == (HANDS, PATH_LEN) and not verdict.failed_B.any()


def test_nothing_may_follow() -> None:
    # case B092: behind the first 1 every id is banned; the flag says so
    rules = Rules(1.0, bad=tuple((1, token) for token in range(V)))
    logits_BNV = np.zeros((HANDS, ROWS, V), np.float32)
    logits_BNV[:, :, 1] = 40
    for name, verdict in walks_by_hand([[4, 0, 1, 2]], logits_BNV, rules).items():
        if name != "greedy":  # which is told of broken logits alone
            assert verdict.failed_B[0] and verdict.accepted_B[0] == 1, name


def test_ids_beyond_the_vocabulary_are_never_accepted() -> None:
    # case B031: an SSM with a larger padded vocabulary; the last real id is likely
    logits_BNV = np.zeros((HANDS, ROWS, V), np.float32)
    logits_BNV[:, :, V - 1] = 20
    for token in (V, V + 7, 2**31 - 1):
        for name, verdict in walks_by_hand([[4, 0, 1, 2]], logits_BNV, Rules(), token=token).items():
            assert not verdict.accepted_B.any(), (name, token)
