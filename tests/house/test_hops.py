"""How many functions of ours a reader goes through, from the user's call to torch's backward: counted, not claimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from command import clean_environment, write_plan, write_run
from house import PACKAGE, ROOT

import meshwright as mw
from meshwright.core.plugins import VARIABLE

MOST_FROM_BUILD = 4
MOST_IN_A_RANK = 7
"""From a rank's `main` on."""
MOST_BEFORE_A_RANK = 4
"""That start a child process and lead to its `main`."""


def hops() -> list[str]:
    """Our functions on the stack."""
    frames = traceback.extract_stack()
    return [f"{Path(f.filename).name}:{f.name}" for f in frames if str(PACKAGE) in f.filename]


def test_few_hops_from_step_to_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    plain = torch.Tensor.backward

    def backward(self: torch.Tensor, *given: object, **more: object) -> None:
        seen.append(hops())
        plain(self, *given, **more)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    built = mw.build(mw.Plan(batch=2), module, inputs=torch.zeros(1, 4), device="cpu")
    built.step(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    assert seen
    assert len(seen[-1]) <= MOST_FROM_BUILD, seen[-1]


PLUGIN = """
import json, traceback
from dataclasses import dataclass
from typing import ClassVar
from meshwright.core.technique import Technique

@dataclass(frozen=True, kw_only=True)
class CountsHops(Technique):
    name: ClassVar[str] = "counts_hops"
    phase: ClassVar[str] = "step"

    package: str
    file: str

    def price(self, work):
        return work

    def apply(self, build):
        import torch

        plain = torch.Tensor.backward

        def backward(tensor, *given, **more):
            frames = [f"{f.filename}:{f.name}" for f in traceback.extract_stack() if self.package in f.filename]
            with open(self.file, "w") as file:
                json.dump(frames, file)
            plain(tensor, *given, **more)

        torch.Tensor.backward = backward
"""


def test_few_hops_inside_a_rank_of_a_run(tmp_path: Path) -> None:
    seen = tmp_path / "frames.json"
    (tmp_path / "plugin_that_counts.py").write_text(PLUGIN)
    environment = clean_environment() | {VARIABLE: "plugin_that_counts"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "meshwright.cli.main", "train", write_run(tmp_path)]
    counts = {"name": "counts_hops", "package": str(PACKAGE), "file": str(seen)}
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2}, counts)
    done = subprocess.run([*command, "--plan", plan], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    frames = json.loads(seen.read_text())
    main = next(at for at, frame in enumerate(frames) if frame.endswith("runtime/rank.py:main"))
    assert main <= MOST_BEFORE_A_RANK, frames
    assert len(frames[main:]) <= MOST_IN_A_RANK, frames
