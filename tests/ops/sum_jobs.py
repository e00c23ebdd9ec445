"""What ranks run to hold all-reduces made of sends against a sum in which no all-reduce takes part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.all_reduce import AllReduce
from meshwright.ops.collectives import all_reduce_by_sends
from meshwright.ops.traffic import TrafficRecorder
from meshwright.verify import parity

BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2**-5}
"""dtype -> largest error, relative to the sum of magnitudes."""


def sums_job(
    *, algorithms: list[tuple[Any, int]], cases: list[tuple[str, int]], counted: int, rank: int, num_ranks: int,
    rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """What was wrong, and the bytes of each message of this rank in sums of `counted` float64 numbers."""
    parity.enter(rank, num_ranks, rendezvous)
    group = dist.group.WORLD
    assert group is not None
    wrong, sent, compared = [], {}, 0
    for name, node_size in algorithms:
        algorithm = AllReduce(algorithm=name, node_size=node_size)
        generator = torch.Generator().manual_seed(rank)
        for dtype, length in cases:
            mine = torch.randn(length, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
            given, found = [torch.empty_like(mine) for _ in range(num_ranks)], mine.clone()
            dist.all_gather(given, mine)
            all_reduce_by_sends(found, group, algorithm)
            whole = torch.stack(given).double()
            error = (found.double() - whole.sum(0)).abs() / whole.abs().sum(0)
            results = [torch.empty_like(found) for _ in range(num_ranks)]
            dist.all_gather(results, found)
            what = f"{name}, nodes of {node_size}: {length} x {dtype} on {num_ranks} ranks"
            if not bool((error <= BOUNDS[dtype]).all()):
                wrong.append(f"{what}: off by {float(error.max()):.1e}")
            if any(not torch.equal(each.view(torch.uint8), found.view(torch.uint8)) for each in results):
                wrong.append(f"{what}: other bits on another rank")
            compared += length
        with TrafficRecorder({group.group_name: "all"}) as recorder:
            all_reduce_by_sends(torch.ones(counted, dtype=torch.float64), group, algorithm)
        assert {key[:2] for key in recorder.traffic} <= {("send", "all")}, recorder.traffic
        sent[f"{name} {node_size}"] = sorted(size for *_, size in recorder.traffic.elements())
    parity.leave()
    return {"wrong": wrong, "sent": sent, "compared": compared}
