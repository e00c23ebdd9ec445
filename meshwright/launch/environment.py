"""Has torchrun or Slurm already started us as one of many ranks? A pure answer from the environment.

torchrun's names win over Slurm's, since `srun torchrun ...` sets both and torchrun is the inner one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems

# Below Linux's ephemeral ports (32768 and up), so that no outgoing connection sits on it already.
FIRST_PORT, NUM_PORTS = 20_000, 10_000

Kind = Literal["torchrun", "slurm", "hosts"]
"""The last: the supervisors of several hosts (`run/hosts.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """This process's place among ranks that somebody else started."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    """Ranks on this node, as on every other."""
    master_address: str
    master_port: int
    kind: Kind
    is_one_host: bool = False
    """All ranks are known to be on this machine: they meet on the loopback alone."""


def outside_launcher(environ: Mapping[str, str]) -> RankPlace | None:
    """Our place under torchrun or Slurm, or None when we were started plainly: also in the body of an sbatch script,
    which looks like task 0 (sbatch marks it, and srun adds a step id), and in a step of a single task."""
    has_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    is_script = environ.get("ENVIRONMENT") == "BATCH" and not has_step
    kind: Kind = "torchrun"
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        host, local, needed = "MASTER_ADDR", "LOCAL_WORLD_SIZE", (*names[:3], "MASTER_ADDR", names[3])
        fix = "Start with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK."
    elif "SLURM_PROCID" in environ and not is_script and environ.get("SLURM_NTASKS") != "1":
        kind, fix = "slurm", "Start with srun --ntasks=N."
        lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        host = next((name for name in lists if environ.get(name)), "SLURM_JOB_NODELIST")
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
        local, needed = "SLURM_NTASKS_PER_NODE", (*names, host)
    else:
        return None
    if missing := [name for name in needed if not environ.get(name)]:
        what = f"{', '.join(missing)} missing from the environment, though others of its variables are set."
        raise error_at(kind, what, fix)
    wrong = [name for name in names if not re.fullmatch(r"[0-9]+", environ[name])]
    raise_problems(Problem(where=kind, what=f'{name}="{environ[name]}" is not a whole number.') for name in wrong)
    rank, num_ranks, local_rank, port = (int(environ[name]) for name in names)
    if rank >= num_ranks or local_rank >= num_ranks:
        raise error_at(kind, f"rank {rank} (local rank {local_rank}) does not exist among {num_ranks} ranks.")
    # As the launcher says; where it does not, or the ranks do not divide into such nodes, all on one.
    given = environ.get(local, "")
    num_local = int(given) if given.isdecimal() else num_ranks
    if kind == "slurm":
        is_one_host = first_host(environ[host]) == environ[host].strip()
    else:
        is_one_host = given == str(num_ranks) or environ[host] == "localhost" or environ[host].startswith("127.")
    return RankPlace(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        num_local=num_local if num_local > 0 and num_ranks % num_local == 0 else num_ranks,
        master_address=environ[host] if kind == "torchrun" else first_host(environ[host]),
        master_port=port if kind == "torchrun" else FIRST_PORT + port % NUM_PORTS,
        kind=kind,
        is_one_host=is_one_host or num_ranks == 1,
    )


def restarts_so_far(environ: Mapping[str, str]) -> int:
    """How often Slurm has requeued this job, or torchrun started its ranks again."""
    counts = (environ.get(name, "") for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return max((int(count) for count in counts if count.isdecimal()), default=0)


def how_to_go_on(environ: Mapping[str, str]) -> str:
    """What to do after exit code 75, under the launcher or scheduler that this is."""
    if job := environ.get("SLURM_JOB_ID"):
        return f"the same command goes on (in a batch job: scontrol requeue {job})"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun calls this a failure (exit code 75); the same command, on every host, goes on"
    return "the same command goes on"


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[007-009,12],cpu1` is gpu007, `r[1-2]n[3-4]` is r1n3."""
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodelist.strip())
    if match is None or nodelist.count("[") != nodelist.count("]"):
        raise MeshwrightError(f'slurm: the list of nodes "{nodelist}" names no host.')
    return re.sub(r"\[([^\]]+)\]", lambda group: re.split(r"[-,]", group[1])[0], match[0])
