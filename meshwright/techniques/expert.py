"""Share out the experts of a mixture: ranks hold different ones and send each other the tokens that chose them.

What: ranks along `ep` see different samples and each hold 1/n of every layer's experts; attention, routers, shared
experts and everything else is replicated, its gradients summed over the axis once a step. Per layer a token's rows go
to the ranks of its experts and come back (all_to_all); nothing is padded, and nothing is dropped but what the model's
own capacity drops on one device too.
When it helps: experts are most of the parameters, and there are many tokens for each: state and gradients of the
experts / n, without the gathers of `shard` or the narrow matmuls of `tensor`.
When it does not: few experts, over slow links (a token travels k times there and back, in both passes, and nothing
hides it), or a router that prefers the experts of one rank: all wait for that one. Priced is the busiest rank, with
`imbalance` times the mean of the rows (a setting of the model, 1 unless told; what its blocks keep is the mean).
Cost: per layer and microbatch 2 all_to_alls of b·s·k·d forward and 2 backward (Lepikhin et al. 2020, GShard; Fedus et
al. 2021, Switch), one of the counts, and once a step an all_reduce of the other gradients. Bytes are the mean over the
ranks, what stays at home included: exact whatever the router does; with a capacity, the most that it lets through.
Exactness: reordered: the order of the sums over samples changes. Axis: ep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Param, Profile, Site
from meshwright.core.technique import Axis, Option, Technique, axis_sizes, listed
from meshwright.core.work import Collective, Compute, Num, ParameterSlot, Resident, Work, replace

_COUNT_BYTES = 8
"""How many rows an expert gets is an int64."""


@dataclass(frozen=True, kw_only=True)
class Expert(Technique):
    name: ClassVar[str] = "expert"
    phase: ClassVar[str] = "split"
    axis: ClassVar[str] = "ep"
    closeness: ClassVar[int] = 3
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True

    size: int
    """Ranks that share the experts out."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        counts = _numbers_of_experts(profile)
        sizes = tuple(size for size in axis_sizes(cluster) if counts and not any(count % size for count in counts))
        return (Axis("size", sizes),) if sizes else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        counts = _numbers_of_experts(profile)
        if not counts:
            what = "this model has no experts that ranks could share out (axis ep)."
            return (self.problem(what, "Use replicate or shard to split samples."),)
        allowed = [size for size in range(1, min(counts) + 1) if not any(count % size for count in counts)]
        return tuple(
            self.problem(f"{count} experts cannot be shared out {self.size} ways (axis ep).", f"Use {listed(allowed)}.")
            for count in counts
            if count % self.size
        )

    def price(self, work: Work) -> Work:
        ways = work.size(self.axis)
        layers = [layer for layer in work.profile.layers if _experts_of(layer)]
        products = {(layer.name, op.name): op for layer in layers for op in layer.ops if op.role == "experts"}
        width = work.facts.widths.compute
        busiest = np.minimum(work.profile.imbalance, ways)

        def slot(item: ParameterSlot) -> ParameterSlot:
            if item.shared_out != "experts":
                return item
            return replace(item, shape=(-(-item.shape[0] // ways), *item.shape[1:]))

        def resident(item: Resident) -> Resident:
            return replace(item, bytes=item.bytes / ways) if item.shared_out == "experts" else item

        def task(item: Any) -> Any:
            """As many rows as on one device, but through fewer experts, whose weights are read."""
            if isinstance(item, Compute) and item.role == "weight_cast" and item.shared_out == "experts":
                return item.divided(ways)
            op = products.get((item.layer, item.name)) if isinstance(item, Compute) else None
            if op is None:
                return item
            weights = (op.backward_moved if item.phase == "backward" else op.moved).one * width
            moved = (item.moved_bytes - weights) * busiest + weights / ways
            return replace(item, flops=item.flops * busiest, moved_bytes=moved, matrices=item.matrices / ways)

        row = width * busiest
        talk = [each for layer in layers for site in _sites_of(layer) for each in self._trips(work, layer, site, row)]
        work = work.map_slots(slot).map_residents(resident).map_tasks(task).with_tasks(*talk)
        work = work.with_residents(*(self._on_the_way(work, layer, row) for layer in layers))
        return work.owing(self.axis, self.name, shared_out="experts")

    def _trips(self, work: Work, layer: Layer, site: Site, width: Num) -> list[Collective]:
        experts = _experts_of(layer)
        repeat, passed_back = work.repeat_of(layer.name), work.passing_back(layer.name, site.after)
        sent = site.elements(work.size("microbatch"), work.size("sequence")) * width
        # The results' gradients travel if any expert learns, the tokens' only if something before them does.
        returned = repeat if any(not param.frozen for param in experts) else passed_back
        common: dict[str, Any] = {"layer": layer.name, "kind": "all_to_all", "axis": self.axis, "origin": self.name}
        rows: dict[str, Any] = {**common, "bytes": sent, "at_most": site.at_most}
        return [
            Collective(**common, phase="forward", repeat=repeat, bytes=experts[0].shape[0] * _COUNT_BYTES),
            Collective(**rows, phase="forward", repeat=repeat),
            Collective(**rows, phase="forward", repeat=repeat),
            Collective(**rows, phase="backward", repeat=returned),
            Collective(**rows, phase="backward", repeat=passed_back),
        ]

    def _on_the_way(self, work: Work, layer: Layer, width: Num) -> Resident:
        """Rows as they are given in, as they arrive, and in the order of the experts; the last are kept (already
        counted, instead of those that were here)."""
        b, s = work.size("microbatch"), work.size("sequence")
        sent = sum(site.elements(b, s) for site in _sites_of(layer)) * width
        return Resident(
            layer=layer.name,
            category="working",
            repeat=work.repeat_of(layer.name),
            bytes=2 * sent * (work.size(self.axis) > 1),
            life="moment",
            origin=self.name,
        )

    def apply(self, build: Build) -> None:
        build.at("split", self._share_out)

    def _share_out(self, build: Build) -> None:
        from meshwright.ops.routing import ExpertHolder, sending_over

        group, index = build.mesh.group(self.axis), build.mesh.index(self.axis)
        for name, param in build.named_params():
            if param.shared_out == "experts":
                build.cut(name, 0, index, self.size, self.axis)
        build.sum_rest_late(self)
        send = sending_over(group)
        for module in build.model.modules():
            if isinstance(module, ExpertHolder):
                module.send = send


def _experts_of(layer: Layer) -> tuple[Param, ...]:
    return tuple(param for param in layer.params if param.shared_out == "experts")


def _sites_of(layer: Layer) -> tuple[Site, ...]:
    return tuple(site for site in layer.sites if site.kind == "experts")


def _numbers_of_experts(profile: Profile) -> tuple[int, ...]:
    return tuple(sorted({param.shape[0] for layer in profile.layers for param in _experts_of(layer)}))
