"""`mw train` inside torchrun or Slurm: rank 0 plans, everyone gets the plan, every process is a rank."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.ops.agree import share_json
from meshwright.ops.mesh import join
from meshwright.probe.names import cluster, preset_of_device
from meshwright.runtime.config import RunConfig
from meshwright.runtime.prepare import open_folder, prepare
from meshwright.runtime.rank import device_of, train
from meshwright.supervise.environment import Place
from meshwright.supervise.rank import StopFlag


def run_outside(config: RunConfig, plan_file: str, place: Place) -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_of(kind, place.local_rank)
    _point_to_master(place)
    try:
        join(place.rank, place.num_ranks, device)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        where = f"{place.master_address}:{place.master_port}"
        first_line = str(error).splitlines()[0]
        fix = "Choose a free port (MASTER_PORT, or torchrun --master-port)."
        raise MeshwrightError([Problem(where=where, what=f"cannot meet the others: {first_line}.", fix=fix)]) from None
    control = dist.new_group(backend="gloo")
    arguments: dict[str, Any] = {}
    lock = None
    if place.rank == 0:
        try:
            lock = open_folder(Path(config.run.folder))
            arguments = _plan(config, plan_file, place, kind)
        except MeshwrightError as error:
            arguments = {"problems": [encode(p) for p in error.problems], "exit_code": error.exit_code}
    arguments = share_json(control, arguments)
    if "problems" in arguments:
        if place.rank != 0:
            return int(arguments["exit_code"])  # rank 0 says it
        raise MeshwrightError([Problem(**p) for p in arguments["problems"]], arguments["exit_code"])
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.on_signal)
    code = train(arguments, decode(Plan, arguments["plan"], "plan"), device, stop)
    dist.destroy_process_group()
    if lock is not None:
        lock.close()
    return code


def _plan(config: RunConfig, plan_file: str, place: Place, kind: str) -> dict[str, Any]:
    if not config.run.cluster:
        # The ranks are already running: measuring now would disturb them, so the nearest preset stands in.
        found = preset_of_device(torch.cuda.get_device_name()) if kind == "cuda" else cluster("laptop")
        name = found.name if found is not None else "h100"
        config = replace(config, run=replace(config.run, cluster=name))
    prepared = prepare(config, plan_file, lambda text: print(f"  {text}", file=sys.stderr), place.num_ranks)
    if prepared.plan.num_ranks != place.num_ranks:
        what = f"needs {prepared.plan.num_ranks} ranks, {place.kind} started {place.num_ranks}."
        raise MeshwrightError([Problem(where=f"plan {prepared.plan}", what=what)])
    print(f"  plan: {prepared.plan}", file=sys.stderr)
    folder = Path(config.run.folder)
    (folder / "plan.json").write_text(prepared.plan.to_json() + "\n", encoding="utf-8")
    return {
        "config": encode(config),
        "plan": encode(prepared.plan),
        "device": kind,
        "tokens_per_second": prepared.forecast.tokens_per_second,
    }


def _point_to_master(place: Place) -> None:
    """Slurm does not set torchrun's variables; torch reads nothing else."""
    os.environ.setdefault("MASTER_ADDR", place.master_address)
    os.environ.setdefault("MASTER_PORT", str(place.master_port))
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.num_ranks))
