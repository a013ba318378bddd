"""From a user's choices to what the engine runs: the step program, its speculators and their trees, limits."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specinfer_jax.checkpoint.ssm_folder import SsmFolder, shipped_for
from specinfer_jax.config import AUTO, DEFAULT_TREE, WIDE, Speculation
from specinfer_jax.errors import ConfigError, SpeculationError
from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.kv_cache import cache_bytes
from specinfer_jax.opened import Model, choose_max_model_len, open_ssm, stored_params
from specinfer_jax.parallel.sharding import DATA, MODEL
from specinfer_jax.parallel.weights import (
    DEVICE,
    HOST,
    WeightPlacement,
    cache_share,
    place_params,
    replicate,
)
from specinfer_jax.speculation.ngram import NgramSpeculator
from specinfer_jax.speculation.pass_costs import pass_seconds
from specinfer_jax.speculation.speculator import Speculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.speculation.tree_choice import (
    MAX_DEPTH,
    NEED,
    NEED_BESIDE_NGRAMS,
    WIDE_NGRAM,
    fastest_ssm,
    widest_trees,
)
from specinfer_jax.tree.expand import parse_expansion
from specinfer_jax.tree.optimal import CATCH_UP_ROWS, WIDE_NODES
from specinfer_jax.tree.shape import MAX_TREE_NODES, TreeShape
from specinfer_jax.tree.token_tree import ROW_BUCKETS

PAGE_SIZE = 128
"""Tokens of one cache page; one page is one block of the attention loop on CPU (docs/log.md)."""

CPU_MAX_ROWS, DEVICE_MAX_ROWS = 16, 64
"""Rows of the largest pass where the gate picks nodes; on CPU more rows cost more than they gain (docs/log.md)."""


def build_program(
    llm: Model,
    speculation: Speculation,
    *,
    dtype: jnp.dtype,
    num_slots: int = 1,
    mesh: Mesh | None = None,
    memory: str = DEVICE,
) -> tuple[StepProgram, DecodeParams]:
    """The static step and its parameters; `tree="auto"` may measure passes first, once per machine.

    Args:
      llm: the verifying model.
      speculation: who proposes trees.
      dtype: of weights and caches.
      num_slots: requests side by side.
      mesh: devices to run on; None: the default one.
      memory: where the LLM's weights lie on a mesh.

    Raises:
      ConfigError: the LLM was loaded for another mesh.
      SpeculationError: a tree does not parse or is too large, an SSM's vocabulary is not the LLM's, or the LLM has a
        reduced head.
    """
    if llm.config.output_vocab_size is not None:
        raise SpeculationError(f"{llm.location} has a reduced head; it can propose as an SSM, but not be the LLM")
    vocab_limit = min(llm.tokenizer.vocab_size, llm.config.vocab_size)  # what no tokenizer knows is padding
    llm_config, llm_params = _laid_out(llm, mesh, memory)
    on_mesh = {"splits_vocab": mesh is not None and mesh.shape[MODEL] > 1, "offloads": memory == HOST}
    if not speculation.enabled:
        return StepProgram(llm_config, vocab_limit=vocab_limit, **on_mesh), DecodeParams(llm_params)
    children, verification = speculation.pair
    speculators: list[Speculator] = []
    params: list[Any] = []
    max_rows = CPU_MAX_ROWS if jax.devices()[0].platform == "cpu" else DEVICE_MAX_ROWS
    ssms = offered_ssms(llm, speculation, dtype)
    if speculation.tree not in (None, AUTO, WIDE) and not ssms:
        raise SpeculationError("a tree of children per level needs an SSM: give ssms=[...] as well")
    for ssm in ssms:
        _check_vocabulary(llm, ssm)
    if mesh is not None and speculation.tree in (None, AUTO):
        # What passes cost is measured on one device alone; where it is not known, take the most tokens per step.
        speculation = dataclasses.replace(speculation, tree=WIDE)
    shapes = _choose_shapes(llm, ssms, speculation, num_slots=num_slots, max_rows=max_rows, dtype=dtype)
    for number, (ssm, shape) in enumerate(zip(ssms, shapes, strict=True)):
        if shape is not None:
            name = "ssm" if len(ssms) == 1 else f"ssm{number + 1}"
            speculators.append(_ssm_speculator(llm, ssm, shape, children=children, number=number, name=name))
            params.append(ssm.params if mesh is None else replicate(stored_params(ssm), mesh))
    has_none_left = not speculators and speculation.ngram is None  # all SSMs cost more than they would gain
    if speculation.uses_ngram or has_none_left:
        is_wide = speculation.tree == WIDE and bool(speculators)
        speculators.append(NgramSpeculator(branch_depths=WIDE_NGRAM) if is_wide else NgramSpeculator())
        params.append(())
    # What streams takes as long whatever its rows; and of several processes none may go by its own clock.
    adaptive = speculation.cuts_trees and memory == DEVICE and jax.process_count() == 1
    program = StepProgram(
        llm_config, tuple(speculators), adaptive=adaptive, max_rows=max_rows,
        verification=verification, vocab_limit=vocab_limit, **on_mesh,
    )  # fmt: skip
    if program.buckets[-1] > MAX_TREE_NODES + 1:
        raise SpeculationError(
            f"the speculators together propose up to {program.num_rows - 1} nodes; at most {MAX_TREE_NODES} fit into "
            "one verified pass: use smaller trees or fewer speculators"
        )
    return program, DecodeParams(llm_params, tuple(params))


def _laid_out(llm: Model, mesh: Mesh | None, memory: str) -> tuple[ModelConfig, Any]:
    """(config, parameters) of the LLM as the program needs them."""
    if mesh is None:
        if llm.placement is not None:
            raise ConfigError(f"{llm.location} was loaded for a mesh; give the LLM the same mesh")
        return llm.config, llm.params
    placement = WeightPlacement(mesh, llm.config, memory)
    if llm.placement not in (None, placement):
        raise ConfigError(f"{llm.location} was loaded for another mesh or memory than the LLM's")
    return placement.config, llm.params if llm.placement else place_params(llm.params, placement)


def offered_ssms(llm: Model, speculation: Speculation, dtype: jnp.dtype) -> list[Model]:
    """The SSMs asked for, or those that ship for the LLM; `tree="auto"` may decline them.

    Raises:
      SpeculationError: one is neither a name, a path nor a model.
    """
    ssms: Sequence[Any] = shipped_for(stored_params(llm)) if speculation.ssms is None else speculation.ssms
    opened: dict[str, Model] = {llm.location: llm}
    folders: dict[Path, SsmFolder] = {}
    result = []
    for ssm in ssms:
        if isinstance(ssm, Model):
            result.append(ssm)
        elif isinstance(ssm, str | Path):
            if str(ssm) not in opened:  # the same weights are never loaded twice
                opened[str(ssm)] = open_ssm(ssm, llm, dtype=dtype, opened=folders)
            result.append(opened[str(ssm)])
        else:
            raise SpeculationError(f"an SSM must be a model name, a path or a loaded Model, got {type(ssm).__name__}")
    return result


def _choose_shapes(
    llm: Model, ssms: Sequence[Model], speculation: Speculation, *, num_slots: int, max_rows: int, dtype: jnp.dtype
) -> list[TreeShape | None]:
    """The tree of every SSM; None: it does not take part."""
    rates, tree = [ssm.acceptance for ssm in ssms], speculation.tree
    if tree == WIDE:
        return [*widest_trees(rates, max_nodes=WIDE_NODES - (sum(WIDE_NGRAM) if speculation.uses_ngram else 0))]
    if tree not in (None, AUTO):
        return [parse_expansion(tree)] * len(ssms)
    known = [m for m, own in enumerate(rates) if own is not None]
    if not known:
        return [parse_expansion(DEFAULT_TREE)] * len(ssms)
    buckets = [rows for rows in ROW_BUCKETS if rows <= max_rows and rows != 2]
    draft_rows = [1, *(rows for rows in ROW_BUCKETS if 2 < rows < max_rows), max(max_rows, MAX_DEPTH + CATCH_UP_ROWS)]

    def seconds(model: Model, rows: Sequence[int]) -> dict[int, float]:
        return pass_seconds(model.config, model.params, rows, num_slots=num_slots, page_size=PAGE_SIZE, dtype=dtype)

    choice = fastest_ssm(
        [own for own in rates if own is not None],
        verify_seconds=seconds(llm, buckets),
        draft_seconds=[seconds(ssms[m], draft_rows) for m in known],
        need=NEED_BESIDE_NGRAMS if speculation.uses_ngram else NEED,
    )
    shapes: list[TreeShape | None] = [None] * len(ssms)
    if choice is not None:
        shapes[known[choice.ssm]] = choice.shape
    return shapes


def _check_vocabulary(llm: Model, ssm: Model) -> None:
    differences = llm.tokenizer.first_differences(ssm.tokenizer)
    if differences:
        listed = "; ".join(f"id {d.token_id} is {d.piece!r} and {d.other_piece!r}" for d in differences)
        raise SpeculationError(
            f"SSM {ssm.location} has another vocabulary than {llm.location}: {listed}; an SSM needs the LLM's tokenizer"
        )


def _ssm_speculator(
    llm: Model, ssm: Model, shape: TreeShape, *, children: str, number: int, name: str
) -> SsmSpeculator:
    return SsmSpeculator(
        config=ssm.config,
        expansion=shape,
        max_len=choose_max_model_len(ssm.config, None),
        # What only one side has is padding: the LLM could never have produced it as text.
        vocab_limit=ssm.config.output_vocab_size
        or min(llm.tokenizer.vocab_size, ssm.tokenizer.vocab_size, llm.config.vocab_size, ssm.config.vocab_size),
        children=children,
        number=number,
        name=name,
        rates=ssm.acceptance,
    )


def check_memory(
    program: StepProgram, *, num_slots: int, max_model_len: int, dtype: jnp.dtype, num_pages: int | None = None,
    mesh: Mesh | None = None,
) -> int:  # fmt: skip
    """Bytes of all caches, each of as many pages, refused before allocation if the device cannot hold them.

    Raises:
      ConfigError: says what is needed, what there is, and which settings to lower.
    """
    configs = [program.llm, *(s.cached_model.config for s in program.speculators if s.cached_model is not None)]
    needed = sum(
        cache_bytes(
            config, num_slots=num_slots, max_model_len=max_model_len, page_size=PAGE_SIZE,
            itemsize=jnp.dtype(dtype).itemsize, num_pages=num_pages,
        )
        // (cache_share(config, mesh) if config is program.llm else 1 if mesh is None else mesh.shape[DATA])
        for config in configs
    )  # fmt: skip
    available = _device_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"the caches need {needed / 2**30:.1f} GiB and the device has {available / 2**30:.1f} GiB; "
            f"lower max_model_len ({max_model_len}) or max_num_seqs ({num_slots}), or give fewer cache_tokens"
        )
    return needed


def _device_memory() -> int | None:
    """Memory of the default device in bytes, None where it cannot be told."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return int(stats.get("bytes_limit", 0)) or None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.platform == "cpu" else None
    except (ValueError, OSError):
        return None
