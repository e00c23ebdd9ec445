"""ZeRO: replicas share out the optimizer, the gradients and the parameters, and gather what they need.

What: ranks along `fsdp` see different samples and each keep 1/n of every parameter and its optimizer state (FSDP2).
Stage 3 gathers a block for its forward and again for its backward (embedding and head stay between the two); stage 2
gathers once a step and keeps all until the last backward ends; stage 1 also keeps whole gradients until the last
microbatch. `secondary` neighbours (stage 3; as many as are in a node) share a second copy of the blocks from forward to
backward, whose gathers then stay among them (ZeRO++ hpZ). With `replicate` it is hybrid sharding: shards inside a
group, sums between groups. `prefetch` blocks are asked for ahead of the one at work, forward and backward, never across
the chunks of a pipeline. `reduce` is the dtype in which gradients are summed (and, in stage 1 or between groups, kept
over microbatches). Under schedules that make weight gradients later, stages 1 and 2 sum them when the second half is
done; stage 3 is refused.
When it helps: optimizer and parameters are the peak, and a layer's compute covers its gather. `secondary`: the gathers
of backward do not hide between nodes, and there is memory for the copy.
When it does not: small batches per rank over slow links (the gathers do not hide), or a model that fits anyway.
Cost: stage 3: per microbatch 2 all_gathers and 1 reduce_scatter of the parameters; stage 2: 1 all_gather per step and a
reduce_scatter per microbatch; stage 1: one of each per step (Rajbhandari et al. 2020; Zhao et al. 2023). 1 + `prefetch`
blocks are whole at once; with 0, a gather hides behind nothing. bf16 halves the bytes of sums. A second copy is
1/`secondary` of all blocks in the dtype of gathers, never 8 bits (Wang et al. 2023).
Exactness: reordered: the order of sums over samples changes; rounded with reduce = "bf16", which search does not choose
by itself. Axis: fsdp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Exactness, Option, Technique, axis_sizes, listed
from meshwright.core.work import (
    FP8_MULTIPLE,
    Circumstances,
    Collective,
    Compute,
    Num,
    ParameterSlot,
    Resident,
    Work,
    replace,
    statistics,
)


@dataclass(frozen=True, kw_only=True)
class Shard(Technique):
    name: ClassVar[str] = "shard"
    phase: ClassVar[str] = "wrap"
    axis: ClassVar[str] = "fsdp"
    closeness: ClassVar[int] = 2
    splits_samples: ClassVar[bool] = True
    makes_whole_gradients: ClassVar[bool] = True
    later_settings: ClassVar[tuple[str, ...]] = ("secondary",)

    size: int
    """Ranks a parameter is shared between."""
    stage: Literal[1, 2, 3] = 3
    prefetch: int = 1
    """Blocks gathered ahead of the one at work."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are summed over ranks."""
    secondary: int = 0
    """Ranks that share a second copy of the blocks from forward to backward; 0: there is none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exactness", self.exactness_with({"reduce": self.reduce}))

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        options: tuple[Option, ...] = (Axis("size", axis_sizes(cluster)), Choice("stage", (3, 2, 1)))
        if cluster.num_nodes > 1 and cluster.devices_per_node > 1 and not cluster.others:
            options += (Choice("secondary", (0, cluster.devices_per_node)),)
        return options

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any]) -> Exactness:
        return "rounded" if settings.get("reduce") == "bf16" else cls.exactness

    def as_exact(self) -> Shard:
        return replace(self, reduce="fp32")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile)]
        if self.prefetch < 0:
            problems.append(self.problem(f"prefetch is {self.prefetch}.", "Use 0 or more blocks ahead."))
        for other in plan.techniques if self.secondary else ():
            if other.rests_layers:
                what = f"{other.name} leaves blocks without a backward in some steps, which a second copy waits for."
                problems.append(self.problem(what, f"Use secondary = 0, or leave out {other.name}."))
        return tuple(problems)

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        is_used = given.size > 1
        what = "steps that overlap need two versions of the weights; those that shard gathers have one."
        yield is_used & given.overlaps_steps, self.problem(what, "Use replicate, or another schedule.")
        if self.stage == 3:
            what = "stage 3 lets go of weights before this schedule makes their gradients."
            fix = "Use stage 2 or 1, a schedule with whole backwards, or replicate."
            yield is_used & given.splits_backward, self.problem(what, fix)
            what = "slots runs blocks again whose weights shard has let go of by then."
            yield is_used & given.replays_blocks, self.problem(what, "Use recompute.slots = 0, or stage 2.")
        if self.secondary:
            is_group = (self.secondary > 1) & (given.size > self.secondary) & (given.size % self.secondary == 0)
            fits = [each for each in range(2, self.size) if self.size % each == 0]
            fix = f"Use {listed(fits)}, as many as are in a node, or 0." if fits else "Use 0."
            what = f"secondary is {self.secondary}: it must divide size, {self.size}, and lie between 1 and size."
            yield is_used & np.logical_not(is_group), self.problem(what, fix)
            what = f"stage {self.stage} lets go of no weights from forward to backward, so a second copy saves nothing."
            yield is_used & (self.stage < 3), self.problem(what, "Use stage 3, or secondary = 0.")
            what = "a stage runs forwards of other microbatches before a backward; a second copy lasts until the first."
            yield is_used & (given.num_stages > 1), self.problem(what, "Use secondary = 0, or do not cut the model.")

    def price(self, work: Work) -> Work:
        ways = work.size(self.axis)
        is_apart = work.facts.splits_backward
        work = self.forbid(work)
        gather_bytes = work.facts.widths.gather
        blocks = {layer.name for layer in work.profile.layers if layer.is_block}
        reduce_bytes = 2 if self.reduce == "bf16" else work.facts.widths.state
        common: dict[str, Any] = {"axis": self.axis, "origin": self.name}
        tasks, residents = statistics(work, self.axis, self.name), []
        largest, num_blocks, rests = 0, 0, work.facts.rests

        def padded(slot: ParameterSlot) -> Num:
            return slot.stored(ways) * ways

        def gathered(slot: ParameterSlot) -> Num:
            return padded(slot) * (1 if slot.element_bytes == 1 else gather_bytes)  # bytes stay bytes

        def sent(slot: ParameterSlot) -> Num:
            """Bytes: 8 bits an element and a scale of each shard where the products read 8 bits."""
            size = gathered(slot)
            if not slot.is_narrow or self.secondary:
                return size
            n, k = slot.shape
            is_narrow = (n % FP8_MULTIPLE == 0) & (k % FP8_MULTIPLE == 0) & (n % ways == 0)
            return size + is_narrow * (slot.elements + 4 * ways - size)

        # Embedding and head stay gathered while chunks of a stage take turns.
        is_chunked = work.facts.chunks > 1
        narrow, is_hidden = {slot.layer for slot in work.slots if slot.is_narrow}, self.prefetch > 0
        narrow_bytes = {layer: size for layer, _, size in work.units(sent)} if narrow else {}
        for layer, repeat, size in work.units(gathered):
            once = self.stage < 3 or (is_chunked and layer not in blocks)
            messages = [(repeat, size)]
            if layer in narrow:
                at_ends = self._at_ends(work, layer, repeat)
                messages = [(repeat - at_ends, narrow_bytes[layer]), (at_ends, size)]
            for count, each in messages:
                whole: dict[str, Any] = {"layer": layer, "bytes": each, "kind": "all_gather", "hidden": is_hidden}
                tasks.append(Collective(**common, **whole, repeat=count, phase="forward", per_step=once))
                if not once and layer in blocks:
                    whole["repeat"] = rests.passed(layer, count * work.has_backward(layer), repeat)
                    tasks.append(Collective(**common, **whole, phase="backward", within=self.secondary))
            if self.secondary and layer in blocks:
                held = self._gathered(layer, repeat * work.has_backward(layer), size // self.secondary, "microbatch")
                residents.append(held)
            if layer in blocks:
                largest = np.maximum(largest, size * (repeat > 0))
                num_blocks = num_blocks + repeat
            if once or layer not in blocks:
                residents.append(self._gathered(layer, repeat, size, "always"))
        for layer, repeat, elements in work.units(padded, trained=True):
            if self.stage == 1 or is_apart:  # a chunk's gradients are made together
                residents.append(self._gathered(layer, repeat, elements * reduce_bytes, "step"))
            summed: dict[str, Any] = {
                "bytes": elements * reduce_bytes,
                "kind": "reduce_scatter",
                "layer": layer,
                "hidden": True,
            }
            summed["repeat"] = rests.trained(layer, repeat)
            tasks.append(Collective(**common, **summed, phase="backward", per_step=self.stage == 1))
            # As they are made, and the message they leave in; that of the layer before waits meanwhile.
            residents.append(self._gathered(layer, repeat, elements * (gather_bytes + reduce_bytes), "backward"))
        for layer in sorted(blocks) if self.stage == 3 else ():  # the block in use and those fetched ahead
            here = work.repeat_of(layer)
            held = np.minimum(1 + self.prefetch, num_blocks) * largest
            residents.append(self._gathered(layer, here, held, "moment"))

        def slot(item: ParameterSlot) -> ParameterSlot:
            return replace(item, shards=ways, shard_axis=self.axis, gradient_shards=ways)

        def task(item: Any) -> Any:
            """Shards are cast before they are gathered."""
            is_cast = isinstance(item, Compute) and item.role == "weight_cast" and item.phase != "backward"
            return item.divided(ways) if is_cast else item

        kept = tuple(item for item in work.residents if item.category != "gathered")
        work = replace(work, residents=(*kept, *residents)).map_tasks(task).with_tasks(*tasks).map_slots(slot)
        return work.with_widths(reduce=reduce_bytes)

    def _at_ends(self, work: Work, layer: str, repeat: Num) -> Num:
        """Instances here of a layer of blocks that are at an end of the model, and gathered in 16 bits for it."""
        layers, blocks = work.profile.layers, work.profile.block_layers
        near = (work.repeat_of(layers[0].name) > 0) * (layer == blocks[0].name)
        far = (work.repeat_of(layers[-1].name) > 0) * (layer == blocks[-1].name)
        return np.minimum(repeat, work.facts.edge_blocks * (near + far))

    def _gathered(self, layer: str, repeat: Any, size: Any, life: Any) -> Resident:
        return Resident(layer=layer, category="gathered", repeat=repeat, bytes=size, life=life, origin=self.name)

    def apply(self, build: Build) -> None:
        if self.size == 1:  # nothing to share: gradients are summed by whoever has replicas
            return
        build.at("split", lambda build: build.model.share_statistics(build.mesh.group(self.axis), self.size))
        build.at("wrap", self._wrap)

    def _wrap(self, build: Build) -> None:
        import torch

        from meshwright.ops.fsdp import ShardedUnits

        axes = [axis for axis in build.plan.replica_axes if axis != self.axis]
        reduce_dtype = torch.bfloat16 if self.reduce == "bf16" else build.dtype
        units = ShardedUnits(
            build,
            self.axis,
            axes,
            stage=self.stage,
            prefetch=self.prefetch,
            reduce_dtype=reduce_dtype,
            secondary=self.secondary,
            problem=self.problem,
        )
        build.add_exchange(self, units, *axes)
