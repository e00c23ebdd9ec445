"""Claim: the command line answers at once. `mw --help` in 0.3 s; a plan for 8 x H100 in 1.5 s, without importing torch.

Measured: the wall time of the installed `mw`, from start to exit, median of five runs. That torch stays out is asked of
Python itself: `-X importtime` lists every module imported.

Run: python -m benchmarks.startup [--quick]
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.claims import Claim, alone

PLAN = ("plan", "--model", "llama3-8b", "--cluster", "8xh100", "--seq", "8192", "--batch", "128")
COMMANDS = {"help": (("--help",), 0.3), "plan": (PLAN, 1.5)}
RUNS = 5


def seconds_of(arguments: tuple[str, ...]) -> float:
    command = [str(Path(sys.executable).with_name("mw")), *arguments]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - start


def imported(arguments: tuple[str, ...]) -> set[str]:
    """The top-level packages that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "meshwright.cli.main", *arguments]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    lines = [line for line in told.splitlines() if line.startswith("import time:")]
    return {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in lines}


def measure_one(name: str, arguments: tuple[str, ...], goal: float, runs: int) -> Claim:
    measured: tuple[float, ...] = ()
    try:
        packages = imported(arguments)  # also brings the files into the disk cache
        assert "meshwright" in packages, "nothing of ours was imported: not the command that was meant"
        problem = "torch is imported." if "torch" in packages else ""
        measured = tuple(seconds_of(arguments) for _ in range(runs))
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        problem = f"exit code {error.returncode}: {lines[-1] if lines else 'no message'}"
    what = f"mw {' '.join(arguments)}"
    return Claim(name=name, what=what, unit="seconds", goal=goal, measured=measured, problem=problem)


def measure(quick: bool = False) -> list[Claim]:
    runs = 2 if quick else RUNS
    return [measure_one(name, arguments, goal, runs) for name, (arguments, goal) in COMMANDS.items()]


if __name__ == "__main__":
    sys.exit(alone(measure("--quick" in sys.argv)))
