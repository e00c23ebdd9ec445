"""Cut the model into stages; microbatches flow through them.

What: ranks along `pp` hold layers that follow each other; activations go forward and gradients back between stages, in
the order of a schedule. gpipe runs all forwards, then all backwards; 1f1b starts a backward as soon as it can, so a
stage holds at most p - s microbatches. interleaved and looped_bfs give a stage several chunks of layers and go round:
a bubble shorter by as many times, as many times more messages. zero_bubble_h1 and _h2, zbv and dualpipe_v make weight
gradients, which nobody waits for, where a stage would idle; the last two lay two chunks a stage out as a V. greedy is
made for given times and a given memory, and is never slower than the others of one chunk that fit in it. async never
flushes: a step's microbatches all see the weights of one update earlier, kept beside the newest ones.
When it helps: the model is too deep for one device and links are slow: a boundary carries b·s·d per microbatch, far
less than any other split.
When it does not: few microbatches (the bubble), or stages of unequal work (the slowest sets the pace).
Cost: idle (p-1)/m of the step for equal stages, / chunks when interleaved (Huang et al. 2019; Narayanan et al. 2021);
zero_bubble_h1: (p-1)(F+I-W) (Qi et al. 2023). A weight tied across stages is held twice and its gradient summed.
async: no bubble, one more copy of the trained parameters (Narayanan et al. 2021, PipeDream-2BW).
Exactness: exact; approximate with async, which search does not choose by itself. Axis: pp.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Exactness, Option, Technique
from meshwright.core.work import Circumstances, Collective, Compute, Num, ParameterSlot, Resident, Work, replace
from meshwright.schedules import SCHEDULES, Places, Timetable, schedule_named, schedule_names
from meshwright.schedules.actions import BlockSpan


@dataclass(frozen=True, kw_only=True)
class Pipeline(Technique):
    name: ClassVar[str] = "pipeline"
    phase: ClassVar[str] = "cut"
    exactness: ClassVar[Exactness] = "exact"
    axis: ClassVar[str] = "pp"
    closeness: ClassVar[int] = 0

    size: int
    """Stages."""
    schedule: str = "1f1b"
    """One of those above, or of a plugin's."""
    stages: tuple[int, ...] = ()
    """Blocks of each stage; empty: as even as they go, the first stages taking one more. With chunks: of each chunk, in
    the order of the model."""
    chunks: int = 0
    """Chunks of layers a stage has, for interleaved and looped_bfs; 0: two there, else what the schedule needs."""
    times: tuple[float, ...] = ()
    """For greedy: time (in any unit) of forward, input half and weight half, for all stages or one after the other."""
    most_held: int = 0
    """For greedy: microbatches a stage may hold; 0: any."""

    def __post_init__(self) -> None:
        schedule_named(self.schedule)  # raises where there is no such one
        object.__setattr__(self, "exactness", self.exactness_with({"schedule": self.schedule}))

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any]) -> Exactness:
        name = settings.get("schedule")
        overlaps = name in schedule_names() and schedule_named(name).overlaps_steps
        return "approximate" if overlaps else cls.exactness

    def as_exact(self) -> Pipeline:
        return replace(self, schedule="1f1b") if schedule_named(self.schedule).overlaps_steps else self

    @property
    def timetable(self) -> Timetable:
        return Timetable(self.schedule, self.chunks or schedule_named(self.schedule).chunks, self.times, self.most_held)

    @property
    def splits_backward(self) -> bool:
        return self.size > 1 and self.timetable.splits_backward

    @property
    def overlaps_steps(self) -> bool:
        return self.size > 1 and self.timetable.overlaps_steps

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        most = 1 if "stages" in profile.uncut or profile.group_borders else min(profile.num_blocks, cluster.num_devices)
        sizes = tuple(range(2, most + 1))
        # greedy as it is set by default does what zero_bubble_h1 does (docs/search.md).
        tried = ("1f1b", *(name for name, each in SCHEDULES.items() if name != "1f1b" and not each.takes_times))
        return (Axis("size", sizes), Choice("schedule", tried), Choice("chunks", (0, 4))) if sizes else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        blocks = profile.num_blocks
        if "stages" in profile.uncut and self.size > 1:
            return (self.problem(f"this model cannot be cut into stages: {profile.uncut['stages']}"),)
        problems = [*self._setting_problems()]
        if problems:
            return tuple(problems)
        count = self.size * self.timetable.chunks
        problems = [*self.refused(plan, profile)]
        if count > blocks:
            return (problems[0],)
        if self.stages and (sum(self.stages) != blocks or min(self.stages) < 1):
            what = f"stages {self.stages} must be at least 1 each and add up to {blocks} blocks."
            problems.append(self.problem(what, f"For example {_even(blocks, count)}."))
        tied = [f"{layer.name}.{param.name}" for layer in profile.layers for param in layer.params if param.tied]
        if self.overlaps_steps and tied:
            what = f"{self.schedule}: {tied[0]} is tied across stages, which update it at different times."
            problems.append(self.problem(what, "Use another schedule, or a model without tied weights."))
        return tuple(problems)

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        chunks = self.timetable.chunks
        count = given.size * chunks
        each = f" of {chunks} chunks" if chunks > 1 else ""
        what = f"{self.size} stages{each} for {given.num_blocks} blocks."
        yield count > given.num_blocks, self.problem(what, f"Use at most {given.num_blocks // chunks}.")
        if self.stages:
            each = f" x {chunks} chunks" if chunks > 1 else ""
            what = f"stages lists {len(self.stages)} stages, size is {self.size}{each}."
            yield count != len(self.stages), self.problem(what, f"List {self.size * chunks}.")
        if self.timetable.overlaps_steps:
            needed = f"{self.schedule} needs a microbatch for each of {self.size} stages"
            what = f"{needed}, a step has {given.num_microbatches}."
            fix = "Use smaller microbatches, a larger batch or fewer stages."
            yield given.num_microbatches < given.size, self.problem(what, fix)
            what = f"in {self.schedule} a stage updates before others know whether a gradient of fp16 overflowed."
            yield given.scales_loss, self.problem(what, "Use another schedule, or another dtype than fp16.")

    def _setting_problems(self) -> list[Problem]:
        problems = []
        schedule = schedule_named(self.schedule)
        if self.chunks < 0 or (self.chunks and not schedule.any_chunks and self.chunks != schedule.chunks):
            fix = "Leave chunks out, or use interleaved or looped_bfs."
            problems.append(self.problem(f"{self.chunks} chunks: {self.schedule} has {schedule.chunks}.", fix))
        if self.chunks == 1 and schedule.any_chunks:
            problems.append(self.problem(f"{self.schedule} needs 2 chunks or more.", "Use 1f1b or gpipe for one."))
        if not schedule.takes_times and (self.times or self.most_held):
            what = f"times and most_held are greedy's, not {self.schedule}'s."
            problems.append(self.problem(what, 'Use schedule = "greedy", or leave them out.'))
        if self.times and (len(self.times) not in (3, 3 * self.size) or min(self.times) <= 0):
            what = f"times has {len(self.times)} numbers, the least of them {min(self.times)}."
            problems.append(self.problem(what, f"Give 3, or {3 * self.size}, all above 0."))
        if self.most_held < 0:
            problems.append(self.problem(f"most_held is {self.most_held}.", "Use 1 or more, or 0 for any."))
        return problems

    def blocks_of_stages(self, blocks: int) -> tuple[int, ...]:
        spans = _spans_of_stages(self.timetable, self.size, self.stages, blocks)
        return tuple(sum(last - first for first, last in mine) for mine in spans)

    def spans_of_stage(self, blocks: int, stage: int) -> tuple[tuple[int, int], ...]:
        return _spans_of_stages(self.timetable, self.size, self.stages, blocks)[stage]

    def price(self, work: Work) -> Work:
        stages = work.size("num_stages")
        if np.all(stages == 1):
            return work
        places = self.timetable.places(stages)
        spans = self._spans(work, places)
        layers = work.profile.layers
        first, last = sum(span.is_first for span in spans), sum(span.is_last for span in spans)
        repeats: dict[str, Num] = {layers[0].name: first, layers[-1].name: last}
        for layer in layers[1:-1]:
            repeats[layer.name] = _blocks_between(work.profile, layer.name, spans)
            if work.profile.group_borders and not layer.is_block:
                repeats[layer.name] = sum(work.profile.heads_within(span.first, span.last) for span in spans)
        tied = {slot.copy_of for slot in work.slots if slot.copy_of} if places.shape == "loop" else set()

        is_first_chunk = (work.sizes.get("chunk", 0) == 0) * 1

        def place(item: Any) -> Any:
            """What is of no layer is done by every stage, once."""
            return replace(item, repeat=repeats[item.layer] if item.layer else item.repeat * is_first_chunk)

        def slot(item: ParameterSlot) -> ParameterSlot:
            is_shared = tied and (item.copy_of or f"{item.layer}.{item.name}" in tied)
            late = (*item.late, (self.axis, self.name)) if is_shared else item.late
            copy_of = "" if is_shared else item.copy_of
            return replace(item, repeat=repeats[item.layer], copy_of=copy_of, late=late)

        work = work.map_tasks(place).map_residents(place).map_slots(slot)
        if self.timetable.splits_backward:
            work = _halved(work)
        work = work.with_tasks(*self._sends(work, spans)).with_residents(*self._buffers(work, spans))
        if self.timetable.overlaps_steps:
            work = work.with_facts(older_versions=(stages > 1) * 1)
        schedule = self.timetable
        if work.facts.cut_before and np.ndim(stages) == 0:
            counts = _counts(places.num_spans, self.stages, work.profile.num_blocks)
            schedule = replace(schedule, cut_spans=_cut_spans(counts, work.facts.cut_before))
        return self.forbid(work).with_facts(schedule=schedule)

    def _spans(self, work: Work, places: Places) -> list[BlockSpan]:
        """What is priced: this stage's chunks, or the one that `chunk` says."""
        stage, blocks = work.size("stage"), work.profile.num_blocks
        if places.chunks == 1:
            first, count = work.size("first_block"), work.size("blocks")
            return [BlockSpan(first, first + count, stage, places)]
        result = []
        chosen = work.sizes.get("chunk")
        for chunk in range(places.chunks) if chosen is None else (chosen,):
            at = places.span(stage, chunk)
            if np.all(len(self.stages) == places.num_spans):
                bounds = np.cumsum((0, *self.stages))
                result.append(BlockSpan(bounds[at], bounds[at + 1], at, places))
            else:
                each, more = blocks // places.num_spans, blocks % places.num_spans
                start = at * each + np.minimum(at, more)
                result.append(BlockSpan(start, start + each + (at < more), at, places))
        return result

    def _sends(self, work: Work, spans: list[BlockSpan]) -> list[Collective]:
        layers, cut_before = work.profile.layers, work.facts.cut_before
        sends_back = [span.hands_back * (1 - sum((span.first == block) * 1 for block in cut_before)) for span in spans]
        return [
            Collective(
                layer=layer.name,
                kind="send",
                axis=self.axis,
                phase=phase,  # type: ignore[arg-type]
                repeat=count,
                bytes=size,
                origin=self.name,
                cut="sequence",
            )
            for span, back in zip(spans, sends_back, strict=True)
            for layer, phase, count, size in (
                (layers[0], "backward", back, _handed_on(work, span.first)),
                (layers[-1], "forward", span.hands_on, _handed_on(work, span.last)),
            )
        ]

    def _buffers(self, work: Work, spans: list[BlockSpan]) -> list[Resident]:
        """What is on its way in and out; and what was handed on, held until its gradient comes back."""
        size: Num = 0
        handed_on: Num = 0
        for span in spans:
            out = _handed_on(work, span.last) * span.hands_on
            size, handed_on = size + _handed_on(work, span.first) * span.hands_back + out, handed_on + out
        layers = work.profile.layers
        common: dict[str, Any] = {"repeat": 1, "cut": "sequence", "origin": self.name}
        return [
            Resident(**common, layer=layers[0].name, category="buffers", bytes=size, life="always"),
            Resident(**common, layer=layers[-1].name, category="activations", bytes=handed_on, life="microbatch"),
        ]

    def apply(self, build: Build) -> None:
        if self.size > 1:
            build.at("cut", self._cut)

    def _cut(self, build: Build) -> None:
        from meshwright.ops.split_backward import split_backward
        from meshwright.ops.stage_transport import Wire

        mesh = build.mesh
        build.stage, build.num_stages = mesh.index(self.axis), self.size
        num_spans = self.timetable.places(self.size).num_spans
        counts = _counts(num_spans, self.stages, build.profile.num_blocks)
        build.timetable = replace(self.timetable, cut_spans=_cut_spans(counts, build.model.cut_before))
        build.keep_spans(self.spans_of_stage(build.profile.num_blocks, build.stage))
        build.wire = Wire(mesh, self.axis, build.places)
        if self.splits_backward:
            build.later = split_backward(build.model.block_modules())
        build.cut_everything(self.axis)
        ends = [0, build.places.stage(build.places.num_spans - 1)]
        if build.tied and ends[0] != ends[1]:
            group = mesh.new_group(self.axis, [[ranks[end] for end in ends] for ranks in mesh.along(self.axis)])
            for name in build.tied:
                if name in build.boxes:
                    build.sum_late(self, name, group, is_copy=build.stage > 0)


@lru_cache(maxsize=1024)
def _spans_of_stages(
    timetable: Timetable, size: int, stages: tuple[int, ...], blocks: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    places = timetable.places(size)
    counts = _counts(places.num_spans, stages, blocks)
    ends = list(itertools.accumulate(counts))
    spans = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return tuple(tuple(spans[places.span(stage, chunk)] for chunk in range(places.chunks)) for stage in range(size))


def _halved(work: Work) -> Work:
    """Half of a linear layer's backward is its weight's gradient; all or nothing of it where only one half runs."""
    blocks = {layer.name for layer in work.profile.block_layers}
    frozen = {(slot.layer, slot.name) for slot in work.slots if slot.frozen}
    tasks: list[Any] = []
    for task in work.tasks:
        is_back = task.phase == "backward" and task.layer in blocks
        if is_back and isinstance(task, Compute) and task.role == "linear":
            if (task.layer, f"{task.name}.weight") in frozen:
                tasks.append(task)
                continue
            half = replace(task, flops=task.flops / 2, moved_bytes=task.moved_bytes / 2, kernels=task.kernels / 2)
            tasks += [half, replace(half, phase="weight")]
        else:
            tasks.append(task)
    return replace(work, tasks=tuple(tasks))


def _counts(num_spans: int, stages: tuple[int, ...], blocks: int) -> tuple[int, ...]:
    """Blocks of each span, in the order of the model."""
    return stages if len(stages) == num_spans else _even(blocks, num_spans)


def _cut_spans(counts: Sequence[int], cut_before: Collection[int]) -> tuple[int, ...]:
    """Those of the spans, of so many blocks each, that hand no gradient back."""
    starts = itertools.accumulate(counts, initial=0)
    return tuple(span for span, start in enumerate(starts) if start in cut_before)


def _even(blocks: int, count: int) -> tuple[int, ...]:
    return tuple(blocks // count + (stage < blocks % count) for stage in range(count))


def _blocks_between(profile: Profile, name: str, spans: list[BlockSpan]) -> Num:
    """How many blocks of one kind lie in the spans."""
    at, total = 0, 0
    for layer in profile.block_layers:
        if layer.name == name:
            for span in spans:
                within = np.minimum(span.last, at + layer.repeat) - np.maximum(span.first, at)
                total = total + np.maximum(within, 0)
        at += layer.repeat
    return total


def _handed_on(work: Work, block: Num) -> Num:
    """Bytes that enter block number `block`."""
    b, s = work.size("microbatch"), work.size("sequence")
    at, total = 0, (block == 0) * work.profile.layers[0].boundary(b, s)
    for layer in work.profile.block_layers:
        total = total + ((block > at) & (block <= at + layer.repeat)) * layer.boundary(b, s)
        at += layer.repeat
    return total * work.facts.widths.stream
