"""Weights of blocks live in host memory and pass through a few buffers of the device.

What: blocks whose optimizer states are in host memory have no lasting weights on the device. `buffers` of them are
there at once: while one block runs, the next ones are copied in, forward and again backward, on a stream of their own.
What a pass leaves in the buffers serves the one after it, but in a pipeline and after an update.
When it helps: weights are the peak, or what is left of it once states are in host memory. With recomputed blocks the
device holds a few blocks and the inputs of the others, whatever the depth.
When it does not: weights fit; or a microbatch has so few tokens that a block runs for a shorter time than its weights
are copied (some 8,000 tokens of a dense decoder, by the rates of an H200).
Cost: weights are copied twice for each microbatch, in the dtype of compute on one device and of the masters on several
(Pudipeddi et al. 2020; Rajbhandari et al. 2021, ZeRO-Infinity).
Exactness: exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import Circumstances, Copy, Num, Resident, Task, Work, replace

NARROW_BYTES = 4
"""Of a parameter's weight and gradient in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class StreamWeights(Technique):
    name: ClassVar[str] = "stream_weights"
    phase: ClassVar[str] = "step"
    exactness: ClassVar[Exactness] = "exact"
    uses_tiers: ClassVar[bool] = True

    buffers: int = 2
    """Blocks whose weights are on the device at once."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        is_known = cluster.device.kind == "cuda" and cluster.num_nodes == 1 and cluster.tiers["host"].bytes
        if not is_known or not profile.num_blocks:
            return ()
        usable = cluster.device.memory_bytes - cluster.device.reserved_bytes
        is_large = NARROW_BYTES * profile.num_params / cluster.num_devices > usable / 2
        return (Choice("buffers", (2,)),) if is_large else ()

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "this schedule makes weights' gradients when their block is no longer on the device."
        yield given.splits_backward, self.problem(what, "Use another schedule, or leave the technique out.")
        what = "one graph runs all compiled layers, or graphs hold the addresses of their weights."
        fix = 'Use scope = "block" and graphs = false for compiled layers, or leave the technique out.'
        yield given.joins_gradients, self.problem(what, fix)
        what = "blocks run again that are not on the device."
        yield given.replays_blocks, self.problem(what, "Use slots = 0 for recomputed blocks.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = list(self.refused(plan, profile))
        if not profile.num_blocks:
            problems.append(self.problem(f"{profile.name} has no blocks whose weights could pass through the device."))
        if self.buffers < 2:
            what = f"buffers is {self.buffers}: one for the block that runs, and one for the next."
            problems.append(self.problem(what, "Use 2 or more."))
        if not any(other.hosts_states for other in plan.techniques):
            what = "weights are updated where their optimizer states are, and those are on the device."
            problems.append(self.problem(what, "Put the states of the layers into host memory too, or leave it out."))
        for other in plan.techniques:
            if other.makes_whole_gradients and plan.mesh[other.axis] > 1:
                what = f"{other.name} gathers weights into memory of its own."
                fix = f"Leave out {other.name}, or this technique; replicas of a host can share one copy (host_ranks)."
                problems.append(self.problem(what, fix))
        if cluster is not None and not cluster.tiers["host"].bytes:
            what = f"nothing is known of the hosts of {cluster.name}."
            problems.append(self.problem(what, "Measure them: mw probe."))
        return tuple(problems)

    def price(self, work: Work) -> Work:
        blocks = [layer.name for layer in work.profile.block_layers]
        counts: dict[str, Num] = {}
        sizes: dict[str, Num] = {}
        sharded: Num = False
        for slot in work.slots:
            if slot.layer in blocks and not (slot.frozen or slot.copy_of):
                counts[slot.layer] = np.rint(slot.repeat * slot.host_share)
                sizes[slot.layer] = sizes.get(slot.layer, 0) + slot.elements * slot.working_bytes
                sharded = sharded | (slot.shards > 1)
        total: Num = sum(counts.values())
        work = self.forbid(work).forbid(sharded | (total == 0))
        # One pass leaves so many blocks for the next, which begins where it has ended; after an update they are old.
        stays = (work.size("num_stages") == 1) * np.minimum(self.buffers, total)
        first, last = _dealt(counts, stays), _dealt(dict(reversed(counts.items())), stays)
        tasks: list[Task] = []
        largest: Num = 0
        for layer, count in counts.items():
            copy: dict[str, Any] = {"layer": layer, "source": "host", "target": "device", "origin": self.name}
            copy |= {"bytes": sizes[layer], "hidden": True}
            tasks.append(Copy(**copy, phase="forward", repeat=first[layer], per_step=True))
            tasks.append(Copy(**copy, phase="forward", repeat=count - first[layer]))
            tasks.append(Copy(**copy, phase="backward", repeat=count - last[layer]))
            largest = np.maximum(largest, sizes[layer] * (count > 0))
        size = np.minimum(self.buffers, total) * largest
        ring = Resident(layer=blocks[0], category="buffers", repeat=1, bytes=size, life="always", origin=self.name)

        def is_return(task: Task) -> bool:
            """A copy of new weights to where they would stay."""
            return isinstance(task, Copy) and task.target == "device" and task.per_step and task.layer in counts

        others = tuple(task for task in work.tasks if not is_return(task))
        work = work.map_slots(lambda slot: replace(slot, is_streamed=slot.layer in counts))
        return replace(work, tasks=(*others, *tasks)).with_residents(ring)

    def apply(self, build: Build) -> None:
        build.streams_blocks = True
        build.at("step", self._install)

    def _install(self, build: Build) -> None:
        from meshwright.ops.host_memory import CopyLanes
        from meshwright.ops.weight_ring import WeightRing

        units = {unit.module: unit for unit in build.host_units if unit.is_streamed}
        blocks = iter(build.model.block_modules())
        runs = [[next(blocks) for _ in range(first, last)] for first, last in build.spans]
        streamed = [[units[block] for block in run if block in units] for run in runs]
        if units:
            WeightRing(streamed, self.buffers, CopyLanes(build.mesh.device), keeps=build.num_stages == 1)


def _dealt(counts: Mapping[str, Num], total: Num) -> dict[str, Num]:
    """Distribute `total` blocks over the layers, in order."""
    result = {}
    for layer, count in counts.items():
        result[layer] = np.minimum(count, total)
        total = total - result[layer]
    return result
