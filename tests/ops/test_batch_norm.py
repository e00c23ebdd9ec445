"""Our batch norm is torch's, and over ranks it is that of all their samples.

Tests of `ops/device_mesh.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.launch.rank_pool import RankPool
from meshwright.ops.batch_norm import BatchNorm
from meshwright.ops.device_mesh import Mesh
from meshwright.verify import parity

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


def norm_job(*, offset: float, spread: float, dtype: str, rank: int, num_ranks: int, rendezvous: str) -> list[Any]:
    """Largest errors of one of four ranks, on two axes, against float64 on one device."""
    x, direction = batch()
    x = (x * spread + offset).to(getattr(torch, dtype))
    expected = step(ours(), x.double(), direction)
    parity.enter(rank, num_ranks, rendezvous)
    mesh = Mesh.make({"one": 2, "other": 2}, torch.device("cpu"))
    norm = ours().to(x.dtype)
    norm.groups = (mesh.group("one"), mesh.group("other"))
    rows = slice(2 * rank, 2 * rank + 2)
    found = step(norm, x[rows], direction[rows].to(x.dtype))
    for index in (2, 3):  # gradients of weight and bias are sums over ranks
        dist.all_reduce(found[index])
    wanted = [expected[0][rows], expected[1][rows], *expected[2:]]
    parity.leave()
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(
    ("offset", "spread", "dtype", "tolerance"),
    [(0.0, 1.0, "float64", 1e-11), (1000.0, 0.03, "float32", 5e-3), (-3e4, 1.0, "float32", 5e-3)],
)
def test_over_two_axes_of_ranks_it_is_that_of_the_whole_batch(
    offset: float, spread: float, dtype: str, tolerance: float, pool: RankPool
) -> None:
    arguments = {"offset": offset, "spread": spread, "dtype": dtype}
    for errors in pool.run("test_batch_norm:norm_job", arguments, 4):
        assert all(error < tolerance for error in errors), errors  # not so of NaN


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
