"""Watches every collective of a step: kind, axis, bytes. Tests and `mw check` hold `price` equal to it.

A dispatch mode sees what DDP-like hooks, FSDP2, DTensor and our own code send, byte for byte, because all of it
ends in `c10d` or `_c10d_functional` operators. It declines tensor subclasses, so collectives issued inside their
operators are seen too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Traffic = Counter[tuple[str, str, int]]
"""(kind, axis, bytes of the whole message) -> how often."""


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0


# operator -> (kind, position of the tensor(s) holding the whole message)
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "allgather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "send": ("send", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Recorder(TorchDispatchMode):
    def __init__(self, axis_of_group: Mapping[str, str]):
        super().__init__()
        self.axis_of_group = axis_of_group
        self.traffic: Traffic = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space == "c10d" and name in _C10D:
            kind, position = _C10D[name]
            group = next(a for a in args if isinstance(a, torch.ScriptObject | dist.ProcessGroup))
            if isinstance(group, torch.ScriptObject) and not isinstance(group, dist.ProcessGroup):
                group = dist.ProcessGroup.unbox(group)
            self._add(kind, group.group_name, _bytes(args[position]))
        elif space == "_c10d_functional" and name in _FUNCTIONAL:
            kind = _FUNCTIONAL[name]
            whole = args[0] if kind in ("all_reduce", "reduce_scatter", "all_to_all") else result
            group_name = next(a for a in reversed(args) if isinstance(a, str))
            self._add(kind, group_name, _bytes(whole))
        return result

    def _add(self, kind: str, group_name: str, size: int) -> None:
        # Groups that belong to no axis carry the loop's own control traffic.
        axis = self.axis_of_group.get(group_name)
        if axis is not None:
            self.traffic[kind, axis, size] += 1
