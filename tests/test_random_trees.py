"""Whatever logits, parameters, trees and q come in: out come a path of the tree and tokens that may be drawn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import BATCH, ROOMS, Room
from exact_law import Rules, TableModel, shaped
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from table_slots import MOST_CONTEXT, PATH_LEN, merged_with_target, naive, prepare, root_history, sampling_of, walk

from specinfer_jax.speculation.draft import Draft
from specinfer_jax.speculation.mss import DraftDistributions
from specinfer_jax.speculation.sampling import in_use
from specinfer_jax.speculation.verifier import Verdict
from specinfer_jax.tree.token_tree import TokenTree, check_invariants

B, V, S = BATCH, 4, MOST_CONTEXT
STOP_IDS = (1, 2)
NO_ID = 2**31 - 1
STYLES = ("normal", "ties", "huge", "many -inf", "all but one -inf")


def random_draft(rng: np.random.Generator, room: Room) -> Draft:
    """Any parents, tokens that were drawn from q of all kinds; what is below a missing row is missing too."""
    slots, rows, C, E = np.arange(B), room.rows, room.candidates, room.rows - 1
    token_BN, parent_BN = np.zeros((B, rows), np.int32), np.full((B, rows), rows, np.int32)
    depth_BN, valid_BN = np.zeros((B, rows), np.int32), np.ones((B, rows), bool)
    id_BEC = np.argsort(rng.random((B, E, V)), axis=2)[:, :, :C].astype(np.int32)
    prob_BEC = rng.dirichlet(np.full(C, 0.5), (B, E)) * (rng.random((B, E, C)) < 0.8)
    id_BEC[:, ::2, C - 1], prob_BEC[:, ::2, C - 1] = NO_ID, 0
    prob_BEC = (prob_BEC / np.maximum(prob_BEC.sum(axis=2, keepdims=True), 1e-30)).astype(np.float32)
    slot_BN = rng.integers(0, C - 1, (B, rows)).astype(np.int32)  # also candidates with q = 0
    for row in range(1, rows):
        parent_B = rng.integers(0, row, B)
        parent_B = np.where(depth_BN[slots, parent_B] < PATH_LEN - 1, parent_B, 0)
        parent_BN[:, row], depth_BN[:, row] = parent_B, depth_BN[slots, parent_B] + 1
        valid_BN[:, row] = valid_BN[slots, parent_B] & (rng.random(B) < 0.9)
        token_BN[:, row] = np.where(valid_BN[:, row], id_BEC[slots, parent_B, slot_BN[:, row]], 0)
    tree = TokenTree(token_BN, parent_BN, depth_BN, valid_BN)
    if not room.told:
        return Draft(tree, depth_BN)
    return Draft(tree, depth_BN, slot_BN, DraftDistributions(id_BEC, prob_BEC))


def random_logits(rng: np.random.Generator, style: str, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.normal(scale=2, size=shape)
    if style == "ties":
        return np.round(x)
    if style == "huge":
        return rng.choice([1e38, -1e38, 1e30, 0, 5, -1e20], shape)
    if style == "many -inf":
        return np.where(rng.random(shape) < 0.6, -np.inf, np.round(x))
    if style == "all but one -inf":
        return np.where(np.arange(V) == rng.integers(0, V, (*shape[:-1], 1)), x, -np.inf)
    return x


def random_rules(rng: np.random.Generator) -> Rules:
    def maybe(neutral, value):
        return value if rng.random() < 0.4 else neutral

    return Rules(
        temperature=float(rng.choice([0, 0.2, 1, 1, 5])),
        top_k=maybe(0, int(rng.integers(1, V + 2))),
        top_p=maybe(1.0, float(rng.uniform(0.01, 1))),
        min_p=maybe(0.0, float(rng.uniform(0, 1))),
        repetition=maybe(1.0, float(rng.choice([0.5, 2]))),
        presence=maybe(0.0, float(rng.choice([-2, 1]))),
        frequency=maybe(0.0, float(rng.choice([-0.5, 2]))),
        min_tokens=maybe(0, int(rng.integers(0, 8))),
        bias=maybe(
            (), tuple((int(t), float(x)) for t, x in zip(rng.permutation(V)[:3], (-np.inf, 4, -4), strict=True))
        ),
        bad=maybe((), tuple(tuple(rng.integers(0, V, n).tolist()) for n in (2, 2, 2, 3, 3))),
    )


def may_be_drawn(x_V: np.ndarray, rules: Rules) -> np.ndarray:
    """Ids that a slot may emit, generous where float32 may see a threshold on the other side of a token."""
    if rules.temperature == 0:
        tolerance = 1e-5 * max(1, abs(x_V.max())) if rules.is_shaped else 0
        first_V = np.arange(V) == np.argmax(x_V)
        return first_V if not tolerance else x_V >= x_V.max() - tolerance
    below_V = (x_V - x_V.max()) / rules.temperature
    keep_V = below_V >= (np.log(rules.min_p) if rules.min_p else -np.inf) - 1e-4
    keep_V &= below_V > -np.inf
    if 0 < rules.top_k < V:
        least = np.sort(below_V)[-rules.top_k]
        keep_V &= below_V >= least - 1e-5 * (1 + abs(least)) if np.isfinite(least) else keep_V
    if rules.top_p < 1:
        weight_V = np.exp(below_V) * keep_V
        falling_V = -np.sort(-weight_V)
        last = np.searchsorted(np.cumsum(falling_V), rules.top_p * falling_V.sum() * (1 + 1e-4))
        keep_V &= weight_V >= falling_V[min(last, V - 1)] * (1 - 1e-4)
    return keep_V


class Slot(NamedTuple):
    rules: Rules
    prompt: list[int]
    output: list[int]
    logits_NV: np.ndarray
    """float64, as the package got them."""


def check_slot(slot: Slot, parent_N: np.ndarray, token_N: np.ndarray, verdict: Verdict, bonus: np.ndarray) -> None:
    """Everything about one slot's verdict; `bonus` holds every id that the bonus token may be."""
    path_A, token_A, accepted, failed = verdict
    N = len(parent_N)
    assert path_A[0] == 0 and (path_A[accepted + 1 :] == N).all() and (token_A[accepted + 1 :] == 0).all()
    for i in range(accepted + 1):
        node = path_A[i]
        output = slot.output + token_A[:i].tolist()
        x_V = shaped(slot.logits_NV[node], slot.rules, prompt=slot.prompt, output=output, stop_ids=STOP_IDS)
        if not np.isfinite(x_V.max()):
            assert failed and i == accepted, "a path may end, not go on, where nothing can be chosen"
            return
        assert not failed or i < accepted, "failed although something could be chosen"
        emitted = token_A[i : i + 1] if i < accepted else bonus
        assert len(emitted) and emitted.min() >= 0 and emitted.max() < V
        assert may_be_drawn(x_V, slot.rules)[emitted].all(), f"{emitted} cannot be drawn under {slot.rules}"
        if i < accepted:
            child = path_A[i + 1]
            assert parent_N[child] == node and token_N[child] == token_A[i], "not a path of the tree"


@pytest.mark.parametrize(("dtype", "renormalize"), [("float32", False), ("bfloat16", True)])
def test_random_trees(dtype, renormalize) -> None:
    accepted_nodes = np.zeros(2, int)

    # A smaller seed is no simpler, so nothing is shrunk.
    @settings(max_examples=5, deadline=None, phases=(Phase.reuse, Phase.generate))
    @given(st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        rng = np.random.default_rng(seed)
        rules = [random_rules(rng) for _ in range(B)]
        token_BS = rng.integers(0, V, (B, S)).astype(np.int32)
        prompt_B, committed_B = rng.integers(1, 4, B).astype(np.int32), rng.integers(4, S, B).astype(np.int32)
        history = root_history(token_BS, committed_B, prompt_B, vocab_size=V, shaped=np.bool_(True))
        drafts = tuple(random_draft(rng, room) for room in ROOMS)
        merged, target = merged_with_target(drafts, prepare(TableModel(np.zeros((1, V)), stop_ids=STOP_IDS), B))
        styles = [random_logits(rng, style, (B, merged.tree.num_rows, V)) for style in STYLES]
        # float32 holds every bfloat16; that the package takes both alike is shown in test_sampling_rules.py.
        logits_BNV = np.array(
            jnp.asarray(np.stack(styles)[np.arange(B) % len(STYLES), np.arange(B)], dtype), np.float32
        )
        sampling = sampling_of(rules, V)._replace(key_B2=jnp.asarray(rng.integers(0, 2**32, (B, 2)), jnp.uint32))
        use = jax.jit(in_use)(sampling, jnp.ones(B, bool))
        target = target._replace(logits_VT=jnp.asarray(logits_BNV.reshape(-1, V).T), sampling=sampling, use=use)
        uniform_BR = rng.random(merged.draws.parent_BR.shape, np.float32)
        tree, of_naive, of_mss = jax.tree.map(
            np.asarray,
            (
                merged.tree,
                naive(merged.tree, target, history, committed_B, path_len=PATH_LEN),
                walk(merged, target, history, uniform_BR, renormalize=renormalize),
            ),
        )
        check_invariants(tree)
        assert not np.isnan(of_mss.accept_BR).any() and of_mss.accept_BR.max() <= 1
        assert np.isfinite(of_mss.weight_BV).all() and of_mss.weight_BV.min() >= 0
        for b in range(B):
            tokens = token_BS[b, : committed_B[b]].tolist()
            slot = Slot(rules[b], tokens[: prompt_B[b]], tokens[prompt_B[b] :], logits_BNV[b].astype(np.float64))
            first, second = (Verdict(*(x[b] for x in verdict)) for verdict in (of_naive, of_mss.verdict))
            drawn, possible = first.token_BA[first.accepted_B][None], np.flatnonzero(of_mss.weight_BV[b])
            check_slot(slot, tree.parent_BN[b], tree.token_BN[b], first, drawn)
            check_slot(slot, tree.parent_BN[b], tree.token_BN[b], second, possible)
            if rules[b].temperature == 0 and not first.failed_B:
                assert first.path_BA.tolist() == second.path_BA.tolist() and possible.tolist() == drawn.tolist()
            accepted_nodes[:] += first.accepted_B, second.accepted_B

    check()
    assert accepted_nodes.min() > B
