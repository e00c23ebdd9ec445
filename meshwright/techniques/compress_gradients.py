"""What replicas or islands sum, in fewer bits, with what these lose added to the next sum.

What: the sums of `replicate`, or where there are islands only their exchange (`local_steps`), layer by layer. bf16;
int8 and sign (1 bit): a float32 scale for each 256 elements; topk: the `keep` largest entries of a layer with their
places; powersgd: matrices as two factors of `rank` columns. Tensors with no more elements than their factors are sent
whole. Each rank keeps what its message lost and adds it to the next one (`feedback`); a step that is refused changes
nothing of it. Checkpoints have it, for the same ranks; a rank that finds none begins without.
When it helps: the link between replicas is the bottleneck, most of all between islands: int8 every 32 updates is 1/126
of an all_reduce in float32.
When it does not: links that hide the sums behind backward (coded sums do not hide); few large batches, where what is
lost is not made up for in time.
Cost: bytes of an all_reduce as all_to_all and all_gather of 1/2, 1/4 or 1/28 of float32; topk: 8 bytes an entry from
each rank to all; powersgd: `rank` x (rows + columns). Feedback is as large as gradients in float32, twice so within a
step. Refused with shard, whose sums FSDP makes, but for islands of shards. Search does not choose it by itself;
where it is pinned, plans are ranked by the time to the same loss.
Loss after 500 steps of AdamW from random weights, against float32: int8 -0.7 %, powersgd of rank 4 +5 %, topk of 1 %
+31 %, sign +35 % (+18 % without feedback, which AdamW's second moments take for noise); another seed +2.2 %
(`benchmarks/exchange_gap.py`). Statistical price: from 1 (what publications say) to the times that run's steps which it
needed for the same loss: int8 1, powersgd 1.37, topk of 1 % 3.7, sign more than 5.
Exactness: approximate; reordered with topk and keep = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Exactness, StepsFactor, Technique, technique_named, technique_names
from meshwright.core.work import Collective, Compute, Num, ParameterSlot, Resident, Work

MEASURED_IN = "benchmarks/exchange_gap.py --factors (0.2 M parameters, 500 steps of AdamW, default settings)"
CHANCE = 1.08
"""Times the steps by which another seed of the weights changed that run's loss."""
MID = "their geometric mean", "as measured there for int8"
STATISTICAL: dict[str, tuple[float, str]] = {
    "bf16": (CHANCE, "no more is lost than by int8"),
    "int8": (CHANCE, "as good there"),
    "powersgd": (1.37, "rank 4 is as good for SGD (Vogels et al. 2019)"),
    "topk": (3.70, "1 in 1000 is as good with momentum correction and warm-up (Lin et al. 2018)"),
    "sign": (5.0, "as good for SGD (Karimireddy et al. 2019), but there more than 5"),
}
"""Of each codec with its default settings: at most so many times the steps for the same loss, and a publication."""
PASSES = {"bf16": 24, "int8": 53, "sign": 50, "topk": 40, "powersgd": 22}
"""Times that coding, decoding and feedback read or write a layer's values, as `ops/gradient_codecs.py` does them: int8
takes 5 to 8 ns an element on one core of 51 GB/s."""


@dataclass(frozen=True, kw_only=True)
class CompressGradients(Technique):
    name: ClassVar[str] = "compress_gradients"
    phase: ClassVar[str] = "wrap"  # before whoever makes the sums
    exactness: ClassVar[Exactness] = "approximate"
    codes_sums: ClassVar[bool] = True
    block: ClassVar[int] = 256
    """Elements that share a scale."""

    codec: Literal["bf16", "int8", "sign", "topk", "powersgd"] = "int8"
    keep: float = 0.01
    """Share of a layer's entries that topk sends."""
    rank: int = 4
    """Columns of powersgd's factors."""
    feedback: bool = True
    """What is lost is added to the next sum."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "exactness", self.exactness_with(vars(self)))

    @classmethod
    def exactness_with(cls, settings: Mapping[str, Any]) -> Exactness:
        return "reordered" if settings.get("codec") == "topk" and settings.get("keep") == 1 else cls.exactness

    @property
    def steps_factor(self) -> StepsFactor:
        """From one, where publications say that it is as good, to what a short run here needed, with feedback."""
        high, words = STATISTICAL[self.codec]
        if self.codec == "topk":  # a power of `keep`: 1 where all is sent
            high **= math.log(max(self.keep, 1e-9)) / math.log(0.01)
        mid = 1.0 if high == CHANCE else math.sqrt(high)
        basis = "chance (another seed)" if high == CHANCE else MEASURED_IN
        return StepsFactor(1.0, mid, high, f"low: {words}; high: {basis}; mid: {MID[high == CHANCE]}")

    @property
    def is_elementwise(self) -> bool:
        return self.codec in ("bf16", "int8", "sign")

    def is_sketched(self, shape: tuple[Num, ...]) -> Any:
        """Whether powersgd sends factors of such a tensor."""
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns

    def num_kept(self, elements: Num) -> Any:
        return np.minimum(np.ceil(self.keep * elements), elements).astype(int)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        return tuple(self._problems(plan, profile))

    def _problems(self, plan: Plan, profile: Profile) -> Iterator[Problem]:
        if not 0 < self.keep <= 1:
            yield self.problem(f"keep is {self.keep:g}.", "Use more than 0 to 1.")
        if self.rank < 1:
            yield self.problem(f"rank is {self.rank}.", "Use 1 or more.")
        trained = [param for layer in profile.layers for param in layer.params if not param.frozen]
        if self.codec == "powersgd" and not any(self.is_sketched(param.stored_shape) for param in trained):
            what = f"no parameter of {profile.name} is larger than its factors of rank {self.rank}."
            yield self.problem(what, "Use a smaller rank, or another codec.")
        used = [each for each in plan.techniques if plan.mesh.get(each.axis, 1) > 1]
        if any(each.keeps_islands for each in used):
            return
        own = [each.name for each in used if each.splits_samples and each.makes_whole_gradients]
        for name in own:
            what = f"{name} sums gradients by itself, in the bits of its own messages."
            yield self.problem(what, f"Use replicas without {name}, or islands of it.")
        # Alone it changes nothing: search asks first whether a technique could run by itself.
        if not own and not any(each.sums_layers for each in used) and len(plan.techniques) > 1:
            what = "no replicas or islands sum anything that could be compressed."
            yield self.problem(what, "Add one of these, or leave this technique out.")
        if plan.overlaps_steps:
            yield self.problem(
                "what is lost in one step cannot wait for one that overlaps it.", "Use another schedule."
            )
        for other in plan.techniques:
            if other.rests_layers:
                what = f"{other.name} makes no gradients of some layers in some steps, and what was lost would wait."
                yield self.problem(what, f"Leave out {other.name}, or this technique.")
            if other.scales_loss:
                what = f"{other.name} multiplies gradients by a factor that changes, and what was lost would not."
                yield self.problem(what, "Use bf16, or leave this technique out.")
            if other.hosts_states:
                what = f"{other.name} takes gradients to the host as they are made."
                yield self.problem(what, f"Leave out {other.name}, or this technique.")

    def price(self, work: Work) -> Work:
        kinds = [kind for kind in map(technique_named, technique_names()) if kind.axis]
        islands, sums, own = (
            math.prod(work.size(kind.axis) for kind in kinds if is_meant(kind))
            for is_meant in (
                lambda kind: kind.keeps_islands,
                lambda kind: kind.sums_layers,
                lambda kind: kind.splits_samples and kind.makes_whole_gradients,
            )
        )
        # What `check` says of axes.
        return work.forbid((islands == 1) & ((sums == 1) | (own > 1))).with_facts(coding=self)

    def priced(
        self, work: Work, axis: str, shards: Callable[[ParameterSlot], Num], width: Callable[[ParameterSlot], Num],
        every: int, origin: str,
    ) -> Work:  # fmt: skip
        """With the sums over `axis` of each layer's tensors every so many steps. `shards`: pieces of a parameter of
        which a rank has one; `width`: bytes of an element."""
        ways, tasks, residents = work.size(axis), list[Any](), []
        is_used = (ways > 1) * 1

        def shape(slot: ParameterSlot) -> tuple[Num, ...]:
            return (-(-slot.shape[0] // shards(slot)), *slot.shape[1:]) if slot.shape else ()

        def elements(slot: ParameterSlot) -> Num:
            return slot.stored(shards(slot))

        def factors(slot: ParameterSlot, *, left: bool) -> Num:
            """Elements of the first message and of the second."""
            sizes = shape(slot)
            if len(sizes) < 2:
                return 0 if left else elements(slot)
            size = self.rank * (math.prod(sizes[1:]) if left else sizes[0])
            return np.where(self.is_sketched(sizes), size, 0 if left else elements(slot))

        def wide(slot: ParameterSlot) -> Num:
            return np.maximum(width(slot), 4)

        sums = [
            work.units(elements, trained=True),
            work.units(lambda slot: elements(slot) * width(slot), trained=True),
            work.units(lambda slot: elements(slot) * wide(slot), trained=True),
            work.units(lambda slot: factors(slot, left=False) * wide(slot), trained=True),
            work.units(lambda slot: factors(slot, left=True) * wide(slot), trained=True),
        ]
        for (layer, repeat, count), *sizes in zip(*sums, strict=True):
            plain, kept, first, second = (size for _, _, size in sizes)
            shard = -(-count // ways)
            scales = 4 * -(-shard // self.block)
            coded = {"bf16": 2 * shard, "int8": shard + scales, "sign": -(-shard // 8) + scales}
            if self.is_elementwise:
                messages = [("all_to_all", ways * coded[self.codec]), ("all_gather", ways * coded[self.codec])]
            elif self.codec == "topk":
                messages = [("all_gather", ways * self.num_kept(count) * (plain // np.maximum(count, 1) + 4))]
            else:
                messages = [("all_reduce", first), ("all_reduce", second)]
            common: dict[str, Any] = {"layer": layer, "origin": origin, "phase": "step"}
            for kind, size in messages:
                message = common | {"kind": kind, "axis": axis, "bytes": size, "per_step": True}
                tasks.append(Collective(**message, repeat=repeat * (size > 0) / every))
            made: dict[str, Any] = {"name": self.name, "kind": "memory", "role": "optimizer", "kernels": 24.0}
            made |= {"repeat": repeat * is_used / every, "moved_bytes": PASSES[self.codec] * kept}
            tasks.append(Compute(**common, **made))
            held: dict[str, Any] = {"layer": layer, "category": "buffers", "origin": origin, "repeat": repeat * is_used}
            for life in ("always", "step") if self.feedback else ():
                residents.append(Resident(**held, bytes=kept, life=life))
        return work.with_tasks(*tasks).with_residents(*residents)

    def apply(self, build: Build) -> None:
        build.coding = self
