"""From a training run to an SSM as it ships: what differs from the LLM, in 8 bits, with its acceptance.

python -m train.pack out/ssm --out ssms/NAME --answers out/answers
python -m train.pack out/boost/ssm-2 --out ssms/NAME-2 --answers out/answers --beside ssms/NAME

Acceptance by depth and child rank is counted teacher-forced on answers held out of the training, with the weights as
they ship; `tree="auto"` and `tree="wide"` are made from it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specinfer_jax.checkpoint.ssm_folder import SsmFolder, read_ssm, write_ssm
from specinfer_jax.compile_cache import enable_compile_cache
from specinfer_jax.errors import ConfigError, SpecInferError
from specinfer_jax.opened import Model, open_model
from specinfer_jax.tree.rates import AcceptanceRates, count_ranks
from train.answers import Answer, read_answers, split_answers
from train.evaluate import answer_ranks
from train.export import open_finished, open_trained
from train.packing import BatchPlan
from train.settings import FROM_LLM

DEPTHS, RANKS = 4, 16
"""Told apart in the acceptance; nodes deeper than the last depth count with it."""
ROWS, TOKENS = 4, 512


def acceptance_of(ssm: Model, answers: Sequence[Answer]) -> AcceptanceRates:
    """Chance by depth and rank that a child is the LLM's next token, counted on the LLM's answers."""
    plan = BatchPlan(answers, rows=ROWS, tokens=min(TOKENS, ssm.config.max_position))
    ranks = answer_ranks(ssm.params, ssm.config, plan)
    return AcceptanceRates.from_counts(*count_ranks(ranks.values(), num_depths=DEPTHS, num_ranks=RANKS))


def pack(
    run: Path, out: Path, answers: Sequence[Answer], *, step: int | None = None, beside: Sequence[Path] = ()
) -> tuple[int, AcceptanceRates]:
    """Write the SSM of a run beside its LLM.

    Args:
      run: folder of `train.distill`, or of one round of `train.boost`.
      out: folder to write.
      answers: those held out of the training among them are counted on.
      step: which checkpoint; None: the newest.
      beside: packed SSMs in the same parent folder as `out`; what the run took over from one is a reference to it.

    Returns:
      Bytes written, and the acceptance.

    Raises:
      ConfigError, CheckpointError: the folder holds no finished checkpoint, or `beside` no packed SSM in that folder.
      TrainDataError: none of the answers was held out.
    """
    for folder in beside:
        if folder.absolute().parent != out.absolute().parent:
            raise ConfigError(f"{folder} is not in {out.absolute().parent}, where {out.name} would look for it")
    settings = open_trained(run, step=step).settings
    llm = open_model(settings.llm, dtype=jnp.dtype(jnp.float32))
    read: dict[Path, SsmFolder] = {}
    others = {folder.name: read_ssm(folder, llm.params, dtype=jnp.float32, opened=read).params for folder in beside}
    # Frozen parts must be the LLM's own arrays, to be told from those of the SSM.
    source = llm if settings.init.source == FROM_LLM else open_finished(settings.init.source, llm)
    opened = open_trained(run, step=step, source=source)
    held = split_answers(answers, held_out=settings.data.held_out)[1]
    config = opened.model.config

    def write(acceptance: Any = None) -> int:
        return write_ssm(
            out, config, opened.model.params,
            llm_name=settings.llm, llm_params=llm.params, acceptance=acceptance, beside=others,
        )  # fmt: skip

    write()
    shipped = read_ssm(out, llm.params, dtype=jnp.float32)
    rates = acceptance_of(opened.model._replace(params=shipped.params), held)
    size = write(rates.as_dict())
    return size, rates


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack, and tell size and success."""
    parser = argparse.ArgumentParser(prog="python -m train.pack", description="Make an SSM that ships of a run.")
    parser.add_argument("run", type=Path, metavar="FOLDER", help="of train.distill, or FOLDER/ssm-1 of train.boost")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="ssm.json and weights.npz go there")
    parser.add_argument("--answers", nargs="+", required=True, metavar="PATH", help="files, or folders of train.data")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument(
        "--beside", type=Path, action="append", default=[], metavar="FOLDER",
        help="a packed SSM beside OUT to refer to, for one boosted upon it; again for several",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    enable_compile_cache()
    try:
        size, rates = pack(
            options.run, options.out, read_answers(options.answers), step=options.step, beside=options.beside
        )
    except SpecInferError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    shares = ", ".join(f"{100 * share:.1f}" for share in rates.success()[:5])
    print(f"{options.out}: {size / 1e6:.1f} MB; success of the first 1 to 5 children {shares} %")


if __name__ == "__main__":
    main()
