"""Seconds of one pass of a model by its rows, measured once per machine: what the shape of trees is chosen by.

    ~/.cache/specinfer_jax/costs/3f0c...json    {"key": {...}, "seconds": {"1": 0.021, "4": 0.027, ...}}

A pass is timed alone, without a step around it, so that one measurement serves every tree and every set of SSMs.
"""

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.tree_attention import causal_words
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import KVCache, init_cache
from specinfer_jax.models.transformer import Params, forward, vocabulary_logits

_CONTEXT = 256
"""Tokens in the cache behind which passes are timed."""
_CHILDREN = 4
_REPEATS = 7


def costs_folder() -> Path:
    """Where measurements are kept."""
    return Path(platformdirs.user_cache_dir("specinfer_jax")) / "costs"


def pass_seconds(
    config: ModelConfig, params: Params, rows: Sequence[int], *,
    num_slots: int, page_size: int, dtype: DTypeLike, folder: Path | None = None,
) -> dict[int, float]:  # fmt: skip
    """Seconds of a pass, its head and the choice of likely tokens included, by rows of every slot.

    Args:
      config: the model.
      params: its parameters.
      rows: numbers of rows.
      num_slots: slots that every pass serves.
      page_size: of the cache.
      dtype: of the cache.
      folder: of earlier measurements; None: the user's.

    Returns:
      The least of a few repeats, never less for more rows.
    """
    device = jax.devices()[0]
    key = {
        "config": repr(dataclasses.asdict(config)), "rows": list(rows), "num_slots": num_slots, "page_size": page_size,
        "dtype": jnp.dtype(dtype).name, "weights": jnp.dtype(params["embed"]["embedding"].dtype).name,
        "device": f"{device.platform} {device.device_kind}", "cores": os.cpu_count(), "jax": jax.__version__,
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    file = (folder or costs_folder()) / f"{name}.json"
    known = _read(file, rows)
    if known is None:
        known = _measure(config, params, rows, num_slots=num_slots, page_size=page_size, dtype=dtype)
        _write(file, {"key": key, "seconds": known})
    return known


def _measure(
    config: ModelConfig, params: Params, rows: Sequence[int], *, num_slots: int, page_size: int, dtype: DTypeLike
) -> dict[int, float]:
    context = max(min(_CONTEXT, config.max_position - max(rows) - 1), 0)
    cache = init_cache(
        config, num_slots=num_slots, max_model_len=max(context, 1), page_size=page_size, dtype=dtype
    )._replace(length_B=jnp.full((num_slots,), context, jnp.int32))
    passes = {n: jax.jit(functools.partial(_one_pass, config=config, num_rows=n)) for n in rows}
    seconds: dict[int, list[float]] = {n: [] for n in rows}
    for n in rows:
        jax.block_until_ready(passes[n](params, cache))  # compiles
    for _ in range(_REPEATS):  # in turn, so that a slow moment of the machine hits all of them
        for n in rows:
            began = time.perf_counter()
            jax.block_until_ready(passes[n](params, cache))
            seconds[n].append(time.perf_counter() - began)
    # Noise only adds, so what fewer rows cost is at most what more rows do.
    falling = np.minimum.accumulate([min(seconds[n]) for n in sorted(rows, reverse=True)])
    return dict(zip(sorted(rows), falling[::-1].tolist(), strict=True))


def _one_pass(params: Params, cache: KVCache, *, config: ModelConfig, num_rows: int) -> Array:
    """The likeliest tokens behind every row of a chain."""
    B = cache.length_B.shape[0]
    step_1Q = jnp.arange(num_rows, dtype=jnp.int32)[None]
    position_BQ = cache.length_B[:, None] + step_1Q
    words_QC = causal_words(num_rows)
    x_DT, _ = forward(
        params, jnp.broadcast_to(step_1Q % config.vocab_size, (B, num_rows)), position_BQ, cache,
        jnp.broadcast_to(words_QC[None], (B, *words_QC.shape)), config=config, prompt_len_B=cache.length_B,
    )  # fmt: skip
    logits_VT = jax.lax.optimization_barrier(vocabulary_logits(params, x_DT, config=config))  # as in ssm.py
    return jax.lax.top_k(logits_VT.T, min(_CHILDREN, logits_VT.shape[0]))[1]


def _read(file: Path, rows: Sequence[int]) -> dict[int, float] | None:
    """What was measured before; None if it was not, or if the file is damaged."""
    try:
        seconds = json.loads(file.read_text(encoding="utf-8"))["seconds"]
        found = {int(n): float(value) for n, value in seconds.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_whole = set(found) == set(rows) and all(0 < value < float("inf") for value in found.values())
    return found if is_whole else None


def _write(file: Path, value: dict[str, Any]) -> None:
    """Whole or not at all; without a folder to write to, the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(value, stream)
        os.replace(name, file)
    except OSError:
        return
