"""Slurm for real: a run that is requeued, signalled, preempted and ended by its time limit goes on by itself.

A one-node cluster (munged, slurmctld, slurmd of Debian's `slurm-wlm munge`) in namespaces of its own, which take every
process with them when they end. Each case submits examples/train.sbatch, interrupts it once, and waits for its end:
saved within the grace, requeued, and the last checkpoint equal in every byte to that of a run that nobody
interrupted.

Run: python -m benchmarks.slurm_requeue              all cases (root, about ten minutes)
     python -m benchmarks.slurm_requeue preempted    those whose name has this word
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scorecard import clean_environment, final_state, toy_run
from meshwright.checkpoint.step_folders import list_steps
from meshwright.core.process import die_with_process

ROOT = Path(__file__).parents[1]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "ip")
GRACE_SECONDS = 20
STEPS, INTERRUPTED_AT = 150, 30
_INSIDE = "MW_SLURM_FOLDER"

_CONFIGURATION = """\
ClusterName=one
SlurmctldHost=node0(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait={grace}
SchedulerParameters=sched_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=node0 NodeAddr=10.78.0.1 CPUs=4 State=UNKNOWN
PartitionName=usual Nodes=node0 Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=node0 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
_HOST = """\
hostname node0
mount --bind "$MW_SLURM_FOLDER/hosts" /etc/hosts
ip link set lo up
ip link add eth0 type veth peer name eth1
ip addr add 10.78.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
munged --key-file=munge.key --socket="$MW_SLURM_FOLDER/munge.socket" --pid-file="$MW_SLURM_FOLDER/munged.pid" \
    --log-file="$MW_SLURM_FOLDER/munged.log" --seed-file="$MW_SLURM_FOLDER/munge.seed"
slurmctld
slurmd -N node0
"""


class Job:
    """A submitted examples/train.sbatch of a toy run in a folder of its own."""

    def __init__(self, folder: Path, *options: str, changes: Sequence[str] = ()):
        """`options`: of sbatch."""
        self.folder, self.output = folder, folder / "slurm.out"
        run_file = folder / "run.toml"
        if not run_file.exists():
            toy_run(folder, steps=STEPS, save_every=40)
        words = [word for change in changes for word in ("--set", change)]
        script = [
            str(ROOT / "examples" / "train.sbatch"),
            str(run_file),
            "--plan",
            str(folder / "toy.plan.json"),
            *words,
        ]
        self.number = slurm("sbatch", "--parsable", f"--output={self.output}", *options, *script).strip()

    def facts(self) -> dict[str, str]:
        """What Slurm knows of it: JobState, Restarts, ExitCode, ..."""
        listed = slurm("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.split("=", 1) for word in listed.split() if "=" in word)

    def num_steps(self) -> int:
        """That the metrics speak of."""
        with contextlib.suppress(OSError):
            return (self.folder / "run" / "metrics.jsonl").read_bytes().count(b'"loss"')
        return 0

    def saved(self) -> int:
        return max(list_steps(self.folder / "run" / "checkpoints"), default=0)

    def wait(self, holds: Callable[[dict[str, str]], bool], what: str, limit_seconds: float = 300) -> float:
        """Until it holds of `facts`; the seconds that took."""
        start = time.monotonic()
        while not holds(self.facts()):
            if time.monotonic() > start + limit_seconds:
                raise TimeoutError(f"{what}: not in {limit_seconds:g} s: {self.facts()}\n{self.told()[-3000:]}")
            time.sleep(0.05)
        return time.monotonic() - start

    def told(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for_end(self) -> dict[str, str]:
        self.wait(lambda facts: is_over(facts["JobState"]), "end", 600)
        return self.facts()


def is_over(state: str) -> bool:
    return state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


def slurm(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=os.environ[_INSIDE])
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def in_training(job: Job) -> bool:
    return job.num_steps() >= INTERRUPTED_AT


def at_start(job: Job) -> bool:
    """The ranks import torch, or meet."""
    return "Restarts=0" in slurm("scontrol", "show", "job", job.number) and _num_ranks() >= 2


def in_save(job: Job) -> bool:
    return any((job.folder / "run" / "checkpoints").glob("step-*.tmp-*"))


def _num_ranks() -> int:
    done = subprocess.run(["pgrep", "-fc", "meshwright.cli.main train"], capture_output=True, text=True, check=False)
    return int(done.stdout or 0)


def requeue(job: Job) -> None:
    slurm("scontrol", "requeue", job.number)


def signal(name: str) -> Callable[[Job], None]:
    """To the tasks, as a time limit does."""
    return lambda job: void(slurm("scancel", f"--signal={name}", job.number))


def void(_: object) -> None:
    return None


def preempt(job: Job) -> None:
    """A job of a partition that goes first, for the whole node."""
    slurm("sbatch", "--partition=urgent", "--ntasks=4", f"--output={job.folder}/urgent.out", "--wrap=sleep 2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to interrupt a job."""

    name: str
    interrupt: Callable[[Job], None] | None
    """None: its time limit does."""
    when: Callable[[Job], bool] = in_training
    options: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


CASES = (
    Case(name="scontrol requeue, in training", interrupt=requeue),
    Case(name="scontrol requeue, at start-up", interrupt=requeue, when=at_start),
    Case(name="scancel --signal=TERM, in training", interrupt=signal("TERM")),
    Case(name="scancel --signal=TERM, at start-up", interrupt=signal("TERM"), when=at_start),
    Case(name="scancel --signal=USR1, in a save", interrupt=signal("USR1"), when=in_save),
    Case(name="scancel --signal=USR2, in an evaluation", interrupt=signal("USR2"), changes=("train.evaluate_every=1",)),
    Case(name="time limit, --signal=USR1@50", interrupt=None, options=("--time=1", "--signal=USR1@50")),
    Case(name="preempted by a partition that goes first", interrupt=preempt),
    Case(
        name="scontrol requeue, one task that starts both ranks",
        interrupt=requeue,
        options=("--ntasks-per-node=1", "-c2"),
    ),
)


def interrupted(case: Case, folder: Path, expected: Any) -> dict[str, Any]:
    """A row of the table."""
    job = Job(folder, *case.options, changes=case.changes)
    if case.interrupt is None:
        job.wait(
            lambda facts: "stopped" in job.told() or is_over(facts["JobState"]), "the signal before the limit", 120
        )
    else:
        job.wait(lambda facts: case.when(job) or is_over(facts["JobState"]), "the instant")
        case.interrupt(job)
    seconds = job.wait(lambda facts: not _num_ranks(), "the end of all ranks", 60)
    made, saved = job.num_steps(), job.saved()
    if case.interrupt is None and not is_over(job.facts()["JobState"]):
        slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    ended = job.wait_for_end()
    return {
        "case": case.name,
        "seconds": f"{seconds:.1f} s" if case.interrupt is not None else "",
        "lost": made - saved,
        "restarts": int(ended["Restarts"]),
        "state": f"{ended['JobState']} {ended['ExitCode']}",
        "is_equal": ended["JobState"] == "COMPLETED" and final_state(job.folder / "run") == expected,
        "told": job.told(),
    }


def cancelled(folder: Path) -> str:
    """A plain scancel: it saves, and is not started again."""
    job = Job(folder)
    job.wait(lambda facts: in_training(job), "training")
    slurm("scancel", job.number)
    ended = job.wait_for_end()
    time.sleep(10)
    made = job.num_steps()
    return f"{job.facts()['JobState']}, requeued {ended['Restarts']} times, {made - job.saved()} of {made} steps lost"


def twice(folder: Path) -> str:
    """The same run, submitted by two schedulers at once: what the second says."""
    first = Job(folder)
    first.wait(lambda facts: in_training(first), "training")
    second = Job(folder, f"--output={folder}/second.out")
    ended = second.wait_for_end()
    slurm("scancel", first.number)
    first.wait_for_end()
    said = (folder / "second.out").read_text()
    line = next((line for line in said.splitlines() if "is in use by" in line), said[-500:])
    return f"{ended['JobState']} {ended['ExitCode']}: {line}"


def measure(folder: Path, words: Sequence[str]) -> int:
    """All cases, on the cluster that runs."""
    job = Job(folder / "whole")
    start = time.monotonic()
    ended = job.wait_for_end()
    if ended["JobState"] != "COMPLETED":
        print(job.told())
        return 1
    expected, failures = final_state(job.folder / "run"), 0
    print(f"not interrupted: {STEPS} steps in {time.monotonic() - start:.0f} s with start-up", flush=True)
    print(f"| interrupted by | ended after (grace {GRACE_SECONDS} s) | steps lost | requeued | end | bit-identical |")
    print("|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        if words and not any(word in case.name for word in words):
            continue
        row = interrupted(case, folder / str(CASES.index(case)), expected)
        is_right = row["is_equal"] and row["restarts"] == 1 and not row["lost"]
        failures += not is_right
        cells = (row["case"], row["seconds"], row["lost"], row["restarts"], row["state"])
        print("|", " | ".join(map(str, cells)), "|", "yes" if row["is_equal"] else "NO", "|", flush=True)
        if not is_right:
            print(row["told"][-6000:], flush=True)
    for name, told in (("scancel without a signal", cancelled), ("the same run submitted twice", twice)):
        if not words or any(word in name for word in words):
            print(f"{name}: {told(folder / told.__name__)}", flush=True)
    return 1 if failures else 0


def main() -> int:
    if (inside := os.environ.get(_INSIDE)) is None:
        missing = [name for name in PROGRAMS if shutil.which(name) is None]
        if missing or os.geteuid():
            print(f"needs root and {', '.join(missing) or 'nothing else'} (Debian: apt-get install slurm-wlm munge)")
            return 2
        with tempfile.TemporaryDirectory(prefix="mw-slurm-") as name:
            # The first process of the namespace reaps what daemons leave; with it everything ends.
            words = ["unshare", "--mount", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
            words += [
                "sh",
                "-c",
                '"$@"; exit $?',
                "sh",
                sys.executable,
                "-m",
                "benchmarks.slurm_requeue",
                *sys.argv[1:],
            ]
            beside = {_INSIDE: name, "SLURM_CONF": f"{name}/slurm.conf", "MW_GRACE": str(GRACE_SECONDS)}
            parent = os.getpid()
            made = subprocess.Popen(
                words, env=clean_environment(**beside), cwd=ROOT, preexec_fn=lambda: die_with_process(parent)
            )
            return made.wait()
    folder = Path(inside)
    folder.chmod(0o755)  # or munged refuses its socket
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 node0\n")
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, grace=GRACE_SECONDS))
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    for part in ("bin", "state", "spool"):
        (folder / part).mkdir()
    (folder / "bin" / "mw").write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright.cli.main "$@"\n')
    (folder / "bin" / "mw").chmod(0o755)
    os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(ROOT)
    subprocess.run(["sh", "-ec", _HOST], cwd=folder, check=True)
    for _ in range(100):
        with contextlib.suppress(RuntimeError):
            if "idle" in slurm("sinfo", "--noheader", "--format=%T"):
                break
        time.sleep(0.2)
    return measure(folder, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
