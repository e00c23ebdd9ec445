"""Forget a block's activations after forward and compute them again in backward.

What: the first `layers` blocks of every stage keep only their input (full recomputation). Recomputed blocks come first:
their memory is needed last in backward, when the kept ones' is already free.
When it helps: activations are the peak; a third more compute buys most of their memory.
When it does not: parameters and optimizer are the peak, or memory is free.
Cost: one more forward of each such block; kept: one boundary instead of all activations (Chen et al. 2016). The exit of
the last region is not replayed: nothing in backward needs it.
Exactness: exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Option, PerLayer, Technique
from meshwright.core.work import Collective, Compute, Resident, Work, replace

@dataclass(frozen=True, kw_only=True)
class Recompute(Technique):
    name: ClassVar[str] = "recompute"
    phase: ClassVar[str] = "block"

    policies: ClassVar[tuple[str, ...]] = ("layers",)

    layers: int | str | None = None
    """Blocks that are recomputed: None: all; a number: the first so many of every stage; "0-3,8": these."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (PerLayer(cls.policies),)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        return tuple(self.policy_problems(profile))

    def price(self, work: Work) -> Work:
        b, s = work.size("microbatch"), work.size("sequence")
        width = work.facts.get("stream_bytes", work.slots[0].element_bytes)
        for layer in work.profile.block_layers:
            repeat = work.repeat_of(layer.name)
            count = work.following(self.name, "layers", layer.name)
            each = np.maximum(repeat, 1)  # some tasks come several times a block
            again = [
                replace(task, phase="recompute", repeat=task.repeat * count // each * work.has_backward(layer.name))
                for task in work.tasks
                if task.layer == layer.name
                and task.phase == "forward"
                and not (isinstance(task, Collective) and task.tail)
            ]
            again = [replace(t, origin=self.name) if isinstance(t, Compute) else t for t in again]
            saved = [item for item in work.residents if _is_kept(item, layer.name)]
            boundary = layer.boundary(b, s) * width / work.facts.get("sequence_ways", 1)
            kept = Resident(
                layer=layer.name,
                category="activations",
                repeat=count,
                bytes=boundary,
                life="microbatch",
                origin=self.name,
                turn=-1,
            )
            revived = [
                replace(
                    item,
                    category="gathered" if item.category == "gathered" else "working",
                    repeat=(count > 0) * 1,
                    life="backward",
                    origin=self.name,
                    turn=-1,
                )
                for item in saved
            ]
            rest = tuple(
                replace(item, repeat=repeat - count) if _is_kept(item, layer.name) else item for item in work.residents
            )
            work = replace(work, residents=(*rest, kept, *revived)).with_tasks(*again)
        return work

    def apply(self, build: Any) -> None:
        build.at("block", self._wrap)

    def _wrap(self, build: Any) -> None:
        from meshwright.ops.surgery import recomputed

        numbers = [block for first, last in build.spans for block in range(first, last)]
        for number, block in zip(numbers, build.model.block_modules(), strict=True):
            if self.policy_of(number, build.spans):
                block.forward = recomputed(block.forward)


def _is_kept(item: Resident, layer: str) -> bool:
    return item.layer == layer and item.life == "microbatch" and item.category in ("activations", "gathered")
