"""Messages of unequal length between all ranks of an axis."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def swap(rows: Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows, `given` to each peer in turn, for the rows `taken` from each."""
    received = rows.new_empty(sum(taken), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), taken, given, group=group)
    return received
