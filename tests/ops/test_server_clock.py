"""A parameter server's decisions, over thousands of orders in which workers may come."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from meshwright.ops.server_clock import NOT_FINITE, SAVE, STOP, Drop, Release, ServerClock, Update


class History:
    """Workers of different speeds; what each may do is kept from the decisions alone."""

    def __init__(self, seed: int, **settings: int | None):
        self.drawn = drawn = random.Random(seed)
        self.count = drawn.randint(2, 6)
        self.clock = ServerClock(workers=self.count, **settings)  # type: ignore[arg-type]
        self.ended = [0] * self.count
        self.begun = [1] * self.count
        self.is_waiting = [False] * self.count
        self.speeds = [drawn.choice([1, 1, 1, 5, 20]) for _ in range(self.count)]
        self.updates: list[Update] = []
        self.told: dict[int, dict[int, int]] = {}
        """Clock -> worker -> what was asked of it there."""
        self.busy: dict[int, dict[int, bool]] = {}

    def push(self, *, asked: int = 0, is_busy: bool = False, among: list[int] | None = None) -> int:
        able = [worker for worker in among or range(self.count) if not self.is_waiting[worker]]
        assert able, "all workers wait for each other"
        worker = self.drawn.choices(able, [self.speeds[each] for each in able])[0]
        self.ended[worker] += 1
        self.is_waiting[worker] = True
        for decision in self.clock.push(worker, asked=asked, is_busy=is_busy):
            if isinstance(decision, Update):
                self.updates.append(decision)
            elif isinstance(decision, Release):
                assert decision.clock == self.ended[decision.worker]
                assert self.is_waiting[decision.worker]
                self.is_waiting[decision.worker] = False
                self.begun[decision.worker] = decision.clock + 1
                self.told.setdefault(decision.clock, {})[decision.worker] = decision.asked
                self.busy.setdefault(decision.clock, {})[decision.worker] = decision.is_busy
        return worker


def test_nobody_is_further_ahead_than_the_staleness() -> None:
    """In 2,000 histories; each clock is one update of all gradients, and the bound is reached."""
    largest: dict[int, int] = {}
    for seed in range(2_000):
        staleness = seed % 5
        history = History(seed, staleness=staleness)
        for _ in range(50):
            history.push()
            gap = max(history.begun) - min(history.begun)
            assert gap <= staleness
            largest[staleness] = max(gap, largest.get(staleness, 0))
        assert [each.clock for each in history.updates] == [*range(1, min(history.ended) + 1)]
        assert all(each.workers == tuple(range(history.count)) for each in history.updates)
        assert all(each <= staleness for update in history.updates for each in update.staleness)
    assert largest == {staleness: staleness for staleness in range(5)}


def test_nobody_waits_in_async_and_ages_are_counted() -> None:
    for seed in range(200):
        history, versions, ages = History(seed, staleness=None), Counter[int](), Counter[int]()
        for version in range(60):
            worker = history.push()
            assert not any(history.is_waiting)
            assert history.updates[-1].workers == (worker,)
            assert history.updates[-1].staleness == (version - versions[worker],)
            ages[version - versions[worker]] += 1
            versions[worker] = version + 1
        assert history.clock.ages == ages
        figures = history.clock.figures()
        assert {key: figures[f"staleness_{key}"] for key in ages} == dict(ages)
        assert figures["staleness_mean"] == pytest.approx(sum(key * n for key, n in ages.items()) / 60)


def test_an_update_waits_for_all_but_the_backups() -> None:
    """The last of four workers stops for long: it is late, its gradient is dropped, and it leaves the steps out."""
    history = History(0, staleness=0, backups=1)
    history.count = 4
    history.clock = ServerClock(workers=4, staleness=0, backups=1)
    for name in ("ended", "begun", "is_waiting", "speeds"):
        setattr(history, name, [{"ended": 0, "begun": 1, "is_waiting": False, "speeds": 1}[name]] * 4)
    for _ in range(3 * 10):
        history.push(among=[0, 1, 2])
    assert history.ended == [10, 10, 10, 0]
    assert [each.workers for each in history.updates] == [(0, 1, 2)] * 10
    late = history.clock.push(3)
    assert list(late) == [Drop(3, 1), Release(3, 1, 0, False, False, 10)]
    for clock in range(2, 10):
        assert list(history.clock.push(3, is_idle=True)) == [Release(3, clock, 0, False, False, 10)]
    assert list(history.clock.push(3, is_idle=True)) == [Release(3, 10, 0, False, True, 10)], "with weights again"
    assert history.clock.dropped == 10
    assert history.clock.pulled == [10] * 4


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_a_request_is_due_for_all_at_one_clock_that_nobody_has_left(staleness: int | None) -> None:
    for seed in range(300):
        history = History(seed, staleness=staleness)
        for _ in range(history.drawn.randint(0, 30)):
            history.push()
        before = max(history.begun)
        kind = history.drawn.choice([STOP, SAVE, NOT_FINITE] if staleness != 0 else [STOP, SAVE])
        history.push(asked=kind)
        for _ in range(600):
            able = [
                each for each in range(history.count) if history.ended[each] < before and not history.is_waiting[each]
            ]
            if not able:
                break
            # Whoever asks does so until it is told, and others may ask, too.
            history.push(among=able, asked=kind * history.drawn.choice([0, 1]))
        assert history.told[before] == dict.fromkeys(range(history.count), kind)
        others = [asked for clock, told in history.told.items() for asked in told.values() if clock != before]
        assert not any(others)
        assert not history.clock.waiting, "a gradient that is not finite holds nobody up"


def test_all_workers_hear_the_same_of_whether_somebody_is_busy() -> None:
    heard = Counter[bool]()
    for seed in range(300):
        history = History(seed, staleness=seed % 4 if seed % 5 else None)
        for _ in range(80):
            history.push(is_busy=history.drawn.random() < 0.2)
        for told in history.busy.values():
            assert len(set(told.values())) == 1
            heard[next(iter(told.values()))] += 1
    assert min(heard.values()) > 100
