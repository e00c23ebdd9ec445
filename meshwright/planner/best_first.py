"""The fastest plan on devices of one kind: bound everything, then look closer in the order of the bounds until nothing
can win.

candidates --bounds.py, arrays--> no faster than, no smaller than
    next lowest --bounds.py: order_bounds--> the same for each order of its axes
    next lowest --solve.py---> stages, policies, simulated seconds --forecast, allocator--> the best so far
stop when the next bound is not below the last of the plans asked for: what is left over is the gap
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Choice, Technique
from meshwright.planner.bounds import Candidates, bound_all, floors, order_bounds
from meshwright.planner.policies import Memo
from meshwright.planner.rows import BoundedGrid, OrderedCandidate
from meshwright.planner.scoreboard import AS_FAST, Alternative, Scoreboard, ScoredPlan, SearchResult, simpler_first
from meshwright.planner.solve import Solved, smallest_plan, solve
from meshwright.planner.space import Grid, dials, grids, orders_of
from meshwright.planner.wishes import SearchInputs, pin_problems

FEW_LOOKS, CLOSE_LOOKS, MOST_LOOKS = 48, 400, 1200
"""Candidates looked at closely where one plan is asked for on the way to another answer, for all plans that are asked
for, and at all. After the first numbers only what may be faster than the best by more than epsilon is looked at. What
bounds leave open is said as the gap."""
BATCHES = ((8, 8), (16, 8), (64, 16), (256, 16), (8192, 32))
"""Candidates bounded closer and solved together: few at first, when every look may make the rest needless. Where a
limit is known, those of the same leaves that are below it come along: pricing them together takes little longer."""

FEW_ORDERS = 8
"""Orders of a candidate's axes that are bounded at once; more, only if it may win with each axis at its best."""

TELL_SECONDS = 5.0
_TRIED = 20
"""Candidates tried before a near miss is given up."""
_SOLVED, _UNFIT, _EXPANDED, _FAR = 4, 0.25, 6, 1.5
"""Of plans that decide otherwise about a technique: candidates solved at most, as how many one counts of which nothing
fits or can win, times that 8 are bounded closer, and times the best that a bound may be for one to be looked for."""
_ROUNDING = 1e-9
"""Sums in another order: a bound may differ from the same plan's forecast by this share."""
_RETRIES, _LITTLE = 4, 0.01
"""Times that a plan which fits by its bytes, but not in pieces, is solved again with less memory; and share of the
memory that is not worth another."""

_Waiting = tuple[float, int, int, OrderedCandidate]
"""A candidate with any order of its axes, or a given one: (bound, number, leaf, pick)."""


Bounds = dict[tuple[str, str, int], list[BoundedGrid]]
"""Leaves by dtype, what may be set and the number of their grid: the same question with other memory has the same."""


def search_uniform(
    inputs: SearchInputs, top: int, *, compares: bool = False, tie: float = 0.0, bounds: Bounds | None = None
) -> SearchResult:
    """Plans for devices of one kind, best first; where nothing fits, also with what techniques do as a rescue.
    `compares`: also what each technique is worth. `bounds`: from the same question with other memory."""
    if problems := pin_problems(inputs):
        raise MeshwrightError(problems)
    pool, looks = BestFirst(inputs, rescues=False, bounds=bounds), CLOSE_LOOKS if compares or top > 1 else FEW_LOOKS
    pool.run(top, looks)
    if pool.board.best is None and not pool.board.is_interrupted and pool.may_be_rescued:
        pool.turn(rescues=True)
        pool.run(top, looks)
    return pool.result(top, compares, tie)


class BestFirst:
    """All candidates with their bounds, and the plans made of some."""

    def __init__(self, inputs: SearchInputs, *, rescues: bool, bounds: Bounds | None = None):
        self.inputs = inputs
        self.bounds = bounds
        self.memory_bytes = inputs.cluster.device.memory_bytes
        self.board = Scoreboard(inputs)
        self.turn(rescues=rescues)
        self.leaves: list[BoundedGrid] = []
        self.runs: list[np.ndarray] = []
        """Of each leaf, the candidates that can run samples of this length, and are no others over again."""
        self.candidates = Candidates((), (), 1.0)
        self.left_out: dict[str, float] = {}
        """Compute dtypes not looked at -> no plan in them is faster than this."""
        self.solved: list[tuple[Solved, int]] = []
        self.top, self.close_looks = 1, CLOSE_LOOKS
        """Plans asked for, and candidates looked at closely for them."""
        self.origins: dict[Plan, tuple[int, OrderedCandidate]] = {}
        """Of plans that fit: leaf and pick."""
        self.unsettled: list[tuple[float, int]] = []
        """(seconds, place in `solved`) of those that may not fit in the allocator's pieces."""
        self.settling: dict[int, Iterator[tuple[Solved, ScoredPlan | None]]] = {}
        """By place in `solved`: what is left to be done for one that is not settled."""
        self.unfit: set[tuple[int, int]] = set()
        """Leaf and candidate of those that cannot fit, looked at closer."""
        self.waiting: list[_Waiting] = []
        self.numbers = itertools.count()
        self.told = time.monotonic()
        """When it was last said how far the search is."""
        self.next = 0
        self.order = np.zeros(0, dtype=int)
        """Candidates not yet looked at, those from `next` on, in the order of their bounds."""

    def turn(self, *, rescues: bool) -> None:
        """What may be tried; what was tried before is not tried again."""
        self.board.rejected.clear()
        self.turned = dials(self.inputs, rescues=rescues)
        self.grids = tuple(grids(self.inputs, self.turned, self.board.rejected))

    def _add(self, dtype: str) -> None:
        """Bound all that computes in a dtype."""
        known = {leaf.techniques for leaf in self.leaves}
        for number, grid in enumerate(self.grids):
            for leaf in self._bounded(number, grid, dtype, known):
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

    def _bounded(
        self, number: int, grid: Grid, dtype: str, without: Collection[tuple[Technique, ...]]
    ) -> list[BoundedGrid]:
        key, made = (dtype, str(self.turned), number), bound_all(self.inputs, grid, self.turned, dtype, without)
        if self.bounds is None:  # nobody asks again: what they are made from may go
            return [replace(leaf, seconds_within=None) for leaf in made]
        if key not in self.bounds:
            leaves = list(made)
            if all(leaf.seconds_within is not None for leaf in leaves):
                self.bounds[key] = leaves
            return leaves
        return [
            replace(leaf, grid=grid, least_seconds=leaf.seconds_within(self.memory_bytes))
            for leaf in self.bounds[key]
            if leaf.seconds_within is not None
        ]

    @property
    def may_be_rescued(self) -> bool:
        """Whether what no policy can save would fit, or could be moved to another tier."""
        given = self.inputs.profile, self.inputs.cluster
        options = (option for dial in self.turned for option in dial.kind.options(*given))
        if any(isinstance(option, Choice) and option.moves_base for option in options):
            return True
        return bool(np.any(self.candidates.runs & (self.candidates.base_bytes <= self.memory_bytes)))

    @property
    def limit_seconds(self) -> float:
        """Only what is bound to be below is looked at: as long as that is not too much, whatever may be among the plans
        asked for, so that fewer of them are always the first of more."""
        fastest = self.fastest_seconds
        if len(self.solved) >= self.close_looks and fastest:
            return fastest[0] * (1 - self.inputs.epsilon)
        return fastest[-1] if len(fastest) == self.top else np.inf

    @property
    def fastest_seconds(self) -> list[float]:
        """Of as many plans as are asked for."""
        taken = (each.seconds_to_target for each in self.board.taken.values())
        return heapq.nsmallest(self.top, itertools.chain((seconds for seconds, _ in self.unsettled), taken))

    def run(self, top: int, close_looks: int) -> None:
        self.top, self.close_looks = top, close_looks
        try:
            for dtype, floor in floors(self.inputs, self.turned):
                if floor >= self.limit_seconds or self.is_late:
                    self.left_out[dtype] = floor
                    continue
                self._add(dtype)
                sizes = itertools.chain(BATCHES, itertools.repeat(BATCHES[-1]))
                while (self.may_look and self._look(*next(sizes))) or self._settle_fastest():
                    self._tell()
            if self.board.best is None and len(self.solved) >= MOST_LOOKS:
                self._take_smallest()
        except KeyboardInterrupt:
            self.board.is_interrupted = True
            while self.board.best is None and self._settle_fastest():
                pass

    def _take_smallest(self) -> None:
        """Where nothing fits of all that was looked at: plans of the candidates that need least memory."""
        columns = self.candidates
        candidates = np.flatnonzero(columns.fits(self.memory_bytes))
        for candidate in candidates[np.argsort(columns.least_bytes[candidates], kind="stable")][:_TRIED].tolist():
            at, index = int(columns.leaf_of[candidate]), int(columns.index_of[candidate])
            scored = self._smallest(candidate)
            if scored is not None and scored.forecast.fits:
                scored = self.board.score(scored.plan, replays=True)
            if scored is not None and scored.forecast.fits:
                self.board.take(scored)
                order = self.leaves[at].grid.axis_order
                self.origins[scored.plan] = at, OrderedCandidate(index, order, self.memory_bytes)

    @property
    def is_late(self) -> bool:
        """Whether time is up and there is a plan."""
        has_plan = bool(self.unsettled) or self.board.best is not None
        return has_plan and time.monotonic() >= self.inputs.deadline

    @property
    def may_look(self) -> bool:
        return len(self.solved) < MOST_LOOKS and not self.is_late

    def _tell(self) -> None:
        """How far the search is, every few seconds."""
        now, best = time.monotonic(), self.board.best
        if self.inputs.tell is None or now < self.told + TELL_SECONDS or best is None:
            return
        self.told = now
        step, gap = best.forecast.step_seconds, self._gap(best) or 0.0
        self.inputs.tell(f"step {step:.3g} s so far; none is more than {gap:.1%} faster")

    def _settle_fastest(self) -> bool:
        """The fastest plan that is not settled, if it is among those asked for; False if there is none."""
        ranked = self.board.ranked(self.top)
        limit = ranked[-1].seconds_to_target * (1 + _ROUNDING) if len(ranked) == self.top else np.inf
        if not self.unsettled or self.unsettled[0][0] > limit:
            return False
        _, place = heapq.heappop(self.unsettled)
        found, at = self.solved[place]
        if place not in self.settling:
            self.settling[place] = self._settled(found, self.leaves[at])
        settled, scored = next(self.settling[place])
        self.solved[place] = settled, at
        if scored is not None:
            self.board.take(scored)
            self.origins[scored.plan] = at, found.pick
        elif settled.plan is not None:
            heapq.heappush(self.unsettled, (settled.seconds, place))
        return True

    def _look(self, num_wide: int, num_close: int) -> bool:
        """At the candidates with the least bounds below the limit; False if there are none."""
        limit = self.limit_seconds
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
                ordered = self.ordered(at, pick)
                wide += [(at, each) for each in (ordered if len(ordered) <= FEW_ORDERS else [pick])]
                self.next += 1
        wide += ((at, each) for at, pick in free for each in self.ordered(at, pick))
        for entry in self.bounded(wide):
            heapq.heappush(self.waiting, entry)
        if close and np.isfinite(limit):
            leaves, below = {at for at, _ in close}, min(limit, self.fastest_seconds[0])
            along = [e for e in self.waiting if e[0] < below and e[2] in leaves and e[3].axis_order is not None]
            along = heapq.nsmallest(self.close_looks - len(self.solved) - len(close), along)
            numbers = {number for _, number, _, _ in along}
            self.waiting = [each for each in self.waiting if each[1] not in numbers]
            heapq.heapify(self.waiting)
            close += ((at, pick) for _, _, at, pick in along)
        for at, mine in _by_leaf(close).items():
            for result in solve(self.leaves[at], mine, self.limit_seconds):
                if result.plan is None:
                    self.board.reject("does not fit in memory" if np.isinf(result.least_seconds) else "slower")
                else:
                    heapq.heappush(self.unsettled, (result.seconds, len(self.solved)))
                self.solved.append((result, at))
        return bool(wide or close)

    def ordered(self, at: int, pick: OrderedCandidate) -> list[OrderedCandidate]:
        """With every order of its axes."""
        return [pick._replace(axis_order=order) for order in orders_of(self.leaves[at].grid, pick.candidate)]

    def bounded(self, picks: Iterable[tuple[int, OrderedCandidate]]) -> Iterator[_Waiting]:
        for at, mine in _by_leaf(picks).items():
            bounds = order_bounds(self.leaves[at], mine)
            for pick, bound in zip(mine, bounds.tolist(), strict=True):
                if np.isfinite(bound):
                    yield bound * (1 - _ROUNDING), next(self.numbers), at, pick
                else:
                    self.unfit.add((at, pick.candidate))

    def settle(self, found: Solved, leaf: BoundedGrid, limit_seconds: float) -> tuple[Solved, ScoredPlan | None]:
        """Forecast what was solved, as long as it may be below the limit."""
        for settled, scored in self._settled(found, leaf):
            if scored is not None or settled.plan is None or settled.seconds > limit_seconds:
                break
        return settled, scored

    def _settled(self, found: Solved, leaf: BoundedGrid) -> Iterator[tuple[Solved, ScoredPlan | None]]:
        """Forecast what was solved; where it does not fit in the allocator's pieces, the fastest that fits in pieces
        too, between the least memory that is too much and one that will do. What needs more than a plan that does not
        fit is taken not to fit either. Until that is found, what no such plan is faster than."""
        scored = None if found.plan is None else self.board.score(found.plan, replays=True)
        if scored is None or scored.forecast.fits:
            yield (found if scored is not None else replace(found, plan=None, seconds=np.inf)), scored
            return
        yield found, None
        told, memo = scored.forecast, Memo()
        used = told.peak_reserved_bytes + told.peak_bytes - told.peak_allocated_bytes
        little = _LITTLE * self.memory_bytes
        over = max(used - self.memory_bytes, told.peak_bytes - self.memory_bytes, little)
        high = float(min(told.peak_bytes - 1, found.pick.memory_bytes - 1))
        low, best, kept, least = high - over, None, None, None
        if np.isinf(self.board.best_seconds):  # nothing fits so far: does what keeps least?
            least = self.board.score(
                smallest_plan(leaf, found.pick.candidate, found.pick.axis_order or ()), replays=True
            )
            if least is None or not least.forecast.fits:
                self.board.reject("does not fit in memory in pieces")
                yield replace(found, plan=None, seconds=np.inf, least_seconds=np.inf), None
                return
        for _ in range(_RETRIES):
            room = low if best is None else (low + high) / 2
            (less,) = solve(leaf, [found.pick._replace(memory_bytes=room)], memo=memo)
            scored = None if less.plan is None else self.board.score(less.plan, replays=True)
            if scored is None:
                break
            if scored.forecast.fits:
                low, best, kept = max(room, scored.forecast.peak_bytes), less, scored
            else:
                high = min(high, scored.forecast.peak_bytes - 1.0)
                low = min(low, high) - over * (best is None)
                yield replace(less, pick=found.pick), None
            if high - low < little:
                break
        most = found
        if found.least_seconds < self.board.best_seconds:  # else what is left open is no part of the gap
            (most,) = solve(leaf, [found.pick._replace(memory_bytes=high)], memo=memo)
        if best is None and least is not None:
            best, kept = replace(found, plan=least.plan, seconds=least.seconds_to_target), least
        if best is None:
            self.board.reject("does not fit in memory in pieces")
            yield replace(most, plan=None, seconds=np.inf), None
        else:
            yield replace(best, least_seconds=min(most.least_seconds, best.seconds)), kept

    def result(self, top: int, compares: bool, tie: float) -> SearchResult:
        ranked = simpler_first(self.board.ranked(top), tie, self.inputs.cluster.devices_per_node)
        best = ranked[0] if ranked else None
        # What the decision for or against each technique is worth, but for those that the user has pinned.
        names = (dial.kind.name for dial in self.turned)
        compared = [name for name in names if name not in self.inputs.wishes.pinned] if compares else []
        unfitting = self.candidates.runs & ~self.candidates.fits(self.memory_bytes)
        self.board.reject("does not fit in memory", int(np.sum(unfitting)) + len(self.unfit))
        self.board.reject(
            "slower", len(self.order) - len({(at, f.pick.candidate) for f, at in self.solved} | self.unfit)
        )
        return SearchResult(
            best=best,
            ranked=tuple(ranked),
            rejected=dict(self.board.rejected.most_common()),
            nearest_miss=None if best else self._nearest_miss(),
            evaluated=sum(int(leaf.is_new.sum()) for leaf in self.leaves),
            search_seconds=0.0,
            gap_fraction=self._gap(best),
            alternatives=tuple(Otherwise(self, name, best).result() for name in compared) if best else (),
            faster_unfit=self._unfit(best) if best and compares else None,
            is_interrupted=self.board.is_interrupted,
        )

    def _gap(self, best: ScoredPlan | None) -> float | None:
        if best is None:
            return None
        left = [result.least_seconds * (1 - _ROUNDING) for result, _ in self.solved]
        left += [self.waiting[0][0]] if self.waiting else []
        left += [float(self.candidates.least_seconds[self.order[self.next]])] if self.next < len(self.order) else []
        left += [*self.left_out.values(), self.board.best_seconds * (1 - _ROUNDING)]
        gap = 1.0 - min(left) / best.seconds_to_target
        return float(gap) if gap > 2 * _ROUNDING else 0.0

    def _smallest(self, candidate: int) -> ScoredPlan | None:
        """The plan of a candidate that needs least, whether it fits or not."""
        at, index = int(self.candidates.leaf_of[candidate]), int(self.candidates.index_of[candidate])
        return self.board.score(smallest_plan(self.leaves[at], index, self.leaves[at].grid.axis_order))

    def _nearest_miss(self) -> ScoredPlan | None:
        candidates = np.flatnonzero(self.candidates.runs)
        order = np.lexsort((self.candidates.least_seconds[candidates], self.candidates.least_bytes[candidates]))
        tried = (self._smallest(int(candidate)) for candidate in candidates[order][:_TRIED])
        near = min(
            (each for each in tried if each is not None), key=lambda each: each.forecast.peak_bytes, default=None
        )
        return None if near is None else self.board.score(near.plan, replays=True)

    def _unfit(self, best: ScoredPlan) -> ScoredPlan | None:
        """The fastest of the faster candidates that no policy makes fit."""
        least, limit = self.candidates.least_seconds, best.seconds_to_target
        candidates = np.flatnonzero(self.candidates.runs & ~self.candidates.fits(self.memory_bytes) & (least < limit))
        for candidate in candidates[np.argsort(least[candidates], kind="stable")][:_TRIED]:
            scored = self._smallest(int(candidate))
            if scored is not None and not scored.forecast.fits and scored.seconds_to_target < limit:
                return scored
        return None


class Otherwise:
    """The fastest plan that decides otherwise about a technique, and what none is faster than: of the plans looked at,
    of the best one's twins, and of a few more, lowest bound first."""

    def __init__(self, pool: BestFirst, name: str, best: ScoredPlan):
        self.pool, self.name, self.best = pool, name, best
        self.is_used = best.plan.technique(name) is not None
        self.is_solved_for = any(name == each for leaf in pool.leaves for each, _ in leaf.policies)
        """Whether blocks follow it: then none does, or some block of each stage must."""
        self.masks = [
            runs & (self._may_follow(leaf) if self.is_solved_for else leaf.has(name) != self.is_used)
            for leaf, runs in zip(pool.leaves, pool.runs, strict=True)
        ]
        known = [] if self.is_solved_for and not self.is_used else pool.board.ranked(len(pool.board.taken))
        self.scored = next((each for each in known if self.is_other(each.plan)), None)
        self.left = [*pool.left_out.values()]
        """No plan that was looked at, or will not be, is faster than the least of these."""
        self.queue = [each for each in pool.waiting if self.masks[each[2]][each[3].candidate]]
        self.results: dict[int, Solved] = {}
        """Of entries in the queue that need not be solved again."""
        for result, at in pool.solved:
            if not self.masks[at][result.pick.candidate] or not np.isfinite(result.least_seconds):
                continue
            is_other = result.plan is not None and self.is_other(result.plan)
            if is_other and result.plan in pool.board.taken and (self.is_used or not self.is_solved_for):
                self.left.append(result.least_seconds)
                continue
            number, again = next(pool.numbers), result.pick._replace(memory_bytes=pool.memory_bytes)
            self.queue.append((result.least_seconds * (1 - _ROUNDING), number, at, again))
            if is_other and not self.is_solved_for:
                self.results[number] = result
        heapq.heapify(self.queue)

    def _may_follow(self, leaf: BoundedGrid) -> bool:
        """Whether a leaf has blocks that can be told to follow the technique, or not to."""
        has_policy = any(self.name == each for each, _ in leaf.policies)
        return self.is_used or (has_policy and self.pool.inputs.profile.num_blocks > 0)

    def is_other(self, plan: Plan) -> bool:
        return (plan.technique(self.name) is None) is self.is_used

    @property
    def seconds(self) -> float:
        return np.inf if self.scored is None else self.scored.seconds_to_target

    def look(self, at: int, pick: OrderedCandidate, result: Solved | None = None) -> bool:
        """Solve a candidate; whether it has a plan that fits and may be the fastest."""
        leaf = self.pool.leaves[at]
        if self.is_solved_for and self.is_used:
            policies = tuple(each for each in leaf.policies if each[0] != self.name)
            leaf = replace(leaf, techniques=self.others(leaf), policies=policies)
        elif self.is_solved_for:
            leaf = replace(leaf, required=leaf.required | {self.name})
        result = result or solve(leaf, [pick], self.seconds)[0]
        if result.seconds <= self.seconds:
            result, found = self.pool.settle(result, leaf, self.seconds)
            if found is not None and (self.scored is None or found.rank < self.scored.rank):
                self.scored = found
        self.left.append(result.least_seconds)
        return result.plan is not None

    def others(self, leaf: BoundedGrid) -> tuple[Technique, ...]:
        return tuple(each for each in leaf.techniques if each.name != self.name)

    def expand(self, picks: Iterable[tuple[int, OrderedCandidate]]) -> None:
        for entry in self.pool.bounded([(at, each) for at, pick in picks for each in self.pool.ordered(at, pick)]):
            heapq.heappush(self.queue, entry)

    def result(self) -> Alternative:
        pool, columns = self.pool, self.pool.candidates
        solves: float
        solves, expansions = (0, 0) if pool.is_late else (_SOLVED, _EXPANDED)
        own, pick = pool.origins[self.best.plan]
        mine = pool.leaves[own]
        for at, leaf in enumerate(pool.leaves):  # twins: the same but for this technique
            is_twin = (
                leaf.grid is mine.grid and self.masks[at][pick.candidate] and self.others(leaf) == self.others(mine)
            )
            if is_twin and solves > _SOLVED // 2:
                solves -= 1 if self.look(at, pick) else _UNFIT
        differs = np.concatenate(self.masks)
        rest = pool.order[pool.next :]
        rest = rest[differs[rest]]
        while True:
            ahead = float(columns.least_seconds[rest[0]]) if len(rest) else np.inf
            bound = min(ahead, self.queue[0][0] if self.queue else np.inf)
            enough = min(_FAR * self.best.seconds_to_target, self.seconds * (1 - AS_FAST))
            if bound >= enough or not (expansions and solves > 0):
                break
            if ahead <= bound:
                expansions -= 1
                chosen = zip(columns.leaf_of[rest[:8]].tolist(), columns.index_of[rest[:8]].tolist(), strict=True)
                self.expand((at, OrderedCandidate(index, None, pool.memory_bytes)) for at, index in chosen)
                rest = rest[8:]
                continue
            _, number, at, pick = heapq.heappop(self.queue)
            if pick.axis_order is None:
                expansions -= 1
                self.expand([(at, pick)])
            else:
                solves -= 1 if self.look(at, pick, self.results.get(number)) else _UNFIT
        least = min([bound, self.seconds, *self.left])
        if not np.isfinite(least):  # unless one fits by what is a rescue
            may_fit = differs & columns.runs & (columns.base_bytes <= pool.memory_bytes)
            least = min(columns.least_seconds[may_fit], default=np.inf)
        certain = float(least) if np.isfinite(least) else None
        return Alternative(technique=self.name, is_used=self.is_used, scored=self.scored, least_seconds=certain)


def _by_leaf(picks: Iterable[tuple[int, OrderedCandidate]]) -> dict[int, list[OrderedCandidate]]:
    grouped: dict[int, list[OrderedCandidate]] = defaultdict(list)
    for at, pick in picks:
        grouped[at].append(pick)
    return grouped
