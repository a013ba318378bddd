"""Engines on meshes of fake CPU devices."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from decode_cases import LLAMA, params_of

from specinfer_jax.models.config import ModelConfig
from specinfer_jax.models.transformer import Params
from specinfer_jax.parallel.sharding import MODEL, make_mesh
from specinfer_jax.parallel.weights import DEVICE, HOST, WeightPlacement, place_params, replicate
from specinfer_jax.serving.engine import Engine
from specinfer_jax.speculation.rules import NAIVE
from specinfer_jax.speculation.speculator import Speculator
from specinfer_jax.speculation.ssm import SsmSpeculator
from specinfer_jax.speculation.state import DecodeParams, StepProgram
from specinfer_jax.tree.expand import parse_expansion

UNEVEN = dataclasses.replace(LLAMA, vocab_size=61, num_heads=8, num_kv_heads=2, head_size=4)
"""A vocabulary that divides by nothing, and fewer KV heads than devices."""
SSM = dataclasses.replace(LLAMA, num_layers=1, vocab_size=61, num_heads=3, num_kv_heads=3)
"""Three heads divide among no mesh: nothing of an SSM is split."""


def ssm(tree: str, *, config: ModelConfig = SSM, children: str = "top_k") -> tuple[SsmSpeculator, Params]:
    return SsmSpeculator(config, parse_expansion(tree), 256, config.vocab_size, children), params_of(config, 1)


def mesh_engine(
    data: int, model: int, *, config: ModelConfig = LLAMA, speculators: Sequence[Speculator] = (),
    params: Sequence[Params] = (), num_slots: int = 4, max_model_len: int = 64, verification: str = NAIVE,
    adaptive: bool = False, vocab_limit: int | None = None, memory: str = DEVICE,
) -> Engine:  # fmt: skip
    """An engine on `data * model` devices; 0, 0 is one without a mesh. `memory`: where the LLM's weights lie."""
    mesh = None if data == 0 else make_mesh(data, model)
    placed, laid_out = params_of(config), config
    if mesh is not None:
        placement = WeightPlacement(mesh, config, memory)
        placed, laid_out = place_params(placed, placement), placement.config
        params = [replicate(own, mesh) for own in params]
    program = StepProgram(
        laid_out, tuple(speculators), adaptive=adaptive, max_rows=16, verification=verification,
        vocab_limit=vocab_limit if mesh is None else vocab_limit or config.vocab_size,
        splits_vocab=mesh is not None and mesh.shape[MODEL] > 1, offloads=memory == HOST,
    )  # fmt: skip
    return Engine(
        DecodeParams(placed, tuple(params)), program,
        num_slots=num_slots, max_model_len=max_model_len, page_size=8, dtype=jnp.float32, mesh=mesh,
    )  # fmt: skip
