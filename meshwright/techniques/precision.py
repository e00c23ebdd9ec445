"""Compute in fewer bits: activations and matmuls in bf16, parameters and optimizer in fp32.

What: the residual stream and everything computed from it are bf16; weights are cast where they are used, and gathered
as bf16 by `shard`; the loss, gradient sums and the optimizer stay fp32. Models that are not our decoder run under
autocast, which keeps their residual stream in fp32.
When it helps: on tensor cores, where bf16 runs 8 to 16 times the fp32 rate and activations halve.
When it does not: CPUs without bf16 units run it up to 70 times slower.
Cost: 2 bytes an element instead of 4; a bf16 copy of the weights in use (Micikevicius et al. 2018; Kalamkar et al.
2019).
Exactness: rounded: 8 bits of mantissa.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import Compute, Life, Num, ParameterSlot, Phase, Resident, Work, replace


@dataclass(frozen=True, kw_only=True)
class Precision(Technique):
    name: ClassVar[str] = "precision"
    phase: ClassVar[str] = "swap"
    exactness: ClassVar[Exactness] = "rounded"

    dtype: Literal["bf16", "fp32"] = "bf16"

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Choice("dtype", ("bf16",)),) if "bf16" in cluster.device.flops_per_second else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if cluster is not None and self.dtype not in cluster.device.flops_per_second:
            what = f"the devices of {cluster.name} do not compute in {self.dtype}."
            return (self.problem(what, 'Use dtype = "fp32", or plan again with --ban precision.'),)
        return ()

    def price(self, work: Work) -> Work:
        if self.dtype == "fp32":
            return work

        def task(item: Any) -> Any:
            if getattr(item, "dtype", "") != "compute":
                return item
            return replace(item, dtype="bf16", moved_bytes=item.moved_bytes / 2)

        def resident(item: Resident) -> Resident:
            if item.dtype != "compute":
                return item
            life: Life = "moment" if item.category == "logits" and item.life == "forward" else item.life
            return replace(item, dtype="bf16", bytes=item.bytes / 2, life=life)

        # Beside what it keeps, the loss has a copy of the logits in float32, and the logits: going back their gradient.
        copies = [
            replace(item, dtype="float32", origin=self.name)
            for item in work.residents
            if item.category == "logits" and item.life == "forward" and item.dtype == "compute"
        ]
        # Tables are looked up as they are.
        multiplying = {task.layer for task in work.computes if task.kind == "matmul"}
        casts = [
            Resident(
                layer=slot.layer,
                category="gathered",
                repeat=slot.repeat,
                bytes=slot.elements * 2,
                life="microbatch",
                cut="none" if slot.cut is None else "tensor",
                origin=self.name,
                shared_out=slot.shared_out,
            )
            for slot in work.slots
            if slot.layer in multiplying
        ]
        work = work.map_tasks(task).map_residents(resident).with_residents(*casts, *copies)
        work = work.with_tasks(*_casting(work, multiplying))
        stream = 2 if work.profile.stream == "compute" else work.facts.widths.stream
        return work.with_facts(compute_dtype="bf16").with_widths(compute=2, gather=2, stream=stream)

    def apply(self, build: Build) -> None:
        build.at("swap", self._swap)

    def _swap(self, build: Build) -> None:
        import torch

        if self.dtype == "bf16":
            build.compute_dtype = torch.bfloat16
            build.model.set_compute_dtype(torch.bfloat16)


def _casting(work: Work, layers: set[str]) -> list[Compute]:
    """Weights are made 16-bit for each forward and their gradients 32-bit again, then added to those there are."""
    grouped: dict[tuple[str, bool, str], list[ParameterSlot]] = {}
    for slot in work.slots:
        if slot.layer in layers:
            grouped.setdefault((slot.layer, slot.cut is None, slot.shared_out), []).append(slot)
    width = work.facts.widths.state
    added = 3 * width * (work.size("num_microbatches") > 1)
    tasks = []
    for (layer, is_whole, shared_out), slots in grouped.items():
        # A loss in pieces does so for each of them, and replays its forward.
        calls = work.facts.loss_calls if layer == work.profile.layers[-1].name else 0
        trained = [slot for slot in slots if not slot.frozen]
        back = width + 2 + np.maximum(added, 3 * width * (calls > 1))
        phases: list[tuple[Phase, list[ParameterSlot], Num]] = [
            ("forward", slots, width + 2),
            ("backward", trained, back),
        ]
        phases += [("recompute", slots, width + 2)] if calls else []
        for phase, those, each in phases:
            common: dict[str, Any] = {"layer": layer, "kind": "memory", "role": "weight_cast", "phase": phase}
            tasks.append(
                Compute(
                    **common,
                    name="cast",
                    origin=Precision.name,
                    shared_out=shared_out,
                    repeat=slots[0].repeat * max(calls, 1),
                    moved_bytes=sum(slot.elements for slot in those) * each,
                    cut="none" if is_whole else "tensor",
                    kernels=float(len(those)),
                )
            )
    return tasks
