"""Forecasts against runs on the one GPU at hand: what was said before, step time and memory after, worst first.

    python -m benchmarks.gpu_forecast [--part A|B] [--cluster C.cluster.json] [--json RESULT.json]
    python -m benchmarks.gpu_forecast --again RESULT.json [--cluster C.cluster.json]    # no GPU: forecasts made anew

Without a cluster file it probes first. Results are written case by case; a second part adds to the same file.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import meshwright as mw
from benchmarks.gpu_cases import CASES, TINY, Case
from meshwright.core.box import Box
from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode
from meshwright.machine.assemble import assemble
from meshwright.machine.probe import available_host_bytes, read_machine
from meshwright.machine.readings import Reading
from meshwright.models.presets import DecoderConfig, DLRMConfig
from meshwright.ops.device_mesh import Mesh
from meshwright.ops.initial_weights import Source
from meshwright.optimizers.update import Optimizer, OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.api import Built
from meshwright.runtime.build import build as build_plan
from meshwright.runtime.loop import Loop

Row = dict[str, Any]
WARM_STEPS = 3
LEAST_STEPS, MOST_STEPS, STEPS_SECONDS = 5, 30, 2.5
TOP_KERNELS = 40
_NON_TORCH = ("reserved", "non_torch")
"""Of a forecast's memory, what no tensor holds."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def forecast_row(case: Case, cluster: Cluster) -> Row:
    said = mw.forecast(case.profile, case.plan, cluster, sequence=case.sequence)
    by_category = dict(said.peak_bytes_by_category)
    allocated = said.peak_bytes - sum(by_category.get(name, 0) for name in _NON_TORCH)
    return {
        "forecast_seconds": said.step_seconds,
        "forecast_low_seconds": said.step_seconds_low,
        "forecast_high_seconds": said.step_seconds_high,
        "forecast_allocated_bytes": allocated,
        "forecast_reserved_bytes": said.peak_reserved_bytes,
        "forecast_fits": said.fits,
        "forecast_bytes_by_category": by_category,
        "forecast_seconds_by_origin": dict(said.seconds_by_origin),
        "bottleneck": said.bottleneck,
    }


def drawn_there(source: Source, device: torch.device) -> Source:
    """Large weights drawn on the device: their values do not matter here, and a core takes seconds for a billion."""

    def draw(name: str, box: Box, dtype: torch.dtype) -> Tensor:
        if len(box.size) < 2:
            return source(name, box, dtype)
        return torch.empty(box.size, dtype=dtype, device=device).normal_(std=0.02)

    return draw


def built(case: Case, device: torch.device) -> Built:
    opened = open_config(case.config, case.name, 0)
    source = drawn_there(opened.source, device)
    made = build_plan(case.plan, opened.model, opened.profile, Mesh.make({}, device), source)
    return Built(Loop(made, Optimizer(OptimizerConfig(), made)))


def sample(case: Case, device: torch.device) -> tuple[Any, Tensor]:
    """Inputs and targets that lie on the device already, as a loader would have put them."""
    config: Any = case.config
    if isinstance(config, DecoderConfig):
        drawn = torch.randint(config.vocab_size, (case.batch, case.sequence + 1), device=device)
        return drawn[:, :-1], drawn[:, 1:]
    if isinstance(config, DLRMConfig):
        ids = [torch.randint(rows, (case.batch,), device=device) for rows in config.tables]
        clicks = torch.randint(2, (case.batch,), device=device).float()
        return (torch.randn(case.batch, config.num_dense, device=device), torch.stack(ids, dim=1)), clicks
    image = torch.randn(case.batch, config.channels, config.image_size, config.image_size, device=device)
    return image, torch.randint(config.num_classes, (case.batch,), device=device)


def timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(case: Case, device: torch.device) -> Row:
    on_gpu = device.type == "cuda"
    run = built(case, device)
    inputs, targets = sample(case, device)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses: list[float] = []

    def step() -> None:
        losses.append(run.step(inputs, targets).loss)

    first = [timed(step, device) for _ in range(WARM_STEPS)]
    count = max(LEAST_STEPS, min(MOST_STEPS, int(STEPS_SECONDS / first[-1])))
    seconds = sorted(timed(step, device) for _ in range(count))
    row: Row = {
        "measured_seconds": median(seconds),
        "measured_low_seconds": seconds[len(seconds) // 10],
        "measured_high_seconds": seconds[-1 - len(seconds) // 10],
        "steps": count,
        "first_step_seconds": first[0],
        "loss": losses[-1],
    }
    if on_gpu:
        row["measured_allocated_bytes"] = torch.cuda.max_memory_allocated()
        row["measured_reserved_bytes"] = torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        row["non_torch_bytes"] = total - free - torch.cuda.memory_reserved()
    return row | kernels_of(step, device, case.shows_kernels)


def kernels_of(step: Callable[[], Any], device: torch.device, shows_all: bool) -> Row:
    """One step under the profiler: kernels launched, the device's busy seconds, and which kernels take them."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        timed(step, device)
    assert recorded.profiler is not None
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    by_name: dict[str, list[int]] = {}
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == wanted and not event.name().startswith("mw:"):
            by_name.setdefault(event.name(), []).append(event.duration_ns())
    total = sum(sum(each) for each in by_name.values())
    row: Row = {"kernels": sum(map(len, by_name.values())), "kernels_seconds": total / 1e9}
    if shows_all:
        most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP_KERNELS]
        row["top_kernels"] = [
            {"name": name[:160], "count": len(each), "seconds": sum(each) / 1e9} for name, each in most
        ]
    return row


def run_case(case: Case, device: torch.device) -> Row:
    start = time.perf_counter()
    try:
        row = measured(case, device)
    except torch.OutOfMemoryError:
        row = {"out_of_memory": True}
    except Exception as error:  # a case that fails is a result too, and the next must still run
        row = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    free_all(device)
    return row | {"case_seconds": round(time.perf_counter() - start, 1)}


def free_all(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def errors_of(row: Row) -> Row:
    """Forecast over measured - 1."""
    pairs = {"time": "seconds", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
    found: Row = {
        f"{name}_error": row[f"forecast_{key}"] / row[f"measured_{key}"] - 1
        for name, key in pairs.items()
        if row.get(f"measured_{key}") and f"forecast_{key}" in row
    }
    if "measured_seconds" in row and "forecast_seconds" in row:
        low, high = row["forecast_low_seconds"], row["forecast_high_seconds"]
        found["covered"] = low <= row["measured_seconds"] <= high
    if row.get("out_of_memory") or "measured_seconds" in row:
        found["fits_right"] = bool(row.get("forecast_fits", True)) != bool(row.get("out_of_memory"))
    return found


def summary(rows: list[Row]) -> Row:
    found: Row = {"cases": len(rows), "failed": [row["name"] for row in rows if "failed" in row]}
    for name in ("time", "allocated", "reserved"):
        off = sorted(abs(row[f"{name}_error"]) for row in rows if f"{name}_error" in row)
        if off:
            ninth = off[min(len(off) - 1, int(0.9 * len(off)))]
            found[name] = {"median_error": median(off), "p90_error": ninth, "worst_error": off[-1], "rows": len(off)}
    covered = [row["covered"] for row in rows if "covered" in row]
    if covered:
        found["coverage"] = sum(covered) / len(covered)
    right = [row["fits_right"] for row in rows if "fits_right" in row]
    if right:
        found["fits_right"] = sum(right) / len(right)
    return found


def table(rows: list[Row]) -> str:
    """Worst step time first."""

    def share(row: Row, name: str) -> str:
        return f"{row[name]:+.1%}" if name in row else "-"

    lines = [
        f"{'case':44s} {'measured':>10s} {'forecast':>10s} {'time':>7s} {'alloc':>7s} {'reserv':>7s}  kernels busy"
    ]
    for row in sorted(rows, key=lambda row: -abs(row.get("time_error", 9.0))):
        took = row.get("measured_seconds")
        shown = f"{took * 1e3:8.2f}ms" if took else "no memory" if row.get("out_of_memory") else "failed"
        busy = f"{row['kernels']:6d} {row['kernels_seconds'] / took:.0%}" if took and "kernels" in row else ""
        said = f"{row['forecast_seconds'] * 1e3:8.2f}ms" if row.get("forecast_fits", True) else "no memory"
        off = " ".join(f"{share(row, f'{name}_error'):>7s}" for name in ("time", "allocated", "reserved"))
        mark = "" if row.get("covered", True) else "  outside"
        lines.append(f"{row['name'][:44]:44s} {shown:>10s} {said:>10s} {off}  {busy}{mark}")
    return "\n".join(lines)


def kept(path: Path | None) -> dict[str, Row]:
    """Rows of another part, by name."""
    if path is None or not path.exists():
        return {}
    return {row["name"]: row for row in json.loads(path.read_text(encoding="utf-8"))["cases"]}


def write(path: Path | None, about: Row, rows: dict[str, Row]) -> None:
    if path is not None:
        made = {**about, "summary": summary(list(rows.values())), "cases": list(rows.values())}
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def cluster_for(arguments: argparse.Namespace) -> Cluster:
    """From a file, from the readings of an earlier probe, or probed now."""
    if arguments.cluster:
        return mw.cluster(arguments.cluster)
    path: Path | None = arguments.readings
    if path is not None and path.exists():
        given = json.loads(path.read_text(encoding="utf-8"))
        readings = [decode(Reading, each, f"{path}[{i}]") for i, each in enumerate(given["readings"])]
        return assemble(readings, host_bytes=given["host_bytes"])
    host_bytes = available_host_bytes()
    start = time.perf_counter()
    readings = read_machine(num_devices=1, report=say, quick=arguments.quick)
    say(f"probed in {time.perf_counter() - start:.0f} s")
    if path is not None:
        path.write_text(json.dumps({"host_bytes": host_bytes, "readings": encode(readings)}), encoding="utf-8")
    return assemble(readings, host_bytes=host_bytes)


def again(path: Path, arguments: argparse.Namespace) -> int:
    """Forecasts of today against an earlier run's measurements."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    named = bool(arguments.cluster or arguments.readings)
    cluster = cluster_for(arguments) if named else decode(Cluster, stored["cluster"], f"{path}.cluster")
    cases = {case.name: case for case in (*CASES, *TINY)}
    rows = {}
    for row in stored["cases"]:
        if row["name"] in cases:
            row |= forecast_row(cases[row["name"]], cluster)
            rows[row["name"]] = row | errors_of(row)
    about = {key: value for key, value in stored.items() if key not in ("cases", "summary")}
    write(arguments.json, {**about, "cluster": encode(cluster), "forecast_again": True}, rows)
    print(table(list(rows.values())))
    print(json.dumps(summary(list(rows.values())), indent=1))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("A", "B"), help="half of the cases (default: all)")
    parser.add_argument("--only", metavar="WORDS", default="", help="cases whose names contain this")
    parser.add_argument("--cluster", metavar="C.cluster.json")
    parser.add_argument("--readings", type=Path, metavar="R.json", help="what the probe measured: kept, or read again")
    parser.add_argument("--json", type=Path, metavar="RESULT.json")
    parser.add_argument("--again", type=Path, metavar="RESULT.json", help="forecast anew, measure nothing")
    parser.add_argument("--quick", action="store_true", help="a quick probe")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.again:
        return again(arguments.again, arguments)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        say("There is no CUDA device here, and these are measurements of one.")
        return 2
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    cluster = cluster_for(arguments)
    cases = [
        case
        for case in (CASES if device.type == "cuda" else TINY)
        if arguments.part in (None, case.part) and arguments.only in case.name
    ]
    said = {case.name: forecast_row(case, cluster) for case in cases}  # all of them before anything runs
    named = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about = {"device": named, "torch": torch.__version__, "cluster": encode(cluster)}
    rows, start = kept(arguments.json), time.perf_counter()
    for case in cases:
        row = {"name": case.name, "part": case.part, "must_fail": case.must_fail, **said[case.name]}
        row |= run_case(case, device)
        rows[case.name] = row | errors_of(row)
        took = row.get("measured_seconds", 0.0)
        off = rows[case.name].get("time_error", 0.0)
        end = row.get("failed") or ("out of memory" if row.get("out_of_memory") else f"{took * 1e3:.2f} ms, {off:+.1%}")
        say(f"[{time.perf_counter() - start:5.0f} s] {case.name}: {end} ({row['case_seconds']} s)")
        write(arguments.json, about, rows)
    print(table([rows[case.name] for case in cases]))
    print(json.dumps(summary(list(rows.values())), indent=1))
    return 1 if any("failed" in rows[case.name] for case in cases) else 0


if __name__ == "__main__":
    sys.exit(main())
