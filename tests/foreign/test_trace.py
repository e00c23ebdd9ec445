"""What the tracer counts of small modules is what a pencil counts.

Tests of `foreign/trace_fit.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.profile import Op, Poly, Profile
from meshwright.foreign.trace import trace_module

WIDE, NARROW = 4, 2
"""Bytes of an element that stays float32, and of one that follows the compute dtype."""


def traced(module: nn.Module, *shape: int) -> Profile:
    return trace_module(module, torch.zeros(shape), name="small")


def ops_of(profile: Profile, kind: str) -> list[Op]:
    return [op for layer in profile.layers for _ in range(layer.repeat) for op in layer.ops if op.kind == kind]


def total(profile: Profile, quantity: Callable[[Op], Poly], samples: int = 1) -> float:
    ops = [op for layer in profile.layers for _ in range(layer.repeat) for op in layer.ops]
    return sum(quantity(op)(samples, 1) for op in ops)


def saved_bytes(profile: Profile, samples: int = 1) -> float:
    ops = [op for layer in profile.layers for _ in range(layer.repeat) for op in layer.ops]
    return sum((WIDE if op.dtype == "float32" else NARROW) * op.saved(samples, 1) for op in ops)


def test_a_linear_after_a_linear() -> None:
    profile = traced(nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)), 1, 8)
    first, second = ops_of(profile, "matmul")
    assert (first.shape, second.shape) == ((16, 8), (4, 16))
    assert first.flops == Poly(b=2 * 8 * 16)
    assert first.backward_flops == Poly(b=2 * 8 * 16)  # nobody asks for the input's gradient
    assert second.backward_flops == Poly(b=2 * 2 * 16 * 4)
    assert (first.backward_kernels, second.backward_kernels) == (1, 2)
    # The input in 16 bits, and the relu's output, which the second linear reads: in place, so it is there once.
    assert saved_bytes(profile) == NARROW * (8 + 16)
    assert profile.unpriced == ()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def test_ops_of_modules_have_roles() -> None:
    blocks = traced(nn.Sequential(*(Normed() for _ in range(4))), 1, 8).block_layers
    roles = {op.name.partition(".")[0]: op.role for layer in blocks for op in layer.ops if op.role}
    # Of the block itself: the residual sum.
    assert roles == {"norm": "norm", "up": "matmul", "act": "activation", "down": "matmul", "own": "block"}
    images = traced(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)), 1, 3, 8, 8)
    assert {op.role for op in ops_of(images, "matmul")} == {"convolution", "matmul"}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.gelu(self.inner(x)))


def test_a_module_called_twice_counts_twice_and_its_weight_once() -> None:
    profile = traced(Twice(), 1, 8)
    (op,) = ops_of(profile, "matmul")
    assert op.flops == Poly(b=2 * (2 * 8 * 8))
    assert op.kernels == 2
    assert profile.num_params == 64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale)


def test_tied_weights_and_buffers_are_not_kept_for_backward() -> None:
    profile = traced(Tied(), 1, 8)
    assert profile.num_params == 64
    # The input in 16 bits, and what the second linear reads, in 16 bits again: the buffer made it float32.
    assert saved_bytes(profile) == NARROW * (8 + 8)


def test_what_is_frozen_has_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    module[1].weight.requires_grad_(False)
    first, second = ops_of(traced(module, 1, 8), "matmul")
    assert second.backward_flops == Poly(b=2 * 16 * 4)  # only to pass on
    assert first.backward_flops == Poly(b=2 * 8 * 16)


def test_dropout_keeps_a_byte_for_each_element() -> None:
    wet = saved_bytes(traced(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)), 1, 8))
    dry = saved_bytes(traced(nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 4)), 1, 8))
    assert wet - dry == 16


class Heads(nn.Module):
    def __init__(self, is_causal: bool):
        super().__init__()
        self.projection = nn.Linear(32, 96, bias=False)
        self.is_causal = is_causal

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens, 32).float()
        query, key, value = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.projection(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_never_holds_a_matrix_of_scores(is_causal: bool) -> None:
    profile = trace_module(Heads(is_causal), torch.zeros(1, 96, dtype=torch.int64), name="heads")
    (op,) = ops_of(profile, "attention")
    seen = 0.5 if is_causal else 1.0
    assert op.flops == Poly(bss=seen * 4 * 32)
    assert op.backward_flops == Poly(bss=seen * 10 * 32)
    assert op.shape == (4, 8, 0)
    assert all(poly.bss == 0 for each in profile.layers[0].ops for poly in (each.saved, each.working, each.moved))
    # What the linear reads (32), query, key and value (one storage of 96), output (32); 4 float32 numbers for rows.
    narrow = sum(each.saved.bs for each in profile.layers[0].ops if each.dtype == "compute")
    wide = sum(each.saved.bs for each in profile.layers[0].ops if each.dtype == "float32")
    assert (narrow, wide) == (32 + 96 + 32, 4)


class Precise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float().exp()


def test_what_is_computed_in_float32_says_so() -> None:
    profile = traced(Precise(), 1, 8)
    (matmul,) = ops_of(profile, "matmul")
    assert matmul.dtype == "compute"
    wide = sum(op.saved(1, 1) for op in ops_of(profile, "memory") if op.dtype == "float32")
    assert wide == 16  # the exponentials, which their gradient reads


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), (x.t() @ grad) @ torch.eye(16)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x * 2.0, self.weight)


def test_a_custom_function_costs_what_its_own_backward_does() -> None:
    profile = traced(Own(), 2, 8)
    (op,) = ops_of(profile, "matmul")
    assert op.flops == Poly(b=2 * 8 * 16)
    # Its weight's gradient and, whoever wrote it, a product that does not depend on the samples.
    assert op.backward_flops == Poly(b=2 * 2 * 8 * 16, one=2 * 8 * 16 * 16)
    assert op.backward_kernels == 3


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return x if x.sum().item() > 1e9 else x * 2.0


class Chooses(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[x[:, 0] >= 0]


@pytest.mark.parametrize(
    ("kind", "what"), [(Asks, "_local_scalar_dense.default"), (Chooses, "nonzero.default")], ids=["value", "size"]
)
def test_a_forward_that_looks_at_values_is_run_with_them_or_told_of(kind: Any, what: str) -> None:
    profile = traced(kind(), 1, 8)
    assert what in profile.unpriced[0]
    assert "run with its values" in profile.unpriced[0]
    assert total(profile, lambda op: op.flops) == 2 * 8 * 8
    with torch.device("meta"):
        module = kind()
    hollow = trace_module(module, torch.zeros(1, 8), name="hollow")
    assert what in hollow.unpriced[0]
    assert "nothing is counted" in hollow.unpriced[0]
    assert hollow.num_params == 72


@torch.library.custom_op("tests_trace::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = double(x)
        return self.inner(x)


def test_an_operator_nobody_knows_is_named() -> None:
    assert any("tests_trace.double" in each for each in traced(Stranger(), 1, 8).unpriced)


class Changing(nn.Module):
    """Blocks of one class and one shape of weights, the second half the size of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=2, padding=1, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.flatten(1)


def test_blocks_that_change_the_shape_are_not_folded() -> None:
    profile = trace_module(Changing(), torch.zeros(1, 4, 16, 16), name="changing")
    flops = [op.flops.b for op in ops_of(profile, "matmul")]
    assert flops == [2 * 4 * 36 * size * size for size in (8, 4, 2)]


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_equal_blocks_are_traced_once_and_counted_all() -> None:
    few, many = (traced(Deep(depth), 1, 8) for depth in (2, 9))
    assert [layer.repeat for layer in many.block_layers] == [9]
    assert total(many, lambda op: op.flops) == 9 * 2 * 8 * 8
    each = [total(profile, lambda op: op.saved) for profile in (few, many)]
    assert each[1] == pytest.approx(each[0] * 9 / 2)
