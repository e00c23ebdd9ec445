"""Optimizer states, gradients and master weights of some layers in host memory, updated by host cores.

What: of the last `share` of a stage's layers the device keeps only the weights it computes with; under `precision` those
of blocks are in the compute dtype, a copy of the float32 masters. Gradients leave the device as backward makes them, a
thread updates masters and states on the host, and the new weights return before the layer's next forward. With `ahead`
a layer is updated as soon as its gradients are there, while backward goes on; in a step whose gradients are clipped, the
old values are restored and the update is made again. Otherwise updates begin when the norm is known, in the order of the
next forward.
When it helps: states are the peak, and steps are long enough for the copies and the update.
When it does not: whatever fits without; few tokens in a step.
Cost: each gradient goes out and each weight comes in once a step (gradients: once a microbatch); host memory for
masters, states and what passes through, with `ahead` twice for masters and states (Ren et al. 2021, ZeRO-Offload;
SuperOffload 2025).
Exactness: exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Exactness, Technique
from meshwright.core.work import Circumstances, Num, Updating, Work

if TYPE_CHECKING:
    from meshwright.ops.host_memory import HostUnit


@dataclass(frozen=True, kw_only=True)
class OffloadStates(Technique):
    name: ClassVar[str] = "offload_states"
    phase: ClassVar[str] = "step"
    exactness: ClassVar[Exactness] = "exact"

    share: float = 1.0
    """Of each stage's layers, from the end."""
    ahead: bool = False
    """Update before the norm of all gradients is known."""

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.is_elementwise:
            return ()
        what = "this optimizer looks at whole parameters of all ranks at once."
        return (Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out."),)

    @property
    def updates_each_alone(self) -> bool:
        return True

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "steps that overlap need weights of two versions."
        yield given.overlaps_steps, self.problem(what, "Use another schedule, or leave the technique out.")
        what = "the gradients of all compiled layers exist at once, in memory that the next step writes."
        fix = 'Use scope = "block" and graphs = false for compiled layers, or leave the technique out.'
        yield given.joins_gradients, self.problem(what, fix)
        what = "a step in which a gradient of fp16 overflows must be skipped as a whole."
        yield given.scales_loss, self.problem(what, "Use another dtype than fp16, or leave the technique out.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = list(self.refused(plan, profile))
        if not 0 < self.share <= 1:
            problems.append(self.problem(f"share is {self.share}.", "Use more than 0 and at most 1."))
        for other in plan.techniques:
            if other is not self and other.updates_each_alone:
                what = f"{other.name} updates parameters one by one, on the device."
                problems.append(self.problem(what, f"Leave out {other.name}, or this technique."))
        return tuple(problems)

    def price(self, work: Work) -> Work:
        return self.forbid(work)

    def apply(self, build: Build) -> None:
        units: list[HostUnit] = []
        is_alone = build.plan.num_ranks == 1
        build.at("wrap" if is_alone else "step", lambda build: units.extend(self._units(build, is_alone)))
        build.at("step", lambda build: self._install(build, units))

    def _units(self, build: Build, is_alone: bool) -> Iterator[HostUnit]:
        from meshwright.ops.host_memory import make_host_unit

        units = [unit for unit in build.units() if any(p.requires_grad for p in unit.parameters)]
        for unit in units[len(units) - self.num_units(len(units)) :]:
            is_narrow = is_alone and unit.is_block and self._narrows(build.profile)
            yield make_host_unit(build, unit, build.compute_dtype if is_narrow else build.dtype)

    def num_units(self, total: Num) -> Num:
        """Of so many here, those that live on the host."""
        return (self.share * total + 0.5) // 1 if not isinstance(total, int) else int(self.share * total + 0.5)

    def _narrows(self, profile: Profile) -> bool:
        """Whether blocks use their weights in the compute dtype only: under autocast norms do not, nor do routers."""
        is_routed = any(op.role == "experts" for layer in profile.layers for op in layer.ops)
        return profile.stream == "compute" and not is_routed

    def _install(self, build: Build, units: list[HostUnit]) -> None:
        from meshwright.optimizers.host_states import HostStatesRule

        plan = build.plan
        axes = [other for other in plan.techniques if other.axis and plan.mesh[other.axis] > 1]
        early = all(other.makes_whole_gradients for other in axes) and (not axes or plan.num_microbatches == 1)
        build.rule_wraps.append(lambda make: partial(HostStatesRule, units, early, self.ahead, make))
