"""Cut the model into stages; microbatches flow through them.

What: ranks along `pp` hold consecutive layers; activations go forward and gradients back between neighbours, in the
order of a schedule. gpipe runs all forwards, then all backwards; 1f1b starts a backward as soon as it can, so a stage
holds at most p - s microbatches.
When it helps: the model is too deep for one device and links are slow: a boundary carries b·s·d per microbatch, far
less than any other split.
When it does not: few microbatches (the bubble), or stages of unequal work (the slowest sets the pace).
Cost: idle (p-1)/m of the step for equal stages (Huang et al. 2019; Narayanan et al. 2021). A weight tied across stages
is held twice and its gradient summed.
Exactness: exact. Axis: pp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Option, Technique
from meshwright.core.work import Collective, Num, Resident, Slot, Work


@dataclass(frozen=True, kw_only=True)
class Pipeline(Technique):
    name: ClassVar[str] = "pipeline"
    phase: ClassVar[str] = "cut"
    axis: ClassVar[str] = "pp"
    closeness: ClassVar[int] = 0

    size: int
    """Stages."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    stages: tuple[int, ...] = ()
    """Blocks of each stage; empty: as even as they go, the first stages taking one more."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        most = 1 if "stages" in profile.uncut else min(profile.num_blocks, cluster.num_devices)
        sizes = tuple(range(2, most + 1))
        return (Axis("size", sizes), Choice("schedule", ("1f1b", "gpipe"))) if sizes else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        blocks = profile.num_blocks
        if "stages" in profile.uncut and self.size > 1:
            return (self.problem(f"this model cannot be cut into stages: {profile.uncut['stages']}"),)
        if self.size > blocks:
            return (self.problem(f"{self.size} stages for {blocks} blocks.", f"Use at most {blocks}."),)
        problems = []
        if self.stages and len(self.stages) != self.size:
            problems.append(self.problem(f"stages lists {len(self.stages)} stages, size is {self.size}."))
        if self.stages and (sum(self.stages) != blocks or min(self.stages) < 1):
            what = f"stages {self.stages} must be at least 1 each and add up to {blocks} blocks."
            problems.append(self.problem(what, f"For example {self._even(blocks)}."))
        return tuple(problems)

    def _even(self, blocks: int) -> tuple[int, ...]:
        return tuple(blocks // self.size + (stage < blocks % self.size) for stage in range(self.size))

    def blocks_of_stages(self, blocks: int) -> tuple[int, ...]:
        return self.stages or self._even(blocks)

    def price(self, work: Work) -> Work:
        stage, stages = work.size("stage"), work.size("num_stages")
        if np.all(stages == 1):
            return work
        layers = work.profile.layers
        first, last = (stage == 0) * 1, (stage == stages - 1) * 1
        start, end = work.size("first_block"), work.size("first_block") + work.size("blocks")
        repeats = _blocks_between(work.profile, start, end)
        repeats |= {layers[0].name: first, layers[-1].name: last}
        tied = {slot.copy_of for slot in work.slots if slot.copy_of}

        def place(item: Any) -> Any:
            return replace(item, repeat=repeats[item.layer])

        def slot(item: Slot) -> Slot:
            shared = item.copy_of or f"{item.layer}.{item.name}" in tied
            late = (*item.late, (self.axis, self.name)) if shared else item.late
            return replace(item, repeat=repeats[item.layer], copy_of="", late=late)

        width = work.facts.get("stream_bytes", work.slots[0].element_bytes)
        before, after = _handed_on(work, start) * width, _handed_on(work, end) * width
        sends = [
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
            for layer, phase, count, size in (
                (layers[0], "backward", 1 - first, before),
                (layers[-1], "forward", 1 - last, after),
            )
        ]
        # The boundary received is kept until its backward; gradients of it come back in a buffer.
        buffers = Resident(
            layer=layers[0].name,
            category="buffers",
            repeat=1,
            bytes=before * (1 - first) + after * (1 - last),
            life="moment",
            cut="sequence",
            origin=self.name,
        )
        work = work.map_tasks(place).map_residents(place).map_slots(slot)
        work = work.with_tasks(*sends).with_residents(buffers)
        return work.with_facts(schedule=self.schedule)

    def apply(self, build: Any) -> None:
        build.at("cut", self._cut)

    def _cut(self, build: Any) -> None:
        from meshwright.ops.pipeline import Wire
        from meshwright.schedules import SCHEDULES

        mesh = build.mesh
        stage = mesh.index(self.axis)
        blocks = self.blocks_of_stages(build.profile.num_blocks)
        start = sum(blocks[:stage])
        build.keep_blocks(start, start + blocks[stage])
        build.schedule = lambda count: SCHEDULES[self.schedule].actions(stage, self.size, count)
        build.forward_schedule = lambda count: SCHEDULES["forward"].actions(stage, self.size, count)
        build.wire = Wire(mesh, self.axis)
        build.has_loss = stage == self.size - 1
        build.cut_everything(self.axis)
        if build.tied and self.size > 1:
            ends = [[ranks[0], ranks[-1]] for ranks in mesh.along(self.axis)]
            group = mesh.new_group(self.axis, ends)
            for name in build.tied:
                if name in build.boxes:
                    build.owe(name, group, is_copy=stage > 0)


def _blocks_between(profile: Profile, start: Num, end: Num) -> dict[str, Num]:
    """How many blocks of each kind lie there."""
    found: dict[str, Num] = {}
    at = 0
    for layer in profile.block_layers:
        within = np.minimum(end, at + layer.repeat) - np.maximum(start, at)
        found[layer.name] = np.maximum(within, 0)
        at += layer.repeat
    return found


def _handed_on(work: Work, block: Num) -> Num:
    """Elements that enter block number `block`."""
    b, s = work.size("microbatch"), work.size("sequence")
    at, total = 0, (block == 0) * work.profile.layers[0].boundary(b, s)
    for layer in work.profile.block_layers:
        total = total + ((block > at) & (block <= at + layer.repeat)) * layer.boundary(b, s)
        at += layer.repeat
    return total
