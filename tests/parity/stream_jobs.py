"""What ranks of the pool run for `test_stream_weights`: copies between host and device, and memory of weights."""

from __future__ import annotations

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import rank_jobs
import torch

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.ops.host_memory import CopyLanes, HostShare
from meshwright.optimizers.update import OptimizerConfig
from meshwright.simulator.pricing import price
from meshwright.verify import parity

CPU = torch.device("cpu")


def copies_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, dtype: str, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Bytes copied in a step, as seen and as priced; bytes of the ring and of all other weights likewise."""
    gc.collect()  # what a job before has left is not this one's
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = rank_jobs.open_tiny(config, chosen.batch, sequence, dtype)
    shared, empty = [], HostShare.empty

    def shared_empty(self: HostShare, size: int, dtype: torch.dtype) -> torch.Tensor:
        shared.append(size * dtype.itemsize)
        return empty(self, size, dtype)

    HostShare.empty = shared_empty  # type: ignore[method-assign]
    try:
        session = parity.open_session(chosen, opened, rates, dtype=dtype, device=CPU)
    finally:
        HostShare.empty = empty  # type: ignore[method-assign]
    build, seen = session.build, []
    plain = CopyLanes.copy_in, CopyLanes.copy_out

    def copy_in(self: CopyLanes, target: torch.Tensor, source: torch.Tensor, **given: Any) -> Any:
        seen.append(("in", source.nbytes))
        return plain[0](self, target, source, **given)

    def copy_out(self: CopyLanes, target: torch.Tensor, source: torch.Tensor, **given: Any) -> Any:
        seen.append(("out", source.nbytes))
        return plain[1](self, target, source, **given)

    CopyLanes.copy_in, CopyLanes.copy_out = copy_in, copy_out  # type: ignore[method-assign]
    held = []
    for block in build.model.block_modules():
        block.register_forward_hook(lambda *_: held.append(_bytes_held(build)))
    try:
        for step in range(2):
            seen.clear()
            session.loop.feed(parity.own_samples(session, samples, step), rates.lr)
            session.loop.flush()
    finally:
        CopyLanes.copy_in, CopyLanes.copy_out = plain  # type: ignore[method-assign]
    stage = 0 if build.wire is None else build.mesh.index(build.wire.axis)
    size = build.dtype.itemsize
    work = price(build.profile, chosen, sequence=sequence, stage=stage, optimizer=rates, element_bytes=size)
    priced = Counter[str]()
    for task in work.copies:
        times = int(task.repeat) * (1 if task.per_step else chosen.num_microbatches)
        priced["in" if task.is_inward else "out"] += times * int(task.bytes)
    ring = [item for item in work.residents if item.origin == "stream_weights"]
    lasting = [item for item in work.residents if item.category == "parameters" and item.tier == "device"]
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:meshwright" in line]
    landed = sum(states.landing.nbytes for states in session.loop.optimizer.rule.units)
    on_host = [item for item in work.residents if item.tier == "host"]
    parity.leave()
    return {
        "shared_files": sorted({int(fields[4]) for fields in mapped}),
        "shared_bytes": sum(shared),
        "landed": landed,
        "host": sum(int(item.bytes * item.repeat) for item in on_host),
        "seen": {way: sum(size for each, size in seen if each == way) for way in ("in", "out")},
        "priced": dict(priced),
        "held": max(held),
        "ring": sum(int(item.bytes * item.repeat) for item in ring if item.tier == "device"),
        "lasting": sum(int(item.bytes * item.repeat) for item in lasting),
    }


def _bytes_held(build: Any) -> int:
    """Behind all parameters, each storage once, but for those of one element."""
    storages = [parameter.untyped_storage() for parameter in build.model.parameters()]
    sizes = {storage._cdata: storage.nbytes() for storage in storages}
    return sum(size for size in sizes.values() if size > 8)
