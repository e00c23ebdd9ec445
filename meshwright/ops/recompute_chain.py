"""Blocks that follow each other, of whose inputs only a few are kept: the others are made again when backward comes.

Each block is a checkpoint, but what the checkpoint keeps as its input is a promise. The first to be asked, the last
block's, runs the blocks from the nearest input that is there, and on the way leaves inputs in the slots that are free
(`core/revolve.py` says which). Blocks are asked in turn from the end, so slots become free as backward goes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from meshwright.core.revolve import places_kept

Forward = Callable[..., Any]


@dataclass
class Call:
    """How a block was called, but for its input; and in which surroundings."""

    forward: Forward
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    autocast: torch.dtype | None
    numbers: Tensor
    """The state of the generator of random numbers."""
    device_numbers: tuple[list[int], list[Tensor]]

    def run_again(self, x: Tensor) -> Tensor:
        kind = self.device.type
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self.device_numbers[0], device_type=kind))
            torch.set_rng_state(self.numbers)
            if self.device_numbers[0]:
                set_device_states(*self.device_numbers, device_type=kind)
            stack.enter_context(torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None))
            # As in training, where a block may do more than without gradients.
            stack.enter_context(torch.enable_grad())
            return handed_on(self.forward(x, *self.args, **self.kwargs)).detach()


def _call(forward: Forward, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    kind = x.device.type
    lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    states = get_device_states(x) if kind != "cpu" else ([], [])
    return Call(forward, args, kwargs, x.device, lower, torch.get_rng_state(), states)


def handed_on(output: Any) -> Tensor:
    """Of what a block returns, the tensor that the next one is given."""
    return output[0] if isinstance(output, tuple) else output


@dataclass
class Pass:
    """One microbatch on its way through a chain."""

    chain: Chain
    start: int
    """The block at which it began."""
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """By block; those that have a slot."""
    calls: dict[int, Call] = field(default_factory=dict)
    left: tuple[int, torch.Size] = (0, torch.Size())
    """Where the last block's output lies."""

    def __post_init__(self) -> None:
        places = places_kept(self.chain.slots, len(self.chain.blocks) - self.start)
        self.kept_places = {self.start + place for place in places}

    def enter(self, place: int, x: Tensor, call: Call) -> None:
        self.calls[place] = call
        if place in self.kept_places:
            self.inputs[place] = x.detach()

    def input_of(self, place: int) -> Tensor:
        """It leaves its slot: the block's own replay is the last to ask for it."""
        if place not in self.inputs:
            self._reach(place)
        del self.calls[place]
        return self.inputs.pop(place)

    def _reach(self, place: int) -> None:
        nearest = max(each for each in self.inputs if each < place)
        free = self.chain.slots - sum(each < nearest for each in self.inputs)
        kept = {nearest + each for each in places_kept(free, place - nearest + 1, is_first=False)}
        x = self.inputs[nearest]
        for each in range(nearest, place):
            x = self.calls[each].run_again(x)
            if each + 1 in kept or each + 1 == place:
                self.inputs[each + 1] = x


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
            named = "" if args else next(iter(kwargs))
            x = args[0] if args else kwargs[named]
            rest = {name: value for name, value in kwargs.items() if name != named}
            run = _by_name(forward, named) if named else forward
            return self._forward(place, run, x, args[1:], rest)

        return wrapped

    def _forward(self, place: int, run: Forward, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        here = self.current
        # What is not the last block's output begins anew, with a slot of its own.
        if here is None or place == 0 or here.left != _spot(x):
            here = self.current = Pass(self, place)
        here.enter(place, x, _call(run, x, args, kwargs))
        spot, promised = _spot(x), here

        def keep(tensor: Tensor) -> Any:
            return _Promise(promised, place) if _spot(tensor) == spot else tensor

        def give(kept: Any) -> Tensor:
            return kept.of.input_of(kept.place) if isinstance(kept, _Promise) else kept

        with saved_tensors_hooks(keep, give):
            made = checkpoint(run, x, *args, use_reentrant=False, **kwargs)
        here.left = _spot(handed_on(made))
        if place == len(self.blocks) - 1:
            self.current = None
        return made


@dataclass(frozen=True)
class _Promise:
    of: Pass
    place: int


def _by_name(forward: Forward, name: str) -> Forward:
    def run(x: Tensor, **kwargs: Any) -> Any:
        return forward(**{name: x}, **kwargs)

    return run


def _spot(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.size()
