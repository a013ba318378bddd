"""Multi-step speculative sampling (MSS) counted on the LLM's own answers: which draw each of their tokens would be.

What MSS commits has the LLM's law, so an answer drawn from the LLM is one that MSS might have written. Given the
answer, every node that its steps go through has a law of its own: with p the LLM's and q the SSM's distribution at a
place whose token is y, and p_j and q_j what the first j rejected draws left of them, the token comes from

    draw j + 1    with probability  reach_j min(p_j(y), q_j(y)) / p(y),   reach_j: that the first j draws are rejected
    no draw       with what is left

Without replacement p_j and q_j depend on which tokens were rejected; these are drawn too, each from q_j - min(p_j,
q_j). The shares above sum to at most 1 for whatever was rejected, so one draw of it gives the exact law. What comes out
reads like a rank, and steps are counted along it as along the ranks of likeliest children.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specinfer_jax import Model
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import vocabulary_logits
from specinfer_jax.speculation.children import MAX_CANDIDATES
from train.answers import Answer
from train.packing import BatchPlan
from train.step import hidden, train_batch

_ROWS = 4
_PLACES = 128
"""Places whose logits exist at one time."""
_activations = jax.jit(hidden, static_argnames="config")


class Places(NamedTuple):
    """What the LLM and an SSM think before every token of an answer; N tokens, C candidates."""

    p_NC: Float[np.ndarray, "N C"]
    """The LLM's probability of each candidate."""
    q_NC: Float[np.ndarray, "N C"]
    """The SSM's, 0 elsewhere: what its children are drawn from."""
    own_p_N: Float[np.ndarray, " N"]
    """The LLM's probability of the answer's token."""
    own_slot_N: Int[np.ndarray, " N"]
    """Which candidate that token is; C: none."""


def draw_ranks_of(
    llm: Model, ssm: Model, answers: Sequence[Answer], *, temperature: float, max_model_len: int, draws: int,
    seed: int = 0,
) -> list[np.ndarray]:  # fmt: skip
    """For every answer and each of its tokens, after how many rejected draws without replacement it was accepted.

    Args:
      llm: it drew the answers.
      ssm: its children are drawn.
      answers: drawn at `temperature` without filters.
      temperature: of both.
      max_model_len: most tokens of an answer with its prompt.
      draws: most children of a node; a token that none of them is gets this number.
      seed: of the draws.
    """
    plan = BatchPlan(answers, rows=_ROWS, tokens=max_model_len)
    rng = np.random.default_rng(seed)
    found = {
        answer.id: draw_ranks(places, draws=draws, rng=rng)
        for answer, places in _places(llm, ssm, plan, temperature=temperature)
    }
    return [found[answer.id] for answer in answers]


def draw_ranks(places: Places, *, draws: int, rng: np.random.Generator) -> np.ndarray:
    """int32 `[N]`: which of `draws` draws without replacement the answer's token would have been; `draws`: none."""
    p_NC, q_NC = (x_NC.astype(np.float64) for x_NC in (places.p_NC, places.q_NC))
    N, C = p_NC.shape
    is_candidate_N = places.own_slot_N < C
    own_N1 = np.minimum(places.own_slot_N, C - 1)[:, None]
    rest_N = np.maximum(1 - p_NC.sum(axis=1), 0)
    rank_N = np.full(N, draws, np.int32)
    level_N = rng.random(N) * places.own_p_N
    reach_N, taken_N = np.ones(N), np.zeros(N)
    for j in range(draws):
        accepted_NC = np.minimum(p_NC, q_NC)
        taken_N += reach_N * np.take_along_axis(accepted_NC, own_N1, axis=1)[:, 0] * is_candidate_N
        rank_N[(rank_N == draws) & (level_N < taken_N)] = j
        rejected_NC = q_NC - accepted_NC
        reach_N *= rejected_NC.sum(axis=1)
        p_NC = np.maximum(p_NC - q_NC, 0)
        total_N = p_NC.sum(axis=1) + rest_N
        is_open_N = (reach_N > 0) & (total_N > 0)
        p_NC = _over(p_NC, np.where(is_open_N, total_N, 1.0))
        rest_N = rest_N / np.where(is_open_N, total_N, 1.0)
        upto_NC = np.cumsum(rejected_NC, axis=1)
        gone_N1 = np.argmax(upto_NC > rng.random((N, 1)) * upto_NC[:, -1:], axis=1)[:, None]
        np.put_along_axis(q_NC, gone_N1, 0.0, axis=1)
        q_NC = _over(q_NC, np.maximum(q_NC.sum(axis=1), np.finfo(np.float64).tiny)) * is_open_N[:, None]
    return rank_N


def _over(x_NC: np.ndarray, total_N: np.ndarray) -> np.ndarray:
    return x_NC / total_N[:, None]


def _places(llm: Model, ssm: Model, plan: BatchPlan, *, temperature: float) -> Iterator[tuple[Answer, Places]]:
    """Every answer of one epoch of the plan, batch by batch."""
    vocab_limit = min(llm.tokenizer.vocab_size, llm.config.vocab_size)
    for step in range(plan.steps_per_epoch):
        packed = plan.batch(step)
        batch = train_batch(packed)
        x_DT, y_DT = (_activations(model.params, batch, config=model.config) for model in (llm, ssm))
        column_N = np.flatnonzero(packed.is_target_RT)  # row by row, as the places
        target_N = packed.target_RT.reshape(-1)[column_N]
        chunks = []
        for start in range(0, len(column_N), _PLACES):
            column_M, target_M = (x_N[start : start + _PLACES] for x_N in (column_N, target_N))
            padding = (0, _PLACES - len(column_M))
            found = _compare(
                llm.params, ssm.params, x_DT, y_DT, np.pad(column_M, padding).astype(np.int32),
                np.pad(target_M, padding), configs=(llm.config, ssm.config), temperature=temperature,
                vocab_limit=vocab_limit,
            )  # fmt: skip
            chunks.append(Places(*(np.asarray(x_M)[: len(column_M)] for x_M in found)))
        joined = Places(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))
        done = 0
        for place in plan.places(step):
            at = slice(done, done + place.stop - place.first_target)
            done = at.stop
            yield plan.answers[place.answer], Places(*(x_N[at] for x_N in joined))


@functools.partial(jax.jit, static_argnames=("configs", "temperature", "vocab_limit"))
def _compare(
    llm_params: Any, ssm_params: Any, x_DT: Float[Array, "D T"], y_DT: Float[Array, "E T"], column_M: Int[Array, " M"],
    target_M: Int[Array, " M"], *, configs: tuple[ModelConfig, ModelConfig], temperature: float, vocab_limit: int,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """`Places` of some columns."""
    llm_config, ssm_config = configs
    p_MV = jax.nn.softmax(
        vocabulary_logits(llm_params, x_DT[:, column_M], config=llm_config)[:vocab_limit].T / temperature, axis=1
    )
    logits_VM = vocabulary_logits(ssm_params, y_DT[:, column_M], config=ssm_config)
    if "output_ids" not in ssm_params:
        logits_VM = logits_VM[:vocab_limit]
    logit_MC, id_MC = jax.lax.top_k(logits_VM.T, min(MAX_CANDIDATES, logits_VM.shape[0]))
    if "output_ids" in ssm_params:
        id_MC = ssm_params["output_ids"][id_MC]
    q_MC = jax.nn.softmax(logit_MC / temperature, axis=1)
    is_own_MC = id_MC == target_M[:, None]
    own_slot_M = jnp.where(is_own_MC.any(axis=1), jnp.argmax(is_own_MC, axis=1), id_MC.shape[1])
    own_p_M = jnp.take_along_axis(p_MV, target_M[:, None], axis=1)[:, 0]
    return jnp.take_along_axis(p_MV, id_MC, axis=1), q_MC, own_p_M, own_slot_M
