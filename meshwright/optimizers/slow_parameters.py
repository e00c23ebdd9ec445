"""Parameters that are updated in some steps only: a rule of their own, which counts its own updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.core.build import Build, OptimizerState
from meshwright.optimizers.rule import (
    ParameterPiece,
    PieceRules,
    RuleMaker,
    Shapes,
    UpdateRule,
    widen_gradients,
    write_copies,
)

if TYPE_CHECKING:
    from torch import nn

    from meshwright.optimizers.optimizer_config import OptimizerConfig


class SlowParametersRule(PieceRules):
    """Slow parameters require a gradient, and are updated, in steps 1, 1 + every, 1 + 2 every, ...

    The number of a step is that of the optimizer's update, so nothing else has to be remembered.
    """

    rolls_back = True

    def __init__(
        self,
        slow: Mapping[str, nn.Parameter],
        trained_from: int,
        every: int,
        make: RuleMaker,
        config: OptimizerConfig,
        pieces: list[ParameterPiece],
        build: Build,
        shapes: Shapes,
    ):
        """`trained_from`: as in `Build`, in steps that leave `slow` parameters out."""
        super().__init__(config, pieces, build, shapes)
        self.slow, self.trained_from, self.every, self.build = slow, trained_from, every, build
        self.rules: dict[str, UpdateRule] = {
            which: make(config, [piece for piece in pieces if (piece.name in slow) == (which == "slow")], build, shapes)
            for which in ("fast", "slow")
        }
        self.decides_on_device = all(rule.decides_on_device for rule in self.rules.values())  # type: ignore[misc]
        self.rounds_states = any(rule.rounds_states for rule in self.rules.values())  # type: ignore[misc]
        self.takes_copies = True

    def is_due(self, count: int) -> bool:
        """Whether slow parameters are updated in a step."""
        return (count - 1) % self.every == 0

    def num_updates(self, count: int) -> int:
        """Of slow parameters, in the first `count` steps."""
        return -(-count // self.every)

    def begin(self, lr: float, count: int) -> None:
        is_due = self.is_due(count)
        for parameter in self.slow.values():
            parameter.requires_grad_(is_due)
        self.build.trained_from = -1 if is_due else self.trained_from
        # Neither unused, nor changed by `step`.
        self.updated = set() if is_due else set(self.slow)
        self.later = frozenset(self.updated)

    def step(self, lr: float, count: int) -> None:
        for which, rule in self.rules.items():
            if which == "slow" and not self.is_due(count):
                continue
            rule.divisor, rule.refused, rule.factor = self.divisor, self.refused, self.factor
            if not rule.takes_copies:
                widen_gradients(rule.pieces)
            rule.step(lr, self.num_updates(count) if which == "slow" else count)
            if not rule.takes_copies:
                write_copies(rule.pieces)

    def set_num_steps(self, count: int) -> None:
        self.rules["fast"].set_num_steps(count)
        self.rules["slow"].set_num_steps(self.num_updates(count))

    def restore(self, state: OptimizerState) -> None:
        self.rules["slow" if state.name in self.slow else "fast"].restore(state)
