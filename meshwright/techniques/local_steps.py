"""Islands that take steps of their own and meet every few of them, over a slow link.

What: ranks along `local` are islands. Each trains parameters of its own on its own samples, in any mesh (the same in
all), and clips by its own gradients' norm; every `every`-th update they meet, in one message for each layer. A model
that all share moves by the mean of what islands have moved (`outer` = average: to their mean; nesterov: by SGD with
Nesterov momentum, rate `outer_lr` and `outer_momentum`, which is DiLoCo), and islands go on from it with the optimizer
states that they have. elastic: islands move towards a centre by `pull`, and the centre towards them by `push`. With
`fragments` layers meet in turns within a period; with `overlap` a sum is under way for so many updates, and islands
then move to the shared model by the share `blend` (streaming DiLoCo).
When it helps: islands are joined by a link that is slow beside the compute of `every` steps: another site, or Ethernet.
When it does not: links that carry a step's gradients while backward runs; few steps, or a large `every` without an
outer optimizer (above about 10 plain averages learn less from each sample).
Cost: what an all_reduce of the parameters sends, divided by `every` (a few numbers that all ranks agree on still cross
the link in each step; forecasts have their seconds); memory for the shared model, and for its momentum and a sum under
way where there are any. What evaluates, writes checkpoints and exports sees the shared model, as of the last meeting;
after the run's last step all have met once more. The loss of a step is the mean over the islands, each with its own
parameters. Checkpoints also have each island's parameters and states: with more islands, new ones begin at the shared
model with the first island's states. Batch norms, and parameters on the host, are refused. With `--allow approximate`
search tries islands of whole nodes that meet every 16, 64 or 256 updates (nesterov, outer_momentum = 0.5), and ranks by
the time to the same loss.
Loss after 500 steps of 512 tokens from random weights, two islands that meet every 16, against replicas: averages +7.4
%, nesterov +20 % (+6 % with outer_momentum = 0.5; its published rates are for runs of many more meetings), three
fragments +9 %, elastic +10 %; another seed +2.2 % (`benchmarks/exchange_gap.py`). Statistical price: from 1 (what
publications say of longer training) to what that run needed for the same loss, the larger of two seeds: times the steps
with outer_momentum = 0.5 1.34 (every 16), 1.44 (64), 1.65 (256); averages 1.17 (4), 1.32 (16), 1.45 (64);
outer_momentum = 0.9 1.81, elastic 1.62 (16). Of 0.9 M parameters at a constant rate, for the loss of replicas after 320
steps, 1.25 (16), 1.4 to 1.6 (64), 2.4 (256, the third meeting): `benchmarks/slow_links.py`.
Exactness: approximate. With every = 1, plain averages and SGD without momentum or clipping it is one device's. Axis:
local.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Exactness, Option, StepsFactor, Technique, axis_sizes
from meshwright.core.work import Circumstances, Collective, Compute, Num, ParameterSlot, Resident, Updating, Work

MOST_STEPS = 1_000_000
MEASURED_IN = (
    "benchmarks/exchange_gap.py --factors (0.2 M parameters, 500 steps from random weights, two islands, other "
    "settings at their defaults),"
)
MEASURED: dict[str, dict[int, float]] = {
    "average": {1: 1.0, 4: 1.17, 16: 1.32, 64: 1.45},
    "nesterov": {1: 1.0, 16: 1.34, 64: 1.44, 256: 1.65},
    "nesterov 0.9": {1: 1.0, 16: 1.81},
    "elastic": {1: 1.0, 16: 1.62},
}
"""Of each outer optimizer (of nesterov's momentum 0.5, and 0.9), updates between meetings -> times the steps for the
same loss."""
PUBLISHED: dict[str, tuple[int, str]] = {
    "average": (10, "plain averages are as good up to about 10 updates (Lin et al. 2020)"),
    "nesterov": (500, "8 islands are as good up to 500 updates (DiLoCo, Douillard et al. 2023)"),
    "elastic": (64, "4 workers are as good up to 64 updates (EASGD, Zhang et al. 2015)"),
}
"""Up to so many updates between meetings an outer optimizer is said to need no more steps."""


def _measured(row: str, every: int) -> float:
    """Between and beyond what was measured: a power of `every`."""
    known = sorted(MEASURED[row].items())
    pairs = [pair for pair in itertools.pairwise(known) if every > pair[0][0]]
    (least, below), (most, above) = pairs[-1] if pairs else (known[0], known[1])
    return max(1.0, below * (above / below) ** (math.log(max(every, 1) / least) / math.log(most / least)))


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Technique):
    name: ClassVar[str] = "local_steps"
    phase: ClassVar[str] = "optimizer"
    exactness: ClassVar[Exactness] = "approximate"
    axis: ClassVar[str] = "local"
    closeness: ClassVar[int] = -1
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True
    keeps_islands: ClassVar[bool] = True

    size: int
    """Islands."""
    every: int = 32
    """Updates from one meeting to the next."""
    outer: Literal["nesterov", "average", "elastic"] = "nesterov"
    """How the shared model moves."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    pull: float = 0.25
    """Share of the way to the centre that an elastic island moves."""
    push: float = 0.25
    """Share of the way to each island that the centre moves."""
    fragments: int = 1
    """Parts of the layers that meet one after the other within a period."""
    overlap: int = 0
    """Updates between the beginning of a meeting and its use."""
    blend: float = 1.0
    """Share of the way to the shared model that islands move in a meeting."""

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        """Islands of whole nodes: within them links are fast."""
        sizes = tuple(size for size in axis_sizes(cluster) if cluster.num_nodes % size == 0)
        every, momentum = Choice("every", (16, 64, 256)), Choice("outer_momentum", (0.5,))
        return (Axis("size", sizes), every, momentum) if sizes else ()

    @property
    def steps_factor(self) -> StepsFactor:
        """From one, where publications say that a period is as good, to what a short run here needed."""
        row = self.outer if self.outer != "nesterov" or self.outer_momentum < 0.7 else "nesterov 0.9"
        published, words = PUBLISHED[self.outer]
        high, known = _measured(row, self.every), max(MEASURED[row])
        low = high / min(high, _measured(row, published)) if self.every > published else 1.0
        basis = "with" if self.every in MEASURED[row] else "extended to" if self.every > known else "interpolated to"
        source = f"low: {words}; high: {MEASURED_IN} {basis} every = {self.every}; mid: their geometric mean"
        return StepsFactor(low, math.sqrt(low * high), high, source)

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "parameters of two versions cannot meet those of other islands."
        yield (given.size > 1) & given.overlaps_steps, self.problem(what, "Use another schedule.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile), *self._setting_problems()]
        if any(site.kind == "statistics" for layer in profile.layers for site in layer.sites):
            what = f"batch norms of {profile.name} would keep statistics of each island apart."
            problems.append(self.problem(what, "Use replicate, or a model without batch norms."))
        for other in plan.techniques:
            if other.hosts_states:
                what = f"{other.name} has parameters in host memory, where islands cannot exchange them."
                problems.append(self.problem(what, f"Leave out {other.name}, or this technique."))
        return tuple(problems)

    def _setting_problems(self) -> Iterator[Problem]:
        if not 1 <= self.every <= MOST_STEPS:
            yield self.problem(f"every is {self.every}.", f"Use 1 to {MOST_STEPS} updates.")
        for name, least, most in (
            ("outer_lr", 0.0, 10.0),
            ("outer_momentum", 0.0, 1.0),
            ("pull", 0.0, 0.5),
            ("push", 0.0, 0.5),
            ("blend", 0.0, 1.0),
        ):
            value = getattr(self, name)
            above, below = name in ("outer_lr", "blend", "push"), name == "outer_momentum"
            if not least <= value <= most or (value == least and above) or (value == most and below):
                fix = f"Use {'more than ' * above}{least:g} to {'less than ' * below}{most:g}."
                yield self.problem(f"{name} is {value:g}.", fix)
        if self.outer == "elastic":
            if self.pull + self.size * self.push >= 2:
                what = (
                    f"pull + {self.size} islands x push is {self.pull + self.size * self.push:g}: islands and centre "
                )
                yield self.problem(f"{what}would pass each other by more than they were apart.", "Use less than 2.")
            if self.overlap or self.blend != 1:
                what = "an elastic centre moves at once, and pull says how far islands go."
                yield self.problem(what, "Use overlap = 0 and blend = 1.")
        if not 1 <= self.fragments <= max(self.every, 1):
            what = f"fragments is {self.fragments}, with {self.every} updates in which to meet one after the other."
            yield self.problem(what, "Use 1 to every.")
        if not 0 <= self.overlap < max(self.every, 1):
            what = f"overlap is {self.overlap}, and a layer meets again after {self.every}."
            yield self.problem(what, "Use 0 or more, and less than every.")

    def warnings_for(self, steps: int) -> tuple[str, ...]:
        if self.size == 1 or self.every <= steps:
            return ()
        return (
            f"{self.name}: every is {self.every}, and the run has {steps} steps: islands meet after the last alone.",
        )

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.is_elementwise:
            return ()
        what = "this optimizer looks at whole parameters of all ranks at once, and islands have their own."
        return (Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out."),)

    def price(self, work: Work) -> Work:
        coding, is_used = work.facts.coding, (work.size(self.axis) > 1) * 1
        work = self.forbid(work.with_facts(coding=None, agreement=(self.axis, self.name)))

        def size_of(slot: ParameterSlot) -> Num:
            return slot.stored(slot.shards) * slot.element_bytes

        common: dict[str, Any] = {"origin": self.name}
        copies = 1 + (self.outer == "nesterov") + (self.overlap > 0)
        # While one fragment's sum is under way those of others may begin: never more than all of a period.
        window = min(1.0, self.fragments * self.overlap / self.every)
        # Differences are made and joined; the sum, the shared model and the island's are read and written.
        passes = 5 + 2 * copies + 2
        tasks: list[Any] = []
        residents = []
        for layer, repeat, size in work.units(size_of, trained=True):
            message: dict[str, Any] = {"layer": layer, "kind": "all_reduce", "axis": self.axis, "bytes": size}
            message |= {"repeat": repeat / self.every, "per_step": True, "phase": "backward"}
            if coding is None:
                tasks.append(Collective(**message, **common, hidden=self.overlap > 0, window=window))
            made: dict[str, Any] = {"kind": "memory", "role": "optimizer", "phase": "step", "name": self.name}
            made |= {"repeat": repeat * is_used / self.every, "moved_bytes": passes * size, "kernels": float(passes)}
            tasks.append(Compute(**made, **common, layer=layer))
            kept: dict[str, Any] = {"category": "buffers", "life": "always", "layer": layer}
            residents.append(Resident(**kept, **common, repeat=repeat, bytes=copies * size * is_used))
        if coding is not None:
            place = lambda slot: slot.shards, lambda slot: slot.element_bytes
            work = coding.priced(work, self.axis, *place, self.every, self.name)
        return work.with_tasks(*tasks).with_residents(*residents)

    def apply(self, build: Build) -> None:
        if self.size > 1:
            build.loss_scale *= self.size  # an island's gradient is that of its own mean loss
            coding, build.coding = build.coding, None
            build.at("step", lambda build: self._install(build, coding))

    def _install(self, build: Build, coding: Any) -> None:
        from meshwright.ops.local_averages import LocalAverages

        build.add_exchange(self, LocalAverages(build, self, coding))
