"""Two checkouts of this project side by side: `mw --help`, `mw plan`, opening a run, and steps through `mw.build`.

Runs alternate between the two, each in a process of its own, so that a slower moment of the machine meets both; of each
the fastest run counts. Commands are told in seconds of the clock and of the processor, which others' work disturbs
less. Compiled files are kept, as they are after an installation; a first run that makes them is not counted. Ratios
above 1: the second checkout is faster.

Run: python -m benchmarks.versions BEFORE AFTER [--runs 5] [--device cuda] [--commands-only]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLANS = {
    "plan 8b on 8": ["plan", "--model", "llama3-8b", "--cluster", "8xh100", "--json"],
    "plan 8b on 64": ["plan", "--model", "llama3-8b", "--cluster", "8x8xh100", "--batch", "256", "--json"],
    "plan vit on 8": ["plan", "--model", "vit-l16", "--cluster", "8xa100-80", "--batch", "512", "--json"],
    "help": ["--help"],
}
STEP = """
import json, sys, time, torch, meshwright as mw
name, sequence, batch, device, compiled = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
start = time.perf_counter()
named = mw.technique_named
chosen = [named("compile")()] if compiled == "yes" else []
chosen += [named("precision")(dtype="bf16")] if device == "cuda" else []
plan = mw.Plan(techniques=tuple(chosen), batch=batch, microbatch=max(1, batch // 2))
built = mw.build(plan, name, device=device)
tokens = torch.randint(200, (batch, sequence + 1))
inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
for _ in range(4):
    built.step(inputs, targets)
opened, times = time.perf_counter() - start, []
for _ in range(20):
    start = time.perf_counter()
    built.step(inputs, targets)
    if device == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
print(json.dumps({"opened": opened, "step": sorted(times)[len(times) // 4]}))
"""
STEPS = {"cpu": [("byte-3m", 128, 8, "no")], "cuda": [("gpt2-124m", 1024, 16, "yes"), ("llama3.2-1b", 2048, 8, "yes")]}


def run(checkout: str, words: list[str], compiled: str) -> tuple[float, float, str]:
    """Seconds of the clock and of the processor, and what was printed."""
    paths = [checkout, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-P", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def measure(checkout: str, steps: list[tuple[str, int, int, str]], device: str, compiled: str) -> dict[str, float]:
    found = {}
    for name, words in PLANS.items():
        clock, processor, _ = run(checkout, ["-m", "meshwright.cli.main", *words], compiled)
        found |= {name: clock, f"{name}, processor": processor}
    for model, sequence, batch, is_compiled in steps:
        words = ["-c", STEP, model, str(sequence), str(batch), device, is_compiled]
        told = json.loads(run(checkout, words, compiled)[2].strip().splitlines()[-1])
        found |= {f"open {model}": told["opened"], f"step {model}": told["step"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=sorted(STEPS), default="cpu")
    parser.add_argument("--commands-only", action="store_true", help="leave out opening a run, and its steps")
    arguments = parser.parse_args()
    checkouts = [str(Path(checkout).resolve()) for checkout in (arguments.before, arguments.after)]
    steps = [] if arguments.commands_only else STEPS[arguments.device]
    best: list[dict[str, float]] = [{}, {}]
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(arguments.runs + 1):
            for side in (0, 1) if number % 2 else (1, 0):
                measured = measure(checkouts[side], steps, arguments.device, compiled)
                for name, seconds in measured.items() if number else ():
                    best[side][name] = min(seconds, best[side].get(name, seconds))
            print(f"run {number} of {arguments.runs}", file=sys.stderr)
    for name, before in best[0].items():
        print(f"{name:26} {before:9.4f} s {best[1][name]:9.4f} s   {before / best[1][name]:.2f}x")


if __name__ == "__main__":
    main()
