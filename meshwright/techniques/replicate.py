"""Synchronous data parallelism: every replica has the whole model and a share of the samples.

What: ranks along `dp` run different samples and sum their gradients, one bucket per layer, each on its way while the
backward of earlier layers goes on. With shares, replicas on faster devices run more microbatches than others; a step is
the slowest one's. With an `algorithm` the sums are made of sends between ranks, when backward is over: ring, tree
(binomial), doubling (recursive), scatter_gather (recursive halving, then doubling: Rabenseifner), or hierarchical (a
tree inside each `node_size` ranks, a ring between their first ones). `mw plan --why replicate.algorithm` says what the
largest sum takes by each on a cluster; search leaves it at auto.
When it helps: the model and its optimizer fit on a device, and the batch is large enough to share.
When it does not: memory is the limit (nothing shrinks), or the batch is smaller than the replicas. On links that the
compute cores themselves drive (gloo), overlap gains little.
Cost: an all_reduce of every gradient per step, 2 (n-1)/n of its bytes over each link; exposed beyond the backward pass
it hides behind (Li et al. 2020, "PyTorch Distributed"). With an `algorithm` nothing is hidden: latency and bytes of
each round over the slowest link in it (`core/all_reduce.py`; measured in docs/collectives.md).
Exactness: reordered: the order of the sum over samples changes. Axis: dp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.core.all_reduce import AllReduce
from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Option, Technique, axis_sizes
from meshwright.core.work import Circumstances, Collective, Num, ParameterSlot, Work, statistics


@dataclass(frozen=True, kw_only=True)
class Replicate(Technique):
    name: ClassVar[str] = "replicate"
    phase: ClassVar[str] = "optimizer"
    axis: ClassVar[str] = "dp"
    closeness: ClassVar[int] = 1
    splits_samples: ClassVar[bool] = True
    takes_shares: ClassVar[bool] = True
    sums_layers: ClassVar[bool] = True
    later_settings: ClassVar[tuple[str, ...]] = ("algorithm", "node_size")

    size: int
    """Replicas."""
    shares: tuple[int, ...] = ()
    """Microbatches of each replica in a step; empty: equally many."""
    algorithm: Literal["auto", "ring", "tree", "doubling", "scatter_gather", "hierarchical"] = "auto"
    """How gradients are summed; auto: by the backend's own all_reduce, beside backward."""
    node_size: int = 0
    """Replicas in a row that `hierarchical` sums before others."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Axis("size", axis_sizes(cluster)),)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile), *(self._share_problems(plan, profile) if self.shares else ())]
        if self.algorithm == "hierarchical" and not 1 <= self.node_size <= self.size:
            what = f"node_size is {self.node_size}, of {self.size} replicas."
            problems.append(self.problem(what, f"Use 1 to {self.size}: replicas in one node."))
        elif self.algorithm != "hierarchical" and self.node_size:
            problems.append(self.problem(f"node_size says nothing to {self.algorithm}.", "Leave it out."))
        for other in plan.techniques if self.algorithm != "auto" and self.size > 1 else ():
            owns = other.makes_whole_gradients and other.splits_samples and plan.mesh.get(other.axis, 1) > 1
            if owns or other.codes_sums or other.hosts_states:
                what = f"{other.name} takes or sums gradients layer by layer, not when {self.algorithm} has summed all."
                problems.append(self.problem(what, f"Use algorithm = auto, or leave out {other.name}."))
        return tuple(problems)

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        if self.algorithm != "auto":
            what = f"{self.algorithm} sums gradients when a step's backward is over, and steps that overlap go on."
            yield (given.size > 1) & given.overlaps_steps, self.problem(what, "Use algorithm = auto.")

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
        algorithm = self._all_reduce(work.facts.widths.reduce)
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
                hidden=algorithm is None and not work.facts.joins_gradients,
                algorithm=algorithm,
            )
            for layer, repeat, size in sums
        ]
        work = work.with_facts(keeps_gradients=(work.size(self.axis) > 1) * 1)  # in buckets
        return work.with_tasks(*reductions, *statistics(work, self.axis, self.name))

    def _all_reduce(self, element_bytes: int = 4) -> AllReduce | None:
        if self.algorithm == "auto":
            return None
        return AllReduce(algorithm=self.algorithm, node_size=self.node_size, element_bytes=element_bytes)

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
        algorithm = self._all_reduce()
        build.add_exchange(self, Buckets(build.units(), group, build.zero_filled, build.host_units, algorithm))
