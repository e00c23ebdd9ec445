"""Weights in 8 and 4 bits decode to what their formats say, and a product with one is a plain product with what it
decodes to, beside a plain low-rank adapter.

Tests of `ops/kernels/packed_weights.py`, `ops/packed_weights.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import run_interpreted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.core.box import Box
from meshwright.core.profile import packed_shape
from meshwright.ops.initial_weights import from_tensors
from meshwright.ops.packed_weights import NF4, AdaptedProduct, decode, encode, plain_decode, source_of_adapted
from meshwright.verify.reference import unpacked

WIDTHS = {"int8": 68, "nf4": 36}


def weight(rows: int = 6, columns: int = 192) -> Tensor:
    torch.manual_seed(0)
    value = torch.randn(rows, columns)
    value[0, :64] = 0.0
    value[1, 64:128] *= 1e-30
    return value


@pytest.mark.parametrize("base", WIDTHS)
def test_each_element_becomes_the_nearest_level_of_its_block(base: str) -> None:
    value = weight()
    packed = encode(value, WIDTHS[base])
    assert tuple(packed.shape) == packed_shape(tuple(value.shape), base)
    levels = torch.tensor(NF4) if base == "nf4" else torch.arange(-127, 128) / 127
    blocks = value.unflatten(1, (-1, 64))
    largest = blocks.abs().amax(-1, keepdim=True)
    distance = (blocks.unsqueeze(-1) - levels * largest.unsqueeze(-1)).abs().amin(-1)
    found = (plain_decode(packed, torch.float32).view_as(blocks) - blocks).abs()
    torch.testing.assert_close(found, distance, rtol=1e-4, atol=1e-6)
    assert torch.equal(plain_decode(packed, torch.float32), unpacked(packed)), "the reference decodes otherwise"
    assert torch.equal(encode(plain_decode(packed, torch.float32), WIDTHS[base]), packed), "decoded and packed again"


def test_pieces_are_packed_as_the_whole_is() -> None:
    value = weight(8, 256)
    source = source_of_adapted(from_tensors({"w": value}), from_tensors({"w.lora_A": value}))
    whole = source("w", Box.whole((8, 4, 36)), torch.uint8)
    assert torch.equal(whole, encode(value, 36))
    piece = Box((8, 4, 36), (2, 1, 0), (3, 2, 36))
    assert torch.equal(source("w", piece, torch.uint8), whole[piece.slices])
    assert torch.equal(source("w.lora_A", Box.whole((8, 256)), torch.float32), value)


def products(base: str, has_adapter: bool, is_compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients: ours, and those of a plain adapter on the decoded weight."""
    stored = encode(weight(), WIDTHS[base]) if base != "bf16" else weight().bfloat16()
    plain = (unpacked(stored) if base != "bf16" else stored).double()
    x = torch.randn(2, 3, 192, dtype=torch.float64, requires_grad=True)
    first, second = (torch.randn(n, k, dtype=torch.float64, requires_grad=True) for n, k in ((4, 192), (6, 4)))
    bias, given = torch.randn(6, dtype=torch.float64), torch.randn(2, 3, 6, dtype=torch.float64)
    pair = (first, second) if has_adapter else (None, None)

    def ours(x: Tensor) -> Tensor:
        return AdaptedProduct.apply(x, stored, bias, *pair, 0.5) * 1.0

    out = (torch.compile(ours, backend="aot_eager") if is_compiled else ours)(x)
    wanted = F.linear(x, plain, bias)
    if has_adapter:
        wanted = wanted + 0.5 * (x @ first.t()) @ second.t()
    leaves = [x, first, second] if has_adapter else [x]
    return [out, *torch.autograd.grad(out, leaves, given)], [wanted, *torch.autograd.grad(wanted, leaves, given)]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize("base", ["bf16", *WIDTHS])
def test_a_product_and_its_gradients_are_a_plain_adapters(base: str, has_adapter: bool, is_compiled: bool) -> None:
    for ours, plain in zip(*products(base, has_adapter, is_compiled), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


class Decodings(TorchDispatchMode):
    """Counts weights that are decoded."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_calls += func is torch.ops.meshwright_weights.decode.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_no_decoded_weight_is_kept_for_backward(is_compiled: bool) -> None:
    stored, x = encode(weight(), 36), torch.randn(5, 192, requires_grad=True)
    first, second = torch.randn(4, 192, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    kept: list[tuple[int, ...]] = []

    def ours(x: Tensor) -> Tensor:
        return AdaptedProduct.apply(x, stored, None, first, second, 1.0)

    # This backend divides graphs as compilers do: what is cheaper to make again is not kept.
    run = torch.compile(ours, backend="aot_eager_decomp_partition") if is_compiled else ours
    with torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.append(tuple(each.shape)), each)[1], lambda x: x):
        out = run(x)
    assert not {(6, 192), (192, 6)} & set(kept)
    with Decodings() as seen:
        out.sum().backward()
    assert seen.num_calls == 1


def compare_kernel(device: str) -> None:
    for base, width in WIDTHS.items():
        for rows in (1, 37):
            packed = encode(weight(rows + 1, 192), width).to(device)
            assert torch.equal(decode(packed, torch.float32), plain_decode(packed, torch.float32)), (base, rows)
            # The interpreter cuts bits off where a GPU rounds.
            narrow, bits = decode(packed, torch.bfloat16), 2**-7 if device == "cpu" else 0.0
            torch.testing.assert_close(narrow, plain_decode(packed, torch.bfloat16), rtol=bits, atol=0.0)
    import meshwright.ops.kernels as kernels

    assert not kernels._failed


def test_the_kernel_equals_torch_by_the_interpreter() -> None:
    run_interpreted("test_packed_weights:compare_kernel")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernel_equals_torch_on_a_gpu() -> None:
    compare_kernel("cuda")
