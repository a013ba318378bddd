"""The README's commands and links are what .ci/run and a newcomer rely on."""

import re

import pytest
from source_tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def command(name: str) -> str:
    found = re.search(rf"^<!-- command: {name} -->\n```sh\n(.+)\n```$", README, re.MULTILINE)
    assert found is not None, f"README.md has no one-line command marked {name}"
    return found[1]


def test_two_set_up_commands() -> None:
    assert "pip install ." in command("run")
    assert "specinfer generate" in command("run")
    assert "[test]" in command("test")
    assert command("test").endswith("pytest")


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- command: test -->" in script
    assert "pip install" not in script, "what is installed stands in the README alone"


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CHANGELOG.md",
        "docs/log.md",
        "docs/kernels.md",
        "docs/results.md",
        "docs/scale.md",
        "docs/multihost.md",
    ],
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


def test_file_map_is_short() -> None:
    rows = re.findall(r"^\| \[.*\) \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) > 30
    assert [row for row in rows if len(row.split()) > 7] == []
