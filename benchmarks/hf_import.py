"""Claim: a rank that reads its slices of a Hugging Face folder needs no more memory than they, and loses little time.

Measured: a 2 GB folder in bfloat16; two processes each read their half of every tensor, cut along dim 0 as `shard` cuts
it, once as it is stored and once as float32. Memory: the peak of the process beyond what it had before. Speed: against
two processes that read the same files without looking at them. The files are dropped from the disk's cache before each.

Run: python -m benchmarks.hf_import [--quick] [--json]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.claims import Claim, alone
from meshwright.checkpoint.safetensors_folder import INDEX
from meshwright.core.box import Box
from meshwright.hf.config_json import config_for
from meshwright.hf.weights_read import parameter_shapes, parts_of_decoder, source_of_folder
from meshwright.models.presets import DecoderConfig

RANKS, ROUNDS = 2, 3
LEAST_RATE, LEAST_MEMORY = 0.6, 1 / 1.1
# 1.04 G parameters.
MODEL = DecoderConfig(
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=8192,
    vocab_size=32_000,
    tied=True,
)
READ_BYTES = 16 << 20


def make(folder: Path, layers: int) -> DecoderConfig:
    """A folder of shards of about half a gigabyte; the numbers are any."""
    config = DecoderConfig(**{**_fields(MODEL), "num_layers": layers})
    (folder / "config.json").write_text(json.dumps(config_for(config)))
    noise = torch.randn(1 << 20).bfloat16()
    held: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    parts = [each[0] for each in parts_of_decoder(config).values()]
    for number, part in enumerate(parts):
        count = torch.Size(part.shape).numel()
        held[part.name] = noise.repeat(-(-count // len(noise)))[:count].reshape(part.shape).clone()
        if number == len(parts) - 1 or sum(each.nbytes for each in held.values()) > 5e8:
            file = f"model-{number:05d}.safetensors"
            save_file(held, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(held, file)
            held = {}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return config


def _fields(config: DecoderConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def forget(folder: Path) -> None:
    """Drop the files from the disk's cache."""
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def import_slices(rank: int, folder: Path, config: DecoderConfig, dtype: torch.dtype, start: Barrier) -> dict[str, Any]:
    shapes = parameter_shapes(config)
    source = source_of_folder(folder, config)
    source("head.norm.weight", Box.whole(shapes["head.norm.weight"]), dtype)  # what torch allocates once
    start.wait()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before, began = _status_bytes("VmRSS"), time.perf_counter()
    held = [source(name, Box.whole(shape).chunk(0, rank, RANKS), dtype) for name, shape in shapes.items()]
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "extra": _status_bytes("VmHWM") - before, "slices": sum(each.nbytes for each in held)}


def read_raw(rank: int, folder: Path, config: DecoderConfig, dtype: torch.dtype, start: Barrier) -> dict[str, Any]:
    """This rank's half of every file, into one buffer."""
    buffer = memoryview(torch.zeros(READ_BYTES, dtype=torch.uint8).numpy())
    start.wait()
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        half = path.stat().st_size // RANKS
        file = os.open(path, os.O_RDONLY)
        for offset in range(rank * half, (rank + 1) * half, READ_BYTES):
            os.preadv(file, [buffer[: min(READ_BYTES, (rank + 1) * half - offset)]], offset)
        os.close(file)
    return {"seconds": time.perf_counter() - began}


def _rank(work: Callable[..., dict[str, Any]], rank: int, rest: tuple[Any, ...], told: Any) -> None:
    torch.set_num_threads(1)
    told.put(work(rank, *rest))


def together(work: Callable[..., dict[str, Any]], folder: Path, config: DecoderConfig, dtype: torch.dtype) -> list[Any]:
    """What each rank tells, all starting at once with nothing in the disk's cache."""
    context = multiprocessing.get_context("spawn")
    start, told = context.Barrier(RANKS + 1), context.Queue()
    rest = (folder, config, dtype, start)
    ranks = [context.Process(target=_rank, args=(work, rank, rest, told)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    while start.n_waiting < RANKS:
        if any(each.exitcode for each in ranks):
            raise RuntimeError("a rank failed")
        time.sleep(0.01)
    forget(folder)
    start.wait()
    found = [told.get(timeout=600) for _ in ranks]
    for each in ranks:
        each.join()
    return found


def slowest(ranks: list[Any]) -> float:
    return max(float(each["seconds"]) for each in ranks)


def measure(quick: bool = False) -> list[Claim]:
    claims = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make(folder, layers=2 if quick else MODEL.num_layers)
        num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for dtype in (torch.bfloat16, torch.float32):
            speed, memory, disk = [], [], []
            for _ in range(1 if quick else ROUNDS):
                raw = slowest(together(read_raw, folder, config, dtype))
                ranks = together(import_slices, folder, config, dtype)
                speed.append(raw / slowest(ranks))
                memory.append(min(each["slices"] / each["extra"] for each in ranks))
                disk.append(num_bytes / raw / 1e9)
            kind = str(dtype).removeprefix("torch.")
            what = f"{num_bytes / 1e9:.1f} GB of bfloat16 as {kind}, 2 ranks"
            rate = f"{what}: rate over the disk's {sorted(disk)[len(disk) // 2]:.2f} GB/s"
            claims.append(Claim(name="hf-rate", what=rate, unit="ratio", goal=LEAST_RATE, measured=tuple(speed)))
            slices = f"{what}: slices over peak extra memory"
            claims.append(Claim(name="hf-memory", what=slices, unit="ratio", goal=LEAST_MEMORY, measured=tuple(memory)))
    return claims


if __name__ == "__main__":
    found = measure("--quick" in sys.argv)
    if "--json" in sys.argv:
        print(json.dumps([claim.encode() for claim in found], indent=1))
        sys.exit(0 if all(claim.is_kept for claim in found) else 1)
    sys.exit(alone(found))
