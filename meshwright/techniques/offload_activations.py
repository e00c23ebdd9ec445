"""Keep what blocks save for backward in host memory until backward needs it.

What: all that blocks named by `layers` save, but for parameters and storages below `smallest` bytes, is copied to
page-locked host memory as it is made, on a stream of its own, and returns while the block after it runs backward. With
`inputs` so do the inputs of blocks that are recomputed as a whole: with both, next to nothing of a layer stays on the
device. Of a stage's equal blocks the first ones go: the last ones' tensors are needed soonest.
When it helps: activations are the peak, and a block computes for as long as its copies take: long sequences above all,
whose attention grows with the square and whose copies do not. Cheaper than recomputation where they hide, and with
`inputs` what is left where recomputation of all blocks is not enough. Search tries it where nothing else fits, on the
GPUs of one host.
When it does not: parameters and optimizer are the peak; short sequences on fast devices, where copies take longer than
the compute they hide behind; hosts whose memory many devices share.
Cost: each byte crosses to the host and back once for a microbatch, and shows where compute is too short to hide it; the
first block of each way has nothing to hide behind. On the device two blocks' worth at a time; the host holds the rest,
for every microbatch in flight, in buffers that are used again from step to step.
Exactness: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, PerLayer, Technique
from meshwright.core.work import Circumstances, Copy, Num, Resident, Work, replace

TURN = -4
"""Of its blocks: before those that are recomputed."""


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Technique):
    name: ClassVar[str] = "offload_activations"
    phase: ClassVar[str] = "optimizer"  # priced when everybody has said what blocks keep
    exactness: ClassVar[Exactness] = "exact"
    uses_tiers: ClassVar[bool] = True
    policies: ClassVar[tuple[str, ...]] = ("layers",)

    layers: int | str | None = "all"
    """Blocks whose saved tensors go to the host: "all", "none", "first 3" or "last 3" of every stage, or "0-3,8"."""
    inputs: bool = False
    """The inputs of blocks that are recomputed as a whole go there too."""
    smallest: int = 1 << 20
    """Bytes of a storage below which it stays on the device."""

    @property
    def needs_blocks(self) -> bool:
        return not self.inputs

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        is_offered = cluster.device.kind == "cuda" and cluster.num_nodes == 1 and not cluster.others
        if not is_offered or not cluster.tiers["host"].bytes or not profile.num_blocks:
            return ()
        return (PerLayer(("layers",)), Choice("inputs", (), rescues=(False, True)))

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "layers are compiled as one graph, or replayed as CUDA graphs: their activations stay inside."
        yield given.joins_gradients, self.problem(what, 'Use compile with scope = "block" and without graphs.')
        what = "this schedule makes weights' gradients later: what has returned for the first half of a backward stays."
        yield given.splits_backward, self.problem(what, "Use another schedule, or leave it out.")
        if self.inputs:
            what = "inputs is on, and which inputs are kept is decided while backward runs."
            yield given.replays_blocks, self.problem(what, "Use inputs = false, or keep the inputs of all blocks.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.policy_problems(profile), *self.refused(plan, profile)]
        if self.smallest < 1:
            problems.append(self.problem(f"smallest is {self.smallest}.", "Use at least 1 byte."))
        if cluster is not None and not cluster.tiers["host"].bytes:
            what = f"nothing is known of the host memory of {cluster.name}."
            problems.append(self.problem(what, "Measure it: mw probe."))
        return tuple(problems)

    def price(self, work: Work) -> Work:
        work = self.forbid(work)
        for layer in work.profile.block_layers:
            count, own = work.following(self.name, "layers", layer.name), {"layer": layer.name, "origin": self.name}
            running: dict[str, Any] = own | {"category": "activations", "life": "moment"}
            rest, moved = [], list[Resident]()
            size: Num = 0.0
            copied: Num = 0.0
            times = count
            for item in work.residents:
                is_saved = item.layer == layer.name and item.life == "microbatch" and item.tier == "device"
                is_saved = is_saved and item.category in ("activations", "gathered")
                large = item.bytes * (item.bytes >= self.smallest)
                if is_saved and item.turn == 0:
                    rest.append(replace(item, repeat=item.repeat - count))
                    moved.append(replace(item, repeat=count, bytes=item.bytes - large, turn=TURN))
                    moved.append(replace(item, repeat=count, bytes=large, turn=TURN, tier="host"))
                    size = size + large
                elif is_saved and item.is_input and self.inputs:
                    rest.append(replace(item, bytes=item.bytes - large))
                    moved.append(replace(item, bytes=large, tier="host"))
                    moved.append(Resident(**running, turn=item.turn, repeat=item.repeat, bytes=2 * large))
                    copied, times = copied + item.repeat * large, times + item.repeat
                else:
                    rest.append(item)
            # Beside one of them, and beside the block after the last of them, there is what the one before it has saved
            # or needs next; where more is kept later on, that block is not the fullest moment.
            is_last = (work.repeat_of(layer.name) - count <= 1) | (work.facts.replays.get(layer.name, 0) > 0)
            both = 1 + (count > 1) * (1 - is_last)
            moved.append(Resident(**running, turn=TURN, repeat=count, bytes=size * both))
            moved.append(Resident(**running, repeat=(count > 0) * 1, bytes=size * is_last))
            each = (copied + count * size) / np.maximum(times, 1)  # of an average block
            copies: dict[str, Any] = own | {"repeat": times * (each > 0), "bytes": each, "hidden": True}
            work = replace(work, residents=(*rest, *moved)).with_tasks(
                Copy(**copies, source="device", target="host", phase="forward"),
                Copy(**copies, source="host", target="device", phase="backward"),
            )
        return work

    def apply(self, build: Build) -> None:
        build.at("wrap", self._wrap)  # around whatever forwards have become

    def _wrap(self, build: Build) -> None:
        from meshwright.ops.saved_tensors import HostPool, save_on_host

        pool, modules = HostPool(build.mesh.device), iter(build.model.block_modules())
        for first, last in build.spans:
            chosen = [
                self.policy_of(number, build.spans) == "layers" or (self.inputs and number in build.replayed_blocks)
                for number in range(first, last)
            ]
            save_on_host([next(modules) for _ in chosen], chosen, pool, self.smallest)
