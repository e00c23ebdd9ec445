"""What a run leaves behind: metrics as JSON lines and TensorBoard events, and the measured timeline."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.core.codec import encode
from meshwright.core.timeline import Span, Timeline


class Metrics:
    """One line per step, flushed at once; TensorBoard beside it. Rank 0 only."""

    def __init__(self, folder: Path, first_step: int):
        from tensorboardX import SummaryWriter

        path = folder / "metrics.jsonl"
        _drop_after(path, first_step)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        self.file.close()
        self.board.close()


def _drop_after(path: Path, first_step: int) -> None:
    """Steps that will run again leave one line, not two."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] < first_step]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watch:
    """torch.profiler over a few steps, reduced to spans."""

    def __init__(self, first: int, count: int, device: torch.device):
        self.range = range(first, first + count)
        self.device = device
        self.profiler: Any = None
        self.spans: list[Span] = []

    def before(self, step: int, rank: int) -> None:
        if self.range and step == self.range[0]:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.__enter__()

    def after(self, step: int, rank: int) -> None:
        if self.profiler is not None and step == self.range[-1]:
            self.profiler.__exit__(None, None, None)
            events = self.profiler.profiler.kineto_results.events()
            self.spans = spans_of(events, rank)
            self.profiler = None


# What a backend calls its collectives in a trace.
_COLLECTIVE = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")
_WAITS = ("receive", "send", "exchange")


def spans_of(events: Any, rank: int) -> list[Span]:
    """The loop's own actions and every collective; operators inside them are left out."""
    spans = []
    for event in events:
        name = event.name()
        if name.startswith("mw:"):
            word = name[3:]
            lane = "collective" if word.startswith(_WAITS) else "compute"
        elif name.startswith(_COLLECTIVE):
            word, lane = name, "collective"
        else:
            continue
        spans.append(
            Span(
                device=rank,
                lane=lane,  # type: ignore[arg-type]
                name=word,
                start_seconds=event.start_ns() / 1e9,
                seconds=event.duration_ns() / 1e9,
                origin="loop" if word.startswith(_WAITS) else "",
            )
        )
    return spans


def write_timeline(folder: Path, spans_by_rank: list[list[dict[str, Any]]], fingerprint: str) -> None:
    """All ranks' spans on one clock that starts at zero, as ours and as a Chrome trace."""
    spans = [Span(**span) for spans in spans_by_rank for span in spans]
    if not spans:
        return
    start = min(span.start_seconds for span in spans)
    moved = tuple(Span(**(encode(span) | {"start_seconds": span.start_seconds - start})) for span in spans)
    environment = {"torch": torch.__version__, "cores": str(os.cpu_count())}
    timeline = Timeline(source="measured", plan_fingerprint=fingerprint, spans=moved, environment=environment)
    (folder / "measured.timeline.json").write_text(timeline.to_json(), encoding="utf-8")
    (folder / "measured.trace.json").write_text(timeline.to_chrome(), encoding="utf-8")
