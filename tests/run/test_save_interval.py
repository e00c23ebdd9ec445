"""The interval between checkpoints: what costs and failures make of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshwright.core.time_ledger import TimeMark
from meshwright.run import save_interval
from meshwright.run.save_interval import FIRST_SECONDS, MOST_COST, MOST_SECONDS, NODE_MTBF_SECONDS, SaveInterval
from meshwright.simulator.failure_replay import expected_goodput


def chosen(cost: float, mtbf: float) -> float:
    interval = SaveInterval("auto")
    interval.mtbf_seconds = mtbf
    interval.note_save(cost)
    return interval.seconds


def test_no_other_interval_gives_more_goodput() -> None:
    for cost, mtbf in ((0.5, 3600.0), (5.0, 3 * 3600.0), (0.05, 600.0)):
        best = chosen(cost, mtbf)
        assert cost / MOST_COST < best < MOST_SECONDS
        here = expected_goodput(best, cost, 60.0, mtbf)
        assert all(expected_goodput(best * other, cost, 60.0, mtbf) < here for other in (0.5, 0.9, 1.1, 2.0))


def test_it_is_bounded_by_ten_minutes_and_by_what_it_costs() -> None:
    assert SaveInterval("auto").seconds == FIRST_SECONDS
    assert chosen(0.1, NODE_MTBF_SECONDS) == MOST_SECONDS
    assert chosen(60.0, NODE_MTBF_SECONDS) == pytest.approx(60.0 / MOST_COST)
    assert chosen(10.0, 60.0) == pytest.approx(10.0 / MOST_COST)
    given = SaveInterval(2.5)
    given.note_save(100.0)
    assert (given.seconds, given.news()) == (150.0, "")
    assert not SaveInterval(0.0).is_due


def test_steps_that_are_slower_meanwhile_are_part_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    interval, now = SaveInterval("auto"), [0.0]
    monkeypatch.setattr(save_interval.time, "monotonic", lambda: now[0])
    for _ in range(10):
        interval.note_step(1.0, is_busy=False)
    interval.note_save(0.5)
    for _ in range(3):
        interval.note_step(1.25, is_busy=True)
    interval.note_step(1.0, is_busy=False)
    assert interval.cost_seconds == pytest.approx(1.25)
    assert "one costs 1.25 s" in interval.news()
    assert interval.news() == ""
    assert not interval.is_due
    now[0] = interval.seconds
    assert interval.is_due


def test_a_checkpoint_costs_at_least_what_training_waited_for_it() -> None:
    interval = SaveInterval("auto")
    interval.note_step(1.0, is_busy=False)
    for _ in range(3):  # on a busy machine steps beside a checkpoint may be faster than the usual ones
        interval.note_save(0.01)
        interval.note_step(0.5, is_busy=True)
    assert interval.cost_seconds == pytest.approx(0.01)
    assert interval.seconds == pytest.approx(chosen(0.01, NODE_MTBF_SECONDS))
    assert interval.seconds > 60


def marks(events: Sequence[tuple[str, float, int]]) -> list[TimeMark]:
    return [
        TimeMark(event=event, unix_seconds=0.0, monotonic_seconds=at, about={"exit_code": code})  # type: ignore[arg-type]
        for event, at, code in events
    ]


def test_failures_that_a_run_has_seen_count() -> None:
    interval = SaveInterval("auto")
    interval.expect_failures([], num_nodes=4)
    assert interval.mtbf_seconds == NODE_MTBF_SECONDS / 4
    interval.expect_failures(marks([("start", 0, 0), ("resume", 9, 0), ("time", 1000, 0), ("end", 1000, 75)]), 4)
    assert interval.mtbf_seconds == NODE_MTBF_SECONDS / 4 + 1000
    killed = [("start", 0, 0), ("time", 500, 0), ("start", 900, 0), ("time", 1000, 0), ("end", 1000, 1)]
    interval.expect_failures(marks(killed), 4)  # the first start was killed, the second one has failed
    assert interval.mtbf_seconds == (NODE_MTBF_SECONDS / 4 + 1000) / 3
