"""A plan fits with a margin, the likelihood of running out is said, and what contradicts itself is refused.

Tests of `ask/question.py`, `ask/explain.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.ask.explain import ALLOCATED_OVER, MEASURED, RESERVED_OVER, headroom_warning, running_out
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.machine.named_clusters import cluster

GIB = 1 << 30
RUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_frozen_h200.json"


def _machine(gib: float) -> Cluster:
    machine = cluster("2xh100")
    return replace(machine, device=replace(machine.device, memory_bytes=int(gib * GIB)))


def _plan(gib: float = 4, **settings: Any) -> Any:
    return mw.plan("gpt2-124m", _machine(gib), batch=8, sequence=1024, top=2, **settings)


@pytest.mark.parametrize("headroom", [None, 0, 20])
def test_what_is_recommended_leaves_the_headroom_free(headroom: float | None) -> None:
    answer = _plan(headroom=headroom)
    share = 0.06 if headroom is None else headroom / 100
    for _, told in answer.ranked:
        used = told.peak_reserved_bytes + told.peak_bytes - told.peak_allocated_bytes
        assert used <= 4 * GIB * (1 - share)
    assert answer.question.memory_of(answer.best.forecast.memory_bytes) == 4 * GIB


def test_a_limit_of_memory_and_a_headroom_both_hold() -> None:
    assert _plan(max_memory="3GiB").best.forecast.memory_bytes == 3 * GIB
    assert _plan(max_memory="3.9GiB").best.forecast.memory_bytes == int(4 * GIB * 0.94)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"headroom": 20, "max_memory": "3.9GiB"}, "--headroom 20 leaves 3.2 GiB of a device, --max-memory is 3.9 GiB"),
        ({"headroom": 91}, "--headroom: 91 percent"),
        ({"headroom": -1}, "--headroom: -1 percent"),
        ({"time_limit": -1.0}, "--time-limit: -1 seconds is no time"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError) as error:
        _plan(**settings)
    assert words in str(error.value)
    assert error.value.exit_code == 2


def test_the_likelihood_is_that_of_measured_runs() -> None:
    cases = [case for case in json.loads(RUNS.read_text())["cases"] if case.get("measured_reserved_bytes")]
    assert len(cases) == MEASURED
    for kind, known in (("reserved", RESERVED_OVER), ("allocated", ALLOCATED_OVER)):
        errors = [case[f"measured_{kind}_bytes"] / case[f"forecast_{kind}_bytes"] - 1 for case in cases]
        assert sorted((round(each, 3) for each in errors if each >= 0.0005), reverse=True) == list(known)


def test_the_likelihood_falls_with_what_is_free() -> None:
    told = _plan().best.forecast
    both = [running_out(told, round(told.memory_bytes * share)) for share in (1.0, 1.05, 1.1, 1.2, 2.0)]
    assert all(low <= high for low, high in both)
    assert both == sorted(both, reverse=True)
    assert both[-1] == (0.5 / (MEASURED + 1), 0.5 / (MEASURED + 1))


def test_a_plan_by_hand_with_little_free_memory_is_warned_of() -> None:
    told = _plan().best.forecast
    assert headroom_warning(told, 0) == ""
    assert "less than the headroom of 60 %" in headroom_warning(told, 60)
    assert headroom_warning(replace(told, fits=False), 60) == ""
