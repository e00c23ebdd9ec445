"""A plan as spans on lanes: what each stage does when, before it runs. The same type as a measured one.

Ranks that differ only along other axes do the same at the same time, so each stage shows one: its first rank.
How collectives lie inside a microbatch's work follows from what is known of them, not from each layer:

    forward     compute        |  F       |            backward    compute        |  B       |
                collective  | beside | alone|                      collective |alone| beside   |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.timeline import MemoryPoint, Span, Timeline
from meshwright.core.work import ADAM, Num, Updating
from meshwright.schedules.actions import Action, Places
from meshwright.schedules.events import ScheduleEvent, halves, in_order, sweep
from meshwright.schedules.orders import Call, stream
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.mixed_groups import pipes_of, slowest_pipe
from meshwright.simulator.pricing import Staged, cutter_of
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
_BESIDE_LANES: dict[str, str] = {"collective": "exchange", "copy": "copy"}
"""Beside compute, and what spans on them are called."""
_MOST_MOMENTS = 16
"""Of an action, at which its memory is told for each kind of layer."""
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
    return Timeline(
        source="predicted",
        plan_fingerprint=plan.fingerprint,
        spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.device))),
        memory=tuple(drawing.memory()),
        environment={
            "cluster": cluster.name,
            "profile": profile.name,
            "plan": str(plan),
            "sequence": str(sequence),
            "microbatches": f"{drawing.count} of {staged.plan.num_microbatches}",
            "ranks": str(plan.num_ranks),
            "ranks_each": str(plan.num_ranks // len(drawing.stages)),
            "memory_bytes": str(cluster.device.memory_bytes),
            **drawing.period(),
        },
    )


@lru_cache(maxsize=16)
def _stream_events(num_stages: int, num_microbatches: int) -> tuple[ScheduleEvent, ...]:
    """Events of several steps without a flush between. Microbatches are numbered through all of them; an update
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
        """Work of every event, divided between techniques in proportion to the stage's time."""
        known: dict[tuple[int, str], list[tuple[str, str, float, float]]] = {}
        for event, end in zip(self.events, self.ends, strict=True):
            took = self.seconds[event.kind][event.span]
            if event.kind == UPDATE:
                yield from self._tail(event.stage, end - took, end, None)
                continue
            run = self.stages[event.stage].run.start
            if (run, event.kind) not in known:
                known[run, event.kind] = _pieces(self.stages[event.stage].cost, event.kind)
            name, device = self._name(event), self.devices[event.stage]
            for lane, origin, start, share in known[run, event.kind]:
                yield _span(device, lane, origin, name, end - took + start * took, share * took)

    def messages(self) -> Iterator[Span]:
        """What an event waits for was sent by the stage it waits for."""
        for event in self.events:
            for source in event.waits_for:
                sent = self.events[source]
                way = "send_" + self._name(sent).replace("_input", "")
                device, to_device = self.devices[sent.stage], self.devices[event.stage]
                took = self.sends_seconds[min(event.span, sent.span)]
                yield _span(device, "collective", self.sender, way, self.ends[source], took, to_device)

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

        def row(begin: float, each: Iterable[tuple[str, str, str, float]]) -> Iterator[Span]:
            """(lane, origin, words, seconds) one after the other."""
            for lane, origin, words, seconds in each:
                yield _span(device, lane, origin, words, begin, slower * seconds)
                begin += slower * seconds

        updates = _charged(cost.charges, ("step",), lane="compute")
        spent = sum(updates.values())
        yield from row(
            end - slower * spent, (("compute", origin, "update", seconds) for origin, seconds in updates.items())
        )
        beside = [each for each in _beside(cost) if each.charge.part == "step"]
        updating = [each for each in beside if each.part == "step"]
        begin = end - slower * (spent + sum(each.shown for each in updating))
        for each in updating:  # all of them at once
            yield from row(begin, [(*each.names, each.seconds)])
        late = [each for each in beside if each.part in ("backward", "weight")]
        begin = max(0.0, start - slower * sum(each.seconds - each.shown for each in late))
        early = [each for each in beside if each.part == "forward"]
        hidden = [(*each.names, each.seconds - each.shown) for each in early if each.seconds > each.shown]
        yield from row(first, hidden) if first is not None else ()
        alone = [
            (lane, origin, words, seconds)
            for lane, words in _BESIDE_LANES.items()
            for origin, seconds in _charged(cost.bare, ("step",), lane=lane).items()
        ]
        in_turn = [(*each.names, each.seconds) for each in late] + [(*each.names, each.shown) for each in early]
        yield from row(begin, in_turn + alone)

    def memory(self) -> Iterator[MemoryPoint]:
        """Through each microbatch's work layer by layer, and when it is over."""
        stages, chunks = self.stages, self.places.chunks
        held, made, last = ([0.0] * len(stages) for _ in range(3))
        known: dict[tuple[int, float, str, float], list[tuple[float, int, Mapping[str, int]]]] = {}
        most = max(2, min(_MOST_MOMENTS, MOST_DRAWN * 4 // len(self.events)))

        def points(at: int, start: float, seconds: float, kind: str) -> Iterator[MemoryPoint]:
            memory, has = stages[at].memory, round(held[at], 9)
            key = stages[at].run.start, has, kind, made[at]  # few, however many microbatches there are
            if key not in known:
                course = [(0.0, memory.between(has, made[at]))]
                if kind:
                    took = defaultdict[str, float](float)
                    for (layer, part), spent in stages[at].cost.by_layer.items():
                        took[layer] += float(spent) * (part in _PARTS[kind])
                    frees = 0 if kind == "backward_input" else 1 / chunks
                    course = memory.course(has, kind == "forward", made[at], seconds=took, frees=frees, most=most)
                known[key] = []
                for share, sizes in course:
                    rounded = {name: round(size) for name, size in sorted(sizes.items()) if size >= 1}
                    known[key].append((share, round(sum(sizes.values())), rounded))
            for share, total, by_category in known[key]:
                # Ends and starts are sums in different orders: what comes later is never drawn before.
                last[at] = max(last[at], start + share * seconds)
                yield MemoryPoint(device=self.devices[at], seconds=last[at], bytes=total, by_category=by_category)

        result = [point for at in range(len(stages)) for point in points(at, 0.0, 0.0, "")]
        for event, end in zip(self.events, self.ends, strict=True):
            at, took = event.stage, self.seconds[event.kind][event.span]
            held[at] += (event.kind == "forward") / chunks
            if event.kind != UPDATE:
                result += points(at, end - took, took, event.kind)
            held[at] -= (event.kind in ("backward", "backward_weight")) / chunks
            made[at] = made[at] if event.kind == "forward" else 1.0
            result += points(at, end, 0.0, "")
        yield from sorted(result, key=lambda point: (point.seconds, point.device))

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


def _span(
    device: int, lane: str, origin: str, name: str, start: float, seconds: float, to_device: int | None = None
) -> Span:
    return Span(
        device=device,
        lane=lane,  # type: ignore[arg-type]
        name=name,
        start_seconds=max(0.0, float(start)),
        seconds=max(0.0, float(seconds)),
        origin=origin,
        to_device=to_device,
    )


def _pieces(cost: StageCost, kind: str) -> list[tuple[str, str, float, float]]:
    """One microbatch's work: compute, what overlaps with it (and what of that is exposed), and what blocks it.

    (lane, origin, start, share) of each, in shares of the whole.
    """
    parts = _PARTS[kind]
    computes = _charged(cost.charges, parts, lane="compute")
    stops = [(lane, *each) for lane in _BESIDE_LANES for each in _charged(cost.bare, parts, lane=lane).items()]
    alone = sum(seconds for _, _, seconds in stops)
    hidden = [each for each in _beside(cost) if each.charge.part in parts]
    shown = sum(each.shown for each in hidden)
    total = sum(computes.values()) + alone + shown
    if not total:
        return []
    # Forward fetches before it computes, backward sends away what it has computed.
    is_forward = kind == "forward"
    groups: list[tuple[float, list[tuple[str, str, float]]]] = [
        (shown if is_forward else alone, [("compute", *each) for each in computes.items()])
    ]
    for lane in _BESIDE_LANES:
        mine = [each for each in hidden if each.charge.lane == lane]
        beside: list[tuple[str, str, float]] = [(lane, each.charge.origin, each.seconds) for each in mine]
        groups.append((0.0 if is_forward else max(0.0, total - sum(seconds for *_, seconds in beside)), beside))
    groups.append((total - alone if is_forward else 0.0, stops))
    result = []
    for start, amounts in groups:
        for lane, origin, seconds in amounts:
            result.append((lane, origin, start / total, seconds / total))
            start += seconds
    return result


def _charged(charges: Mapping[Charge, Num], parts: tuple[Part, ...], *, lane: str) -> dict[str, float]:
    """Seconds by technique, of one lane."""
    result: dict[str, float] = {}
    for charge, seconds in sorted(charges.items(), key=lambda item: (item[0].axis, item[0].origin)):
        if charge.part in parts and charge.lane == lane and float(seconds) > 0:
            result[charge.origin] = result.get(charge.origin, 0.0) + float(seconds)
    return result


class _Alongside(NamedTuple):
    """Collectives or copies beside compute."""

    charge: Charge
    part: Part
    """What they run beside; of the charge it is `step` for those that come once a step."""
    seconds: float
    shown: float
    """Of them, those that compute waits for."""

    @property
    def names(self) -> tuple[str, str, str]:
        """Their lane, whose they are, and what they are called."""
        return self.charge.lane, self.charge.origin, _BESIDE_LANES[self.charge.lane]


def _beside(cost: StageCost) -> list[_Alongside]:
    """By whose they are and when."""
    whole, by_charge = defaultdict[tuple[Charge, Part], float](float), defaultdict[Charge, float](float)
    for item in cost.hidden:
        charge = item.charge("step" if item.task.per_step else item.part)
        whole[charge, item.part] += float(item.total_seconds)
    for (charge, _), seconds in whole.items():
        by_charge[charge] += seconds
    result = []
    for (charge, part), seconds in whole.items():
        shown = float(cost.charges.get(charge, 0.0)) - float(cost.bare.get(charge, 0.0))
        if seconds > 0:
            shares = max(0.0, shown) * seconds / by_charge[charge]
            result.append(_Alongside(charge, part, seconds, min(seconds, shares)))
    return result
