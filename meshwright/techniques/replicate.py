"""Synchronous data parallelism: every replica has the whole model and a share of the samples.

What: ranks along `dp` run different samples and sum their gradients, one bucket per layer, each on its way while the
backward of earlier layers goes on. With shares, replicas on faster devices run more microbatches than others; a step is
the slowest one's.
When it helps: the model and its optimizer fit on a device, and the batch is large enough to share.
When it does not: memory is the limit (nothing shrinks), or the batch is smaller than the replicas. On links that the
compute cores themselves drive (gloo), overlap gains little.
Cost: an all_reduce of every gradient per step, 2 (n-1)/n of its bytes over each link; exposed beyond the backward pass
it hides behind (Li et al. 2020, "PyTorch Distributed").
Exactness: reordered: the order of the sum over samples changes. Axis: dp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Option, Technique, axis_sizes
from meshwright.core.work import Collective, Num, ParameterSlot, Work, statistics


@dataclass(frozen=True, kw_only=True)
class Replicate(Technique):
    name: ClassVar[str] = "replicate"
    phase: ClassVar[str] = "optimizer"
    axis: ClassVar[str] = "dp"
    closeness: ClassVar[int] = 1
    splits_samples: ClassVar[bool] = True
    takes_shares: ClassVar[bool] = True
    sums_layers: ClassVar[bool] = True

    size: int
    """Replicas."""
    shares: tuple[int, ...] = ()
    """Microbatches of each replica in a step; empty: equally many."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Axis("size", axis_sizes(cluster)),)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        return tuple(self._share_problems(plan, profile)) if self.shares else ()

    def _share_problems(self, plan: Plan, profile: Profile) -> Iterator[Problem]:
        if len(self.shares) != self.size or min(self.shares) < 1:
            what = f"shares {self.shares} must be at least 1 for each of {self.size} replicas."
            yield self.problem(what, f"List {self.size}.")
            return
        within = plan.num_replicas // self.size
        total = sum(self.shares)
        if total * within * plan.microbatch != plan.batch:
            ranks = f" on each of {within} ranks" if within > 1 else ""
            what = (
                f"shares add up to {total} microbatches of {plan.microbatch}{ranks}, "
                f"{total * within * plan.microbatch} samples; the batch has {plan.batch}."
            )
            wanted, rest = divmod(plan.batch, within * plan.microbatch)
            yield self.problem(what, "Use a smaller microbatch." if rest else f"Let them add up to {wanted}.")
        if plan.sample_axes[0] != self.axis:
            what = f"with shares {self.axis} comes first of the axes that share samples out, not {plan.sample_axes[0]}."
            yield self.problem(what, f'Use axis_order = ["{self.axis}", ...].')
        if len(set(self.shares)) == 1:
            return
        if any(site.kind == "statistics" for layer in profile.layers for site in layer.sites):
            what = f"batch norms of {profile.name} talk over {self.axis} in every microbatch, so all need equally many."
            yield self.problem(what, "Leave shares out.")
        if plan.overlaps_steps:
            yield self.problem("steps that overlap need equally many microbatches everywhere.", "Leave shares out.")

    def price(self, work: Work) -> Work:
        def gradient_bytes(slot: ParameterSlot) -> Num:
            # Where gradients are shared out first, in whatever dtype those sums are made.
            return slot.stored(slot.gradient_shards) * work.facts.widths.reduce

        coding, work = work.facts.coding, work.with_facts(coding=None)
        sums = work.units(gradient_bytes, trained=True) if coding is None else []
        if coding is not None:
            reduce = work.facts.widths.reduce
            work = coding.priced(work, self.axis, lambda slot: slot.gradient_shards, lambda slot: reduce, 1, self.name)
        reductions = [
            Collective(
                layer=layer,
                kind="all_reduce",
                axis=self.axis,
                phase="backward",
                repeat=work.facts.rests.trained(layer, repeat),
                bytes=size,
                origin=self.name,
                per_step=True,
                hidden=not work.facts.joins_gradients,
            )
            for layer, repeat, size in sums
        ]
        work = work.with_facts(keeps_gradients=(work.size(self.axis) > 1) * 1)  # in buckets
        return work.with_tasks(*reductions, *statistics(work, self.axis, self.name))

    def apply(self, build: Build) -> None:
        build.at("split", lambda build: build.model.share_statistics(build.mesh.group(self.axis), self.size))
        coding, build.coding = build.coding, None
        build.at("optimizer", lambda build: self._install(build, coding))

    def _install(self, build: Build, coding: Any) -> None:
        if self.axis in build.exchange_owners:  # by shards that are summed over replicas
            return
        from meshwright.ops.gradient_exchange import Buckets, CodedBuckets

        mesh = build.mesh
        group = mesh.group(self.axis)
        if any(site.kind == "statistics" for layer in build.profile.layers for site in layer.sites):
            # Batch norms use the axis in the middle of a backward, where a bucket of another rank may not be ready.
            group = mesh.new_group(self.axis, mesh.along(self.axis))
        if coding is not None:
            build.add_exchange(self, CodedBuckets(build, coding, self.axis))
            return
        build.add_exchange(self, Buckets(build.units(), group, build.zero_filled, build.host_units))
