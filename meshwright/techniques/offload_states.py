"""Optimizer states, gradients and master weights of some layers in host memory or on disk, updated by host cores.

What: of the last `share` of a stage's layers the device keeps only the weights it computes with; under `precision`
those of blocks are in the compute dtype, a copy of the float32 masters. Gradients leave the device as backward makes
them, a thread updates masters and states on the host, and the new weights return before the layer's next forward. With
`ahead` a layer is updated as soon as its gradients are there, while backward goes on; in a step whose gradients are
clipped, the old values are restored and the update is made again. Otherwise updates begin when the norm is known, in
the order of the next forward. With `host_ranks`, replicas on one host have one copy there: each takes in, updates and
remembers its rows of every parameter. Replicas with one microbatch a step sum a layer's gradients and send them out
while backward goes on; with more, gradients stay on the device until the step. Of the last `disk_share` layers masters
and states lie in a file: while a layer is updated, those after it are read and the one before it is written.
When it helps: states are the peak, and steps are long enough for the copies and the update.
When it does not: whatever fits without; few tokens in a step.
Cost: each gradient goes out and each weight comes in once a step (gradients: once a microbatch); host memory for
masters, states and what passes through, with `ahead` twice for masters and states (Ren et al. 2021, ZeRO-Offload;
SuperOffload 2025). On disk, 12 bytes of a parameter are read and written in each step, 8 where the weight itself is of
32 bits (Rajbhandari et al. 2021, ZeRO-Infinity).
Exactness: exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique, technique_named, technique_names
from meshwright.core.units import pretty_bytes
from meshwright.core.work import (
    Circumstances,
    Compute,
    Copy,
    HostUpdate,
    Num,
    ParameterSlot,
    Resident,
    Task,
    Updating,
    Work,
    replace,
)

if TYPE_CHECKING:
    from meshwright.ops.host_memory import HostUnit

STATE_BYTES = 16
"""Of a parameter: itself, its gradient, two moments."""
DISK_BUFFERS = 3
"""Layers of those on disk that are in host memory at once: one is read, one updated, one written."""
LAUNCHES = 5.0
"""Ops of the host for each gradient that leaves: norm, events, copy."""


@dataclass(frozen=True, kw_only=True)
class OffloadStates(Technique):
    name: ClassVar[str] = "offload_states"
    phase: ClassVar[str] = "step"
    exactness: ClassVar[Exactness] = "exact"
    uses_tiers: ClassVar[bool] = True
    later_settings: ClassVar[tuple[str, ...]] = ("host_ranks", "disk_share")

    share: float = 1.0
    """Of each stage's layers, from the end."""
    ahead: bool = False
    """Update before the norm of all gradients is known."""
    host_ranks: int = 1
    """Ranks of a host: the replicas among them share one copy."""
    disk_share: float = 0.0
    """Of each stage's layers, from the end: those whose masters and states are on disk."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        """Only where all states on the devices would be more than half of their memory, and hosts are known; on disk
        only where they would be more than half of a host's."""
        each = STATE_BYTES * profile.num_params / cluster.num_devices
        is_known = cluster.host.memory_bytes and cluster.host.updates_per_second
        if cluster.device.kind != "cuda" or not is_known or each < cluster.device.memory_bytes / 2:
            return ()
        shared = Choice("host_ranks", (cluster.devices_per_node,))
        offered = (Choice("share", (1.0, 0.75, 0.5, 0.25)), Choice("ahead", (False, True)), shared)
        disk, is_small = cluster.tiers["disk"], each * cluster.devices_per_node > cluster.host.memory_bytes / 2
        if not (is_small and disk.bytes and disk.in_bytes_per_second and disk.out_bytes_per_second):
            return offered
        return (*offered, Choice("disk_share", (0.0,), rescues=(1.0, 0.5), moves_base=True))

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.is_elementwise:
            return ()
        what = "this optimizer looks at whole parameters of all ranks at once."
        return (Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out."),)

    @property
    def takes_gradients(self) -> bool:
        return True

    @property
    def hosts_states(self) -> bool:
        return True

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "steps that overlap need weights of two versions."
        yield given.overlaps_steps, self.problem(what, "Use another schedule, or leave the technique out.")
        what = "the gradients of all compiled layers exist at once, in memory that the next step writes."
        fix = 'Use scope = "block" and graphs = false for compiled layers, or leave the technique out.'
        yield given.joins_gradients, self.problem(what, fix)
        what = "a step in which a gradient of fp16 overflows must be skipped as a whole."
        yield given.scales_loss, self.problem(what, "Use another dtype than fp16, or leave the technique out.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = list(self.refused(plan, profile))
        if not 0 < self.share <= 1:
            problems.append(self.problem(f"share is {self.share}.", "Use more than 0 and at most 1."))
        problems += self._sharing_problems(plan, cluster)
        if not 0 <= self.disk_share <= self.share:
            what = f"disk_share is {self.disk_share}, and share {self.share}."
            problems.append(self.problem(what, "Use 0 or more, and at most share."))
        if self.disk_share and self.ahead:
            what = "what is updated before the norm is known may have to be restored, and the disk has one set of it."
            problems.append(self.problem(what, "Use ahead = false, or disk_share = 0."))
        if cluster is not None:
            problems += self._host_problems(plan, profile, cluster)
        for other in plan.techniques:
            if other is not self and (other.updates_each_alone or other.takes_gradients or other.copies_weights):
                what = f"{other.name} updates parameters by itself, on the device."
                problems.append(self.problem(what, f"Leave out {other.name}, or this technique."))
        return tuple(problems)

    def _sharing_problems(self, plan: Plan, cluster: Cluster | None) -> Iterator[Problem]:
        if self.host_ranks < 1:
            yield self.problem(f"host_ranks is {self.host_ranks}.", "Use the ranks of a host, or 1 for a copy each.")
            return
        axis, ways = self._sharing(lambda axis: plan.mesh.get(axis, 1))
        if ways == 1:
            return
        inside = list(plan.mesh.values())[list(plan.mesh).index(axis) + 1 :]
        if self.host_ranks % (math.prod(inside) * ways):
            what = f"{ways} ranks along {axis} are not {self.host_ranks} ranks in a row, or a part of them."
            yield self.problem(what, "Leave axis_order out, or use host_ranks = 1.")
        if cluster is not None and cluster.devices_per_node % self.host_ranks:
            what = f"host_ranks is {self.host_ranks}; a node of {cluster.name} has {cluster.devices_per_node} devices."
            yield self.problem(what, "Use as many, or a divisor of them.")
        if self.disk_share:
            yield self.problem("each rank has a file of its own.", "Use host_ranks = 1, or disk_share = 0.")
        for other in plan.techniques:
            if other.codes_states:
                what = f"{other.name} keeps states that cannot be shared by rows."
                yield self.problem(what, f"Use host_ranks = 1, or leave out {other.name}.")

    def _sharing(self, size: Callable[[str], Num]) -> tuple[str, Num]:
        """The axis of replicas, and how many of them have one copy: a divisor of all that lies on one host."""
        kinds = [kind for name in technique_names() if (kind := technique_named(name)).axis]
        for owner in (kind for kind in kinds if kind.sums_layers):
            inside: Num = 1
            for kind in kinds:
                inside = inside * (size(kind.axis) if kind.closeness > owner.closeness else 1)
            here = np.where(self.host_ranks % inside == 0, self.host_ranks // inside, 1)
            ways = np.gcd(size(owner.axis), here)
            return owner.axis, int(ways) if ways.ndim == 0 else ways
        return "", 1

    def _host_problems(self, plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[Problem]:
        host = cluster.tiers["host"]
        if not (host.bytes and host.in_bytes_per_second and cluster.host.updates_per_second):
            what = f"memory, copies or updates of the hosts of {cluster.name} are not known."
            yield self.problem(what, "Measure them: mw probe.")
            return
        disk = cluster.tiers["disk"]
        if self.disk_share and not (disk.bytes and disk.in_bytes_per_second and disk.out_bytes_per_second):
            what = f"space or rates of the disks of {cluster.name} are not known."
            yield self.problem(what, "Measure them: mw probe.")
        # At least masters and gradients of 16 bits; what an optimizer remembers, a forecast knows.
        width = self.share * 2 + (self.share - self.disk_share) * 4 * (1 + self.ahead)
        least = int(profile.num_params * width) // max(plan.num_ranks, 1)
        if least > host.bytes_each:
            missing = pretty_bytes(least - host.bytes_each)
            what = f"a device's part of the host's memory is {pretty_bytes(host.bytes_each)}, {missing} too little for "
            what += "masters and gradients alone."
            yield self.problem(what, "Use a smaller share, a larger disk_share, ahead = false, or more devices.")

    def price(self, work: Work) -> Work:
        has_copies = any(slot.copy_bytes for slot in work.slots)
        work = self.forbid(work).forbid(work.facts.frees_gradients | has_copies)
        ranks = work.size("num_ranks")
        sharded = _num_ranks(work, lambda kind: kind.makes_whole_gradients)
        replicas = _num_ranks(work, lambda kind: kind.sums_layers)
        _, ways = self._sharing(work.size)
        cannot_share = work.facts.codes_states | (self.disk_share > 0)
        work = work.forbid((ways > 1) & cannot_share)
        is_alone: Num = (ranks == 1) * 1
        is_once = (work.size("num_microbatches") == 1) * 1
        is_early: Num = is_alone | (is_once & ((ranks == sharded) | (ranks == replicas)))
        widths = work.facts.widths
        counts, disk_counts = (self._counts(work, share) for share in (self.share, self.disk_share))
        blocks = {layer.name for layer in work.profile.block_layers}
        narrowed = blocks if widths.compute < widths.state and self._narrows(work.profile) else set()
        shares: dict[str, Num] = {}
        slots, tasks, residents = list[ParameterSlot](), list[Task](), list[Resident]()
        disk_bytes: dict[str, Num] = {}
        for slot in work.slots:
            if slot.frozen or slot.copy_of:
                slots.append(slot)
                continue
            count = np.minimum(counts[slot.unit], slot.repeat)
            share = shares[slot.layer] = count / np.maximum(slot.repeat, 1)
            wide = slot.element_bytes
            width = wide + (widths.compute - wide) * is_alone if slot.layer in narrowed else wide
            disk_count = np.minimum(disk_counts[slot.unit], slot.repeat)
            disk_share = disk_count / np.maximum(slot.repeat, 1)
            tiers: Any = (("device", 1 - share), ("host", share / ways - disk_share))
            tiers += (("disk", disk_share),) if self.disk_share else ()
            is_taken = share * is_early  # other gradients stay until the step
            slots.append(replace(slot, host_share=share, working_bytes=width, taken_share=is_taken, state_tiers=tiers))
            residents += self._residents(work, slots[-1], count, disk_count, is_early, ways)
            tasks += self._tasks(slots[-1], count, is_early, (sharded == 1) * 1, ways)
            if self.disk_share:
                size = self._master_bytes(slots[-1]) + work.optimizer.state_bytes_of(slots[-1])
                disk_bytes[slot.unit] = disk_bytes.get(slot.unit, 0) + size * (disk_count > 0)
                tasks += self._disk_copies(slot.layer, disk_count, size, (sharded == 1) * 1)
        if self.disk_share:
            size = np.minimum(DISK_BUFFERS, sum(disk_counts.values())) * reduce(np.maximum, disk_bytes.values(), 0)
            common: dict[str, Any] = {"layer": work.profile.layers[0].name, "origin": self.name, "repeat": 1}
            residents.append(Resident(**common, category="buffers", life="always", tier="host", bytes=size))

        def task(item: Any) -> Any:
            """Weights that are narrow already are not cast."""
            if getattr(item, "role", "") != "weight_cast" or item.layer not in narrowed:
                return item
            left = 1 - shares.get(item.layer, 0) * is_alone
            return replace(item, moved_bytes=item.moved_bytes * left, kernels=item.kernels * left)

        def resident(item: Resident) -> Resident:
            is_cast = item.category == "gathered" and item.life == "microbatch" and item.layer in narrowed
            left = 1 - shares.get(item.layer, 0) * is_alone
            return replace(item, bytes=item.bytes * left) if is_cast else item

        work = replace(work.map_tasks(task).map_residents(resident), slots=tuple(slots))
        return work.with_tasks(*tasks).with_residents(*residents)

    def _counts(self, work: Work, share: float) -> dict[str, Num]:
        """Unit -> its instances in a share: of all units here the last ones, blocks first."""
        repeats: dict[str, Num] = {}
        trained = [slot for slot in work.slots if not (slot.frozen or slot.copy_of)]
        for slot in sorted(trained, key=lambda slot: slot.is_block):
            repeats[slot.unit] = np.maximum(repeats.get(slot.unit, 0), slot.repeat)
        left = num_units(share, sum(repeats.values()))
        counts = {}
        for unit in reversed(repeats):
            counts[unit] = np.minimum(repeats[unit], left)
            left = left - counts[unit]
        return counts

    def _master_bytes(self, slot: ParameterSlot) -> Num:
        """Of a layer whose masters are apart from what the device is sent."""
        return slot.stored(slot.shards) * slot.element_bytes * (slot.working_bytes < slot.element_bytes)

    def _residents(
        self, work: Work, slot: ParameterSlot, count: Num, disk_count: Num, is_early: Num, ways: Num
    ) -> list[Resident]:
        stored, wide, width = slot.stored(slot.shards), slot.element_bytes, slot.working_bytes
        common: dict[str, Any] = {"layer": slot.layer, "origin": self.name, "repeat": count}
        lasting: dict[str, Any] = common | {"category": "buffers", "life": "always"}
        # Masters, their working copy, gradients as they come (in the memory of the copy, unless they are added or used
        # twice) and their sums; what an early update changes, as it was.
        is_added = is_early * (work.size("num_microbatches") > 1)
        held = stored * (wide + width * (width < wide) * (is_added | self.ahead) + width)
        held = held + stored * wide * is_added
        held = held + (stored * wide + work.optimizer.state_bytes_of(slot)) * self.ahead
        is_tied = any(each.copy_of == f"{slot.layer}.{slot.name}" for each in work.slots)
        size = slot.stored(slot.gradient_shards) * width * is_early
        size = size * (1 + 2 * (work.facts.keeps_gradients > 0))  # as one message, and the layer's after it under way
        result = [
            Resident(**lasting | {"repeat": count - disk_count}, tier="host", bytes=held / ways),
            Resident(**common, category="working", life="step" if is_tied else "backward", bytes=size),
        ]
        if self.disk_share:
            lasting, masters = lasting | {"repeat": disk_count}, self._master_bytes(slot)
            result.append(Resident(**lasting, tier="host", bytes=held - masters))
            result.append(Resident(**lasting, tier="disk", bytes=masters))
        return result

    def _disk_copies(self, layer: str, count: Num, size: Num, is_alone: Num) -> list[Task]:
        """When the host updates: beside the next forward, or after backward."""
        common: dict[str, Any] = {"layer": layer, "origin": self.name, "bytes": size, "per_step": True, "hidden": True}
        parts: Any = (("forward", count * is_alone), ("step", count * (1 - is_alone)))
        ways: Any = (("disk", "host"), ("host", "disk"))
        return [
            Copy(**common, source=source, target=target, phase=phase, repeat=repeat)
            for phase, repeat in parts
            for source, target in ways
        ]

    def _tasks(self, slot: ParameterSlot, count: Num, is_early: Num, is_whole: Num, ways: Num) -> list[Task]:
        """Gradients leave during backward, weights return during forward; what cannot be so, after the step's backward
        or before the next forward, hides behind nothing."""
        common: dict[str, Any] = {"layer": slot.layer, "origin": self.name}
        size = slot.stored(slot.shards) * slot.working_bytes
        out: dict[str, Any] = common | {"source": "device", "target": "host", "bytes": size / ways}
        back: dict[str, Any] = common | {"source": "host", "target": "device", "bytes": size, "per_step": True}
        update: dict[str, Any] = common | {"elements": slot.stored(slot.shards) / ways}
        is_ahead = is_early * self.ahead
        in_forward = is_whole * (1 - is_ahead)
        launches = Compute(
            **common, name="offload", kind="memory", phase="backward", repeat=count * is_early, kernels=LAUNCHES
        )
        return [
            launches,
            Copy(**out, phase="backward", hidden=True, repeat=count * is_early),
            Copy(**out, phase="step", per_step=True, repeat=count * (1 - is_early)),
            Copy(**back, phase="forward", hidden=True, repeat=count * is_whole),
            Copy(**back, phase="step", repeat=count * (1 - is_whole)),
            HostUpdate(**update, phase="backward", hidden=True, repeat=count * is_ahead),
            HostUpdate(**update, phase="forward", hidden=True, repeat=count * in_forward),
            HostUpdate(**update, phase="step", repeat=count * (1 - is_ahead) * (1 - in_forward)),
        ]

    def apply(self, build: Build) -> None:
        units: list[HostUnit] = []
        axes = [other for other in build.plan.techniques if build.plan.mesh.get(other.axis, 1) > 1]
        is_sharded = any(other.makes_whole_gradients for other in axes)
        is_summed = bool(axes) and all(other.sums_layers for other in axes)
        is_whole = is_summed or all(other.makes_whole_gradients for other in axes)
        is_early = is_whole and (not axes or build.plan.num_microbatches == 1)
        # Sharded layers are made by whoever shards them.
        make = partial(self._units, not axes, is_early and is_summed)
        build.at("step" if is_sharded else "wrap", lambda build: units.extend(make(build)))
        build.at("step", lambda build: self._install(build, units, is_early))

    def _units(self, is_alone: bool, leaves_summed: bool, build: Build) -> Iterator[HostUnit]:
        from meshwright.ops.disk_memory import DiskFile, LayerOnDisk
        from meshwright.ops.host_memory import HostShare, make_host_unit

        axis, ways = self._sharing(lambda axis: build.plan.mesh.get(axis, 1))
        share = None
        if ways > 1:
            ranks = [line[at : at + ways] for line in build.mesh.along(axis) for at in range(0, len(line), ways)]
            share = HostShare(build.mesh.control_group(ranks))
        units = [unit for unit in build.units() if any(p.requires_grad for p in unit.parameters)]
        chosen = sorted(units, key=lambda unit: unit.is_block)[len(units) - int(num_units(self.share, len(units))) :]
        disk = DiskFile(build.disk, DISK_BUFFERS) if self.disk_share else None
        first_on_disk = len(chosen) - int(num_units(self.disk_share, len(units)))
        for unit in (each for each in units if each in chosen):
            is_narrow = is_alone and unit.is_block and self._narrows(build.profile)
            has_rows = all(each.ndim for each in unit.parameters if each.requires_grad)
            dtype = build.compute_dtype if is_narrow else build.dtype
            made = make_host_unit(build, unit, dtype, share if has_rows else None)
            made.leaves_summed = leaves_summed
            if disk is not None and chosen.index(unit) >= first_on_disk:
                made.on_disk = LayerOnDisk(disk)
                if made.flat_masters is not made.flat_working:
                    made.on_disk.add([made.flat_masters])
                    made.on_disk.watch(made.flat_masters, made.masters)
            yield made

    def _narrows(self, profile: Profile) -> bool:
        """Whether blocks use their weights in the compute dtype only: under autocast norms do not, nor do routers."""
        is_routed = any(op.role == "experts" for layer in profile.layers for op in layer.ops)
        return profile.stream == "compute" and not is_routed

    def _install(self, build: Build, units: list[HostUnit], is_early: bool) -> None:
        from meshwright.optimizers.host_states import HostStatesRule

        build.rule_wraps.append(lambda make: partial(HostStatesRule, units, is_early, self.ahead, make))


def num_units(share: float, total: Num) -> Num:
    """Of so many layers here, those of a share: at least one, if it is not zero."""
    return np.maximum(np.floor(share * total + 0.5), 1 if share else 0)


def _num_ranks(work: Work, chosen: Callable[[type[Technique]], bool]) -> Num:
    """Along the axes of some techniques."""
    ranks: Num = 1
    for kind in map(technique_named, technique_names()):
        ranks = ranks * (work.size(kind.axis) if kind.axis and chosen(kind) else 1)
    return ranks
