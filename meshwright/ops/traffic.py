"""Watches every collective of a step: kind, axis, bytes. Tests and `mw check` hold `price` equal to it.

A dispatch mode sees what DDP-like hooks, FSDP2, DTensor and our own code send, byte for byte, because all of it
ends in `c10d` or `_c10d_functional` operators, or in one of ours that stands for its messages. It declines tensor
subclasses, so collectives issued inside their operators are seen too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.ops.device_mesh import Mesh

Traffic = Counter[tuple[str, str, int]]
"""(kind, axis, bytes of the whole message) -> how often."""

_SPLITS = 3, 4
"""Positions in an all_to_all of the lengths of what each rank takes and gives; empty where they are equal."""

RING_TAG = 16
"""Messages with this tag or a higher one go round a ring; others are between stages."""


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
# Ours (`ops/collectives.py`): (tensor holding the whole message)
_OURS = {"all_gather": 0, "reduce_scatter": 1}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}

COMPOSITE_OPS: dict[str, Callable[..., Any]] = {}
"""Operators of ours that send several messages, and the functions that they run."""


class TrafficRecorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, axis_of_group: Mapping[str, str]):
        super().__init__()
        self.axis_of_group = axis_of_group
        self.traffic: Traffic = Counter()
        self.uneven: dict[str, list[int]] = {}
        """By axis, bytes of each all_to_all whose parts are not equal: the data decides how long they are."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks run as they are compiled, and what they send is seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space == "meshwright" and name in COMPOSITE_OPS:
            with self:
                return COMPOSITE_OPS[name](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if space == "c10d" and name in _C10D:
            kind, position = _C10D[name]
            if kind == "send" and args[-1] >= RING_TAG:
                kind = "ring"
            group = next(a for a in args if isinstance(a, torch.ScriptObject | dist.ProcessGroup))
            if isinstance(group, torch.ScriptObject) and not isinstance(group, dist.ProcessGroup):
                group = dist.ProcessGroup.unbox(group)
            is_uneven = name == "alltoall_base_" and any(args[place] for place in _SPLITS)
            self._add(kind, group.group_name, _bytes(args[position]), is_uneven)
        elif space == "_c10d_functional" and name in _FUNCTIONAL:
            kind = _FUNCTIONAL[name]
            whole = args[0] if kind in ("all_reduce", "reduce_scatter", "all_to_all") else result
            group_name = next(a for a in reversed(args) if isinstance(a, str))
            self._add(kind, group_name, _bytes(whole))
        elif space == "meshwright" and name in _OURS:
            self._add(name, args[2], _bytes(args[_OURS[name]]))
        return result

    def _add(self, kind: str, group_name: str, size: int, is_uneven: bool = False) -> None:
        # Groups that belong to no axis carry the loop's own control traffic.
        axis = self.axis_of_group.get(group_name)
        if axis is not None and is_uneven:
            self.uneven.setdefault(axis, []).append(size)
        elif axis is not None:
            self.traffic[kind, axis, size] += 1

    def evened(self, mesh: Mesh) -> Traffic:
        """All traffic; an uneven message counts as its mean over the axis, since what one rank has more another has
        less. All ranks call it together."""
        traffic = self.traffic.copy()
        for axis, sizes in sorted(self.uneven.items()):
            total = torch.tensor(sizes, device=mesh.device)
            dist.all_reduce(total, group=mesh.group(axis))
            for size in total.tolist():
                traffic["all_to_all", axis, round(size / mesh.size(axis))] += 1
        return traffic
