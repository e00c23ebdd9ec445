"""What memory buys: the fastest plan for each memory; and where nothing fits, what would, each way searched for.

seconds
  |*                each search with a budget finds the fastest plan that fits in it; its peak is a point, and no
  |   *             plan between that peak and the budget is faster. The widest stretch not yet known is next.
  |       *    *
  +-----------------> bytes of the fullest rank
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from meshwright.ask.question import Outcome, Question, Tell, outcome
from meshwright.ask.sizes import larger_sizes, resized, with_count
from meshwright.core.technique import EXACTNESS
from meshwright.core.units import MIB, pretty_bytes
from meshwright.planner.search import ScoredPlan, SearchResult

MOST_POINTS = 10
_MOST_SEARCHES = 24
_UNLIMITED_BYTES = 1 << 50
_WORTH = 0.002
"""Less of the step than this is not looked for between two points."""
_NARROW = 1.01
"""Budgets this near are one."""


@dataclass(frozen=True, kw_only=True)
class Point:
    scored: ScoredPlan
    budget_bytes: int
    """Up to here no plan is faster."""

    @property
    def seconds(self) -> float:
        return self.scored.forecast.step_seconds

    @property
    def peak_bytes(self) -> int:
        return self.scored.forecast.peak_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryFront:
    points: tuple[Point, ...]
    """Less memory first; each is faster than the one before."""
    is_interrupted: bool = False


def front(question: Question, tell: Tell, best: ScoredPlan | None = None) -> MemoryFront:
    """`best`: what the question itself has given, if anything fits; it is a point too."""
    points: list[Point] = []
    if best is not None:
        points.append(Point(scored=best, budget_bytes=question.machine.device.memory_bytes))
    try:
        tell("searching without a limit of memory")
        fastest = _point(question, _UNLIMITED_BYTES)
        if fastest is None:
            return MemoryFront(points=())
        tell("searching for the least memory")
        points = _added(_added(points, fastest), _least(question, fastest.budget_bytes))
        for _ in range(_MOST_SEARCHES):
            # The middle of the stretch with most to find: memory not yet looked into, times the time between its ends.
            stretches = []
            for lower, upper in itertools.pairwise(points):
                room, gain = upper.peak_bytes / lower.budget_bytes, lower.seconds / upper.seconds
                if room > _NARROW and gain > 1 + _WORTH:
                    middle = math.isqrt(lower.budget_bytes * upper.peak_bytes)
                    stretches.append((math.log(room) * math.log(gain), middle))
            if not stretches or len(points) >= MOST_POINTS:
                break
            budget = max(stretches)[1]
            tell(f"searching with {budget / 1024**3:.1f} GiB, {len(points)} points so far")
            points = _added(points, _point(question, budget))
            # Whatever the search gave, nothing is left to find below: the next stretch begins there.
            below = max(at for at, point in enumerate(points) if point.peak_bytes <= budget)
            points[below] = replace(points[below], budget_bytes=max(points[below].budget_bytes, budget))
    except KeyboardInterrupt:
        return MemoryFront(points=tuple(points), is_interrupted=True)
    return MemoryFront(points=tuple(points))


def _point(question: Question, budget: int) -> Point | None:
    best = outcome("", question.with_memory(budget)).best
    return Point(scored=best, budget_bytes=budget) if best else None


def _least(question: Question, enough_bytes: int) -> Point | None:
    """Where nothing fits, search names the plan that needs least; what an allocator loses in pieces comes on top."""
    taken = max(group.device.reserved_bytes for group in question.cluster.groups)
    nothing = outcome("", question.with_memory(taken + MIB))
    if nothing.best is not None:
        return Point(scored=nothing.best, budget_bytes=nothing.question.cluster.device.memory_bytes)
    if nothing.result is None or nothing.result.nearest_miss is None:
        return None
    budget = nothing.result.nearest_miss.forecast.peak_bytes
    while budget < enough_bytes:
        point = _point(question, budget)
        if point is not None:
            return point
        budget = math.ceil(budget * 1.02)
    return None


def _added(points: list[Point], new: Point | None) -> list[Point]:
    """With one more; what it beats in both is gone, and equal plans are one point with the larger budget."""
    if new is None:
        return points
    kept: list[Point] = []
    for point in sorted([*points, new], key=lambda p: (p.peak_bytes, p.seconds, -p.budget_bytes)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
        else:
            budget = max(kept[-1].budget_bytes, point.budget_bytes)
            kept[-1] = Point(scored=kept[-1].scored, budget_bytes=budget)
    return kept


_MOST_DEVICES = 1 << 14
"""More are not looked at: no way out that anybody has."""
_HELPS = 0.98
"""Twice the devices that leave more than this share of the memory needed will not do it."""
_MARGIN = 1.05
"""Above what the smallest plan needs: for what an allocator loses in pieces, and for a plan that is not the slowest."""
_MOST_TRIES = 4
_MOST_HALVED = 64
"""Devices up to which the fewest are looked for among whole nodes; above, among doublings, as searches take longer."""
_ROOM = 0.9
"""Of the memory that parameters, gradients and states may take and leave room for anything to run."""
_ENOUGH_WAYS = 3
_SHORTEST = 128
"""Tokens: a sequence below is no training."""


@dataclass(frozen=True, kw_only=True)
class WayOut:
    what: str
    """devices, memory, sequence, numerics, wishes."""
    words: str
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class WaysOut:
    open: tuple[WayOut, ...]
    closed: tuple[str, ...]
    """Those that do not lead out, in words."""


def ways_out(question: Question, result: SearchResult, tell: Tell) -> WaysOut:
    """`result`: of the search that came back empty."""
    ways: list[WayOut] = []
    closed: list[str] = []
    for look in (_more_devices, _more_memory, _shorter, _other_numerics, _fewer_wishes):
        way = look(question, result, tell)
        if isinstance(way, WayOut):
            ways.append(way)
        elif way:
            closed.append(way)
    # Half the devices that fit, each with twice the memory: between the first two ways.
    enough = next((way.outcome.question.cluster.num_devices for way in ways if way.what == "devices"), 0)
    cluster = resized(question.cluster, enough // 2) if enough // 2 > question.cluster.num_devices else None
    if len(ways) < _ENOUGH_WAYS and cluster is not None:
        budget = 2 * question.machine.device.memory_bytes
        words = f"{cluster.num_devices} such devices with {pretty_bytes(budget)} of memory each"
        tell(f"searching {words}")
        made = outcome(words, replace(question, cluster=cluster).with_memory(budget))
        if made.best is not None:
            ways.append(WayOut(what="devices and memory", words=words, outcome=made))
    return WaysOut(open=tuple(ways), closed=tuple(closed))


def _more_devices(question: Question, result: SearchResult, tell: Tell) -> WayOut | str:
    """Doubling until it fits, then halving the last doubling as far as whole nodes go."""
    short, enough, least_bytes = question.cluster.num_devices, None, _least_bytes(result)
    for devices in larger_sizes(question.cluster):
        if not _is_too_small(question, result, devices):
            made = _on(question, devices, tell)
            if made.best is not None:
                enough = made
                break
            now_bytes = _least_bytes(made.result)
            if devices > _MOST_DEVICES or now_bytes > _HELPS * least_bytes:
                return f"More such devices do not help: {devices} {_least_words(made)}."
            least_bytes = now_bytes
        short = devices
    if enough is None:
        return ""
    while True:  # a whole number of nodes halfway, unless there are too many to look for the fewest
        most, width = enough.question.cluster.num_devices, enough.question.cluster.devices_per_node
        middle = (max(short, 0) // width + most // width) // 2 * width
        if most <= width or most > _MOST_HALVED or not short < middle < most:
            break
        fewer = enough if _is_too_small(question, result, middle) else _on(question, middle, tell)
        if fewer is enough or fewer.best is None:
            short = middle
        else:
            enough = fewer
    devices = enough.question.cluster.num_devices
    words = f"{devices} such devices ({enough.words}; {short} are too few)"
    return WayOut(what="devices", words=words, outcome=enough)


def _least_bytes(result: SearchResult | None) -> float:
    """What the smallest plan needs; infinite where there is no plan at all."""
    miss = result.nearest_miss if result is not None else None
    return math.inf if miss is None else miss.forecast.peak_bytes


def _is_too_small(question: Question, result: SearchResult, devices: int) -> bool:
    """Even if parameters, gradients and states were shared out evenly: then a search would be for nothing."""
    return _held_bytes(question, result) / devices > _ROOM * question.machine.device.memory_bytes


def _held_bytes(question: Question, result: SearchResult) -> float:
    """Parameters, gradients and states of all devices together, whatever the plan."""
    if result.nearest_miss is None:
        return 0.0
    told, own = result.nearest_miss.forecast, question.cluster.num_devices
    held = sum(told.peak_bytes_by_category.get(name, 0) for name in ("parameters", "gradients", "optimizer"))
    # Of several devices some may hold the same; one alone has everything once.
    return held if own == 1 else held * own / 2


def _on(question: Question, devices: int, tell: Tell) -> Outcome:
    question = with_count(question, devices)
    name = question.cluster.name
    tell(f"searching {name}")
    made = outcome(name, question)
    result = made.result
    if result is None or result.best or result.nearest_miss or question.batch >= devices:
        return made
    # No plan at all: so many devices cannot share the batch, and one sample each is the least that they can.
    return outcome(f"{name}, batch {devices}", replace(question, batch=devices))


def _more_memory(question: Question, result: SearchResult, tell: Tell) -> WayOut | str:
    if result.nearest_miss is None:
        return ""
    budget = result.nearest_miss.forecast.peak_bytes
    for _ in range(_MOST_TRIES):
        budget = int(budget * _MARGIN)
        tell(f"searching with {pretty_bytes(budget)}")
        made = outcome(pretty_bytes(budget), question.with_memory(budget))
        if made.best is not None:
            return WayOut(what="memory", words=f"{pretty_bytes(budget)} of memory each", outcome=made)
    return ""


def _shorter(question: Question, result: SearchResult, tell: Tell) -> WayOut | str:
    """Halving the sequence, after a look whether the shortest would do."""
    if question.profile.counts != "tokens" or question.sequence <= _SHORTEST or result.nearest_miss is None:
        return ""
    if _is_too_small(question, result, question.cluster.num_devices):
        held = pretty_bytes(_held_bytes(question, result) / question.cluster.num_devices)
        return f"No shorter sequence helps: parameters, gradients and states alone are {held} a device."
    lengths = [question.sequence >> bits for bits in range(1, question.sequence.bit_length())]
    lengths = [length for length in lengths if length >= _SHORTEST]
    if not lengths:
        return ""

    def ask(length: int) -> Outcome:
        tell(f"searching sequence {length}")
        return outcome(f"sequence {length}", replace(question, sequence=length))

    enough = ask(lengths[-1])
    if enough.best is None:
        return f"No shorter sequence fits: {lengths[-1]} tokens {_least_words(enough)}."
    low, high = 0, len(lengths) - 1
    while low < high:
        middle = (low + high) // 2
        made = ask(lengths[middle])
        if made.best is not None:
            enough, high = made, middle
        else:
            low = middle + 1
    return WayOut(what="sequence", words=f"sequences of {enough.question.sequence} tokens", outcome=enough)


def _least_words(made: Outcome) -> str:
    least_bytes = _least_bytes(made.result)
    return f"still need {pretty_bytes(least_bytes)}" if math.isfinite(least_bytes) else "have no plan"


def _other_numerics(question: Question, result: SearchResult, tell: Tell) -> WayOut | str:
    """The first level of exactness beyond the one allowed with which something fits."""
    if _is_too_small(question, result, 4 * question.cluster.num_devices):
        return ""  # no numerics make four out of one
    beyond = EXACTNESS[EXACTNESS.index(question.allow) + 1 :]
    for level in beyond:
        tell(f"searching with allow {level}")
        made = outcome(f"--allow {level}", replace(question, allow=level))
        if made.best is not None:
            return WayOut(what="numerics", words=f"--allow {level}", outcome=made)
    return f"Nor with --allow {beyond[-1]}." if beyond else ""


def _fewer_wishes(question: Question, result: SearchResult, tell: Tell) -> WayOut | str:
    limited = question.machine.device.memory_bytes < question.cluster.device.memory_bytes
    if not (question.pin or question.ban or limited):
        return ""
    tell("searching without pins, bans and limits")
    made = outcome("without wishes", replace(question, pin=(), ban=(), max_memory_bytes=None, headroom=0.0))
    if made.best is None:
        return "Nor without pins, bans, --max-memory and headroom."
    return WayOut(what="wishes", words="--headroom 0, without pins, bans and --max-memory", outcome=made)
