"""The loss in pieces: logits are never whole in memory.

What: each sequence's hidden states go through the vocabulary matmul and the cross entropy `chunks` pieces at a time;
backward computes a piece's logits again.
When it helps: large vocabularies and long sequences: logits, their probabilities and gradients are up to 12 bytes
for each token and word, often the peak of the whole step.
When it does not: small vocabularies (bytes), or memory to spare: the vocabulary matmul runs forward twice.
Cost: one more forward of the head; logits memory divided by `chunks`.
Exactness: reordered: the order of the sum over tokens changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Option, Technique
from meshwright.core.work import Resident, Work, replace


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
        layer = work.profile.layers[-1].name
        again = tuple(
            replace(task, phase="recompute", origin=self.name)
            for task in work.computes
            if task.layer == layer and task.phase == "forward" and task.kind in ("loss", "matmul")
        )

        def shrink(item: Resident) -> Resident:
            if item.category == "logits":
                # What was kept for backward now lives only while its piece is computed, either way.
                return replace(item, bytes=item.bytes / self.chunks, life="moment")
            return item

        return work.with_tasks(*again).map_residents(shrink).with_facts(loss_calls=self.chunks)

    def apply(self, build: Build) -> None:
        build.at("swap", self._swap)

    def _swap(self, build: Build) -> None:
        from meshwright.ops.cross_entropy import chunked_score

        _, head = build.model.ends()
        head.score = chunked_score(head.score, self.chunks)
