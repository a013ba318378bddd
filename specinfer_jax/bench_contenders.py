"""Who takes part in the benchmark: incremental decoding, the best chain of every speculator, all speculators' trees."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specinfer_jax.config import AUTO, Speculation
from specinfer_jax.errors import ConfigError

if TYPE_CHECKING:
    from specinfer_jax.llm import LLM
    from specinfer_jax.opened import Model
    from specinfer_jax.serving.engine import Engine

Mode = Literal["incremental", "sequence", "tree"]
MAX_CHAIN_DEPTH = 8
"""Longest chain of an SSM that is tried."""


class Contender(NamedTuple):
    """One way to decode."""

    mode: Mode
    """incremental, sequence (a chain of one speculator) or tree (all speculators)."""
    engine: "Engine"
    """Compiled and warm."""


def make_contenders(
    model: "Model", speculation: Speculation, *, dtype: str, max_model_len: int | None, max_num_seqs: int | None,
    max_chain_depth: int, seconds: Callable[["Engine"], float],
) -> list[Contender]:  # fmt: skip
    """Incremental decoding first, then one chain per speculator, then the trees; weights are shared.

    Args:
      model: the LLM.
      speculation: who proposes trees.
      dtype, max_model_len, max_num_seqs: as for `LLM`.
      max_chain_depth: an SSM's chain has the depth from 1 to this that was fastest in a trial.
      seconds: the trial.
    """
    from specinfer_jax.llm import LLM

    plain, trees = (
        LLM(model, speculation=s, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        for s in (Speculation.off(), speculation)
    )
    chains = []
    for speculator, params in _offered(model, speculation, trees):
        best, least = None, float("inf")
        for chain in _chains(speculator, max_chain_depth):
            engine = _engine_of(trees, chain, params)
            # The trial's seconds matter only where there is a choice.
            needed = seconds(engine) if max_chain_depth > 1 else 0.0
            if needed < least:
                best, least = engine, needed
        assert best is not None
        chains.append(Contender("sequence", best))
    return [Contender("incremental", plain.engine), *chains, Contender("tree", trees.engine)]


def _offered(model: "Model", speculation: Speculation, trees: "LLM") -> list[tuple[Any, Any]]:
    """(speculator, parameters) of all, SSMs included that `tree="auto"` has declined."""
    from specinfer_jax.assemble import build_program, offered_ssms

    own = list(zip(trees.engine.program.speculators, trees.engine.params.speculators, strict=True))
    if speculation.tree not in (None, AUTO) or not offered_ssms(model, speculation, trees.dtype):
        return own
    ssms = dataclasses.replace(speculation, tree="1", ngram=False)
    program, params = build_program(model, ssms, dtype=trees.dtype, num_slots=trees.engine.num_slots)
    without_ssms = [pair for pair in own if pair[0].cached_model is None]
    return [*zip(program.speculators, params.speculators, strict=True), *without_ssms]


def _chains(speculator: Any, max_depth: int) -> Iterator[Any]:
    """The speculator one child wide: an SSM at every depth, n-grams as deep as they are (their match says how deep)."""
    from specinfer_jax.speculation.ngram import NgramSpeculator
    from specinfer_jax.speculation.ssm import SsmSpeculator
    from specinfer_jax.tree.expand import Expansion

    if isinstance(speculator, SsmSpeculator):
        for depth in range(1, max_depth + 1):
            yield dataclasses.replace(speculator, expansion=Expansion((1,) * depth))
    elif isinstance(speculator, NgramSpeculator):
        yield dataclasses.replace(speculator, branch_depths=speculator.branch_depths[:1])
    else:
        raise ConfigError(f"the benchmark knows no chain of a {type(speculator).__name__}")


def _engine_of(trees: "LLM", chain: Any, params: Any) -> "Engine":
    """An engine like that of the trees with one speculator, the chain."""
    from specinfer_jax.assemble import PAGE_SIZE
    from specinfer_jax.serving.engine import Engine
    from specinfer_jax.speculation.state import DecodeParams

    engine = Engine(
        DecodeParams(trees.engine.params.llm, (params,)),
        dataclasses.replace(trees.engine.program, speculators=(chain,)), num_slots=trees.engine.num_slots,
        max_model_len=trees.max_model_len, page_size=PAGE_SIZE, dtype=trees.dtype,
    )  # fmt: skip
    engine.warm_up()
    return engine
