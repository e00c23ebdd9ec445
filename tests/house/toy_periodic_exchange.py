"""Local SGD as a plugin: replicas update alone and average their parameters every few steps (Stich 2019).

`MESHWRIGHT_PLUGINS=toy_periodic_exchange` makes it a technique like any other: no line of the package knows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from meshwright.core.build import Build, Exchange
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Exactness, Option, Technique, axis_sizes
from meshwright.core.work import Collective, Num, ParameterSlot, Work

if TYPE_CHECKING:
    import torch.distributed as dist


class ParameterAverage(Exchange):
    """The mean of the replicas' parameters, after every `every`-th update."""

    def __init__(self, build: Build, group: dist.ProcessGroup, every: int):
        self.build, self.group, self.every = build, group, every

    def after_update(self, count: int) -> None:
        import torch
        import torch.distributed as dist

        if count % self.every:
            return
        values = [value.data for _, value in self.build.named_parameters() if value.requires_grad]
        flat = torch.cat([value.flatten() for value in values])
        dist.all_reduce(flat, group=self.group)
        flat /= self.group.size()
        for value, part in zip(values, flat.split([value.numel() for value in values]), strict=True):
            value.copy_(part.view_as(value))


@dataclass(frozen=True, kw_only=True)
class ToyAverage(Technique):
    name: ClassVar[str] = "toy_average"
    phase: ClassVar[str] = "optimizer"
    exactness: ClassVar[Exactness] = "approximate"
    axis: ClassVar[str] = "toy"
    keeps_islands: ClassVar[bool] = True
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True  # nobody else sums over its axis

    size: int
    """Replicas."""
    every: int = 4
    """Updates between two averages."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Axis("size", axis_sizes(cluster)),)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if self.every < 1:
            return (self.problem(f"every is {self.every}.", "Use 1 or more."),)
        if plan.overlaps_steps:
            return (self.problem("parameters of two versions cannot be averaged.", "Use another schedule."),)
        return ()

    def price(self, work: Work) -> Work:
        def stored_bytes(slot: ParameterSlot) -> Num:
            return slot.stored(slot.shards) * slot.element_bytes

        size = sum(repeat * each for _, repeat, each in work.units(stored_bytes, trained=True))
        message = Collective(
            layer="",
            kind="all_reduce",
            axis=self.axis,
            phase="step",
            repeat=1 / self.every,
            bytes=size,
            origin=self.name,
            per_step=True,
        )
        return work.with_tasks(message)

    def apply(self, build: Build) -> None:
        build.at("optimizer", self._install)

    def _install(self, build: Build) -> None:
        build.loss_scale *= self.size  # a replica's gradient is that of its own mean loss
        build.add_exchange(self, ParameterAverage(build, build.mesh.group(self.axis), self.every))
