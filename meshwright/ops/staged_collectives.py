"""Several ranks on one GPU: collectives of its tensors, staged through the host and carried by gloo.

NCCL refuses two ranks on one device, and gloo takes a GPU's tensors in some collectives only. Every collective, whether
torch's own code or ours calls it, ends in an operator of `c10d`; here each operator that we use is implemented for such
tensors. Inputs are copied to the host when the operator is called, after all that their stream was given before;
outputs are copied back by `wait`, on the stream that waits, so that a result read too early is wrong, as with NCCL.

This is for tests of plans on the one GPU at hand (`make gpu-test`). It is slow: the host waits for every input.
"""

from __future__ import annotations

import functools
import os
import warnings
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

VARIABLE = "MESHWRIGHT_ONE_DEVICE"
"""Environment variable; "1": all ranks of this machine share its first GPU."""


def is_shared(device: torch.device) -> bool:
    """Whether other ranks run on this rank's GPU too."""
    return device.type == "cuda" and os.environ.get(VARIABLE) == "1"


@functools.cache
def stage(device_type: str = "cuda") -> torch.library.Library:
    """Stage the collectives of a kind of device in this process, until the library that is returned is destroyed."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, device_type.upper(), allow_override=True)
    return library


class StagedWork(dist.Work):
    """A collective of copies on the host; the first `wait` copies its outputs back."""

    pending: ClassVar[set[StagedWork]] = set()
    """Torch keeps the C++ half of a work only, which could not wait by itself."""
    num_made: ClassVar[int] = 0

    def __init__(self, work: dist.Work, outputs: list[tuple[Tensor, Tensor]], divisor: int):
        super().__init__()
        self.work, self.outputs, self.divisor = work, outputs, divisor
        self.pending.add(self)
        StagedWork.num_made += 1

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self.work.wait()
        for tensor, copy in self.outputs:
            tensor.data.copy_(copy if self.divisor == 1 else copy.div_(self.divisor))  # no new version for autograd
        self.outputs = []
        self.pending.discard(self)
        return True


def _host_backend(group: Any) -> Any:
    whole = group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)
    return whole._get_backend(torch.device("cpu"))


def _copy(tensor: Tensor) -> Tensor:
    """Its values on the host, contiguous and in memory of its own."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _boxed(work: dist.Work, *outputs: tuple[Tensor, Tensor], divisor: int = 1) -> Any:
    return StagedWork(work, list(outputs), divisor).boxed()


def _reduction(given: Any, backend: Any) -> tuple[Any, int]:
    """Gloo's operation, and what its result is divided by."""
    kind = dist.ReduceOp.RedOpType(given.op())
    if kind == dist.ReduceOp.AVG:
        return dist.ReduceOp(dist.ReduceOp.SUM), backend.size()
    return dist.ReduceOp(kind), 1


def _all_reduce(tensors: list[Tensor], group: Any, reduce_op: Any, *rest: Any) -> Any:
    (tensor,), backend, options = tensors, _host_backend(group), c10d.AllreduceOptions()
    options.reduceOp, divisor = _reduction(reduce_op, backend)
    copy = _copy(tensor)
    return tensors, _boxed(backend.allreduce([copy], options), (tensor, copy), divisor=divisor)


def _broadcast(tensors: list[Tensor], group: Any, root_rank: int, root_tensor: int, *rest: Any) -> Any:
    (tensor,), options = tensors, c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = root_rank, root_tensor
    copy = _copy(tensor)
    return tensors, _boxed(_host_backend(group).broadcast([copy], options), (tensor, copy))


def _all_gather(outputs: list[list[Tensor]], inputs: list[Tensor], group: Any, *rest: Any) -> Any:
    copies = [_empty(each) for each in outputs[0]]
    work = _host_backend(group).allgather([copies], [_copy(inputs[0])], c10d.AllgatherOptions())
    return outputs, _boxed(work, *zip(outputs[0], copies, strict=True))


def _all_gather_single(output: Tensor, given: Tensor, group: Any, *rest: Any) -> Any:
    copy = _empty(output)
    work = _host_backend(group)._allgather_base(copy, _copy(given), c10d.AllgatherOptions())
    return output, _boxed(work, (output, copy))


def _reduce_scatter_single(output: Tensor, given: Tensor, group: Any, reduce_op: Any, *rest: Any) -> Any:
    backend, options, copy = _host_backend(group), c10d.ReduceScatterOptions(), _empty(output)
    options.reduceOp, divisor = _reduction(reduce_op, backend)
    work = backend._reduce_scatter_base(copy, _copy(given), options)
    return output, _boxed(work, (output, copy), divisor=divisor)


def _all_to_all_single(output: Tensor, given: Tensor, group: Any, taken: list[int], sent: list[int], *rest: Any) -> Any:
    copy = _empty(output)
    work = _host_backend(group).alltoall_base(copy, _copy(given), taken, sent, c10d.AllToAllOptions())
    return _boxed(work, (output, copy))


def _send(tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    return _host_backend(group).send([_copy(tensors[0])], peer, tag).boxed()


def _receive(tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    copy = _empty(tensors[0])
    return _boxed(_host_backend(group).recv([copy], peer, tag), (tensors[0], copy))


def _barrier(tensor: Tensor, group: Any, *rest: Any) -> Any:
    return _host_backend(group).barrier(c10d.BarrierOptions()).boxed()


_KERNELS = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_single,
    "_reduce_scatter_base_": _reduce_scatter_single,
    "alltoall_base_": _all_to_all_single,
    "send": _send,
    "recv_": _receive,
    "barrier": _barrier,
}
