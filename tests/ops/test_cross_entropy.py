"""Tests of `ops/cross_entropy.py` and `ops/kernels/cross_entropy.py`: against torch's own loss in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from torch import Tensor

from meshwright.ops import cross_entropy
from meshwright.ops.cross_entropy import HeadLoss, token_loss

SHAPES = [(3, 8, 16, 50), (2, 6, 8, 1000)]
"""Samples, sequence, hidden size, words."""


def drawn(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    b, s, d, v = shape
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(b, s, d, generator=generator).to(device, dtype)
    matrix = torch.randn(v, d, generator=generator).to(device)
    targets = torch.randint(v, (b, s), generator=generator).to(device)
    weights = torch.rand(b, s, generator=generator).to(device)
    weights[0] = 0.0  # targets that do not count
    return x.requires_grad_(), matrix.requires_grad_(), targets, weights


def reference(x: Tensor, matrix: Tensor, targets: Tensor, weights: Tensor, grad: float) -> list[Tensor]:
    wide = x.detach().double().requires_grad_(), matrix.detach().to(x.dtype).double().requires_grad_()
    logits = (wide[0] @ wide[1].t()).flatten(0, 1)
    loss = (F.cross_entropy(logits, targets.flatten(), reduction="none") * weights.flatten().double()).sum()
    (loss * grad).backward()
    return [loss.detach(), wide[0].grad, wide[1].grad]  # type: ignore[list-item]


def departures(shape: tuple[int, int, int, int], dtype: torch.dtype, chunks: int, device: str = "cpu") -> list[float]:
    """Of loss, gradient of the hidden states and of the matrix; with another gradient than expected, too."""
    errors = []
    for grad in (0.25, 0.75):
        x, matrix, targets, weights = drawn(shape, dtype, device)
        loss = HeadLoss.apply(x, matrix, targets, weights, 0.25, chunks, None, True)
        (loss * grad).backward()
        for got, wanted in zip((loss, x.grad, matrix.grad), reference(x, matrix, targets, weights, grad), strict=True):
            assert got is not None
            errors.append(float((got.detach().double() - wanted).norm() / wanted.norm()))
    return errors


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-7)])
def test_head_and_loss_are_torchs_in_float64(dtype: torch.dtype, limit: float, chunks: int) -> None:
    for shape in SHAPES:
        assert max(departures(shape, dtype, chunks)) < limit


def test_blocks_of_rows_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = departures(SHAPES[0], torch.float32, 1)
    monkeypatch.setattr(cross_entropy, "BLOCK_ELEMENTS", 150)
    assert departures(SHAPES[0], torch.float32, 1) == pytest.approx(whole, rel=0.5)


def test_a_microbatch_whose_targets_are_all_masked_has_zero_loss_and_gradient() -> None:
    x, matrix, targets, weights = drawn(SHAPES[0], torch.bfloat16)
    for chunks in (1, 3):
        loss = HeadLoss.apply(x, matrix, targets, weights * 0, 1.0, chunks, None, True)
        loss.backward()
        assert float(loss.detach()) == 0
        assert x.grad is not None
        assert matrix.grad is not None
        assert not x.grad.any()
        assert not matrix.grad.any()


def test_no_gradient_is_written_where_none_is_needed() -> None:
    x, matrix, targets, weights = drawn(SHAPES[0], torch.float32)
    with torch.no_grad():
        loss = HeadLoss.apply(x, matrix, targets, weights, 1.0, 1, None, False)
    assert float(loss) == pytest.approx(float(reference(x, matrix, targets, weights, 1.0)[0]), rel=1e-6)
    frozen = matrix.detach()
    HeadLoss.apply(x, frozen, targets, weights, 1.0, 3, None, True).backward()
    assert x.grad is not None


def compare_kernels(device: str) -> None:
    """Run by Triton's interpreter in a process of its own, or on a GPU."""
    for shape in [*SHAPES, (2, 3, 8, 9001)]:
        for chunks in (1, 3):
            assert max(departures(shape, torch.float32, chunks, device)) < 1e-5
            assert max(departures(shape, torch.bfloat16, chunks, device)) < 1e-2
        x, matrix, targets, _ = drawn(shape, torch.float32, device)
        logits = (x @ matrix.t()).detach().requires_grad_()
        wide = logits.detach().double().requires_grad_()
        before = logits.detach().clone()
        token_loss(logits, targets).sum().backward()
        F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        assert logits.grad is not None
        assert wide.grad is not None
        assert float((logits.grad - wide.grad).norm() / wide.grad.norm()) < 1e-5
        assert torch.equal(before, logits.detach())
    assert not cross_entropy.is_usable("other", torch.empty(0))
    from meshwright.ops import kernels

    assert not kernels._failed, "the plain form has run"


def test_kernels_by_the_interpreter() -> None:
    run_interpreted("test_cross_entropy:compare_kernels", "-W", "error::UserWarning")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_on_the_gpu() -> None:
    compare_kernels("cuda")


def test_a_kernel_that_fails_gives_way_to_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.ops import kernels

    def fail() -> int:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "_failed", set())
    assert kernels.run_or_fall_back("some_kernel", torch.ones(0), fail, lambda: 3) == 3, "nothing to run it on"
    assert not kernels._failed
    monkeypatch.setattr(kernels, "is_usable", lambda name, tensor: True)
    with pytest.warns(UserWarning, match=r"some_kernel does not run here.*no compiler"):
        assert kernels.run_or_fall_back("some_kernel", torch.ones(1), fail, lambda: 3) == 3
    assert "some_kernel" in kernels._failed
