"""Imports go down only, and what is free of jax stays free of it."""

import ast
import graphlib
import subprocess
import sys

import pytest
from source_tree import PACKAGES, ROOT, imports, loaded_with, modules, parsed

# Lowest first; a module may import its own tier and those below. The longest matching prefix decides.
TIERS = (
    (
        "errors", "notation", "config", "metrics", "outputs", "prompts", "serving.request_manager", "serving.schedule",
        "serving.pages", "serving.request_speculation", "serving.plain_steps", "models.config",
        "ssms", "speculation.rules", "sampling_params",
    ),
    ("pallas_kernels", "tree", "parallel.sharding", "parallel.weights"),
    ("speculation.sampling", "speculation.randomness", "speculation.verifier", "speculation.mss", "models.kv_cache"),
    ("models",),
    ("speculation", "parallel.offload", "parallel.placement"),
    ("checkpoint", "tokenizer", "chat_template", "detokenizer", "parallel.multihost"),
    ("serving.engine", "serving.warm_up", "serving.device", "serving.progress", "serving.request", "serving.inbox"),
    (
        "llm", "assemble", "opened", "completion", "progress_bar", "vocabulary", "compile_cache", "bench", "visualize",
        "trace", "bench_contenders", "serving.async_protocol",
    ),
    ("serving.openai_api", "serving.openai", "async_llm", "cli"),
    ("train", "benchmarks"),
)  # fmt: skip
FREE_OF_JAX = (
    "config", "errors", "metrics", "outputs", "prompts", "serving.request_manager", "serving.schedule", "serving.pages",
    "serving.request_speculation", "serving.plain_steps", "cli",
)  # fmt: skip
FACADE = "specinfer_jax"
"""Hands out LLM and Model when they are asked for, so it alone reaches upwards, inside a function."""
EMPTY_PACKAGES = {"specinfer_jax.serving", "specinfer_jax.parallel"}

SHIPPED = sorted(name for name in modules() if name.partition(".")[0] in PACKAGES)


def full_name(name: str) -> str:
    return name if name in ("pallas_kernels", "train", "benchmarks") else f"{FACADE}.{name}"


def is_inside(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def tier(module: str) -> int:
    found = [
        (len(name), rank)
        for rank, names in enumerate(TIERS)
        for name in map(full_name, names)
        if is_inside(module, name)
    ]
    assert found, f"{module} stands in no tier: give it one in TIERS"
    return max(found)[1]


def ours(module: str, *, at_load: bool = False) -> set[str]:
    found = {found.module for found in imports(module) if found.at_load or not at_load}
    return {name for name in found if name in modules() and name != module}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down(module: str) -> None:
    if module == FACADE:
        assert ours(module, at_load=True) == {"specinfer_jax.config"}
        return
    if module in EMPTY_PACKAGES:
        assert not imports(module), f"{module} must stay empty: importing anything in it would load what it imports"
        return
    too_high = {name for name in ours(module) - {FACADE} if tier(name) > tier(module)}
    assert not too_high, f"{module} stands below {sorted(too_high)} and must not import them"


def test_no_cycles() -> None:
    graph = {module: ours(module) - {FACADE} for module in modules() if module != FACADE}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert set(order) == set(graph)


def test_what_must_be_free_of_jax_is() -> None:
    required = [m for m in SHIPPED for name in FREE_OF_JAX if is_inside(m, full_name(name))]
    claimed = [m for m in SHIPPED if "free of jax" in (ast.get_docstring(parsed(m)) or "").lower()]
    assert len(claimed) >= 5
    for module in {*required, *claimed}:
        _, others = loaded_with(module)
        with_jax = others & {"jax", "jaxlib", "jaxtyping", "flax", "orbax", "optax", "chex"}
        assert not with_jax, f"{module} must be free of jax and loads {sorted(with_jax)}"


def test_trees_and_verifier_see_no_model_mesh_or_cache() -> None:
    for module in SHIPPED:
        if is_inside(module, "specinfer_jax.tree") or module == "specinfer_jax.speculation.verifier":
            loaded, _ = loaded_with(module)
            seen = {m for m in loaded for room in ("models", "parallel") if is_inside(m, f"specinfer_jax.{room}")}
            assert not seen, f"{module} must not see {sorted(seen)}"


def test_attention_is_the_one_caller_of_the_kernel() -> None:
    callers = {
        module
        for module in SHIPPED
        for found in imports(module)
        if found.name == "tree_attention" and module.startswith("specinfer_jax")
    }
    assert callers == {"specinfer_jax.models.attention"}


def test_kernels_import_jax_numpy_and_jaxtyping_only() -> None:
    for module in SHIPPED:
        if is_inside(module, "pallas_kernels"):
            tops = {found.module.partition(".")[0] for found in imports(module)} - set(sys.stdlib_module_names)
            assert tops <= {"pallas_kernels", "jax", "numpy", "jaxtyping"}, module


@pytest.mark.parametrize("module", SHIPPED)
def test_no_private_jax_and_no_future_annotations(module: str) -> None:
    written = {f"{found.module}.{found.name}" for found in imports(module)}
    private = {name for name in written if name.startswith(("jax.", "jaxlib.")) and "._" in name}
    assert not private
    assert "__future__.annotations" not in written


# A platform that does not exist makes any use of a device an error, which is what the last lines prove.
IMPORT_ALL = """
import importlib, sys
import specinfer_jax
assert "jax" not in sys.modules, "importing the package loaded jax"
from specinfer_jax import SamplingParams, Speculation
SamplingParams(max_tokens=3), Speculation.off()
assert "jax" not in sys.modules, "settings loaded jax"
for name in {modules}:
    importlib.import_module(name)
import jax
try:
    jax.devices()
except RuntimeError:
    print("no device was touched")
"""


def test_importing_touches_no_device() -> None:  # case B087
    names = [name for name in SHIPPED if not name.endswith("__main__")]
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(modules=names)],
        capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={"PATH": "", "JAX_PLATFORMS": "nowhere", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "no device was touched"
