"""run.json: which run a folder holds, so that nothing else is continued there by mistake. Free of jax."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specinfer_jax.errors import ConfigError
from train.packing import BatchPlan
from train.settings import TrainSettings

RUN_FILE = "run.json"
VOCABULARY = "the vocabulary"
Weights = Mapping[str, float | np.ndarray]
"""By answer id: what its response tokens count, one number or one for each; answers that are not there count 1."""
MAY_CHANGE = (
    "data.answers", "data.teacher", "boost", "loss.logits_mb", "run.devices", "run.eval_interval", "run.eval_batches",
    "run.save_interval", "run.keep", "run.max_minutes", "run.tensorboard", "run.remat",
)  # fmt: skip
"""What a resumed run may have otherwise than before; all else would make it another run. (Answers are compared by what
they say, not by where they are.)"""


def check_run(
    folder: Path, settings: TrainSettings, plan: BatchPlan, weights: Weights,
    vocabulary: Sequence[int] | None,
) -> None:  # fmt: skip
    """Write run.json, or find that the run in the folder is this one.

    Raises:
      ConfigError: it is another one; the message names what differs.
    """
    content_hash = hashlib.blake2b(digest_size=8)
    for key, answer in zip(plan.keys, plan.answers, strict=True):
        content_hash.update(key.encode() + np.asarray(weights.get(answer.id, 1.0), np.float32).tobytes())
    now = {
        **flat(settings),
        "the answers": content_hash.hexdigest(),
        VOCABULARY: None if vocabulary is None else list(map(int, vocabulary)),
    }
    path = folder / RUN_FILE
    if path.exists():
        before = read_run(folder)["compared"]
        changed = sorted(name for name in {*now, *before} if now.get(name) != before.get(name))
        if changed:
            raise ConfigError(
                f"{folder} holds a run with other settings ({', '.join(changed)}); name another folder, or remove it"
            )
    content = {"version": 1, "settings": dataclasses.asdict(settings), "compared": now}
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(content), encoding="utf-8")
    os.replace(scratch, path)


def read_run(folder: Path) -> dict[str, Any]:
    """What run.json says: "settings", and "compared", the vocabulary among it.

    Raises:
      ConfigError: there is none.
    """
    try:
        return json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{folder} holds no run of train.distill ({RUN_FILE} is missing or damaged)") from None


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, without those that a resumed run may change."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        name, value = prefix + field.name, getattr(settings, field.name)
        if name in MAY_CHANGE:
            continue
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{name}.")
        else:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found
