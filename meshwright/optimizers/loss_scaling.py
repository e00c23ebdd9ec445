"""The factor of the loss that keeps small gradients within float16's range (Micikevicius et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.core.errors import MeshwrightError, Problem

GROWTH_STEPS = 2000
MOST_SKIPPED = 50
LARGEST_SCALE = 2.0**64


@dataclass(kw_only=True)
class LossScaling:
    """A power of two: halved after a step whose gradients overflowed, doubled after `GROWTH_STEPS` that did not.

    Every rank sees the same norm, so that all have the same scale.
    """

    scale: float = 2.0**16
    num_good: int = 0
    """Steps taken since the scale was last changed."""
    num_skipped: int = 0
    """Steps skipped since the last one that was taken."""

    def update(self, *, is_finite: bool) -> None:
        """A step is over. Raises where a lower scale no longer helps."""
        if is_finite:
            self.num_skipped, self.num_good = 0, self.num_good + 1
            if self.num_good >= GROWTH_STEPS:
                self.scale, self.num_good = min(2 * self.scale, LARGEST_SCALE), 0
            return
        self.scale, self.num_good, self.num_skipped = self.scale / 2, 0, self.num_skipped + 1
        if self.scale < 1 or self.num_skipped >= MOST_SKIPPED:
            steps = f"{self.num_skipped} step{'s' * (self.num_skipped > 1)} in a row"
            what = f"gradients were not finite in {steps}, and the loss scale has fallen to {self.scale:g}."
            fix = "Resume from the last checkpoint with a lower rate, clipping or another dtype than fp16."
            raise MeshwrightError([Problem(where="train", what=what, fix=fix)], exit_code=1)
