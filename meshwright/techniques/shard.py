"""ZeRO: replicas share out the optimizer, the gradients and the parameters, and gather what they need.

What: ranks along `fsdp` see different samples and each keep 1/n of every parameter and its optimizer state (FSDP2).
Stage 3 gathers a block for its forward and again for its backward (embedding and head stay between the two); stage 2
gathers once a step and keeps all until the last backward ends; stage 1 also keeps whole gradients until the last
microbatch. With `replicate` it is hybrid sharding: shards inside a group, sums between groups.
When it helps: optimizer and parameters are the peak, and a layer's compute covers its gather.
When it does not: small batches per rank over slow links (the gathers do not hide), or a model that fits anyway.
Cost: stage 3: per microbatch 2 all_gathers and 1 reduce_scatter of the parameters; stage 2: 1 all_gather per step and a
reduce_scatter per microbatch; stage 1: one of each per step (Rajbhandari et al. 2020; Zhao et al. 2023).
Exactness: exact. Axis: fsdp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Option, Technique, axis_sizes
from meshwright.core.work import Collective, Num, Resident, Slot, Work, statistics


@dataclass(frozen=True, kw_only=True)
class Shard(Technique):
    name: ClassVar[str] = "shard"
    phase: ClassVar[str] = "wrap"
    axis: ClassVar[str] = "fsdp"
    closeness: ClassVar[int] = 2
    splits_samples: ClassVar[bool] = True

    size: int
    """Ranks a parameter is shared between."""
    stage: Literal[1, 2, 3] = 3

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Axis("size", axis_sizes(cluster)), Choice("stage", (3, 2, 1)))

    def price(self, work: Work) -> Work:
        ways = work.size(self.axis)
        gather_bytes = work.facts.get("compute_bytes", work.slots[0].element_bytes)
        blocks = {layer.name for layer in work.profile.layers if layer.is_block}
        common: dict[str, Any] = {"axis": self.axis, "origin": self.name, "hidden": True}
        tasks, residents, largest = statistics(work, self.axis, self.name), [], 0

        def padded(slot: Slot) -> Num:
            return slot.stored(ways) * ways

        for layer, repeat, elements in work.units(padded):
            whole = {"layer": layer, "bytes": elements * gather_bytes, "kind": "all_gather"}
            once = self.stage < 3
            tasks.append(Collective(**common, **whole, repeat=repeat, phase="forward", per_step=once))
            if not once and layer in blocks:
                goes_back = repeat * work.has_backward(layer)
                tasks.append(Collective(**common, **whole, repeat=goes_back, phase="backward"))
            if layer in blocks:
                largest = np.maximum(largest, elements * gather_bytes * (repeat > 0))
            if once or layer not in blocks:
                residents.append(self._gathered(layer, repeat, elements * gather_bytes, "always"))
            if self.stage == 1:
                residents.append(self._gathered(layer, repeat, elements * work.slots[0].element_bytes, "always"))
        for layer, repeat, elements in work.units(padded, trained=True):
            summed = {"bytes": elements * work.slots[0].element_bytes, "kind": "reduce_scatter", "layer": layer}
            tasks.append(Collective(**common, **summed, repeat=repeat, phase="backward", per_step=self.stage == 1))
        if self.stage == 3:  # the block in use and the one fetched ahead
            residents.append(self._gathered("", 2, largest, "always"))

        def slot(item: Slot) -> Slot:
            return replace(item, shards=ways, gradient_shards=ways)

        kept = tuple(item for item in work.residents if item.category != "gathered")
        return replace(work, residents=(*kept, *residents)).with_tasks(*tasks).map_slots(slot)

    def _gathered(self, layer: str, repeat: Any, size: Any, life: Any) -> Resident:
        return Resident(layer=layer, category="gathered", repeat=repeat, bytes=size, life=life, origin=self.name)

    def apply(self, build: Any) -> None:
        build.at("split", lambda build: build.model.share_statistics(build.mesh.group(self.axis), self.size))
        build.at("wrap", self._wrap)

    def _wrap(self, build: Any) -> None:
        from meshwright.ops.shard import shard_units

        axes = [axis for axis in build.plan.replica_axes if axis != self.axis]
        flags = shard_units(build, self.axis, axes, reshard=self.stage == 3)
        build.reduction_owner = self.name
        stage = self.stage
        build.on_backward.append(lambda is_last: flags(stage, is_last))
