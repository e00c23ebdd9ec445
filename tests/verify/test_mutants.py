"""Some of the mutants that `make mutants` kills, one of each kind of evidence."""

from __future__ import annotations

import sys

import pytest

from benchmarks import mutants

SLICE = (
    "microbatches after the second dropped",
    "moments lost from step three",
    "betas swapped",
    "documents see each other",
    "running statistics keep too little",
    "recomputation draws other numbers",
)


def test_there_are_enough_of_them_and_each_has_a_case(tmp_path: object) -> None:
    from pathlib import Path

    known = mutants.cases(Path(str(tmp_path)))
    assert len(mutants.MUTANTS) >= 30
    assert {case for case, _ in mutants.MUTANTS.values()} == set(known)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_what_a_mutant_changes_is_there(name: str) -> None:
    with mutants.mutated(name):
        pass


@pytest.mark.slow
def test_the_check_kills_a_slice_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(mutants.ROOT)])
    outcomes = mutants.hunt(list(SLICE), lambda outcome: None)
    assert [each.mutant for each in outcomes if not each.killed_by] == []
