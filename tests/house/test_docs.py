"""Documents are run: every block of the tutorial in order, and the commands that other pages promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: str) -> list[tuple[str, str]]:
    return BLOCK.findall((ROOT / path).read_text(encoding="utf-8"))


def run_blocks(found: list[tuple[str, str]], folder: Path) -> None:
    """All bash blocks as one script, then all python blocks as another: later blocks use what earlier ones made."""
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for language, command in (("bash", ["bash", "-euo", "pipefail"]), ("python", [sys.executable])):
        text = "\n".join(code for kind, code in found if kind == language)
        if text:
            script = folder / f"blocks.{language}"
            script.write_text(text, encoding="utf-8")
            done = subprocess.run(
                [*command, str(script)],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=300,
                env=os.environ | beside,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/add_a_technique.md"])
def test_the_pages_blocks_run(page: str, tmp_path: Path) -> None:
    found = blocks(page)
    assert len(found) >= 2
    run_blocks(found, tmp_path)


def test_the_readmes_commands_run_and_its_run_file_is_valid(tmp_path: Path) -> None:
    found = [(kind, code) for kind, code in blocks("README.md") if not code.startswith("make ")]
    assert found
    run_blocks(found, tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    run_file = re.search(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert run_file is not None
    (tmp_path / "run.toml").write_text(run_file.group(1))
    from meshwright.runtime.config import read_run

    assert read_run(tmp_path / "run.toml").train.batch == 128
    assert len(text.splitlines()) <= 150


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in ("README.md", "CONTRIBUTING.md"):
        named |= set(re.findall(r"make ([a-z]+)", (ROOT / page).read_text(encoding="utf-8")))
    named -= {"sure"}
    assert named
    assert named <= targets | {"and"}


def test_the_example_run_files_are_valid() -> None:
    from meshwright.runtime.config import read_run

    files = sorted((ROOT / "examples").glob("*.toml"))
    assert files
    for file in files:
        read_run(file)


def test_links_between_documents_lead_somewhere() -> None:
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    checked = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                checked += 1
    assert checked > 5


def test_the_cards_are_those_of_the_files(request: pytest.FixtureRequest) -> None:
    from meshwright.cli.techniques import card
    from meshwright.core.technique import technique_names

    names = technique_names()
    assert names
    text = "# Technique cards\n\nThe docstrings of `meshwright/techniques/`, as `mw techniques NAME` prints them.\n"
    for name in names:
        text += f"\n## {name}\n\n" + re.sub(r"\n(?=[A-Z][a-z ]+: )", "\n\n", card(name)) + "\n"
    page = ROOT / "docs" / "techniques" / "cards.md"
    if request.config.getoption("--write-matrix"):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, "run pytest tests/house/test_docs.py --write-matrix"
