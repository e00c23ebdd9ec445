"""What a device computes: matmuls by shape and layout, other dtypes, attention by length, kernels by traffic; what the
host's part in an op costs; and a whole decoder block, by which the sum of the rest is checked."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from meshwright.core.units import MIB
from meshwright.machine.assemble import TINY, WHOLE_BLOCKS, BlockSize, num_kernels
from meshwright.machine.timing import Bench
from meshwright.models.dimensions import DecoderConfig
from meshwright.zoo.layers import SwiGLU, TransformerBlock, rope_table

Shape = tuple[int, int, int]

# (m, n, k): tokens, outputs, inputs. Of blocks of 768 to 4096 wide, whole and cut; of heads; and one where nothing is
# short.
_WIDTHS = (
    *((768, 768), (3072, 768), (768, 3072), (512, 2048), (2048, 2048), (8192, 2048), (2048, 8192)),
    *((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)),
)
_HEADS: tuple[Shape, ...] = ((8192, 32000, 2048), (8192, 128256, 2048), (4096, 128256, 4096), (8192, 50304, 768))
_CUDA_GRID: tuple[Shape, ...] = (
    *((m, n, k) for m, (n, k) in itertools.product((1024, 4096, 16384), _WIDTHS)),
    *_HEADS,
    *((256, 4096, 4096), (8192, 8192, 8192)),
)
_CUDA_QUICK_GRID: tuple[Shape, ...] = ((1024, 2048, 2048), (8192, 4096, 4096), (8192, 8192, 2048), (8192, 8192, 8192))
_CPU_GRID: tuple[Shape, ...] = ((512, 256, 256), (512, 1024, 256), (512, 256, 1024), (512, 1024, 1024))
_CUDA_LARGE: tuple[Shape, ...] = ((8192, 8192, 4096), (8192, 8192, 8192))
_CPU_LARGE: tuple[Shape, ...] = ((1024, 2048, 512), (1024, 1024, 1024))
_CPU_SMALL: Shape = (256, 512, 256)
# Without bf16 instructions a CPU runs it 70 times slower than fp32; then the small shape has told enough.
_SLOW_FLOPS_PER_SECOND = 2e10
_ODD_SHAPE: Shape = (8192, 50257, 768)
_MOST_PLACES = 8
"""Where operands lie in turn, so that small ones do not come from the cache every time."""


def matmul_points(bench: Bench) -> list[tuple[float, float, float, float]]:
    """(m, n, k, seconds) of forward and of both halves of backward, each in its layout."""
    dtype, grid = torch.float32, _CPU_GRID
    if bench.on_gpu:
        dtype, grid = torch.bfloat16, _CUDA_QUICK_GRID if bench.is_quick else _CUDA_GRID
    pools = _pools(bench, dtype, grid)
    budget = bench.section_seconds / 20
    return [
        (float(m), float(n), float(k), bench.device_seconds(product, budget))
        for shape in grid
        for m, n, k, product in _products(*shape, pools)
    ]


def odd_slowdown(bench: Bench) -> float:
    """Seconds of a product whose outputs are an odd number over those of one that is a multiple of 64."""
    even = next(shape for shape in _HEADS if shape[2] == _ODD_SHAPE[2])
    pools = _pools(bench, torch.bfloat16, (even, _ODD_SHAPE))
    seconds = [
        sum(bench.device_seconds(product, bench.section_seconds / 20) for *_, product in _products(*shape, pools))
        for shape in (even, _ODD_SHAPE)
    ]
    return seconds[1] / seconds[0]


def _pools(bench: Bench, dtype: torch.dtype, grid: tuple[Shape, ...]) -> tuple[Tensor, Tensor, Tensor]:
    size = max(max(m * n, n * k, m * k) for m, n, k in grid)
    # Random values: a GPU multiplying zeros draws less power and keeps a clock it will not have in training.
    left, right = (torch.randn(size, device=bench.device, dtype=dtype) for _ in range(2))
    return left, right, torch.empty_like(left)


def _products(
    m: int, n: int, k: int, pools: tuple[Tensor, Tensor, Tensor]
) -> Iterator[tuple[int, int, int, Callable[[], Any]]]:
    """x W^T, then the gradients of x and of W: m, n, k of each and how to run it."""
    left, right, out = pools
    tokens, weights, slopes = _places(left, m, k), _places(right, n, k), _places(left, m, n)
    inputs = _places(right, m, k)
    whole, into_input, into_weight = _places(out, m, n), _places(out, m, k), _places(out, n, k)
    yield m, n, k, lambda: torch.mm(next(tokens), next(weights).t(), out=next(whole))
    yield m, k, n, lambda: torch.mm(next(slopes), next(weights), out=next(into_input))
    yield n, k, m, lambda: torch.mm(next(slopes).t(), next(inputs), out=next(into_weight))


def _places(pool: Tensor, rows: int, columns: int) -> Iterator[Tensor]:
    """Matrices of one shape from a pool, in turn."""
    size = rows * columns
    count = max(1, min(_MOST_PLACES, pool.numel() // size))
    return itertools.cycle([pool[i * size : (i + 1) * size].view(rows, columns) for i in range(count)])


def flops_by_dtype(bench: Bench) -> dict[str, float]:
    """The best large shape's median, by dtype."""
    dtypes: dict[str, torch.dtype] = {"fp32": torch.float32}
    if bench.isa_limit is not None:
        dtypes["bf16"] = torch.bfloat16
    if bench.on_gpu:
        dtypes["fp16"] = torch.float16
    rates = {}
    for name, dtype in dtypes.items():
        bench.together(f"{name} matmul")
        rates[name] = _large_flops_per_second(bench, dtype)
    if not bench.on_gpu:
        return rates
    bench.together("tf32 and fp8 matmul")  # which not every card has
    before = torch.backends.cuda.matmul.allow_tf32
    if torch.cuda.get_device_capability(bench.device) >= (8, 0):
        torch.backends.cuda.matmul.allow_tf32 = True
        rates["tf32"] = _large_flops_per_second(bench, torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = before
    try:
        m, n, k = _CUDA_LARGE[-1]
        left, right = (torch.randn(size, device=bench.device).to(torch.float8_e4m3fn) for size in ((m, k), (n, k)))
        scale = torch.ones((), device=bench.device)

        def product() -> Tensor:
            return torch._scaled_mm(left, right.t(), scale, scale, out_dtype=torch.bfloat16)

        rates["fp8"] = 2.0 * m * n * k / bench.device_seconds(product, bench.section_seconds / 4)
    except (AttributeError, RuntimeError) as error:  # an older card, or another signature
        print(f"fp8 was not measured: {error}", file=sys.stderr)
    return rates


def _large_flops_per_second(bench: Bench, dtype: torch.dtype) -> float:
    budget = bench.section_seconds / (4 if bench.on_gpu else 1)

    def rate(m: int, n: int, k: int) -> float:
        left, right = (torch.randn(size, device=bench.device).to(dtype) for size in ((m, k), (k, n)))
        out = torch.empty(m, n, device=bench.device, dtype=dtype)
        return 2.0 * m * n * k / bench.device_seconds(lambda: torch.mm(left, right, out=out), budget)

    if not bench.on_gpu and dtype != torch.float32 and (small := rate(*_CPU_SMALL)) < _SLOW_FLOPS_PER_SECOND:
        return small
    return max(rate(*shape) for shape in (_CUDA_LARGE if bench.on_gpu else _CPU_LARGE))


def attention_points(bench: Bench) -> list[tuple[float, float, float, float]]:
    """(head size, tokens of a sequence, FLOP/s forward, FLOP/s backward), causal: only the lower triangle counts.

    Forward 4 b h s^2 d, halved by the mask, and 2.5 times that backward.
    """
    if not bench.on_gpu:
        return [_attention(bench, 64, 512, 512, 8)]
    lengths = (512, 4096) if bench.is_quick else (512, 1024, 2048, 4096, 8192, 16384)
    return [_attention(bench, size, tokens, 16384, 2048 // size) for size in (64, 128) for tokens in lengths]


def _attention(
    bench: Bench, head_size: int, tokens: int, all_tokens: int, heads: int
) -> tuple[float, float, float, float]:
    batch = all_tokens // tokens
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32

    def drawn(count: int) -> Tensor:
        return torch.randn(batch, count, tokens, head_size, device=bench.device, dtype=dtype, requires_grad=True)

    # Four heads share a key, as in most models of today.
    query, key, value = drawn(heads), drawn(max(1, heads // 4)), drawn(max(1, heads // 4))
    slope = torch.randn_like(query)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    budget = bench.section_seconds / (10 if bench.on_gpu else 2)
    with torch.no_grad():
        forward_seconds = bench.device_seconds(forward, budget)
    out = forward()
    inputs = (query, key, value)
    backward_seconds = bench.device_seconds(lambda: torch.autograd.grad(out, inputs, slope, retain_graph=True), budget)
    flops = 2.0 * batch * heads * tokens**2 * head_size
    return float(head_size), float(tokens), flops / forward_seconds, 2.5 * flops / backward_seconds


def memory_points(bench: Bench) -> list[tuple[str, float, float]]:
    """(kernel, bytes read and written, seconds): copies and adds, and on a GPU what else a step is made of."""
    budget = bench.section_seconds / (20 if bench.on_gpu else 2)
    sizes: tuple[int, ...]
    if bench.on_gpu:
        sizes = (64 * MIB, 1024 * MIB) if bench.is_quick else tuple(MIB << power for power in range(0, 11, 2))
    else:
        # Well past the caches; less in a quick run, since the first touch of a page costs more than the timing.
        sizes = (64 * MIB if bench.is_quick else 256 * MIB,)
    pool = torch.randn(2 * max(sizes) // 4, device=bench.device)
    out = torch.empty_like(pool)
    return [
        (name, moved, bench.device_seconds(kernel, budget))
        for size in sizes
        for name, moved, kernel in _kernels(pool, out, size, bench.on_gpu)
    ]


def _kernels(pool: Tensor, out: Tensor, size: int, on_gpu: bool) -> Iterator[tuple[str, float, Callable[[], Any]]]:
    """Kernels over tensors of `size` bytes in turn, and what each moves."""
    elements = size // 4
    rows, targets = _places(pool, 1, elements), _places(out, 1, elements)
    yield "copy", 2.0 * size, lambda: next(targets).copy_(next(rows))
    yield "add in place", 2.0 * size, lambda: next(targets).add_(1.0)
    if not on_gpu:
        return
    yield "add", 3.0 * size, lambda: torch.add(next(rows), next(rows), out=next(targets))
    low = out.to(torch.bfloat16)
    yield "cast", 1.5 * size, lambda: low[:elements].copy_(next(rows).view(-1))
    width = 2048
    half = _places(low, elements // width, width)
    weight = torch.ones(width, device=pool.device, dtype=low.dtype)
    # These make their own output: what is freed at once is taken again, without asking the driver.
    yield "norm", 1.0 * size, lambda: F.rms_norm(next(half), (width,), weight)
    yield "silu", 1.0 * size, lambda: F.silu(next(half))
    # Slower by nature: losses, and gradients on their way to fp32.
    yield "widen", 1.5 * size, lambda: next(targets).view(-1).copy_(low[:elements])
    lines = _places(pool, elements // width, width)
    yield "softmax", 2.0 * size, lambda: F.log_softmax(next(lines), dim=-1)


def kernel_seconds(bench: Bench) -> float:
    """Seconds of the smallest kernel, launched back to back."""
    one, other = torch.ones(8, device=bench.device), torch.ones(8, device=bench.device)
    out = torch.empty_like(one)
    return bench.device_seconds(lambda: torch.add(one, other, out=out), bench.section_seconds / 4)


def launch_seconds(bench: Bench) -> tuple[float, float]:
    """The host's time for one op of a step, and how many launches a block really has.

    From forward and backward of a block too small to keep any device busy: modules and autograd count, too.
    """
    step = _step_of(bench, TINY)
    seconds = bench.median_seconds(step, bench.section_seconds / 2)
    declared = num_kernels(TINY)
    if not bench.on_gpu:
        return seconds / declared, declared
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        step()
        bench.finish()
    events = recorded.profiler.kineto_results.events() if recorded.profiler is not None else []
    launched = sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events)
    return seconds / max(launched, 1), float(launched)


def block_seconds(bench: Bench) -> dict[str, float]:
    """Forward and backward of a decoder block, as it is and (on a GPU) compiled."""
    size = WHOLE_BLOCKS[bench.device.type]
    budget = bench.section_seconds / 2
    seconds = {"eager": bench.device_seconds(_step_of(bench, size), budget)}
    if bench.on_gpu and not bench.is_quick:
        bench.together("a compiled block")
        try:
            seconds["compiled"] = bench.device_seconds(_step_of(bench, size, is_compiled=True), budget)
        except Exception as error:  # no compiler on this machine: the forecast does without
            print(f"no block was compiled: {str(error)[:300]}", file=sys.stderr)
    return seconds


def _step_of(bench: Bench, size: BlockSize, *, is_compiled: bool = False) -> Callable[[], Any]:
    config: DecoderConfig = size.config
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    with torch.device(bench.device):
        block = TransformerBlock(config, SwiGLU(config.hidden_size, config.ffn_size))
    with torch.no_grad():
        for each in block.parameters():
            each.fill_(1.0) if each.dim() == 1 else each.normal_(std=each.shape[1] ** -0.5)
    x = torch.randn(size.batch, size.sequence, config.hidden_size, device=bench.device).to(dtype).requires_grad_()
    table = rope_table(config, torch.arange(size.sequence, device=bench.device), x)
    slope = torch.randn_like(x)
    parameters = list(block.parameters())
    run: Any = torch.compile(block) if is_compiled else block

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, *table), (x, *parameters), slope)

    return step
