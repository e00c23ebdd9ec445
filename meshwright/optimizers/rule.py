"""What every optimizer is given and what it must answer, in numbers (`step`) and in bytes (`state_bytes_of`).

Importing this file never imports torch: planning asks rules for their price.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from meshwright.core.box import Box
from meshwright.core.build import OptimizerState
from meshwright.core.errors import error_at

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from meshwright.core.build import Build
    from meshwright.core.work import Collective, Num, ParameterSlot, Work
    from meshwright.optimizers.optimizer_config import OptimizerConfig

Kind = Literal["elementwise", "norm", "whole_matrix"]
"""What an update needs of a parameter that is cut: only the piece, sums over all pieces, or the whole matrix."""
Shapes = Mapping[str, tuple[int, ...]]
"""Of every trained parameter on any rank, in one order; empty for elementwise updates."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPiece:
    """This rank's piece of a trained parameter, as a plain tensor; `value.grad` is its part of the gradient."""

    name: str
    value: Tensor
    box: Box
    is_owned: bool
    """This rank answers for it: exactly one of the replicas does."""
    lr_scale: float
    weight_decay: float
    copy: Tensor | None = None
    """What the model computes with, where that is a copy of the value in fewer bits; gradients have its dtype."""

    @property
    def is_matrix(self) -> bool:
        return self.value.ndim >= 2


class UpdateRule:
    """One optimizer over a rank's pieces: a file of `rules/`, which is its name."""

    kind: ClassVar[Kind] = "elementwise"
    states: ClassVar[int]
    """Values remembered for each element, at most."""
    beta2: ClassVar[float] = 0.95
    epsilon: ClassVar[float] = 1e-8
    momentum: ClassVar[float] = 0.9
    weight_decay: ClassVar[float] = 0.1
    """Where a run file does not say otherwise, as the three above."""
    batch_exponent: ClassVar[float | None] = None
    """The learning rate grows with the batch to this power, as `batch_source` has published."""
    batch_source: ClassVar[str] = ""
    needs_momentum: ClassVar[bool] = False
    """Without momentum nothing is remembered."""
    has_low_bit_form: ClassVar[bool] = False
    """`LowBitRule` has the same update on states in a few bits."""
    rounds_states: ClassVar[bool] = False
    """States lose digits between steps: an update is the rule's only in the first one."""
    decides_on_device: ClassVar[bool] = False
    """`step` obeys `divisor` and `refused`, so that the host need not know the norm before it."""
    rolls_back: ClassVar[bool] = False
    """Without a call of `step` nothing has changed, whatever was done with gradients in backward."""

    flat_states: ClassVar[tuple[str, ...]] = ()
    """What is remembered, where `flat_update` can update any elements of equal rate and decay at once."""

    @classmethod
    def flat_numbers(
        cls, config: OptimizerConfig, lr: float, decay: float, count: int, factor: float
    ) -> tuple[float, ...]:
        """What `flat_update` needs to know; `factor`: of the gradients."""
        raise NotImplementedError

    @staticmethod
    def flat_update(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Tensor) -> tuple[Tensor, ...]:
        """The new weight and states, as new tensors; for a compiler to make one pass of."""
        raise NotImplementedError

    @classmethod
    def num_states(cls, config: OptimizerConfig) -> int:
        """Values remembered for each element, at most."""
        return 0 if cls.needs_momentum and not config.momentum else cls.states

    @classmethod
    def state_bytes_of(cls, config: OptimizerConfig, slot: ParameterSlot) -> Num:
        """Bytes the largest rank remembers for what it stores of a parameter that is trained."""
        return slot.stored(slot.shards) * cls.num_states(config) * slot.state_width

    @classmethod
    def takes_rows(cls, config: OptimizerConfig) -> bool:
        """Whether a row without a gradient keeps its states, and its value but for decay: `step` then takes gradients
        of some rows only (coalesced sparse tensors)."""
        return False

    @classmethod
    def collectives(cls, work: Work) -> tuple[Collective, ...]:
        """Messages of a step's update over the axes that cut a parameter; sums of norms are the loop's own traffic."""
        return ()

    def __init__(self, config: OptimizerConfig, pieces: list[ParameterPiece], build: Build, shapes: Shapes):
        self.config, self.pieces = config, pieces
        self.values = [piece.value for piece in pieces]
        self.state: dict[str, list[Tensor]] = {}
        self.divisor: Tensor | None = None
        """Of the gradients in the next step; a float32 on their device."""
        self.refused: Tensor | None = None
        """Where this float32 is 1, the next step changes nothing."""
        self.updated: set[str] = set()
        """Parameters that backward has updated in this step, or taken the gradients of: those are gone."""
        self.takes_copies = False
        """`step` reads gradients in the dtype of `ParameterPiece.copy` and writes the copies; otherwise gradients are
        of the values' dtype, and whoever calls `step` writes the copies."""
        self.factor = 1.0
        """Of gradients that backward has taken, in the next step."""
        self.later: frozenset[str] = frozenset()
        """Parameters that are updated after `step` has returned; of those, it leaves alone what has no gradient."""
        self.on_gradient: list[Callable[[str, Tensor], None]] = []
        """Called with a parameter's name and gradient before backward uses it up, for whoever watches."""

    def begin(self, lr: float, count: int) -> None:
        """A step begins; gradients have been cleared."""

    def before_backward(self, loss: Tensor) -> None:
        """The next backward is that of a loss, zero but where the last layers are."""

    def squared_norm(self) -> Tensor | float:
        """Squared norm of gradients that backward has consumed already, of the pieces that this rank owns."""
        return 0.0

    def step(self, lr: float, count: int) -> None:
        """Update the pieces by their gradients; `count` is 1 in the first step."""
        raise NotImplementedError

    def direction_of_rows(self, at: int, rows: Tensor, gradient: Tensor) -> Tensor:
        """Of a rule that `takes_rows`: what some rows of a piece move against, at rate 1; their states are updated."""
        raise NotImplementedError

    def step_rows(self, lr: float) -> set[int]:
        """Update the pieces whose gradients are of some rows only, and let go of these gradients; which pieces. Decay,
        which all rows have, is a pass over the whole piece."""
        given = {at: v.grad for at, v in enumerate(self.values) if v.grad is not None and v.grad.is_sparse}
        for at, gradient in given.items():
            piece, value, rows = self.pieces[at], self.values[at], gradient.indices()[0]
            rate = lr * piece.lr_scale
            if piece.weight_decay:
                value.mul_(1 - rate * piece.weight_decay)
            numbers = gradient.values() if self.divisor is None else gradient.values() / self.divisor.to(value.device)
            value[rows] = value[rows].sub_(self.direction_of_rows(at, rows, numbers), alpha=rate)
            value.grad = None
        return set(given)

    def leave_out(self, names: Collection[str]) -> None:
        """Parameters among `updated` took no part in this step on any rank."""
        what = f"{min(names)} took no part in a step, and was updated before ranks could agree to leave it out."
        raise error_at("train", what, "Freeze it, or update after backward.")

    def finish(self) -> None:
        """Wait until all updates have been made."""

    def reload(self) -> None:
        """Weights, as checkpoints have them, were changed by somebody else."""

    def kept(self) -> Iterable[OptimizerState]:
        """What is remembered, for checkpoints: values of float32 that any other plan can read."""
        for kind, values in self.state.items():
            for piece, value in zip(self.pieces, values, strict=True):
                yield OptimizerState(kind, piece.name, value, piece.box)

    def restore(self, state: OptimizerState) -> None:
        """Take what was written into the value of one of `kept`; where that is the storage itself, it is done."""

    def storage(self) -> Iterable[Tensor]:
        """Everything it keeps in memory between steps."""
        return (state.value for state in self.kept())

    def set_num_steps(self, count: int) -> None:
        """Steps taken so far, for those that count by themselves."""

    def remember(self, *kinds: str) -> None:
        """One zero of each kind for every element; there from the start, so that a checkpoint can be read into it."""
        import torch

        for kind in kinds:
            self.state[kind] = [torch.zeros_like(value) for value in self.values]

    def gradients(self) -> list[Tensor]:
        """Zeros for a parameter that took no part in the step; whatever the rule makes of it is undone."""
        return [value.new_zeros(value.shape) if value.grad is None else value.grad for value in self.values]

    def rates(self, lr: float) -> list[float]:
        return [lr * piece.lr_scale for piece in self.pieces]

    def decay(self, lr: float) -> None:
        """Decoupled weight decay (Loshchilov & Hutter 2019)."""
        import torch

        kept = [1 - rate * piece.weight_decay for rate, piece in zip(self.rates(lr), self.pieces, strict=True)]
        torch._foreach_mul_(self.values, kept)


class PieceRules(UpdateRule):
    """A rule for each piece, by the name of its parameter."""

    rules: dict[str, UpdateRule]

    def kept(self) -> Iterable[OptimizerState]:
        return chain.from_iterable(rule.kept() for rule in self.rules.values())

    def restore(self, state: OptimizerState) -> None:
        self.rules[state.name].restore(state)

    def storage(self) -> Iterable[Tensor]:
        return chain.from_iterable(rule.storage() for rule in self.rules.values())

    def set_num_steps(self, count: int) -> None:
        for rule in self.rules.values():
            rule.set_num_steps(count)


class RuleMaker(Protocol):
    """What makes a rank's optimizer: the class of a rule, or what a technique puts in its place."""

    def __call__(
        self, config: OptimizerConfig, pieces: list[ParameterPiece], build: Build, shapes: Shapes, /
    ) -> UpdateRule: ...


def widen_gradients(pieces: list[ParameterPiece]) -> None:
    """In the dtype of the values, for a rule that does not take copies."""
    for piece in pieces:
        if piece.copy is not None and piece.value.grad is not None:
            piece.value.grad = piece.value.grad.to(piece.value.dtype)


def write_copies(pieces: list[ParameterPiece]) -> None:
    import torch

    pairs = [(piece.copy, piece.value) for piece in pieces if piece.copy is not None]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of squares of each, in float64."""
    import torch

    if not any(tensor.numel() for tensor in tensors):
        return torch.zeros(len(tensors), dtype=torch.float64, device=device)
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms = iter(torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], 2, dtype=wide))
    zero = torch.zeros((), dtype=wide, device=device)
    return torch.stack([next(norms).to(device) if tensor.numel() else zero for tensor in tensors]).double().square()


@cache
def rules() -> Mapping[str, type[UpdateRule]]:
    """Every optimizer by its name: one for each file of `rules/`."""
    package = importlib.import_module("meshwright.optimizers.rules")
    by_name = {}
    for each in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{each.name}")
        values = [value for value in vars(module).values() if isinstance(value, type)]
        own = [value for value in values if issubclass(value, UpdateRule) and value.__module__ == module.__name__]
        assert len(own) == 1, f"optimizers/rules/{each.name}.py must define exactly one rule, not {len(own)}"
        by_name[each.name] = own[0]
    return by_name
