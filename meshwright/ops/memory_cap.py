"""A cap on a device's memory that eager steps do not exceed, whatever was forecast.

What one call of a block saves for backward is an entry. Where the cap leaves too little memory for an operator, entries
are evicted, first the one with the least cost / (bytes x staleness) (Dynamic Tensor Rematerialization, Kirisame et al.
2021): dropped, and computed again from the block's input once backward asks for it; or copied to host memory and back.
Of the two ways the one that costs less per byte is taken, by the measured seconds of the block's forward and the
measured rate of such copies. Either way backward gets the same bits.

- On a GPU the cap is the limit of torch's allocator. An operator that finds no memory runs again after an eviction.
  Since each such failure makes the allocator give back its cache, blocks first make sure of what they needed the last
  time, with a margin that grows with every failure.
- A CPU's allocator has no limit. Bytes of all tensors that operators see are counted, and an operator waits for
  evictions until its results fit, whose sizes are those of a run on the meta device. What operators use and free inside
  is not seen. Host memory is then an arena of its own, which is not counted.

A block that writes into its input or its buffers, or that talks to other ranks (which may not evict it), is never
dropped, nor is one whose backward has begun.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.units import pretty_bytes
from meshwright.ops.recompute import COLLECTIVES, replayed, spelled

_MARGIN, _MORE_MARGIN, _MOST_MARGIN = 0.03, 0.02, 0.3
"""Shares of the cap that a GPU's allocator needs for pieces: at first, more after each failure, and at most."""
_PART = 1 / 16
"""Of the cap: what operators outside of blocks save becomes entries of this size."""
_TIMED_BYTES = 2**25
_ASKED = re.compile(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _host_bytes(count: int, device: torch.device) -> Tensor:
    with suppress(RuntimeError):  # pinned memory is refused: pageable memory serves too, slower
        return torch.empty(count, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return torch.empty(count, dtype=torch.uint8)


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_complex()


def _storages(values: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(values) if _is_plain(each)}


class Saved:
    """A tensor that backward will ask for: on the device, in host memory, or (neither) to be computed again."""

    def __init__(self, tensor: Tensor, is_fixed: bool):
        self.tensor: Tensor | None = tensor
        self.host: HostCopy | None = None
        self.is_fixed = is_fixed
        """It is a parameter, or for another reason must stay."""


class HostCopy:
    """The memory that some saved tensors share, while it is in host memory."""

    @torch.no_grad()
    def __init__(self, cap: MemoryCap, group: list[Saved]):
        self.cap, tensors = cap, [each.tensor for each in group if each.tensor is not None]
        storage = tensors[0].untyped_storage()
        self.views = [(each.dtype, each.storage_offset(), each.size(), each.stride()) for each in tensors]
        self.group = [weakref.ref(each) for each in group]
        with _disable_current_modes():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.bytes = _host_bytes(storage.nbytes(), cap.device).copy_(whole, non_blocking=True)
        for each in group:
            each.tensor, each.host = None, self

    @torch.no_grad()
    def bring_back(self) -> None:
        size = self.bytes.numel()
        if not self.cap.is_cuda:
            self.cap.require(size)
        with _disable_current_modes():
            whole = self.cap.run(torch.empty, (size,), {"dtype": torch.uint8, "device": self.cap.device})
            whole.copy_(self.bytes, non_blocking=True)
            for ref, (dtype, *view) in zip(self.group, self.views, strict=True):
                if (saved := ref()) is not None:
                    saved.tensor = torch.empty(0, dtype=dtype, device=whole.device).set_(whole.untyped_storage(), *view)
                    saved.host = None
        self.cap.count([whole])


class _Enough(Exception):
    """A replay has made all that is asked for."""


class Entry:
    """What one call of a block, or some operators outside of blocks, saved."""

    def __init__(self, cap: MemoryCap, name: str, again: Callable[[Tensor], Any] | None, given: Tensor | None):
        self.cap, self.name, self.again = cap, name, again
        self.given = None if given is None else Saved(given.detach(), is_fixed=not _is_plain(given))
        """The block's input; None: it cannot be computed again."""
        self.needs_gradient = given is not None and given.requires_grad
        self.saved: list[weakref.ref[Saved]] = []
        self.made_seconds = time.perf_counter()
        self.is_active = True
        """Its forward or its backward runs."""
        self.kept_bytes = self.given_bytes = 0
        cap.entries.add(self)

    def pack(self, tensor: Tensor) -> tuple[Entry, Saved]:
        is_fixed = not _is_plain(tensor) or tensor.device != self.cap.device
        saved = Saved(tensor.detach(), is_fixed)
        self.saved.append(weakref.ref(saved))
        return self, saved

    def fix(self, values: Any) -> None:
        """What lies in the same memory as these tensors is not evicted."""
        storages = _storages(values)
        for saved in self.here():
            saved.is_fixed = bool(_storages(saved.tensor) & storages)

    def here(self) -> list[Saved]:
        """What can be evicted. (Memory of size 0 is a gathered parameter's whose shards are apart again.)"""
        every = [self.given, *(ref() for ref in self.saved)]
        there = [each for each in every if each is not None and each.tensor is not None and not each.is_fixed]
        return [each for each in there if each.tensor is not None and each.tensor.untyped_storage().nbytes()]

    def measure(self) -> None:
        sizes = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in self._tensors()}
        own = _storages(None if self.given is None else self.given.tensor)
        self.given_bytes = sum(size for key, size in sizes.items() if key in own)
        self.kept_bytes = sum(sizes.values()) - self.given_bytes

    def _tensors(self) -> list[Tensor]:
        return [each.tensor for each in self.here() if each.tensor is not None]

    def ways(self) -> Iterator[tuple[float, int, Callable[[], None]]]:
        """(seconds, bytes, how) of each way to evict it."""
        if self.is_active:
            self.measure()
        elif self.again is not None and self.kept_bytes:
            yield self.cap.forward_seconds(self.name), self.kept_bytes, self.drop
        if size := self.kept_bytes + self.given_bytes:
            yield 2 * size / self.cap.copy_rate, size, self.swap

    def drop(self) -> None:
        own = _storages(None if self.given is None else self.given.tensor)
        for saved in self.here():
            if not _storages(saved.tensor) & own:
                saved.tensor = None

    def swap(self) -> None:
        groups: dict[int, list[Saved]] = {}
        for saved in self.here():
            groups.setdefault(_storages(saved.tensor).pop(), []).append(saved)
        for group in groups.values():
            HostCopy(self.cap, group)

    def take(self, saved: Saved) -> Tensor:
        """For backward."""
        self.is_active, self.cap.place = True, self.name
        if saved.tensor is None and saved.host is None:
            self._replay()
        if saved.host is not None:
            saved.host.bring_back()
        if saved.tensor is None:
            raise RuntimeError(f"{self.name} saves fewer tensors when it runs again: it is not deterministic.")
        return saved.tensor

    def _replay(self) -> None:
        assert self.given is not None and self.again is not None
        missing = {place: each for place, ref in enumerate(self.saved) if (each := ref()) and each.tensor is each.host}
        self.cap.prepare(self.name)
        if self.given.host is not None:
            self.given.host.bring_back()
        assert self.given.tensor is not None
        places, last = itertools.count(), max(missing)

        def pack(tensor: Tensor) -> Tensor:
            if (place := next(places)) in missing:
                missing[place].tensor = tensor.detach()
            if place == last:
                raise _Enough
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor), suppress(_Enough):
            self.again(self.given.tensor.detach().requires_grad_(self.needs_gradient))


def _unpack(held: tuple[Entry, Saved]) -> Tensor:
    entry, saved = held
    return entry.take(saved)


class MemoryCap(TorchDispatchMode):
    """Around training steps; `watch` what is to be evicted."""

    def __init__(self, device: torch.device, cap_bytes: int):
        super().__init__()
        self.device, self.cap_bytes, self.is_cuda = device, cap_bytes, device.type == "cuda"
        self.entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        self.place = ""
        """The block that runs, or ran last."""
        self.margin = _MARGIN if self.is_cuda else 0.0
        self.sizes: dict[int, int] = {}
        self.counted_bytes = self.peak_bytes = 0
        """On a CPU: of the tensors seen, now and at most."""
        self.results: dict[Any, int] = {}
        """On a CPU: bytes that an operator with such arguments makes."""
        self.needs: dict[str, int] = {}
        self.seconds: dict[str, float | tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        """By block: bytes that its last call saved, and its last forward's time."""
        self.talks = False
        """A collective was called."""
        self.tally = dict.fromkeys(("evictions", "dropped_bytes", "swapped_bytes", "eviction_seconds"), 0.0)
        if self.is_cuda:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)
        here = torch.zeros(min(_TIMED_BYTES, cap_bytes), dtype=torch.uint8, device=device)
        host = _host_bytes(here.numel(), device).copy_(here)
        start = time.perf_counter()
        here.copy_(host)
        if self.is_cuda:
            torch.cuda.synchronize(device)
        self.copy_rate = here.numel() / (time.perf_counter() - start)

    def watch(self, name: str, module: nn.Module) -> None:
        """Evict what calls of a block save."""
        forward = module.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.prepare(name)
            given = args[0] if args and isinstance(args[0], Tensor) else None
            again = None if given is None else replayed(forward, given, args[1:], kwargs)
            entry = Entry(self, name, again, given)
            before, self.talks = self._versions(module, args, kwargs), False
            start = self._now()
            with saved_tensors_hooks(entry.pack, _unpack):
                made = forward(*args, **kwargs)
            end = self._now()
            self.seconds[name] = end - start if isinstance(start, float) else (start, end)
            if self.talks or before != self._versions(module, args, kwargs):
                entry.again = None
            entry.fix((list(module.parameters()), list(module.buffers()), args[1:], kwargs))
            entry.measure()
            entry.is_active, self.place, self.needs[name] = False, "", entry.kept_bytes
            return made

        module.forward = watched

    @contextmanager
    def outside(self, model: nn.Module) -> Iterator[None]:
        """Around a model's forward: what operators outside of its blocks save goes to host memory."""
        made: list[Entry] = []

        def pack(tensor: Tensor) -> tuple[Entry, Saved]:
            if not made or made[-1].kept_bytes > _PART * self.cap_bytes:
                made.append(Entry(self, "outside of blocks", None, None))
            made[-1].kept_bytes += tensor.untyped_storage().nbytes() if _is_plain(tensor) else 0
            held = made[-1].pack(tensor)
            if isinstance(tensor, nn.Parameter):
                held[1].is_fixed = True
            return held

        with saved_tensors_hooks(pack, _unpack):
            yield
        fixed = (list(model.parameters()), list(model.buffers()))
        for entry in made:
            entry.fix(fixed)
            entry.measure()
            entry.is_active = False

    def prepare(self, name: str) -> None:
        """Before a block's forward, or its replay."""
        self.place = name
        if self.is_cuda:
            self._evict_until(lambda: torch.cuda.memory_allocated(self.device) + self.needs.get(name, 0))

    def _evict_until(self, wanted: Callable[[], int]) -> bool:
        while wanted() > (1 - self.margin) * self.cap_bytes:
            if not self.evict():
                return False
        return True

    def require(self, size: int) -> None:
        """On a CPU: make sure that so many bytes more stay within the cap."""
        if not self._evict_until(lambda: self.counted_bytes + size):
            raise self._error(self.counted_bytes + size)

    def evict(self) -> int:
        """The bytes of the entry that is the least loss, which others may still hold; 0: there is none."""
        best: tuple[Any, ...] | None = None
        now = time.perf_counter()
        for entry in list(self.entries):
            for seconds, size, way in entry.ways():
                loss = entry.is_active, seconds / (size * max(now - entry.made_seconds, 1e-9))
                if best is None or loss < best[0]:
                    best = loss, seconds, size, way, entry
        if best is None:
            return 0
        _, seconds, size, way, entry = best
        way()
        self.tally["evictions"] += 1
        self.tally["dropped_bytes" if way == entry.drop else "swapped_bytes"] += size
        self.tally["eviction_seconds"] += seconds
        entry.measure()
        return size

    def take_tally(self) -> dict[str, float]:
        """What was evicted since the last call; seconds are what it costs, by earlier measurements."""
        told, self.tally = self.tally, dict.fromkeys(self.tally, 0.0)
        return told

    def forward_seconds(self, name: str) -> float:
        found = self.seconds[name]
        if isinstance(found, tuple):
            found[1].synchronize()
            found = self.seconds[name] = found[0].elapsed_time(found[1]) / 1e3
        return found

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _versions(self, module: nn.Module, args: Any, kwargs: Any) -> list[int]:
        """Of what a replay must find as it was."""
        return [each._version for each in (*tree_leaves((args, kwargs)), *module.buffers()) if _is_plain(each)]

    def _error(self, needed: int) -> MeshwrightError:
        place = f"at {self.place}" if self.place else "outside of blocks"
        what = f"is {pretty_bytes(self.cap_bytes)}; with all that can be evicted out of the way, a step needs "
        what += f"{pretty_bytes(needed)} {place}."
        return error_at("train.memory_cap", what, "Raise it, or use a smaller microbatch.", exit_code=1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.talks = self.talks or spelled(func)[0] in COLLECTIVES
        if self.is_cuda:
            return self.run(func, args, kwargs)
        self.count(tree_leaves((args, kwargs)))
        if size := self._result_bytes(func, args, kwargs):
            self.require(size)
        made = func(*args, **kwargs)
        self.count(tree_leaves(made))
        return made

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """On a GPU: as often as it takes, evicting more each time."""
        numbers = None
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            numbers = torch.cuda.default_generators[self.device.index or 0]
        offset = 0 if numbers is None else numbers.get_offset()
        for attempt in itertools.count():
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                found = _ASKED.search(str(error))
            asked = int(float(found[1]) * _UNITS[found[2]]) if found else 2**21
            self.margin = min(self.margin + _MORE_MARGIN, _MOST_MARGIN)
            freed = 0
            while freed < asked << attempt and (more := self.evict()):
                freed += more
            if not freed:
                raise self._error(torch.cuda.memory_allocated(self.device) + asked)
            if numbers is not None:
                numbers.set_offset(offset)
        raise AssertionError

    def count(self, tensors: Iterable[Any]) -> None:
        """On a CPU: take note of tensors' memory, until it is freed."""
        for tensor in tensors:
            if self.is_cuda or not _is_plain(tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self.sizes:
                weakref.finalize(storage, self._forget, key).atexit = False
            self.counted_bytes += size - self.sizes.get(key, 0)
            self.sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.counted_bytes)

    def _forget(self, key: int) -> None:
        self.counted_bytes -= self.sizes.pop(key)

    def _result_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        def like(tensor: Tensor) -> Tensor:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

        if spelled(func)[0] != "aten":
            return 0
        leaves = tree_leaves((args, kwargs))
        shapes = [(e.size(), e.stride(), e.dtype) if isinstance(e, Tensor) else str(e) for e in leaves]
        key = (func, len(args), *kwargs, *shapes)
        if key not in self.results:
            given = tree_map_only(Tensor, like, (args, {**kwargs, **({"device": "meta"} if "device" in kwargs else {})}))
            try:
                made = {each.untyped_storage() for each in tree_leaves(func(*given[0], **given[1]))}
                old = _storages(given)
                self.results[key] = sum(each.nbytes() for each in made if each._cdata not in old)
            except Exception:  # what has no such form, or results whose size depends on values
                self.results[key] = 2 * sum(each.untyped_storage().nbytes() for each in leaves if _is_plain(each))
        return self.results[key]
