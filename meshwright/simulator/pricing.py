"""Plan -> Work -> stages: `price` of all techniques, for one stage or for arrays of candidates; and a plan's stages
with their seconds and bytes, each run of equal stages once, which forecast and timeline both start from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from operator import is_
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Spans, Technique
from meshwright.core.work import ADAM, Collective, Num, Updating, Work, base_work, replace, settle
from meshwright.schedules import Timetable
from meshwright.schedules.events import peak_held
from meshwright.simulator.makespan import makespan
from meshwright.simulator.peak_memory import StageMemory, stage_memory, timetable_of
from meshwright.simulator.stage_seconds import StageCost, routes, stage_cost

ELEMENT_BYTES = 4
"""Parameters and gradients are kept in float32."""
_MANY = 6
"""Microbatches a stage after which a schedule holds no more, unless it holds all."""
T = TypeVar("T")
_PLAIN = frozenset((str, int, float, bool, type(None)))


def sizes_of(plan: Plan, profile: Profile, *, sequence: int, stage: int, chunk: int | None = None) -> dict[str, Any]:
    """The numbers a plan gives to `price`."""
    stages = plan.spans_of_stages(profile)
    spans = stages[stage]
    part: dict[str, Any] = {} if chunk is None or len(spans) == 1 else {"chunk": chunk}
    for technique in plan.techniques:
        part |= technique.counts_in(profile, spans, part.get("chunk"))
    spans = (spans[chunk],) if "chunk" in part and chunk is not None else spans
    return part | {
        **plan.mesh,
        "num_ranks": plan.num_ranks,
        "batch": plan.batch,
        "sequence": sequence // plan.sequence_parts,
        "sequence_parts": plan.sequence_parts,
        "microbatch": plan.microbatch,
        "num_microbatches": plan.num_microbatches,
        "stage": stage,
        "num_stages": len(stages),
        "first_block": spans[0][0],
        "blocks": sum(last - first for first, last in spans),
    }


def price(
    profile: Profile,
    plan: Plan,
    *,
    sequence: int,
    stage: int = 0,
    chunk: int | None = None,
    optimizer: Updating = ADAM,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """What a step asks of a rank of one stage, or of one chunk of its layers."""
    sizes = sizes_of(plan, profile, sequence=sequence, stage=stage, chunk=chunk)
    techniques = plan.in_phase_order()
    return price_sizes(profile, techniques, sizes, optimizer=optimizer, element_bytes=element_bytes)


def price_sizes(
    profile: Profile,
    techniques: tuple[Technique, ...],
    sizes: Mapping[str, Any],
    *,
    optimizer: Updating = ADAM,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """The same over arrays: one entry per candidate and stage in any of the sizes."""
    work = base_work(profile, sizes, element_bytes=element_bytes, optimizer=optimizer)
    for technique in techniques:
        work = technique.price(work)

    def sent(task: Any) -> Any:
        """One rank alone sends nothing."""
        return replace(task, repeat=task.repeat * (work.size(task.axis) > 1)) if isinstance(task, Collective) else task

    return settle(work).map_tasks(sent)


def stacked(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of all candidates: an array where they differ, else the number they share."""
    return {
        name: value if all(one[name] == value for one in each) else np.array([one[name] for one in each])
        for name, value in each[0].items()
    }


def picked(value: T, at: int) -> T:
    """The same with the numbers of one candidate in the place of arrays over all; what has none stays what it is."""
    one: T = value if type(value) in _PLAIN else _picked(value, at)
    return one


def _picked(value: Any, at: int) -> Any:
    kind: Any = type(value)
    if isinstance(value, np.ndarray):
        return value[at].item() if value.ndim else value.item()
    if isinstance(value, dict):
        return {key: picked(each, at) for key, each in value.items()}
    if not isinstance(value, tuple) and not is_dataclass(value):
        return value
    before = value if isinstance(value, tuple) else [getattr(value, name) for name in _names(kind)]
    parts = [each if type(each) in _PLAIN else _picked(each, at) for each in before]
    if all(map(is_, parts, before)):
        return value
    if isinstance(value, tuple):
        return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
    return kind(**dict(zip(_names(kind), parts, strict=True)))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    start: int
    """The stage that stands for the run."""
    count: int
    first_block: int
    blocks: int


def straight(blocks: Sequence[int]) -> tuple[Spans, ...]:
    """Stages of so many blocks each, one after the other."""
    ends = [sum(blocks[: stage + 1]) for stage in range(len(blocks))]
    return tuple(((end - count, end),) for end, count in zip(ends, blocks, strict=True))


def runs_of(profile: Profile, stages: Sequence[Spans], techniques: Sequence[Technique] = ()) -> tuple[StageRun, ...]:
    """Stages that are alike are simulated once: (4, 4, 4, 4, 3) blocks are the runs [0] [1 2 3] [4].

    Inner stages with equally many blocks of each kind do the same work; the first stage (where samples enter) and the
    last (where the loss is) stay alone. The first of a run stands for it: it holds the most microbatches.
    `techniques` may treat blocks of one kind differently.
    """
    runs: list[StageRun] = []
    alike: tuple[Any, ...] = ()
    for stage, spans in enumerate(stages):
        is_end = stage in (0, 1, len(stages) - 1)
        kinds: tuple[Any, ...] = tuple(profile.kinds_within(first, last - first) for first, last in spans)
        for technique in techniques:
            if technique.policies:
                each = [technique.counts_in(profile, spans, chunk) for chunk in range(len(spans))]
                kinds += tuple(tuple(counts.values()) for counts in each)
        if not is_end and kinds == alike:
            runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
        else:
            blocks = sum(last - first for first, last in spans)
            runs.append(StageRun(start=stage, count=1, first_block=spans[0][0], blocks=blocks))
        alike = kinds
    return tuple(runs)


class Seconds(NamedTuple):
    """Seconds of one microbatch in one span of layers."""

    forward: Any
    backward: Any
    """Recomputation and both halves included."""
    weight: Any
    """Of backward, the half that is apart."""


def _seconds(cost: StageCost) -> Seconds:
    weight = cost.seconds("weight")
    return Seconds(cost.seconds("forward"), cost.seconds("backward") + weight, weight)


@dataclass(frozen=True, kw_only=True)
class Stage:
    run: StageRun
    cost: StageCost
    memory: StageMemory

    @cached_property
    def all_seconds(self) -> Seconds:
        """Seconds of one microbatch in all of the stage's layers."""
        return Seconds(*map(float, _seconds(self.cost)))

    @cached_property
    def tail_seconds(self) -> float:
        """After the last backward: what is left of the exchange, and the optimizer."""
        return float(self.cost.seconds("step"))


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Stages that a microbatch passes through: all of a plan's, or one replica's."""

    plan: Plan
    """With this many microbatches for every replica."""
    stages: tuple[Stage, ...]
    """One for each run of equal stages."""
    spans: tuple[Seconds, ...]
    """Of all spans of layers, in the order of the model."""
    timetable: Timetable
    compute_dtype: str
    send_seconds: float | list[float]
    """Of a message; over each boundary between spans, where they are not all alike."""
    groups: tuple[int, ...]
    """Where each of `stages` lies on a mixed cluster."""
    first_rank: int = 0

    @property
    def unfolded(self) -> tuple[Stage, ...]:
        """One for each stage."""
        return tuple(stage for stage in self.stages for _ in range(stage.run.count))

    @property
    def columns(self) -> tuple[list[float], list[float], list[float]]:
        """Forward, backward and weight seconds by span."""
        forward, backward, weight = map(list, zip(*self.spans, strict=True))
        return forward, backward, weight

    def seconds(self, num_microbatches: int) -> float:
        """Until the last backward has ended."""
        return float(makespan(self.timetable, *self.columns, self.send_seconds, num_microbatches))


def cutter_of(plan: Plan) -> Technique | None:
    """The technique that cuts the model into stages, if any."""
    return next((t for t in plan.techniques if t.blocks_of_stages(1 << 20) is not None), None)


Change = Callable[[Work], Work]
"""How somebody else's program does the work of a plan, where forecasts are held against what it measured."""
PricedAtOnce = Callable[[Iterable[dict[str, Any]]], tuple[Work, StageCost, StageMemory]]


def stage_plan(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    *,
    sequence: int,
    optimizer: Updating,
    change: Change = lambda work: work,
) -> Staged:
    cut = plan.spans_of_stages(profile)
    runs = runs_of(profile, cut, plan.techniques)

    def priced(sizes: Iterable[dict[str, Any]]) -> tuple[Work, StageCost, StageMemory]:
        work = change(price_sizes(profile, plan.in_phase_order(), stacked(list(sizes)), optimizer=optimizer))
        return work, stage_cost(work, cluster, routes(cluster, plan.mesh)), stage_memory(work, cluster.device)

    work, costs, memory = priced(sizes_of(plan, profile, sequence=sequence, stage=run.start) for run in runs)
    stages = [Stage(run=run, cost=picked(costs, at), memory=picked(memory, at)) for at, run in enumerate(runs)]
    staged = Staged(
        plan=plan,
        stages=tuple(stages),
        spans=tuple(stage.all_seconds for stage in stages for _ in range(stage.run.count)),
        timetable=timetable_of(work),
        compute_dtype=work.facts.compute_dtype,
        send_seconds=max(float(stage.cost.send_seconds) for stage in stages),
        groups=(0,) * len(stages),
    )
    return staged if len(cut[0]) == 1 else _in_chunks(staged, profile, sequence, priced)


def held_of_chunks(
    timetable: Timetable, stage: int, num_stages: int, num_microbatches: int, kept_bytes: Sequence[Num]
) -> Num:
    """Microbatches in flight, of all the stage's layers: as many bytes as are held at most. `kept_bytes`: what a
    microbatch keeps in each chunk; numbers or arrays."""
    count = min(num_microbatches, _MANY * num_stages)
    longer = timetable.held(stage, num_stages, num_microbatches)
    if longer > count:
        return longer
    most = peak_held(timetable.orders(num_stages, count)[stage], kept_bytes)
    return most / np.maximum(sum(kept_bytes), 1e-30)


def _in_chunks(staged: Staged, profile: Profile, sequence: int, priced: PricedAtOnce) -> Staged:
    """Where a stage has several chunks of layers: the seconds of each, and what is held while they take turns."""
    plan = staged.plan
    cut = plan.spans_of_stages(profile)
    places = staged.timetable.places(len(cut))
    sizes: dict[Any, dict[str, Any]] = {}
    keys = []
    for span in range(places.num_spans):
        stage, chunk = places.stage(span), places.chunk(span)
        first, last = cut[stage][chunk]
        is_end = span in (0, places.num_spans - 1)
        policies = [tuple(t.counts_in(profile, cut[stage], chunk).values()) for t in plan.techniques if t.policies]
        keys.append((span if is_end else -1, chunk, profile.kinds_within(first, last - first), *policies))
        if keys[-1] not in sizes:
            sizes[keys[-1]] = sizes_of(plan, profile, sequence=sequence, stage=stage, chunk=chunk)
    _, costs, memory = priced(sizes.values())
    numbers = (*_seconds(costs), memory.microbatch_bytes)
    each = {key: [float(number) for number in picked(numbers, at)] for at, key in enumerate(sizes)}

    def held(stage: Stage) -> Stage:
        spans = [places.span(stage.run.start, chunk) for chunk in range(places.chunks)]
        kept = [each[keys[span]][3] for span in spans]
        in_flight = held_of_chunks(staged.timetable, stage.run.start, len(cut), plan.num_microbatches, kept)
        return replace(stage, memory=replace(stage.memory, in_flight=in_flight))

    return replace(staged, spans=tuple(Seconds(*each[key][:3]) for key in keys), stages=tuple(map(held, staged.stages)))
