"""AdamW of many tensors in one launch is torch's AdamW.

Tests of `ops/kernels/adamw.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from interpreted import run_interpreted

SHAPES = ((3,), (130, 67), (9001,), (16, 1024))
CONFIG = SimpleNamespace(beta1=0.9, beta2=0.95, epsilon=1e-8)


def compare_kernel(device: str) -> None:
    from meshwright.ops.kernels.adamw import AdamWKernel

    torch.manual_seed(0)
    weights = [torch.randn(shape, device=device) for shape in SHAPES]
    scales, decays = (1.0, 0.5, 1.0, 2.0), (0.0, 0.1, 0.0, 0.1)
    wide = [weight.double().requires_grad_() for weight in weights]
    groups = [
        {"params": [each], "lr": 0.01 * scale, "weight_decay": decay}
        for each, scale, decay in zip(wide, scales, decays, strict=True)
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    copies = [weight.bfloat16() if at % 2 else None for at, weight in enumerate(weights)]
    pieces = [
        SimpleNamespace(value=weight, lr_scale=scale, weight_decay=decay, copy=copy)
        for weight, scale, decay, copy in zip(weights, scales, decays, copies, strict=True)
    ]
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    kernel = AdamWKernel(pieces, *moments)
    divisor = torch.tensor(4.0, device=device)
    for count in (1, 2, 3):
        made = (torch.randn_like(weight) for weight in weights)  # at other addresses each time
        gradients = [each if copy is None else each.bfloat16() for each, copy in zip(made, copies, strict=True)]
        assert kernel.takes(gradients)
        kernel(gradients, CONFIG, 0.01, count, divisor, None)
        for each, gradient in zip(wide, gradients, strict=True):
            each.grad = gradient.double() / 4
        reference.step()
    before = [weight.clone() for weight in weights]
    for copy, old in zip(copies, before, strict=True):
        if copy is not None:  # the interpreter cuts bits off where a GPU rounds
            spacing = 0.0 if device == "cuda" else 2**-7
            torch.testing.assert_close(copy, old.bfloat16(), rtol=spacing, atol=0.0)
    kernel([torch.full_like(each, torch.nan) for each in gradients], CONFIG, 0.01, 4, divisor, divisor / 4)
    for weight, old, each, mean, square in zip(weights, before, wide, *moments, strict=True):
        assert torch.equal(weight, old), "a refused step changes nothing"
        torch.testing.assert_close(weight, each.detach().float(), rtol=1e-5, atol=1e-7)
        state = reference.state[each]
        torch.testing.assert_close(mean, state["exp_avg"].float(), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(square, state["exp_avg_sq"].float(), rtol=1e-5, atol=1e-9)
    assert not kernel.takes([each.float() for each in gradients])
    odd = torch.zeros(9, device=device)[1:]
    assert not kernel.takes([odd, *gradients[1:]])
    assert not kernel.takes([gradients[0].double(), *gradients[1:]])


def test_the_kernel_equals_torch_by_the_interpreter() -> None:
    run_interpreted("test_adamw_kernel:compare_kernel")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_kernel_equals_torch_on_the_gpu() -> None:
    compare_kernel("cuda")
