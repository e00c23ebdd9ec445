"""Blocks whose weights pass through a ring of buffers compute what blocks with weights of their own compute.

Tests of `ops/host_memory.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwright.ops.host_memory import CopyLanes, HostUnit, flat_views
from meshwright.ops.recompute import recomputed
from meshwright.ops.weight_ring import WeightRing

WIDTH = 6


class Residual(nn.Module):
    """Keeps views of its weight, and a product of two of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = x @ (self.linear.weight * self.scale).t() + self.linear.bias
        return x + inner.tanh(), inner


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.square().sum()


def unit_of(block: nn.Module) -> HostUnit:
    parameters = tuple(block.parameters())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    views = flat_views(flat, parameters)
    names = tuple(name for name, _ in block.named_parameters())
    home = {"masters": views, "flat_masters": flat, "working": views, "flat_working": flat}
    unit = HostUnit(module=block, is_block=True, names=names, parameters=parameters, **home)
    unit.is_streamed = True
    unit.let_go()
    return unit


def streamed(depth: int, buffers: int, *, keeps: bool = True, wrap: Callable[..., object] | None = None):
    """(one device's model, the same with streamed weights, its units, its lanes)."""
    torch.manual_seed(0)
    plain = Stack(depth).double()
    other = copy.deepcopy(plain)
    for block in other.blocks:
        block.forward = block.forward if wrap is None else wrap(block.forward)
    units, lanes = [unit_of(block) for block in other.blocks], CopyLanes(torch.device("cpu"))
    WeightRing([units], buffers, lanes, keeps=keeps)
    return plain, other, units, lanes


def gradients(model: nn.Module, microbatches: int) -> list[Tensor]:
    model.zero_grad()
    for number in range(microbatches):
        torch.manual_seed(10 + number)
        model(torch.randn(3, WIDTH, dtype=torch.float64)).backward()
    return [parameter.grad for parameter in model.parameters()]


def held_bytes(units: list[HostUnit]) -> int:
    """Memory behind the parameters, each storage once."""
    storages = [parameter.untyped_storage() for unit in units for parameter in unit.parameters]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


WRAPS = {"kept": None, "recomputed": recomputed, "compiled": lambda run: torch.compile(run, backend="aot_eager")}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("buffers", [2, 3])
def test_gradients_are_those_of_weights_that_stay(wrap: str, buffers: int, keeps: bool) -> None:
    torch._dynamo.reset()
    plain, other, _, _ = streamed(7, buffers, keeps=keeps, wrap=WRAPS[wrap])
    for mine, theirs in zip(gradients(other, 2), gradients(plain, 2), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("depth", "buffers"), [(7, 2), (7, 3), (3, 2), (2, 3), (1, 2)])
def test_copies_of_a_step_are_those_of_the_price(depth: int, buffers: int) -> None:
    _, other, units, lanes = streamed(depth, buffers)
    each, left = units[0].flat_working.numel() * 8, max(depth - buffers, 0)
    for step in range(2):
        for unit in units if step else ():
            unit.version += 1
        lanes.moved.clear()
        gradients(other, 3)
        assert lanes.moved["host", "device"] == (min(depth, buffers) + 3 * 2 * left) * each


def test_without_what_was_left_every_run_copies_all() -> None:
    _, other, units, lanes = streamed(5, 2, keeps=False)
    gradients(other, 3)
    assert lanes.moved["host", "device"] == 3 * 2 * 5 * units[0].flat_working.numel() * 8


def test_new_values_are_copied_once_they_are_counted() -> None:
    plain, other, units, _ = streamed(2, 2)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(other(x), plain(x))
        for unit, block in zip(units, plain.blocks, strict=True):
            unit.flat_working += 1.0
            unit.version += 1
            for parameter in block.parameters():
                parameter += 1.0
        torch.testing.assert_close(other(x), plain(x))


@pytest.mark.parametrize("depth", [3, 12])
def test_memory_does_not_grow_with_depth(depth: int) -> None:
    _, other, units, _ = streamed(depth, 2, wrap=recomputed)
    peaks = []
    for block in other.blocks:
        block.register_forward_hook(lambda *_: peaks.append(held_bytes(units)))
    gradients(other, 1)
    each = units[0].flat_working.numel() * 8
    assert 2 * each <= max(peaks) <= 2 * each + len(units) * 8  # an element without use for each unit
