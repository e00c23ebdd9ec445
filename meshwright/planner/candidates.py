"""All candidates side by side, and what no compute dtype can beat."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.core.technique import PHASES
from meshwright.core.work import base_work
from meshwright.planner.bounds import Leaf
from meshwright.planner.priced_rows import SearchInputs
from meshwright.planner.settings import Dial
from meshwright.planner.space import Grid
from meshwright.simulator.pricing import ELEMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Columns over all candidates of all leaves."""

    leaf_of: np.ndarray
    index_of: np.ndarray
    least_seconds: np.ndarray
    least_bytes: np.ndarray
    base_bytes: np.ndarray
    runs: np.ndarray
    """Can run samples of this length, on this device, and is no other candidate over again."""
    num_new: int = 0
    parts: tuple[Candidates, ...] = ()

    @classmethod
    def none(cls) -> Candidates:
        names = ("leaf_of", "index_of", "least_seconds", "least_bytes", "base_bytes", "runs")
        return cls(**{name: np.zeros(0, dtype=bool if name == "runs" else float) for name in names})  # type: ignore[arg-type]

    def and_those_of(self, leaf: Leaf, at: int, takes: np.ndarray, slower: float) -> Candidates:
        count = leaf.grid.num_candidates
        more = Candidates(
            leaf_of=np.full(count, at),
            index_of=np.arange(count),
            least_seconds=leaf.least_seconds * slower,
            least_bytes=leaf.least_bytes,
            base_bytes=leaf.base_bytes,
            runs=np.isfinite(leaf.least_seconds) & takes,
            num_new=int(leaf.is_new.sum()),
        )
        return replace(self, parts=(*self.parts, more))

    def joined(self) -> Candidates:
        every = (self, *self.parts)
        names = ("leaf_of", "index_of", "least_seconds", "least_bytes", "base_bytes", "runs")
        columns: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in every]) for name in names}
        return Candidates(**columns, num_new=sum(each.num_new for each in every))

    def fits(self, memory_bytes: float) -> np.ndarray:
        return self.runs & (self.least_bytes <= memory_bytes)


def floors(asked: SearchInputs, grids: Sequence[Grid], dials: Sequence[Dial], sequence: int) -> list[tuple[str, float]]:
    """(compute dtype, no plan in it is faster than this), the fastest first: all flops at all devices' peak."""
    swaps = [dial for dial in dials if dial.kind.phase == PHASES[0]]
    dtypes = {"fp32"}
    sizes = {"batch": 1, "sequence": sequence, "microbatch": 1, "num_microbatches": 1}
    for ways in itertools.product(*([None, *dial.settings] for dial in swaps)):
        work = base_work(asked.profile, sizes, element_bytes=ELEMENT_BYTES, optimizer=asked.optimizer)
        for dial, settings in zip(swaps, ways, strict=True):
            work = work if settings is None else dial.example(settings).price(work)
        dtypes.add(work.facts.compute_dtype)
    batch = grids[0].batch if grids else 1
    flops = sum(
        batch * layer.repeat * (op.flops(1, sequence) + op.backward_flops(1, sequence))
        for layer in asked.profile.layers
        for op in layer.ops
        if op.kind in ("matmul", "attention") and op.dtype == "compute"
    )
    peaks = asked.cluster.device.flops_per_second
    found = [(dtype, flops / (peaks[dtype] * asked.cluster.num_devices)) for dtype in dtypes if dtype in peaks]
    return sorted(found, key=lambda each: (each[1], each[0]))
