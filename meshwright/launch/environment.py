"""Has torchrun or Slurm already started us as one of many ranks? A pure answer from the environment.

torchrun's names win over Slurm's, since `srun torchrun ...` sets both and torchrun is the inner one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.core.errors import MeshwrightError, Problem, error_at

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Below Linux's ephemeral ports (32768 and up), so that no outgoing connection sits on it already.
FIRST_PORT, NUM_PORTS = 20_000, 10_000

Kind = Literal["torchrun", "slurm"]


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


def outside_launcher(environ: Mapping[str, str]) -> RankPlace | None:
    """Our place under torchrun or Slurm, or None when we were started plainly."""
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return torchrun_place(environ)
    if "SLURM_PROCID" in environ and not is_batch_script(environ):
        return slurm_place(environ)
    return None


def torchrun_place(environ: Mapping[str, str]) -> RankPlace:
    require(environ, "torchrun", TORCHRUN_NAMES, "Start with torchrun, or unset RANK, WORLD_SIZE and LOCAL_RANK.")
    numbers = whole_numbers(environ, "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
    return checked(
        RankPlace(
            rank=numbers["RANK"],
            num_ranks=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            num_local=_num_local(environ, "LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"]),
            master_address=environ["MASTER_ADDR"],
            master_port=numbers["MASTER_PORT"],
            kind="torchrun",
        )
    )


def slurm_place(environ: Mapping[str, str]) -> RankPlace | None:
    """A task of an `srun` step; a step of a single task is a plain start."""
    if environ.get("SLURM_NTASKS") == "1":
        return None
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((name for name in lists if environ.get(name)), "SLURM_JOB_NODELIST")
    counts = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
    require(environ, "slurm", (*counts, nodes), "Start with srun --ntasks=N.")
    numbers = whole_numbers(environ, "slurm", counts)
    return checked(
        RankPlace(
            rank=numbers["SLURM_PROCID"],
            num_ranks=numbers["SLURM_NTASKS"],
            local_rank=numbers["SLURM_LOCALID"],
            num_local=_num_local(environ, "SLURM_NTASKS_PER_NODE", numbers["SLURM_NTASKS"]),
            master_address=first_host(environ[nodes]),
            master_port=FIRST_PORT + numbers["SLURM_JOB_ID"] % NUM_PORTS,
            kind="slurm",
        )
    )


def _num_local(environ: Mapping[str, str], name: str, num_ranks: int) -> int:
    """As the launcher says; where it does not, or the ranks do not divide into such nodes, all on one."""
    given = environ.get(name, "")
    count = int(given) if given.isdecimal() else num_ranks
    return count if count > 0 and num_ranks % count == 0 else num_ranks


def is_batch_script(environ: Mapping[str, str]) -> bool:
    """An sbatch script's body looks like task 0 but is no task: sbatch marks it, and srun adds a step id."""
    has_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return environ.get("ENVIRONMENT") == "BATCH" and not has_step


def first_host(nodelist: str) -> str:
    """The first host of Slurm's short form: `gpu[007-009,12],cpu1` is gpu007, `r[1-2]n[3-4]` is r1n3."""
    match = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+", nodelist.strip())
    if match is None or nodelist.count("[") != nodelist.count("]"):
        raise MeshwrightError(f'slurm: the list of nodes "{nodelist}" names no host.')
    return re.sub(r"\[([^\]]+)\]", lambda group: re.split(r"[-,]", group[1])[0], match[0])


def require(environ: Mapping[str, str], where: Kind, names: Sequence[str], fix: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        what = f"{', '.join(missing)} missing from the environment, though others of its variables are set."
        raise error_at(where, what, fix)


def whole_numbers(environ: Mapping[str, str], where: Kind, names: Sequence[str]) -> dict[str, int]:
    wrong = [name for name in names if not re.fullmatch(r"[0-9]+", environ[name])]
    if wrong:
        raise MeshwrightError(
            Problem(where=where, what=f'{name}="{environ[name]}" is not a whole number.') for name in wrong
        )
    return {name: int(environ[name]) for name in names}


def checked(place: RankPlace) -> RankPlace:
    if place.rank >= place.num_ranks or place.local_rank >= place.num_ranks:
        what = f"rank {place.rank} (local rank {place.local_rank}) does not exist among {place.num_ranks} ranks."
        raise error_at(place.kind, what)
    return place
