"""Losses of training: by hand on four ids, against plain autodiff, masks, reduced heads, ranks."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import LLAMA, params_of
from jax import Array

from specinfer_jax.models.transformer import vocabulary_logits
from train.losses import LossKind, chunk_tokens, loss_sums, token_scores
from train.parts import head_part, split_params
from train.token_losses import Targets

PLAIN = dataclasses.replace(LLAMA, vocab_size=4, width=4, final_norm=False)
"""With an identity for its head, activations are the logits."""


def sums_of_logits(logits_VN: np.ndarray, targets: Targets, *, ce: float = 1.0, kl: float = 1.0, ids=None):
    """Sums and the derivative by the logits, in one row."""
    size = logits_VN.shape[0]
    config = dataclasses.replace(
        PLAIN, width=size, vocab_size=size if ids is None else 40, output_vocab_size=None if ids is None else size
    )
    kind = LossKind(config, ce, kl, 1, 1, jnp.dtype(jnp.float32))
    frozen = {"head": {"kernel": jnp.eye(size)}} | ({} if ids is None else {"output_ids": jnp.asarray(ids, jnp.int32)})

    def loss(x_DN: Array) -> tuple[Array, tuple]:
        sums = loss_sums({}, frozen, x_DN, targets, kind)
        return sums.loss, sums

    (_, sums), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(logits_VN, jnp.float32))
    return sums, np.asarray(slope)


def targets_of(ids: list[int], weights: list[float], teacher: list[dict[int, float]] | None = None) -> Targets:
    """One row; a teacher is {id: probability} for every token."""
    found = Targets(jnp.asarray([ids], jnp.int32), jnp.asarray([weights], jnp.float32))
    if teacher is None:
        return found
    k = max(len(shares) for shares in teacher)
    id_Tk = [[*shares, *[-1] * (k - len(shares))] for shares in teacher]
    logprob_Tk = [[*np.log(list(shares.values())), *[-1e9] * (k - len(shares))] for shares in teacher]
    return found._replace(
        teacher_id_RTk=jnp.asarray([id_Tk], jnp.int32), teacher_logprob_RTk=jnp.asarray([logprob_Tk], jnp.float32)
    )


Q = np.array([0.5, 0.25, 0.125, 0.125])


def test_cross_entropy_by_hand() -> None:
    sums, slope = sums_of_logits(np.log(Q)[:, None], targets_of([1], [1.0]))
    assert float(sums.loss) == float(sums.ce) == pytest.approx(-math.log(0.25), rel=1e-6)
    np.testing.assert_allclose(slope[:, 0], Q - [0, 1, 0, 0], atol=1e-6)
    assert (float(sums.targets), float(sums.hits), float(sums.outside)) == (1, 0, 0)


def test_divergence_by_hand() -> None:
    # The teacher agrees on ids 0 and 1 and on what is left for the others: nothing to learn from it.
    sums, slope = sums_of_logits(np.log(Q)[:, None], targets_of([0], [1.0], [{0: 0.5, 1: 0.25}]), ce=0.0)
    assert float(sums.kl) == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(slope[:, 0], 0, atol=1e-6)
    # It gives 0.7 to id 1 and 0.3 to all others, which have 0.75 of the student's probability.
    sums, slope = sums_of_logits(np.log(Q)[:, None], targets_of([0], [1.0], [{1: 0.7}]), ce=0.0, kl=2.0)
    assert float(sums.kl) == pytest.approx(0.7 * math.log(0.7 / 0.25) + 0.3 * math.log(0.3 / 0.75), rel=1e-5)
    assert float(sums.loss) == pytest.approx(2 * float(sums.kl))
    wanted = np.array([0.3 * 0.5 / 0.75, 0.7, 0.3 * 0.125 / 0.75, 0.3 * 0.125 / 0.75])
    np.testing.assert_allclose(slope[:, 0], 2 * (Q - wanted), atol=1e-6)


def test_reduced_head_leaves_out_what_it_cannot_say() -> None:
    ids = [7, 11, 20, 21]
    # Token 0 has a target without a row; the teacher's id 5 has none either and takes half of the weight with it.
    teacher = [{5: 0.5, 11: 0.35}, {}]
    targets = targets_of([5, 20], [1.0, 1.0], teacher)
    sums, slope = sums_of_logits(np.log(np.stack([Q, Q], axis=1)), targets, ids=ids)
    assert (float(sums.targets), float(sums.outside), float(sums.inside)) == (2, 1, 1)
    assert float(sums.ce) == pytest.approx(-math.log(0.125), rel=1e-6)
    kl = 0.35 * math.log(0.35 / 0.5 / 0.25) + 0.15 * math.log(0.15 / 0.5 / 0.75)
    assert float(sums.kl) == pytest.approx(kl, rel=1e-5)
    assert slope[:, 0].sum() == pytest.approx(0, abs=1e-6)
    assert slope[1, 0] == pytest.approx(0.5 * 0.25 - 0.35, rel=1e-5)
    # All of the teacher's known ids are outside, and nothing is left: no divergence.
    sums, slope = sums_of_logits(np.log(Q)[:, None], targets_of([5], [1.0], [{5: 1.0}]), ids=ids)
    assert float(sums.loss) == 0 and not slope.any()


def test_student_that_rules_out_the_rest_has_finite_slopes() -> None:
    logits = np.array([[60.0], [0.0], [-60.0], [-60.0]])
    sums, slope = sums_of_logits(logits, targets_of([0], [1.0], [{0: 0.9, 1: 0.05}]))
    assert np.isfinite(float(sums.loss)) and np.isfinite(slope).all() and np.abs(slope).max() < 10


def test_fully_masked_rows_are_finite() -> None:
    # B069; the teacher's numbers may be anything where there is no target.
    targets = targets_of([1, 2], [0.0, 0.0], [{0: 0.5}, {1: 0.5}])
    targets = targets._replace(teacher_logprob_RTk=jnp.full((1, 2, 1), jnp.nan))
    sums, slope = sums_of_logits(np.log(np.stack([Q, Q], axis=1)), targets)
    assert all(float(value) == 0 for value in sums) and not slope.any()


def reference(params, x_DN: Array, targets: Targets, config) -> Array:
    """CE + 0.5 * KL, token by token, from plain log-softmax."""
    log_q_VN = jax.nn.log_softmax(vocabulary_logits(params, x_DN, config=config), axis=0)
    ids = np.asarray(params["output_ids"]).tolist() if "output_ids" in params else list(range(config.vocab_size))
    targets = jax.tree.map(np.asarray, targets)  # known when this is traced
    total = jnp.zeros(())
    for n, (y, weight) in enumerate(zip(targets.id_RT.flatten().tolist(), targets.weight_RT.flatten(), strict=True)):
        if not weight:
            continue
        if y in ids:
            total -= weight * log_q_VN[ids.index(y), n]
        if targets.teacher_id_RTk is None:
            continue
        k = targets.teacher_id_RTk.shape[-1]
        share_k = np.exp(targets.teacher_logprob_RTk.astype(np.float64).reshape(-1, k)[n])
        rest = 1 - share_k.sum()
        rows = [
            (p, ids.index(t))
            for p, t in zip(share_k, targets.teacher_id_RTk.reshape(-1, k)[n].tolist(), strict=True)
            if t in ids
        ]
        said = sum(p for p, _ in rows) + rest
        log_q_rest = jnp.log1p(-sum((jnp.exp(log_q_VN[row, n]) for _, row in rows), jnp.zeros(())))
        parts = sum((p * (np.log(p / said) - log_q_VN[row, n]) for p, row in rows), jnp.zeros(()))
        total += 0.5 * weight * (parts + rest * (np.log(rest / said) - log_q_rest))
    return total


@pytest.mark.parametrize("head", ["full", "reduced", "tied", "frozen"])
def test_sums_and_slopes_equal_plain_autodiff(head: str) -> None:
    random = np.random.default_rng(0)
    params, config = dict(params_of(LLAMA)), LLAMA
    if head == "reduced":
        config = dataclasses.replace(config, output_vocab_size=20)
        params["output_ids"] = jnp.asarray(sorted(random.choice(64, 20, replace=False)), jnp.int32)
        params["head"] = {**params["head"], "kernel": params["head"]["kernel"][:20]}
    if head == "tied":
        config = dataclasses.replace(config, tied_head=True)
        params["head"] = {"norm": params["head"]["norm"]}
    trained, frozen = split_params(params, ["norm"] if head == "frozen" else ["norm", "head", "embed"])
    tied = config.tied_head
    own, other = head_part(trained, tied=tied), head_part(frozen, tied=tied)

    R, T, k = 4, 3, 2
    known = np.asarray(params.get("output_ids", np.arange(64)))
    teacher_ids = np.stack([random.choice(64, k, replace=False) for _ in range(R * T)]).reshape(R, T, k)
    teacher_ids[..., 0] = np.where(np.isin(teacher_ids, known).any(-1), teacher_ids[..., 0], known[0])
    shares = random.dirichlet(np.ones(k + 1), (R, T))[..., :k]
    targets = Targets(
        jnp.asarray(random.integers(0, 64, (R, T)), jnp.int32),
        jnp.asarray(random.choice([0.0, 0.5, 1.0], (R, T)), jnp.float32),
        jnp.asarray(teacher_ids, jnp.int32),
        jnp.asarray(np.log(shares), jnp.float32),
    )
    x_DN = jnp.asarray(random.standard_normal((LLAMA.width, R * T)), jnp.float32)

    def plain(own, x_DN: Array) -> Array:
        whole = {
            **params,
            "head": {**params["head"], **own.get("head", {})},
            **({"embed": own["embed"]} if tied else {}),
        }
        return reference(whole, x_DN, targets, config)

    wanted, wanted_slopes = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(own, x_DN)
    for chunk, groups in ((2, 1), (1, 4)):
        kind = LossKind(config, 1.0, 0.5, chunk, groups, jnp.dtype(jnp.float32))

        @jax.jit
        def summed(own, x_DN: Array, kind=kind):
            return jax.value_and_grad(lambda own, x: loss_sums(own, other, x, targets, kind).loss, (0, 1))(own, x_DN)

        found, slopes = summed(own, x_DN)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert jax.tree.structure(slopes) == jax.tree.structure(wanted_slopes)
        for slope, right in zip(jax.tree.leaves(slopes), jax.tree.leaves(wanted_slopes), strict=True):
            np.testing.assert_allclose(slope, right, atol=2e-5 * np.abs(right).max())
        if groups > 1:
            alone = jax.jit(lambda kind=kind: loss_sums(own, other, x_DN, targets, kind).loss)()
            np.testing.assert_allclose(alone, wanted, rtol=1e-5)


def test_bfloat16_products_have_float32_slopes() -> None:
    trained, _ = split_params(params_of(LLAMA), ["norm", "head"])
    kind = LossKind(LLAMA, 1.0, 0.0, 2, 1, jnp.dtype(jnp.bfloat16))
    targets = targets_of([1, 2, 3, 4], [1.0, 1.0, 0.0, 1.0])
    x_DN = jax.random.normal(jax.random.key(0), (LLAMA.width, 4), jnp.bfloat16)
    slopes = jax.jit(jax.grad(lambda own, x: loss_sums(own, {}, x, targets, kind).loss, argnums=(0, 1)))(trained, x_DN)
    assert slopes[0]["head"]["kernel"].dtype == jnp.float32 and slopes[1].dtype == jnp.bfloat16
    exact = kind._replace(dtype=jnp.dtype(jnp.float32))
    wanted = jax.grad(lambda own: loss_sums(own, {}, x_DN.astype(jnp.float32), targets, exact).loss)(trained)
    kernel, right = slopes[0]["head"]["kernel"], wanted["head"]["kernel"]
    np.testing.assert_allclose(kernel, right, atol=0.03 * np.abs(right).max())


def test_ranks_are_places_in_top_k() -> None:
    random = np.random.default_rng(3)
    logits_VN = random.integers(0, 4, (8, 12)).astype(np.float32)  # many ties
    ids = [3, 1, 4, 15, 9, 26, 5, 35]
    config = dataclasses.replace(PLAIN, width=8, vocab_size=40, output_vocab_size=8)
    head = {"head": {"kernel": jnp.eye(8)}, "output_ids": jnp.asarray(ids, jnp.int32)}
    id_RT = jnp.asarray(random.choice([*ids, 30], (2, 6)), jnp.int32)
    for chunk, groups in ((1, 1), (4, 1), (3, 2)):
        kind = LossKind(config, 1.0, 0.0, chunk, groups, jnp.dtype(jnp.float32))
        ce_RT, rank_RT = jax.jit(functools.partial(token_scores, kind=kind))(head, jnp.asarray(logits_VN), id_RT)
        best_NV = np.asarray(jax.lax.top_k(jnp.asarray(logits_VN.T), 8)[1])
        log_q_NV = np.asarray(jax.nn.log_softmax(logits_VN.T, axis=1))
        for n, y in enumerate(np.asarray(id_RT).flatten().tolist()):
            if y == 30:
                assert np.isnan(ce_RT.flatten()[n]) and rank_RT.flatten()[n] == 8
                continue
            row = ids.index(y)
            assert best_NV[n].tolist().index(row) == rank_RT.flatten()[n]
            assert ce_RT.flatten()[n] == pytest.approx(-log_q_NV[n, row], rel=1e-5)


def test_chunks_divide_the_tokens_and_fit_the_memory() -> None:
    assert chunk_tokens(2048, vocab_size=12288, logits_mb=64) == 256
    assert chunk_tokens(2048, vocab_size=49152, logits_mb=16) == 64
    assert chunk_tokens(96, vocab_size=10**9, logits_mb=1) == 1
    assert chunk_tokens(7, vocab_size=10, logits_mb=1) == 1
