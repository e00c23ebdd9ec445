"""Tools that follow a run: each in a thread of its own, so that none can hold up a step or make one fail.

    step ──put──> bounded queue ──> the tool's thread ──> the tool
           never waits; a full queue loses its oldest        may fail (told once), may hang (left behind at the end)

Nothing is sent anywhere unless the user has set the tool up for it. No torch.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import Problem, raise_problems
from meshwright.core.files import write_whole

Say = Callable[[str], None]
PATIENCE_SECONDS = 5.0
"""What all tools together may take to finish when the run is over."""
_CAPACITY = 10_000
_PROJECT = "meshwright"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a tool is told of a run before its first step."""

    folder: Path
    key: str
    """The same whenever this run goes on."""
    config: Mapping[str, Any]
    first_step: int
    """Steps made before this start; the first to be told of is one more."""


class Tracker(Protocol):
    """One tool. All calls come from its own thread, `open` first and `close` last."""

    def open(self, about: About) -> None: ...

    def values(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, text: str) -> None: ...

    def close(self, summary: Mapping[str, Any]) -> None: ...


class Board:
    """TensorBoard event files. (tensorboardX's own writer waits for ever once its thread has met a full disk.)"""

    def open(self, about: About) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        folder = about.folder / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self.flushed = 0.0
        # Steps that run again replace those of the earlier start.
        self._write(Event(session_log=SessionLog(status=SessionLog.START), step=about.first_step + 1))

    def values(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(summary=Summary(value=named), step=step))

    def text(self, step: int, text: str) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text as text_summary

        self._write(Event(summary=text_summary("sample", text), step=step))

    def close(self, summary: Mapping[str, Any]) -> None:
        self.writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self.writer.write_event(event)
        if time.monotonic() - self.flushed > 1.0:
            self.flushed = time.monotonic()
            self.writer.flush()


class Wandb:
    def open(self, about: About) -> None:
        self.wandb: Any = import_module("wandb")
        mode = None  # leaves it to the user's own settings
        if "WANDB_MODE" not in os.environ:  # without a key there is nobody to send to
            try:
                has_key = self.wandb.login(prompt=False, verify=False)
            except TypeError:  # before `prompt` was there to say so
                has_key = bool(self.wandb.api.api_key)
            mode = None if has_key else "offline"
        self.run = self.wandb.init(
            project=_PROJECT,
            name=about.folder.resolve().name,
            id=about.key,
            resume="allow",
            dir=str(_room(about)),
            config=dict(about.config),
            mode=mode,
            settings=self.wandb.Settings(console="off", silent=True),
        )

    def values(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, step: int, text: str) -> None:
        self.run.log({"sample": self.wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(flattened(summary))
        self.run.finish()


class Mlflow:
    """A store of files in the run folder, unless MLFLOW_TRACKING_URI names another."""

    def open(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer ones ask for a database otherwise
        self.mlflow: Any = import_module("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (_room(about) / "mlflow").resolve().as_uri()
        self.client = self.mlflow.MlflowClient(tracking_uri=uri)
        known = self.client.get_experiment_by_name(_PROJECT)
        experiment = known.experiment_id if known else self.client.create_experiment(_PROJECT)
        tag = f"{_PROJECT}.key"
        earlier = self.client.search_runs([experiment], f"tags.`{tag}` = '{about.key}'", max_results=1)
        if earlier:
            self.run_id = earlier[0].info.run_id
            self.client.update_run(self.run_id, status="RUNNING")
            return  # what a run was started with cannot be changed there
        name = about.folder.resolve().name
        self.run_id = self.client.create_run(experiment, tags={tag: about.key}, run_name=name).info.run_id
        params = [self.mlflow.entities.Param(key, str(value)[:500]) for key, value in flattened(about.config).items()]
        for start in range(0, len(params), 100):  # the most it takes at once
            self.client.log_batch(self.run_id, params=params[start : start + 100])

    def values(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        named = [self.mlflow.entities.Metric(name, value, now, step) for name, value in values.items()]
        self.client.log_batch(self.run_id, metrics=named)

    def text(self, step: int, text: str) -> None:
        self.client.log_text(self.run_id, text, f"samples/{step:08d}.txt")

    def close(self, summary: Mapping[str, Any]) -> None:
        self.client.log_dict(self.run_id, dict(summary), "summary.json")
        self.client.set_terminated(self.run_id)


class Trackio:
    """Its own local database, which `trackio show` reads."""

    def open(self, about: About) -> None:
        self.trackio: Any = import_module("trackio")
        name = f"{about.folder.resolve().name}-{about.key}"  # it knows runs by name only
        config = dict(about.config)
        with contextlib.redirect_stdout(io.StringIO()):  # it greets; stdout is for results
            self.run = self.trackio.init(project=_PROJECT, name=name, config=config, resume="allow", embed=False)

    def values(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def text(self, step: int, text: str) -> None:
        fenced = "\n".join(f"    {line}" for line in text.splitlines())
        self.run.log({"sample": self.trackio.Markdown(fenced)}, step=step)

    def close(self, summary: Mapping[str, Any]) -> None:
        numbers = {f"summary.{k}": v for k, v in flattened(summary).items() if isinstance(v, int | float)}
        self.run.log(numbers, step=int(summary.get("step", 0)))
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
"""By the name in `run.track`, which is also their package's."""


def require_trackers(names: Iterable[str]) -> None:
    """Raises for those that are not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    fix = "Run: pip install 'meshwright[track]'"
    raise_problems(Problem(where="run.track", what=f"{name} is not installed.", fix=fix) for name in missing)


def _room(about: About) -> Path:
    folder = about.folder / "track"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_key(folder: Path, first_step: int) -> str:
    """A name that tools know this run by: kept in its folder, and a new one when it starts from the beginning."""
    path = folder / "track" / "key"
    with contextlib.suppress(OSError, ValueError):
        if first_step and re.fullmatch("[0-9a-f]{8}", known := path.read_text(encoding="utf-8").strip()):
            return known
    key = secrets.token_hex(4)
    with contextlib.suppress(OSError):  # then a resumed run will be another one to the tools
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{key}\n")
    return key


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    """`{"train": {"batch": 4}}` -> `{"train.batch": 4}`; lists as JSON."""
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in value.items():
            result |= flattened(item, f"{name}.{key}" if name else str(key))
        return result
    return {name: json.dumps(value) if isinstance(value, list | tuple) else value}


class Feed:
    """A tool with its queue and thread."""

    def __init__(self, name: str, tracker: Tracker, about: About, say: Say, capacity: int = _CAPACITY):
        self.name, self.tracker, self.about, self.say = name, tracker, about, say
        self.waiting: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(capacity)
        self.num_dropped = 0
        self.is_broken = self.has_told = False
        self.thread = threading.Thread(target=self._run, name=f"track {name}", daemon=True)
        self.thread.start()

    def put(self, call: str, *arguments: Any) -> None:
        while not self.is_broken:
            try:
                self.waiting.put_nowait((call, arguments))
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):  # the tool has taken the last one meanwhile
                    self.waiting.get_nowait()
                    self.num_dropped += 1

    def finish(self, deadline: float) -> None:
        """Wait until everything put so far is through, or until `deadline` on the monotonic clock."""
        self.thread.join(max(0.0, deadline - time.monotonic()))
        num_left, self.is_broken = self.waiting.qsize(), True
        if self.thread.is_alive():
            self.say(f"{self.name} is left behind: it did not finish in time, {num_left} entries are not there")
        if self.num_dropped:
            self.say(f"{self.name} was slower than the run: its {self.num_dropped} oldest entries were dropped")

    def _run(self) -> None:
        call = "open"
        if not self._try(call, self.about):
            self.is_broken = True
            return
        while call != "close":  # also after the run has stopped waiting: whatever gets through is there
            call, arguments = self.waiting.get()
            self._try(call, *arguments)

    def _try(self, call: str, *arguments: Any) -> bool:
        try:
            getattr(self.tracker, call)(*arguments)
        except BaseException as error:  # tools exit and panic, too; this thread is theirs alone
            if not self.has_told:
                self.has_told = True
                reason = (str(error).strip().splitlines() or [""])[0]
                self.say(f"{self.name} failed, training goes on: {type(error).__name__}: {reason}")
            return False
        return True


def finish_all(feeds: Iterable[Feed], summary: Mapping[str, Any], seconds: float = PATIENCE_SECONDS) -> None:
    """Hand everyone the summary and wait, together no longer than `seconds`."""
    feeds = list(feeds)
    deadline = time.monotonic() + seconds
    for feed in feeds:
        feed.put("close", summary)
    for feed in feeds:
        feed.finish(deadline)
