"""Notebooks hold no outputs; the quickstart's first cell installs without touching a jax that is there already."""

import json
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

NOTEBOOK = json.loads((ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8"))
CODE_CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def cell() -> types.SimpleNamespace:
    """The functions of the first code cell, which installs nothing here because the package is installed."""
    names: dict[str, Any] = {}
    exec("".join(CODE_CELLS[0]["source"]), names)
    return types.SimpleNamespace(**names)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells if c["cell_type"] == "code")


def test_installed_jax_is_pinned(cell: types.SimpleNamespace) -> None:  # case B091
    here = {"jaxlib": "0.11.1", "jax": "0.11.1", "jax-cuda12-plugin": "0.11.1"}
    wanted = cell.requirements("specinfer-jax", "cuda12", here, False)
    assert wanted == ["specinfer-jax", "jax==0.11.1", "jax-cuda12-plugin==0.11.1", "jaxlib==0.11.1"]


@pytest.mark.parametrize(("here", "replace"), [({}, False), ({"jax": "0.5.0"}, True)])
def test_extra_brings_jax_where_there_is_none_or_on_demand(  # case B091
    cell: types.SimpleNamespace, here: dict[str, str], replace: bool
) -> None:
    assert cell.requirements("specinfer-jax", "tpu", here, replace) == ["specinfer-jax[tpu]"]
    assert cell.requirements("specinfer-jax", None, here, replace) == ["specinfer-jax"]


def test_finds_the_parts_of_jax(cell: types.SimpleNamespace) -> None:
    assert {"jax", "jaxlib"} <= set(cell.installed_jax())


def test_failed_install_explains(cell: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:  # case B091
    calls = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(cell.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"beside jax .* REPLACE_JAX"):
        cell.install("specinfer-jax", replace_jax=False)
    (pip,) = [command for command in calls if "pip" in command]
    assert any(part.startswith("jax==") for part in pip)
    assert "--upgrade" not in pip
