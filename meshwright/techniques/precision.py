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

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Option, Technique
from meshwright.core.work import Resident, Work


@dataclass(frozen=True, kw_only=True)
class Precision(Technique):
    name: ClassVar[str] = "precision"
    phase: ClassVar[str] = "swap"
    exactness: ClassVar[Literal["exact", "rounded", "approximate"]] = "rounded"

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
            return replace(item, dtype="bf16", bytes=item.bytes / 2) if item.dtype == "compute" else item

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
        ]
        work = work.map_tasks(task).map_residents(resident).with_residents(*casts)
        facts = {"stream_bytes": 2} if work.profile.stream == "compute" else {}
        return work.with_facts(compute_dtype="bf16", compute_bytes=2, **facts)

    def apply(self, build: Any) -> None:
        build.at("swap", self._swap)

    def _swap(self, build: Any) -> None:
        import torch

        if self.dtype == "bf16":
            build.compute_dtype = torch.bfloat16
            build.model.set_compute_dtype(torch.bfloat16)
