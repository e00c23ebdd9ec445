"""Synchronous data parallelism: every replica has the whole model and a share of the samples.

What: ranks along `dp` run different samples and sum their gradients, one bucket per layer, each on its way while the
backward of earlier layers goes on. With shares, replicas on faster devices run more microbatches than others; a step is
the slowest one's. With an `algorithm` the sums are made of sends between ranks, when backward is over: ring, tree
(binomial), doubling (recursive), scatter_gather (recursive halving, then doubling: Rabenseifner), or hierarchical (a
tree inside each `node_size` ranks, a ring between their first ones). `mw plan --why replicate.algorithm` says what the
largest sum takes by each on a cluster; search leaves it at auto. With `sparse_rows` ranks gather, of an embedding
table, the rows that a step has looked up, with their ids, where that is less than the sum of the whole table: of each
rank as many rows as it has tokens in a step. Tables of our own models; those that are tied to the head, frozen, or cut
by another axis (`tensor`, `rows`) are summed whole. Search tries it where tables are an eighth of the model.
When it helps: the model and its optimizer fit on a device, and the batch is large enough to share.
When it does not: memory is the limit (nothing shrinks), or the batch is smaller than the replicas. On links that the
compute cores themselves drive (gloo), overlap gains little.
Cost: an all_reduce of every gradient per step, 2 (n-1)/n of its bytes over each link; exposed beyond the backward pass
it hides behind (Li et al. 2020, "PyTorch Distributed"). With an `algorithm` nothing is hidden: latency and bytes of
each round over the slowest link in it (`core/all_reduce.py`; measured in docs/collectives.md). With `sparse_rows`, for
n ranks of t tokens each: an all_gather of n t rows and ids of 8 bytes, after backward; so many rows are in memory
beside the table's gradient.
Exactness: reordered: the order of the sum over samples changes. Axis: dp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.core.all_reduce import AllReduce
from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Option, Technique, axis_sizes
from meshwright.core.work import Circumstances, Collective, Compute, Num, ParameterSlot, Resident, Work, statistics

_ID_BYTES = 8
SMALLEST_SHARE = 1 / 8
"""Of all parameters, from which on search tries to gather the rows of tables: it can save no more than that."""


def rows_pay(ids: Num, rows: Num, row_bytes: Num, ways: Num) -> Any:
    """Whether less is sent where each rank gathers the rows of all ranks' `ids` than in a sum of the whole table: over
    a ring, an all_reduce crosses every link twice."""
    return ways * ids * (row_bytes + _ID_BYTES) < 2 * rows * row_bytes


@dataclass(frozen=True, kw_only=True)
class Replicate(Technique):
    name: ClassVar[str] = "replicate"
    phase: ClassVar[str] = "optimizer"
    axis: ClassVar[str] = "dp"
    closeness: ClassVar[int] = 1
    splits_samples: ClassVar[bool] = True
    takes_shares: ClassVar[bool] = True
    sums_layers: ClassVar[bool] = True
    later_settings: ClassVar[tuple[str, ...]] = ("algorithm", "node_size", "sparse_rows")

    size: int
    """Replicas."""
    shares: tuple[int, ...] = ()
    """Microbatches of each replica in a step; empty: equally many."""
    algorithm: Literal["auto", "ring", "tree", "doubling", "scatter_gather", "hierarchical"] = "auto"
    """How gradients are summed; auto: by the backend's own all_reduce, beside backward."""
    node_size: int = 0
    """Replicas in a row that `hierarchical` sums before others."""
    sparse_rows: bool = False
    """Of embedding tables, send only the rows that were looked up, where that is less."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        size = Axis("size", axis_sizes(cluster))
        in_tables = sum(math.prod(param.shape) for param in profile.lookup_tables.values())
        is_much = in_tables >= SMALLEST_SHARE * profile.num_trained_params > 0
        return (size, Choice("sparse_rows", (False, True))) if is_much else (size,)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile), *(self._share_problems(plan, profile) if self.shares else ())]
        if self.algorithm == "hierarchical" and not 1 <= self.node_size <= self.size:
            what = f"node_size is {self.node_size}, of {self.size} replicas."
            problems.append(self.problem(what, f"Use 1 to {self.size}: replicas in one node."))
        elif self.algorithm != "hierarchical" and self.node_size:
            problems.append(self.problem(f"node_size says nothing to {self.algorithm}.", "Leave it out."))
        whole = "Use sparse_rows = false."
        if self.sparse_rows and not profile.lookup_tables:
            what = f"{profile.name} has no trained embedding table that is not tied: sparse_rows has nothing to send."
            problems.append(self.problem(what, whole))
        if self.sparse_rows and self.algorithm != "auto":
            what = f"{self.algorithm} sums whole tables, sparse_rows gathers rows of them."
            problems.append(self.problem(what, whole))
        if self.sparse_rows and len(set(self.shares)) > 1:
            what = "with shares ranks look up differently many rows, and sparse_rows sends as many."
            problems.append(self.problem(what, whole))
        summed, fix = f"{self.algorithm} has summed all", "algorithm = auto"
        if self.algorithm == "auto":
            summed, fix = "rows are gathered", "sparse_rows = false"
        for other in plan.techniques if (self.algorithm != "auto" or self.sparse_rows) and self.size > 1 else ():
            owns = other.makes_whole_gradients and other.splits_samples and plan.mesh.get(other.axis, 1) > 1
            if owns or other.codes_sums or other.hosts_states:
                what = f"{other.name} takes or sums gradients layer by layer, not when {summed}."
                problems.append(self.problem(what, f"Use {fix}, or leave out {other.name}."))
        return tuple(problems)

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        if self.sparse_rows:
            what = "sparse_rows gathers what one step has looked up, and steps that overlap look up rows for two."
            yield (given.size > 1) & given.overlaps_steps, self.problem(what, "Use sparse_rows = false.")
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
        tables, ways = work.profile.lookup_tables if self.sparse_rows else {}, work.size(self.axis)
        ids = math.prod(work.size(name) for name in ("microbatch", "sequence", "num_microbatches"))
        work = self.forbid(work)
        for slot in work.slots if tables else ():  # nor where gradients are shared out or coded: `check` says so
            is_taken = (slot.gradient_shards > 1) | (work.facts.coding is not None)
            work = work.forbid((ways > 1) & is_taken & ((slot.layer, slot.name) in tables))

        def row_bytes(slot: ParameterSlot) -> Num:
            return math.prod(slot.shape[1:]) * work.facts.widths.reduce

        def gathers(slot: ParameterSlot) -> Num:
            """Whether rows of it are gathered: of a whole table, whose gradient nobody has summed."""
            if (slot.layer, slot.name) not in tables:
                return 0
            rows = tables[slot.layer, slot.name].shape[0]
            is_whole = (slot.elements == rows * slot.shape[1]) & (slot.gradient_shards == 1)
            return is_whole * rows_pay(ids, rows, row_bytes(slot), ways)

        def gradient_bytes(slot: ParameterSlot) -> Num:
            # Where gradients are shared out first, in whatever dtype those sums are made.
            return slot.stored(slot.gradient_shards) * work.facts.widths.reduce * (1 - gathers(slot))

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
                repeat=work.facts.rests.trained(layer, repeat) * (size > 0 if tables else 1),
                bytes=size,
                origin=self.name,
                per_step=True,
                hidden=algorithm is None and not work.facts.joins_gradients,
                algorithm=algorithm,
            )
            for layer, repeat, size in sums
        ]
        if tables and coding is None:
            ids_bytes = work.units(lambda slot: gathers(slot) * ways * ids * _ID_BYTES, trained=True)
            rows = work.units(lambda slot: gathers(slot) * ways * ids * row_bytes(slot), trained=True)
            for (layer, repeat, size), (*_, of_rows) in zip(ids_bytes, rows, strict=True):
                work = self.with_rows(work, layer, repeat, size, of_rows)
        work = work.with_facts(keeps_gradients=(work.size(self.axis) > 1) * 1)  # in buckets
        return work.with_tasks(*reductions, *statistics(work, self.axis, self.name))

    def with_rows(self, work: Work, layer: str, repeat: Num, ids_bytes: Num, row_bytes: Num) -> Work:
        """All ranks' rows of a layer's tables, gathered and added up rank by rank."""
        ways = work.size(self.axis)
        here = work.facts.rests.trained(layer, repeat) * ((row_bytes > 0) & (ways > 1))
        common: dict[str, Any] = {"layer": layer, "origin": self.name, "repeat": here}
        message = common | {"kind": "all_gather", "axis": self.axis, "phase": "backward", "per_step": True}
        # A rank's own are read and written, ids sorted; each that comes in is read and added to the table.
        moved = 2 * (ids_bytes + row_bytes) / ways + 3 * row_bytes
        added = {"kind": "memory", "role": "embedding", "name": "rows", "phase": "step", "moved_bytes": moved}
        work = work.with_tasks(
            Collective(**message, bytes=ids_bytes),
            Collective(**message, bytes=row_bytes),
            Compute(**common, **added, kernels=8 + ways),
        )
        held = (ids_bytes + row_bytes) * (1 + 1 / ways)
        return work.with_residents(Resident(**common, category="buffers", bytes=held, life="step"))

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
        from torch import nn

        from meshwright.ops.gradient_exchange import Buckets, CodedBuckets, LookedUp

        mesh = build.mesh
        group = mesh.group(self.axis)
        if any(site.kind == "statistics" for layer in build.profile.layers for site in layer.sites):
            # Batch norms use the axis in the middle of a backward, where a bucket of another rank may not be ready.
            group = mesh.new_group(self.axis, mesh.along(self.axis))
        if coding is not None:
            build.add_exchange(self, CodedBuckets(build, coding, self.axis))
            return
        algorithm, tables = self._all_reduce(), []
        if self.sparse_rows:
            whole = {id(param): param.shape for param in build.profile.lookup_tables.values()}
            found = {name for name, param in build.named_params() if whole.get(id(param)) == build.boxes[name].size}
            weights = {id(parameter) for name, parameter in build.named_parameters() if name in found}
            modules = [module for module in build.model.modules() if isinstance(module, nn.Embedding)]
            pay = lambda ids, rows, row_bytes: bool(rows_pay(ids, rows, row_bytes, self.size))  # noqa: E731
            tables = [LookedUp(module, pay) for module in modules if id(module.weight) in weights]
        settings = build.zero_filled, build.host_units, algorithm, tables
        build.add_exchange(self, Buckets(build.units(), group, *settings))
