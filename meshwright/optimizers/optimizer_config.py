"""An optimizer and its rates, as a run file says them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.core.errors import MeshwrightError, Problem, nearest, raise_problems, wrong_numbers
from meshwright.optimizers.rule import Kind, UpdateRule, rules

if TYPE_CHECKING:
    from meshwright.core.plan import Plan
    from meshwright.core.work import Collective, Num, ParameterSlot, Work

_OWN: Any = None
"""Stands for the optimizer's own value until the constructor puts it there."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with a rate or decay of their own."""

    match: str | tuple[str, ...]
    """Names with * and ?, such as "embed.*"."""
    lr_scale: float = 1.0
    weight_decay: float | None = None
    """None: as for the others, matrices only; a number: for all that match."""

    def __post_init__(self) -> None:
        values = {"lr_scale": self.lr_scale, "weight_decay": self.weight_decay or 0.0}
        problems = list(wrong_numbers(values, "zero or more"))
        if not self.patterns or not all(self.patterns):
            fix = 'Write names with * and ?, such as "embed.*".'
            problems.append(Problem(where="match", what=f"is {self.match!r}.", fix=fix))
        raise_problems(problems)

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else tuple(self.match)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its rates: `[train.optimizer]` of a run file."""

    name: str = "adamw"
    """A file of `optimizers/rules`."""
    lr: float = 3e-4
    """Full rate. Adafactor multiplies it by a parameter's own size; LARS by 0.001 of it over its gradient's."""
    weight_decay: float = _OWN
    """Matrices only; norms and biases are left alone. Left out: 0.1; row-wise Adagrad 0."""
    beta1: float = 0.9
    beta2: float = _OWN
    """Left out: 0.95; Lion 0.99, LAMB 0.999. Adafactor's grows with the steps and is not set."""
    epsilon: float = _OWN
    """Left out: 1e-8; LAMB 1e-6, Adafactor (added to squares) 1e-30."""
    momentum: float = _OWN
    """Of SGD, LARS (left out: 0.9) and Muon (0.95)."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    warmup: int = 0
    """Steps from zero to the full rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How the rate falls after the warm-up; `wsd` (warm-up, stable, decay) keeps it until the last steps."""
    final_fraction: float = 0.1
    """Share of the rate that a schedule ends at."""
    decay_fraction: float = 0.2
    """WSD: share of the steps, at the end, in which the rate falls."""
    groups: tuple[ParameterGroup, ...] = ()
    """The first that matches a parameter counts."""

    def __post_init__(self) -> None:
        if self.name not in rules():
            fix = nearest(str(self.name), rules())
            raise MeshwrightError([Problem(where="name", what=f"{self.name!r} is not an optimizer.", fix=fix)])
        for name in ("beta2", "epsilon", "momentum", "weight_decay"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.rule, name))
        names = ("lr", "weight_decay", "beta1", "beta2", "epsilon", "momentum", "clip", "warmup")
        problems = list(wrong_numbers({name: getattr(self, name) for name in names}, "zero or more"))
        averages = {name: getattr(self, name) for name in ("beta1", "beta2", "momentum")}
        problems += wrong_numbers(averages, "less than 1", lambda value: value < 1)
        shares = {name: getattr(self, name) for name in ("final_fraction", "decay_fraction")}
        problems += wrong_numbers(shares, "0 to 1", lambda value: 0 <= value <= 1)
        if self.schedule not in _FALLS:
            problems.append(
                Problem(where="schedule", what=f"is {self.schedule!r}.", fix=nearest(str(self.schedule), _FALLS))
            )
        raise_problems(problems)

    @property
    def rule(self) -> type[UpdateRule]:
        return rules()[self.name]

    @property
    def kind(self) -> Kind:
        return self.rule.kind

    @property
    def is_elementwise(self) -> bool:
        return self.kind == "elementwise"

    @property
    def has_low_bit_form(self) -> bool:
        return self.rule.has_low_bit_form

    @property
    def takes_rows(self) -> bool:
        return self.rule.takes_rows(self)

    @property
    def state_bytes(self) -> int:
        """Per parameter element in float32, at most: some remember less of matrices."""
        return 4 * self.rule.num_states(self)

    def state_bytes_of(self, slot: ParameterSlot) -> Num:
        """Bytes the largest rank remembers for what it stores of a parameter."""
        return 0 if slot.frozen else self.rule.state_bytes_of(self, slot)

    def collectives(self, work: Work) -> tuple[Collective, ...]:
        """Messages of a step's update."""
        return self.rule.collectives(work)

    def problems_with(self, plan: Plan) -> list[Problem]:
        """Why it cannot update what a plan trains."""
        problems = [problem for technique in plan.techniques for problem in technique.refused_optimizer(self)]
        if plan.overlaps_steps and self.clip:
            what = f"is {self.clip}: the plan's steps overlap, so a stage updates before the whole gradient is known."
            problems.append(Problem(where="optimizer.clip", what=what, fix="Use clip = 0, or another schedule."))
        alone = [technique.name for technique in plan.techniques if technique.updates_each_alone]
        if (plan.overlaps_steps or alone) and self.kind != "elementwise":
            reason = f"{alone[0]} updates them one by one" if alone else "the plan's steps overlap"
            what = f"{self.name} looks at whole parameters of all stages at once; {reason}."
            others = ", ".join(name for name, rule in rules().items() if rule.kind == "elementwise")
            fix = f"Use {others}, or {'other settings' if alone else 'another schedule'}."
            problems.append(Problem(where="optimizer.name", what=what, fix=fix))
        return problems

    def lr_at(self, step: int, num_steps: int) -> float:
        """Linear warm-up to `lr`, then what the schedule leaves of it, down to `lr * final_fraction`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        start = self.warmup
        if self.schedule == "wsd":
            falling = round(self.decay_fraction * num_steps) or int(self.decay_fraction > 0)
            start = max(start, num_steps - falling)
        progress = min(1.0, max(0, step - start) / max(1, num_steps - start))
        return self.lr * (self.final_fraction + (1 - self.final_fraction) * _FALLS[self.schedule](progress))


_FALLS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
"""Share of the way from `lr` to its final fraction that is left."""
