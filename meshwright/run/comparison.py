"""A run beside its forecast: what its steps took, as forecast or not, by how much, and the likely reason. No torch.

A reason rests on a number the run itself has told (`Facts`) and is printed with it. Where nothing in the run explains a
miss, the part of the forecast with the widest error bar is named, with what it would have to be. As data it is an
`Entry`: kept in the run's own folder, and when the run has ended in the local ledger.
"""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import meshwright
from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode
from meshwright.core.files import write_whole
from meshwright.core.ledger import LEAST_STEPS, NOT_KNOWN, Entry, Measured, Predicted, append
from meshwright.core.timeline import Span, Timeline, last_step
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.machine.from_runs import contradicts
from meshwright.report.timeline_lanes import spent

COMPARISON = "comparison.json"
"""In the run's folder: one entry, of the latest start so far."""
WARM_UP_STEPS = 3
"""Steps before measurements: allocation, compilation, caches."""
COMPARED_AFTER = 20
"""Steps after which a run is compared with its forecast, while it goes on; and again at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Statistics of the measured steps: all but the first ones and the profiled ones."""

    step_seconds: float
    """The median, as everywhere here."""
    step_seconds_p10: float
    step_seconds_p90: float
    num_measured: int
    num_left_out: int
    first_step_seconds: float
    """Seconds of the very first step, which is not among the measured ones."""
    early_step_seconds: float
    """Median of the first third of the measured steps."""
    late_step_seconds: float
    """Median of the last third."""
    data_seconds: float
    """Seconds per step that rank 0 waits for its samples."""
    waited_fraction: float
    """Share of the time in which rank 0 was ready to run and had no core."""
    parts: Mapping[str, float]
    """Shares of a profiled step: compute, collective and copy (that nothing hides), idle; empty where none was
    profiled."""
    peak_bytes: int
    reserved_bytes: int
    num_retries: int
    """How often, since the first measured step, a GPU's allocator ran full and gave back what it had cached."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Facts:
        """As a run's result.json has them, among other things."""
        return cls(**{field.name: result[field.name] for field in fields(cls)})


class StepTally:
    """Steps as they come; costs the loop two numbers a step, and a look at one file twice in a run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.data_seconds: list[float] = []
        self.num_left_out = 0
        self.first_seconds: float | None = None
        self.start = (0.0, 0.0)

    def add(self, seconds: float, data_seconds: float, *, is_measured: bool) -> None:
        if self.first_seconds is None:
            self.first_seconds = seconds
        if not is_measured:
            self.num_left_out += 1
            return
        if not self.seconds:
            self.start = time.perf_counter() - seconds, _waited_seconds()
        self.seconds.append(seconds)
        self.data_seconds.append(data_seconds)

    @property
    def is_enough(self) -> bool:
        """To be compared before the run has ended."""
        return len(self.seconds) >= LEAST_STEPS and len(self.seconds) + self.num_left_out >= COMPARED_AFTER

    def facts(self, spans: Iterable[Span], memory: Mapping[str, int]) -> Facts | None:
        """So far; None before the first measured step. `memory` has the last three fields."""
        if not self.seconds or self.first_seconds is None:
            return None
        times, third = sorted(self.seconds), -(-len(self.seconds) // 3)
        began, waited = self.start
        passed = time.perf_counter() - began
        return Facts(
            step_seconds=times[len(times) // 2],
            step_seconds_p10=times[len(times) // 10],
            step_seconds_p90=times[-1 - len(times) // 10],
            num_measured=len(times),
            num_left_out=self.num_left_out,
            first_step_seconds=self.first_seconds,
            early_step_seconds=statistics.median(self.seconds[:third]),
            late_step_seconds=statistics.median(self.seconds[-third:]),
            data_seconds=statistics.median(self.data_seconds),
            waited_fraction=min(1.0, max(0.0, _waited_seconds() - waited) / passed),
            parts=parts_of(spans),
            **memory,
        )


def parts_of(spans: Iterable[Span]) -> dict[str, float]:
    """Shares of the last profiled step, on average over the ranks."""
    step = last_step(Timeline(source="measured", plan_fingerprint="", spans=tuple(spans)))
    if not step.seconds:
        return {}
    result = spent(step)
    shares = {name: getattr(result, name) / step.seconds for name in ("compute", "collective", "copy", "idle")}
    return {name: share for name, share in shares.items() if share or name != "copy"}


def _waited_seconds(file: Path = Path("/proc/thread-self/schedstat")) -> float:
    """How long this thread has been ready without a core, as Linux counts it; 0 where it does not."""
    try:
        return int(file.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


MEMORY_FRACTION = 0.1
"""By which memory may differ and still be as forecast, which has no interval of its own."""
_LEAST_WAITED = 0.1
"""Of the time without a core: some of it every thread has."""
_LEAST_DRIFT = 0.1
_LEAST_SPREAD = 1.3
"""Slow steps over fast ones, that chance does not make."""
_LEAST_SHARE = 0.3
"""A part of a step is named only if it explains at least this share of the excess."""
_ENOUGH_SHARE = 0.5
"""Where reasons explain this share of the excess, parts of the step are not examined."""
CAUSES = {
    "compute": "compute",
    "launch": "launching from the host",
    "inner": "collectives inside a node",
    "outer": "collectives between nodes",
    "idle": "waiting for other ranks",
}
_PROBE = "`mw probe -o this.cluster.json` measures this machine with care; set run.cluster to that file."
_QUIET = "Run again, and `mw probe`, when nothing else runs here."
_PROBE_AGAIN = "Probe again when nothing else runs here: delete cluster.json in the run's folder and start again, or "
_PROBE_AGAIN += "`mw probe -o` the file that run.cluster names."
Verdict = Literal["as forecast", "slower", "faster"]


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What is said of a run before it starts."""

    machine: str
    model: str
    model_fingerprint: str
    plan: Mapping[str, Any]
    plan_fingerprint: str
    cluster: Cluster
    sequence: int
    batch: int
    predicted: Predicted
    bytes_by_category: Mapping[str, int]
    has_one_stage: bool
    """All ranks do the same, so what one of them is busy with can be compared."""
    is_first_fullest: bool
    """Rank 0 holds as much as any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    name: str
    what: str
    """In words, with its number."""
    seconds: float
    """Seconds of a step that it explains."""
    next: str = ""
    """What to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    verdict: Verdict
    ratio: float
    """Measured over forecast."""
    memory_verdict: str
    """`as forecast`, `more`, `less`, or `not known` yet."""
    memory_ratio: float
    """0 where it is not known."""
    reasons: tuple[Reason, ...]


def compare(promise: Promise, facts: Facts, *, is_whole: bool) -> Comparison:
    """`is_whole`: the memory is that of the fullest rank, not of rank 0 alone."""
    predicted, measured = promise.predicted, facts.step_seconds
    verdict: Verdict = "as forecast"
    if not predicted.step_seconds_low <= measured <= predicted.step_seconds_high:
        verdict = "slower" if measured > predicted.step_seconds else "faster"
    memory_ratio = 0.0
    if predicted.peak_bytes and (is_whole or promise.is_first_fullest):
        memory_ratio = facts.peak_bytes / predicted.peak_bytes
    memory_verdict = NOT_KNOWN
    if memory_ratio:
        off = memory_ratio - 1
        memory_verdict = "as forecast" if abs(off) <= MEMORY_FRACTION else "more" if off > 0 else "less"
    reasons: list[Reason] = []
    if verdict != "as forecast":
        # What happened, the largest first; then which part took it; else where the forecast knows least. Two at most.
        is_slower, off = verdict == "slower", abs(measured - predicted.step_seconds)
        happened = [*_disturbances(promise, facts)] if is_slower else []
        reasons = sorted(happened, key=lambda reason: -reason.seconds)[:2]
        if sum(reason.seconds for reason in reasons) < _ENOUGH_SHARE * off:
            parts = [reason for reason in _parts(promise, facts, is_slower) if reason.seconds >= _LEAST_SHARE * off]
            reasons += sorted(parts, key=lambda reason: -reason.seconds)[:1]
            cluster = promise.cluster
            if "measured" not in cluster.sources:
                figures = f"the figures of {cluster.name} (compute ±{cluster.errors.compute:.0%})"
                what = f"the forecast has {figures}, which were not measured on this machine"
                reasons.append(Reason(name="figures", what=what, seconds=0.0, next=_PROBE))
        reasons = reasons[:2] or [_doubt(promise, facts)]
        if contradicts(promise.cluster, ratio := measured / predicted.step_seconds):
            what = (
                f"this run contradicts the probe of {promise.cluster.name}: its steps take {ratio:.2f} times as long "
            )
            what += "as the measured rates say; one of the two was disturbed, so neither is corrected by the other"
            reasons = [Reason(name="probe", what=what, seconds=off, next=_PROBE_AGAIN), *reasons[:1]]
    return Comparison(
        verdict=verdict,
        ratio=measured / predicted.step_seconds,
        memory_verdict=memory_verdict,
        memory_ratio=memory_ratio,
        reasons=tuple(reasons),
    )


def _disturbances(promise: Promise, facts: Facts) -> Iterator[Reason]:
    high, median = promise.predicted.step_seconds_high, facts.step_seconds
    if facts.data_seconds >= 0.1 * (median - promise.predicted.step_seconds):
        what = f"a step waits {pretty_seconds(facts.data_seconds)} for its samples, which no forecast has"
        next_step = "Put the data on a faster disk, or write tokens with `mw data prepare` first."
        yield Reason(name="data", what=what, seconds=facts.data_seconds, next=next_step)
    if facts.waited_fraction >= _LEAST_WAITED:
        what = f"rank 0 was ready and had no core {facts.waited_fraction:.0%} of the time: the cores have more to do"
        yield Reason(name="cores", what=what, seconds=facts.waited_fraction * median, next=_QUIET)
    fast, slow = facts.step_seconds_p10, facts.step_seconds_p90
    if fast <= high and slow >= _LEAST_SPREAD * fast:
        what = f"one step in ten took {pretty_seconds(fast)} or less, which the forecast allows, one in ten "
        what += f"{pretty_seconds(slow)} or more: something disturbs them now and then"
        yield Reason(name="spread", what=what, seconds=median - fast, next=_QUIET)
    if facts.num_measured >= LEAST_STEPS:
        early, late = facts.early_step_seconds, facts.late_step_seconds
        course = f"{pretty_seconds(early)} in the first third of them, {pretty_seconds(late)} in the last"
        if late < (1 - _LEAST_DRIFT) * early:
            what = (
                f"steps still get faster, {course} (the very first took {pretty_seconds(facts.first_step_seconds)}): "
            )
            yield Reason(name="warm-up", what=f"{what}warming up is not over", seconds=max(0.0, median - late))
        elif early < (1 - _LEAST_DRIFT) * late:
            what = f"steps get slower, {course}: a device that throttles, or other work that has begun"
            yield Reason(name="slowing", what=what, seconds=max(0.0, median - early))
    if facts.num_retries:
        limit = promise.cluster.device.memory_bytes
        what = f"the allocator ran full {facts.num_retries} times in {facts.num_measured} steps and gave back what it "
        what += f"had cached ({pretty_bytes(facts.reserved_bytes)} of {pretty_bytes(limit)} reserved)"
        next_step = "Plan for less memory: a smaller microbatch, or recomputation."
        # How long one takes is not known; once a step, it is taken to explain all.
        often = min(1.0, facts.num_retries / facts.num_measured)
        seconds = often * (median - promise.predicted.step_seconds)
        yield Reason(name="retries", what=what, seconds=seconds, next=next_step)


def _parts(promise: Promise, facts: Facts, is_slower: bool) -> Iterator[Reason]:
    """Which part of a profiled step differs from the forecast, scaled to a step that is not profiled."""
    if not facts.parts or not promise.has_one_stage:
        return
    causes = promise.predicted.seconds_by_cause
    told = {
        "compute": ("compute takes", causes.get("compute", 0.0) + causes.get("launch", 0.0)),
        "collective": ("collectives take", causes.get("inner", 0.0) + causes.get("outer", 0.0)),
    }
    for name, (words, seconds) in told.items():
        result = facts.parts.get(name, 0.0) * facts.step_seconds
        what = f"{words} {pretty_seconds(result)} of a step ({facts.parts.get(name, 0.0):.0%} of a profiled one), "
        what += f"{pretty_seconds(seconds)} by the forecast"
        yield Reason(name=name, what=what, seconds=result - seconds if is_slower else seconds - result, next=_PROBE)


def _doubt(promise: Promise, facts: Facts) -> Reason:
    """The part that makes most of the interval."""
    predicted, errors = promise.predicted, promise.cluster.errors
    causes = {name: seconds for name, seconds in predicted.seconds_by_cause.items() if seconds > 0}
    worst = max(causes, key=lambda name: getattr(errors, name) * causes[name])
    off = facts.step_seconds - predicted.step_seconds
    share, error = causes[worst] / predicted.step_seconds, getattr(errors, worst)
    what = f"nothing in the run explains it; the forecast knows least of {CAUSES[worst]} "
    what += f"({share:.0%} of its step, ±{error:.0%})"
    if causes[worst] + off > 0:
        what += f", which alone would have to take {1 + off / causes[worst]:.2f} times as long"
    return Reason(name=worst, what=what, seconds=abs(off), next=_PROBE)


def sentences(promise: Promise, facts: Facts, comparison: Comparison, folder: str) -> list[str]:
    """For people: forecast, measured and ratio; then memory, why they differ, and what next, as far as there is any."""
    predicted = promise.predicted
    warm = min(facts.num_left_out, WARM_UP_STEPS)
    profiled = f", and {facts.num_left_out - warm} profiled" if facts.num_left_out > warm else ""
    few = "only " if facts.num_measured < LEAST_STEPS else ""
    when = f"{few}{facts.num_measured} steps (left out: the first {warm}, warming up{profiled})"
    spread = f"{pretty_seconds(facts.step_seconds_p10)} to {pretty_seconds(facts.step_seconds_p90)}"
    interval = f"{pretty_seconds(predicted.step_seconds_low)} to {pretty_seconds(predicted.step_seconds_high)}"
    said = "as forecast" if comparison.verdict == "as forecast" else f"{comparison.verdict} than forecast"
    outside = "" if comparison.verdict == "as forecast" else ", outside the interval"
    result = [
        f"{said}: a step takes {pretty_seconds(facts.step_seconds)} (eight in ten {spread}) over {when}; forecast "
        f"{pretty_seconds(predicted.step_seconds)} ({interval}), ratio {comparison.ratio:.2f}{outside}."
    ]
    if comparison.memory_verdict != NOT_KNOWN:
        peaks = f"{pretty_bytes(facts.peak_bytes)}, forecast {pretty_bytes(predicted.peak_bytes)}"
        text = f"Memory of the fullest rank {peaks}"
        if comparison.memory_verdict != "as forecast":
            largest = max(promise.bytes_by_category, key=lambda name: promise.bytes_by_category[name])
            most = f"{largest.replace('_', ' ')}, {pretty_bytes(promise.bytes_by_category[largest])}"
            text += f": {comparison.memory_verdict} than forecast, {comparison.memory_ratio:.2f} times"
            text += f"; its largest part was {most}"
        result.append(f"{text}.")
    if comparison.reasons:
        result.append(f"Likely reason: {'; also, '.join(reason.what for reason in comparison.reasons)}.")
        steps = [reason.next for reason in comparison.reasons if reason.next][:1]
        if not few and comparison.reasons[0].name != "probe":  # else too short to be learned from, or refused
            steps.append(f"`mw plan RUN.toml --from-run {shlex.quote(folder)}` plans with what was measured.")
        result += [f"Next: {' '.join(steps)}"] if steps else []
    return result


def record(entry: Entry) -> str:
    """Why the run is not in the ledger although it should be, or nothing. Too few measured steps tell nothing."""
    if entry.measured.num_steps < LEAST_STEPS:
        return ""
    return append(entry)


def keep(entry: Entry, folder: Path) -> str:
    """Why it is not kept in the folder, or nothing: a full disk must not hurt a run."""
    try:
        write_whole(folder / COMPARISON, json.dumps(encode(entry), allow_nan=False) + "\n")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def compared_entry(promise: Promise, facts: Facts, folder: str, *, is_whole: bool, **about: Any) -> Entry:
    """The run beside its forecast: for programs verdicts, ratios, reasons and the numbers they rest on, for people
    `text`, and its sentences as `lines`. `about`: see `entry_of`."""
    comparison = compare(promise, facts, is_whole=is_whole)
    lines = sentences(promise, facts, comparison, folder)
    told = {"facts": encode(facts), "text": " ".join(lines), "lines": lines}
    return entry_of(promise, facts, {**encode(comparison), **told}, **about)


def entry_of(
    promise: Promise, facts: Facts, comparison: Mapping[str, Any], *, unix_seconds: float, torch: str, device_name: str
) -> Entry:
    return Entry(
        unix_seconds=unix_seconds,
        versions={"meshwright": meshwright.__version__, "torch": torch, "python": platform.python_version()},
        device_name=device_name,
        **{field.name: getattr(promise, field.name) for field in fields(Entry) if hasattr(promise, field.name)},
        measured=Measured(
            num_steps=facts.num_measured,
            **{field.name: getattr(facts, field.name) for field in fields(Measured) if hasattr(facts, field.name)},
            # Where all ranks do the same, as a profiled step shared out.
            seconds_by_part={
                name: share * (facts.step_seconds - facts.data_seconds)
                for name, share in facts.parts.items()
                if name != "idle" and promise.has_one_stage
            },
        ),
        comparison=comparison,
    )
