"""Goodput of a run whose nodes fail: by formula, and by replaying failures into the categories of the time ledger.

Failures come at random with a constant rate (exponential gaps). One costs the work since the last checkpoint and a
restart, which may fail in turn; without a spare node the run waits until a node is repaired. No torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.core.time_ledger import CATEGORIES, TimeLedger

_NUM_FAILURES = 4000
"""Replayed for a forecast; goodput is then known to about half a point."""


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """What nodes and restarts are expected to do."""

    mtbf_seconds: float
    """Mean time between failures of one node."""
    restart_seconds: float
    """From a failure to the next step, where a node is there to replace the failed one."""
    checkpoint_seconds: float
    """That training waits for one."""
    repair_seconds: float = 4 * 3600.0
    """Until a failed node is back."""


@dataclass(frozen=True, kw_only=True)
class FailureForecast:
    model: FailureModel
    num_nodes: int
    interval_seconds: float
    """Training between two checkpoints: as given, or the best."""
    young_seconds: float
    """Young's first guess of the best interval: sqrt(2 x cost of a checkpoint x time between failures)."""
    spares: int
    best_spares: int
    """For the most productive time of a node that is paid for, spares included."""
    ledger: TimeLedger
    """Of a long run with `spares`."""
    goodput_by_spares: dict[int, float]


def expected_goodput(interval: float, checkpoint: float, restart: float, mtbf: float) -> float:
    """The share of wall time that is productive, exactly, where a spare is always there (Daly 2006, equation 13)."""
    exponent = (interval + checkpoint + restart) / mtbf
    if exponent > 700:
        return 0.0
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + checkpoint) / mtbf))


def young_interval(checkpoint: float, mtbf: float) -> float:
    return math.sqrt(2 * checkpoint * mtbf)


def best_interval(checkpoint: float, mtbf: float) -> float:
    """The interval of the most goodput: exp((t + c) / m) (1 - t / m) = 1, by bisection; restarts do not change it."""
    low, high = 0.0, mtbf
    for _ in range(100):
        middle = (low + high) / 2
        grows = (middle + checkpoint) / mtbf + math.log1p(-middle / mtbf) > 0 if middle < mtbf else False
        low, high = (middle, high) if grows else (low, middle)
    return (low + high) / 2


def replay_failures(
    gaps: Iterable[float],
    *,
    interval: float,
    checkpoint: float,
    restart: float,
    first_start: float = 0.0,
    work: float = math.inf,
    repair: float = 0.0,
    spares: int = 0,
) -> TimeLedger:
    """The ledger of `work` seconds of training (or until the failures are used up). `gaps`: seconds from each start
    to the failure that ends it; a start without a failure reaches the end."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    repaired: list[float] = []
    """When nodes that failed come back, the next first."""
    now, start, num_starts = 0.0, first_start, 0
    for gap in itertools.chain(gaps, () if math.isinf(work) else (math.inf,)):
        num_starts += 1
        left = work - seconds["productive"]
        rounds = math.ceil(left / interval - 1e-9) if left < math.inf else math.inf
        needed = start + left + rounds * checkpoint if left < math.inf else math.inf
        if gap >= needed:
            for name, more in (("restart", start), ("productive", left), ("checkpoint", rounds * checkpoint)):
                seconds[name] += more
            break
        trained = max(0.0, gap - start)
        whole = math.floor(trained / (interval + checkpoint))
        rest = trained - whole * (interval + checkpoint)
        seconds["restart"] += min(gap, start)
        seconds["productive"] += whole * interval
        lost = min(rest, interval, left - whole * interval)
        seconds["lost"] += lost
        seconds["checkpoint"] += whole * checkpoint + rest - lost
        now, start = now + gap, restart
        heapq.heappush(repaired, now + repair)
        while repaired and repaired[0] <= now:
            heapq.heappop(repaired)
        if len(repaired) > spares:  # nobody is there to take its place
            wait = heapq.heappop(repaired) - now
            seconds["idle"] += wait
            now += wait
    return TimeLedger(seconds=seconds, num_starts=num_starts)


def forecast_failures(
    model: FailureModel, num_nodes: int, *, interval: float = 0.0, spares: int = -1, step: float = 0.0
) -> FailureForecast:
    """Goodput of a run on so many nodes, its best interval and number of spares; 0 and -1: the best are used. An
    interval is at least a `step`."""
    mtbf = model.mtbf_seconds / num_nodes
    dice = random.Random(0)
    gaps = [dice.expovariate(1 / mtbf) for _ in range(_NUM_FAILURES)]
    chosen = max(interval or best_interval(model.checkpoint_seconds, mtbf), step)
    about = {"interval": chosen, "checkpoint": model.checkpoint_seconds, "restart": model.restart_seconds}
    ledgers: dict[int, TimeLedger] = {}

    def ledger(count: int) -> TimeLedger:
        if count not in ledgers:
            ledgers[count] = replay_failures(gaps, **about, repair=model.repair_seconds, spares=count)
        return ledgers[count]

    def of_paid(count: int) -> float:
        return ledger(count).goodput * num_nodes / (num_nodes + count)

    best = 0
    most = expected_goodput(chosen, model.checkpoint_seconds, model.restart_seconds, mtbf)
    for count in range(1, 10 * num_nodes):
        if 1.05 * most * num_nodes / (num_nodes + count) <= of_paid(best):
            break  # however many there are, no more than `most` can be had
        best = count if of_paid(count) > of_paid(best) else best
    used = best if spares < 0 else spares
    return FailureForecast(
        model=model,
        num_nodes=num_nodes,
        interval_seconds=chosen,
        young_seconds=young_interval(model.checkpoint_seconds, mtbf),
        spares=used,
        best_spares=best,
        ledger=ledger(used),
        goodput_by_spares={count: ledger(count).goodput for count in sorted({0, best, used, best + 1})},
    )
