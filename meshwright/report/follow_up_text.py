"""What follows an answer of `mw plan`, as tables: why, what if, other numbers of devices, other batches, the front."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from meshwright.ask.batch_goal import BatchGoals, BatchRun
from meshwright.ask.device_counts import DeviceCount, DeviceCounts
from meshwright.ask.explain import differences, percent
from meshwright.ask.memory_front import MemoryFront
from meshwright.ask.what_if import ComparedPlans
from meshwright.ask.why import Why
from meshwright.core.units import counted, pretty_bytes, pretty_count, pretty_seconds
from meshwright.planner.search import Scored
from meshwright.report.terminal import short_plan

_AS_FAST = 0.005
_WORTH_IT = 0.9
"""Share of a device's rate that further devices should keep for them to be worth having."""


def _table(*columns: str, last: str = "plan") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def _against(other: Scored, best: Scored) -> str:
    """By tokens a second, so that another batch compares too."""
    ratio = best[1].tokens_per_second / other[1].tokens_per_second
    if abs(ratio - 1) < _AS_FAST:
        return "as fast"
    if ratio < 1:
        return f"{percent(1 / ratio - 1)} faster"
    return f"{percent(ratio - 1)} slower" if ratio < 2 else f"{ratio:.1f} x slower"


def print_why(console: Console, why: Why) -> None:
    wished = f" (you asked: {why.wished})" if why.wished else ""
    console.print(f"why {why.knob} is {why.value}{wished}", style="bold", markup=False)
    table = _table("", "step", "memory", "", last="what differs, or why not")
    plan, told = why.best
    table.add_row(f"{why.value} (best)", pretty_seconds(told.step_seconds), pretty_bytes(told.peak_bytes), "", "")
    for other in why.others:
        if other.best is None:
            table.add_row(other.words, "", "", "", other.reason)
            continue
        differs = "; ".join(differences(plan, other.best[0]))
        step, memory = other.best[1].step_seconds, other.best[1].peak_bytes
        against = _against(other.best, why.best)
        table.add_row(other.words, pretty_seconds(step), pretty_bytes(memory), against, differs)
    console.print(table)
    for note in why.notes:
        console.print(note, markup=False)
    console.print(_why_words(why) + "\n", markup=False)


def _why_words(why: Why) -> str:
    possible = [other for other in why.others if other.best is not None]
    if not possible:
        return "Nothing else is possible."
    nearest = max(possible, key=lambda other: other.best[1].tokens_per_second if other.best else 0)
    assert nearest.best is not None
    memory = nearest.best[1].peak_bytes - why.best[1].peak_bytes
    more = f", with {pretty_bytes(abs(memory))} {'more' if memory > 0 else 'less'} memory" if memory else ""
    return f"The next best, {nearest.words}, is {_against(nearest.best, why.best)}{more}."


def print_what_if(console: Console, compared: ComparedPlans) -> None:
    console.print(f"what if {compared.words}", style="bold", markup=False)
    after, before = compared.after, compared.before
    if after.best is None:
        console.print(f"no plan then: {after.reason}\n", markup=False)
        return
    table = _table("", "devices", "step", f"{after.best[1].counts}/s", "memory")
    for words, scored in (("now", before), ("then", after.best)):
        if scored is None:
            table.add_row(words, "", "nothing fits", "", "", "")
            continue
        plan, told = scored
        memory = f"{pretty_bytes(told.peak_bytes)} of {pretty_bytes(told.memory_bytes)}"
        rate = pretty_count(told.tokens_per_second)
        table.add_row(words, str(plan.num_ranks), pretty_seconds(told.step_seconds), rate, memory, short_plan(plan))
    console.print(table)
    if before is not None:
        for line in differences(before[0], after.best[0]) or ("the same plan",):
            console.print(f"  {line}", markup=False)
    console.print(worth_words(compared) + "\n", markup=False)


def worth_words(compared: ComparedPlans) -> str:
    """What it buys in percent, and for each device where their number changes."""
    if compared.after.best is None:
        return f"no plan: {compared.after.reason}"
    ratio, devices = compared.rate_ratio, compared.device_ratio
    counts = compared.after.best[1].counts
    if ratio is None:
        return f"something fits: {pretty_count(compared.after.best[1].tokens_per_second)} {counts}/s"
    gain = "buys nothing" if abs(ratio - 1) < _AS_FAST else f"{percent(ratio - 1)} more {counts}/s"
    if ratio < 1 - _AS_FAST:
        gain = f"{percent(1 - ratio)} fewer {counts}/s"
    if devices == 1:
        return gain
    each = ratio / devices
    if devices < 1:
        verdict = "each does more" if each > 1 + _AS_FAST else "each does as much" if each > 1 - _AS_FAST else "a loss"
        return f"{gain} with {percent(1 - devices)} fewer devices: {percent(each)} of a device's rate now, {verdict}"
    verdict = "worth it" if each >= _WORTH_IT else "hardly worth it" if ratio > 1 + _AS_FAST else "not worth it"
    return f"{gain} for {percent(devices - 1)} more devices: {percent(each)} of a device's rate now, {verdict}"


def print_sizes(console: Console, sizes: DeviceCounts, tokens: float) -> None:
    counts = next((size.outcome.best[1].counts for size in sizes.tried if size.outcome.best), "tokens")
    amount = f"{pretty_count(tokens).replace(' ', '')} {counts}"
    table = _table("devices", "", "step", f"{counts}/s", "a device", f"device-hours for {amount}")
    for size in sizes.tried:
        best = size.outcome.best
        if best is None:
            table.add_row(str(size.devices), size.outcome.words, "", "", "", "", size.outcome.reason)
            continue
        table.add_row(
            str(size.devices),
            size.outcome.words,
            pretty_seconds(best[1].step_seconds),
            pretty_count(size.rate),
            pretty_count(size.rate / size.devices),
            _hours(size.device_hours(tokens)),
            short_plan(best[0]),
        )
    console.print(table)
    fastest, cheapest = sizes.fastest, sizes.cheapest
    if fastest is None or cheapest is None:
        console.print("Nothing fits on any of them.\n")
        return
    console.print(_sizes_words(fastest, cheapest, tokens) + "\n", markup=False)


def _sizes_words(fastest: DeviceCount, cheapest: DeviceCount, tokens: float) -> str:
    if fastest.devices == cheapest.devices:
        return f"Fastest and cheapest: {counted(fastest.devices, 'device')}."
    more = fastest.device_hours(tokens) / cheapest.device_hours(tokens) - 1
    return (
        f"Fastest: {counted(fastest.devices, 'device')}. Cheapest: {cheapest.devices}; the fastest takes "
        f"{percent(more)} more device-hours and is {fastest.rate / cheapest.rate:.2g} x as fast."
    )


def print_goals(console: Console, goals: BatchGoals) -> None:
    for source in goals.goal.sources:
        console.print(source, markup=False)
    soonest, cheapest = goals.soonest, goals.cheapest
    table = _table("devices", "batch", "steps", "step", "to the target", "device-hours", last="")
    for run in sorted(goals.runs, key=lambda run: (run.devices, run.batch)):
        marks = [word for word, other in (("soonest", soonest), ("cheapest", cheapest)) if run is other]
        table.add_row(*_run_cells(run), ", ".join(marks) or run.outcome.reason)
    console.print(table)
    if soonest is None or cheapest is None:
        console.print("Nothing fits with any batch.\n")
        return
    console.print(f"Batch {soonest.batch} on {counted(soonest.devices, 'device')} ends soonest.", markup=False)
    for words in _fewer_words(goals, soonest):
        console.print(words, markup=False)
    console.print()


def _run_cells(run: BatchRun) -> tuple[str, ...]:
    counts = (str(run.devices), str(run.batch), f"{run.steps:,.0f}")
    if run.outcome.best is None:
        return (*counts, "", "", "")
    step = pretty_seconds(run.outcome.best[1].step_seconds)
    return (*counts, step, _long(run.seconds), _hours(run.device_hours))


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _long(seconds: float) -> str:
    return f"{seconds / 86400:,.1f} days" if seconds >= 2 * 86400 else pretty_seconds(seconds)


def _fewer_words(goals: BatchGoals, soonest: BatchRun) -> list[str]:
    """Where fewer devices end sooner, or later but for less."""
    by_devices = goals.best_of_devices()
    most = max(by_devices)
    lines = []
    if soonest.devices < most:
        times = by_devices[most].seconds / soonest.seconds
        lines.append(f"Fewer devices end sooner: {most} take {times:.2f} x as long as {soonest.devices}.")
    for devices, run in by_devices.items():
        if devices >= soonest.devices or run.device_hours >= soonest.device_hours:
            continue
        saved, later = 1 - run.device_hours / soonest.device_hours, run.seconds / soonest.seconds
        words = f"{counted(devices, 'device')} with batch {run.batch} end {later:.2f} x as late"
        lines.append(f"{words} for {percent(saved)} fewer device-hours.")
    return lines


_PLOT_WIDTH, _PLOT_HEIGHT = 64, 12


def print_front(console: Console, front: MemoryFront, memory_bytes: int) -> None:
    console.print("the time-memory front: the fastest plan for each memory", style="bold")
    if not front.points:
        console.print("No plan runs, however much memory there is.\n")
        return
    for line in plot(front) if len(front.points) > 1 else ():
        console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)
    table = _table("memory", "step", "")
    fastest = front.points[-1]
    for point in front.points:
        slower = point.seconds / fastest.seconds - 1
        words = f"{percent(slower)} slower" if slower else "fastest"
        here = "" if point.peak_bytes <= memory_bytes else " (not here)"
        cells = (pretty_bytes(point.peak_bytes) + here, pretty_seconds(point.seconds), words)
        table.add_row(*cells, short_plan(point.scored[0]))
    console.print(table)
    console.print(f"More than {pretty_bytes(fastest.peak_bytes)} buys nothing.\n")


def plot(front: MemoryFront) -> list[str]:
    """Seconds over bytes, both by their logarithms, in plain characters."""
    points = front.points
    low, high = points[0].peak_bytes, points[-1].peak_bytes
    slow, fast = points[0].seconds, points[-1].seconds

    def place(value: float, start: float, end: float, size: int) -> int:
        return round(math.log(value / start) / math.log(end / start) * (size - 1)) if start != end else 0

    columns = [place(point.peak_bytes, low, high, _PLOT_WIDTH) for point in points]
    heights = [place(point.seconds, slow, fast, _PLOT_HEIGHT) for point in points]
    rows = [[" "] * _PLOT_WIDTH for _ in range(_PLOT_HEIGHT)]
    for start, end, height in zip(columns, columns[1:], heights, strict=False):
        rows[height][start:end] = "-" * (end - start)
    for column, height in zip(columns, heights, strict=True):
        rows[height][column] = "o"
    labels = {0: pretty_seconds(slow), _PLOT_HEIGHT - 1: pretty_seconds(fast)}
    lines = [f"{labels.get(i, ''):>10} |{''.join(row)}".rstrip() for i, row in enumerate(rows)]
    ends = f"{pretty_bytes(low)}{pretty_bytes(high):>{_PLOT_WIDTH - len(pretty_bytes(low))}}"
    return [*lines, f"{'':>10} +{'-' * _PLOT_WIDTH}", f"{'':>12}{ends}"]
