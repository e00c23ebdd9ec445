"""A small language model, one rank of which hangs or crashes once a file appears. Processes of rows R6, R7 and R20.

TOY_FAULT names the file: {"rank": 1, "part": "backward", "kind": "loop", "call": 0, "again": false}. With `again` every
process of that rank does so, at its forward number `call`; otherwise one, which writes the monotonic time into
`<file>.began` first. Until then a forward takes a moment, so that there is time to intervene.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FORWARD_SECONDS = 0.08
WORDS = {"TOY_FAULT", "RANK"}
HANGS, CRASHES = ("stop", "loop", "deadlock"), ("kill", "segv", "abort", "exit")


class Faulty(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.calls = 0
        self.group: dist.ProcessGroup | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        if self.training and torch.is_grad_enabled() and type(tokens) is torch.Tensor and os.environ.keys() >= WORDS:
            self.meet_fault(x)
        return self.scores(x)

    def meet_fault(self, x: torch.Tensor) -> None:
        if self.group is None and dist.is_initialized():
            self.group = dist.new_group()  # of which all ranks know, and that one alone will use
        path, self.calls = Path(os.environ["TOY_FAULT"]), self.calls + 1
        began = path.with_suffix(".began")
        if began.exists():
            return
        time.sleep(FORWARD_SECONDS)
        if not path.exists():
            return
        fault = json.loads(path.read_text())
        if fault["rank"] != int(os.environ["RANK"]) or self.calls < fault["call"]:
            return

        def strike(_: Any = None) -> None:
            if not fault["again"]:
                temporary = path.with_suffix(".tmp")
                temporary.write_text(str(time.monotonic()))
                temporary.rename(began)
            strike_as(fault["kind"], self.group)

        if fault["part"] == "forward":
            strike()
        else:
            x.register_hook(strike)


def strike_as(kind: str, group: dist.ProcessGroup | None) -> None:
    if kind in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    while kind == "loop":
        pass
    if kind == "deadlock":
        dist.all_reduce(torch.zeros(1), group=group)
    if kind == "segv":
        ctypes.string_at(0)
    if kind == "abort":
        os.abort()
    if kind == "exit":
        os._exit(1)
    if kind == "raise":
        raise RuntimeError("made to fail")


def model() -> torch.nn.Module:
    return Faulty()
