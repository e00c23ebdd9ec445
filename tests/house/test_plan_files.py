"""How many files a question runs through: what a reader of `mw plan` would have to open."""

from __future__ import annotations

import subprocess
import sys

import pytest
from house import PACKAGE, ROOT

MOST_FILES = 68
"""Of `mw plan` of an 8B model on eight devices: 12 of them are techniques. It may shrink, not grow."""
COUNT = """
import contextlib, inspect, io, sys
from meshwright.cli.main import main

files = set()


def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # functions, not bodies of classes and files
        files.add(frame.f_code.co_filename)


sys.setprofile(note)
with contextlib.redirect_stdout(io.StringIO()):
    code = main("plan --model llama3-8b --cluster 8xh100 --top 1 --json".split())
sys.setprofile(None)
assert code == 0
print("\\n".join(sorted(files)))
"""


@pytest.mark.slow
def test_a_question_runs_through_few_files() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    files = [line.removeprefix(f"{PACKAGE}/") for line in done.stdout.splitlines() if line.startswith(str(PACKAGE))]
    print(len(files), *files)
    assert 20 < len(files) <= MOST_FILES
