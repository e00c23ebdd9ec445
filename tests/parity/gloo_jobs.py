"""What ranks run to compare the collectives made of messages with gloo's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.ops.collectives import all_gather, reduce_scatter
from meshwright.ops.traffic import TrafficRecorder
from meshwright.verify import parity


def compare_job(*, sizes: list[int], rank: int, num_ranks: int, rendezvous: str) -> dict[str, Any]:
    """Largest difference over all sizes (elements of a part), and what a recorder saw."""
    parity.enter(rank, num_ranks, rendezvous)
    group = dist.group.WORLD
    assert group is not None
    worst, recorder = 0.0, TrafficRecorder({group.group_name: "all"})
    generator = torch.Generator().manual_seed(rank)
    for size in sizes:
        whole = torch.randn(num_ranks * size, generator=generator, dtype=torch.float64)
        part = torch.empty(size, dtype=torch.float64)
        gathered = torch.empty_like(whole)
        with recorder:
            reduce_scatter(part, whole, group)
            all_gather(gathered, part, group)
        total = whole.clone()
        dist.all_reduce(total)
        worst = max(worst, float((gathered - total).abs().max()) if size else 0.0)
    parity.leave()
    seen = sorted([*key, count] for key, count in recorder.traffic.items())
    return {"worst": worst, "seen": seen, "kinds": ["all_gather", "reduce_scatter"]}
