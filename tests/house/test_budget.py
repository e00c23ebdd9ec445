"""The size of the whole: lines by package, files, and private functions that only one place calls."""

from __future__ import annotations

import ast
from collections import Counter

from house import ROOT, sources

MOST_LINES = 57_750
MOST_FILES = 274
MOST_LINES_OF_A_TOY = 120
MOST_PRIVATE_FUNCTIONS_WITH_ONE_CALLER = 405


def test_the_package_stays_within_its_lines() -> None:
    lines = Counter[str]()
    for source in sources():
        lines[source.room or "meshwright"] += source.text.count("\n")
    table = "\n".join(f"{name:12} {count:6,}" for name, count in lines.most_common())
    print(table)
    assert sum(lines.values()) <= MOST_LINES, f"{sum(lines.values()):,} lines; pay with deletions:\n{table}"
    assert len(sources()) <= MOST_FILES


def test_a_toy_outside_the_package_is_a_page() -> None:
    toys = list((ROOT / "tests" / "house").glob("toy_*.py"))
    assert len(toys) > 6
    assert [toy.name for toy in toys if len(toy.read_text(encoding="utf-8").splitlines()) > MOST_LINES_OF_A_TOY] == []


def one_caller(tree: ast.Module) -> list[str]:
    """Private functions and methods of a file that are named once besides their definition."""
    defined = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__")
    ]
    used = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    used += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return [name for name in defined if used[name] == 1]


def test_private_functions_are_called_from_more_than_one_place() -> None:
    """A function that one place calls is a hop for the reader; some are worth it, most are not."""
    alone = [f"{source.place}:{name}" for source in sources() for name in one_caller(source.tree)]
    print(len(alone))
    assert len(alone) <= MOST_PRIVATE_FUNCTIONS_WITH_ONE_CALLER
    assert one_caller(ast.parse("def _a(): pass\ndef _b(): _a()\n_b(), _b()")) == ["_a"]
