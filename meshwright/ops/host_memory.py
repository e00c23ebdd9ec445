"""Host memory for what a device has no room for: layers whose home is there, and copies on streams of their own."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.core.build import Build
from meshwright.core.cluster import TierName
from meshwright.core.errors import error_at
from meshwright.ops.collectives import gather_json
from meshwright.ops.fsdp import local
from meshwright.ops.model_interface import ParameterUnit

if TYPE_CHECKING:
    from meshwright.ops.disk_memory import LayerOnDisk


class CopyLanes:
    """Copies between a device and its host, one stream for each direction, beside the compute stream.

    On a CPU both are ordinary memory: copies are made at once, and counted all the same.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.inward, self.outward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self.moved: Counter[tuple[TierName, TierName]] = Counter()
        """(source, target) -> bytes so far."""

    def copy_in(self, target: Tensor, source: Tensor, *, waits: bool = True) -> torch.cuda.Event | None:
        """Host to device, once what is queued on the current stream has ended; the event of its end.

        `waits` = False: nothing that is queued reads the target or writes it, so begin at once.
        """
        self.moved["host", "device"] += source.numel() * source.element_size()
        return self._copy(target, source, self.inward, target, waits)

    def copy_out(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Device to host. The source's memory is not used again before the copy has ended."""
        self.moved["device", "host"] += source.numel() * source.element_size()
        return self._copy(target, source, self.outward, source, waits=True)

    def _copy(
        self, target: Tensor, source: Tensor, stream: torch.cuda.Stream | None, on_device: Tensor, waits: bool
    ) -> torch.cuda.Event | None:
        done = copy_beside(stream, target, source, self.device, waits=waits)
        if stream is not None:
            on_device.record_stream(stream)
        return done


def copy_beside(
    stream: torch.cuda.Stream | None,
    target: Tensor,
    source: Tensor,
    device: torch.device,
    *,
    waits: bool = True,
    after: torch.cuda.Event | None = None,
) -> torch.cuda.Event | None:
    """Copy on a stream of its own: after `after`, and with `waits` after what compute has been given so far. The event
    of its end; on a CPU, without a stream, at once."""
    if stream is None:
        target.copy_(source)
        return None
    if waits:
        stream.wait_stream(torch.cuda.current_stream(device))
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return stream.record_event()


SMALL_BYTES = 1 << 20
"""Of host memory below which neighbours may share a page, and rounding up costs little."""


class HostShare:
    """Replicas on one host that hold one copy of masters and states in memory of all of them. Each updates its rows of
    every parameter. All of them call `empty` and `wait` in the same order, from one thread at a time."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.index, self.count = group, group.rank(), group.size()
        host = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
        here = [host[0].read_text(), os.readlink(host[1])] if hasattr(os, "memfd_create") else [str(os.getpid())]
        self._require(gather_json(group, here), here)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory without a name: it is gone with the last rank, however that ends."""
        file = os.memfd_create("meshwright") if self.index == 0 else -1
        try:
            if self.index == 0:
                os.ftruncate(file, size * dtype.itemsize)
            path = gather_json(self.group, f"/proc/{os.getpid()}/fd/{file}")[0]
            try:
                result, failure = torch.from_file(path, shared=True, size=size, dtype=dtype), ""
            except RuntimeError as error:
                result, failure = torch.empty(0, dtype=dtype), str(error).splitlines()[0]
            self._require(gather_json(self.group, failure), "")
        finally:
            if self.index == 0:
                os.close(file)
        return result

    def _require(self, given: list[object], expected: object) -> None:
        other = [each for each in given if each != expected]
        if other:
            what = (
                f"{self.count} ranks cannot have memory in common: they run on different hosts or in containers apart"
            )
            what += f" ({other[0]})." if isinstance(other[0], str) else "."
            raise error_at("host memory", what, "Use host_ranks = 1: each rank then has a copy of its own.")

    def rows(self, count: int) -> slice:
        """Of so many, those that this rank updates."""
        each = -(-count // self.count)
        return slice(min(each * self.index, count), min(each * (self.index + 1), count))

    def wait(self) -> None:
        """Until all of them are here."""
        dist.barrier(self.group)


def pinned_empty(size: int, dtype: torch.dtype, device: torch.device, share: HostShare | None = None) -> Tensor:
    """Host memory that a device of this kind can copy from and to beside its work.

    Page-locked as it is: torch's own allocator of such memory rounds sizes up to powers of two.
    """
    if device.type == "cuda" and size * dtype.itemsize < SMALL_BYTES and share is None:
        return torch.empty(size, dtype=dtype, pin_memory=True)
    result = torch.empty(size, dtype=dtype) if share is None else share.empty(size, dtype)
    if device.type == "cuda":
        runtime, address = torch.cuda.cudart(), result.data_ptr()
        if runtime.cudaHostRegister(address, result.nbytes, 0) == runtime.cudaError.success:
            weakref.finalize(result, runtime.cudaHostUnregister, address).atexit = False
        else:
            warnings.warn("host memory cannot be page-locked: copies to it are slower", stacklevel=2)
            with contextlib.suppress(RuntimeError):  # torch would report the failure at its next launch
                torch.zeros(1, device=device).add_(1)
    return result


@dataclass(kw_only=True, eq=False)
class HostUnit:
    """The parameters of one layer, trained ones with a master copy in host memory that is updated there."""

    module: nn.Module | None
    """None: several layers that share a weight."""
    is_block: bool
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    masters: tuple[Tensor, ...]
    """Views of one flat tensor of `Build.dtype` on the host."""
    flat_masters: Tensor
    working: tuple[Tensor, ...]
    """Views of one flat pinned tensor of the compute dtype: what devices are sent. The masters themselves where the
    dtypes are equal."""
    flat_working: Tensor
    is_streamed: bool = False
    """The device has no lasting copy: whoever runs the layer fetches `flat_working` into a buffer."""
    is_current: threading.Event = field(default_factory=threading.Event)
    """Set while `working` has the newest values, and clear from the moment an update is due until it is done."""
    wait: Callable[[], object] = field(default=lambda: None)
    """Returns once `working` has the newest values, or raises what has gone wrong with them."""
    version: int = 0
    """Of `working`."""
    on_disk: LayerOnDisk | None = None
    """Where masters (if they are not what devices are sent) and optimizer states are; None: in host memory."""
    shapes: tuple[Tensor, ...] = ()
    """One for each parameter, of its shape and without memory."""
    share: HostShare | None = None
    """The flat tensors are memory of several ranks."""
    leaves_summed: bool = False
    """Gradients leave the device as soon as they are summed over replicas: whoever sums them calls `take`."""
    take: Callable[[int, Tensor], object] = field(default=lambda at, gradient: None)
    """(number of the parameter, its gradient)."""

    def __post_init__(self) -> None:
        self.is_current.set()

    @cached_property
    def own(self) -> tuple[slice, ...]:
        """Of a flat tensor, the part of each parameter that this rank updates."""
        result, start = [], 0
        for master in self.masters:
            rows, each = master.shape[0] if master.ndim else 1, master[0].numel() if master.ndim else 1
            here = slice(0, rows) if self.share is None else self.share.rows(rows)
            result.append(slice(start + here.start * each, start + here.stop * each))
            start += master.numel()
        return tuple(result)

    def own_rows(self, flat: Tensor) -> tuple[Tensor, ...]:
        """These parts in the shapes of their rows."""
        pairs = zip(self.own, self.masters, strict=True)
        return tuple(flat[own].view(-1, *like.shape[1:]) if like.ndim else flat[own].view(()) for own, like in pairs)

    def wait_for_others(self) -> None:
        """Until all ranks that share the flat tensors have written their rows."""
        if self.share is not None:
            self.share.wait()

    def renew(self) -> None:
        """`working` has the newest values."""
        self.version += 1
        self.is_current.set()

    def let_go(self) -> None:
        """The parameters keep their shapes, and no memory."""
        if not self.shapes:
            element = self.flat_working.new_empty(1, device=self.parameters[0].device)
            self.shapes = tuple(element.expand(parameter.shape) for parameter in self.parameters)
        for parameter, shape in zip(self.parameters, self.shapes, strict=True):
            parameter.data = shape


def make_host_unit(
    build: Build, unit: ParameterUnit, dtype: torch.dtype | None = None, share: HostShare | None = None
) -> HostUnit:
    """Give the trained parameters of a unit, which may still be on the meta device, a home in host memory: masters of
    the build's dtype, working copies of the compute dtype (or another); the parameters themselves have the latter from
    then on. Of parameters that are sharded already: this rank's pieces, in their own dtype."""
    names = {id(parameter): name for name, parameter in build.named_parameters()}
    own = [names[id(parameter)] for parameter in unit.parameters if parameter.requires_grad]
    build.materialise(unit.parameters)
    parameters = dict(build.named_parameters())
    trained = tuple(parameters[name] for name in own)
    pieces = [local(parameter.detach()) for parameter in trained]
    device, dtype = build.mesh.device, dtype or build.compute_dtype
    size, is_same = sum(piece.numel() for piece in pieces), dtype == build.dtype
    flat = pinned_empty(size, build.dtype, device, share) if is_same else torch.empty(size, dtype=build.dtype)
    flat_working = flat if is_same else pinned_empty(size, dtype, device)
    masters, working = flat_views(flat, pieces), flat_views(flat_working, pieces)
    assert is_same or share is None, "ranks share the masters themselves"
    for name, parameter, piece, master, copy in zip(own, trained, pieces, masters, working, strict=True):
        master.copy_(piece)
        copy.copy_(master)
        if not is_same:
            parameter.data = parameter.data.to(dtype)
        build.masters[name] = master
    result = HostUnit(
        module=unit.module,
        is_block=unit.is_block,
        names=tuple(own),
        parameters=trained,
        masters=masters,
        flat_masters=flat,
        working=working,
        flat_working=flat_working,
        is_streamed=unit.is_block and build.streams_blocks,
        share=share,
    )
    if share is not None:
        share.wait()
    if result.is_streamed:
        result.let_go()
    build.host_units.append(result)
    return result


def flat_views(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Consecutive pieces of a flat tensor in the shapes of others."""
    parts = flat.split([each.numel() for each in like])
    return tuple(part.view(each.shape) for part, each in zip(parts, like, strict=True))
