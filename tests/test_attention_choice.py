"""Which attention implementation runs where, what happens when a kernel does not compile, and the mesh in use."""

import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from attention_cases import assert_matches, make_case
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels.tree_attention import choose, tree_attention
from pallas_kernels.tree_attention.pallas_gpu import tree_attention_gpu

attend = jax.jit(tree_attention, static_argnames=("scale", "mesh", "kv_axis", "implementation"))


@pytest.mark.parametrize(
    ("platform", "capability", "kernel"),
    [
        ("cpu", None, None),
        ("tpu", None, "pallas_tpu"),
        ("gpu", "8.0", "pallas_gpu"),
        ("gpu", "9.0", "pallas_gpu"),
        ("gpu", "12.0", "pallas_gpu"),
        ("gpu", "7.5", None),  # T4
        ("gpu", None, None),  # not NVIDIA's
    ],
)
def test_every_device_has_its_kernel(platform: str, capability: str | None, kernel: str | None) -> None:
    assert choose.kernel_of(platform, capability) == kernel


@pytest.mark.parametrize(("told", "capability"), [("9.0", "9.0"), ("12.0", "12.0"), ("gfx90a", None), (None, None)])
def test_a_capability_is_a_number(told: str | None, capability: str | None) -> None:
    assert choose.compute_capability(types.SimpleNamespace(compute_capability=told)) == capability
    assert choose.compute_capability(jax.devices()[0]) is None


def test_cpu_takes_xla() -> None:
    assert choose.find_implementation(None, ()) is choose.load("xla")


@pytest.fixture
def broken_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU whose kernel does not fit its shared memory."""

    def refuse(*arrays: Any, scale: float) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded, available 101376\nand more")

    load = choose.load
    monkeypatch.setattr(choose, "kernel_here", lambda: "pallas_gpu")
    monkeypatch.setattr(choose, "load", lambda name: refuse if name == "pallas_gpu" else load(name))
    monkeypatch.setattr(choose, "_WARNED", set())
    choose.compiles.cache_clear()
    yield
    choose.compiles.cache_clear()


def test_a_kernel_that_does_not_compile_is_replaced_with_one_warning(broken_kernel: None) -> None:
    # case B086: the failure is whatever the compiler raises, not NotImplementedError alone.
    case = make_case(prefix=(5, 20), N=4, K=80)
    with pytest.warns(UserWarning, match=r"pallas_gpu does not compile.*RESOURCE_EXHAUSTED.*available 101376$") as told:
        result = attend(*case.arrays, scale=case.scale)
    assert len(told) == 1
    assert_matches(result, case)
    other = make_case(prefix=(5,), N=7, K=96)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_matches(attend(*other.arrays, scale=other.scale), other)


@pytest.mark.parametrize(("Z", "K", "in_place"), [(64, 128, True), (128, 64, True), (64, 64, False), (16, 80, False)])
def test_a_cache_that_a_tpu_would_copy_is_left_to_xla(Z: int, K: int, in_place: bool) -> None:
    # case B084: XLA's own layout of narrow heads has another dimension in the lanes.
    if in_place:
        choose.check_pages((2, 9, Z, K))
    else:
        with pytest.raises(ValueError, match=f"pages of {Z} tokens with heads of {K} .* multiple of 128 tokens"):
            choose.check_pages((2, 9, Z, K))


def test_a_named_kernel_never_falls_back(broken_kernel: None) -> None:
    case = make_case()
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        attend(*case.arrays, scale=case.scale, implementation="pallas_gpu")


@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_gpu"])
def test_a_kernel_of_another_device_raises(name: str) -> None:
    case = make_case(K=64, Z=16)
    with pytest.raises(ValueError, match="interpret"):
        attend(*case.arrays, scale=case.scale, implementation=name)


@pytest.mark.parametrize(("axis", "G", "split"), [("model", 8, True), ("model", 3, False), ("data", 8, False)])
def test_the_mesh_that_is_set_is_used(axis: str, G: int, split: bool) -> None:
    case = make_case(prefix=(0, 21), N=6, G=G, group=2)
    mesh = Mesh(np.array(jax.devices()), (axis,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        out, lse = attend(*case.arrays, scale=case.scale)
    assert_matches((out, lse), case)
    assert out.sharding.shard_shape(out.shape)[2] == (2 * G // 8 if split else 2 * G)


def test_a_kernel_is_tried_and_taken_inside_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, load = [], choose.load

    def interpreted(*arrays: Any, scale: float) -> Any:
        seen.append(arrays[0].shape)
        return tree_attention_gpu(*arrays, scale=scale, interpret=True)

    monkeypatch.setattr(choose, "kernel_here", lambda: "pallas_gpu")
    monkeypatch.setattr(choose, "load", lambda name: interpreted if name == "pallas_gpu" else load(name))
    choose.compiles.cache_clear()
    case = make_case(prefix=(0, 21), N=5, G=8, group=2, Z=16)
    mesh = Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert_matches(attend(*case.arrays, scale=case.scale), case)
    choose.compiles.cache_clear()
    assert seen == [(2, 5, 2, 16)] * 2  # compiled alone, then used, both with one device's share of the heads


def test_inside_a_shard_map_heads_are_split_already() -> None:
    case = make_case(prefix=(0, 21), N=6, G=8, group=2)
    mesh = Mesh(np.array(jax.devices()), ("model",), axis_types=(AxisType.Auto,))
    heads, pages, whole = PartitionSpec(None, None, "model"), PartitionSpec("model"), PartitionSpec()
    split = jax.shard_map(
        lambda *arrays: tree_attention(*arrays, scale=case.scale),
        mesh=mesh,
        in_specs=(heads, heads, heads, pages, pages, whole, whole, whole),
        out_specs=(heads, heads),
        check_vma=False,
    )
    assert_matches(jax.jit(split)(*case.arrays), case)
