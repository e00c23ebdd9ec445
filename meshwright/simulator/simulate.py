"""A plan as spans on lanes: what each stage does when, before it runs. The same type as a measured one.

Ranks that differ only along other axes do the same at the same time, so each stage shows one: its first rank.
How collectives lie inside a microbatch's work follows from what is known of them, not from each layer:

    forward     compute        |  F       |            backward    compute        |  B       |
                collective  | beside | alone|                      collective |alone| beside   |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from meshwright.core.cluster import Cluster, TierName
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.timeline import MemoryPoint, Span, Timeline
from meshwright.core.work import ADAM, Updating
from meshwright.schedules.actions import Action, Places
from meshwright.schedules.events import ScheduleEvent, halves, in_order, sweep
from meshwright.schedules.orders import Call, stream
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.mixed_groups import pipes_of, slowest_pipe
from meshwright.simulator.pricing import Stage, Staged, cutter_of
from meshwright.simulator.stage_seconds import Charge, Part, StageCost

_PARTS: dict[str, tuple[Part, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "weight"),
    "backward_input": ("backward",),
    "backward_weight": ("weight",),
}

_STREAM: tuple[Call, ...] = ("first", "next", "next", "flush")
NUM_STEPS = len(_STREAM) - 1
"""Drawn where steps overlap. The first has its way in; from the end of the second to the end of the third is as every
later one."""
UPDATE = "update"
_BESIDE_LANES: tuple[str, ...] = ("collective", "copy")
MOST_DRAWN = 2048
"""Stages x microbatches in a timeline (at least one microbatch a stage): beyond, nobody sees them one by one."""


def simulate(profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating = ADAM) -> Timeline:
    """One step, every microbatch simulated, none extrapolated. Of very many only the first, as `environment` says.

    Where steps overlap, several of them; `environment` says from when to when one is.
    """
    _, pipes = pipes_of(profile, plan, cluster, sequence, optimizer)
    _, staged = slowest_pipe(pipes)
    drawing = _Drawing(staged, slowest_of(cluster, plan.num_ranks))
    spans = [*drawing.works(), *drawing.messages(), *drawing.tails()]
    ranks_each = plan.num_ranks // len(drawing.stages)
    return Timeline(
        source="predicted",
        plan_fingerprint=plan.fingerprint,
        spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.device))),
        memory=tuple(memory_points(drawing.stages, drawing.devices, drawing.events, drawing.ends, drawing.seconds)),
        environment={
            "cluster": cluster.name,
            "profile": profile.name,
            "plan": str(plan),
            "sequence": str(sequence),
            "microbatches": f"{drawing.count} of {staged.plan.num_microbatches}",
            "ranks": str(plan.num_ranks),
            "ranks_each": str(ranks_each),
            "memory_bytes": str(cluster.device.memory_bytes),
            **drawing.period(),
        },
    )


@lru_cache(maxsize=16)
def _stream_events(num_stages: int, num_microbatches: int) -> tuple[ScheduleEvent, ...]:
    """Of several steps that follow each other without a flush. Microbatches are numbered through all of them; an update
    comes after its step's last backward."""
    orders = []
    for stage in range(num_stages):
        actions = [
            Action(each.kind, each.microbatch + step * num_microbatches)
            for step, call in enumerate(_STREAM)
            for each in stream(stage, num_stages, num_microbatches, call)
        ]
        orders.append(tuple(actions))
    events, _ = in_order(orders, Places(num_stages))
    return tuple(events)


class _Drawing:
    """Everything that is known of when things happen."""

    def __init__(self, staged: Staged, slower: float):
        """`slower`: times all of it takes, since every rank waits for the slowest."""
        plan, timetable, cutter = staged.plan, staged.timetable, cutter_of(staged.plan)
        self.stages, self.slower = staged.unfolded, slower
        self.sender = cutter.name if cutter is not None else ""
        self.is_stream = timetable.overlaps_steps
        num_stages, num_steps = len(self.stages), NUM_STEPS if self.is_stream else 1
        stride = plan.num_ranks  # between the first ranks of stages
        for axis, size in plan.mesh.items():
            stride //= size
            if cutter is not None and axis == cutter.axis:
                break
        self.devices = [staged.first_rank + stage * stride for stage in range(num_stages)]
        self.places = timetable.places(num_stages)
        self.count = min(plan.num_microbatches, max(MOST_DRAWN // (num_steps * num_stages), num_stages))
        """Microbatches of each step."""
        columns = halves(*staged.columns).items()
        self.seconds = {kind: [slower * each for each in by_span] for kind, by_span in columns}
        self.events = timetable.events(num_stages, self.count)
        if self.is_stream:
            self.events = _stream_events(num_stages, self.count)
            self.seconds[UPDATE] = [slower * stage.tail_seconds for stage in self.stages]
        send = staged.send_seconds
        self.sends_seconds = [
            slower * each for each in (send if isinstance(send, list) else [send] * len(staged.spans))
        ]
        """Over each boundary between spans."""
        self.ends, self.finished = sweep(self.events, self.seconds, self.sends_seconds)
        """When each event is over, and each stage's last."""

    def works(self) -> Iterator[Span]:
        """Of every event, shared out between techniques as the stage's time is."""
        known: dict[tuple[int, str], list[_Piece]] = {}
        for event, end in zip(self.events, self.ends, strict=True):
            took = self.seconds[event.kind][event.span]
            if event.kind == UPDATE:
                yield from self._tail(event.stage, end - took, end, None)
                continue
            run = self.stages[event.stage].run.start
            if (run, event.kind) not in known:
                known[run, event.kind] = _pieces(self.stages[event.stage].cost, event.kind)
            name, device = self._name(event), self.devices[event.stage]
            for piece in known[run, event.kind]:
                yield _span(device, piece, name, end - took, took)

    def messages(self) -> Iterator[Span]:
        """What an event waits for was sent by the stage it waits for."""
        for event in self.events:
            for source in event.waits_for:
                sent = self.events[source]
                piece = _Piece("collective", self.sender, 0.0, 1.0)
                way = "send_" + self._name(sent).replace("_input", "")
                device, to_device = self.devices[sent.stage], self.devices[event.stage]
                took = self.sends_seconds[min(event.span, sent.span)]
                yield _span(device, piece, way, self.ends[source], took, to_device)

    def tails(self) -> Iterator[Span]:
        """After the last backward: what is left of the exchange, and the update, which ends everywhere at once."""
        if self.is_stream:
            return
        end = max(self.finished) + self.slower * max(stage.tail_seconds for stage in self.stages)
        first: dict[int, float] = {}
        for event, over in zip(self.events, self.ends, strict=True):
            first.setdefault(event.stage, over - self.seconds[event.kind][event.span])
        for stage, finished in enumerate(self.finished):
            yield from self._tail(stage, finished, end, first[stage])

    def _tail(self, stage: int, start: float, end: float, first: float | None) -> Iterator[Span]:
        """`first`: when the step began, for what runs beside its first microbatch."""
        cost, device, slower = self.stages[stage].cost, self.devices[stage], self.slower
        updates = _charged(cost.charges, ("step",), lane="compute")
        update_start = end - slower * sum(updates.values())
        for origin, seconds in updates.items():
            yield _span(device, _Piece("compute", origin, 0.0, slower * seconds), "update", update_start)
            update_start += slower * seconds
        beside = {charge: each for charge, each in _beside(cost).items() if charge.charge.part == "step"}
        updating = {key: each for key, each in beside.items() if key.part == "step"}
        begin = end - slower * (sum(updates.values()) + sum(each.shown for each in updating.values()))
        for key, each in updating.items():
            yield _span(device, _Piece(key.lane, key.origin, 0.0, slower * each.seconds), key.words, begin)
        late = {key: each for key, each in beside.items() if key.part in ("backward", "weight")}
        begin = max(0.0, start - slower * sum(each.seconds - each.shown for each in late.values()))
        for key, each in late.items():
            yield _span(device, _Piece(key.lane, key.origin, 0.0, slower * each.seconds), key.words, begin)
            begin += slower * each.seconds
        early = {key: each for key, each in beside.items() if key.part == "forward"}
        for key, each in early.items():
            if first is not None and each.seconds > each.shown:
                hidden = slower * (each.seconds - each.shown)
                yield _span(device, _Piece(key.lane, key.origin, 0.0, hidden), key.words, first)
                first += hidden
            yield _span(device, _Piece(key.lane, key.origin, 0.0, slower * each.shown), key.words, begin)
            begin += slower * each.shown
        for lane, words in (("collective", "exchange"), ("copy", "copy")):
            for origin, seconds in _charged(cost.bare, ("step",), lane=lane).items():
                yield _span(device, _Piece(lane, origin, 0.0, slower * seconds), words, begin)
                begin += slower * seconds

    def _name(self, event: ScheduleEvent) -> str:
        chunk = self.places.chunk(event.span)
        return f"{event.kind} {event.microbatch}" + (f".{chunk}" if chunk else "")

    def period(self) -> dict[str, str]:
        """Where steps overlap: from when to when one of them is."""
        if not self.is_stream:
            return {}
        # From one update of the first stage, which is the last to make it, to the next.
        pairs = zip(self.events, self.ends, strict=True)
        start, end, *_ = (over for event, over in pairs if event.kind == UPDATE and event.stage == 0)
        return {"period_start_seconds": f"{start:.9g}", "period_end_seconds": f"{end:.9g}", "steps": str(NUM_STEPS)}


class _Piece(NamedTuple):
    lane: str
    origin: str
    start: float
    """From the beginning of what it is a piece of, in shares of that."""
    share: float


def _span(device: int, piece: _Piece, name: str, start: float, took: float = 1.0, to_device: int | None = None) -> Span:
    return Span(
        device=device,
        lane=piece.lane,  # type: ignore[arg-type]
        name=name,
        start_seconds=max(0.0, float(start + piece.start * took)),
        seconds=max(0.0, float(piece.share * took)),
        origin=piece.origin,
        to_device=to_device,
    )


def _pieces(cost: StageCost, kind: str) -> list[_Piece]:
    """Of one microbatch's work: compute, what runs beside it (with what shows of it), and what stops it."""
    parts = _PARTS[kind]
    computes = _charged(cost.charges, parts, lane="compute")
    stops = [(lane, *each) for lane in _BESIDE_LANES for each in _charged(cost.bare, parts, lane=lane).items()]
    alone = sum(seconds for _, _, seconds in stops)
    hidden = {key: each for key, each in _beside(cost).items() if key.part in parts and not key.per_step}
    shown = sum(each.shown for each in hidden.values())
    total = sum(computes.values()) + alone + shown
    if not total:
        return []
    # Forward fetches before it computes, backward sends away what it has computed.
    is_forward = kind == "forward"
    groups: list[tuple[float, list[tuple[str, str, float]]]] = [
        (shown if is_forward else alone, [("compute", *each) for each in computes.items()])
    ]
    for lane in _BESIDE_LANES:
        beside = [(lane, key.origin, each.seconds) for key, each in hidden.items() if key.lane == lane]
        groups.append((0.0 if is_forward else max(0.0, total - sum(seconds for *_, seconds in beside)), beside))
    groups.append((total - alone if is_forward else 0.0, stops))
    found: list[_Piece] = []
    for start, amounts in groups:
        for lane, origin, seconds in amounts:
            found.append(_Piece(lane, origin, start / total, seconds / total))
            start += seconds
    return found


def _charged(charges: Mapping[Charge, object], parts: tuple[Part, ...], *, lane: str) -> dict[str, float]:
    """Seconds by technique, of one lane."""
    found: dict[str, float] = {}
    for charge, seconds in sorted(charges.items(), key=lambda item: (item[0].axis, item[0].origin)):
        if charge.part in parts and charge.lane == lane and float(seconds) > 0:  # type: ignore[arg-type]
            found[charge.origin] = found.get(charge.origin, 0.0) + float(seconds)  # type: ignore[arg-type]
    return found


class _Beside(NamedTuple):
    """Collectives and copies beside compute, by whose they are and when."""

    origin: str
    axis: str
    part: Part
    per_step: bool
    tier: TierName | Literal[""] = ""

    @property
    def lane(self) -> str:
        return self.charge.lane

    @property
    def words(self) -> str:
        return "copy" if self.tier else "exchange"

    @property
    def charge(self) -> Charge:
        return Charge(self.origin, self.axis, "step" if self.per_step else self.part, self.tier)


class _Took(NamedTuple):
    seconds: float
    shown: float
    """Of them, those that compute waits for."""


def _beside(cost: StageCost) -> dict[_Beside, _Took]:
    whole: dict[_Beside, float] = {}
    for item in cost.hidden:
        charge = item.charge(item.part)
        key = _Beside(charge.origin, charge.axis, item.part, bool(item.task.per_step), charge.tier)
        whole[key] = whole.get(key, 0.0) + float(item.total_seconds)
    by_charge: dict[Charge, float] = {}
    for key, seconds in whole.items():
        by_charge[key.charge] = by_charge.get(key.charge, 0.0) + seconds
    found = {}
    for key, seconds in whole.items():
        charge = key.charge
        shown = float(cost.charges.get(charge, 0.0)) - float(cost.bare.get(charge, 0.0))
        if seconds > 0:
            found[key] = _Took(seconds, min(seconds, max(0.0, shown) * seconds / by_charge[charge]))
    return found


Sizes = tuple[int, Mapping[str, int]]
"""Bytes, and by what they are for."""
_KEEPS, _FREES = ("forward",), ("backward", "backward_weight")


def memory_points(
    stages: Sequence[Stage],
    devices: Sequence[int],
    events: Sequence[ScheduleEvent],
    ends: Sequence[float],
    seconds: Mapping[str, Sequence[float]],
) -> Iterator[MemoryPoint]:
    """When a microbatch's work starts (at its fullest) and when it is over."""
    chunks = len(seconds["forward"]) // len(stages)
    held, made = [0.0] * len(stages), [0.0] * len(stages)
    known: dict[tuple[int, float, str, float], Sizes] = {}

    def point(at: int, when: float, kind: str) -> MemoryPoint:
        stage, has = stages[at], round(held[at], 9)
        key = stage.run.start, has, kind, made[at]  # few, however many microbatches there are
        if key not in known:
            memory = stage.memory
            known[key] = _rounded(
                memory.during(has, kind in _KEEPS, made[at]) if kind else memory.between(has, made[at])
            )
        total, sizes = known[key]
        return MemoryPoint(device=devices[at], seconds=float(when), bytes=total, by_category=sizes)

    points = [point(at, 0.0, "") for at in range(len(stages))]
    for event, end in zip(events, ends, strict=True):
        at = event.stage
        is_forward = event.kind in _KEEPS
        held[at] += is_forward / chunks
        points.append(point(at, max(0.0, end - seconds[event.kind][event.span]), event.kind))
        held[at] -= (event.kind in _FREES) / chunks
        made[at] = made[at] if is_forward else 1.0
        points.append(point(at, end, ""))
    yield from sorted(points, key=lambda point: (point.seconds, point.device))


def _rounded(sizes: Mapping[str, float]) -> Sizes:
    found = {name: round(size) for name, size in sorted(sizes.items()) if size >= 1}
    return round(sum(sizes.values())), found
