"""Keep what blocks save for backward in 8, 4 or 2 bits an element.

What: of blocks named by `layers`, floating-point tensors that autograd saves are stored as codes; groups of 256
elements share a float32 minimum and step, and each is rounded up or down at random with the right mean. Backward
decodes them. The forward, and so the loss of given weights, is not touched. Weights, what is smaller than a sixteenth
of the block's input (statistics of norms and of attention) and what is no floating-point number stay as they are.
When it helps: activations are the peak, and neither recomputation nor host memory is enough or fast enough: of 16-bit
activations 8 bits leave 52 %, 4 27 %, 2 14 %. Search tries 8 and 4 with `--allow lossy`, where nothing else fits.
When it does not: memory is free; full recomputation keeps less, exactly.
Cost: coding reads each saved tensor and writes it in a few passes of plain torch operators, decoding too; while a
tensor is coded, some 16 bytes for each of at most 4 million elements.
Exactness: lossy. Held-out loss of a byte-level decoder (0.2 M parameters) after 400 steps, against float32: 8 bits
+0.9 %, 4 bits +0.4 %, 2 bits +13.7 %; another seed of the weights -0.2 % (`benchmarks/loss_gap.py --small`; Chen et al.
2021). A mean that is right does not stay so through what is not linear: attention's exponentials suffer with 2 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, PerLayer, Technique
from meshwright.core.work import Circumstances, Compute, Num, Resident, Work, replace

TURN = -5
"""Of its blocks: before those whose activations go elsewhere."""
SMALLEST = 1 / 16
"""Share of a block's input up to which a tensor stays as it is."""
GROUP, GROUP_BYTES = 256, 8
"""Elements that share a minimum and a step, and bytes of these."""
CODED_AT_ONCE, CODING_BYTES = 1 << 22, 16
"""Elements that are coded together, and bytes on the way of each."""
CODING_KERNELS, CODING_PASSES = 14.0, 40
"""Operators that code or decode a tensor, and bytes that they move for an element."""


@dataclass(frozen=True, kw_only=True)
class CompressActivations(Technique):
    name: ClassVar[str] = "compress_activations"
    phase: ClassVar[str] = "optimizer"  # priced when everybody has said what blocks keep
    exactness: ClassVar[Exactness] = "lossy"
    policies: ClassVar[tuple[str, ...]] = ("layers",)

    bits: Literal[8, 4, 2] = 8
    layers: int | str | None = "all"
    """Blocks: "all", "none", "first 3" or "last 3" of every stage, or "0-3,8"."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (PerLayer(("layers",)), Choice("bits", (), rescues=(8, 4))) if profile.num_blocks else ()

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "layers are compiled as one graph, or replayed as CUDA graphs: their activations stay inside."
        yield given.joins_gradients, self.problem(what, 'Use compile with scope = "block" and without graphs.')
        what = "this schedule makes weights' gradients later: what was decoded for the first half of a backward stays."
        yield given.splits_backward, self.problem(what, "Use another schedule, or leave it out.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        return (*self.policy_problems(profile), *self.refused(plan, profile))

    def price(self, work: Work) -> Work:
        work = self.forbid(work)
        for layer in work.profile.block_layers:
            count = work.following(self.name, "layers", layer.name)
            boundary = layer.boundary(work.size("microbatch"), work.size("sequence")) / work.facts.sequence_ways
            residents: list[Resident] = []
            coded: Num = 0.0
            whole: Num = 0.0
            for item in work.residents:
                is_saved = item.layer == layer.name and item.life == "microbatch" and item.turn == 0
                if not is_saved or item.category not in ("activations", "gathered") or item.tier != "device":
                    residents.append(item)
                    continue
                residents.append(replace(item, repeat=item.repeat - count))
                size = item.bytes
                if item.category == "activations":
                    elements = size / (2 if item.dtype in ("bf16", "fp16") else work.facts.widths.state)
                    is_coded = size > SMALLEST * boundary * work.facts.widths.stream
                    stored = np.ceil(elements / GROUP) * (GROUP * self.bits // 8 + GROUP_BYTES)
                    coded, whole = coded + elements * is_coded, whole + size * is_coded
                    size = np.where(is_coded, stored, size)
                residents.append(replace(item, repeat=count, bytes=size, turn=TURN))
            # As a block runs it has its tensors whole: each until its last reader is done, or once it is decoded.
            own: dict[str, Any] = {"layer": layer.name, "origin": self.name, "repeat": count}
            running = whole + np.minimum(coded, CODED_AT_ONCE) * CODING_BYTES
            residents.append(Resident(**own, category="working", life="moment", turn=TURN, bytes=running))
            common: dict[str, Any] = own | {"kind": "memory", "moved_bytes": coded * CODING_PASSES}
            common |= {"name": "coding", "kernels": CODING_KERNELS * len(layer.ops)}
            tasks = [Compute(**common, phase="forward"), Compute(**common, phase="backward")]
            work = replace(work, residents=tuple(residents)).with_tasks(*tasks)
        return work

    def apply(self, build: Build) -> None:
        build.at("wrap", self._wrap)  # around whatever forwards have become

    def _wrap(self, build: Build) -> None:
        from meshwright.ops.saved_tensors import FewBitsBlock

        modules = iter(build.model.block_modules())
        for first, last in build.spans:
            before: FewBitsBlock | None = None
            for number in range(first, last):
                block, is_chosen = next(modules), self.policy_of(number, build.spans) == "layers"
                before = FewBitsBlock(block, before, self.bits, SMALLEST) if is_chosen else None
