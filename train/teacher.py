"""What the LLM thinks at every place of given answers: its k likeliest tokens, the target of KL distillation.

python -m train.teacher --answers answers/greedy teacher.jsonl.gz --out answers/top16 --k 16

The answers are fed back packed as in training, and each response token gets one row: the LLM's log-probabilities at the
place before it, as incremental decoding computes them. Shards are written whole or not at all; started again, it
computes what is missing. Rows are found by the answer's tokens, so they can never be those of another answer.
"""

import argparse
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.config import DEFAULT_MODEL, DTYPES
from specinfer_jax.errors import SpecInferError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params, vocabulary_logits
from specinfer_jax.opened import Model, choose_dtype, open_model
from specinfer_jax.progress_bar import OnProgress, progress_bar
from train.answer_store import check_settings, lock_folder, write_settings
from train.answers import Answer, TrainDataError, read_answers
from train.packing import BatchPlan, has_target
from train.step import hidden, train_batch
from train.top_k import TopK, keys_of, next_shard, write_shard

_COLUMNS = 128
"""Places whose logits exist at one time: 25 MB of float32 at a vocabulary of 49,152."""
_TOKENS_PER_SHARD = 50_000


_activations = jax.jit(hidden, static_argnames="config")


@functools.partial(jax.jit, static_argnames=("config", "k", "vocab_limit"))
def top_k_at(
    params: Params,
    x_DT: Float[Array, "D T"],
    column_M: Int[Array, " M"],
    *,
    config: ModelConfig,
    k: int,
    vocab_limit: int,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"]]:
    """Ids and log-probabilities of the k likeliest tokens at some columns; ids from `vocab_limit` on are padding."""
    logits_MV = vocabulary_logits(params, x_DT[:, column_M], config=config)[:vocab_limit].T
    top_Mk, id_Mk = jax.lax.top_k(logits_MV, k)
    return id_Mk.astype(jnp.int32), top_Mk - jax.nn.logsumexp(logits_MV, axis=1, keepdims=True)


def teacher_rows(model: Model, plan: BatchPlan, *, k: int) -> Iterator[tuple[Answer, TopK]]:
    """Every answer of one epoch of the plan with its rows, batch by batch."""
    config, params = model.config, model.params
    vocab_limit = min(model.tokenizer.vocab_size, config.vocab_size)
    for step in range(plan.steps_per_epoch):
        batch = plan.batch(step)
        x_DT = _activations(params, train_batch(batch), config=config)
        column_N = np.flatnonzero(batch.is_target_RT)  # row by row, as the places
        chunks = []
        for start in range(0, len(column_N), _COLUMNS):
            column_M = column_N[start : start + _COLUMNS]
            padded_M = np.pad(column_M, (0, _COLUMNS - len(column_M))).astype(np.int32)
            id_Mk, logprob_Mk = top_k_at(params, x_DT, padded_M, config=config, k=k, vocab_limit=vocab_limit)
            chunks.append((np.asarray(id_Mk)[: len(column_M)], np.asarray(logprob_Mk)[: len(column_M)]))
        id_Nk, logprob_Nk = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        if not np.isfinite(logprob_Nk).all():
            raise TrainDataError(f"the LLM's logits are not finite on one of {', '.join(plan.ids(step))}")
        done = 0
        for place in plan.places(step):
            at = slice(done, done + place.stop - place.first_target)
            done = at.stop
            yield plan.answers[place.answer], TopK(id_Nk[at], logprob_Nk[at])


def write_teacher_rows(
    model: Model, answers: Sequence[Answer], folder: Path, *, k: int, rows: int, tokens: int, dtype: np.dtype,
    on_progress: OnProgress = lambda answers, tokens: None,
) -> None:  # fmt: skip
    """Compute and write the rows of these answers, in new shards behind those that are there.

    Args:
      model: the LLM.
      answers: those whose rows are not there.
      folder: of the shards, locked by the caller.
      k: tokens of a row.
      rows: rows of a batch.
      tokens: tokens of a batch's row; what an answer has behind them gets no rows.
      dtype: of log-probabilities on disk, float32 or float16.
      on_progress: called with answers and response tokens done.
    """
    id_dtype = np.dtype(np.uint16 if model.config.vocab_size <= 2**16 else np.int32)
    waiting: dict[str, TopK] = {}
    num_waiting = 0
    for answer, top in teacher_rows(model, BatchPlan(answers, rows=rows, tokens=tokens), k=k):
        waiting[answer.content_key] = top
        num_waiting += len(top.id_Nk)
        if num_waiting >= _TOKENS_PER_SHARD:
            write_shard(next_shard(folder), waiting, id_dtype=id_dtype, logprob_dtype=dtype)
            waiting, num_waiting = {}, 0
        on_progress(1, len(top.id_Nk))
    if waiting:
        write_shard(next_shard(folder), waiting, id_dtype=id_dtype, logprob_dtype=dtype)


def run(options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    answers = read_answers(options.answers)
    settings = {
        "model": str(options.model), "model_dtype": choose_dtype(options.dtype).name, "k": options.k,
        "tokens": options.tokens, "logprobs": options.logprobs,
    }  # fmt: skip
    with lock_folder(options.out):
        check_settings(options.out, settings)
        there = keys_of(options.out)
        usable = {a.content_key: a for a in answers if has_target(a, options.tokens)}
        missing = [answer for key, answer in usable.items() if key not in there]
        print(
            f"{len(answers)} answers, {len(usable)} of them different and with a response that begins within "
            f"{options.tokens} tokens, {len(usable) - len(missing)} of those done",
            file=sys.stderr,
        )
        if not missing:
            return
        plan = BatchPlan(missing, rows=options.rows, tokens=options.tokens)
        enable_compile_cache()
        model = open_model(options.model, dtype=choose_dtype(options.dtype))
        _check_model(model, missing, options)
        write_settings(options.out, settings)
        began = time.perf_counter()
        with progress_bar("answers", len(plan.answers)) as on_progress:
            write_teacher_rows(
                model, missing, options.out, k=options.k, rows=options.rows, tokens=options.tokens,
                dtype=np.dtype(options.logprobs), on_progress=on_progress,
            )  # fmt: skip
        seconds = time.perf_counter() - began
        print(
            f"{plan.num_targets} response tokens ({int(plan.length_A.sum())} with prompts) in {seconds:.1f} s: "
            f"{plan.num_targets / seconds:.1f} tokens/s; {plan.num_cut} answers cut at {options.tokens} tokens",
            file=sys.stderr,
        )


def _check_model(model: Model, answers: Sequence[Answer], options: argparse.Namespace) -> None:
    config = model.config
    if options.tokens > config.max_position:
        raise TrainDataError(f"--tokens {options.tokens} exceeds the {config.max_position} of {options.model}")
    if options.k > config.vocab_size:
        raise TrainDataError(f"--k {options.k} exceeds the vocabulary of {config.vocab_size} of {options.model}")
    for answer in answers:
        largest = max(answer.prompt_ids + answer.response_ids)
        if largest >= config.vocab_size:
            raise TrainDataError(
                f"answer {answer.id!r} holds token id {largest}, and {options.model} has {config.vocab_size} ids"
            )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m train.teacher", description="The LLM's likeliest tokens.")
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="files, or folders of train.data")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows; given again, it is continued")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the LLM that wrote the answers")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the model")
    parser.add_argument("--k", type=int, default=16, help="tokens kept at every place")
    parser.add_argument("--logprobs", default="float32", choices=("float32", "float16"), help="dtype on disk")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch")
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens of a row, no fewer than in training; longer answers are cut"
    )
    options = parser.parse_args(arguments)
    for name in ("k", "rows", "tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute what is missing."""
    options = parse_arguments(arguments)
    try:
        run(options)
    except SpecInferError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; the same command goes on with what is missing in {options.out}") from None


if __name__ == "__main__":
    main()
