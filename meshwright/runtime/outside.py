"""`mw train` inside torchrun or Slurm: rank 0 plans, everyone gets the plan, every process is a rank.

Under Slurm start with `srun --kill-on-bad-exit=1`, so that the death of one task ends the others at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.ops.mesh import join
from meshwright.probe.cpu_bf16 import limit_isa_for_bf16
from meshwright.probe.names import preset_of_device
from meshwright.runtime.config import RunConfig
from meshwright.runtime.prepare import Prepared, job_arguments, open_folder, prepare, write_prepared
from meshwright.runtime.rank import device_of, on_first, train
from meshwright.supervise.environment import Place
from meshwright.supervise.rank import StopFlag

Tell = Callable[[Prepared], None]


def run_outside(config: RunConfig, plan_file: str, place: Place, before: Tell, after: Tell) -> int:
    """Train as one rank; `before` and `after` tell the user, on rank 0. A failure ends the process where it stands."""
    try:
        return _run(config, plan_file, place, before, after)
    except MeshwrightError as error:
        if place.rank == 0 or not error.is_everywhere:
            for problem in error.problems:
                print(f"mw train: {problem}", file=sys.stderr)
        _leave(error.exit_code)
    except Exception:
        print(f"mw train: rank {place.rank} of {place.num_ranks} failed:", file=sys.stderr)
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Without the interpreter's orderly end: threads that wait for lost peers would hold it up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _run(config: RunConfig, plan_file: str, place: Place, before: Tell, after: Tell) -> int:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        limit_isa_for_bf16()  # it forks, so before any tensor
    device = device_of(kind, place.local_rank)
    _meet(place, device)
    control = dist.new_group(backend="gloo")
    mine: list[Any] = []

    def plan() -> dict[str, Any]:
        lock = open_folder(Path(config.run.folder))
        prepared = _prepare(config, plan_file, place, kind)
        write_prepared(config, prepared)
        before(prepared)
        mine.extend((lock, prepared))
        return job_arguments(config, prepared)

    arguments = on_first(control, plan)
    stop = StopFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.on_signal)
    code = train(arguments, decode(Plan, arguments["plan"], "plan"), device, stop)
    dist.destroy_process_group()
    if mine:
        after(mine[1])
        mine[0].close()
    return code


def _prepare(config: RunConfig, plan_file: str, place: Place, kind: str) -> Prepared:
    if not config.run.cluster:
        # The ranks are already running: measuring now would disturb them, so the nearest preset stands in.
        found = "laptop"
        if kind == "cuda":
            name = torch.cuda.get_device_name()
            known = preset_of_device(name)
            if known is None:
                fix = "Run `mw probe -o this.cluster.json` on one node and set run.cluster to that file."
                raise MeshwrightError([Problem(where="run.cluster", what=f"{name} has no preset.", fix=fix)])
            found = known.name
        print(f"  planning with the figures of {found}", file=sys.stderr)
        config = replace(config, run=replace(config.run, cluster=found))
    geometry = (place.num_local, place.num_ranks // place.num_local)
    prepared = prepare(config, plan_file, lambda text: print(f"  {text}", file=sys.stderr), geometry)
    if prepared.plan.num_ranks != place.num_ranks:
        what = f"needs {prepared.plan.num_ranks} ranks, {place.kind} started {place.num_ranks}."
        raise MeshwrightError([Problem(where=f"plan {prepared.plan}", what=what)])
    return prepared


def _meet(place: Place, device: torch.device) -> None:
    """Join the others. Slurm does not set torchrun's variables, and torch reads nothing else."""
    os.environ.setdefault("MASTER_ADDR", place.master_address)
    os.environ.setdefault("MASTER_PORT", str(place.master_port))
    os.environ.setdefault("RANK", str(place.rank))
    os.environ.setdefault("WORLD_SIZE", str(place.num_ranks))
    try:
        join(place.rank, place.num_ranks, device)
    except RuntimeError as error:  # torch's own distributed errors are such
        where = f"{place.master_address}:{place.master_port}"
        what = f"cannot meet the others: {str(error).splitlines()[0]}."
        fix = "Choose a free port (MASTER_PORT, or torchrun --master-port)."
        raise MeshwrightError([Problem(where=where, what=what, fix=fix)]) from None
