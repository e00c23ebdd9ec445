"""Claims: activations on the host cost little time where a block computes for as long as its copies take.

Measured on one CUDA GPU: training steps of a llama-like decoder at a long sequence, with activations on the device, on
the host, recomputed, and recomputed with inputs on the host. Bytes copied in a step, what the copy engines are busy
(torch's profiler), the share of it that does not lengthen the step, peak allocated, and the forecast of each.

Run: python -m benchmarks.offload_activations [--layers 8] [--hidden 4096] [--sequence 32768] [--compile] [--steps 4]

A case that does not fit is said to be so. `--device cpu` with small sizes shows that the script runs.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.ops.saved_tensors import moved_bytes
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.simulator.forecast import forecast
from meshwright.verify import parity

GIB = 2**30
ALL_BUT_LAST = "all but the last block on the host"
CASES: dict[str, dict[str, dict[str, object]]] = {
    "on the device": {},
    ALL_BUT_LAST: {"offload_activations": {}},
    "all blocks on the host": {"offload_activations": {"layers": "all"}},
    "recomputed": {"recompute": {}},
    "recomputed, inputs on the host": {
        "recompute": {},
        "offload_activations": {"layers": "none", "inputs": True},
    },
    "in 8 bits": {"compress_activations": {"bits": 8}},
}


def copy_seconds(session: parity.Session, given: object, lr: float) -> float:
    """What copies between host and device take in a step, on their engines."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        session.loop.step(given, lr)
        torch.cuda.synchronize()
    events = recorded.key_averages()
    return sum(e.device_time_total for e in events if "Memcpy DtoH" in e.key or "Memcpy HtoD" in e.key) * 1e-6


def measure(case: str, given: argparse.Namespace, config: DecoderConfig) -> tuple[float, float, float, int]:
    """Seconds of a step, seconds of copies in it, peak GiB allocated, bytes to the host."""
    is_cuda, device = given.device == "cuda", torch.device(given.device)
    session = parity.open_session(plan_of(case, given), open_config(config, "long", 0), OptimizerConfig(),
                                  dtype="float32", device=device)  # fmt: skip
    samples = parity.random_samples(config.vocab_size, 1, given.sequence, masked=False)
    rows = parity.own_samples(session, samples, 0)
    for _ in range(2):
        session.loop.step(rows, 1e-4)
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    moved_bytes.clear()
    start = time.perf_counter()
    for _ in range(given.steps):
        session.loop.step(rows, 1e-4)
    if is_cuda:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / given.steps
    moved = moved_bytes["out"] // given.steps
    peak = torch.cuda.max_memory_allocated() / GIB if is_cuda else 0.0
    return seconds, copy_seconds(session, rows, 1e-4) if is_cuda else 0.0, peak, moved


def plan_of(case: str, given: argparse.Namespace) -> Plan:
    settings = {name: dict(each) for name, each in CASES[case].items()}
    if case == ALL_BUT_LAST:
        settings["offload_activations"]["layers"] = f"first {given.layers - 1}"
    if "offload_activations" in settings and given.smallest:
        settings["offload_activations"]["smallest"] = given.smallest
    settings |= {"precision": {}, "chunked_loss": {}}
    settings |= {"compile": {}} if given.compile else {}
    techniques = tuple(technique_named(name)(**each) for name, each in settings.items())
    return Plan(techniques=techniques, batch=1, microbatch=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("hidden", 4096), ("sequence", 32768), ("vocab", 32768), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--smallest", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cluster", default="h200", help="whose forecast is shown")
    parser.add_argument("cases", nargs="*", default=[*CASES])
    given = parser.parse_args()
    config = DecoderConfig(
        num_layers=given.layers, hidden_size=given.hidden, num_heads=given.hidden // 128 or 1,
        num_kv_heads=max(given.hidden // 512, 1), ffn_size=given.hidden * 7 // 2, vocab_size=given.vocab,
        max_sequence=given.sequence,
    )  # fmt: skip
    print(f"{'':34} {'step s':>8} {'forecast':>8} {'copied GiB':>10} {'copying s':>9} {'hidden':>7} {'peak GiB':>9} "
          f"{'forecast':>8}")  # fmt: skip
    bare: float | None = None
    recomputed: float | None = None
    for case in given.cases:
        told = forecast(decoder_profile(config, "long"), plan_of(case, given), cluster(given.cluster),
                        sequence=given.sequence)  # fmt: skip
        expected = told.peak_bytes / GIB
        try:
            seconds, copying, peak, moved = measure(case, given, config)
        except torch.OutOfMemoryError:
            print(f"{case:34} does not fit; forecast {told.step_seconds:.2f} s, {expected:.1f} GiB", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            continue
        # Of offloading alone, against the same work without; where copies only ran ahead of need, all of it.
        reference = bare if "recompute" not in CASES[case] else recomputed
        hidden = f"{100 * (1 - max(seconds - reference, 0) / copying):6.0f}%" if reference and moved and copying else ""
        bare = seconds if case == "on the device" else bare
        recomputed = seconds if case == "recomputed" else recomputed
        print(f"{case:34} {seconds:8.3f} {told.step_seconds:8.3f} {moved / GIB:10.2f} {copying:9.3f} {hidden:>7} "
              f"{peak:9.2f} {expected:8.2f}", flush=True)  # fmt: skip
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
