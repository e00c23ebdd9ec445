"""The loss in pieces: logits are never whole in memory.

What: hidden states go through the vocabulary matmul and the cross entropy in `chunks` pieces. A piece's logits, losses
and gradients (of its hidden states, and its part of the weight's) are made in one visit, going forward; backward scales
them by the gradient that arrives.
When it helps: large vocabularies and long sequences: logits are 2 or 4 bytes for each token and word, often the peak of
the whole step.
When it does not: small vocabularies (bytes), or memory to spare.
Cost: logits memory divided by `chunks`; the weight's gradient is read and written in float32 once for each piece, and
lives from forward to backward.
Exactness: reordered: the order of the sum over tokens changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Option, Technique
from meshwright.core.work import Compute, Resident, Work, replace


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Technique):
    name: ClassVar[str] = "chunked_loss"
    phase: ClassVar[str] = "swap"

    chunks: int = 8
    """Pieces of each sequence."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return () if "loss" in profile.uncut else (Choice("chunks", (8,)),)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if "loss" in profile.uncut:
            return (self.problem(f"this model's loss cannot go in pieces: {profile.uncut['loss']}"),)
        if self.chunks < 1:
            return (self.problem(f"chunks is {self.chunks}.", "Use at least 1."),)
        return ()

    def check_sequence(self, sequence: int) -> Problems:
        if sequence % self.chunks:
            what = f"a sequence of {sequence} cannot be cut into {self.chunks} equal pieces."
            return (self.problem(what, "Use a divisor of it."),)
        return ()

    def price(self, work: Work) -> Work:
        heads = {layer.name for layer in work.profile.layers for op in layer.ops if op.kind == "loss"}

        def task(item: Any) -> Any:
            """Backward's products are made going forward; each piece launches all of them."""
            if not isinstance(item, Compute) or item.layer not in heads or item.kind not in ("loss", "matmul"):
                return item
            return replace(item, phase="forward", kernels=item.kernels * self.chunks)

        def resident(item: Resident) -> Resident:
            if item.category != "logits":
                return item
            return replace(item, bytes=item.bytes / self.chunks, life="forward")

        # The weight's gradient is summed over the pieces in float32 at least, and kept until backward: there it becomes
        # the parameter's, or is added to that of the microbatches before.
        width = max(4, work.facts.widths.state)
        is_added = (work.size("num_microbatches") > 1) * 1
        matrices = [slot for slot in work.slots if slot.layer in heads and len(slot.shape) > 1 and not slot.frozen]
        sums = [
            Resident(
                layer=slot.layer,
                category="activations",
                repeat=slot.repeat,
                bytes=slot.elements * width * is_added,
                life="microbatch",
                cut="none" if slot.cut is None else "tensor",
                origin=self.name,
            )
            for slot in matrices
        ]
        adding = [
            Compute(
                layer=slot.layer,
                kind="memory",
                role="loss",
                name="sum of gradients",
                phase="forward",
                repeat=slot.repeat,
                moved_bytes=slot.elements * width * 2.0 * (self.chunks - 1),
                kernels=0.0,
                cut="none" if slot.cut is None else "tensor",
                origin=self.name,
            )
            for slot in matrices
        ]
        work = work.map_tasks(task).map_residents(resident).with_residents(*sums).with_tasks(*adding)
        return work.with_facts(loss_calls=self.chunks)

    def apply(self, build: Build) -> None:
        build.at("swap", self._swap)

    def _swap(self, build: Build) -> None:
        for _, head in build.model.heads():
            head.num_chunks = self.chunks
