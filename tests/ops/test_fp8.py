"""8-bit products against float64, and what becomes of zeros, infinities and odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.ops.fp8 import _narrowed, _widen, linear_fp8, rounded, scale_of

SCALINGS: Any = ("tensorwise", "rowwise")
# Relative errors of sums of products: e4m3 rounds by up to 2^-4 (2.6 % of a normal number on average), e5m2 by 2^-3.
E4M3, E5M2 = 0.05, 0.075


def _apart(got: Tensor, wanted: Tensor) -> float:
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def _case(rows: int = 32, n: int = 48, k: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(*shape) for shape in ((2, rows // 2, k), (n, k), (2, rows // 2, n)))
    return x.bfloat16().requires_grad_(), (weight * 0.02).bfloat16().requires_grad_(), (grad * 1e-4).bfloat16()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [32, 30])
def test_output_and_gradients_are_float64s_rounded(scaling: Any, rows: int) -> None:
    x, weight, grad = _case(rows)
    out = linear_fp8(scaling)(x, weight, None)
    into_x, into_weight = torch.autograd.grad(out, (x, weight), grad)
    assert out.dtype == into_x.dtype == into_weight.dtype == torch.bfloat16
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    wanted = F.linear(*wide)
    wanted_x, wanted_weight = torch.autograd.grad(wanted, wide, grad.double())
    of_gradient = E4M3 if scaling == "rowwise" else E5M2
    assert 0.01 < _apart(out, wanted) < E4M3, "8 bits were used"
    assert 0.01 < _apart(into_x, wanted_x) < of_gradient
    assert _apart(into_weight, wanted_weight) < (of_gradient if rows == 32 else 0.035), "of 30 tokens: in 16 bits"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_compiler_takes_it_in_one_graph(scaling: Any) -> None:
    x, weight, grad = _case()
    plain, compiled = linear_fp8(scaling), torch.compile(linear_fp8(scaling), backend="aot_eager", fullgraph=True)
    results = []
    for product in (plain, compiled):
        out = product(x, weight, None)
        results.append((out, *torch.autograd.grad(out, (x, weight), grad)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_gradient_of_zeros_gives_zeros(scaling: Any) -> None:
    """As where all targets of a microbatch are masked."""
    x, weight, grad = _case()
    out = linear_fp8(scaling)(x, weight, None)
    for each in torch.autograd.grad(out, (x, weight), torch.zeros_like(grad)):
        assert torch.equal(each, torch.zeros_like(each))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_what_is_not_finite_is_not_hidden(scaling: Any, value: float) -> None:
    x, weight, _ = _case()
    with torch.no_grad():
        x[0, 3, 5] = value
    assert not linear_fp8(scaling)(x, weight, None)[0, 3].isfinite().any()


def test_sizes_that_are_no_multiples_of_16_are_multiplied_as_they_are() -> None:
    x, weight, _ = _case(n=40)
    bias = torch.randn(40).bfloat16()
    assert torch.equal(linear_fp8("tensorwise")(x, weight, bias), F.linear(x, weight, bias))


def test_the_largest_element_becomes_the_largest_number() -> None:
    x = torch.tensor([[1.0, -8.0], [0.5, 0.25]])
    for dim in (None, -1):
        scale = scale_of(x, torch.float8_e4m3fn, dim)
        values = rounded(x, scale, torch.float8_e4m3fn)
        assert float(values.float()[0, 1]) == -448.0
        assert torch.equal(values.float() * scale, x)


def test_a_weight_gathered_in_8_bits_multiplies_as_the_weight_does() -> None:
    """Rounded by rows of a shard, widened and rounded again: the second time changes nothing."""
    x, weight = torch.randn(32, 64).bfloat16(), torch.randn(48, 64)
    weight[:24] *= 2**-5  # a rank whose scale is another one
    pieces = [_narrowed(piece, torch.bfloat16) for piece in weight.chunk(2)]
    narrow, scales = (torch.cat(each) for each in zip(*pieces, strict=True))
    assert narrow.dtype == torch.float8_e4m3fn
    assert scales[0] < scales[1]
    whole = torch.empty(48, 64, dtype=torch.bfloat16)
    _widen(narrow, scales, whole)
    run = linear_fp8("tensorwise")
    # Only elements next to zero, of the scale of all, are rounded twice.
    near = run(x, weight.bfloat16(), None)
    assert torch.equal(run(x, whole, None)[:, 24:], near[:, 24:])
    assert (run(x, whole, None).float() - near.float()).norm() < 2**-8 * near.float().norm()
    again, scale = _narrowed(whole[24:], torch.bfloat16)
    assert torch.equal(again.float() * scale, whole[24:].float())
