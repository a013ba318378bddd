"""What a training run is made of, as frozen dataclasses, and the TOML file that sets them. Free of jax.

# configs/train/mine.toml; every key has a default except data.answers
llm = "smollm2-135m-instruct"
[data]
answers = ["out/answers"]
[init]
layers = [0, 1, 29]
[run]
steps = 1000
"""

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specinfer_jax.config import DEFAULT_MODEL
from specinfer_jax.errors import ConfigError

PARTS = ("embed", "layers", "norm", "head")
"""Parts of a model that are trained or frozen as a whole; norm is the one before the vocabulary head."""
COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
CONTINUATION = "continuation"
WEIGHTINGS = ("drop", "soft")
FROM_LLM, FROM_SCRATCH = "llm", "scratch"


def _at_least_one(settings: Any, *names: str) -> None:
    for name in names:
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(settings, name)}")


def _checked(name: str, kind: Any, value: Any) -> Any:
    """The value, a whole number turned into a float where one is meant."""
    if kind is float and type(value) is int:
        value = float(value)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        is_right = isinstance(value, tuple) and all(type(v) is inner for v in value)
        numbers = value if is_right and inner is int else ()
    else:
        allowed = typing.get_args(kind) if typing.get_origin(kind) is not Mapping else ()
        is_right = type(value) in allowed if allowed else isinstance(value, typing.get_origin(kind) or kind)
        is_right = is_right and (kind is bool or not isinstance(value, bool))
        numbers = (value,) if isinstance(value, int | float) else ()
    if not is_right:
        wanted = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind)
        raise ConfigError(f"{name} must be of type {wanted}, got {value!r}")
    if any(not number >= 0 for number in numbers):
        raise ConfigError(f"{name} must not be negative, got {value!r}")
    return value


class Checked:
    """Base of settings: values have the type that the annotation names, and numbers are not negative."""

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, field.name, _checked(field.name, field.type, getattr(self, field.name)))
        self.check()

    def check(self) -> None:
        """Rules beyond types; ConfigError where one is broken."""


@dataclasses.dataclass(frozen=True)
class DataSettings(Checked):
    """What is trained on, and in which shape."""

    answers: tuple[str, ...] = ()
    """Files or folders of the LLM's answers (train.data)."""
    teacher: str = ""
    """Folder of the LLM's k likeliest tokens for these answers (train.teacher), for loss.kl; empty: none."""
    held_out: float = 0.02
    """About this share of the prompts is measured on and not trained on; chosen by a hash of the prompt's id."""
    rows: int = 8
    """Rows of a batch."""
    tokens: int = 256
    """Tokens of a row; longer answers are cut."""

    def check(self) -> None:
        """Sizes of at least 1, a share below 1."""
        if not self.held_out < 1:
            raise ConfigError(f"held_out must be a share below 1, got {self.held_out}")
        _at_least_one(self, "rows", "tokens")


@dataclasses.dataclass(frozen=True)
class InitSettings(Checked):
    """What the SSM is before training, and which parts of it are trained."""

    source: str = FROM_LLM
    """"llm": some of the LLM's layers with its embedding and head; "scratch": random weights of `model`; else the
    name, folder, .gguf file or hub id of a model with the LLM's vocabulary, or an SSM that is finished: the folder of
    a run or of train.pack, or the name of one that ships."""
    layers: tuple[int, ...] = ()
    """Which layers of the source to keep, in this order; empty: all."""
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """source = "scratch": fields of a Hugging Face config.json (model_type, hidden_size, ...), without vocab_size."""
    vocabulary: int = 0
    """Rows of a reduced head, for the most frequent ids of the answers; 0: one per id."""
    train: tuple[str, ...] = ("layers", "norm", "head")
    """Parts that are trained, of "embed", "layers" or single ones ("layers_3", counted in the SSM), "norm", "head"; the
    others stay the source's own arrays."""

    def check(self) -> None:
        """Known parts; a model where and only where it is needed."""
        unknown = [part for part in self.train if part not in PARTS and not re.fullmatch(r"layers_\d+", part)]
        if unknown or not self.train or len(set(self.train)) != len(self.train):
            raise ConfigError(
                f"train must name some of {', '.join(PARTS)} or single layers such as layers_0, each once, got "
                f"{list(self.train)}"
            )
        if bool(self.model) != (self.source == FROM_SCRATCH):
            raise ConfigError('a [init.model] table belongs to source = "scratch", and only to it')
        if self.source == FROM_SCRATCH and (self.layers or set(self.train) != set(PARTS)):
            raise ConfigError(f'source = "scratch" trains all parts and takes no layers: train = {list(PARTS)}')


@dataclasses.dataclass(frozen=True)
class LossSettings(Checked):
    """What is minimised."""

    cross_entropy: float = 1.0
    """Weight of the cross-entropy on the LLM's tokens."""
    kl: float = 0.0
    """Weight of the divergence from the LLM's distribution; needs data.teacher."""
    logits_mb: int = 64
    """Most MiB of logits per device at a time."""

    def check(self) -> None:
        """At least one loss."""
        if not self.cross_entropy and not self.kl:
            raise ConfigError("cross_entropy and kl are both 0: nothing to minimise")
        _at_least_one(self, "logits_mb")


@dataclasses.dataclass(frozen=True)
class OptimiserSettings(Checked):
    """AdamW with a linear warm-up, a cosine to the end, and clipping."""

    learning_rate: float = 1e-3
    """At the end of the warm-up."""
    warmup: int = 50
    """Steps of the warm-up."""
    final_share: float = 0.1
    """Learning rate of the last step, as a share of the highest."""
    weight_decay: float = 0.01
    """Of matrices; vectors have none."""
    b1: float = 0.9
    """Decay of the mean of gradients."""
    b2: float = 0.99
    """Decay of the mean of their squares."""
    epsilon: float = 1e-8
    """Added to the root of the squares."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it; 0: never."""
    accumulate: int = 1
    """A batch's rows go through the model in this many turns; the result is the same, the memory less."""

    def check(self) -> None:
        """Decays below 1."""
        if not (self.b1 < 1 and self.b2 < 1 and self.final_share <= 1):
            raise ConfigError("b1 and b2 must be below 1, final_share at most 1")
        _at_least_one(self, "accumulate")


@dataclasses.dataclass(frozen=True)
class RunSettings(Checked):
    """How long, with what arithmetic, and what is written down when."""

    steps: int = 1000
    """Batches."""
    seed: int = 0
    """Of random weights and of the order of the data."""
    compute_dtype: str = "auto"
    """Of activations: "float32", "bfloat16", or "auto" (bfloat16 where it is fast). Weights under training and their
    gradients are float32."""
    remat: bool = False
    """Keep only the results of weight matrices for the backward pass; attention is computed twice. Less memory."""
    devices: int = 0
    """How many devices share the rows of a batch; 0: all there are."""
    eval_interval: int = 100
    """Steps between two measurements on held-out answers; 0: only at the end."""
    eval_batches: int = 16
    """Held-out batches of each measurement; the last one takes them all."""
    save_interval: int = 100
    """Steps between two checkpoints; there is always one at the end."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    max_minutes: float = 0.0
    """End with a checkpoint after this time; the same command goes on from there. 0: no limit."""
    tensorboard: bool = True
    """Write metrics for TensorBoard too."""

    def check(self) -> None:
        """Known dtypes, at least one checkpoint."""
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise ConfigError(f"compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {self.compute_dtype!r}")
        _at_least_one(self, "steps", "save_interval", "keep", "eval_batches")


@dataclasses.dataclass(frozen=True)
class BoostSettings(Checked):
    """The rounds of boost-tuning (SpecInfer, section 4)."""

    first: str = ""
    """An SSM that is finished (as for init.source) and stands for round 1, which then trains nothing. Give answers that
    it was not trained on: what it knows by heart is not what it gets right in use. "": round 1 trains one."""
    rounds: int = 3
    """SSMs that are tuned, each on what those before it miss; `first` counts."""
    match: str | int = CONTINUATION
    """When an SSM has got a sample: its whole "continuation" equals the LLM's, or its next so many tokens do."""
    weighting: str = "drop"
    """What becomes of samples that an SSM has got: "drop" them, or give them less weight ("soft")."""
    soft_weight: float = 0.25
    """The weight that "soft" leaves them."""
    own_layers: int = 0
    """How many of its last layers an SSM behind the first tunes, beginning with the first SSM's; all else it shares
    with that one. 0: all SSMs begin as the first did and share nothing but what is frozen."""
    later_steps: int = 0
    """Steps of every round behind the first; 0: run.steps."""
    tree: str = "1,1,1,1"
    """Children per level of each SSM's part of the merged tree that is measured after every round."""

    def check(self) -> None:
        """Known rules."""
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"weighting must be one of {', '.join(WEIGHTINGS)}, got {self.weighting!r}")
        if self.match != CONTINUATION and not (isinstance(self.match, int) and self.match >= 1):
            raise ConfigError(f'match must be "{CONTINUATION}" or a number of tokens, got {self.match!r}')
        _at_least_one(self, "rounds")


@dataclasses.dataclass(frozen=True)
class TrainSettings(Checked):
    """Everything that a file of configs/train/ can set."""

    llm: str = DEFAULT_MODEL
    """The model that the SSM is to foresee: name, folder, .gguf file or hub id."""
    data: DataSettings = DataSettings()
    """Answers and batches."""
    init: InitSettings = InitSettings()
    """The SSM before training."""
    loss: LossSettings = LossSettings()
    """Objective."""
    optimiser: OptimiserSettings = OptimiserSettings()
    """AdamW."""
    run: RunSettings = RunSettings()
    """Length, arithmetic, records."""
    boost: BoostSettings = BoostSettings()
    """Read by train.boost alone."""

    def check(self) -> None:
        """Parts that need each other."""
        if self.loss.kl and not self.data.teacher:
            raise ConfigError("loss.kl needs the LLM's distributions: make them with train.teacher, set data.teacher")


def load_settings(path: str | Path) -> TrainSettings:
    """Read a TOML file.

    Raises:
      ConfigError: no such file, no TOML, an unknown key (the message lists the known ones), or a value out of range.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from error
    return _from_table(TrainSettings(), values, str(path), "")


def settings_from(values: Mapping[str, Any], source: str) -> TrainSettings:
    """The settings of a dict of dicts, as `dataclasses.asdict` makes it; `source` begins error messages."""
    return _from_table(TrainSettings(), dict(values), source, "")


def _from_table(base: Any, values: Mapping[str, Any], source: str, prefix: str) -> Any:
    """The settings with what a table sets; tables in it change the settings in them."""
    fields = {field.name: field for field in dataclasses.fields(base)}
    arguments = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"{source}: unknown key {prefix + key!r}; known are {', '.join(fields)}")
        inner = getattr(base, key)
        if dataclasses.is_dataclass(inner):
            if not isinstance(value, dict):
                raise ConfigError(f"{source}: {prefix + key} must be a table, got {value!r}")
            arguments[key] = _from_table(inner, value, source, f"{prefix}{key}.")
        else:
            value = tuple(value) if isinstance(value, list) else value
            arguments[key] = _checked(f"{source}: {prefix + key}", fields[key].type, value)
    try:
        return dataclasses.replace(base, **arguments)
    except ConfigError as error:
        raise ConfigError(f"{source}: {prefix}{error}") from error
