"""A parent for the tests that signal or kill one: launches ranks and exits with the outcome's code."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.launch.local_ranks import launch

if __name__ == "__main__":
    folder, grace_seconds, *behaviours = sys.argv[1:]
    outcome = launch(
        "launched_rank",
        {"behaviours": behaviours, "pids": folder},
        len(behaviours),
        log_folder=Path(folder) / "logs",
        grace_seconds=float(grace_seconds),
    )
    print(outcome.message())
    sys.exit(outcome.exit_code)
