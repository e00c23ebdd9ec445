"""Blocks whose activations are computed again when backward needs them.

`recomputed` keeps a block's inputs only. `selectively_recomputed` also keeps what is expensive to compute: in forward
the results of attention, collectives and, unless told otherwise, products are kept, and the replay, which runs every
other operator again, is handed them. Which are kept is decided by the operators that are dispatched, whatever module
dispatches them. Of those, only results that the replay's own results depend on stay after the forward: not the product
that ends a block, nor a partial one that only a collective reads; nor are these run again. (torch's selective contexts
keep them all, and cannot hand out what a collective writes into a tensor it is given; they serve where a compiler
traces the block.)

In a `Chain` of blocks that follow each other only a few inputs are kept, the others are made again. Each block is a
checkpoint, but what the checkpoint keeps as its input is a promise. The first to be asked, the last block's, runs the
blocks from the nearest input that is there, and on the way leaves inputs in the slots that are free (`core/revolve.py`
says which). Blocks are asked in turn from the end, so slots become free as backward goes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
    set_device_states,
)

from meshwright.core.revolve import places_kept

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "linear", "convolution", "_convolution"}
PRODUCTS |= {"_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "_addmm_activation", "_trilinear"}
COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "meshwright"}
"""Namespaces; whatever of them writes into a tensor writes into its first argument."""
_WRITES_NOTHING = {"send", "barrier", "monitored_barrier_"}


@functools.cache
def spelled(func: Any) -> tuple[str, str]:
    if isinstance(func, torch._ops.HigherOrderOperator):
        return "higher_order", func.name()
    space, name = func._schema.name.split("::")
    return space, name


@functools.cache
def is_expensive(func: Any) -> bool:
    """Whether to run it again costs more than to keep what it made."""
    space, name = spelled(func)
    is_attention = ("attention" in name or "attn" in name) and "backward" not in name
    return is_product(func) or is_attention or (space in COLLECTIVES and name != "wait_tensor")


@functools.cache
def is_product(func: Any) -> bool:
    return spelled(func)[1] in PRODUCTS


@functools.cache
def _written_places(func: Any) -> tuple[int | str, ...]:
    """Arguments that it writes into, by place or name."""
    space, name = spelled(func)
    if space == "c10d":  # their schemas do not say so
        return () if name in _WRITES_NOTHING else (0,)
    return tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    return _tensors([kwargs.get(at) if isinstance(at, str) else args[at] for at in _written_places(func)])


def _tensors(values: Any) -> list[Tensor]:
    """Operators take and make tensors, and lists of them."""
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return [values] if isinstance(values, Tensor) else []


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _covers(tensor: Tensor) -> bool:
    """All of its storage, not a part."""
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


@dataclass
class KeptResult:
    """What one expensive operator made."""

    func: Any
    made: Any
    """Its result, tensors as they were."""
    written: list[Tensor]
    """What it wrote into tensors that it was given."""
    storages: set[int]
    is_read: bool = False
    """Since it was made."""
    runs_again: bool = False
    """Only its shape is kept, for the case that nothing depends on it."""


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
class ForwardMemory:
    """What a block keeps, from observed forwards: observing an operator takes the host longer than running it."""

    idle: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the operators of a forward, places of what was kept and nothing depended on."""
    must_look: bool = True


class KeepMode(TorchDispatchMode):
    """Around a block's forward."""

    def __init__(self, known: ForwardMemory, keeps_products: bool) -> None:
        super().__init__()
        self.known, self.is_looking, self.keeps_products = known, known.must_look, keeps_products
        self.kept: list[KeptResult] = []
        self.steps: list[ForwardOp] = []
        self.operators = 0
        """A number that stands for those that were called."""
        self.has_arrivals = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operators = hash((self.operators, func))
        expensive = is_expensive(func)
        if not (self.is_looking or expensive or _written_places(func)):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        reads = _storages(_tensors((*args, *kwargs.values()))) if self.is_looking else set()
        self._save_from(func, written, reads, expensive)
        made = func(*args, **kwargs)
        if expensive:
            self._keep(func, made, written, reads, not self.keeps_products and is_product(func))
        elif self.is_looking:
            self._note(_tensors(made), written, reads, None)
        return made

    def _keep(self, func: Any, made: Any, written: list[Tensor], reads: set[int], again: bool) -> None:
        inside = _storages(written)

        # What was given to be written into is handed back as it is given again; handles of messages are not kept.
        def held(value: Any) -> Any:
            if isinstance(value, Tensor):
                result = _blank(value) if again else value.detach()
                return _GIVEN if _storages([value]) & inside else result
            return _DONE if isinstance(value, torch.ScriptObject) else value

        own = tree_map(held, made)
        copies = [] if again else [each.detach() for each in written]
        kept = KeptResult(func, own, copies, _storages([*_tensors(own), *copies]), runs_again=again)
        self.kept.append(kept)
        if self.is_looking:
            self._note(_tensors(made), written, reads, kept)

    def _note(self, made: list[Tensor], written: list[Tensor], reads: set[int], kept: KeptResult | None) -> None:
        makes = _storages(made) | _storages(written)
        whole = _storages(each for each in written if _covers(each)) if kept is not None else set()
        begins = (makes - reads) | whole
        is_seen = not makes or any(not each.is_floating_point() for each in (*made, *written))
        self.steps.append(ForwardOp(reads, makes, begins, kept, is_seen))

    def _save_from(self, func: Any, written: list[Tensor], reads: set[int], expensive: bool) -> None:
        """What is kept and about to be written over is kept as a copy. (Parts of one tensor are written in turn; and a
        message may be copied to its place only when it is waited for.)"""
        over = _storages(each for each in written if not expensive or _covers(each))
        if not over and not self.is_looking:
            return
        is_copy = self.is_looking and spelled(func) == ("aten", "copy_")
        for kept in self.kept:
            is_arrival = is_copy and not kept.is_read and bool(kept.storages & over)
            self.has_arrivals = self.has_arrivals or is_arrival
            if kept.storages & over and not is_arrival:
                kept.made = tree_map_only(Tensor, Tensor.clone, kept.made)
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
        if self.is_looking:  # followed from the end of the forward
            needed, idle = set[int](), set[int]()
            for step in reversed(self.steps):
                is_needed = step.must_run or bool(step.makes & needed)
                needed -= step.begins
                if step.kept is not None and not is_needed:
                    idle.add(id(step.kept))
                elif is_needed and (step.kept is None or step.kept.runs_again):
                    needed |= step.reads
            self.steps = []
            self.known.idle[self.operators] = tuple(at for at, kept in enumerate(self.kept) if id(kept) in idle)
        # Where messages arrive when they are waited for, only a look tells that from writing over them.
        self.known.must_look = self.has_arrivals or self.operators not in self.known.idle
        for place in self.known.idle.get(self.operators, ()):
            kept = self.kept[place]
            kept.runs_again = False
            kept.made, kept.written = tree_map_only(Tensor, _blank, kept.made), []


_GIVEN, _DONE = "given", "done"
"""In the place of a tensor that the operator was given and wrote into, and of the handle of a message."""


def _blank(value: Tensor) -> functools.partial[Tensor]:
    """What makes a tensor of this shape, whose numbers nobody needs."""
    return functools.partial(torch.empty_strided, value.size(), value.stride(), dtype=value.dtype, device=value.device)


class ReplayMode(TorchDispatchMode):
    """Around a block's replay."""

    def __init__(self, keeping: KeepMode):
        super().__init__()
        self.keeping, self.place = keeping, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_expensive(func):
            return func(*args, **kwargs)
        place, self.place = self.place, self.place + 1
        if place >= len(self.keeping.kept) or self.keeping.kept[place].func is not func:
            raise RuntimeError(f"a block's replay calls {func} where its forward did not: it cannot be recomputed.")
        kept, given = self.keeping.kept[place], _written(func, args, kwargs)
        if kept.runs_again:
            return func(*args, **kwargs)
        for old, new in zip(kept.written, given, strict=bool(kept.written)):
            new.copy_(old)
        left = iter(given)

        def hand_out(value: Any) -> Any:
            if value is _GIVEN:
                return next(left)
            if value is _DONE:
                return torch._C._distributed_c10d.FakeWork().boxed()
            # Of zeros: anything may be computed from it, and must not go wrong.
            return value().zero_() if isinstance(value, functools.partial) else value

        made = tree_map(hand_out, kept.made)
        kept.made, kept.written = None, []  # asked for once
        return made


def selectively_recomputed(forward: Callable[..., Any], *, keeps_products: bool = True) -> Callable[..., Any]:
    """`forward`, keeping its inputs and what is expensive to compute until backward needs the rest."""
    known = ForwardMemory()

    def policy(keeps_products: bool, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = is_expensive(func) and (keeps_products or not is_product(func))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(keeps_products: bool) -> tuple[Any, Any]:
        # Decided here and not when `checkpoint` is called: a compiler that meets something in the block that it cannot
        # trace gives the block up, and the call it was tracing runs as it is written.
        if TracingContext.try_get() is not None:
            return create_selective_checkpoint_contexts(functools.partial(policy, keeps_products))
        keeping = KeepMode(known, keeps_products)
        return keeping, ReplayMode(keeping)

    def run(*args: Any, **kwargs: Any) -> Any:
        modes = [] if torch.compiler.is_compiling() else _get_current_dispatch_mode_stack()
        keeping = modes[-1] if modes else None
        if not isinstance(keeping, KeepMode):
            return forward(*args, **kwargs)
        with keeping.watched():
            made = forward(*args, **kwargs)
        keeping.forget_idle()
        return made

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # A compiler does not look into `contexts`: it would take a block's graph for that of one that keeps more.
        both = functools.partial(contexts, keeps_products)
        return checkpoint(run, *args, use_reentrant=False, context_fn=both, **kwargs)

    return wrapped


Forward = Callable[..., Any]


def replayed(
    forward: Forward, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    """What runs a block again on its input, with its other arguments and in the surroundings of now: autocast, and the
    states of the generators of random numbers."""
    kind = given.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    numbers, states = torch.get_rng_state(), get_device_states(given) if kind != "cpu" else ([], [])

    def run(x: Tensor) -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=states[0], device_type=kind))
            torch.set_rng_state(numbers)
            if states[0]:
                set_device_states(*states, device_type=kind)
            stack.enter_context(torch.autocast(kind, dtype=lower, enabled=lower is not None))
            # As in training, where a block may do more than without gradients.
            stack.enter_context(torch.enable_grad())
            return handed_on(forward(x, *args, **kwargs)).detach()

    return run


def handed_on(output: Any) -> Tensor:
    """The tensor in a block's output that the next block is given."""
    return output[0] if isinstance(output, tuple) else output


@dataclass
class Pass:
    """One microbatch on its way through a chain."""

    chain: Chain
    start: int
    """The block at which it began."""
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """By block; those that have a slot."""
    again: dict[int, Forward] = field(default_factory=dict)
    """By block; what runs it on its input."""
    left: tuple[int, torch.Size] = (0, torch.Size())
    """Where the last block's output lies."""

    def __post_init__(self) -> None:
        places = places_kept(self.chain.slots, len(self.chain.blocks) - self.start)
        self.kept_places = {self.start + place for place in places}

    def input_of(self, place: int) -> Tensor:
        """It leaves its slot: the block's own replay is the last to ask for it."""
        if place not in self.inputs:
            nearest = max(each for each in self.inputs if each < place)
            free = self.chain.slots - sum(each < nearest for each in self.inputs)
            kept = {nearest + each for each in places_kept(free, place - nearest + 1, is_first=False)}
            x = self.inputs[nearest]
            for each in range(nearest, place):
                x = self.again[each](x)
                if each + 1 in kept or each + 1 == place:
                    self.inputs[each + 1] = x
        del self.again[place]
        return self.inputs.pop(place)


class Chain:
    def __init__(self, blocks: list[nn.Module], slots: int):
        self.slots, self.blocks = slots, blocks
        self.current: Pass | None = None
        for place, block in enumerate(blocks):
            block.forward = self._linked(place, block.forward)

    def _linked(self, place: int, forward: Forward) -> Forward:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if args:
                return self._forward(place, forward, args[0], args[1:], kwargs)
            (name, x), *rest = kwargs.items()
            by_name = lambda x, **others: forward(**{name: x}, **others)  # noqa: E731
            return self._forward(place, by_name, x, (), dict(rest))

        return wrapped

    def _forward(self, place: int, run: Forward, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = self.current
        # What is not the last block's output begins anew, with a slot of its own.
        if here is None or place == 0 or here.left != _spot(x):
            here = self.current = Pass(self, place)
        here.again[place] = replayed(run, x, args, kwargs)
        if place in here.kept_places:
            here.inputs[place] = x.detach()
        spot, promised = _spot(x), here

        def keep(tensor: Tensor) -> Any:
            return functools.partial(promised.input_of, place) if _spot(tensor) == spot else tensor

        with saved_tensors_hooks(keep, lambda kept: kept() if isinstance(kept, functools.partial) else kept):
            made = checkpoint(run, x, *args, use_reentrant=False, **kwargs)
        here.left = _spot(handed_on(made))
        if place == len(self.blocks) - 1:
            self.current = None
        return made


def _spot(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.size()


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, keeping only its inputs until backward needs the rest."""

    def contexts() -> tuple[Any, Any]:
        if TracingContext.try_get() is None:
            return nullcontext(), nullcontext()
        # Without a policy a compiler keeps what autograd functions inside the block made (torch 2.11).
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return wrapped


def writes_in_place(module: nn.Module) -> bool:
    """Whether it may write into what it is given, as `nn.ReLU(inplace=True)` does."""
    return any(getattr(each, "inplace", False) is True for each in module.modules())


def on_copies(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward` of copies of its tensors: a replay must find its inputs as they were."""

    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        copied = [each.clone() if isinstance(each, Tensor) and each.is_floating_point() else each for each in args]
        return forward(*copied, **kwargs)

    return wrapped
