"""An optimizer over a rank's pieces, clipping by the exact global norm."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.build import Build
from meshwright.core.errors import Problem, raise_problems
from meshwright.ops.collectives import gather_json
from meshwright.ops.fsdp import local
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece, RuleMaker, squares, widen_gradients, write_copies

__all__ = ["Optimizer", "OptimizerConfig"]


class Optimizer:
    """A rule on plain tensors that share their memory with this rank's pieces.

    Plain, because a sharded parameter is a DTensor: its dispatch costs more than the update of a small piece, and not
    every fused kernel has a rule for it.
    """

    def __init__(self, config: OptimizerConfig, build: Build):
        self.config, self.build = config, build
        trained = [(name, parameter) for name, parameter in build.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for _, parameter in trained]
        shapes: dict[str, tuple[int, ...]] = {}
        """Of every trained parameter of every stage, in one order; all ranks ask for them together."""
        if config.groups or config.kind != "elementwise":
            mine = {name: build.boxes[name].shape for name, _ in trained if build.owns(name)}
            every = [item for of_rank in gather_json(build.mesh.control, mine) for item in of_rank.items()]
            shapes = {name: tuple(shape) for name, shape in sorted(every)}
        problems = []
        for index, pattern in ((i, pattern) for i, group in enumerate(config.groups) for pattern in group.patterns):
            if not any(fnmatchcase(name, pattern) for name in shapes):
                what = f"{pattern!r} matches none of the {len(shapes)} parameters that train."
                close = get_close_matches(pattern, shapes, n=1, cutoff=0.0)  # hundreds of names are no help
                fix = f"There is {close[0]!r}, for example." if close else ""
                problems.append(Problem(where=f"optimizer.groups[{index}].match", what=what, fix=fix))
        raise_problems(problems)
        self.pieces = [_piece(config, build, name, local(parameter.detach())) for name, parameter in trained]
        make: RuleMaker = config.rule
        for wrap in build.rule_wraps:
            make = wrap(make)
        self.rule = make(config, self.pieces, build, shapes)
        is_narrow = all(piece.value.dtype == torch.float32 for piece in self.pieces)
        self.folds_divisor = self.rule.decides_on_device and is_narrow  # which is a float32 to the kernels
        self.num_steps = 0

    def zero_gradients(self) -> None:
        for tensor in (*self.parameters, *(piece.value for piece in self.pieces)):
            tensor.grad = None
        self.build.zero_filled.clear()

    def take_gradients(self) -> None:
        """After the backward passes: give each piece its part of the gradient."""
        with torch.no_grad():  # taking a piece out of a DTensor is then not itself recorded for autograd
            for parameter, piece in zip(self.parameters, self.pieces, strict=True):
                piece.value.grad = None if parameter.grad is None else local(parameter.grad)
            if not self.rule.takes_copies:
                widen_gradients(self.pieces)

    def unused(self) -> list[str]:
        """Parameters that took no part in this step's backward passes, on this rank."""
        pairs, updated = zip(self.parameters, self.pieces, strict=True), self.rule.updated
        return [
            piece.name
            for p, piece in pairs
            if (p.grad is None and piece.name not in updated) or id(p) in self.build.zero_filled
        ]

    def skip(self, names: Collection[str]) -> None:
        """Leave parameters out of this step, as torch does with those that have no gradient."""
        if taken := self.rule.updated.intersection(names):
            self.rule.leave_out(taken)
        for piece in self.pieces:
            if piece.name in names:
                piece.value.grad = None

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global gradient norm: pieces it answers for."""
        total = squares([], self.build.mesh.device).sum() + self.rule.squared_norm()
        mine = _numbers(piece for piece in self.pieces if piece.is_owned)
        for dtype in {gradient.dtype for gradient in mine}:  # in one launch each
            total = total + squares([each for each in mine if each.dtype == dtype], self.build.mesh.device).sum()
        return total

    @torch.no_grad()
    def update(self, lr: float, norm: Tensor | float, refused: Tensor | None = None) -> None:
        """Clip to the exact norm, undo the loss's scale and update; on the device alone where the norm is a tensor.

        `refused`: see `UpdateRule`.
        """
        clip, scaling = self.config.clip, self.build.loss_scaling
        factor: Tensor | float = 1.0 if scaling is None else 1.0 / scaling.scale
        if clip and isinstance(norm, Tensor):
            factor = (clip / norm).clamp(max=1.0) * factor
        elif clip and norm > clip:
            factor = clip / norm * factor
        self.rule.divisor, self.rule.refused = None, refused
        self.rule.factor = 1.0 if isinstance(factor, Tensor) else factor
        gradients = _numbers(self.pieces)
        if isinstance(factor, Tensor) or factor != 1.0:
            if self.folds_divisor:
                whole = torch.as_tensor(factor, dtype=torch.float64).reciprocal()
                self.rule.divisor = whole.to(self.build.mesh.device, torch.float32, non_blocking=True)
            elif gradients:  # a stage may have nothing to train
                torch._foreach_mul_(gradients, factor.to(gradients[0].dtype) if isinstance(factor, Tensor) else factor)
        self.num_steps += 1
        skipped = {piece.name for piece in self.pieces if piece.value.grad is None}
        skipped -= self.rule.updated | self.rule.later
        untouched = [piece.value for piece in self.pieces if piece.name in skipped]
        untouched += [kept.value for kept in self.rule.kept() if kept.name in skipped] if skipped else []
        before = [value.clone() for value in untouched]
        self.rule.step(lr, self.num_steps)
        for value, old in zip(untouched, before, strict=True):
            value.copy_(old)
        if not self.rule.takes_copies:
            write_copies(self.pieces)

    def state(self) -> Iterable[tuple[str, str, Tensor, Box]]:
        """(kind, parameter, this rank's piece, its place) of everything that updates and exchanges remember, but the
        count of steps."""
        exchanged = (kept for exchange in self.build.exchanges for kept in exchange.kept())
        for kept in chain((each._replace(kind=self.kind_here(each.kind)) for each in self.rule.kept()), exchanged):
            yield kept.kind, kept.name, kept.value, kept.box

    def owned_state(self) -> Iterable[tuple[str, str, Tensor, Box]]:
        """What this rank writes of it: every element is one rank's."""
        for kept in self.rule.kept():
            if kept.is_first and self.build.owns(kept.name):
                yield self.kind_here(kept.kind), kept.name, kept.value, kept.box
        for kept in (kept for exchange in self.build.exchanges for kept in exchange.kept() if kept.is_first):
            yield kept.kind, kept.name, kept.value, kept.box

    def kind_here(self, kind: str) -> str:
        """The name of what the update remembers on this rank's island: the first one's is that of a plan without."""
        return f"{kind}@{self.build.island}" if self.build.island else kind

    def reload(self) -> None:
        """Weights, as checkpoints have them, were changed by somebody else."""
        self.rule.reload()
        write_copies(self.pieces)

    def set_num_steps(self, count: int) -> None:
        self.num_steps = count
        self.rule.set_num_steps(count)


def _numbers(pieces: Iterable[ParameterPiece]) -> list[Tensor]:
    """The gradients that there are; of those of some rows only, these rows."""
    gradients = [piece.value.grad for piece in pieces if piece.value.grad is not None]
    return [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]


def _piece(config: OptimizerConfig, build: Build, name: str, value: Tensor) -> ParameterPiece:
    decay, scale = config.weight_decay if value.ndim >= 2 else 0.0, 1.0
    for group in config.groups:
        if any(fnmatchcase(name, pattern) for pattern in group.patterns):
            scale = group.lr_scale
            decay = decay if group.weight_decay is None else group.weight_decay
            break
    wide = build.wide.get(name)
    if wide is not None:
        wide.grad_dtype = None
    return ParameterPiece(
        name=name,
        value=value if wide is None else wide,
        copy=None if wide is None else value,
        box=build.boxes[name],
        is_owned=build.owns(name),
        lr_scale=scale,
        weight_decay=decay,
    )
