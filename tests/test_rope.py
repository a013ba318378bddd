"""Rotary embedding: every scaling rule gives transformers' frequencies bit for bit, and its logits far out."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import llama_config
from decoder_cases import run_rows, tiny_model
from model_golden_cases import ROPE

from specinfer_jax.models.config import RopeConfig
from specinfer_jax.models.families import config_from_hf
from specinfer_jax.models.layers import rope_angles, rope_inverse_frequencies, rotate


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "model_rope.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ROPE)
def test_frequencies_are_those_of_transformers(name: str) -> None:  # case B033
    case = ROPE[name]
    config = config_from_hf(case.config)
    assert config.rope is not None
    longest = jnp.asarray([max(case.positions) + 1], jnp.int32)
    frequencies, factor = rope_inverse_frequencies(config.rope, config.head_size, longest)
    np.testing.assert_array_equal(np.asarray(frequencies)[0], golden()[f"{name}.inverse_frequencies"])
    assert factor == golden()[f"{name}.attention_factor"]


@pytest.mark.parametrize("name", ROPE)
def test_logits_at_positions_0_to_20000(name: str) -> None:  # case B033
    case = ROPE[name]
    assert {0, 100, 5000, 20000} <= set(case.positions)
    longest = max(case.positions) + 1  # transformers computes one pass for the longest position in it
    logits, _ = run_rows(tiny_model(case.config), case.tokens, positions=case.positions, prompt_len=longest)
    np.testing.assert_allclose(logits, golden()[f"{name}.logits"], rtol=0, atol=1e-5)


def test_the_rules_differ() -> None:  # case B033
    """A rule that is ignored gives the plain frequencies; the goldens must not let that pass."""
    plain = golden()["default.logits"]
    for name in ROPE:
        if name != "default":
            assert np.abs(golden()[f"{name}.logits"] - plain).max() > 0.1, name
    np.testing.assert_array_equal(golden()["yarn_mscale_alone.logits"], golden()["yarn.logits"])


def test_dynamic_base_follows_each_token_not_the_pass() -> None:  # case B033
    rope = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position=32)
    lengths = jnp.asarray([1, 32, 33, 60, 128], jnp.int32)
    together, _ = rope_inverse_frequencies(rope, 16, lengths)
    for row, length in enumerate(np.asarray(lengths)):
        alone, _ = rope_inverse_frequencies(rope, 16, jnp.asarray([length], jnp.int32))
        np.testing.assert_array_equal(together[row], alone[0])
    plain, _ = rope_inverse_frequencies(RopeConfig(), 16)
    np.testing.assert_array_equal(together[:2], np.repeat(np.asarray(plain), 2, axis=0))
    assert (np.diff(np.asarray(together)[1:, 1:], axis=0) < 0).all()
    with pytest.raises(ValueError, match="context length of every token"):
        rope_inverse_frequencies(rope, 16)


def test_dynamic_leaves_the_rest_of_the_program_in_float32() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position=32)
    frequencies, _ = jax.jit(lambda length: rope_inverse_frequencies(rope, 16, length))(jnp.asarray([40], jnp.int32))
    assert frequencies.dtype == jnp.float32
    assert jnp.asarray(1.0).dtype == jnp.float32


def test_angles_are_float32_and_bfloat16_heads_round_once() -> None:  # case B096
    config = config_from_hf(llama_config(head_dim=64))
    position = jnp.asarray([4000], jnp.int32)
    angles = rope_angles(config, position, position + 1)
    assert angles is not None
    frequencies = 1 / 10_000.0 ** (np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(angles.cos_T1h[0, 0], np.cos(4000 * frequencies), rtol=0, atol=2e-4)
    x_THK = jax.random.normal(jax.random.key(0), (1, 4, 64)).astype(jnp.bfloat16)
    exact = rotate(x_THK.astype(jnp.float32), angles)
    np.testing.assert_array_equal(rotate(x_THK, angles), exact.astype(jnp.bfloat16))


def test_rotation_keeps_products_of_equal_distance() -> None:  # case B033
    config = config_from_hf(llama_config(head_dim=16))
    q, k = jax.random.normal(jax.random.key(1), (2, 1, 1, 16))
    products = []
    for start in (0, 100, 2000):
        position = jnp.asarray([start, start + 7], jnp.int32)
        turned = rotate(jnp.concatenate([q, k]), rope_angles(config, position, position + 1))
        products.append(float(jnp.vdot(turned[0], turned[1])))
    np.testing.assert_allclose(products, products[0], rtol=0, atol=2e-3)
