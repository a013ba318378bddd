"""A second start compiles nothing: every program, small ones too, comes out of the cache folder."""

import os
import subprocess
import sys
from pathlib import Path

from tiny_model import write_folder

START = """
import sys
sys.path.insert(0, {tests!r})
from specinfer_jax import LLM, SamplingParams
llm = LLM({model!r}, max_model_len=64)
print(llm.generate("the cat", SamplingParams(temperature=0, max_tokens=4))[0].token_ids)
"""


def start(tmp_path: Path, **environment: str) -> str:
    script = START.format(tests=str(Path(__file__).parent), model=str(tmp_path / "model"))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    variables |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cached(tmp_path: Path) -> set[str]:
    """Names of the compiled programs; the files beside them that note the last use change."""
    return {file.name for file in (tmp_path / "cache").rglob("*-cache")}


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    # case B046
    write_folder(tmp_path / "model")
    first = start(tmp_path)
    programs = cached(tmp_path)
    assert len([name for name in programs if "burst" in name]) == 1
    assert len(programs) > 5
    assert start(tmp_path) == first
    assert cached(tmp_path) == programs


def test_the_cache_can_be_switched_off(tmp_path: Path) -> None:
    write_folder(tmp_path / "model")
    start(tmp_path, JAX_ENABLE_COMPILATION_CACHE="0")
    assert cached(tmp_path) == set()
