"""One measuring process: `python -m meshwright.probe.measure`, started by `machine.probe`, one a device.

All processes enter each section together, so that cores, memory and links are contended as they will be in
training. Rank 0 says where it is; the last line on stdout is the Reading as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.core.codec import encode
from meshwright.core.units import MIB
from meshwright.probe.bench import Bench
from meshwright.probe.cpu_bf16 import limit_isa_for_bf16
from meshwright.probe.reading import Reading

ALL_REDUCE_BYTES = (4 * 1024, 32 * 1024, 256 * 1024, 2 * MIB, 8 * MIB)
# m, k, n of a training step's matmuls: tokens x input x output.
_CPU_SHAPES = ((1024, 512, 2048), (1024, 1024, 1024))
_CPU_SMALL_SHAPE = (256, 256, 512)
_CUDA_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192))
# Without bf16 instructions a CPU runs it 70 times slower than fp32; then the small shape has told enough.
_SLOW_FLOPS_PER_SECOND = 2e10


def matmul_flops_per_second(bench: Bench, dtype: torch.dtype) -> float:
    """The best shape's median: the rate large matmuls reach."""
    shapes = _CUDA_SHAPES if bench.device.type == "cuda" else _CPU_SHAPES
    if bench.device.type == "cpu" and dtype != torch.float32:
        small = _shape_flops_per_second(bench, dtype, _CPU_SMALL_SHAPE)
        if small < _SLOW_FLOPS_PER_SECOND:
            return small
    return max(_shape_flops_per_second(bench, dtype, shape) for shape in shapes)


def _shape_flops_per_second(bench: Bench, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    m, k, n = shape
    # Random values: a GPU multiplying zeros draws less power and keeps a clock it will not have in training.
    left = torch.randn(m, k, device=bench.device).to(dtype)
    right = torch.randn(k, n, device=bench.device).to(dtype)
    out = torch.empty(m, n, device=bench.device, dtype=dtype)
    between = _memory_work(bench) if bench.device.type == "cuda" else None
    seconds = bench.median_seconds(lambda: torch.mm(left, right, out=out), bench.section_seconds, between)
    return 2.0 * m * k * n / seconds


def _memory_work(bench: Bench) -> Callable[[], None]:
    """A few milliseconds of copying between bursts of matmuls, as in a training step.

    A GPU at its power limit lowers its clock: an H200 gives 665 TFLOP/s back to back, 750 so, 765 in one
    burst, and 737 in a real step.
    """
    source = torch.ones(256 * MIB, device=bench.device)
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(5):
            target.copy_(source)

    return copy


def attention_flops_per_second(bench: Bench) -> float:
    """Causal attention: forward 4 b h s^2 d, halved by the mask, and 2.5 times that backward."""
    on_gpu = bench.device.type == "cuda"
    batch, heads, tokens, size = (4, 32, 4096, 64) if on_gpu else (1, 8, 512, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    query, key, value = (
        torch.randn(batch, heads, tokens, size, device=bench.device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    slope = torch.randn(batch, heads, tokens, size, device=bench.device, dtype=dtype)

    def step() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), slope)

    seconds = bench.median_seconds(step, bench.section_seconds)
    return 3.5 * 2.0 * batch * heads * tokens**2 * size / seconds


def memory_bytes_per_second(bench: Bench) -> float:
    """Bytes read and written, half by an in-place add and half by a copy: training does both."""
    # Well past the caches; less in a quick run, since the first touch of a page costs more than the timing.
    cpu_bytes = 256 * MIB if bench.section_seconds >= 1 else 64 * MIB
    num_bytes = 2048 * MIB if bench.device.type == "cuda" else cpu_bytes
    source = torch.ones(num_bytes // 4, device=bench.device)
    target = torch.empty_like(source)
    add_seconds = bench.median_seconds(lambda: source.add_(1.0), bench.section_seconds / 2)
    copy_seconds = bench.median_seconds(lambda: target.copy_(source), bench.section_seconds / 2)
    return 4.0 * num_bytes / (add_seconds + copy_seconds)


def launch_seconds(bench: Bench) -> float:
    one, other = torch.ones(8, device=bench.device), torch.ones(8, device=bench.device)
    return bench.median_seconds(lambda: torch.add(one, other), bench.section_seconds / 2)


def all_reduce_seconds(bench: Bench, num_bytes: int) -> float:
    """The number of calls is agreed first: a rank that makes one call less hangs the others."""
    message = torch.zeros(num_bytes // 4, device=bench.device)
    for _ in range(2):
        dist.all_reduce(message)
    guess = torch.tensor(bench.sample_seconds(lambda: dist.all_reduce(message), 3))
    dist.all_reduce(guess, op=dist.ReduceOp.MAX)
    num_samples = max(5, min(200, int(bench.section_seconds / max(float(guess), 1e-6))))
    return statistics.median(bench.sample_seconds(lambda: dist.all_reduce(message), 1) for _ in range(num_samples))


def read(bench: Bench) -> Reading:
    on_gpu = bench.device.type == "cuda"
    memory_bytes, reserved_bytes = _gpu_bytes(bench) if on_gpu else (0, _own_bytes())
    flops: dict[str, float] = {}
    dtypes = {"fp32": torch.float32}
    if bench.isa_limit is not None:
        dtypes["bf16"] = torch.bfloat16
    if on_gpu:
        dtypes["fp16"] = torch.float16
    for name, dtype in dtypes.items():
        bench.together(f"{name} matmul")
        flops[name] = matmul_flops_per_second(bench, dtype)
    bench.together("attention")
    attention = attention_flops_per_second(bench)
    bench.together("memory")
    bandwidth = memory_bytes_per_second(bench)
    bench.together("op launch")
    launch = launch_seconds(bench)
    all_reduce: list[tuple[int, float]] = []
    if bench.num_devices > 1:
        bench.together("all_reduce")
        all_reduce = [(size, all_reduce_seconds(bench, size)) for size in ALL_REDUCE_BYTES]
    return Reading(
        kind=bench.device.type,
        device_name=torch.cuda.get_device_name(bench.device) if on_gpu else _cpu_name(),
        torch_version=torch.__version__,
        num_threads=torch.get_num_threads(),
        isa_limit=bench.isa_limit or "",
        flops_per_second=flops,
        attention_flops_per_second=attention,
        memory_bytes_per_second=bandwidth,
        launch_seconds=launch,
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        all_reduce=tuple(all_reduce),
    )


def _gpu_bytes(bench: Bench) -> tuple[int, int]:
    """The card's memory, and what is gone once a context and cuBLAS exist (to other processes too)."""
    tiny = torch.ones(8, 8, device=bench.device)
    torch.mm(tiny, tiny)
    bench.finish()
    free_bytes, total_bytes = torch.cuda.mem_get_info(bench.device)
    return total_bytes, total_bytes - free_bytes


def _own_bytes() -> int:
    """Resident bytes of this process with torch imported and no tensor yet: the second field is in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m meshwright.probe.measure")
    parser.add_argument("--count", action="store_true", help="say how many GPUs torch sees, and stop")
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--num-devices", type=int, default=1)
    parser.add_argument("--store", default="")
    parser.add_argument("--section-seconds", type=float, default=2.0)
    given = parser.parse_args()
    if given.count:
        print(json.dumps({"num_gpus": torch.cuda.device_count()}), flush=True)
        return
    device = torch.device("cpu") if given.kind == "cpu" else torch.device("cuda", given.rank)
    if given.kind == "cuda":
        torch.cuda.set_device(device)
    isa_limit = limit_isa_for_bf16() if given.kind == "cpu" else ""
    if given.num_devices > 1:
        dist.init_process_group(
            "gloo" if given.kind == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{given.store}",
            rank=given.rank,
            world_size=given.num_devices,
            timeout=timedelta(seconds=120),
        )
    bench = Bench(
        device=device,
        rank=given.rank,
        num_devices=given.num_devices,
        section_seconds=given.section_seconds,
        isa_limit=isa_limit,
    )
    print(json.dumps({"reading": encode(read(bench))}), flush=True)
    if given.num_devices > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
