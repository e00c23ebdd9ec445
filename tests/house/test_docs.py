"""Documents are run: every block of the tutorials in order, every data format, the commands other pages promise.

Tests of `api.py`, `cli/techniques.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```(?:toml|py)\n# (examples/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TUTORIALS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tutorials").glob("*.md"))
COMMANDS = {"bash": ["bash", "-euo", "pipefail"], "python": [sys.executable]}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall(text_of(page))


def run_blocks(found: list[tuple[str, str]], folder: Path) -> None:
    """In the page's order; blocks of one language in a row are one script."""
    beside = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for number, (language, group) in enumerate(groupby(found, key=lambda block: block[0])):
        script = folder / f"blocks{number}.{language}"
        script.write_text("\n".join(code for _, code in group), encoding="utf-8")
        done = subprocess.run(
            [*COMMANDS[language], str(script)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=900,
            env=os.environ | beside,
            check=False,
        )
        assert done.returncode == 0, f"{script.read_text()}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def in_place_of_a_folder(folder: Path) -> list[str]:
    """A change of a run file: a config.json of ours in place of the Hugging Face folder that it names."""
    from dataclasses import replace

    from meshwright.hf.config_json import config_for
    from meshwright.models.presets import preset

    made = config_for(replace(preset("byte-3m"), num_layers=28, max_sequence=1 << 16))
    (folder / "config.json").write_text(json.dumps(made))
    return [f"model.hf={folder}"]


def run_page(page: str, folder: Path) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    found = blocks(page)
    assert len(found) >= 2
    run_blocks(found, folder)


@pytest.mark.parametrize("page", TUTORIALS)
def test_the_tutorials_blocks_run(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_every_public_name_has_an_example_that_runs(tmp_path: Path) -> None:
    import meshwright as mw

    examples = "".join(code for _, code in blocks("docs/api.md"))
    assert [name for name in mw.__all__ if not re.search(rf"\bmw\.{name}\b", examples)] == []
    run_page("docs/api.md", tmp_path)


def test_type_checkers_see_every_public_name() -> None:
    import ast

    import meshwright as mw

    tree = ast.parse((ROOT / "meshwright" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: node.module for node in block.body for alias in node.names if isinstance(node, ast.ImportFrom)
    }
    assert seen == mw._NAMES
    for name in mw.__all__:
        value = getattr(mw, name)
        text = (value.__doc__ or "").strip()
        assert name == "__version__" or (text and not text.startswith(f"{name}(")), name


def test_renamed_names_still_work_and_say_so() -> None:
    import meshwright as mw

    with pytest.warns(DeprecationWarning, match="mw.plan"):
        assert mw.search is not None
    with pytest.warns(DeprecationWarning, match=r"mw\.model"):
        assert mw.profile("byte-tiny").num_params
    with pytest.warns(DeprecationWarning, match="train_steps"):
        mw.train(mw.Plan(batch=1), "byte-tiny", None, None)


def test_every_promised_tutorial_is_there() -> None:
    names = {Path(page).stem for page in TUTORIALS}
    assert {"first_run", "fine_tune", "vit_digits", "own_module", "add_a_technique"} <= names


def test_files_shown_in_the_tutorials_are_those_of_the_examples() -> None:
    """Line by line, comments aside."""
    shown = [(name, text) for page in TUTORIALS for name, text in SHOWN.findall(text_of(page))]
    assert len(shown) >= 4
    for name, text in shown:
        wanted = [re.sub(r"\s*#.*", "", line) for line in text_of(name).splitlines()]
        missing = [line for line in text.splitlines() if line and line not in wanted]
        assert missing == [], name


def test_every_data_format_of_the_page_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.core.codec import decode
    from meshwright.data.data_section import DataSection
    from meshwright.data.open_data import open_data

    run_page("docs/data.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    sections = [decode(DataSection, tomllib.loads(text), "data") for text in TOML.findall(text_of("docs/data.md"))]
    kinds = [open_data(section, cache=tmp_path / "data").kind for section in sections]
    assert len(kinds) >= 14
    assert set(kinds) == {"tokens", "images", "table"}
    unsaid = [key for key in DataSection.__dataclass_fields__ if f"`{key}" not in text_of("docs/data.md")]
    unsaid = [key for key in unsaid if not any(key in text for text in TOML.findall(text_of("docs/data.md")))]
    assert unsaid == []


def test_the_models_page_has_every_preset_and_family() -> None:
    from meshwright.hf.config_json import FAMILIES
    from meshwright.models.presets import PRESETS

    text = text_of("docs/models.md")
    assert [name for name in (*PRESETS, *FAMILIES) if f"`{name}`" not in text] == []


def test_the_optimizers_page_says_what_they_are() -> None:
    from meshwright.core.codec import decode
    from meshwright.optimizers.optimizer_config import _FALLS, OptimizerConfig
    from meshwright.optimizers.rule import rules

    text = text_of("docs/optimizers.md")
    told = dict(re.findall(r"^\| `(\w+)` \| (elementwise|norm|whole_matrix) \|", text, re.MULTILINE))
    assert told == {name: method.kind for name, method in rules().items()}
    assert [name for name in _FALLS if f"| `{name}` |" not in text] == []
    tables = [tomllib.loads(block)["train"]["optimizer"] for block in TOML.findall(text)]
    configs = [decode(OptimizerConfig, table, "optimizer") for table in tables]
    assert {config.name for config in configs} == {"adamw", "muon"}


def test_the_readmes_commands_run_and_its_run_files_are_valid(tmp_path: Path) -> None:
    found = [(kind, code) for kind, code in blocks("README.md") if not code.startswith("make ")]
    assert found
    run_blocks(found, tmp_path)
    text = text_of("README.md")
    from meshwright.run.run_file import read_run

    batches, changes = [], in_place_of_a_folder(tmp_path)
    for number, table in enumerate(TOML.findall(text)):
        (tmp_path / f"{number}.toml").write_text(table)
        batches.append(read_run(tmp_path / f"{number}.toml", changes if "hf =" in table else ()).train.batch)
    assert batches == [128, 64]
    assert len(text.splitlines()) <= 150


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for page in ("README.md", "CONTRIBUTING.md"):
        named |= set(re.findall(r"make ([a-z]+)", text_of(page)))
    named -= {"sure"}
    assert named
    assert named <= targets | {"and"}


def test_the_example_run_files_are_valid_or_run_by_a_tutorial() -> None:
    from meshwright.run.run_file import read_run

    files = sorted((ROOT / "examples").glob("*.toml"))
    assert len(files) >= 4
    commands = "".join(code for page in TUTORIALS for kind, code in blocks(page) if kind == "bash")
    for file in files:
        if f"mw train examples/{file.name}" not in commands:
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
