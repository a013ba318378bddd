"""What devices exchange in a compiled step: two sums a layer, and never weights, caches or logits."""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from decode_cases import LLAMA, OPT
from jax.sharding import NamedSharding
from mesh_cases import SSM, ssm

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import param_shapes
from specinfer_jax.parallel.placement import MeshPrograms
from specinfer_jax.parallel.sharding import WHOLE, make_mesh
from specinfer_jax.parallel.weights import WeightPlacement, joined
from specinfer_jax.speculation.decode import step
from specinfer_jax.speculation.gate import StepCosts
from specinfer_jax.speculation.rules import MSS, NAIVE
from specinfer_jax.speculation.slots import init_state
from specinfer_jax.speculation.state import DecodeParams, StepProgram

V, MAX_LEN = 4_096, 512
WIDE = dataclasses.replace(LLAMA, vocab_size=V, num_heads=8, num_kv_heads=4, width=64, mlp_width=128)
WIDE_OPT = dataclasses.replace(OPT, vocab_size=V, num_heads=8, num_kv_heads=8, width=64, mlp_width=128)
ALL = re.compile(
    r"= \(?(\w+)\[([\d,]*)\][^=]*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


class Exchange(NamedTuple):
    """One collective of a program."""

    kind: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size


def exchanges(config: ModelConfig, data: int, model: int, verification: str = NAIVE) -> list[Exchange]:
    """Collectives of the compiled step with an SSM."""
    mesh = make_mesh(data, model)
    placement = WeightPlacement(mesh, config)
    children = "iid" if verification == MSS else "top_k"
    speculator, ssm_params = ssm("2,1,1", config=dataclasses.replace(SSM, vocab_size=V), children=children)
    program = StepProgram(
        placement.config, (speculator,), adaptive=False, verification=verification, vocab_limit=V - 3,
        splits_vocab=model > 1,
    )  # fmt: skip
    make = functools.partial(
        init_state, program, num_slots=4, max_model_len=MAX_LEN, page_size=8, dtype=jnp.dtype(jnp.float32)
    )
    programs = MeshPrograms(mesh, program, jax.eval_shape(make))
    whole = NamedSharding(mesh, WHOLE)

    def placed(shapes, sharding):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(path)), shapes
        )

    llm = placed(param_shapes(placement.config), lambda path: placement.sharding(joined(path)))
    small = placed(jax.eval_shape(lambda: ssm_params), lambda path: whole)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(make), programs.state_shardings,
    )  # fmt: skip
    costs = placed(jax.eval_shape(lambda: StepCosts(jnp.ones(2), jnp.zeros(1))), lambda path: whole)
    run = programs.jit(
        functools.partial(step, program=program), inputs=("whole", "state", "whole"), outputs="state", donate=1
    )
    text = run.lower(DecodeParams(llm, (small,)), state, costs).compile().as_text()
    found = ALL.findall(text)
    assert len(found) == len(re.findall(r" (?:all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", text))
    return [Exchange(kind, tuple(int(n) for n in shape.split(",") if n)) for _, shape, kind in found]


PASSES = 2
"""Row buckets of the program: the LLM's pass stands in it so often."""
LARGEST = 4 * 8 * 64
"""Activations of a pass, the largest thing that may be exchanged."""


@pytest.mark.parametrize(
    ("config", "verification"),
    [
        pytest.param(WIDE, NAIVE, id="llama"),
        pytest.param(WIDE, MSS, id="llama, drawn trees", marks=pytest.mark.slow),
        pytest.param(WIDE_OPT, NAIVE, id="opt", marks=pytest.mark.slow),
        pytest.param(WIDE_OPT, MSS, id="opt, drawn trees"),
    ],
)
def test_two_sums_a_layer_and_nothing_large(config: ModelConfig, verification: str) -> None:
    few, more = (exchanges(dataclasses.replace(config, num_layers=layers), 1, 4, verification) for layers in (1, 2))
    sums = [sum(e.kind == "all-reduce" for e in found) for found in (few, more)]
    others = [sum(e.kind != "all-reduce" for e in found) for found in (few, more)]
    assert sums[1] - sums[0] == 2 * PASSES
    assert others[1] == others[0]
    for exchange in more:
        assert exchange.size <= LARGEST, exchange
        assert V not in exchange.shape and V // 4 not in exchange.shape, exchange  # logits, whole or in parts
        assert exchange.kind in ("all-reduce", "all-gather"), exchange
        if exchange.kind == "all-gather":  # the winners of each part
            assert exchange.size <= 4 * 4 * 8 * 20, exchange


def test_groups_of_slots_exchange_one_flag_at_most() -> None:
    assert exchanges(WIDE, 4, 1) == []
