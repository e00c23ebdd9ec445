"""Collectives beyond torch's own: faster ones over gloo, messages of unequal length, and JSON values between ranks.

Gloo's own all_gather and reduce_scatter pass everything round a ring through one thread; messages to all others at once
are 2 to 4 times as fast at 32 MiB and no slower below (`benchmarks/gloo_collectives.py`), but for small gathers, which
stay gloo's. Each is an operator of ours, so that whoever watches the traffic sees the collective that is meant and none
of its messages. Anything but a CPU keeps its own collectives.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from meshwright.core.all_reduce import AllReduce

_SMALL_GATHER_BYTES = 1 << 16
"""Up to here gloo's own gather is as quick."""
_MOST_AT_ONCE_BYTES = 1 << 18
"""Up to here one all_to_all is quicker than a wait for each message, above all where cores are few."""

# Torch 2.13 has new names for them, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
_LIBRARY.define("all_gather(Tensor(a!) whole, Tensor part, str group) -> ()")
_LIBRARY.define("reduce_scatter(Tensor(a!) part, Tensor whole, str group) -> ()")


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    """The parts of all ranks, one after the other. `part` may lie at its place in `whole`; both are contiguous."""
    if _is_ours(whole) and whole.nbytes > _SMALL_GATHER_BYTES:
        torch.ops.meshwright.all_gather(whole, part, group.group_name)
    else:
        all_gather_single(whole, part, group=group)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """This rank's part of the sum of all ranks' `whole`; both are contiguous."""
    if _is_ours(whole):
        torch.ops.meshwright.reduce_scatter(part, whole, group.group_name)
    else:
        reduce_scatter_single(part, whole, group=group)


def _is_ours(tensor: Tensor) -> bool:
    # A compiler knows torch's collectives and can move them about.
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


@torch.library.impl(_LIBRARY, "all_gather", "CPU")
def _gather_from_all(whole: Tensor, part: Tensor, group_name: str) -> None:
    group = _resolve_process_group(group_name)
    rank, ways = group.rank(), group.size()
    places = whole.view(ways, -1)
    works = []
    for away in range(1, ways):
        works.append(group.send([part], (rank + away) % ways, 0))
        works.append(group.recv([places[rank - away]], (rank - away) % ways, 0))
    if places[rank].data_ptr() != part.data_ptr():
        places[rank].copy_(part.view(-1))
    for work in works:
        work.wait()


@torch.library.impl(_LIBRARY, "reduce_scatter", "CPU")
def _sum_of_all(part: Tensor, whole: Tensor, group_name: str) -> None:
    group = _resolve_process_group(group_name)
    if whole.nbytes <= _MOST_AT_ONCE_BYTES:
        arrived = torch.empty_like(whole)
        dist.all_to_all_single(arrived, whole, group=group)
        torch.sum(arrived.view(group.size(), -1), 0, out=part.view(-1))
        return
    # Summed as they arrive.
    part, rank, ways = part.view(-1), group.rank(), group.size()
    given = whole.view(ways, -1)
    arrived = torch.empty_like(given[1:])
    sent, expected = [], []
    for away in range(1, ways):
        sent.append(group.send([given[(rank + away) % ways]], (rank + away) % ways, 0))
        expected.append(group.recv([arrived[away - 1]], (rank - away) % ways, 0))
    total = given[rank]
    for work, piece in zip(expected, arrived, strict=True):
        work.wait()
        total = torch.add(total, piece, out=part)
    if ways == 1:
        part.copy_(total)
    for work in sent:
        work.wait()


@torch.no_grad()
def all_reduce_by_sends(flat: Tensor, group: dist.ProcessGroup, algorithm: AllReduce) -> None:
    """Sum a flat tensor over a group, in place. All ranks have the same bits afterwards."""
    rank = group.rank()
    for turn in algorithm.sends(group.size(), flat.numel()):
        sums, messages = [], []
        for transfer, part in turn:
            if transfer.source == rank:
                messages.append(dist.P2POp(dist.isend, flat[part], group=group, group_peer=transfer.target))
            elif transfer.target == rank:
                piece = arrived = flat[part]
                if transfer.adds:
                    arrived = torch.empty_like(piece)
                    sums.append((piece, arrived))
                messages.append(dist.P2POp(dist.irecv, arrived, group=group, group_peer=transfer.source))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        for piece, arrived in sums:  # which may have been sent, too
            piece.add_(arrived)


def swap(rows: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows, `given` to each peer in turn, for the rows `taken` from each."""
    received = rows.new_empty(sum(taken), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received


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
