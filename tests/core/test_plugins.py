"""Techniques of modules that the environment names are techniques like any other.

Tests of `core/technique.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.core.plugins import VARIABLE
from meshwright.core.technique import technique_named, technique_names
from meshwright.schedules import schedule_names

MODULE = """
from dataclasses import dataclass
from typing import ClassVar
from meshwright.core.technique import Technique

@dataclass(frozen=True, kw_only=True)
class Added(Technique):
    name: ClassVar[str] = "added_outside"
    phase: ClassVar[str] = "step"
"""


def test_a_plugin_adds_a_technique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    assert "added_outside" not in technique_names()
    monkeypatch.setenv(VARIABLE, "plugin_of_test")
    assert "added_outside" in technique_names()
    assert technique_named("added_outside").__name__ == "Added"


def test_a_base_class_without_a_name_is_no_technique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = MODULE.replace('    name: ClassVar[str] = "added_outside"\n', "")
    (tmp_path / "plugin_with_base.py").write_text(base)
    monkeypatch.syspath_prepend(tmp_path)
    before = technique_names()
    monkeypatch.setenv(VARIABLE, "plugin_with_base")
    assert technique_names() == before


def test_a_name_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_taken.py").write_text(MODULE.replace("added_outside", "tensor"))
    (tmp_path / "schedule_taken.py").write_text('SCHEDULES = {"gpipe": None}')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(VARIABLE, "plugin_taken")
    with pytest.raises(MeshwrightError, match='a technique "tensor" exists already'):
        technique_names()
    monkeypatch.setenv(VARIABLE, "schedule_taken")
    with pytest.raises(MeshwrightError, match='a schedule "gpipe" exists already'):
        schedule_names()


def test_a_plugin_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no_such_module_here")
    with pytest.raises(MeshwrightError, match="no_such_module_here"):
        technique_names()
