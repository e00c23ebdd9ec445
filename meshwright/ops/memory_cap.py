"""A cap on a device's memory that eager steps do not exceed, whatever was forecast.

What one call of a block saves for backward is an entry. Where the cap leaves too little memory for an operator, entries
are evicted, first the one with the least cost / (bytes x staleness) (Dynamic Tensor Rematerialization, Kirisame et al.
2021): dropped, and computed again from the block's input once backward asks for it; or copied to host memory and back.
What either costs is known from the measured seconds of the block's forward and the measured rate of such copies.
Backward gets the same bits. On a GPU the cap is the limit of torch's allocator, and an operator that finds no memory
runs again after an eviction. As the allocator then gives back its cache, which takes time, blocks first make sure of
the bytes that they saved the last time, and of a margin that grows with every failure. A CPU's allocator has no limit:
bytes of all tensors that operators see are counted, and an operator runs once its results fit, by their sizes on the
meta device; what it uses and frees inside is not seen. Host memory is then an arena of its own, which is not counted.
A block that writes into its input or its buffers, or talks to other ranks (which may not have evicted it), is not
dropped, nor one whose backward has begun.
"""

from __future__ import annotations

import itertools
import re
import time
import weakref
from collections.abc import Iterable, Iterator
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
"""Shares of the cap that are left to a GPU's allocator: at first, more after each failure, and at most."""
_PART = 1 / 16
"""Share of the cap: what operators outside of blocks save becomes entries of about this size."""
_TIMED_BYTES = 2**25
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def asked_bytes(text: str) -> int:
    """What torch says that it could not have; 0 where it does not."""
    asked = _ASKED.search(text)
    return int(float(asked[1]) * _UNITS[asked[2]]) if asked else 0


def _on_host(tensor: Tensor) -> Tensor:
    place = torch.empty(0, dtype=torch.uint8)
    with suppress(RuntimeError):  # pinned memory may be refused: pageable memory serves too, slower
        place = torch.empty(tensor.numel(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
    return place.resize_(tensor.numel()).copy_(tensor, non_blocking=True)


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_complex()


def _storages(values: Any) -> dict[int, int]:
    """Bytes of the memory of tensors, by its key."""
    found = [each.untyped_storage() for each in tree_leaves(values) if _is_plain(each)]
    return {storage._cdata: storage.nbytes() for storage in found}


class Saved:
    """A tensor that backward will ask for: on the device, in host memory, or (neither) to be computed again."""

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor.detach()
        self.host: HostCopy | None = None


class HostCopy:
    """The memory that some saved tensors share, while it is in host memory."""

    def __init__(self, cap: MemoryCap, group: list[Saved]):
        tensors = [each.tensor for each in group if each.tensor is not None]
        self.cap, self.group, storage = cap, [weakref.ref(each) for each in group], tensors[0].untyped_storage()
        self.views = [(each.dtype, each.storage_offset(), each.size(), each.stride()) for each in tensors]
        with torch.no_grad(), _disable_current_modes():
            self.bytes = _on_host(torch.empty(0, dtype=torch.uint8, device=cap.device).set_(storage))
        for each in group:
            each.tensor, each.host = None, self

    def bring_back(self) -> None:
        device, size = self.cap.device, self.bytes.numel()
        if not self.cap.is_cuda:
            self.cap.require(size)
        with torch.no_grad(), _disable_current_modes():
            whole = self.cap.run(torch.empty, (size,), {"dtype": torch.uint8, "device": device})
            storage = whole.copy_(self.bytes, non_blocking=True).untyped_storage()
            for ref, (dtype, *view) in zip(self.group, self.views, strict=True):
                if (saved := ref()) is not None:
                    saved.tensor, saved.host = torch.empty(0, dtype=dtype, device=device).set_(storage, *view), None
        self.cap.count([whole])


class _Enough(Exception):
    """A replay has made all that is asked for."""


class SavedEntry:
    """What one call of a block, or some operators outside of blocks, saved."""

    def __init__(self, cap: MemoryCap, name: str, fixed: Any, again: Any = None, given: Tensor | None = None):
        """`fixed`: tensors in whose memory nothing is evicted. `again` runs the block on what it was `given`."""
        self.cap, self.name, self.again, self.made_seconds = cap, name, again, time.perf_counter()
        self.fixed, self.given = _storages(fixed), None if given is None else Saved(given)
        self.needs_gradient = given is not None and given.requires_grad
        self.saved: list[weakref.ref[Saved] | None] = []
        self.is_active = True
        """Its forward or its backward runs."""
        self.kept_bytes = self.given_bytes = 0
        cap.entries.add(self)

    def pack(self, tensor: Tensor) -> Any:
        stays = not _is_plain(tensor) or tensor.device != self.cap.device or self.fixed.keys() & _storages(tensor)
        saved = Saved(tensor)
        self.saved.append(None if stays else weakref.ref(saved))
        return saved.tensor if stays else (self, saved)

    def groups(self) -> dict[int, list[Saved]]:
        """What can be evicted, by memory. (That of a gathered parameter whose shards are apart again has no bytes.)"""
        found: dict[int, list[Saved]] = {}
        for saved in (self.given, *(ref() for ref in self.saved if ref is not None)):
            for key, size in _storages(saved and saved.tensor).items():
                if size and saved is not None:
                    found.setdefault(key, []).append(saved)
        return found

    def measure(self) -> None:
        self.given_bytes = sum(_storages(self.given and self.given.tensor).values())
        self.kept_bytes = sum(_storages([group[0].tensor for group in self.groups().values()]).values())
        self.kept_bytes -= self.given_bytes

    def ways(self) -> Iterator[tuple[float, int, bool]]:
        """(seconds, bytes, whether it is dropped) of each way to evict it."""
        if self.is_active:
            self.measure()
        elif self.again is not None and self.kept_bytes:
            yield self.cap.forward_seconds(self.name), self.kept_bytes, True
        if size := self.kept_bytes + self.given_bytes:
            yield 2 * size / self.cap.copy_rate, size, False

    def evict(self, *, is_dropped: bool) -> None:
        for group in self.groups().values():
            if not is_dropped:
                HostCopy(self.cap, group)
            elif self.given not in group:
                for saved in group:
                    saved.tensor = None
        self.measure()

    def take(self, saved: Saved) -> Tensor:
        """For backward."""
        self.is_active, self.cap.place = True, self.name
        if saved.tensor is None and saved.host is None:
            self._replay()
        if saved.host is not None:
            saved.host.bring_back()
        if saved.tensor is None:
            raise RuntimeError(f"{self.name} saves other tensors when it runs again: it cannot be evicted.")
        return saved.tensor

    def _replay(self) -> None:
        self.cap.prepare(self.name)
        every = {place: ref() for place, ref in enumerate(self.saved) if ref is not None}
        missing = {place: each for place, each in every.items() if each and each.tensor is None and each.host is None}
        places = itertools.count()

        def pack(tensor: Tensor) -> Tensor:
            if (place := next(places)) in missing:
                missing[place].tensor = tensor.detach()
            if place == max(missing):
                raise _Enough
            return tensor.detach()

        assert self.given is not None
        given = self.take(self.given).detach().requires_grad_(self.needs_gradient)
        with saved_tensors_hooks(pack, lambda tensor: tensor), suppress(_Enough):
            self.again(given)


def _unpack(held: Any) -> Tensor:
    return held if isinstance(held, Tensor) else held[0].take(held[1])


class MemoryCap(TorchDispatchMode):
    """Around training steps; `watch` the blocks."""

    def __init__(self, device: torch.device, cap_bytes: int):
        super().__init__()
        self.device, self.cap_bytes, self.is_cuda = device, cap_bytes, device.type == "cuda"
        self.entries: weakref.WeakSet[SavedEntry] = weakref.WeakSet()
        self.margin = _MARGIN if self.is_cuda else 0.0
        self.place, self.talks = "", False
        """The block that runs, and whether it has called a collective."""
        self.sizes: dict[int, int] = {}
        self.counted_bytes = self.peak_bytes = 0
        """On a CPU: of the tensors seen, now and at most."""
        self.results: dict[Any, int] = {}
        """On a CPU: bytes that an operator makes, by its arguments."""
        self.needs: dict[str, int] = {}
        self.times: dict[str, tuple[Any, Any]] = {}
        self.seconds: dict[str, float] = {}
        """By block: bytes that its last call saved, its begin and end, and seconds of one that is over."""
        self.tally = dict.fromkeys(("evictions", "dropped_bytes", "swapped_bytes", "eviction_seconds"), 0.0)
        if self.is_cuda:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / whole), device)
        here = torch.zeros(min(_TIMED_BYTES, cap_bytes), dtype=torch.uint8, device=device)
        host, start = _on_host(here), time.perf_counter()
        here.copy_(host)
        if self.is_cuda:
            torch.cuda.synchronize(device)
        self.copy_rate = here.numel() / (time.perf_counter() - start)

    def watch(self, name: str, module: nn.Module) -> None:
        """Evict what calls of a block save."""
        forward = module.forward

        def versions(args: Any, kwargs: Any) -> list[int]:
            """Of what a replay must find as it was."""
            return [each._version for each in (*tree_leaves((args, kwargs)), *module.buffers()) if _is_plain(each)]

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self.prepare(name)
            given = args[0] if args and isinstance(args[0], Tensor) else None
            again = None if given is None else replayed(forward, given, args[1:], kwargs)
            fixed = list(module.parameters()), list(module.buffers()), args[1:], kwargs
            entry, before, self.talks = SavedEntry(self, name, fixed, again, given), versions(args, kwargs), False
            start = self._now()
            with saved_tensors_hooks(entry.pack, _unpack):
                made = forward(*args, **kwargs)
            self.times[name] = start, self._now()
            if self.talks or before != versions(args, kwargs):
                entry.again = None
            entry.measure()
            entry.is_active, self.place, self.needs[name] = False, "", entry.kept_bytes
            return made

        module.forward = watched

    @contextmanager
    def outside(self, model: nn.Module) -> Iterator[None]:
        """Around a model's forward: what operators outside of its blocks save can go to host memory."""
        fixed = list(model.parameters()), list(model.buffers())
        made = [SavedEntry(self, "layers outside of blocks", fixed)]

        def pack(tensor: Tensor) -> Any:
            if made[-1].kept_bytes > _PART * self.cap_bytes:
                made.append(SavedEntry(self, made[0].name, fixed))
            made[-1].kept_bytes += sum(_storages(tensor).values())
            return made[-1].pack(tensor)

        with saved_tensors_hooks(pack, _unpack):
            yield
        for entry in made:
            entry.measure()
            entry.is_active = False

    def prepare(self, name: str) -> None:
        """Before a block's forward, or its replay."""
        self.place = name
        if self.is_cuda:
            self._make_room(self.needs.get(name, 0))

    def require(self, size: int) -> None:
        if not self._make_room(size):
            raise self._error(size)

    def _used(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else self.counted_bytes

    def _make_room(self, size: int) -> bool:
        """Whether so many bytes more stay within the cap, after evictions."""
        while self._used() + size > (1 - self.margin) * self.cap_bytes:
            if not self._evict():
                return False
        return True

    def _evict(self) -> int:
        """The bytes of what was the least loss, which others may still hold; 0: nothing is left to evict."""
        now, found = time.perf_counter(), []
        for entry in self.entries:
            for seconds, size, is_dropped in entry.ways():
                loss = seconds / (size * max(now - entry.made_seconds, 1e-9))
                found.append((entry.is_active, loss, seconds, size, is_dropped, entry))
        if not found:
            return 0
        *_, seconds, size, is_dropped, entry = min(found, key=lambda each: each[:2])
        entry.evict(is_dropped=is_dropped)
        told = {"evictions": 1, "eviction_seconds": seconds, f"{'dropped' if is_dropped else 'swapped'}_bytes": size}
        self.tally = {name: value + told.get(name, 0) for name, value in self.tally.items()}
        return size

    def take_tally(self) -> dict[str, float]:
        """What was evicted since the last call; seconds by what was measured before."""
        told, self.tally = self.tally, dict.fromkeys(self.tally, 0.0)
        return told

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def forward_seconds(self, name: str) -> float:
        start, end = self.times[name]
        if not self.is_cuda:
            return end - start
        if name not in self.seconds or end.query():  # the host waits for a block's first call alone
            end.synchronize()
            self.seconds[name] = start.elapsed_time(end) / 1e3
        return self.seconds[name]

    def _error(self, size: int) -> MeshwrightError:
        what = f"is {pretty_bytes(self.cap_bytes)}; with all evicted that can be, a step needs "
        what += f"{pretty_bytes(self._used() + size)} in {self.place or 'layers outside of blocks'}."
        return error_at("train.memory_cap", what, "Raise it, or use a smaller microbatch.", exit_code=1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.talks = self.talks or spelled(func)[0] in COLLECTIVES
        if self.is_cuda:
            return self.run(func, args, kwargs)
        leaves = tree_leaves((args, kwargs))
        self.count(leaves)
        if size := self._result_bytes(func, args, kwargs, leaves):
            self.require(size)
        made = func(*args, **kwargs)
        self.count(tree_leaves(made))
        return made

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On a GPU as often as it takes, with more evicted each time."""
        numbers, offset = None, 0
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            numbers = torch.cuda.default_generators[self.device.index or 0]
            offset = numbers.get_offset()
        for attempt in itertools.count():
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                size = asked_bytes(str(error)) or 2**21
            freed = 0
            self.margin = min(self.margin + _MORE_MARGIN, _MOST_MARGIN)
            # Operators on lists of tensors may have written into some of them.
            is_whole = "_foreach" not in str(func) and "_fused" not in str(func)
            while is_whole and freed < size << attempt and (more := self._evict()):
                freed += more
            if not freed:
                raise self._error(size)
            if numbers is not None:
                numbers.set_offset(offset)

    def count(self, tensors: Iterable[Any]) -> None:
        """On a CPU: take note of the memory of tensors, until it is freed."""
        for tensor in tensors:
            if not self.is_cuda and _is_plain(tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.sizes:
                    weakref.finalize(storage, self._forget, key).atexit = False
                self.counted_bytes += size - self.sizes.get(key, 0)
                self.sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.counted_bytes)

    def _forget(self, key: int) -> None:
        self.counted_bytes -= self.sizes.pop(key)

    def _result_bytes(self, func: Any, args: Any, kwargs: Any, leaves: list[Any]) -> int:
        shapes = [
            (each.size(), each.stride(), each.dtype) if isinstance(each, Tensor) else str(each) for each in leaves
        ]
        key = func, len(args), *kwargs, *shapes
        if key not in self.results and spelled(func)[0] == "aten":
            with _disable_current_modes(), suppress(Exception):  # no such form, or sizes depend on values
                given, named = tree_map_only(Tensor, lambda each: each.to("meta"), (args, kwargs))
                made = _storages(func(*given, **named | ({"device": "meta"} if "device" in kwargs else {})))
                self.results[key] = sum(made[each] for each in made.keys() - _storages((given, named)).keys())
            self.results.setdefault(key, 2 * sum(_storages(leaves).values()))
        return self.results.get(key, 0)
