"""The fastest plan on devices of one kind: bound everything, then look closer in the order of the bounds until nothing
can win.

candidates --bounds.py, arrays--> no faster than, no smaller than
    next lowest --bounds.py: order_bounds--> the same for each order of its axes
    next lowest --solve.py---> stages, policies, simulated seconds --forecast, allocator--> the best so far
stop when the next bound is not below the best by more than epsilon: what is left over is the gap
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.planner.bounds import Candidates, bound_all, floors, order_bounds
from meshwright.planner.rows import BoundedGrid, OrderedCandidate
from meshwright.planner.scoreboard import Alternative, Scoreboard, ScoredPlan, SearchResult
from meshwright.planner.solve import Solved, smallest_plan, solve
from meshwright.planner.space import dials, grids, orders_of
from meshwright.planner.wishes import SearchInputs, pin_problems
from meshwright.simulator.forecast import Forecast

CLOSE_LOOKS, MOST_LOOKS = 48, 1200
"""Candidates looked at closely before an epsilon counts, and at all. What bounds leave open then is said as the gap."""
BATCHES = ((8, 8), (16, 8), (64, 16), (256, 16), (8192, 32))
"""Candidates bounded closer and solved together: few at first, when every look may make the rest needless."""

FEW_ORDERS = 8
"""Orders of a candidate's axes that are bounded at once; more, only if it may win with each axis at its best."""

_TRIED = 20
"""Candidates tried before an alternative or a near miss is given up."""
_COMPARED = 1.1
"""Times the best up to which others are simulated, for people who want to compare."""
_ROUNDING = 1e-9
"""Sums in another order: a bound may differ from the same plan's forecast by this share."""
_RETRIES, _LITTLE = 6, 1 << 27
"""Times that a plan which fits by its bytes, but not in pieces, is solved again with less memory; and bytes that are
not worth another."""


def search_uniform(inputs: SearchInputs, top: int) -> SearchResult:
    """Plans for devices of one kind, best first; where nothing fits, also with what techniques do as a rescue."""
    if problems := pin_problems(inputs):
        raise MeshwrightError(problems)
    for rescues in (False, True):
        pool = BestFirst(inputs, rescues=rescues)
        pool.run(top)
        if pool.board.best is not None or pool.board.is_interrupted or not pool.may_be_rescued:
            break
    return pool.result(top)


class BestFirst:
    """All candidates with their bounds, and the plans made of some."""

    def __init__(self, inputs: SearchInputs, *, rescues: bool):
        self.inputs = inputs
        self.memory_bytes = inputs.cluster.device.memory_bytes
        self.board = Scoreboard(inputs)
        self.turned = dials(inputs, rescues=rescues)
        self.grids = tuple(grids(inputs, self.turned, self.board.rejected))
        self.leaves: list[BoundedGrid] = []
        self.runs: list[np.ndarray] = []
        """Of each leaf, the candidates that can run samples of this length, and are no others over again."""
        self.candidates = Candidates((), (), 1.0)
        self.left_out: dict[str, float] = {}
        """Compute dtypes not looked at -> no plan in them is faster than this."""
        self.solved: list[tuple[Solved, int]] = []
        self.waiting: list[tuple[float, int, int, OrderedCandidate]] = []
        """Candidates with any order of their axes, or a given one: (bound, number, leaf, pick)."""
        self.numbers = itertools.count()
        self.next = 0
        self.order = np.zeros(0, dtype=int)
        """Candidates not yet looked at, those from `next` on, in the order of their bounds."""

    def _add(self, dtype: str) -> None:
        """Bound all that computes in a dtype."""
        for grid in self.grids:
            for leaf in bound_all(self.inputs, grid, self.turned, dtype):
                runs = leaf.is_new
                for which, problem in leaf.sequence_problems():
                    self.board.reject(str(problem), int(np.sum(runs & which)))
                    runs = runs & ~which
                self.leaves.append(leaf)
                self.runs.append(runs)
        self.candidates = Candidates(self.leaves, self.runs, self.inputs.slower * (1 - _ROUNDING))
        seen = self.order[: self.next]
        left = np.setdiff1d(np.flatnonzero(self.candidates.fits(self.memory_bytes)), seen)
        order = left[np.argsort(self.candidates.least_seconds[left], kind="stable")]
        self.order = np.concatenate([seen, order]).astype(int)

    @property
    def may_be_rescued(self) -> bool:
        """Whether what no policy can save would fit."""
        return bool(np.any(self.candidates.runs & (self.candidates.base_bytes <= self.memory_bytes)))

    @property
    def limit_seconds(self) -> float:
        """Only what is bound to be below is looked at."""
        margin = self.inputs.epsilon if len(self.solved) >= CLOSE_LOOKS else 0.0
        return self.board.best_seconds * (1 - margin)

    def run(self, top: int) -> None:
        try:
            for dtype, floor in floors(self.inputs, self.turned):
                if floor >= self.limit_seconds:
                    self.left_out[dtype] = floor
                    continue
                self._add(dtype)
                for sizes in itertools.chain(BATCHES, itertools.repeat(BATCHES[-1])):
                    if len(self.solved) >= MOST_LOOKS or not self._look(*sizes, self.limit_seconds):
                        break
                for _ in range(2 * top):  # for people who want to compare
                    missing = top - len(self._plans())
                    if missing <= 0 or not self._look(missing, missing, np.inf):
                        break
        except KeyboardInterrupt:
            self.board.is_interrupted = True

    def _look(self, num_wide: int, num_close: int, limit: float) -> bool:
        """At the candidates with the least bounds below the limit; False if there are none."""
        wide: list[tuple[int, OrderedCandidate]] = []
        free: list[tuple[int, OrderedCandidate]] = []
        close: list[tuple[int, OrderedCandidate]] = []
        while len(wide) < num_wide and len(free) < num_wide and len(close) < num_close:
            ahead = self.candidates.least_seconds[self.order[self.next]] if self.next < len(self.order) else np.inf
            queued = self.waiting[0][0] if self.waiting else np.inf
            if min(ahead, queued) >= limit or not np.isfinite(min(ahead, queued)):
                break
            if queued <= ahead:
                _, _, leaf, pick = heapq.heappop(self.waiting)
                (close if pick.axis_order is not None else free).append((leaf, pick))
            else:
                candidate = self.order[self.next]
                at = int(self.candidates.leaf_of[candidate])
                pick = OrderedCandidate(int(self.candidates.index_of[candidate]), None, self.memory_bytes)
                ordered = self._ordered(at, pick)
                wide += [(at, each) for each in (ordered if len(ordered) <= FEW_ORDERS else [pick])]
                self.next += 1
        self._bound(wide)
        self._bound([(at, each) for at, pick in free for each in self._ordered(at, pick)])
        self._solve(close)
        return bool(wide or free or close)

    def _ordered(self, at: int, pick: OrderedCandidate) -> list[OrderedCandidate]:
        """With every order of its axes."""
        return [pick._replace(axis_order=order) for order in orders_of(self.leaves[at].grid, pick.candidate)]

    def _bound(self, picks: Iterable[tuple[int, OrderedCandidate]]) -> None:
        for at, mine in _by_leaf(picks).items():
            bounds = order_bounds(self.leaves[at], mine)
            for pick, bound in zip(mine, bounds, strict=True):
                heapq.heappush(self.waiting, (float(bound) * (1 - _ROUNDING), next(self.numbers), at, pick))

    def _solve(self, picks: Iterable[tuple[int, OrderedCandidate]]) -> None:
        for at, mine in _by_leaf(picks).items():
            for result in solve(self.leaves[at], mine, self.limit_seconds * _COMPARED):
                self.solved.append((result, at))
                self._score(result, at)

    def _score(self, found: Solved, at: int) -> None:
        """Forecast the one solved last, if it may be the best; if it then does not fit, again with less memory."""
        if found.plan is None:
            self.board.reject("does not fit in memory" if np.isinf(found.least_seconds) else "slower")
        elif found.seconds < self.limit_seconds * (1 + _ROUNDING):
            scored = self.board.score(found.plan)
            if scored is None or scored.forecast.step_seconds > self.limit_seconds:
                return
            scored = self.board.score(found.plan, replays=scored.forecast.fits)
            assert scored is not None
            if scored.forecast.fits:
                self.board.take(scored)
            else:
                self.solved[-1] = self._with_less(found, scored.forecast, at), at

    def _with_less(self, found: Solved, told: Forecast, at: int) -> Solved:
        """The fastest that fits in pieces too, between the least memory that is too much and one that will do. What
        needs more than a plan that does not fit is taken not to fit either."""
        used = told.peak_reserved_bytes + told.peak_bytes - told.peak_allocated_bytes
        over = max(used - self.memory_bytes, told.peak_bytes - self.memory_bytes, _LITTLE)
        high = float(min(told.peak_bytes - 1, found.pick.memory_bytes - 1))
        low, best = high - over, None
        for _ in range(_RETRIES):
            room = low if best is None else (low + high) / 2
            (less,) = solve(self.leaves[at], [found.pick._replace(memory_bytes=room)])
            scored = None if less.plan is None else self.board.score(less.plan, replays=True)
            if scored is None:
                break
            if scored.forecast.fits:
                self.board.take(scored)
                low, best = max(room, scored.forecast.peak_bytes), less
            else:
                high = min(high, scored.forecast.peak_bytes - 1.0)
                low = min(low, high) - over * (best is None)
            if high - low < _LITTLE:
                break
        (most,) = solve(self.leaves[at], [found.pick._replace(memory_bytes=high)])
        if best is None:
            self.board.reject("does not fit in memory in pieces")
            return replace(most, plan=None, seconds=np.inf)
        return replace(best, least_seconds=min(most.least_seconds, best.seconds))

    def _plans(self) -> list[Plan]:
        """What was solved and is not faster than the best (and so too large), fastest first, each once."""
        least = 0.0 if self.board.best is None else self.board.best.forecast.step_seconds * (1 - _ROUNDING)
        solved = [result for result, _ in self.solved if result.plan is not None and result.seconds >= least]
        plans = {result.plan: result.seconds for result in solved if result.plan is not None}
        return sorted(plans, key=lambda plan: (plans[plan], str(plan)))

    def result(self, top: int) -> SearchResult:
        ranked: list[ScoredPlan] = []
        if (best := self.board.best) is not None:
            # A few more: where stages have chunks, they are sorted by bounds. Their memory is not replayed: none of
            # them is above the best.
            fitting = itertools.islice(self.board.that_fit(self._plans()), 2 * top)
            others = sorted((each for each in fitting if each.rank > best.rank), key=lambda each: each.rank)
            ranked = [best, *others][:top]
        unfitting = self.candidates.runs & ~self.candidates.fits(self.memory_bytes)
        self.board.reject("does not fit in memory", int(np.sum(unfitting)))
        self.board.reject("slower", len(self.order) - len({(at, f.pick.candidate) for f, at in self.solved}))
        unfit = self._unfit(best) if best else None
        return SearchResult(
            best=best,
            ranked=tuple(ranked),
            rejected=dict(self.board.rejected.most_common()),
            nearest_miss=None if best else self._nearest_miss(),
            evaluated=sum(int(leaf.is_new.sum()) for leaf in self.leaves),
            search_seconds=0.0,
            gap_fraction=self._gap(),
            alternatives=self._alternatives(best.plan) if best else (),
            faster_unfit=unfit,
            is_interrupted=self.board.is_interrupted,
        )

    def _gap(self) -> float | None:
        if self.board.best is None:
            return None
        left = [result.least_seconds * (1 - _ROUNDING) for result, _ in self.solved]
        left += [self.waiting[0][0]] if self.waiting else []
        left += [float(self.candidates.least_seconds[self.order[self.next]])] if self.next < len(self.order) else []
        gap = 1.0 - min(left, default=np.inf) / self.board.best.forecast.step_seconds
        return float(gap) if gap > 2 * _ROUNDING else 0.0

    def _smallest(self, candidate: int) -> ScoredPlan | None:
        """The plan of a candidate that needs least, whether it fits or not."""
        at, index = int(self.candidates.leaf_of[candidate]), int(self.candidates.index_of[candidate])
        return self.board.score(smallest_plan(self.leaves[at], index, self.leaves[at].grid.axis_order))

    def _nearest_miss(self) -> ScoredPlan | None:
        candidates = np.flatnonzero(self.candidates.runs)
        order = np.lexsort((self.candidates.least_seconds[candidates], self.candidates.least_bytes[candidates]))
        tried = (self._smallest(int(candidate)) for candidate in candidates[order][:_TRIED])
        return min(
            (each for each in tried if each is not None), key=lambda each: each.forecast.peak_bytes, default=None
        )

    def _unfit(self, best: ScoredPlan) -> ScoredPlan | None:
        """The fastest of the faster candidates that no policy makes fit."""
        least, limit = self.candidates.least_seconds, best.forecast.step_seconds
        candidates = np.flatnonzero(self.candidates.runs & ~self.candidates.fits(self.memory_bytes) & (least < limit))
        for candidate in candidates[np.argsort(least[candidates], kind="stable")][:_TRIED]:
            scored = self._smallest(int(candidate))
            if scored is not None and not scored.forecast.fits and scored.forecast.step_seconds < limit:
                return scored
        return None

    def _alternatives(self, best: Plan) -> tuple[Alternative, ...]:
        """What the decision for or against each technique is worth: of the plans looked at, or bound to be."""
        used = {technique.name for technique in best.techniques}
        plans = self._plans()
        result = []
        for name in (dial.kind.name for dial in self.turned):
            others = [plan for plan in plans if (plan.technique(name) is None) == (name in used)]
            scored = next(self.board.that_fit(others[:_TRIED]), None)
            least: list[float] = []
            if scored is None:  # no candidate that decides so and may fit is faster
                masks = np.concatenate([leaf.has(name) != (name in used) for leaf in self.leaves])
                which = masks & self.candidates.fits(self.memory_bytes)
                least = [*self.candidates.least_seconds[which], *(self.left_out.values() if name in used else ())]
            bound = float(min(least)) if least else None
            result.append(Alternative(technique=name, is_used=name in used, scored=scored, least_seconds=bound))
        return tuple(result)


def _by_leaf(picks: Iterable[tuple[int, OrderedCandidate]]) -> dict[int, list[OrderedCandidate]]:
    grouped: dict[int, list[OrderedCandidate]] = defaultdict(list)
    for at, pick in picks:
        grouped[at].append(pick)
    return grouped
