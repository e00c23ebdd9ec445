"""What each measuring process of `machine.probe` does, one a device.

All processes enter each section together, so that cores, memory and links are contended as they will be in training.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.codec import encode
from meshwright.launch.cpu_bf16 import limit_isa_for_bf16
from meshwright.machine import measure_compute as compute
from meshwright.machine import measure_host as host
from meshwright.machine.probe import Reading, cpu_names
from meshwright.machine.timing import Bench

_WARM_SECONDS = 3.0


def read(bench: Bench, folder: Path) -> Reading:
    """All figures of one device, section by section."""
    memory_bytes = num_processors = 0
    device_name = next(iter(cpu_names()), "unknown CPU")
    # Resident bytes of this process with torch imported and no tensor yet: the second field is in pages.
    reserved_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    if bench.on_gpu:
        device_name = torch.cuda.get_device_name(bench.device)
        num_processors = torch.cuda.get_device_properties(bench.device).multi_processor_count
        tiny = torch.ones(8, 8, device=bench.device)
        torch.mm(tiny, tiny)
        bench.finish()
        # What is gone once a context and cuBLAS exist (to other processes too).
        free_bytes, memory_bytes = torch.cuda.mem_get_info(bench.device)
        reserved_bytes = memory_bytes - free_bytes - torch.cuda.memory_reserved(bench.device)
        if not bench.is_quick:
            bench.together("warming up")  # a card that was idle is cooler, and faster, than it will be
            matrix = torch.randn(8192, 8192, device=bench.device, dtype=torch.bfloat16)
            end = time.perf_counter() + _WARM_SECONDS
            while time.perf_counter() < end:
                for _ in range(10):
                    torch.mm(matrix, matrix)
                bench.memory_work()
                bench.finish()
    figures: dict[str, Any] = {"flops_per_second": compute.flops_by_dtype(bench)}
    bench.together("matmuls by shape")
    figures["matmuls"] = tuple(compute.matmul_points(bench))
    if bench.on_gpu:
        figures["odd_slowdown"] = compute.odd_slowdown(bench)
        torch.cuda.empty_cache()
    bench.together("attention")
    figures["attention"] = tuple(compute.attention_points(bench))
    bench.together("memory")
    figures["memory"] = tuple(compute.memory_points(bench))
    bench.together("op launch")
    figures["kernel_seconds"] = compute.kernel_seconds(bench) if bench.on_gpu else 0.0
    figures["launch_seconds"], figures["num_launches"] = compute.launch_seconds(bench)
    bench.together("a block")
    figures["blocks"] = compute.block_seconds(bench)
    if bench.on_gpu:
        torch.cuda.empty_cache()
        bench.together("copies")
    figures |= {"copies": host.copy_rates(bench), "beside": host.beside(bench)}
    bench.together("host")
    figures["host_memory_bytes_per_second"] = host.host_memory_bytes_per_second(bench)
    figures["adam_elements_per_second"] = host.adam_elements_per_second(bench)
    figures["links"] = host.collective_points(bench)
    bench.together("disk")
    read_rate, write_rate = host.disk_rates(bench, folder) if bench.rank == 0 else (0.0, 0.0)
    versions, watts = host.versions_and_watts(bench)
    return Reading(
        kind=bench.device.type,
        device_name=device_name,
        versions=versions,
        power_watts=watts,
        num_threads=torch.get_num_threads(),
        isa_limit=bench.isa_limit or "",
        num_processors=num_processors,
        memory_bytes=memory_bytes,
        reserved_bytes=reserved_bytes,
        disk_read_bytes_per_second=read_rate,
        disk_write_bytes_per_second=write_rate,
        **figures,
    )


def num_gpus(*, rank: int, num_ranks: int, rendezvous: str) -> int:
    return torch.cuda.device_count()


def measure(
    *, rank: int, num_ranks: int, rendezvous: str, kind: str, folder: str, section_seconds: float, sections: str
) -> Any:
    """The Reading as JSON. `folder`: whose disk is measured; `sections`: the file that rank 0 writes progress to."""
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    isa_limit = limit_isa_for_bf16() if kind == "cpu" else ""
    if num_ranks > 1:
        dist.init_process_group(
            "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(rendezvous, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=120),
        )
    place: dict[str, Any] = {"device": device, "rank": rank, "num_devices": num_ranks, "sections": Path(sections)}
    return encode(read(Bench(**place, section_seconds=section_seconds, isa_limit=isa_limit), Path(folder)))
