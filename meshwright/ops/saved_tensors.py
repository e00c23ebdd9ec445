"""What blocks save for backward, stored elsewhere until backward needs it: in host memory, or in a few bits.

Hooks around a block's forward are given each tensor that autograd saves there, whatever saves it: an operator, a
compiled graph, a checkpoint its input. Storages are stored whole and once, however many views of them are saved; what
lives longer than the block's activations (parameters, tensors that all blocks are given) stays as it is.

Copies to and from the host run on streams of their own. A block's copies start as its tensors are made; the compute
stream waits for them at the end of the block after it, and their device memory is free from there on in stream order.
They return when backward begins with the block after it. The host waits for nothing.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from meshwright.ops.low_bit import in_blocks
from meshwright.ops.recompute import handed_on

moved_bytes: Counter[str] = Counter()
"""Bytes that this process has copied to host memory (`out`) and back (`in`)."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StoredTensor:
    """All elements of one storage, while any tensor saved from it is needed."""

    def __init__(self, flat: Tensor):
        self.storage = StorageWeakRef(flat.untyped_storage())  # its address is no other's meanwhile

    def load(self) -> Tensor:
        raise NotImplementedError


class SavedView(NamedTuple):
    stored: StoredTensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def load(self) -> Tensor:
        return self.stored.load().as_strided(self.size, self.stride, self.offset)


class SavingBlock:
    """A block's forward, whose saved tensors are given to `store`."""

    def __init__(self, block: nn.Module, before: SavingBlock | None = None):
        self.block, self.before, self.forward = block, before, block.forward
        self.stored: weakref.WeakValueDictionary[tuple[int, torch.dtype], StoredTensor] = weakref.WeakValueDictionary()
        """Of the latest forward, by storage, in the order in which they were saved."""
        block.forward = self.run

    def store(self, flat: Tensor, tensor: Tensor) -> StoredTensor | None:
        """`flat`: the storage of a tensor that is saved; None: it stays as it is."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        lasting = [*self.block.parameters(), *self.block.buffers(), *given[1:]]
        stays = {each.untyped_storage()._cdata for each in lasting}
        self.begin(given)

        @torch.no_grad()
        def pack(tensor: Tensor) -> Any:
            if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_complex():
                return tensor
            storage = tensor.untyped_storage()
            if storage._cdata in stays or tensor.device != given[0].device:
                return tensor
            key = storage._cdata, tensor.dtype
            stored = self.stored.get(key) or (self.before.stored.get(key) if self.before is not None else None)
            if stored is None:
                flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                stored = self.store(flat, tensor)
            if stored is None:
                return tensor
            self.stored[key] = stored
            return SavedView(stored, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, lambda each: each.load() if isinstance(each, SavedView) else each):
            return self.forward(*args, **kwargs)

    def begin(self, given: Sequence[Tensor]) -> None:
        """A forward of these tensors begins."""
        self.stored = weakref.WeakValueDictionary()


class CopyLane:
    """A stream of copies beside compute; on a CPU, copies that are made at once."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, after: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """When what compute has been given so far is done, and `after`; the event of its end."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()


class HostPool:
    """Page-locked host memory for what is out at one time; buffers are used again, and are no more than ever were out
    together."""

    def __init__(self, device: torch.device):
        self.device, self.outward, self.inward = device, CopyLane(device), CopyLane(device)
        self.free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        """Each with the end of the last copy from or to it."""
        self.num_allocated = 0

    def take(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """The smallest free buffer of at least `size` bytes; else a new one in the place of a free one."""
        sizes = [buffer.numel() for buffer, _ in self.free]
        fitting = [each for each in sizes if each >= size]
        if fitting:
            return self.free.pop(sizes.index(min(fitting)))
        if sizes:
            _, event = self.free.pop(sizes.index(max(sizes)))
            if event is not None:
                event.synchronize()  # its memory goes back to the system
        self.num_allocated += 1
        buffer = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda":  # torch's own allocator of such memory rounds sizes up to powers of two
            runtime, address = torch.cuda.cudart(), buffer.data_ptr()
            if runtime.cudaHostRegister(address, size, 0) != runtime.cudaError.success:
                warnings.warn("host memory cannot be page-locked: copies to it are slower", stacklevel=2)
            else:
                weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
        return buffer, None


class HostTensor(StoredTensor):
    def __init__(self, pool: HostPool, flat: Tensor):
        super().__init__(flat)
        self.pool, self.device = pool, flat.device
        self.here: Tensor | None = flat
        """On the device: until its copy out is done, and from its fetch on."""
        self.buffer, free = pool.take(flat.nbytes)
        self.home = self.buffer[: flat.nbytes].view(flat.dtype)
        self.copied = pool.outward.copy(self.home, flat, free)
        moved_bytes["out"] += flat.nbytes

    def wait(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def release(self) -> None:
        """Let go of the device memory, once its copy is made."""
        self.wait()
        self.here = None

    def fetch(self) -> None:
        if self.here is None:
            self.here = torch.empty(self.home.shape, dtype=self.home.dtype, device=self.device)
            self.copied = self.pool.inward.copy(self.here, self.home)
            moved_bytes["in"] += self.home.nbytes

    def load(self) -> Tensor:
        self.fetch()
        assert self.here is not None
        self.wait()
        return self.here

    def __del__(self) -> None:
        if hasattr(self, "copied") and not sys.is_finalizing():
            self.wait()
            self.pool.free.append((self.buffer, self.copied))


class HostSavingBlock(SavingBlock):
    """What it saves goes to host memory; storages below `smallest` bytes stay."""

    def __init__(self, block: nn.Module, pool: HostPool, smallest: int, before: SavingBlock | None):
        super().__init__(block, before)
        self.pool, self.smallest = pool, smallest

    def store(self, flat: Tensor, tensor: Tensor) -> StoredTensor | None:
        return HostTensor(self.pool, flat) if flat.nbytes >= self.smallest else None

    def released(self) -> list[HostTensor]:
        """What the latest forward has stored, without memory on the device from now on."""
        stored = [each for each in self.stored.values() if isinstance(each, HostTensor)]
        for each in stored:
            each.release()
        return stored


def save_on_host(blocks: Sequence[nn.Module], chosen: Sequence[bool], pool: HostPool, smallest: int) -> None:
    """What `chosen` ones of blocks that follow each other save goes to host memory, and returns a block ahead."""
    before: HostSavingBlock | None = None
    for number, (block, is_chosen) in enumerate(zip(blocks, chosen, strict=True)):
        here = HostSavingBlock(block, pool, smallest, before) if is_chosen else None
        if before is not None:
            block.forward = _after(before, block.forward, fetches=True)
        if here is not None and number == len(blocks) - 1:
            block.forward = _after(here, block.forward, fetches=False)
        before = here


def _after(saving: HostSavingBlock, forward: Callable[..., Any], *, fetches: bool) -> Callable[..., Any]:
    """`forward`, at whose end the device memory of what `saving` stored is free; at the beginning of its backward that
    is fetched."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return made
        stored = [weakref.ref(each) for each in saving.released()]

        def fetch(gradient: Tensor) -> None:
            for each in reversed(stored):  # what was saved last is needed first
                if (alive := each()) is not None:
                    alive.fetch()

        if fetches and handed_on(made).requires_grad:
            handed_on(made).register_hook(fetch)
        return made

    return run


GROUP = 256
"""Elements that share a minimum and a step."""
CODED_AT_ONCE = 1 << 22
"""Elements: what is computed on the way stays small."""


class FewBitsTensor(StoredTensor):
    """Elements as their distance from the group's minimum in steps of 1 / (2^bits - 1) of its range, rounded up or down
    at random with the right mean."""

    def __init__(self, flat: Tensor, bits: int, generator: torch.Generator):
        super().__init__(flat)
        self.bits, self.length, self.dtype = bits, flat.numel(), flat.dtype
        self.parts = [self._encode(part, generator) for part in flat.split(CODED_AT_ONCE)]

    def _encode(self, part: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes, and (minimum, step) of each group."""
        most, each = (1 << self.bits) - 1, 8 // self.bits
        groups = in_blocks(part.float(), GROUP)
        low, high = torch.aminmax(groups, dim=1, keepdim=True)
        step = (high - low) / most
        noise = torch.rand(groups.shape, generator=generator, device=groups.device)
        codes = ((groups - low) / torch.where(step > 0, step, 1.0)).add_(noise).floor_().clamp_(0, most)
        lanes = codes.to(torch.uint8).chunk(each, dim=1)
        packed = lanes[0]
        for at in range(1, each):
            packed = packed | (lanes[at] << (at * self.bits))
        return packed, torch.cat([low, step], dim=1)

    def load(self) -> Tensor:
        result = torch.empty(self.length, dtype=self.dtype, device=self.parts[0][0].device)
        for part, (packed, ends) in zip(result.split(CODED_AT_ONCE), self.parts, strict=True):
            lanes = [(packed >> at) & ((1 << self.bits) - 1) for at in range(0, 8, self.bits)]
            groups = torch.cat(lanes, dim=1) * ends[:, 1:] + ends[:, :1]
            part.copy_(groups.flatten()[: part.numel()])
        return result

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes + ends.nbytes for packed, ends in self.parts)


class FewBitsBlock(SavingBlock):
    """Floating-point storages larger than `smallest` times its input are stored in a few bits, but for copies of its
    weights.

    Ranks that share a block's weights must code alike what they have in common: the noise of a tensor depends only on
    how many were saved before it.
    """

    def __init__(self, block: nn.Module, bits: int, smallest: float, before: SavingBlock | None):
        super().__init__(block, before)
        self.bits, self.smallest, self.input_bytes = bits, smallest, 0
        self.num_saved = self.place = 0
        self.weights: dict[tuple[int, torch.Size], bool] = {}
        """By place among what a forward saves: whether it is a copy of a weight."""

    def begin(self, given: Sequence[Tensor]) -> None:
        super().begin(given)
        self.place, self.input_bytes = 0, given[0].nbytes

    def store(self, flat: Tensor, tensor: Tensor) -> StoredTensor | None:
        self.num_saved, self.place = self.num_saved + 1, self.place + 1
        if tensor.dtype not in FLOATS or flat.nbytes <= self.smallest * self.input_bytes:
            return None
        if (key := (self.place, tensor.shape)) not in self.weights:
            alike = [each for each in self.block.parameters() if each.numel() == tensor.numel() and each.dim() == 2]
            self.weights[key] = any(
                torch.equal(tensor, each.to(tensor.dtype)) for weight in alike for each in (weight, weight.t())
            )
        if self.weights[key]:
            return None
        generator = torch.Generator(tensor.device).manual_seed(self.num_saved)
        return FewBitsTensor(flat, self.bits, generator)
