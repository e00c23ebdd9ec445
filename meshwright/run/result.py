"""What came of a run, as values: its summary, the comparison with its forecast, and where everything lies. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.checkpoint.step_folders import list_steps
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import MeshwrightError
from meshwright.core.files import write_whole
from meshwright.core.ledger import Entry
from meshwright.core.time_ledger import TimeLedger, read_marks, time_ledger
from meshwright.core.timeline import Timeline, last_step
from meshwright.report.timeline_lanes import compared
from meshwright.report.timeline_svg import picture
from meshwright.run.comparison import COMPARISON, Facts, compared_entry, keep, record
from meshwright.run.prepare import PreparedRun, promise_of
from meshwright.run.run_file import RunConfig

SUMMARY = "summary.json"
PICTURE = "timeline.svg"
_FILES = ("metrics.jsonl", "samples.jsonl", "tensorboard/", "checkpoints/", "measured.trace.json", PICTURE)


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Summary of a run; `summary.json` in its folder."""

    model: str
    plan: str
    step: int
    """Steps made so far, over all starts."""
    steps_now: int
    """Steps made since this start."""
    stopped: bool
    """Whether it was asked to stop; it has saved if the grace period was long enough."""
    seconds: float
    counts: str
    """tokens, or samples where these have no sequence."""
    seen_now: float
    """Tokens or samples that this start has trained on."""
    samples_in_all: int
    loss: float | None
    """Loss of the last step."""
    held_out: Mapping[str, float]
    steps: int
    """`train.steps`: where the run ends."""
    predicted: Mapping[str, float]
    """The forecast: step_seconds, tokens_per_second (or samples_per_second), mfu and peak_bytes."""
    interval_seconds: tuple[float, float]
    """Where the forecast expected a step."""
    measured: Mapping[str, float]
    """The same names as in `predicted`, as far as they were measured."""
    checkpoints: tuple[int, ...]
    files: tuple[str, ...]
    comparison: Mapping[str, Any]
    """Verdicts, reasons and the numbers they rest on; empty where too few steps were measured."""
    evicted: Mapping[str, float] = field(default_factory=dict)
    """What all ranks have evicted since this start; empty without `train.memory_cap`."""
    time_ledger: TimeLedger | None = None
    """Wall time of all starts by category; None in a summary of an earlier version."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. A failed run has no result: `Run.result` raises its error."""

    exit_code: int
    """0, or 75 if it was stopped: starting the same run again resumes it."""
    folder: Path
    summary: RunSummary | None
    """None if it was stopped before the first step, or killed before it had saved."""
    comparison: Entry | None
    """The run compared with its forecast; None if no step was measured."""
    overlay: str = ""
    """Predicted against measured timeline, in one line."""
    warnings: tuple[str, ...] = ()
    """What could not be written at the end."""

    @property
    def is_stopped(self) -> bool:
        return self.exit_code != 0

    @property
    def paths(self) -> dict[str, Path]:
        """The files of the folder by name: `plan`, `forecast`, `summary`, `checkpoints`, ..."""
        result = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        return {path.name.removesuffix(".json").removesuffix(".jsonl"): path for path in result}


def overlay(folder: Path, title: str) -> str:
    """Write the picture beside both timelines. The line, or why there is none; empty where no step was recorded."""
    if not (folder / "measured.timeline.json").exists():
        return ""
    try:
        predicted = load_artefact(Timeline, folder / "predicted.timeline.json")
        measured = last_step(load_artefact(Timeline, folder / "measured.timeline.json"))
        line = compared(predicted, measured)
        write_whole(folder / PICTURE, picture([predicted, measured], title=title, notes=[line]) + "\n")
    except (MeshwrightError, OSError) as error:
        return f"{PICTURE} is not written: {getattr(error, 'strerror', None) or error}"
    return line


def conclude(config: RunConfig, prepared: PreparedRun, exit_code: int) -> RunResult:
    """Compare what the ranks have left in the folder with the forecast, and write down what came of it."""
    folder = Path(config.run.folder)
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return RunResult(exit_code=exit_code, folder=folder, summary=None, comparison=None)
    line = overlay(folder, f"{config.model.title} on {prepared.cluster.name}: {prepared.plan}")
    entry = None  # where no step was measured
    promise = promise_of(config, prepared)
    if result["num_measured"]:
        about = {name: result[name] for name in ("torch", "device_name")}
        about |= {"unix_seconds": result["finished_unix_seconds"]}
        entry = compared_entry(promise, Facts.of(result), config.run.folder, is_whole=True, **about)
    forecast, step_seconds, rate = prepared.forecast, result["step_seconds"], f"{result['counts']}_per_second"
    measured = {"peak_bytes": result["peak_bytes"]}
    if step_seconds:
        per_second = config.train.batch * config.sequence / step_seconds
        measured |= {"step_seconds": step_seconds, rate: per_second}
        measured |= {"mfu": forecast.mfu_at(per_second)} if forecast.mfu else {}
    predicted = {
        "step_seconds": forecast.step_seconds,
        rate: forecast.tokens_per_second,
        "mfu": forecast.mfu,
        "peak_bytes": promise.predicted.peak_bytes,
    }
    names = [*_FILES, *(() if not config.run.track else ("track/",))]
    same = ("step", "steps_now", "stopped", "seconds", "counts", "seen_now", "samples_in_all", "loss")
    summary = RunSummary(
        model=config.model.title,
        plan=str(prepared.plan),
        **{name: result[name] for name in (*same, "held_out", "evicted")},
        steps=config.train.steps,
        predicted=predicted,
        interval_seconds=(forecast.step_seconds_low, forecast.step_seconds_high),
        measured=measured,
        checkpoints=tuple(list_steps(folder / "checkpoints")),
        files=tuple(name for name in names if (folder / name).exists()),
        comparison={} if entry is None else entry.comparison,
        time_ledger=time_ledger(read_marks(folder)),
    )
    warnings = []
    try:
        write_whole(folder / SUMMARY, json.dumps(encode(summary), indent=1) + "\n")
    except OSError as error:
        warnings.append(f"{SUMMARY} is not written: {error.strerror or error}")
    if entry is not None and (reason := keep(entry, folder)):
        warnings.append(f"{COMPARISON} is not written: {reason}")
    if entry is not None and (reason := record(entry)):
        warnings.append(f"this run is not in the ledger that mw probe --from-runs reads: {reason}")
    found: dict[str, Any] = {"summary": summary, "comparison": entry, "overlay": line, "warnings": tuple(warnings)}
    return RunResult(exit_code=exit_code, folder=folder, **found)


def earlier_result(folder: Path, steps: int) -> RunResult:
    """The result of a finished run, as the start that made its last step has written it; one that was killed before it
    could leaves the files of the start before."""
    summary, entry = None, None
    try:
        summary = load_artefact(RunSummary, folder / SUMMARY)
        entry = load_artefact(Entry, folder / COMPARISON)
    except MeshwrightError:
        pass  # of an older version, or deleted: the checkpoints are there
    if summary is not None and summary.step < steps:
        summary, entry = None, None
    return RunResult(exit_code=0, folder=folder, summary=summary, comparison=entry)


def held_out_text(found: Mapping[str, float]) -> str:
    """`0.412 bits per byte`, or `loss 0.31, 97.2 % right`."""
    text = f"loss {found['held_out_loss']:.4f}"
    if "held_out_bits_per_byte" in found:
        text = f"{found['held_out_bits_per_byte']:.3f} bits per byte"
    elif "held_out_top1" in found:
        text += f", {found['held_out_top1']:.1%} right"
    for name, words in (("consensus_distance", "consensus distance"), ("staleness_mean", "mean staleness")):
        text += f", {words} {found[name]:.3g}" if name in found else ""
    return text
