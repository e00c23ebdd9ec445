"""The fastest plan that fits: bound everything, then forecast in the order of the bounds until nothing can win.

candidates --price, arrays--> (bound, peak) --fits?--> sorted by bound --forecast--> ranked
                                                               stop when the next bound is above the worst kept
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.work import ADAM, Updating
from meshwright.search.bounds import Bounded, bound_all
from meshwright.search.dials import dials
from meshwright.search.fold import folded
from meshwright.search.pins import pin_problems
from meshwright.search.space import grids
from meshwright.search.wishes import read_wishes
from meshwright.simulate.forecast import Forecast, forecast

MOST_FORECASTS = 160
"""Plans looked at one by one. Where bounds end the search earlier, the best is certain; else the gap says so."""

MOST_COUNTED = 2**53
"""Samples or tokens; above, the floats that prices are cannot count them one by one."""

_TRIED = 20
"""Candidates whose plan's own check may object before an alternative or a near miss is given up."""

_ROUNDING = 1e-9
"""Sums in another order: a bound may differ from the same plan's forecast by this share."""

Scored = tuple[Plan, Forecast]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best plan with a technique the winner lacks, or without one it has."""

    technique: str
    is_used: bool
    found: Scored | None
    """None: nothing fits then."""


@dataclass(frozen=True, kw_only=True)
class Found:
    best: Scored | None
    ranked: tuple[Scored, ...]
    rejected: dict[str, int]
    """Reason -> candidates."""
    nearest_miss: Scored | None
    """Where nothing fits, the plan that needs the least memory."""
    evaluated: int
    search_seconds: float
    gap_fraction: float | None
    """No candidate is faster than the best by more than this share, by the cost model; 0: it is the optimum."""
    alternatives: tuple[Alternative, ...] = field(default=())


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    sequence: int,
    optimizer: Updating = ADAM,
    allow: str = "rounded",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    top: int = 10,
    microbatch: int | None = None,
) -> Found:
    """Plans for `batch` samples of `sequence` tokens a step on all devices of `cluster`, best first."""
    started = time.perf_counter()
    wishes = read_wishes(pin, ban, allow=allow, microbatch=microbatch)
    problems = [*_number_problems(batch=batch, sequence=sequence, top=top, microbatch=wishes.microbatch)]
    if problems := problems or pin_problems(wishes, profile, cluster, sequence):
        raise MeshwrightError(problems)
    rejected: Counter[str] = Counter()
    # What may be tried depends on the samples there are, not on the longest the model takes.
    asked = replace(profile, max_sequence=sequence)
    turned = folded(profile, cluster, dials(asked, cluster, wishes), sequence)
    space = grids(
        profile,
        cluster,
        turned,
        batch=batch,
        sequence=sequence,
        microbatch=wishes.microbatch,
        rejected=rejected,
    )
    tables = [table for grid in space for table in bound_all(profile, cluster, grid, turned, optimizer=optimizer)]
    pool = _Pool(profile, cluster, tables, sequence, optimizer, rejected)
    ranked, gap = pool.rank(top)
    best = ranked[0] if ranked else None
    reasons = dict(rejected.most_common())
    return Found(
        best=best,
        ranked=ranked,
        rejected=reasons,
        nearest_miss=None if best else pool.nearest_miss(),
        evaluated=pool.num_candidates,
        alternatives=pool.alternatives(best[0], [d.kind.name for d in turned]) if best else (),
        gap_fraction=gap,
        search_seconds=time.perf_counter() - started,  # last: all of the above is part of it
    )


def _number_problems(**numbers: int | None) -> Iterator[Problem]:
    for name, value in numbers.items():
        if value is not None and not 1 <= value <= MOST_COUNTED:
            fix = "Use at least 1." if value < 1 else f"Use at most {MOST_COUNTED}."
            yield Problem(where=name, what=f"is {value}.", fix=fix)


class _Pool:
    """All candidates with their bounds, and the forecasts made of some."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        tables: list[Bounded],
        sequence: int,
        optimizer: Updating,
        rejected: Counter[str],
    ):
        self.profile, self.cluster, self.tables = profile, cluster, tables
        self.sequence, self.optimizer, self.rejected = sequence, optimizer, rejected
        self.known: dict[Plan, Scored | None] = {}
        lengths = [table.grid.num_candidates for table in tables]
        self.table_of = np.repeat(np.arange(len(tables)), lengths)
        self.index_of = np.concatenate([np.arange(n) for n in lengths]) if tables else np.zeros(0, int)
        self.seconds = _joined([table.least_seconds for table in tables])
        self.peak_bytes = _joined([table.peak_bytes for table in tables])
        self.is_new = _joined([table.is_new for table in tables]).astype(bool)
        takes = _joined([self._takes_sequence(table) for table in tables]).astype(bool)
        self.runs = np.isfinite(self.seconds) & takes
        self.fits = self.runs & (self.peak_bytes <= cluster.device.memory_bytes)
        self._reject("does not fit in memory", int(np.sum(self.runs & ~self.fits)))
        self._reject("the device has no such dtype", int(np.sum(takes & ~self.runs)))

    @property
    def num_candidates(self) -> int:
        return int(np.sum(self.is_new))

    def _reject(self, reason: str, count: int = 1) -> None:
        if count:
            self.rejected[reason] += count

    def _takes_sequence(self, table: Bounded) -> np.ndarray:
        """New candidates that can run samples of this length; the others are counted with the reason."""
        takes = table.is_new
        for which, problem in table.sequence_problems(self.sequence):
            self._reject(str(problem), int(np.sum(takes & which)))
            takes = takes & ~which
        return takes

    def scored(self, candidate: int) -> Scored | None:
        """Its plan and forecast, or None (and the reason counted) if the plan's own check objects."""
        table = self.tables[self.table_of[candidate]]
        plan = table.grid.plan(table.techniques, int(self.index_of[candidate]))
        if plan not in self.known:
            problems = plan.check(self.profile, self.cluster) or plan.check_sequence(self.sequence)
            self.known[plan] = None
            if problems:
                self._reject(str(problems[0]))
            else:
                self.known[plan] = (plan, self._forecast(plan, replays=False))
        return self.known[plan]

    def _forecast(self, plan: Plan, *, replays: bool) -> Forecast:
        settings: dict[str, Any] = {"sequence": self.sequence, "optimizer": self.optimizer, "replays": replays}
        return forecast(self.profile, plan, self.cluster, **settings)

    def _in_full(self, found: Scored) -> Scored:
        """With the allocator replayed, which takes too long for all."""
        return found[0], self._forecast(found[0], replays=True)

    def _by_bound(self, mask: np.ndarray) -> Iterator[int]:
        chosen = np.flatnonzero(mask)
        order = np.argsort(self.seconds[chosen], kind="stable")
        return (int(candidate) for candidate in chosen[order])

    def rank(self, top: int) -> tuple[tuple[Scored, ...], float | None]:
        """The best `top`, and how much faster a candidate never looked at could still be."""
        kept: list[Scored] = []
        seen = 0
        remaining_seconds = np.inf
        for candidate in self._by_bound(self.fits):
            bound = self.seconds[candidate] * (1 - _ROUNDING)
            is_full = len(kept) >= top
            if is_full and (seen >= MOST_FORECASTS or bound > kept[top - 1][1].step_seconds):
                remaining_seconds = bound
                break
            seen += 1
            found = self.scored(candidate)
            if found is None or not found[1].fits or (is_full and _rank(found) >= _rank(kept[top - 1])):
                continue
            found = self._in_full(found)
            if found[1].fits:
                kept = sorted([*kept, found], key=_rank)[: max(top, 1)]
            else:
                self._reject("does not fit in memory in pieces")
        self._reject("slower", int(np.sum(self.fits)) - seen)
        if not kept:
            return (), None
        return tuple(kept), float(max(0.0, 1.0 - remaining_seconds / kept[0][1].step_seconds))

    def nearest_miss(self) -> Scored | None:
        candidates = np.flatnonzero(self.runs)
        order = np.lexsort((self.seconds[candidates], self.peak_bytes[candidates]))
        for candidate in candidates[order][:_TRIED]:
            found = self.scored(int(candidate))
            if found is not None:
                return self._in_full(found)
        return None

    def alternatives(self, best: Plan, names: list[str]) -> tuple[Alternative, ...]:
        """What the decision for or against each technique is worth."""
        used = {technique.name for technique in best.techniques}
        found = []
        for name in names:
            has = np.concatenate([table.has(name) for table in self.tables])
            wanted = self.fits & (~has if name in used else has)
            tried = map(self.scored, itertools.islice(self._by_bound(wanted), _TRIED))
            first = next((scored for scored in tried if scored is not None), None)
            found.append(Alternative(technique=name, is_used=name in used, found=first))
        return tuple(found)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _rank(scored: Scored) -> tuple[float, str]:
    return scored[1].step_seconds, str(scored[0])


def found_as_json(found: Found) -> dict[str, Any]:
    """What `mw plan --json` prints."""

    def scored(item: Scored | None) -> dict[str, Any] | None:
        return None if item is None else {"plan": encode(item[0]), "forecast": encode(item[1])}

    return {
        "best": scored(found.best),
        "ranked": [scored(item) for item in found.ranked],
        "rejected": found.rejected,
        "nearest_miss": scored(found.nearest_miss),
        "evaluated": found.evaluated,
        "search_seconds": found.search_seconds,
        "gap_fraction": found.gap_fraction,
    }
