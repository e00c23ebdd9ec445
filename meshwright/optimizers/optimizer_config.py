"""An optimizer and its rates, as a run file says them; and what its update remembers and sends. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.core.errors import MeshwrightError, Problem, nearest

if TYPE_CHECKING:
    from meshwright.core.plan import Plan
    from meshwright.core.profile import Param
    from meshwright.core.work import Collective, Num, ParameterSlot, Work

Kind = Literal["elementwise", "norm", "whole_matrix"]
"""What an update needs of a parameter that is cut: only the piece, sums over all pieces, or the whole matrix."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is particular to an optimizer."""

    kind: Kind
    states: int
    """Values remembered for each element, at most."""
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.9


METHODS: Mapping[str, Method] = {
    "adamw": Method(kind="elementwise", states=2),
    "sgd": Method(kind="elementwise", states=1),
    "lion": Method(kind="elementwise", states=1, beta2=0.99),
    "lamb": Method(kind="norm", states=2, beta2=0.999, epsilon=1e-6),
    "lars": Method(kind="norm", states=1),
    "adafactor": Method(kind="norm", states=1, epsilon=1e-30),
    "muon": Method(kind="whole_matrix", states=2, momentum=0.95),
}
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
        problems = _below_zero(values)
        if not self.patterns or not all(self.patterns):
            fix = 'Write names with * and ?, such as "embed.*".'
            problems.append(Problem(where="match", what=f"is {self.match!r}.", fix=fix))
        if problems:
            raise MeshwrightError(problems)

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.match,) if isinstance(self.match, str) else tuple(self.match)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "sgd", "lamb", "lars", "lion", "muon", "adafactor"] = "adamw"
    lr: float = 3e-4
    """Full rate. Adafactor multiplies it by a parameter's own size; LARS by 0.001 of it over its gradient's."""
    weight_decay: float = 0.1
    """Matrices only; norms and biases are left alone."""
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
        if self.name not in METHODS:
            fix = nearest(str(self.name), METHODS)
            raise MeshwrightError([Problem(where="name", what=f"{self.name!r} is not an optimizer.", fix=fix)])
        for name in ("beta2", "epsilon", "momentum"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(METHODS[self.name], name))
        names = ("lr", "weight_decay", "beta1", "beta2", "epsilon", "momentum", "clip", "warmup")
        problems = _below_zero({name: getattr(self, name) for name in names})
        problems += [
            Problem(where=name, what=f"is {getattr(self, name)}.", fix="Use less than 1.")
            for name in ("beta1", "beta2", "momentum")
            if getattr(self, name) >= 1
        ]
        problems += [
            Problem(where=name, what=f"is {getattr(self, name)}.", fix="Use 0 to 1.")
            for name in ("final_fraction", "decay_fraction")
            if not 0 <= getattr(self, name) <= 1
        ]
        if self.schedule not in _FALLS:
            problems.append(
                Problem(where="schedule", what=f"is {self.schedule!r}.", fix=nearest(str(self.schedule), _FALLS))
            )
        if problems:
            raise MeshwrightError(problems)

    @property
    def kind(self) -> Kind:
        return METHODS[self.name].kind

    @property
    def state_bytes(self) -> int:
        """Per parameter element in float32: exact for updates that are not Muon's or Adafactor's, at most for those."""
        if self.name in ("sgd", "lars") and not self.momentum:
            return 0
        return 4 * METHODS[self.name].states

    def problems_with(self, plan: Plan) -> list[Problem]:
        """Why it cannot update what a plan trains."""
        problems = []
        if plan.overlaps_steps and self.clip:
            what = f"is {self.clip}: the plan's steps overlap, so a stage updates before the whole gradient is known."
            problems.append(Problem(where="optimizer.clip", what=what, fix="Use clip = 0, or another schedule."))
        if plan.overlaps_steps and self.kind != "elementwise":
            what = f"{self.name} looks at whole parameters of all stages at once; the plan's steps overlap."
            fix = f"Use {', '.join(n for n, m in METHODS.items() if m.kind == 'elementwise')}, or another schedule."
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

    def is_muons(self, shape: tuple[Num, ...], is_block: bool) -> bool:
        """Whether Muon itself updates a parameter: matrices of blocks, alone or (experts) stacked; AdamW the others."""
        return self.name == "muon" and is_block and len(shape) in (2, 3)

    def state_bytes_of(self, slot: ParameterSlot) -> Num:
        """Bytes the largest rank remembers for what it stores of a parameter."""
        if slot.frozen:
            return 0
        if self.name == "adafactor" and len(slot.shape) >= 2:
            first = -(-slot.shape[0] // slot.shards)
            *stack, rows, columns = (first, *slot.shape[1:])
            return math.prod(stack) * (rows + columns) * slot.element_bytes
        states = 1 if self.is_muons(slot.shape, slot.is_block) else self.state_bytes // 4
        return slot.stored(slot.shards) * states * slot.element_bytes

    def collectives(self, work: Work) -> tuple[Collective, ...]:
        """Messages of a step's update over the axes that cut a parameter; sums of norms are the loop's own traffic.

        Muon's matrices of one sort are dealt to the ranks of an axis, padded to equally many each and equal pieces:
        there as they were cut, first along the rows of the shards and then along the tensor's cut, and back.
        """
        if self.kind != "whole_matrix":
            return ()
        from meshwright.core.work import Collective

        fsdp, tp = work.size("fsdp"), work.size("tp")
        sizes: dict[str, Num] = {"fsdp": 0, "tp": 0}
        for count, slot in self._dealt(work):
            by_rows = len(slot.shape) == 2  # a stack of experts is sharded between its matrices
            piece = slot.stored(slot.shards) * slot.element_bytes
            if by_rows:
                sizes["fsdp"] = sizes["fsdp"] + _padded(count, fsdp) * piece
                count, piece = -(-count // fsdp), slot.elements * slot.element_bytes
            if slot.cut is not None and slot.cut >= len(slot.shape) - 2:
                sizes["tp"] = sizes["tp"] + _padded(count, tp) * piece
        return tuple(
            Collective(
                layer="",
                kind="all_to_all",
                axis=axis,
                phase="step",
                repeat=2 * ((size > 0) & (work.size(axis) > 1)),
                bytes=size,
                origin="optimizer",
                per_step=True,
            )
            for axis, size in sizes.items()
            if axis in work.sizes
        )

    def _dealt(self, work: Work) -> list[tuple[Num, ParameterSlot]]:
        """How many of each sort of Muon's matrices a stage has; equal parameters of different blocks are one sort."""
        params = {(layer.name, param.name): param for layer in work.profile.layers for param in layer.params}
        sorts: dict[Param, tuple[Num, ParameterSlot]] = {}
        for slot in work.slots:
            if self.is_muons(slot.shape, slot.is_block) and not (slot.frozen or slot.copy_of):
                param = params[slot.layer, slot.name]
                sorts[param] = (sorts.get(param, (0, slot))[0] + slot.repeat, slot)
        return list(sorts.values())


def _below_zero(values: Mapping[str, float]) -> list[Problem]:
    return [
        Problem(where=name, what=f"is {value}.", fix="Use zero or more.") for name, value in values.items() if value < 0
    ]


def _padded(count: Num, ways: Num) -> Num:
    """`count` things dealt to `ways` ranks, as many to each as the first gets."""
    return -(-count // ways) * ways


_FALLS: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
"""Share of the way from `lr` to its final fraction that is left."""
