"""One side of a comparison in a process of its own: a failure, a leak or a patched library touches nobody else.

parent                          child
a job, one JSON line    ──────> imports, describes the model and forecasts it; nothing on the GPU yet
                        <────── RESULT {"forecast": ...}
{"do": "start"}         ──────> builds and makes the first steps
{"do": "steps"}         ──────> a block of steps, timed as a whole
{"do": "kernels"}       ──────> two steps under the profiler, by category
                        <────── RESULT {...} after each, {"failed": ...} or {"out_of_memory": true} at the end
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from benchmarks.gpu_cases import Case
from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode
from meshwright.models.presets import DLRMConfig
from meshwright.ops import initial_weights
from meshwright.run.model import ModelDescription

Step = Callable[[], Any]
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200: what MFU is a share of, whatever the dtype."""
WARM_STEPS = 4
TOP_KERNELS = 40

CATEGORIES: dict[str, tuple[str, ...]] = {
    # The first category of which a word is in a kernel's name; order matters.
    "memcpy": ("memcpy", "memset"),
    "communication": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "attention", "flex_", "_attn"),
    "loss": ("cross_entropy", "log_softmax", "nll_loss", "logsumexp", "loss", "softmaxforward", "softmaxbackward"),
    "optimizer": ("adam", "multi_tensor", "foreach", "lpnorm", "clip", "optimizer"),
    "convolution": ("conv", "wgrad", "dgrad", "implicit", "nchw", "nhwc", "winograd"),
    "matmul": ("gemm", "nvjet", "cutlass", "cublas", "_mm", "addmm", "splitk", "scaled_mm", "xmma", "matmul"),
    "norm": ("norm", "rsqrt", "welford"),
    "embedding and routing": ("embedding", "index", "gather", "scatter", "sort", "topk", "cumsum", "cub::"),
    "pointwise": ("elementwise", "triton_poi", "vectorized", "copy", "cat", "fill", "aten::"),
    "reduction": ("reduce", "triton_red", "triton_per", "sum"),
}


def forecast_of(case: Case, description: ModelDescription, cluster: Cluster) -> dict[str, Any]:
    """What we say of a case before it runs."""
    if case.documents:
        length = sum(each**2 for each in case.documents) / sum(case.documents)
        description = replace(description, profile=description.profile.with_documents(length))
    said = mw.forecast(description, case.plan, cluster, sequence=case.sequence)
    return {
        "forecast_seconds": said.step_seconds,
        "forecast_low_seconds": said.step_seconds_low,
        "forecast_high_seconds": said.step_seconds_high,
        "forecast_allocated_bytes": said.peak_allocated_bytes,
        "forecast_reserved_bytes": said.peak_reserved_bytes,
        "forecast_fits": said.fits,
        "forecast_bytes_by_category": dict(said.peak_bytes_by_category),
        "forecast_seconds_by_origin": dict(said.seconds_by_origin),
        "bottleneck": said.bottleneck,
    }


def sample(case: Case, description: ModelDescription, device: torch.device) -> tuple[Any, Tensor]:
    """Inputs and targets that lie on the device already, as a loader would have put them."""
    config, batch = description.config, case.batch
    if description.profile.counts == "tokens":
        drawn = torch.randint(description.vocab_size, (batch, case.sequence + 1), device=device)
        inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        if not case.documents:
            return inputs, targets
        lengths = torch.tensor(case.documents, device=device)
        numbers = torch.arange(len(lengths), device=device, dtype=torch.int32).repeat_interleave(lengths)
        return (inputs, numbers.repeat(batch, 1)), targets
    if isinstance(config, DLRMConfig):
        ids = [torch.randint(rows, (batch,), device=device) for rows in config.tables]
        clicks = torch.randint(2, (batch,), device=device).float()
        return (torch.randn(batch, config.num_dense, device=device), torch.stack(ids, dim=1)), clicks
    if config is None:
        shape, classes = description.sample_shape, description.num_scores
    else:
        shape, classes = (config.channels, config.image_size, config.image_size), config.num_classes
    return torch.randn(batch, *shape, device=device), torch.randint(classes, (batch,), device=device)


@contextlib.contextmanager
def weights_drawn_on(device: torch.device) -> Iterator[None]:
    """Seeded weights take a core eight seconds for a billion; their values do not matter here."""

    def draw(name: str, box: Any, mean: float, deviation: float, seed: int) -> Tensor:
        return torch.empty(box.size, device=device).normal_(mean, deviation)

    before = initial_weights._normal
    initial_weights._normal = draw
    try:
        yield
    finally:
        initial_weights._normal = before


def our_step(case: Case, description: ModelDescription, device: torch.device) -> Step:
    """A step of `mw.build`, as `mw train` makes them."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ.update(alone)  # axes of size one have process groups too
    with weights_drawn_on(device):
        built = mw.build(case.plan, description, device=device.type)
    inputs, targets = sample(case, description, device)
    return lambda: built.feed(inputs, targets)  # as a training loop does: losses are read a step later


class Side:
    """What is timed: its step, made when the parent says so."""

    def __init__(self, job: dict[str, Any]):
        self.job = job
        self.device = torch.device("cpu") if job["tiny"] else torch.device("cuda", 0)
        self.step: Step | None = None

    def prepare(self) -> dict[str, Any]:
        """Everything that needs no GPU."""
        if self.job["tiny"]:
            torch.set_num_threads(1)
        if "peer" in self.job:
            from benchmarks import gpu_peers

            self.make = gpu_peers.prepare(self.job["peer"], self.job["arguments"], self.device)
            return {"name": f"{self.job['peer']} {json.dumps(self.job['arguments'])}"}
        case = Case(**self.job["case"])
        description = case.describe()
        tokens = case.batch * case.sequence
        told: dict[str, Any] = {
            "name": case.name,
            "tokens": tokens,
            "flops": description.profile.model_flops(tokens, case.sequence).published,
        }
        if self.job.get("cluster"):
            cluster = decode(Cluster, json.loads(Path(self.job["cluster"]).read_text(encoding="utf-8")), "cluster")
            told |= forecast_of(case, description, cluster)
        self.make = lambda: our_step(case, description, self.device)
        return told

    def start(self) -> dict[str, Any]:
        begin = time.perf_counter()
        self.step = self.make()
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        built = time.perf_counter()
        for _ in range(WARM_STEPS):
            self.step()
        self._settle()
        return {"build_seconds": built - begin, "first_steps_seconds": time.perf_counter() - built, **self._memory()}

    def steps(self) -> dict[str, Any]:
        """Mean seconds of so many steps, or of as many as take so long. Memory between blocks belongs to others."""
        assert self.step is not None
        self.step()  # after a pause: clocks, and memory that was given back
        one = self._block(1)
        count = self.job.get("count") or max(3, min(40, int(1.5 / one)))
        seconds = self._block(count)
        return {"seconds": seconds, "count": count, **self._memory()}

    def rest(self) -> dict[str, Any]:
        """Give back what is only cached, while the others run."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def kernels(self) -> dict[str, Any]:
        assert self.step is not None
        return kernels_of(self.step, self.device)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _block(self, count: int) -> float:
        assert self.step is not None
        self._settle()
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        self._settle()
        return (time.perf_counter() - begin) / count

    def _memory(self) -> dict[str, int]:
        if self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "non_torch_bytes": total - free - torch.cuda.memory_reserved(),
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        }


def category_of(kernel: str) -> str:
    name = kernel.lower()
    return next((category for category, words in CATEGORIES.items() if any(word in name for word in words)), "other")


def kernels_of(step: Step, device: torch.device, count: int = 2) -> dict[str, Any]:
    """Milliseconds of a step by category of kernel, the device's idle time between kernels, and the largest kernels."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    assert recorded.profiler is not None
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    by_name: dict[str, list[int]] = {}
    spans = []
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == wanted and not event.name().startswith("mw:"):
            by_name.setdefault(event.name(), []).append(event.duration_ns())
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    busy, end = 0, 0
    for first, last in sorted(spans):
        busy += max(0, last - max(first, end))
        end = max(end, last)
    whole = end - min((first for first, _ in spans), default=0)
    by_category: dict[str, float] = {}
    for name, each in by_name.items():
        category = category_of(name)
        by_category[category] = by_category.get(category, 0.0) + sum(each) / count / 1e6
    largest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP_KERNELS]
    return {
        "kernels": sum(map(len, by_name.values())) // count,
        "kernels_seconds": busy / count / 1e9,
        "milliseconds_by_category": {
            **dict(sorted(by_category.items(), key=lambda item: -item[1])),
            "idle gaps": (whole - busy) / count / 1e6,
        },
        "top_kernels": [
            {
                "name": name[:160],
                "category": category_of(name),
                "count": len(each) // count,
                "seconds": sum(each) / count / 1e9,
            }
            for name, each in largest
        ],
    }


def main() -> int:
    """Reads a job and commands from stdin; a failure ends it."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(value: dict[str, Any]) -> None:
        out.write(f"RESULT {json.dumps(value)}\n")
        out.flush()

    side = Side(json.loads(sys.stdin.readline()))
    try:
        answer(side.prepare())
        for line in sys.stdin:
            what = json.loads(line)["do"]
            answer({"start": side.start, "steps": side.steps, "rest": side.rest, "kernels": side.kernels}[what]())
    except torch.OutOfMemoryError as error:
        answer({"out_of_memory": True, "why": str(error)[:300]})
    except ImportError as error:
        answer({"absent": str(error)[:300]})
    except Exception as error:
        traceback.print_exc()
        answer({"failed": f"{type(error).__name__}: {str(error)[:600]}"})
    sys.stderr.flush()
    os._exit(0)  # process groups and compile workers need no orderly end


if __name__ == "__main__":
    sys.exit(main())
