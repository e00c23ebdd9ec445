"""Block-wise codes keep what they promise, and AdamW on them is AdamW with rounded moments.

Tests of `ops/low_bit.py`, `ops/kernels/low_bit_adamw.py`.
"""

from __future__ import annotations

import pytest
import torch
from interpreted import run_interpreted

from meshwright.ops.low_bit import AdamWStep, BlockCode, CodedTensor, LowBitMoments, low_bit_adamw, plain_adamw, uniform

CPU = torch.device("cpu")
CODES = [BlockCode(bits, block, is_signed=signed) for bits, block in ((8, 256), (4, 128)) for signed in (True, False)]


def wild(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of very different magnitudes."""
    torch.manual_seed(seed)
    return torch.randn(shape) * torch.exp(4 * torch.randn(shape[0], 1))


@pytest.mark.parametrize("code", CODES, ids=str)
def test_levels_rise_from_zero_to_the_scale_with_a_sign_where_there_is_one(code: BlockCode) -> None:
    table = code.table(CPU)
    assert len(table) == 2**code.bits
    levels = table[: len(table) // 2] if code.is_signed else table
    assert levels[0] == 0
    assert levels[-1] == 1
    assert bool((levels.diff() > 0).all())
    if code.is_signed:
        assert torch.equal(table[len(levels) :], -levels)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_every_number_becomes_a_neighbouring_level(code: BlockCode) -> None:
    relative = torch.cat([torch.rand(4000), 10 ** (-9 * torch.rand(4000)), torch.tensor([0.0, 1.0])])
    levels = code.table(CPU)[: 1 << (code.depth + 1)]
    below = torch.searchsorted(levels, relative, right=True) - 1
    nearest = code.positions(relative, 0.5).long()
    above = (below + 1).clamp(max=len(levels) - 1)
    assert bool(((nearest == below) | (nearest == above)).all())
    midpoint = (levels[below] + levels[above]) / 2
    is_clear = (relative - midpoint).abs() > 1e-5 * levels[above]
    # Below the smallest level there is only zero, and a decade further down everything is.
    is_clear &= relative > levels[1]
    assert torch.equal(nearest[is_clear], torch.where(relative > midpoint, above, below)[is_clear])


@pytest.mark.parametrize("code", CODES, ids=str)
def test_what_was_decoded_is_coded_again_without_any_change(code: BlockCode) -> None:
    value = wild(130, 37)
    coded = CodedTensor(value.shape, code, CPU)
    assert int(coded.decoded().abs().sum()) == 0
    coded.encode(value if code.is_signed else value.abs())
    before, decoded = (coded.codes.clone(), coded.scales.clone()), coded.decoded()
    assert decoded.shape == value.shape
    coded.encode(decoded if code.is_signed else decoded.square().sqrt())
    assert torch.equal(coded.codes, before[0])
    assert torch.equal(coded.scales, before[1])


def test_no_positive_root_becomes_zero_and_zeros_stay() -> None:
    value = torch.tensor([[1.0, 1e-12, 0.0, 1e-5] * 64, [0.0] * 256])
    for code in (each for each in CODES if not each.is_signed):
        coded = CodedTensor(value.shape, code, CPU)
        coded.encode(value)
        assert torch.equal(coded.decoded() > 0, value > 0)


def test_rounding_at_random_has_the_right_mean() -> None:
    value = wild(20, 128).abs()
    for code in CODES:
        coded = CodedTensor(value.shape, code, CPU)
        total = torch.zeros_like(value)
        for step in range(400):
            noise = uniform(torch.arange(value.numel()), step)[step % 2]
            coded.write(value.view(-1, code.block), noise.view(-1, code.block))
            total += coded.decoded()
        coded.encode(value)
        once = float((coded.decoded() - value).norm() / value.norm())
        assert float((total / 400 - value).norm() / value.norm()) < once / 4


@pytest.mark.parametrize(("bits", "tolerance"), [(8, 0.03), (4, 0.3)])
def test_updates_stay_near_those_of_float32(bits: int, tolerance: float) -> None:
    start = wild(40, 130, seed=1)
    value, plain = start.clone(), start.clone().requires_grad_()
    moments = LowBitMoments(value, bits, 256 if bits == 8 else 128)
    exact = torch.optim.AdamW([plain], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for count in range(1, 9):
        plain.grad = wild(40, 130, seed=count + 1)
        step = AdamWStep(lr=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, count=count)
        low_bit_adamw(value, plain.grad, moments, step, torch.ones(1))
        exact.step()
        if count == 1:  # nothing has been rounded yet
            torch.testing.assert_close(value, plain.detach(), rtol=1e-6, atol=1e-7)
    change = plain.detach() - start
    assert float((value - plain.detach()).norm() / change.norm()) < tolerance


def test_nothing_changes_where_the_factor_is_no_number() -> None:
    value, gradient = wild(33, 128), wild(33, 128, seed=1)
    moments = LowBitMoments(value, 8, 256)
    step = AdamWStep(lr=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, count=1)
    before = [tensor.clone() for tensor in (value, *moments.tensors())]
    low_bit_adamw(value, gradient, moments, step, torch.tensor([float("nan")]))
    assert all(map(torch.equal, before, (value, *moments.tensors())))


def compare_kernel(device: str) -> None:
    from meshwright.ops.kernels.low_bit_adamw import launch

    torch.manual_seed(0)
    for bits, block in ((8, 256), (4, 128)):
        for shape in ((70, 61), (16, 128)):
            first = torch.randn(shape, device=device)
            values = [first, first.clone()]
            moments = [LowBitMoments(value, bits, block) for value in values]
            for count, factor in ((1, 1.0), (2, 0.3), (3, float("nan"))):
                gradient = torch.randn(shape, device=device) * torch.exp(3 * torch.randn(shape, device=device))
                step = AdamWStep(lr=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, count=count)
                for run, value, moment in zip((plain_adamw, launch), values, moments, strict=True):
                    run(value, gradient, moment, step, torch.tensor([factor], device=device))
                torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)
                for plain, other in zip(moments[0].tensors(), moments[1].tensors(), strict=True):
                    # Where a sum in another order lies on the other side of a level, a code is its neighbour.
                    is_near = torch.isclose(plain.float(), other.float(), rtol=1e-5, atol=0)
                    assert float(is_near.float().mean()) > 0.999
                    other.copy_(plain)
                values[1].copy_(values[0])


def test_the_kernel_equals_the_plain_form_by_the_interpreter() -> None:
    run_interpreted("test_low_bit:compare_kernel")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_equals_the_plain_form_on_the_gpu() -> None:
    compare_kernel("cuda")
