"""Which stage holds which span of consecutive layers.

    loop   spans 0 1 2 3 4 5 on 3 stages:   stage 0: 0 3   stage 1: 1 4   stage 2: 2 5
    vee    (two chunks)                     stage 0: 0 5   stage 1: 1 4   stage 2: 2 3

With one chunk a stage's span has its own number. Numbers may be arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Places:
    num_stages: Any
    chunks: int = 1
    shape: Literal["loop", "vee"] = "loop"

    @property
    def num_spans(self) -> Any:
        return self.num_stages * self.chunks

    def span(self, stage: Any, chunk: Any) -> Any:
        at = chunk * self.num_stages + stage
        if self.shape == "vee":  # the second chunk goes back
            return at + (chunk == 1) * (self.num_stages - 1 - 2 * stage)
        return at

    def stage(self, span: Any) -> Any:
        if self.shape == "loop":
            return span % self.num_stages
        return span if span < self.num_stages else 2 * self.num_stages - 1 - span

    def chunk(self, span: Any) -> Any:
        return span // self.num_stages


class BlockSpan:
    """A run of blocks, first to last - 1, as the `at`-th span, and whether other stages are its neighbours."""

    def __init__(self, first: Any, last: Any, at: Any, places: Places):
        self.first, self.last = first, last
        self.is_first, self.is_last = (at == 0) * 1, (at == places.num_spans - 1) * 1
        turns = (at == places.num_stages - 1) * (places.shape == "vee")
        turned = (at == places.num_stages) * (places.shape == "vee")
        self.hands_on = (1 - self.is_last) * (1 - turns)
        self.hands_back = (1 - self.is_first) * (1 - turned)
