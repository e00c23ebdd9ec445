"""The optimizer inside of backward: gradients never all exist.

What: each parameter is updated as soon as backward has made its gradient (a sharded one: has summed this rank's part of
it), and the gradient is let go of. A gradient or a loss that is not finite updates nothing, so weights and states stay
finite; but parameters whose gradients came before it have been updated when the run stops.
When it helps: gradients are a large part of the peak: one microbatch, few activations (recomputed ones, say).
When it does not: several microbatches, which must add up their gradients; clipping, which needs the norm of all.
Cost: gradients of the largest layer instead of all; the same bytes moved, in a few launches for each parameter instead
of a few for all (Lv et al. 2023).
Exactness: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import Circumstances, Compute, Num, Updating, Work

LAUNCHES = 6.0
"""Kernels for each parameter: norm, tests of finiteness, update."""


@dataclass(frozen=True, kw_only=True)
class UpdateInBackward(Technique):
    name: ClassVar[str] = "update_in_backward"
    phase: ClassVar[str] = "step"
    exactness: ClassVar[Exactness] = "exact"
    updates_in_backward: ClassVar[bool] = True

    is_used: bool = True

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Choice("is_used", (True,)),)

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        problems = []
        if optimizer.clip:
            what = (
                f"gradients are clipped by the norm of all of them ({optimizer.clip:g}), which backward does not know."
            )
            problems.append(Problem(where=cls.name, what=what, fix="Use clip = 0, or leave the technique out."))
        if not optimizer.is_elementwise:
            what = "this optimizer looks at whole parameters of all ranks at once."
            problems.append(
                Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out.")
            )
        return tuple(problems)

    @property
    def takes_gradients(self) -> bool:
        return self.is_used

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        if not self.is_used:
            return
        what = "the gradients of several microbatches are added up before an update."
        yield given.num_microbatches > 1, self.problem(what, "Use one microbatch, or leave the technique out.")
        what = "this schedule makes weight gradients out of autograd's sight."
        yield given.splits_backward, self.problem(what, "Use another schedule, or leave the technique out.")
        what = "the gradients of all compiled layers, or of tables in host memory, exist at once until the update."
        fix = 'Use scope = "block" and graphs = false for compiled layers, tier = "device", or leave the technique out.'
        yield given.joins_gradients, self.problem(what, fix)
        what = "steps that overlap need weights of two versions."
        yield given.overlaps_steps, self.problem(what, "Use another schedule, or leave the technique out.")
        what = "a step in which a gradient of fp16 overflows must be skipped as a whole."
        yield given.scales_loss, self.problem(what, "Use another dtype than fp16, or leave the technique out.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = list(self.refused(plan, profile))
        for other in plan.techniques if self.is_used else ():
            is_whole = other.makes_whole_gradients or other.keeps_islands
            if other.axis and plan.mesh[other.axis] > 1 and not is_whole:
                what = f"with {other.name}, gradients are whole only after the backward passes."
                problems.append(self.problem(what, f"Leave out {other.name}, or this technique."))
        return tuple(problems)

    def price(self, work: Work) -> Work:
        if not self.is_used:
            return work
        facts = work.facts
        late = sum(((work.size(axis) > 1) * 1 for slot in work.slots for axis, _ in slot.late), start=0)
        # What `check` says of axes, by what they have done to the work.
        is_late = (facts.keeps_gradients + late > 0) | (facts.inside_ways > 1) | (work.size("num_stages") > 1)
        work = self.forbid(work).forbid(np.asarray(is_late) if np.ndim(is_late) else bool(is_late))
        count = sum(slot.repeat for slot in work.slots if not (slot.frozen or slot.copy_of))
        task: dict[str, Any] = {"name": self.name, "kind": "memory", "role": "optimizer", "origin": self.name}
        launches = Compute(**task, layer="", phase="step", repeat=1, kernels=LAUNCHES * count)
        return work.with_facts(frees_gradients=True).with_tasks(launches)

    def apply(self, build: Build) -> None:
        if self.is_used:
            build.at("step", self._install)

    def _install(self, build: Build) -> None:
        from meshwright.optimizers.in_backward import InBackwardRule

        build.rule_wraps.append(lambda make: partial(InBackwardRule, make))
