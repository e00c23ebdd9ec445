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
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from meshwright.ops.host_memory import copy_beside, pinned_empty
from meshwright.ops.low_bit import in_blocks
from meshwright.ops.recompute import handed_on

moved_bytes: Counter[str] = Counter()
"""Bytes that this process has copied to host memory (`out`) and back (`in`)."""


class SavingBlock:
    """A block's forward, whose saved tensors are given to `store`."""

    def __init__(self, block: nn.Module, before: SavingBlock | None):
        self.block, self.before, self.forward = block, before, block.forward
        self.stored: weakref.WeakValueDictionary[tuple[int, torch.dtype], Any] = weakref.WeakValueDictionary()
        """Of the latest forward, by address of the storage, in the order in which they were saved."""
        self.input_bytes = 0
        block.forward = self.run

    def store(self, flat: Tensor, tensor: Tensor) -> Any:
        """What loads `flat`, the storage of a tensor that is saved, again; None: it stays as it is."""
        raise NotImplementedError

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        lasting = [*self.block.parameters(), *self.block.buffers(), *given[1:]]
        stays = {each.untyped_storage()._cdata for each in lasting}
        self.stored, self.input_bytes = weakref.WeakValueDictionary(), given[0].nbytes

        @torch.no_grad()
        def pack(tensor: Tensor) -> Any:
            is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_complex()
            if not is_plain or tensor.device != given[0].device or tensor.untyped_storage()._cdata in stays:
                return tensor
            storage = tensor.untyped_storage()
            key = storage._cdata, tensor.dtype
            stored = self.stored.get(key) or (None if self.before is None else self.before.stored.get(key))
            if stored is None:
                flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
                stored = self.store(flat, tensor)
            if stored is None:
                return tensor
            stored.storage = StorageWeakRef(storage)  # while it lives, no other storage has this address
            self.stored[key] = stored
            return stored, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved[0].load().as_strided(*saved[1:])

        with saved_tensors_hooks(pack, unpack):
            return self.forward(*args, **kwargs)


class HostPool:
    """Page-locked host memory for what is out at one time. Buffers are used again, and are no more than ever were out
    together."""

    def __init__(self, device: torch.device):
        self.device = device
        self.outward, self.inward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self.free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        """Each with the end of the last copy from or to it."""
        self.num_allocated = 0

    def take(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """The smallest free buffer of at least `size` bytes; else a new one in the place of the largest free one."""
        self.free.sort(key=lambda each: each[0].numel())
        for at, (buffer, _) in enumerate(self.free):
            if buffer.numel() >= size:
                return self.free.pop(at)
        if self.free and (event := self.free.pop()[1]) is not None:
            event.synchronize()  # its memory goes back to the system
        self.num_allocated += 1
        return pinned_empty(size, torch.uint8, self.device), None


class HostTensor:
    """A storage whose elements are in host memory."""

    def __init__(self, pool: HostPool, flat: Tensor):
        self.pool = pool
        self.here: Tensor | None = flat
        """On the device: until its copy out is done, and from its fetch on."""
        self.buffer, free = pool.take(flat.nbytes)
        self.home = self.buffer[: flat.nbytes].view(flat.dtype)
        self.copied = copy_beside(pool.outward, self.home, flat, pool.device, after=free)
        moved_bytes["out"] += flat.nbytes

    def wait(self) -> None:
        """Let compute wait for the last copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.pool.device).wait_event(self.copied)

    def fetch(self) -> Tensor:
        if self.here is None:
            self.here = torch.empty_like(self.home, device=self.pool.device)
            self.copied = copy_beside(self.pool.inward, self.here, self.home, self.pool.device)
            moved_bytes["in"] += self.home.nbytes
        return self.here

    def load(self) -> Tensor:
        result = self.fetch()
        self.wait()
        return result

    def __del__(self) -> None:
        if hasattr(self, "copied") and not sys.is_finalizing():
            self.wait()  # what is on the device may be used for something else from here on
            self.pool.free.append((self.buffer, self.copied))


class HostSavingBlock(SavingBlock):
    """What it saves goes to host memory; storages below `smallest` bytes stay."""

    def __init__(self, block: nn.Module, before: SavingBlock | None, pool: HostPool, smallest: int):
        super().__init__(block, before)
        self.pool, self.smallest = pool, smallest

    def store(self, flat: Tensor, tensor: Tensor) -> Any:
        return HostTensor(self.pool, flat) if flat.nbytes >= self.smallest else None


def save_on_host(blocks: Sequence[nn.Module], chosen: Sequence[bool], pool: HostPool, smallest: int) -> None:
    """What `chosen` ones of blocks that follow each other save goes to host memory, and returns a block ahead."""
    before: HostSavingBlock | None = None
    for block, is_chosen in zip(blocks, chosen, strict=True):
        here = HostSavingBlock(block, before, pool, smallest) if is_chosen else None
        if here is not None and block is blocks[-1]:  # it waits for its own copies, and needs them first
            block.forward = _after(here, block.forward)
        if before is not None:
            block.forward = _after(before, block.forward)
        before = here


def _after(saving: HostSavingBlock, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, at whose end the device memory of what `saving` stored is free, and at the beginning of whose backward
    it is fetched."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        stored = []
        for each in saving.stored.values() if torch.is_grad_enabled() else ():
            each.wait()
            each.here = None
            stored.append(weakref.ref(each))

        def fetch(gradient: Tensor) -> None:
            for each in reversed(stored):  # what was saved last is needed first
                if (alive := each()) is not None:
                    alive.fetch()

        if stored and handed_on(made).requires_grad:
            handed_on(made).register_hook(fetch)
        return made

    return run


GROUP = 256
"""Elements that share a minimum and a step."""
CODED_AT_ONCE = 1 << 22
"""Elements: what is computed on the way stays small."""


class FewBitsTensor:
    """A storage as distances from the minimum of each group in steps of 1 / (2^bits - 1) of its range, rounded up or
    down at random with the right mean."""

    def __init__(self, flat: Tensor, bits: int, generator: torch.Generator):
        self.bits, self.length, self.dtype = bits, flat.numel(), flat.dtype
        self.parts = [self._encode(part, generator) for part in flat.split(CODED_AT_ONCE)]

    def _encode(self, part: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Codes, and (minimum, step) of each group."""
        most, groups = (1 << self.bits) - 1, in_blocks(part.float(), GROUP)
        low, high = torch.aminmax(groups, dim=1, keepdim=True)
        step = (high - low) / most
        noise = torch.rand(groups.shape, generator=generator, device=groups.device)
        codes = ((groups - low) / torch.where(step > 0, step, 1.0)).add_(noise).floor_().clamp_(0, most)
        packed, *lanes = codes.to(torch.uint8).chunk(8 // self.bits, dim=1)
        for at, lane in enumerate(lanes, start=1):
            packed = packed | (lane << (at * self.bits))
        return packed.contiguous(), torch.cat([low, step], dim=1)

    def load(self) -> Tensor:
        result = torch.empty(self.length, dtype=self.dtype, device=self.parts[0][0].device)
        for part, (packed, ends) in zip(result.split(CODED_AT_ONCE), self.parts, strict=True):
            lanes = [(packed >> at) & ((1 << self.bits) - 1) for at in range(0, 8, self.bits)]
            groups = torch.cat(lanes, dim=1) * ends[:, 1:] + ends[:, :1]
            part.copy_(groups.flatten()[: part.numel()])
        return result


class FewBitsBlock(SavingBlock):
    """Floating-point storages larger than `smallest` times its input are stored in a few bits, but for copies of its
    weights.

    Ranks that share a block's weights must code alike what they have in common: the noise of a tensor depends only on
    how many were saved before it.
    """

    def __init__(self, block: nn.Module, before: SavingBlock | None, bits: int, smallest: float):
        super().__init__(block, before)
        self.bits, self.smallest, self.num_saved, self.start = bits, smallest, 0, 0
        self.weights: dict[tuple[int, torch.Size], bool] = {}
        """By place among what a forward saves: whether it is a copy of a weight."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.start = self.num_saved
        return super().run(*args, **kwargs)

    def store(self, flat: Tensor, tensor: Tensor) -> Any:
        self.num_saved += 1
        is_wide = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        if not is_wide or flat.nbytes <= self.smallest * self.input_bytes:
            return None
        if (key := (self.num_saved - self.start, tensor.shape)) not in self.weights:
            alike = [each for each in self.block.parameters() if each.numel() == tensor.numel() and each.dim() == 2]
            self.weights[key] = any(
                torch.equal(tensor, each.to(tensor.dtype)) for weight in alike for each in (weight, weight.t())
            )
        if self.weights[key]:
            return None
        return FewBitsTensor(flat, self.bits, torch.Generator(tensor.device).manual_seed(self.num_saved))
