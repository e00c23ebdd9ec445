"""The package as syntax trees: what the house tests look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "meshwright"


@dataclass(frozen=True)
class Source:
    path: Path
    text: str
    tree: ast.Module

    @property
    def place(self) -> str:
        """`core/plan.py`"""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def room(self) -> str:
        return self.place.split("/")[0] if "/" in self.place else ""

    @property
    def module(self) -> str:
        parts = ["meshwright", *self.path.relative_to(PACKAGE).with_suffix("").parts]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Source(path, text, ast.parse(text)))
    assert len(found) > 50, "the package was not found"
    return tuple(found)


def in_rooms(*rooms: str) -> list[Source]:
    found = [source for source in sources() if source.room in rooms]
    assert {source.room for source in found} == set(rooms), "a room is missing"
    return found


def imports(source: Source, *, top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(module, line) of every import that runs; those for type checkers only do not count."""
    yield from _imports(source.tree.body, top_level_only)


def _imports(body: list[ast.stmt], top_level_only: bool) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno
        elif not _is_left_out(node, top_level_only):
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _imports(getattr(node, field, []), top_level_only)


def _is_left_out(node: ast.stmt, top_level_only: bool) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return top_level_only
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def strings(source: Source) -> Iterator[tuple[str, int]]:
    """Every string but docstrings."""
    documentation = {
        id(node.value) for node in ast.walk(source.tree) if isinstance(node, ast.Expr)
    }  # a string that is a statement says something to the reader only
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value, node.lineno
