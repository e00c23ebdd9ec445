"""A plan as spans on lanes: what each stage does when, before it runs. The same type as a measured one.

Ranks that differ only along other axes do the same at the same time, so each stage shows one: its first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.timeline import MemoryPoint, Span, Timeline
from meshwright.core.work import ADAM, Updating
from meshwright.schedules.events import Event, halves, sweep
from meshwright.simulate.cost import Part
from meshwright.simulate.stage import Stage, cutter_of, stage_plan

_PARTS: dict[str, tuple[Part, ...]] = {
    "forward": ("forward",),
    "backward": ("backward", "weight"),
    "backward_input": ("backward",),
    "backward_weight": ("weight",),
}

MOST_DRAWN = 2048
"""Stages x microbatches in a timeline (at least one microbatch a stage): beyond, nobody sees them one by one."""


def simulate(profile: Profile, plan: Plan, cluster: Cluster, *, sequence: int, optimizer: Updating = ADAM) -> Timeline:
    """One step, every microbatch simulated, none extrapolated. Of very many only the first, as `environment` says."""
    staged = stage_plan(profile, plan, cluster, sequence=sequence, optimizer=optimizer)
    stages = staged.unfolded
    count = min(plan.num_microbatches, max(MOST_DRAWN // len(stages), len(stages)))
    events = staged.timetable.events(len(stages), count)
    seconds = halves(*staged.columns)
    ends, finished = sweep(events, seconds, staged.send_seconds)
    devices = _first_ranks(plan, len(stages))
    cutter = cutter_of(plan)
    sender_origin = cutter.name if cutter is not None else ""
    spans: list[Span] = []
    for event, end in zip(events, ends, strict=True):
        stage, device = stages[event.stage], devices[event.stage]
        took = seconds[event.kind][event.span]
        spans.extend(_shared(stage, event, device, end - took, took))
        # What an event waits for was sent by the stage it waits for.
        for source in event.waits_for:
            sender = devices[events[source].stage]
            way = "forward" if event.kind == "forward" else "backward"
            name = f"send {way} {event.microbatch}"
            spans.append(_span(sender, "collective", name, ends[source], staged.send_seconds, sender_origin))
    for stage, device in zip(stages, devices, strict=True):
        spans.extend(_spans(stage, "step", "step", device, max(finished)))
    return Timeline(
        source="predicted",
        plan_fingerprint=plan.fingerprint,
        spans=tuple(sorted(spans, key=lambda span: (span.start_seconds, span.device))),
        memory=tuple(_memory(stages, devices, events, ends, seconds)),
        environment={
            "cluster": cluster.name,
            "profile": profile.name,
            "sequence": str(sequence),
            "microbatches": f"{count} of {plan.num_microbatches}",
        },
    )


def _first_ranks(plan: Plan, num_stages: int) -> list[int]:
    cutter, stride = cutter_of(plan), plan.num_ranks
    for axis, size in plan.mesh.items():
        stride //= size
        if cutter is not None and axis == cutter.axis:
            return [stage * stride for stage in range(num_stages)]
    return [0]


def _span(device: int, lane: str, name: str, start: float, seconds: float, origin: str) -> Span:
    return Span(
        device=device,
        lane=lane,  # type: ignore[arg-type]
        name=name,
        start_seconds=float(start),
        seconds=float(seconds),
        origin=origin,
    )


def _spans(stage: Stage, part: Part, name: str, device: int, start: float) -> Iterator[Span]:
    """What passes during one part, one technique after the other: how they interleave inside is not modelled."""
    charges = sorted(stage.cost.charges.items(), key=lambda item: (item[0].axis, item[0].origin))
    for charge, seconds in charges:
        if charge.part == part and float(seconds) > 0:
            lane = "collective" if charge.axis else "compute"
            yield _span(device, lane, name, start, float(seconds), charge.origin)
            start += float(seconds)


def _shared(stage: Stage, event: Event, device: int, start: float, took: float) -> Iterator[Span]:
    """An event's time, shared out between techniques as the stage's is."""
    parts = _PARTS[event.kind]
    name = f"{event.kind} {event.microbatch}"
    mine = [span for part in parts for span in _spans(stage, part, name, device, 0.0)]
    total = sum(span.seconds for span in mine)
    for span in mine:
        share = span.seconds / total * took
        yield replace(span, start_seconds=start, seconds=share)
        start += share


def _memory(
    stages: tuple[Stage, ...],
    devices: list[int],
    events: tuple[Event, ...],
    ends: list[float],
    seconds: Mapping[str, Sequence[float]],
) -> Iterator[MemoryPoint]:
    """Bytes of each stage when a microbatch's work starts (at its fullest) and when it is over."""
    chunks = len(seconds["forward"]) // len(stages)
    held = [0.0] * len(stages)
    points = []
    for event, end in zip(events, ends, strict=True):
        memory = stages[event.stage].memory
        is_freed = event.kind in ("backward", "backward_weight")
        held[event.stage] += (event.kind == "forward") / chunks
        busy = memory.base_bytes() + held[event.stage] * memory.microbatch_bytes() + memory.moment_bytes()
        held[event.stage] -= is_freed / chunks
        idle = memory.base_bytes() + held[event.stage] * memory.microbatch_bytes()
        points.append((end - seconds[event.kind][event.span], devices[event.stage], busy))
        points.append((end, devices[event.stage], idle))
    for when, device, size in sorted(points, key=lambda point: point[:2]):
        yield MemoryPoint(device=device, seconds=float(when), bytes=round(float(size)))
