"""Two versions of the weights: the newest, and the one before it that microbatches under way still need.

        update 1           update 2           update 3
even    W0 (kept)          W2 (made from W1)  W2 (kept)
odd     W1 (made from W0)  W1 (kept)          W3 (made from W2)

A version lives in one piece of memory from its update to its end, and parameters point to the one in use. (Autograd
keeps some weights by their storage and others by the parameter, so neither may change under a backward to come.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Versions:
    def __init__(self, parameters: Sequence[Tensor], values: Sequence[Tensor]):
        """`values`: what the optimizer updates, the memory of `parameters`."""
        self.parameters, self.values = parameters, values
        first = [parameter.data for parameter in parameters]
        self.memory = (first, [torch.empty_like(each) for each in first])
        self.newest = self.in_use = 0
        """Updates made so far; the version that parameters point to."""

    def use(self, version: int) -> None:
        """Before anything reads the parameters."""
        assert self.newest - 1 <= version <= self.newest, f"version {version} is gone or to come, {self.newest} is here"
        if version != self.in_use:
            _point(self.parameters, self.memory[version % 2])
            self.in_use = version

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within it, the optimizer's values are the next version, for now equal to the newest. The older one goes."""
        latest, following = (self.memory[(self.newest + more) % 2] for more in (0, 1))
        if latest:
            torch._foreach_copy_(following, latest)
        _point(self.values, following)
        # They count changes together with the parameters: a backward to come would believe that its weights changed.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.values)):
            yield
        self.newest += 1


def _point(tensors: Sequence[Tensor], memory: Sequence[Tensor]) -> None:
    for tensor, place in zip(tensors, memory, strict=True):
        tensor.data = place
