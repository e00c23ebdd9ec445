"""The frozen list stays a list of plans that may run, and stays apart from the cases that are looked at."""

from __future__ import annotations

import json

import pytest

import meshwright as mw
from benchmarks.gpu_cases import ROWS, SEEN
from benchmarks.gpu_frozen import CASES as FIRST
from benchmarks.gpu_frozen_next import CASES as NEXT

CASES = (*FIRST, *NEXT)


def test_names_are_unique_and_unseen() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    assert min(len(FIRST), len(NEXT)) >= 20
    assert not set(names) & {*(case.name for case in SEEN), *(row.ours.name for row in ROWS)}


@pytest.mark.parametrize("case", [case for case in CASES if ":" not in case["model"]], ids=lambda case: case["name"])
def test_plans_are_valid(case: dict) -> None:
    value = {key: case[key] for key in ("batch", "techniques")} | {"microbatch": case.get("microbatch", case["batch"])}
    plan = mw.Plan.from_json(json.dumps({"version": 1, **value}))
    sequence = case.get("sequence", 1)
    described = mw.model(case["model"], sequence=sequence, change=case.get("change"))
    assert plan.check(described.profile, mw.cluster("h200")) == ()
    assert plan.check_sequence(sequence) == ()
    assert sum(case.get("documents", [sequence])) == sequence
