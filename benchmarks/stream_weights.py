"""Models that do not fit a GPU, trained on it with weights and states in host memory.

    python -m benchmarks.stream_weights 8b        llama3-8b, sequence 8192, torch limited to 24 GiB; goal: 40 % MFU
    python -m benchmarks.stream_weights 14b       qwen3-14b, states in both memories; goal: 35 % MFU
    python -m benchmarks.stream_weights 40b       47 layers of llama3-70b in fewer bits, on the device; goal: 20 % MFU
    python -m benchmarks.stream_weights context   llama3-8b, one step over 256k tokens; no warm-up: it takes minutes
    python -m benchmarks.stream_weights longest   8 layers of it, one step over 512k tokens
    python -m benchmarks.stream_weights tiny      the same path on a CPU, to prove the script

Weights are random, the optimizer is AdamW: exact, but in the case 40b, which has bf16 weights rounded stochastically,
moments in 4 bits and updates in backward, and whose loss must fall over 20 steps on one batch. MFU counts 6 N + 12 LHs
flops a token, of 989 TFLOP/s. Of copies between host and device, the share that runs while kernels run is taken from
a profile of one step (--profile). Further options change a case: --microbatch, --microbatches, --sequence, --layers,
--share, --buffers, --steps, and --also adds techniques as JSON: --also '{"name": "..."}'.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from benchmarks.gpu_child import PEAK_FLOPS, weights_drawn_on
from meshwright.core.plan import Plan
from meshwright.optimizers.optimizer_config import OptimizerConfig

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    model: str
    sequence: int
    microbatch: int
    microbatches: int = 1
    share: float = 1.0
    """Of the states, in host memory."""
    buffers: int = 2
    chunks: int = 16
    """Of the loss."""
    layers: int = 0
    """0: all."""
    vocabulary: int = 0
    """0: the model's own."""
    steps: int = 3
    warm: int = 1
    most_gib: float = 0.0
    goal: float = 0.0
    is_lossy: bool = False
    """Fewer bits, in place of host memory."""
    lr: float = 3e-4
    also: str = ""

    def plan(self, is_tiny: bool) -> Plan:
        techniques: list[dict[str, Any]] = [{"name": "recompute"}, {"name": "chunked_loss", "chunks": self.chunks}]
        if self.is_lossy:
            techniques += [{"name": "precision", "weights": "bf16"}, {"name": "compile"}]
            techniques += [{"name": "lowbit_optimizer", "bits": 4}, {"name": "update_in_backward"}]
        else:
            techniques += [{"name": "offload_states", "share": self.share}]
            techniques += [{"name": "stream_weights", "buffers": self.buffers}]
            techniques += [] if is_tiny else [{"name": "precision"}, {"name": "compile"}]
        techniques += [json.loads(self.also)] if self.also else []
        batch = self.microbatch * self.microbatches
        value = {"version": 2, "techniques": techniques, "batch": batch, "microbatch": self.microbatch}
        return Plan.from_json(json.dumps(value))


_ON_HOST = '{"name": "offload_activations", "layers": "none", "inputs": true}'
CASES = {
    "8b": StreamCase(model="llama3-8b", sequence=8192, microbatch=5, most_gib=24.0, goal=0.40, also=_ON_HOST),
    "14b": StreamCase(model="qwen3-14b", sequence=4096, microbatch=8, share=0.5, goal=0.35),
    "40b": StreamCase(
        model="llama3-70b",
        layers=47,
        vocabulary=32000,
        sequence=4096,
        microbatch=2,
        steps=19,
        goal=0.20,
        is_lossy=True,
        lr=1e-4,
    ),
    "context": StreamCase(model="llama3-8b", sequence=262144, microbatch=1, chunks=128, steps=1, warm=0),
    "longest": StreamCase(
        model="llama3-8b", layers=8, sequence=524288, microbatch=1, chunks=256, steps=1, warm=0, also=_ON_HOST
    ),
    "tiny": StreamCase(model="gpt2-124m", sequence=64, microbatch=2, microbatches=2, layers=4, chunks=2, steps=2),
}


def available_bytes() -> int:
    """Of the host's memory."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time without overlap, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def hidden_share(events: Any) -> tuple[float, float, float]:
    """(seconds of copies from the host, of copies to it, share of both beside kernels)."""
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    spans: dict[str, list[tuple[float, float]]] = {"HtoD": [], "DtoH": [], "": []}
    for event in on_device:
        which = next((way for way in ("HtoD", "DtoH") if way in event.name), "")
        if which or not event.name.startswith(("Memcpy", "Memset", "mw:")):
            spans[which].append((event.time_range.start, event.time_range.end))
    kernels, covered, total = joined(spans[""]), 0.0, 0.0
    for start, end in spans["HtoD"] + spans["DtoH"]:
        total += end - start
        covered += sum(max(0.0, min(end, b) - max(start, a)) for a, b in kernels if a < end and b > start)
    inward, outward = (sum(end - start for start, end in spans[way]) / 1e6 for way in ("HtoD", "DtoH"))
    return inward, outward, covered / max(total, 1e-9)


def measure(case: StreamCase, *, is_tiny: bool, is_profiled: bool, cluster: str) -> None:
    device = torch.device("cpu" if is_tiny else "cuda")
    if case.most_gib:
        torch.cuda.set_per_process_memory_fraction(case.most_gib * GIB / torch.cuda.mem_get_info()[1])
    change: dict[str, Any] = {"max_sequence": case.sequence} if case.sequence > 8192 else {}
    change |= {"num_layers": case.layers} if case.layers else {}
    change |= {"vocab_size": case.vocabulary} if case.vocabulary else {}
    description, plan = mw.model(case.model, sequence=case.sequence, change=change), case.plan(is_tiny)
    print(plan, flush=True)
    if cluster:
        said = mw.forecast(description, plan, mw.cluster(cluster), sequence=case.sequence)
        tiers = {tier: f"{size / GIB:.1f} GiB" for tier, size in said.peak_bytes_by_tier.items()}
        print(f"forecast: {said.step_seconds:.2f} s, {said.peak_allocated_bytes / GIB:.1f} GiB allocated, {tiers}")
    before, began = available_bytes(), time.perf_counter()
    with weights_drawn_on(device):
        optimizer = OptimizerConfig(lr=case.lr, clip=0.0 if case.is_lossy else 1.0)
        built = mw.build(plan, description, device=device.type, optimizer=optimizer)
    print(
        f"built in {time.perf_counter() - began:.0f} s; host {(before - available_bytes()) / GIB:.1f} GiB", flush=True
    )
    config, batch = description.config, plan.batch
    drawn = torch.randint(description.vocab_size, (batch, case.sequence + 1), device=device)
    inputs, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def settle() -> float:
        if not is_tiny:
            torch.cuda.synchronize()
        return time.perf_counter()

    losses = []
    for _ in range(case.warm):
        losses += [result.loss for result in built.feed(inputs, targets)]
    losses += [result.loss for result in built.flush()]
    built._loop.optimizer.rule.finish()  # what the host updates beside the device
    if not is_tiny:
        torch.cuda.reset_peak_memory_stats()
    began = settle()
    for number in range(case.steps):
        losses += [result.loss for result in built.feed(inputs, targets)]
        print(f"after step {number + 1}: {time.perf_counter() - began:.1f} s, losses {losses[-1:]}", flush=True)
    losses += [result.loss for result in built.flush()]
    seconds = (settle() - began) / case.steps
    tokens, layers = batch * case.sequence, config.num_layers
    flops = 6 * description.profile.num_params + 12 * layers * config.hidden_size * case.sequence
    mfu = tokens * flops / seconds / PEAK_FLOPS
    print(f"step {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s, MFU {mfu:.1%} (goal {case.goal:.0%})")
    if not is_tiny:
        peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
        limit = f" (limit {case.most_gib:g})" if case.most_gib else ""
        print(f"peak {peak:.2f} GiB allocated{limit}, {reserved:.2f} GiB reserved")
    print(f"host {(before - available_bytes()) / GIB:.1f} GiB less available than at the start")
    print("losses", ", ".join(f"{loss:.4f}" for loss in losses), flush=True)
    if is_profiled and not is_tiny:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            built.feed(inputs, targets)
            built.flush()
            settle()
        inward, outward, hidden = hidden_share(recorded.events())
        print(f"copies: {inward:.2f} s in, {outward:.2f} s out, {hidden:.1%} beside kernels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    for name, kind in (("microbatch", int), ("microbatches", int), ("sequence", int), ("layers", int)):
        parser.add_argument(f"--{name}", type=kind)
    for name, kind in (("share", float), ("buffers", int), ("chunks", int), ("steps", int), ("also", str)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cluster", default="", help="for a forecast: h200, or a file of mw probe")
    given = vars(parser.parse_args())
    name, is_profiled, cluster = given.pop("case"), given.pop("profile"), given.pop("cluster")
    case = replace(CASES[name], **{key: value for key, value in given.items() if value is not None})
    measure(case, is_tiny=name == "tiny", is_profiled=is_profiled, cluster=cluster)


if __name__ == "__main__":
    main()
