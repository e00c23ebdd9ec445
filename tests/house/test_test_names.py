"""The tests of a file are found by its name: `tests/P/test_f*.py` for `P/f.py`, else by a docstring that names it."""

from __future__ import annotations

import ast
import re

from house import ROOT, sources

TESTS = ROOT / "tests"
NAMED = re.compile(r"Tests of ((?:`[\w/]+\.py`[,.]?\s*)+)")


def named_by_tests() -> dict[str, list[str]]:
    """Source -> test files whose docstring says that they test it."""
    named: dict[str, list[str]] = {}
    for path in sorted(TESTS.glob("*/test_*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for places in NAMED.findall(text):
            for place in re.findall(r"`([^`]+)`", places):
                named.setdefault(place, []).append(path.relative_to(TESTS).as_posix())
    return named


def test_every_source_has_a_test_that_is_found_by_its_name() -> None:
    named = named_by_tests()
    mirrored = {
        source.place for source in sources() if list((TESTS / source.room).glob(f"test_{source.path.stem}*.py"))
    }
    missing = [
        source.place
        for source in sources()
        if source.path.stem != "__init__" and source.place not in mirrored and source.place not in named
    ]
    assert missing == [], 'name them in the docstring of their test: "Tests of `package/file.py`."'


def test_tests_name_files_that_exist() -> None:
    places = {source.place for source in sources()}
    assert [place for place in named_by_tests() if place not in places] == []
