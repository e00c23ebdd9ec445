"""What tables in host memory cost: a DLRM with its tables on the device and on the host, one rank, in one process.

Printed for both: seconds of a step (median), rows copied, peak bytes of the device, and the forecast for the machine
that is named. Ids are drawn evenly (nearly all distinct) or by a power law (hot rows).

Run: python -m benchmarks.host_tables [--rows 1000000] [--tables 26] [--batch 8192] [--cluster h200] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_samples import dlrm_profile
from meshwright.models.presets import DLRMConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.runtime.api import build
from meshwright.simulator.forecast import forecast

OPTIMIZER = OptimizerConfig(name="rowwise_adagrad", lr=1e-2)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("rows", 1_000_000), ("tables", 26), ("batch", 8192), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cluster", default="h200")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rows, given.tables, given.batch, given.steps = 1000, 4, 64, 3
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = DLRMConfig(tables=(given.rows,) * given.tables)
    print("tier    ids        ms a step   distinct rows   device GiB   forecast ms   forecast GiB")
    for tier in ("device", "host"):
        plan = Plan(techniques=(technique_named("rows")(size=1, tier=tier),), batch=given.batch, microbatch=given.batch)
        built: Any = build(plan, config, optimizer=OPTIMIZER, device=device.type)
        told = forecast(dlrm_profile(config, "dlrm"), plan, cluster(given.cluster), sequence=1, optimizer=OPTIMIZER)
        for kind in ("even", "power law"):
            seconds, rows = _measured(built, config, given, kind, device)
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
            print(f"{tier:7} {kind:10} {1e3 * seconds:9.2f} {rows:15,} {peak:12.2f} {1e3 * told.step_seconds:13.2f} "
                  f"{told.peak_allocated_bytes / 2**30:14.2f}")  # fmt: skip
        del built
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def _measured(built: Any, config: DLRMConfig, given: Any, kind: str, device: torch.device) -> tuple[float, int]:
    """Median seconds of a step, and the distinct rows of the last one."""
    generator, seconds, rows = torch.Generator().manual_seed(0), [], 0
    for _ in range(given.steps + 3):
        drawn = torch.rand(given.batch, given.tables, generator=generator)
        ids = ((drawn if kind == "even" else drawn**8) * given.rows).long().clamp(max=given.rows - 1)
        rows = sum(len(column.unique()) for column in ids.unbind(1))
        dense = torch.randn(given.batch, config.num_dense, generator=generator)
        targets = torch.randint(2, (given.batch,), generator=generator).float()
        inputs = dense.to(device), ids.to(device)
        targets = targets.to(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        built.step(inputs, targets)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:]), rows


if __name__ == "__main__":
    main()
