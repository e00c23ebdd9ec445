"""Failures replayed: against a reference that walks in small steps, against Daly's formula, and their best choices."""

from __future__ import annotations

import random

import pytest

from meshwright.simulator.failure_replay import (
    FailureModel,
    best_interval,
    expected_goodput,
    forecast_failures,
    replay_failures,
    young_interval,
)


def walk(
    gaps: list[float], work: float, interval: float, checkpoint: float, first: float, restart: float
) -> dict[str, float]:
    """The same in ticks of 1/16 s, one state at a time."""
    tick, seconds = 0.0625, dict.fromkeys(("productive", "checkpoint", "restart", "lost"), 0.0)
    starting, saving, unsaved, alive = first, 0.0, 0.0, 0.0
    gaps = list(gaps)
    while True:
        if gaps and alive >= gaps[0]:
            gaps.pop(0)
            seconds["lost"] += unsaved
            starting, saving, unsaved, alive = restart, 0.0, 0.0, 0.0
            continue
        alive += tick
        if starting > 0:
            starting -= tick
            seconds["restart"] += tick
        elif saving > 0:
            saving -= tick
            seconds["checkpoint"] += tick
            if saving <= 0:
                seconds["productive"] += unsaved
                unsaved = 0.0
                if seconds["productive"] >= work:
                    return seconds
        else:
            unsaved += tick
            if unsaved >= interval or seconds["productive"] + unsaved >= work:
                saving = checkpoint


@pytest.mark.parametrize("seed", range(20))
def test_a_replay_is_what_a_walk_in_small_steps_gives(seed: int) -> None:
    dice = random.Random(seed)

    def some(most: int) -> float:
        return dice.randrange(16, 16 * most) / 16

    gaps = [some(60) for _ in range(dice.randrange(0, 12))]
    about = {"interval": some(9), "checkpoint": some(3), "restart": some(8)}
    work, first = some(100), some(8)
    ledger = replay_failures(gaps, work=work, first_start=first, **about)
    wanted = walk(gaps, work, about["interval"], about["checkpoint"], first, about["restart"])
    assert {name: ledger.seconds[name] for name in wanted} == pytest.approx(wanted, abs=1e-6)
    assert ledger.wall_seconds == pytest.approx(sum(wanted.values()))
    assert ledger.seconds["productive"] == pytest.approx(work)


@pytest.mark.parametrize(("checkpoint", "restart", "mtbf"), [(20, 180, 3600), (60, 600, 1800), (1, 5, 30)])
def test_long_replays_agree_with_the_formula_whose_best_interval_is_found(
    checkpoint: float, restart: float, mtbf: float
) -> None:
    interval = best_interval(checkpoint, mtbf)
    around = [expected_goodput(interval * times, checkpoint, restart, mtbf) for times in (0.5, 0.9, 1, 1.1, 2)]
    assert max(around) == around[2]
    assert interval == pytest.approx(young_interval(checkpoint, mtbf), rel=0.35), "a first guess"
    dice = random.Random(3)
    gaps = [dice.expovariate(1 / mtbf) for _ in range(40_000)]
    ledger = replay_failures(gaps, interval=interval, checkpoint=checkpoint, restart=restart)
    assert ledger.goodput == pytest.approx(around[2], abs=0.005)
    assert ledger.wall_seconds == pytest.approx(sum(gaps))


def test_spares_are_worth_their_cost_only_as_far_as_nodes_are_missing() -> None:
    day = 86_400.0
    often = FailureModel(mtbf_seconds=30 * day, restart_seconds=180, checkpoint_seconds=5, repair_seconds=day / 2)
    told = forecast_failures(often, 64)
    assert told.best_spares == pytest.approx(64 / 30 / 2, abs=3), "nodes in repair at a time"
    paid = {
        count: forecast_failures(often, 64, spares=count).ledger.goodput / (64 + count)
        for count in range(told.best_spares + 6)
    }
    assert max(paid, key=lambda count: paid[count]) == told.best_spares
    assert told.goodput_by_spares[0] < told.ledger.goodput
    assert told.ledger.goodput == pytest.approx(
        expected_goodput(told.interval_seconds, 5, 180, 30 * day / 64), abs=0.03
    ), "nearly as if one were always there"
    soon = FailureModel(mtbf_seconds=30 * day, restart_seconds=180, checkpoint_seconds=5, repair_seconds=1)
    assert forecast_failures(soon, 64).best_spares == 0
    assert forecast_failures(soon, 64, interval=600, spares=3).interval_seconds == 600


def test_hopeless_clusters_have_a_goodput_of_nothing() -> None:
    model = FailureModel(mtbf_seconds=1, restart_seconds=1e6, checkpoint_seconds=1)
    assert forecast_failures(model, 1000).ledger.goodput == 0
    assert expected_goodput(1, 1, 1e6, 1) == 0
