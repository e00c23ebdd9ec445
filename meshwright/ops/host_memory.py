"""Host memory for what a device has no room for: layers whose home is there, and copies on streams of their own."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.core.build import Build
from meshwright.core.cluster import TierName
from meshwright.ops.fsdp import local
from meshwright.ops.model_interface import ParameterUnit


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
        if stream is None:
            target.copy_(source)
            return None
        if waits:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        on_device.record_stream(stream)
        return done


SMALL_BYTES = 1 << 20
"""Of host memory below which neighbours may share a page, and rounding up costs little."""


def pinned_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that a device of this kind can copy from and to beside its work.

    Page-locked as it is: torch's own allocator of such memory rounds sizes up to powers of two.
    """
    if device.type == "cuda" and size * dtype.itemsize < SMALL_BYTES:
        return torch.empty(size, dtype=dtype, pin_memory=True)
    result = torch.empty(size, dtype=dtype)
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
    shapes: tuple[Tensor, ...] = ()
    """One for each parameter, of its shape and without memory."""

    def __post_init__(self) -> None:
        self.is_current.set()

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


def make_host_unit(build: Build, unit: ParameterUnit, dtype: torch.dtype | None = None) -> HostUnit:
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
    flat = pinned_empty(size, build.dtype, device) if is_same else torch.empty(size, dtype=build.dtype)
    flat_working = flat if is_same else pinned_empty(size, dtype, device)
    masters, working = flat_views(flat, pieces), flat_views(flat_working, pieces)
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
    )
    if result.is_streamed:
        result.let_go()
    build.host_units.append(result)
    return result


def flat_views(flat: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Consecutive pieces of a flat tensor in the shapes of others."""
    parts = flat.split([each.numel() for each in like])
    return tuple(part.view(each.shape) for part, each in zip(parts, like, strict=True))
