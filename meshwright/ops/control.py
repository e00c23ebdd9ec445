"""Small JSON values between ranks, over the control group. No pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def share_json(group: dist.ProcessGroup | None, value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if group is None:
        return value
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, 0, group=group)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=group)
    return json.loads(bytes(data.tolist()))


def gather_json(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank."""
    if group is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    count = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    most = int(max(sizes))
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: data.numel()] = data
    parts = [torch.empty(most, dtype=torch.uint8) for _ in range(count)]
    dist.all_gather(parts, padded, group=group)
    pairs = zip(parts, sizes, strict=True)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in pairs]
