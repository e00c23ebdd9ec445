"""Recomputation that keeps what is dear: in forward the results of products, attention and collectives are kept, and
the replay, which runs every other operator again, is handed them.

Which are kept is decided by the operators that are dispatched, whatever module dispatches them. Of those, only results
that the replay's own results depend on stay after the forward: not the product that ends a block, nor a partial one
that only a collective reads. (torch's selective contexts keep them all, and cannot hand out what a collective writes
into a tensor it is given; they serve where a compiler traces the block.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "convolution", "_convolution"}
PRODUCTS |= {"_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_addmm_activation", "_trilinear"}
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "meshwright"}
"""Namespaces; whatever of them writes into a tensor writes into its first argument."""
_WRITES_NOTHING = {"send", "barrier", "monitored_barrier_"}


@functools.cache
def _spelled(func: Any) -> tuple[str, str]:
    space, name = func._schema.name.split("::")
    return space, name


@functools.cache
def _is_collective(func: Any) -> bool:
    space, name = _spelled(func)
    return space in COLLECTIVES and name != "wait_tensor"


@functools.cache
def is_dear(func: Any) -> bool:
    """Whether to run it again costs more than to keep what it made."""
    _, name = _spelled(func)
    is_attention = ("attention" in name or "attn" in name) and "backward" not in name
    return name in PRODUCTS or is_attention or _is_collective(func)


@functools.cache
def _written_places(func: Any) -> tuple[int | str, ...]:
    """Arguments that it writes into, by place or name."""
    space, name = _spelled(func)
    if space == "c10d":  # their schemas do not say so
        return () if name in _WRITES_NOTHING else (0,)
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = [kwargs.get(at) if isinstance(at, str) else args[at] for at in _written_places(func)]
    return _tensors(given)


def _tensors(values: Any) -> list[Tensor]:
    """Operators take and make tensors, and lists of them."""
    if isinstance(values, Tensor):
        return [values]
    found = []
    for value in values if isinstance(values, list | tuple) else ():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _covers(tensor: Tensor) -> bool:
    """All of its storage, not a part."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


@dataclass
class KeptResult:
    """What one dear operator made."""

    what: Any
    made: Any
    """Its result, tensors as they were."""
    written: list[Tensor]
    """What it wrote into tensors that it was given."""
    storages: set[int]
    is_read: bool = False
    """Since it was made."""


@dataclass(frozen=True)
class ForwardOp:
    """An operator of the forward, as far as it matters who needs whose results."""

    reads: set[int]
    makes: set[int]
    """Storages that hold what it made."""
    begins: set[int]
    """Those of them that held nothing of use before."""
    kept: KeptResult | None
    must_run: bool
    """Somebody may look at its result who is no operator."""


@dataclass
class Known:
    """Of a block, from forwards that were looked at: to look at every operator takes the host longer than it does."""

    idle: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the operators of a forward, places of what was kept and nothing depended on."""
    must_look: bool = True


class Keeping(TorchDispatchMode):
    """Around a block's forward."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known, self.is_looking = known, known.must_look
        self.kept: list[KeptResult] = []
        self.steps: list[ForwardOp] = []
        self.operators = 0
        """A number that stands for those that were called."""
        self.is_aside = self.has_arrivals = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_aside:
            return func(*args, **kwargs)
        self.operators = hash((self.operators, func))
        dear = is_dear(func)
        if not (self.is_looking or dear or _written_places(func)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        reads = _storages(_tensors((*args, *kwargs.values()))) if self.is_looking else set()
        self._save_from(func, written, reads, dear)
        made = func(*args, **kwargs)
        if dear:
            self._keep(func, made, written, reads)
        elif self.is_looking:
            self._note(_tensors(made), written, reads, None)
        return made

    def once(self, what: Any, run: Callable[[], Any]) -> Any:
        self.is_aside = True
        try:
            made = run()
        finally:
            self.is_aside = False
        self._keep(what, made, [], set())
        return made

    def _keep(self, what: Any, made: Any, written: list[Tensor], reads: set[int]) -> None:
        inside = _storages(written)
        # What was given to be written into is handed back as it is given again; handles of messages are not kept.
        own = tree_map(lambda value: _held(value, inside), made)
        kept = KeptResult(what, own, [each.detach() for each in written], _storages(_tensors(own)) | inside)
        self.kept.append(kept)
        if self.is_looking:
            self._note(_tensors(made), written, reads, kept)

    def _note(self, made: list[Tensor], written: list[Tensor], reads: set[int], kept: KeptResult | None) -> None:
        makes = _storages(made) | _storages(written)
        whole = _storages(each for each in written if _covers(each)) if kept is not None else set()
        begins = (makes - reads) | whole
        is_seen = not makes or any(not each.is_floating_point() for each in (*made, *written))
        self.steps.append(ForwardOp(reads, makes, begins, kept, is_seen))

    def _save_from(self, func: Any, written: list[Tensor], reads: set[int], dear: bool) -> None:
        """What is kept and about to be written over is kept as a copy. (Parts of one tensor are written in turn; and a
        message may be copied to its place only when it is waited for.)"""
        over = _storages(each for each in written if not dear or _covers(each))
        if not over and not self.is_looking:
            return
        is_copy = self.is_looking and _spelled(func) == ("aten", "copy_")
        for kept in self.kept:
            is_arrival = is_copy and not kept.is_read and bool(kept.storages & over)
            self.has_arrivals = self.has_arrivals or is_arrival
            if kept.storages & over and not is_arrival:
                kept.made = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, kept.made)
                kept.written = [each.clone() for each in kept.written]
                kept.storages = set()
            kept.is_read = kept.is_read or bool(kept.storages & (reads - over))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, what autograd saves is noted before whoever asked for it gets it."""
        if not self.is_looking:
            yield
            return
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def note(tensor: Tensor) -> Any:
            # As a step, in its turn: memory that is let go of becomes another tensor's.
            self.steps.append(ForwardOp(_storages([tensor]), set(), set(), None, must_run=True))
            return pack(tensor)

        with saved_tensors_hooks(note, unpack):
            yield

    def forget_idle(self) -> None:
        """Let go of what nothing depends on that autograd has saved."""
        if self.is_looking:
            self.known.idle[self.operators] = self._idle()
        # Where messages arrive when they are waited for, only a look tells that from writing over them.
        self.known.must_look = self.has_arrivals or self.operators not in self.known.idle
        for place in self.known.idle.get(self.operators, ()):
            kept = self.kept[place]
            kept.made, kept.written = tree_map(_blank, kept.made), []

    def _idle(self) -> tuple[int, ...]:
        """Followed from the end of the forward."""
        needed: set[int] = set()
        idle: set[int] = set()
        for step in reversed(self.steps):
            is_needed = step.must_run or bool(step.makes & needed)
            needed -= step.begins
            if step.kept is None:
                needed |= step.reads if is_needed else set()
            elif not is_needed:
                idle.add(id(step.kept))
        self.steps = []
        return tuple(place for place, kept in enumerate(self.kept) if id(kept) in idle)


def _held(value: Any, inside: set[int]) -> Any:
    if isinstance(value, Tensor):
        return _Given() if _storages([value]) & inside else value.detach()
    return _Done() if isinstance(value, torch.ScriptObject) else value


class _Given:
    """A tensor that the operator was given and wrote into."""


class _Done:
    """The handle of a message."""


@dataclass
class _Blank:
    """The shape of a tensor whose numbers nobody needs."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        blank = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return blank.zero_()  # anything may be computed from it, and must not go wrong


def _blank(value: Any) -> Any:
    return _Blank(value.size(), value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value


class Recalling(TorchDispatchMode):
    """Around a block's replay."""

    def __init__(self, keeping: Keeping):
        super().__init__()
        self.keeping, self.place = keeping, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._recall(func, _written(func, args, kwargs)) if is_dear(func) else func(*args, **kwargs)

    def once(self, what: Any, run: Callable[[], Any]) -> Any:
        return self._recall(what, [])

    def _recall(self, what: Any, given: list[Tensor]) -> Any:
        place, self.place = self.place, self.place + 1
        if place >= len(self.keeping.kept) or self.keeping.kept[place].what is not what:
            raise RuntimeError(f"a block's replay calls {what} where its forward did not: it cannot be recomputed.")
        kept = self.keeping.kept[place]
        for old, new in zip(kept.written, given, strict=bool(kept.written)):
            new.copy_(old)
        left = iter(given)

        def hand_out(value: Any) -> Any:
            if isinstance(value, _Given):
                return next(left)
            if isinstance(value, _Done):
                return torch._C._distributed_c10d.FakeWork().boxed()
            return value.made() if isinstance(value, _Blank) else value

        made = tree_map(hand_out, kept.made)
        kept.made, kept.written = None, []  # asked for once
        return made


def once(what: Any, run: Callable[[], Any]) -> Any:
    """`run()`, whose result is kept as a whole where a block keeps what is dear: nothing inside of it is run again."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, Keeping | Recalling):
            return mode.once(what, run)
    return run()


def _policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_dear(func) else CheckpointPolicy.PREFER_RECOMPUTE


def selectively_recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, keeping its inputs and what is dear to compute until backward needs the rest."""
    known = Known()

    def contexts() -> tuple[Any, Any]:
        # Decided here and not when `checkpoint` is called: a compiler that meets something in the block that it cannot
        # trace gives the block up, and the call it was tracing runs as it is written.
        if TracingContext.try_get() is not None:
            return create_selective_checkpoint_contexts(_policy)
        keeping = Keeping(known)
        return keeping, Recalling(keeping)

    def run(*args: Any, **kwargs: Any) -> Any:
        modes = [] if torch.compiler.is_compiling() else _get_current_dispatch_mode_stack()
        keeping = modes[-1] if modes else None
        if not isinstance(keeping, Keeping):
            return forward(*args, **kwargs)
        with keeping.watched():
            made = forward(*args, **kwargs)
        keeping.forget_idle()
        return made

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return wrapped
