"""The project's own files and what they import, read without importing anything."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specinfer_jax", "pallas_kernels")
_NOT_OURS = {".git", ".venv", "venv", "dist", "build", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"}


class Import(NamedTuple):
    """One name that a module imports."""

    module: str
    """Dotted module, as far as it is one of ours; else what is written."""
    name: str | None
    """The imported name if it is not a module itself."""
    at_load: bool
    """Runs when the module is loaded: not inside a function, not under TYPE_CHECKING."""


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the packages that ship, and of train and benchmarks, by dotted name."""
    found = {}
    for package in (*PACKAGES, "benchmarks", "train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(module: str) -> ast.Module:
    """Syntax tree of a module."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@functools.cache
def imports(module: str) -> tuple[Import, ...]:
    """All that a module imports, inside functions too."""
    return tuple(_imports(parsed(module), at_load=True))


def _imports(node: ast.AST, *, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, None, at_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                is_module = inner in modules()
                yield Import(inner if is_module else str(child.module), None if is_module else alias.name, at_load)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            later |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, at_load=at_load and not later)


def loaded_with(module: str) -> tuple[set[str], set[str]]:
    """(our modules, top-level names of others') that importing a module loads, itself and parent packages included."""
    ours: set[str] = set()
    others: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in ours:
            continue
        if name not in modules():
            others.add(name.partition(".")[0])
            continue
        ours.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])
        waiting += [found.module for found in imports(name) if found.at_load]
    return ours, others - set(sys.stdlib_module_names)


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Every file of the checkout that git does not ignore; without git, every file that no tool left behind."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not _NOT_OURS & set(path.relative_to(ROOT).parts)]
    else:
        paths = [ROOT / name for name in listed if name]
    return tuple(path for path in paths if path.is_file())
