"""Groups of blocks are trained by heads of their own, with no gradient from one group to the one before.

What: a model with `local_heads` (`[model] change = { local_heads = 3 }`) has groups of blocks with a head behind each;
here backward ends where a group begins. A group is trained by the loss of the head behind it, and what it hands on is a
constant to the next one. With `every` = k only every k-th border is cut, and heads at the others add their losses.
The gradient is that of the sum of all losses, clipped by its norm; the last head's loss is reported and evaluated.
A local head is what the model has at its end, in a copy that shares nothing: a norm and an output matrix. So each group
learns the model's own task, and no gradient of a shared matrix has to cross stages.
When it helps: a pipeline over slow links, or with few microbatches. Where a stage begins with such a group nothing is
sent backward and nobody waits for a gradient: a stage goes on with its own backward, and of the bubble only the way in
is left.
When it does not: one device (all flops and activations stay, and heads come on top), models that need every layer for
their last loss, vocabularies so large that a head costs as much as its group.
Cost: heads: vocabulary x hidden parameters each, with their states, products and logits (`chunked_loss` divides those).
Handing gradients back over a cut border: no bytes; over other borders of stages: as ever. Stages between two cuts go as
if they were all there are, and hold as few microbatches (one, in 1f1b, where each stage is cut off); several chunks a
stage keep their order and hold as many as without. Nobody holds a stage back that is faster than the next: what it has
sent stays in its memory until it is received, which is not priced.
Search does not choose it, nor stages for a model with local heads; pinned ones it prices as if gradients were awaited.
Forecast for llama3-8b in 8 stages on 8 H100s (bf16, 8 microbatches of 4096 tokens, loss in pieces): 1.15 s and 52 GiB
without local heads, 1.03 s and 32 GiB in 4 groups, 1.15 s and 40 GiB in 8, where heads are a third of all parameters.
Loss after 500 steps of AdamW from random weights (4 blocks, 0.2 M parameters), against the model without local heads: 2
groups +1.9 %, 4 groups +7.7 %; with the heads but no cut +1.4 % and +9.8 %: here it is the heads' losses that cost, not
the gradients that are cut; another seed +2.2 % (`benchmarks/exchange_gap.py`).
Exactness: approximate: early groups never learn what later ones need. With `every` above the number of local heads
nothing is cut and it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Exactness, Technique
from meshwright.core.work import Circumstances, Num, Work


@dataclass(frozen=True, kw_only=True)
class LocalLoss(Technique):
    name: ClassVar[str] = "local_loss"
    phase: ClassVar[str] = "swap"  # before the cut into stages, which asks what is handed back
    exactness: ClassVar[Exactness] = "approximate"

    every: int = 1
    """Groups of the model from one border without a gradient to the next."""

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "where steps overlap, stages hold as many microbatches as gradients that are awaited, and none is."
        yield given.overlaps_steps, self.problem(what, "Use another schedule.")
        what = "one graph makes the gradients of all layers at once."
        yield given.joins_gradients, self.problem(what, "Compile blocks, without CUDA graphs, or leave this out.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile)]
        if self.every < 1:
            problems.append(self.problem(f"every is {self.every}.", "Use at least 1: a cut at each local head."))
        if not profile.group_borders:
            what = f"{profile.name} has no heads between its blocks to train groups of them by."
            fix = "Use a decoder of ours with local_heads = 1 or more, or leave it out."
            problems.append(self.problem(what, fix))
        for other in plan.techniques:
            if other.rests_layers:
                what = f"{other.name} leaves layers out of backward by where it ends, which is at several places here."
                problems.append(self.problem(what, f"Leave out {other.name}, or this."))
        return tuple(problems)

    def cut_before(self, profile: Profile) -> tuple[int, ...]:
        """Blocks that hand no gradient back to those before them."""
        return profile.group_borders[self.every - 1 :: self.every]

    def price(self, work: Work) -> Work:
        return self.forbid(work).with_facts(cut_before=self.cut_before(work.profile))

    def apply(self, build: Build) -> None:
        def cut(build: Build) -> None:
            build.model.cut_before = frozenset(self.cut_before(build.profile))

        build.at("swap", cut)
