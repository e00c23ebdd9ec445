"""The ranked table is the K fastest distinct plans, and what a technique is worth is what a search without it, or with
it, finds.

Tests of `planner/best_first.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.planner.scoreboard import AS_FAST
from meshwright.planner.search import SearchResult, search

GIB = 1 << 30


class _Asked(NamedTuple):
    model: str
    machine: str
    batch: int
    sequence: int
    gib: float
    """Memory of a device."""
    blocks: int = 4


CHEAP = (
    _Asked("gpt2-124m", "4xh100", 8, 1024, 2.2),
    _Asked("gpt2-medium", "2x2xh100", 8, 512, 3),
    _Asked("qwen3-0.6b", "4xa100-40", 4, 2048, 4),
    _Asked("llama3-8b", "4xh100", 8, 2048, 26),
    _Asked("llama3-8b", "2xh100", 4, 4096, 40),
)
SLOW = (
    _Asked("gpt2-124m", "4xh100", 16, 1024, 2.5, 8),
    _Asked("gpt2-124m", "2x2xh100", 32, 512, 4, 8),
    _Asked("llama3-8b", "2x4xh100", 32, 1024, 24, 6),
    _Asked("llama3-8b", "8xh100", 32, 4096, 40, 5),
    _Asked("llama3-8b", "8xh100", 128, 8192, 80, 32),
    _Asked("mixtral-8x7b", "8xh100", 32, 2048, 70, 4),
)


@cache
def _ask(asked: _Asked, top: int = 1, **wishes: Any) -> SearchResult:
    config = preset(asked.model)
    profile = decoder_profile(replace(config, num_layers=asked.blocks), asked.model)
    machine = cluster(asked.machine)
    machine = replace(machine, device=replace(machine.device, memory_bytes=int(asked.gib * GIB)))
    return search(profile, machine, batch=asked.batch, sequence=asked.sequence, top=top, compares=top == 8, **wishes)


def _cases() -> list[Any]:
    return [*CHEAP, *(pytest.param(asked, marks=pytest.mark.slow) for asked in SLOW)]


@pytest.mark.parametrize("asked", _cases())
def test_fewer_plans_are_the_first_of_more(asked: _Asked) -> None:
    more = _ask(asked, 8).ranked
    assert len(more) > 1
    assert [each.rank for each in more] == sorted(each.rank for each in more)
    assert len({each.plan for each in more}) == len(more)
    for top in (1, 2):
        assert _ask(asked, top).ranked == more[:top]


@pytest.mark.parametrize("asked", _cases())
def test_what_is_pinned_is_no_faster_than_what_is_not_in_the_table(asked: _Asked) -> None:
    """No plan that a pin finds is faster than the last of the table without being in it."""
    ranked = _ask(asked, 8).ranked
    last, plans = ranked[-1].forecast.step_seconds, {each.plan for each in ranked}
    for pin in ("microbatch=1", "shard.stage=1"):
        for plan, told in _ask(asked, 3, pin=(pin,)).ranked:
            assert plan in plans or told.step_seconds >= last * (1 - 1e-9), pin


@pytest.mark.parametrize("asked", _cases())
def test_what_a_technique_is_worth_is_what_a_search_finds(asked: _Asked) -> None:
    found = _ask(asked, 8)
    assert len(found.alternatives) >= 5
    for each in found.alternatives:
        wish = {"ban" if each.is_used else "pin": (each.technique,)}
        try:
            truth = _ask(asked, 1, **wish).best
        except MeshwrightError:  # a pin that cannot be
            truth = None
        if truth is None:
            assert each.scored is None, each.technique
            continue
        seconds = truth.forecast.step_seconds
        assert each.least_seconds is not None, each.technique
        assert each.least_seconds <= seconds * (1 + 1e-9), each.technique
        if each.scored is not None:
            assert seconds <= each.scored.forecast.step_seconds * (1 + 1e-9), each.technique
        if each.is_settled:
            assert each.scored is not None
            assert each.scored.forecast.step_seconds == pytest.approx(seconds, rel=2 * AS_FAST), each.technique


def test_so_many_pairs_are_asked_both_ways() -> None:
    """And half of them are settled: nothing is gained by limits that always hold."""
    pairs = [each for asked in CHEAP for each in _ask(asked, 8).alternatives]
    assert len(pairs) >= 40
    assert sum(each.is_settled for each in pairs) >= 0.5 * len(pairs)


def test_of_plans_that_tie_the_simpler_comes_first_and_fewer_are_still_the_first_of_more() -> None:
    asked = CHEAP[0]
    fast, more = _ask(asked, 8).ranked, _ask(asked, 9, tie=0.05).ranked
    assert {each.plan for each in fast} == {each.plan for each in more[:8]}
    least = fast[0].forecast.step_seconds
    tied = [each for each in fast if each.forecast.step_seconds <= least * 1.05]
    assert len(tied) > 1
    assert more[0] == min(tied, key=lambda each: each.simplicity(4))
    assert len(more[0].plan.techniques) == min(len(each.plan.techniques) for each in tied)
    for top in (1, 3):
        found = _ask(asked, top, tie=0.05)
        assert found.ranked == more[:top]
        assert found.best == more[0]
        assert found.gap_fraction is not None
        # The certificate is about the plan that is recommended.
        assert found.gap_fraction >= 1 - least / more[0].forecast.step_seconds - 1e-9
