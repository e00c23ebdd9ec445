"""Our batch norm is torch's, and over ranks it is that of all their samples."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.ops.batch_norm import BatchNorm

SIZE = 5


def ours() -> BatchNorm:
    norm = BatchNorm(SIZE).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, SIZE))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, SIZE))
    return norm


def step(norm: nn.Module, x: torch.Tensor, direction: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients of input, weight and bias, and what is remembered."""
    x = x.clone().requires_grad_()
    out = norm(x)
    grads = torch.autograd.grad((out * direction).sum(), [x, norm.weight, norm.bias])
    return [out.detach(), *grads, norm.running_mean.clone(), norm.running_var.clone()]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, SIZE, 3, 3, generator=draw, dtype=torch.float64) * 3 + 1
    return x, torch.randn(x.shape, generator=draw, dtype=torch.float64)


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_alone_it_is_torchs_in_training_and_in_evaluation() -> None:
    x, direction = batch()
    mine, theirs = ours(), nn.BatchNorm2d(SIZE).double()
    theirs.load_state_dict({**mine.state_dict(), "num_batches_tracked": torch.tensor(0)})
    close(step(mine, x, direction), step(theirs, x, direction))
    close(step(mine.eval(), x, direction), step(theirs.eval(), x, direction))


class Group:
    """Ranks as threads: what a process group does to a tensor, in one process."""

    def __init__(self, ways: int):
        self.ways, self.barrier, self.tensors = ways, threading.Barrier(ways), {}

    def size(self) -> int:
        return self.ways

    def sum(self, tensor: torch.Tensor) -> None:
        self.tensors[threading.get_ident()] = tensor.clone()
        self.barrier.wait(10)
        tensor.copy_(sum(self.tensors.values()))
        self.barrier.wait(10)


def test_over_two_axes_of_ranks_it_is_that_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, direction = batch()
    expected = step(ours(), x, direction)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: group.sum(tensor))
    along, across = [Group(2), Group(2)], [Group(2), Group(2)]
    found: dict[int, Any] = {}

    def rank(index: int) -> None:
        norm = ours()
        norm.groups = (along[index // 2], across[index % 2])  # type: ignore[assignment]
        rows = slice(2 * index, 2 * index + 2)
        found[index] = step(norm, x[rows], direction[rows])

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    parts = [found[index] for index in range(4)]
    joined = [torch.cat([part[i] for part in parts]) for i in (0, 1)]
    close([*joined, *(sum(part[i] for part in parts) for i in (2, 3))], expected[:4])
    for part in parts:
        close(part[4:], expected[4:])


def test_a_forward_computed_again_is_remembered_once() -> None:
    x, direction = batch()
    once, again = ours(), ours()
    expected = step(once, x, direction)
    x = x.clone().requires_grad_()
    (checkpoint(again, x, use_reentrant=False) * direction).sum().backward()
    close([x.grad, again.running_mean, again.running_var], [expected[1], *expected[4:]])


def test_few_bits_in_few_bits_out_and_statistics_in_many() -> None:
    x, _ = batch()
    norm = ours().float()
    out = norm((x + 200).bfloat16())
    assert out.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    assert float((norm.running_mean - 20.1).abs().max()) < 0.2
