"""Adam's moments in 8 or 4 bits an element instead of 32.

What: blocks of 256 (4 bits: 128) consecutive elements share a float32 scale, and each element has a code that is denser
near the scale and reaches 7 (4 bits: 3) decades below it. Of the second moment the square root is coded, and never as
zero. An update decodes a block, updates it in float32 and codes it again, rounding at random with the right mean; on
CUDA in one kernel. Vectors and pieces below `smallest` elements keep float32. Checkpoints have float32 moments that any
plan can read; resumed with the same pieces and bits, the run goes on bit for bit.
When it helps: optimizer states are the peak: 2.03 (4 bits: 1.06) bytes a parameter in place of 8, and an update that
moves 16 (14) bytes in place of 28.
When it does not: sharded states, or activations that are the peak.
Cost: on an H200 no more time than torch's fused AdamW (491 M elements: 4.0 ms with 8 bits, 3.1 with 4, 4.0 in float32):
arithmetic, not traffic, limits it. On a CPU an update takes several times as long.
Exactness: lossy. Held-out loss of a byte-level decoder after 400 steps, against float32 moments: with a rate of 2e-3
-0.2 % (4 bits -3.1 %; another seed of the weights -0.6 %), with a rate too high, 8e-3, +0.5 % (-1.3 %; -5.7 %)
(`benchmarks/loss_gap.py`; Dettmers et al. 2022; Li et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import Updating, Work, replace
from meshwright.optimizers.low_bit_states import LowBitPrice, StateFormat


@dataclass(frozen=True, kw_only=True)
class LowbitOptimizer(Technique):
    name: ClassVar[str] = "lowbit_optimizer"
    phase: ClassVar[str] = "optimizer"
    exactness: ClassVar[Exactness] = "lossy"

    bits: Literal[8, 4] = 8
    smallest: int = 4096
    """Pieces of matrices with fewer elements keep states in float32."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Choice("bits", (8,), rescues=(4,)),)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if self.smallest < 1:
            return (self.problem(f"smallest is {self.smallest}.", "Use at least 1 element."),)
        return self.refused(plan, profile)

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.has_low_bit_form:
            return ()
        what = "this optimizer has no form with states in a few bits."
        return (Problem(where=cls.name, what=what, fix='Use name = "adamw", or leave the technique out.'),)

    @property
    def codes_states(self) -> bool:
        return True

    @property
    def format(self) -> StateFormat:
        return StateFormat(bits=self.bits, smallest=self.smallest)

    def price(self, work: Work) -> Work:
        work = self.forbid(work)
        return replace(
            work.with_facts(codes_states=True), optimizer=LowBitPrice(optimizer=work.optimizer, format=self.format)
        )

    def apply(self, build: Build) -> None:
        # First, next to the rule: other wraps may change what it is given to update.
        build.at("optimizer", lambda build: build.rule_wraps.insert(0, self.format.wrap))
