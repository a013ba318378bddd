"""The kernels, interpreted, against the float64 oracle on series of random cases; races, copies, odd sizes."""

import functools
import itertools
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_matches, make_case, random_case
from attention_variants import RUN, SIMULATED_TPU, VARIANTS
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from pallas_kernels.tree_attention import pallas_tpu
from pallas_kernels.tree_attention.api import split_heads
from pallas_kernels.tree_attention.block_sizes import gpu_blocks
from pallas_kernels.tree_attention.pallas_tpu import tree_attention_tpu

SHAPES = 6
"""Of the series in the default run: compiling an interpreted kernel takes seconds, running it milliseconds."""


def check_random_case(name: str, seed: int, shapes: int) -> None:
    case = random_case(seed, shapes=shapes)
    assert_matches(RUN[name](*case.arrays, scale=case.scale), case)


@pytest.fixture
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The simulated TPU prints what it finds."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", VARIANTS)
def test_random_cases(name: str, seed: int, no_races: None) -> None:
    check_random_case(name, seed, shapes=SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500))
@pytest.mark.parametrize("name", VARIANTS)
def test_many_random_cases(name: str, seed: int, no_races: None) -> None:
    check_random_case(name, seed, shapes=50)


def test_the_series_covers_what_it_should() -> None:
    cases = [random_case(seed, shapes=SHAPES) for seed in range(40)]
    lengths = np.concatenate([case.prefix_len_B for case in cases])
    assert {0, 1} <= set(lengths.tolist())
    assert {str(case.q_BQHK.dtype) for case in cases} == {"float32", "bfloat16"}
    assert len({case.q_BQHK.shape[3] for case in cases}) >= 4
    assert any(len(case.row_Q) < case.k_new_BNGK.shape[1] for case in cases)
    assert any((case.parent_BN[:, 1:] == case.parent_BN.shape[1]).any() for case in cases)


@pytest.mark.parametrize("wait", ["never", "for the other half"])
def test_a_race_would_be_found(wait: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    case = make_case(prefix=(90,), N=4, G=2, K=128, Z=16)
    if wait == "never":
        monkeypatch.setattr(pallas_tpu.Prefix, "wait", lambda self, block, *, whole: None)
    else:
        half = pallas_tpu.Prefix.half
        monkeypatch.setattr(pallas_tpu.Prefix, "half", lambda self, step, block: half(self, step, 0 * block))
    monkeypatch.setattr(pallas_tpu, "tpu_blocks", lambda **_: (16, 1))
    simulated = functools.partial(tree_attention_tpu, scale=case.scale, interpret=SIMULATED_TPU)
    try:
        out, _ = jax.jit(simulated)(*case.arrays)
        wrong = not np.isfinite(np.asarray(out)).all()
    except Exception as error:  # the simulation itself may notice that a copy was never waited for
        wrong = "sem" in str(error).lower()
        pltpu.reset_tpu_interpret_mode_state()
    assert wrong or "RACE DETECTED" in capfd.readouterr().out


# case B084: heads narrower than 128 lanes, few rows; B086: heads that are no powers of two.
@pytest.mark.parametrize(
    ("K", "N", "dtype"),
    [
        (16, 1, jnp.float32), (48, 5, jnp.bfloat16), (64, 8, jnp.bfloat16), (80, 63, jnp.float32),
        (96, 5, jnp.float32), (128, 8, jnp.bfloat16), (192, 5, jnp.bfloat16), (256, 63, jnp.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_gpu"])
def test_any_head_size(name: str, K: int, N: int, dtype: jnp.dtype) -> None:
    case = make_case(prefix=(37,), N=N, K=K, Z=16, group=2, dtype=dtype)
    assert_matches(RUN[name](*case.arrays, scale=case.scale), case)


@pytest.mark.parametrize("Z", [48, 128])
@pytest.mark.parametrize("name", ["simulated_tpu", "pallas_gpu"])
def test_any_page_size(name: str, Z: int, no_races: None) -> None:
    case = make_case(prefix=(Z + 9, 2 * Z, 0), N=5, K=64, Z=Z, table_pages=2, G=2)
    assert_matches(RUN[name](*case.arrays, scale=case.scale), case)


@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_gpu"])
def test_the_largest_pass(name: str) -> None:
    case = make_case(prefix=(130,), N=256, K=64, Z=64, table_pages=4, group=8)
    assert_matches(RUN[name](*case.arrays, scale=case.scale), case)


def test_queries_of_half_precision_over_a_float32_cache() -> None:
    exact = make_case(prefix=(21, 3), N=6, K=64, Z=16)
    mixed = exact._replace(q_BQHK=exact.q_BQHK.astype(jnp.bfloat16))
    for name in ("reference", "xla", "pallas_tpu", "pallas_gpu"):
        assert_matches(RUN[name](*mixed.arrays, scale=mixed.scale), mixed)


@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_gpu"])
def test_heads_are_split_over_a_mesh(name: str) -> None:
    case = make_case(prefix=(0, 21), N=6, G=4, group=2, K=64, Z=16)
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    one_device = functools.partial(VARIANTS[name], scale=case.scale)
    out, lse = jax.jit(split_heads(one_device, mesh=mesh, kv_axis="model", kv_heads=4))(*case.arrays)
    assert_matches((out, lse), case)
    assert out.sharding.shard_shape(out.shape)[2] == 2


def test_a_head_that_no_gpu_tile_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="head size of 320; 256"):
        gpu_blocks(16, 320, 2)


class Traffic:
    """Bytes that one call of the TPU kernel moves between HBM and VMEM: blocks by their index maps, pages by copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied, self.grid_spec = 0, pltpu.PrefetchScalarGridSpec(0)
        make_copy, call = pltpu.make_async_copy, pallas_tpu.pl.pallas_call

        def counted_copy(source: Any, target: Any, semaphore: Any) -> Any:
            copy = make_copy(source, target, semaphore)
            start = copy.start

            def counted_start() -> None:
                jax.debug.callback(self.count, np.int64(math.prod(source.shape) * source.dtype.itemsize))
                start()

            return types.SimpleNamespace(start=counted_start, wait=copy.wait)

        def spying_call(kernel: Any, *, grid_spec: Any, **options: Any) -> Any:
            self.grid_spec = grid_spec
            return call(kernel, grid_spec=grid_spec, **options)

        monkeypatch.setattr(pltpu, "make_async_copy", counted_copy)
        monkeypatch.setattr(pallas_tpu.pl, "pallas_call", spying_call)

    def count(self, size: np.ndarray) -> None:
        self.copied += int(size)

    def of_blocks(self, itemsizes: Sequence[int]) -> int:
        """A block is moved where its index differs from the grid step before."""
        moved, specs = 0, [*self.grid_spec.in_specs, *self.grid_spec.out_specs]
        for spec, itemsize in zip([s for s in specs if s.block_shape is not None], itemsizes, strict=True):
            indices = [spec.index_map(*step) for step in np.ndindex(self.grid_spec.grid)]
            changes = 1 + sum(a != b for a, b in itertools.pairwise(indices))
            moved += changes * math.prod(size or 1 for size in spec.block_shape) * itemsize
        return moved


@pytest.mark.parametrize(("Q", "group", "Z", "K"), [(64, 4, 128, 128), (1, 1, 128, 64)])
def test_the_mask_costs_nothing_with_context(
    Q: int, group: int, Z: int, K: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, G = 32_768, 2
    case = make_case(prefix=(context - 5,), N=Q, G=G, group=group, K=K, Z=Z, table_pages=context // Z)
    traffic = Traffic(monkeypatch)
    counted = functools.partial(tree_attention_tpu, scale=case.scale, interpret=True)
    out, _ = jax.block_until_ready(jax.jit(counted)(*case.arrays))
    jax.effects_barrier()
    assert np.isfinite(np.asarray(out)).all()
    keys_and_values = 2 * G * context * K * 4
    assert traffic.copied == keys_and_values  # whole pages, each once
    # q, words, new keys and values, output, log-sum-exp: all four bytes
    needed = keys_and_values + 2 * case.q_BQHK.nbytes
    assert traffic.copied + traffic.of_blocks([4] * 6) <= 1.1 * needed
