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
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.ops.device_mesh import Mesh

Traffic = Counter[tuple[str, str, int]]
"""(kind, axis or `fsdp/8`: 8 neighbours of it, bytes of the whole message) -> how often."""

_SPLITS = 3, 4
"""Positions in an all_to_all of the lengths of what each rank takes and gives; empty where they are equal."""

RING_TAG = 16
"""Messages with this tag or a higher one go round a ring; others are between stages."""


_RESULT = -1
_KINDS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "meshwright::push": ("send", 0),
    "meshwright::pull": ("send", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _RESULT),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _RESULT),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "meshwright::all_gather": ("all_gather", 0),
    "meshwright::reduce_scatter": ("reduce_scatter", 1),
}
"""Operator -> kind, and which argument is the tensor (or tensors) that holds the whole message, or the result."""


def _group_name(args: Any) -> str:
    """The last text among them; c10d's operators take the group itself, before any other object."""
    texts = [each for each in args if isinstance(each, str)]
    if texts:
        return texts[-1]
    group = next(each for each in args if isinstance(each, torch.ScriptObject | dist.ProcessGroup))
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).group_name


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
        if any(kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        if composite := COMPOSITE_OPS.get(name.removeprefix("meshwright::")):
            with self:
                return composite(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if name in _KINDS:
            kind, position = _KINDS[name]
            if kind == "send" and args[-1] >= RING_TAG:
                kind = "ring"
            is_uneven = name == "c10d::alltoall_base_" and any(args[place] for place in _SPLITS)
            whole = tree_leaves(result if position == _RESULT else args[position])
            self._add(kind, _group_name(args), sum(tensor.nbytes for tensor in whole), is_uneven)
        return result

    def _add(self, kind: str, group_name: str, size: int, is_uneven: bool) -> None:
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
