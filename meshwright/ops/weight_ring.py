"""A ring of device buffers through which the weights of blocks pass, forward and backward.

The home of such a block's weights is `HostUnit.flat_working`. Before the block runs they are copied into a buffer, the
same for each of its runs, and its parameters become views of that buffer; when another block takes the buffer they are
without memory again. Blocks are bound to the buffers in turn, so that blocks of one shape share compiled code.

    compute         | block 3      | block 4      | block 5      |        2 buffers: block 5 goes where 3 has been,
    copies in  | 4      | | 5      | | 6      |                           once 3 has ended

Backward needs the weights again: they come with the first gradient of the block's output. What autograd has kept since
forward, a parameter or a view of one, then has its values again, since they lie where they lay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from meshwright.ops.host_memory import CopyLanes, HostUnit, flat_views


@dataclass(eq=False)
class RingBuffer:
    memory: Tensor
    unit: HostUnit | None = None
    """Whose weights it has."""
    version: int = 0
    """Of the unit, when its weights were copied."""
    arrived: torch.cuda.Event | None = None


@dataclass(frozen=True, eq=False)
class StreamedBlock:
    unit: HostUnit
    buffer: RingBuffer
    views: tuple[Tensor, ...]
    """Of the buffer, one for each parameter."""


class WeightRing:
    def __init__(self, runs: Sequence[Sequence[HostUnit]], count: int, lanes: CopyLanes, *, keeps: bool):
        """`runs`: units of blocks that follow each other. `keeps`: a run begins with what the one before has left in
        the buffers, else with nothing."""
        self.lanes, self.keeps = lanes, keeps
        units = [unit for run in runs for unit in run]
        size, first = max(unit.flat_working.numel() for unit in units), units[0].flat_working
        self.buffers = [RingBuffer(first.new_empty(size, device=lanes.device)) for _ in range(min(count, len(units)))]
        self.began: torch.cuda.Event | None = None
        """What was launched before the block that was bound last has ended."""
        number = 0
        for run in runs:
            blocks: list[StreamedBlock] = []
            for at, unit in enumerate(run):
                buffer = self.buffers[number % len(self.buffers)]
                views = flat_views(buffer.memory[: unit.flat_working.numel()], unit.parameters)
                blocks.append(StreamedBlock(unit, buffer, views))
                assert unit.module is not None
                unit.module.forward = self._streamed(blocks, at, unit.module.forward)
                number += 1

    def _streamed(self, run: list[StreamedBlock], at: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def go_back(_: Tensor) -> None:
            self._bind(run[at], is_first=at == len(run) - 1)
            self._prefetch(run[max(at - len(self.buffers) + 1, 0) : at][::-1])

        def go_forward(*given: Any, **named: Any) -> Any:
            self._bind(run[at], is_first=at == 0)
            made = forward(*given, **named)
            # After the launch: the host may have to wait for a block's update.
            self._prefetch(run[at + 1 : at + len(self.buffers)])
            outputs = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, go_back, mode="any")
            return made

        return go_forward

    def _bind(self, block: StreamedBlock, is_first: bool) -> None:
        """Let the parameters have their values, for what is launched from here on."""
        for buffer in self.buffers if is_first and not self.keeps else ():
            self._empty(buffer)
        self._fetch(block, None)
        if self.lanes.inward is not None:
            compute = torch.cuda.current_stream(self.lanes.device)
            assert block.buffer.arrived is not None
            compute.wait_event(block.buffer.arrived)
            self.began = torch.cuda.Event()
            self.began.record(compute)

    def _prefetch(self, blocks: list[StreamedBlock]) -> None:
        for block in blocks:
            self._fetch(block, self.began)

    def _fetch(self, block: StreamedBlock, after: torch.cuda.Event | None) -> None:
        """Copy the weights of a block into its buffer, unless they are there."""
        buffer, unit = block.buffer, block.unit
        unit.wait()
        if buffer.unit is unit and buffer.version == unit.version:
            return
        self._empty(buffer)
        for parameter, view in zip(unit.parameters, block.views, strict=True):
            parameter.data = view
        home, buffer.unit, buffer.version = unit.flat_working, unit, unit.version
        if self.lanes.inward is not None and after is not None:
            self.lanes.inward.wait_event(after)
        buffer.arrived = self.lanes.copy_in(buffer.memory[: home.numel()], home, waits=after is None)

    def _empty(self, buffer: RingBuffer) -> None:
        if buffer.unit is not None:
            buffer.unit.let_go()
            buffer.unit = None
