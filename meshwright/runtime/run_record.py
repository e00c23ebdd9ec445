"""What a run leaves behind: metrics and samples as JSON lines, what trackers make of them, the measured timeline."""

from __future__ import annotations

import bisect
import contextlib
import errno
import json
import os
import resource
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshwright.core.errors import MeshwrightError
from meshwright.core.files import open_to_append, write_whole
from meshwright.core.time_ledger import CATEGORIES, TIME_FILE, mark_now, read_marks, time_ledger
from meshwright.core.timeline import MemoryPoint, Span, Timeline
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.core.wrapping import width_of, wrapped
from meshwright.ops.device_mesh import Mesh
from meshwright.report.timeline_lanes import united, without
from meshwright.run.comparison import WARM_UP_STEPS
from meshwright.run.trackers import TRACKERS, About, Board, Feed, Say, Tracker, finish_all, run_key

_MOST_WAITING = 10_000
"""Lines held back while the disk refuses them; beyond, the oldest are lost."""


class Lines:
    """A file of JSON lines, each written whole or not at all. A line the disk refuses is written with the next ones.

    What cannot be written is told once, and never raises.
    """

    def __init__(self, path: Path, last_step: int, say: Say):
        """Lines of steps after `last_step` go: those steps will run again."""
        self.name, self.say, self.has_told = path.name, say, False
        self.waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self.lock = threading.RLock()
        """Trackers say what failed from threads of their own, which is an event of the run too."""
        self.file = -1
        try:
            self.file = open_to_append(path, os.O_RDWR)
            _cut_after(self.file, last_step)
        except (OSError, MeshwrightError) as error:
            self._tell(error)

    @property
    def num_bytes(self) -> int:
        return os.fstat(self.file).st_size if self.file >= 0 else 0

    def write(self, record: Mapping[str, Any]) -> None:
        with self.lock:
            if self.file >= 0:
                self.waiting.append(json.dumps(record).encode() + b"\n")
                self._flush()

    def _flush(self) -> None:
        data = b"".join(self.waiting)
        try:
            size_bytes = os.fstat(self.file).st_size
            if os.write(self.file, data) < len(data):
                os.ftruncate(self.file, size_bytes)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.waiting.clear()
        except OSError as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self.has_told:
            self.has_told = True
            reason = getattr(error, "strerror", None) or error
            self.say(f"{self.name} cannot be written for now, training goes on: {reason}")

    def close(self) -> None:
        with self.lock:
            if self.file < 0:
                return
            if self.waiting:
                self._flush()
            if self.waiting:
                self.say(f"{self.name} lacks its last {len(self.waiting)} lines")
            os.close(self.file)
            self.file = -1


class Metrics:
    """What rank 0 tells of a run: JSON lines at once; TensorBoard and the user's tools each in their own time."""

    def __init__(self, folder: Path, first_step: int, say: Say, track: Iterable[str] = (), config: Any = None):
        self.folder, self.first_step, self.say = folder, first_step, say
        self.lines = Lines(folder / "metrics.jsonl", first_step, say)
        self.samples: Lines | None = None
        about = About(folder=folder, key="", config=config or {}, first_step=first_step)
        if track := tuple(dict.fromkeys(track)):
            about = replace(about, key=run_key(folder, first_step))
        made: dict[str, Tracker] = {"TensorBoard": Board(), **{name: TRACKERS[name]() for name in track}}
        self.feeds = [Feed(name, tracker, about, say) for name, tracker in made.items()]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.write({"step": step, **values})
        for feed in self.feeds:
            feed.put("values", step, values)

    def sample(self, step: int, prompt: str, text: str) -> None:
        if self.samples is None:
            self.samples = Lines(self.folder / "samples.jsonl", self.first_step, self.say)
        self.samples.write({"step": step, "prompt": prompt, "text": text})
        for feed in self.feeds:
            feed.put("text", step, text)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.lines.close()
        if self.samples is not None:
            self.samples.close()
        finish_all(self.feeds, summary)


class RunClock:
    """The time of rank 0 by category, in marks of time.jsonl: at saves, and at least every hundredth of a start's time.

    `folder` is None on other ranks, which write nothing.
    """

    def __init__(self, folder: Path | None, step: int, say: Say):
        self.folder = folder
        self.lines = None if folder is None else Lines(folder / TIME_FILE, sys.maxsize, say)
        self.resume(step)

    def resume(self, step: int) -> None:
        """Training goes on from a step; what was made of later ones is lost."""
        self.step_count = step
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.first_seconds: list[float] = []
        self.num_usual = 0
        self.began = self.marked = time.monotonic()
        self._write("resume")
        self.earlier = time_ledger(() if self.folder is None else read_marks(self.folder))

    def add(self, steps_done: int, seconds: float, data_seconds: float) -> None:
        """A step was made."""
        self.step_count = steps_done
        waited = min(data_seconds, seconds)
        self.seconds["data"] += waited
        if len(self.first_seconds) < WARM_UP_STEPS:
            self.first_seconds.append(seconds - waited)
        else:
            self.num_usual += 1
            self.seconds["productive"] += seconds - waited
        now = time.monotonic()
        if now - self.marked >= max(1.0, (now - self.began) / 100):
            self.mark()

    @contextlib.contextmanager
    def spend(self, category: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[category] += time.monotonic() - start

    def totals(self) -> dict[str, float]:
        """Seconds since `resume`; of the first steps, what they take longer than later ones is compilation."""
        first = self.first_seconds
        usual = self.seconds["productive"] / self.num_usual if self.num_usual else min(first, default=0.0)
        productive = sum(min(each, usual) for each in first)
        seconds = self.seconds | {"compile": sum(first) - productive}
        return seconds | {"productive": productive + seconds["productive"]}

    @property
    def goodput(self) -> float:
        """Of all starts so far."""
        wall = self.earlier.wall_seconds + time.monotonic() - self.began
        return (self.earlier.seconds["productive"] + self.totals()["productive"]) / max(wall, 1e-9)

    def mark(self) -> None:
        self.marked = time.monotonic()
        self._write("time", seconds=self.totals())

    def _write(self, event: Literal["resume", "time"], **about: Any) -> None:
        if self.lines is not None:
            self.lines.write(mark_now(event, step=self.step_count, **about).to_row())


class Progress:
    """Live progress of rank 0: a line that redraws itself on a terminal, a line now and then elsewhere."""

    def __init__(self, first_step: int, num_steps: int, forecast_tokens_per_second: float, events: Lines | None = None):
        """`events`: where what is said is kept for programs that follow the run."""
        self.first_step, self.num_steps, self.events = first_step, num_steps, events
        self.steps_done = 0
        self.forecast = forecast_tokens_per_second
        self.counts = "tokens"
        """Or samples, where they have no sequence."""
        self.start = self.shown = time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def step(self, step: int, loss: float, tokens_per_second: float, memory_bytes: int) -> None:
        now = time.monotonic()
        self.steps_done = step + 1
        is_last = step + 1 == self.num_steps
        is_early = not is_last and now - self.shown < (0.1 if self.is_terminal else 5.0) and step > self.first_step
        if is_early or self._is_paused():
            return
        self.shown = now
        done = step + 1 - self.first_step
        left = (now - self.start) / done * (self.num_steps - step - 1)
        when = f"done in {pretty_seconds(now - self.start)}" if is_last else f"left {pretty_seconds(left)}"
        share = tokens_per_second / self.forecast if self.forecast else 0.0
        text = (
            f"step {step + 1}/{self.num_steps}  loss {loss:.4f}  {pretty_count(tokens_per_second)} {self.counts}/s "
            f"({share:.0%} of forecast)  memory {pretty_bytes(memory_bytes)}  {when}"
        )
        lines = wrapped(text, width_of(sys.stderr))
        if self.is_terminal:  # a line that is drawn again must be one
            sys.stderr.write(f"\r\x1b[2K{lines if is_last else lines.split(chr(10))[0]}" + ("\n" if is_last else ""))
            sys.stderr.flush()
        else:
            print(lines, file=sys.stderr, flush=True)

    def _is_paused(self) -> bool:
        """Whether the terminal takes nothing (Ctrl-S, a lost connection): training does not wait for it."""
        return self.is_terminal and not select.select((), (sys.stderr,), (), 0)[1]

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.events is not None:
            self.events.write({"event": "message", "step": self.steps_done, "text": text})
        if self._is_paused():
            return
        clear = "\r\x1b[2K" if self.is_terminal else ""
        print(f"{clear}{wrapped(text, width_of(sys.stderr))}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """A text as a terminal may show it: what is not printable is spelt out."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _cut_after(file: int, last_step: int) -> None:
    """Cut the file after its last whole line of a step up to `last_step`. It is read from its end, as far as needed."""
    start = os.fstat(file).st_size
    buffer, block_bytes = b"", 1 << 16
    while start or buffer:
        line_start = buffer.rfind(b"\n", 0, -1) + 1
        if not line_start and start:  # the line begins further up
            block_bytes = min(2 * block_bytes, start)
            start -= block_bytes
            buffer = os.pread(file, block_bytes, start) + buffer
            continue
        line = buffer[line_start:]
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # cut short, or somebody's own
            if line.endswith(b"\n") and json.loads(line)["step"] <= last_step:
                break
        buffer = buffer[:line_start]
    os.ftruncate(file, start + len(buffer))


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_bytes(device: torch.device) -> int:
    """The most memory that torch's allocator has taken from a GPU; on a CPU it has none of its own."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def num_retries(device: torch.device) -> int:
    """How often a GPU's allocator ran full and gave back what it had cached."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def current_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Watch:
    """torch.profiler over a few steps, reduced to spans; and the memory before every action of them."""

    def __init__(self, first: int, count: int, mesh: Mesh):
        self.range = range(first, first + count)
        self.device, self.rank = mesh.device, mesh.rank
        self.profiler: Any = None
        self.spans: list[Span] = []
        self.memory: list[MemoryPoint] = []

    def before(self, step: int) -> None:
        if self.range and step == self.range[0]:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profiler = profile(activities=activities)
            self.profiler.__enter__()

    def look(self, kind: str) -> None:
        if self.profiler is not None:
            now = time.time_ns() / 1e9  # the profiler's clock
            self.memory.append(MemoryPoint(device=self.rank, seconds=now, bytes=current_bytes(self.device)))

    def after(self, step: int) -> None:
        if self.profiler is not None and step == self.range[-1]:
            self.profiler.__exit__(None, None, None)
            events = self.profiler.profiler.kineto_results.events()
            self.spans = spans_of(events, self.rank, on_gpu=self.device.type == "cuda")
            self.profiler = None


Action = tuple[str, int, int]
"""Name, start and end in nanoseconds."""

# What a backend calls its collectives in a trace.
_COLLECTIVE = ("gloo:", "ncclDevKernel", "ncclKernel")
_OPERATORS = ("aten::", "Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph")
"""What computes on a CPU; around these are functions that may wait."""
_WAITS = ("receive", "send", "exchange")
_SHORTEST_NANOSECONDS = {"cpu": 100_000, "gpu": 5_000}
"""Of a wait for a collective: what is shorter may be the host between two operators."""


def spans_of(events: Any, rank: int, on_gpu: bool) -> list[Span]:
    """The loop's own actions and every collective; operators inside them are left out.

    On a GPU an action lasts from its first kernel to its last, whichever thread launched them: the host's own times are
    those of launching. Where a collective runs and nothing is computed meanwhile, the action is interrupted.
    """
    hosted = [event for event in events if event.device_type() == DeviceType.CPU]
    own = [event for event in hosted if event.name().startswith("mw:")]
    actions = sorted((_action(event, "mw:") for event in own), key=lambda action: action[1])
    if not on_gpu:
        others = [e for e in hosted if e.name().startswith(_COLLECTIVE)]
        working = [e for e in hosted if e.name().startswith(_OPERATORS)]
    else:
        kernels = [event for event in events if event.device_type() != DeviceType.CPU]
        others = [e for e in kernels if e.name().startswith(_COLLECTIVE)]
        working = [e for e in kernels if not e.name().startswith(("mw:", *_COLLECTIVE))]
        actions = _on_device(actions, hosted, kernels)
    computes = [action for action in actions if not action[0].startswith(_WAITS)]
    talks = _talks([_action(event) for event in others], computes)
    waits = [action for action in actions if action[0].startswith(_WAITS)]
    alone = without(_united(talks), _united([_action(event) for event in working]))
    shortest = _SHORTEST_NANOSECONDS["gpu" if on_gpu else "cpu"]
    stopped = [(start, end) for start, end in alone if end - start >= shortest]
    lanes = (("compute", _parted(computes, stopped)), ("collective", waits), ("collective", talks))
    return [
        Span(
            device=rank,
            lane=lane,  # type: ignore[arg-type]
            name=name,
            start_seconds=start / 1e9,
            seconds=max(0, end - start) / 1e9,
            origin="loop" if name.startswith(_WAITS) else "",
        )
        for lane, named in lanes
        for name, start, end in named
    ]


def _talks(found: list[Action], computes: list[Action]) -> list[Action]:
    """Without messages that are under way while actions come and go: those of stages, which the loop tells of."""
    starts = [start for _, start, _ in computes]

    def is_inside(talk: Action) -> bool:
        at = bisect.bisect_right(starts, talk[1]) - 1
        return at >= 0 and talk[2] <= computes[at][2]

    def is_message(name: str) -> bool:
        return name.startswith(("gloo:send", "gloo:recv")) or "SendRecv" in name

    return [talk for talk in found if not is_message(talk[0]) or is_inside(talk)]


def _parted(actions: list[Action], stopped: list[tuple[float, float]]) -> list[Action]:
    """Actions without the times in which they only wait for a collective."""
    starts = [start for start, _ in stopped]
    result: list[Action] = []
    for name, start, end in actions:
        first = max(0, bisect.bisect_right(starts, start) - 1)
        last = bisect.bisect_left(starts, end)
        pieces = without([(start, end)], stopped[first:last])
        result += [(name, int(left), int(right)) for left, right in pieces]
    return result


def _united(actions: list[Action]) -> list[tuple[float, float]]:
    return united((start, end) for _, start, end in actions)


def _action(event: Any, prefix: str = "") -> Action:
    return event.name().removeprefix(prefix), event.start_ns(), event.start_ns() + event.duration_ns()


def _on_device(actions: list[Action], hosted: list[Any], kernels: list[Any]) -> list[Action]:
    """When the kernels launched during each action ran."""
    launched = {e.correlation_id(): e.start_ns() for e in hosted if e.name().startswith("cuda") and e.correlation_id()}
    starts = [start for _, start, _ in actions]
    ran: dict[int, tuple[int, int]] = {}
    for kernel in kernels:
        launch = launched.get(kernel.correlation_id())
        place = -1 if launch is None else bisect.bisect_right(starts, launch) - 1
        if place < 0 or kernel.name().startswith(("mw:", *_COLLECTIVE)):
            continue
        _, start, end = _action(kernel)
        before = ran.get(place, (start, end))
        ran[place] = (min(before[0], start), max(before[1], end))
    return [(actions[place][0], *times) for place, times in sorted(ran.items())]


def write_timeline(folder: Path, ranks: list[dict[str, Any]], fingerprint: str) -> None:
    """All ranks' spans and memory on one clock that starts at zero, as ours and as a Chrome trace."""
    spans = [Span(**span) for rank in ranks for span in rank["spans"]]
    if not spans:
        return
    start = min(span.start_seconds for span in spans)
    points = [MemoryPoint(**point) for rank in ranks for point in rank["memory"]]
    timeline = Timeline(
        source="measured",
        plan_fingerprint=fingerprint,
        spans=tuple(replace(span, start_seconds=span.start_seconds - start) for span in spans),
        memory=tuple(replace(point, seconds=max(0.0, point.seconds - start)) for point in points),
        environment={"torch": torch.__version__, "cores": str(os.cpu_count())},
    )
    write_whole(folder / "measured.timeline.json", timeline.to_json())
    write_whole(folder / "measured.trace.json", timeline.to_chrome())
