"""Optimizer states in a few bits: what they take, and the rule that keeps them so. Importing it never imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from meshwright.core.work import Collective, Num, ParameterSlot, Updating, Work
from meshwright.optimizers.rule import (
    OptimizerState,
    ParameterPiece,
    RuleMaker,
    Shapes,
    UpdateRule,
    widen_gradients,
    write_copies,
)

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.core.build import Build
    from meshwright.optimizers.optimizer_config import OptimizerConfig

BLOCK = {8: 256, 4: 128}
"""Bits -> elements that share a scale."""
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class StateFormat:
    bits: int
    smallest: int
    """Elements that a piece must have for its states to be coded."""

    @property
    def block(self) -> int:
        return BLOCK[self.bits]

    def wrap(self, make: RuleMaker) -> RuleMaker:
        return partial(LowBitRule, self, make)


@dataclass(frozen=True, kw_only=True)
class LowBitPrice:
    """What an optimizer asks of a rank if its states have a format."""

    optimizer: Updating
    format: StateFormat

    @property
    def clip(self) -> float:
        return self.optimizer.clip

    @property
    def is_elementwise(self) -> bool:
        return self.optimizer.is_elementwise

    @property
    def has_low_bit_form(self) -> bool:
        return self.optimizer.has_low_bit_form

    def state_bytes_of(self, slot: ParameterSlot) -> Num:
        wide_bytes = self.optimizer.state_bytes_of(slot)
        if slot.frozen or len(slot.shape) < 2:
            return wide_bytes
        elements = slot.stored(slot.shards)
        is_coded = (elements >= self.format.smallest) * 1
        block_bytes = self.format.block * self.format.bits // 8 + SCALE_BYTES  # codes and their scale, for each moment
        return is_coded * 2 * -(-elements // self.format.block) * block_bytes + (1 - is_coded) * wide_bytes

    def collectives(self, work: Work) -> tuple[Collective, ...]:
        return self.optimizer.collectives(work)


class LowBitRule(UpdateRule):
    """AdamW with coded moments of large matrices; vectors and small matrices are the wrapped rule's.

    Checkpoints have the moments in float32, so that any plan can read them. Coded again in blocks that begin at the
    same elements, that is by a rank with the same pieces, they become the codes they were; otherwise they are rounded
    once more.
    """

    rounds_states = True

    def __init__(
        self,
        form: StateFormat,
        make: RuleMaker,
        config: OptimizerConfig,
        pieces: list[ParameterPiece],
        build: Build,
        shapes: Shapes,
    ):
        import torch

        from meshwright.ops.low_bit import LowBitMoments

        super().__init__(config, pieces, build, shapes)
        self.coded = {
            piece.name: (piece, LowBitMoments(piece.value, form.bits, form.block))
            for piece in pieces
            if piece.is_matrix and piece.value.numel() >= form.smallest
        }
        self.rest = make(config, [piece for piece in pieces if piece.name not in self.coded], build, shapes)
        device = pieces[0].value.device if pieces else build.mesh.device  # the host's, where it makes the updates
        self.whole = torch.ones(1, device=device)
        self.decides_on_device = self.rest.decides_on_device  # type: ignore[misc]
        self.takes_copies = True

    def step(self, lr: float, count: int) -> None:
        import torch

        from meshwright.ops.low_bit import AdamWStep, low_bit_adamw

        self.rest.divisor, self.rest.refused = self.divisor, self.refused
        if not self.rest.takes_copies:
            widen_gradients(self.rest.pieces)
        self.rest.step(lr, count)
        config, factor = self.config, self.whole
        if self.divisor is not None:
            factor = factor / self.divisor.to(factor.device)
        if self.refused is not None:
            is_refused = self.refused.to(factor.device) == 1.0
            factor = torch.where(is_refused, torch.nan, factor)  # by which nothing is changed
        for piece, moments in self.coded.values():
            if piece.value.grad is None:
                continue
            step = AdamWStep(
                lr=lr * piece.lr_scale,
                beta1=config.beta1,
                beta2=config.beta2,
                epsilon=config.epsilon,
                weight_decay=piece.weight_decay,
                count=count,
            )
            low_bit_adamw(piece.value, piece.value.grad, moments, step, factor)
        write_copies([*(piece for piece, _ in self.coded.values()), *self.rest.pieces])

    def kept(self) -> Iterator[OptimizerState]:
        """Decoded in host memory, one at a time: a device need not hold them beside the codes."""
        yield from self.rest.kept()
        for piece, moments in self.coded.values():
            yield OptimizerState("exp_avg", piece.name, moments.mean.decoded().cpu(), piece.box)
            yield OptimizerState("exp_avg_sq", piece.name, moments.root.decoded().square().cpu(), piece.box)

    def restore(self, state: OptimizerState) -> None:
        if state.name not in self.coded:
            self.rest.restore(state)
            return
        moments, value = self.coded[state.name][1], state.value.to(self.whole.device)
        if state.kind == "exp_avg":
            moments.mean.encode(value)
        else:
            moments.root.encode(value.sqrt())

    def storage(self) -> Iterator[Tensor]:
        yield from self.rest.storage()
        for _, moments in self.coded.values():
            yield from moments.tensors()

    def set_num_steps(self, count: int) -> None:
        self.rest.set_num_steps(count)
