"""What ships: the wheel's contents, its dependencies, and no trace of the machine it was made on."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from source_tree import PACKAGES, ROOT, imports, modules, project_files

import specinfer_jax

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = specinfer_jax.__version__
# Optional parts of the package may need an extra; everything else gets by with the core.
EXTRA_OF = {"specinfer_jax.serving.openai_api": "server", "specinfer_jax.serving.openai": "server"}


def distribution_name(requirement: str) -> str:
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str | None) -> set[str]:
    requirements = list(PROJECT["dependencies"]) + (PROJECT["optional-dependencies"][extra] if extra else [])
    return {distribution_name(requirement) for requirement in requirements}


def third_party(module: str) -> set[str]:
    tops = {found.module.partition(".")[0] for found in imports(module)}
    return tops - set(sys.stdlib_module_names) - set(PACKAGES)


def test_dependencies_cover_all_imports() -> None:
    providers = importlib.metadata.packages_distributions()
    for module in modules():
        if module.partition(".")[0] in PACKAGES:
            extra = next((e for prefix, e in EXTRA_OF.items() if f"{module}.".startswith(f"{prefix}.")), None)
            allowed = declared(extra)
            for name in third_party(module):
                found = {distribution_name(p) for p in providers.get(name, [])}
                assert found & allowed, f"{module} imports {name}, which no dependency in pyproject.toml provides"


def test_no_dependency_is_unused() -> None:
    providers = importlib.metadata.packages_distributions()
    used = {
        distribution_name(p)
        for module in modules()
        if module.partition(".")[0] in PACKAGES
        for name in third_party(module)
        for p in providers.get(name, [])
    }
    assert declared(None) <= used


def test_no_file_names_a_place_on_a_machine() -> None:
    homes = "|".join(("work", "root", "opt", "home", "Users", "mnt", "scratch"))
    absolute = re.compile(rf"(?<![\w.~*<>}}/-])/(?:{homes})/[\w.-]")
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found = absolute.search(text)
        assert found is None, f"{path.relative_to(ROOT)}: {text[max(found.start() - 40, 0) : found.end() + 40]!r}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_two_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    tops = {name.partition("/")[0] for name in names}
    info = f"specinfer_jax-{VERSION}.dist-info"
    assert tops == {*PACKAGES, info}
    shipped = {str(Path(*path.relative_to(ROOT).parts).as_posix()) for path in modules().values()}
    assert {name for name in names if name.endswith(".py")} == {n for n in shipped if n.partition("/")[0] in PACKAGES}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_starts_the_command_line(wheel: zipfile.ZipFile) -> None:
    entry = wheel.read(f"specinfer_jax-{VERSION}.dist-info/entry_points.txt").decode()
    assert "specinfer = specinfer_jax.cli:main" in entry
    metadata = wheel.read(f"specinfer_jax-{VERSION}.dist-info/METADATA").decode()
    for extra in ("test", "train", "server", "plots", "tpu", "cuda12", "cuda13"):
        assert f"Provides-Extra: {extra}\n" in metadata
