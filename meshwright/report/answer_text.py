"""An `Answer` for people: the ranked table, where the winner's time and memory go, its mesh on the machine, why it won;
then what else was asked: why, what if, other numbers of devices, other batches, the front."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table

from meshwright.ask.answer import Answer
from meshwright.ask.explain import differences, percent, running_out_words
from meshwright.ask.memory import MemoryFront
from meshwright.ask.sizes import KNEE, BatchGoals, DeviceCounts
from meshwright.ask.what_if import ComparedPlans
from meshwright.ask.why import Why
from meshwright.core.units import counted, pretty_bytes, pretty_count, pretty_seconds
from meshwright.core.wrapping import wrapped
from meshwright.planner.search import ScoredPlan, SearchResult
from meshwright.report.mesh_picture import mesh_picture
from meshwright.report.terminal import FigureTable, mfu_words, print_ranked, short_plan

_BAR = 24
_WIDE = 110
"""Columns from which two tables stand side by side."""
_AS_FAST = 0.005
_WORTH_IT = 0.9
"""Share of a device's rate that further devices should keep for them to be worth having."""
_PLOT_WIDTH, _PLOT_HEIGHT = 64, 12


def print_answer(console: Console, answer: Answer, printed: Answer | None = None) -> None:
    """The parts that it has beyond `printed`, an earlier state of the same answer."""
    before = printed or Answer(request=answer.request, question=answer.question)
    if answer.batch_goals is not None and before.batch_goals is None:
        _print_goals(console, answer.batch_goals)
    if answer.device_counts is not None and before.device_counts is None:
        _print_device_counts(console, answer.device_counts, answer.request.tokens)
    if answer.result is not None and before.result is None:
        _print_result(console, answer, answer.result)
    if answer.ways_out is not None and before.ways_out is None:
        found = "\nWays out, least device time for a token first:"
        if answer.best is not None:
            gap = pretty_bytes(answer.ways_out.missing_bytes)
            found = f"\nIn the device's memory alone nothing fits, by {gap}. Instead of this plan:"
        elif not answer.ways_out.open:
            found = "\nNo way out was found."
        console.print(found)
        for number, way in enumerate(answer.ways_out.open, start=1):
            assert way.outcome.best is not None, "a way out leads to a plan"
            plan, forecast = way.outcome.best
            each = f"{_rate(way.outcome.best)} ({pretty_count(forecast.tokens_per_second / plan.num_ranks)} a device)"
            memory = f"{pretty_bytes(forecast.peak_bytes)} of {pretty_bytes(forecast.memory_bytes)}"
            step = f"{'at most ' * way.is_bound}{pretty_seconds(forecast.step_seconds)} a step"
            if answer.best is not None:
                step += f" ({_against(way.outcome.best, answer.best)})"
            words = shlex.join(way.command(answer.request.command))
            console.print(f"{number}. {way.cost}: {step}, {each}, {memory}\n   {short_plan(plan)}")
            console.print(wrapped(f"   {words}", console.width, more="  ", end=" \\"))
        for line in answer.ways_out.closed:
            console.print(line)
    if answer.exchange is not None and before.exchange is None:
        for line in answer.exchange.lines():
            console.print(line)
    for why in answer.why[len(before.why) :]:
        _print_why(console, why)
    if answer.what_if is not None and before.what_if is None:
        _print_what_if(console, answer.what_if)
    if answer.front is not None and before.front is None:
        front, memory_bytes = answer.front, answer.question.machine.device.memory_bytes
        console.print("the time-memory front: the fastest plan for each memory", style="bold")
        for line in plot(front, console.width) if len(front.points) > 1 else ():
            console.print(line)
        table = FigureTable("memory", "step", "")
        for point in front.points:
            slower = point.seconds / front.points[-1].seconds - 1
            words = f"{percent(slower)} slower" if slower else "fastest"
            here = "" if point.peak_bytes <= memory_bytes else " (not here)"
            cells = (pretty_bytes(point.peak_bytes) + here, pretty_seconds(point.scored.forecast.step_seconds), words)
            table.add_row(*cells, short_plan(point.scored.plan))
        if front.points:
            console.print(table)
            console.print(f"More than {pretty_bytes(front.points[-1].peak_bytes)} buys nothing.\n")
        else:
            console.print("No plan runs, however much memory there is.\n")
    if answer.suggested and not before.suggested:
        console.print()
        for compared in answer.suggestions:
            console.print(f"what if {compared.words}: {worth_words(compared)}")
        if not answer.suggestions:
            flags = ", ".join(f"--what-if {change}" for change in answer.suggested)
            console.print(f"what if: ask {flags}")
        console.print()


def _print_result(console: Console, answer: Answer, result: SearchResult) -> None:
    question, best = answer.question, result.best
    profile, cluster = question.profile, question.machine
    length = f"sequence {question.sequence}, " if profile.counts == "tokens" else ""
    limit = f", at most {pretty_bytes(question.max_memory_bytes)} a device" if question.max_memory_bytes else ""
    size = f"{pretty_count(profile.num_params)} parameters"
    if (num_trained := profile.num_trained_params) < profile.num_params:
        size += f", {pretty_count(num_trained)} trained"
    optimizer = getattr(question.optimizer, "name", "adamw")
    by = f" by {optimizer}" if optimizer != "adamw" else ""
    console.print(
        f"{profile.name} ({size}{by}) on {cluster.name}{limit}, "
        f"{length}batch {question.batch}: {result.evaluated:,} plans in {result.search_seconds:.2f} s\n"
    )
    if answer.request.is_narrow and best is not None:  # the winner in a line, before something else about it
        held = f"{pretty_bytes(best.forecast.peak_bytes)} of {pretty_bytes(best.forecast.memory_bytes)}"
        step = pretty_seconds(best.forecast.step_seconds)
        console.print(f"best: {short_plan(best.plan)}")
        console.print(f"{step} a step, {_rate(best)}, {held}; {best.forecast.bottleneck}\n")
        return
    if best is not None:
        print_ranked(console, result.ranked)
        plan, forecast = best
        console.print(f"\nPlan 1: a step of {plan.batch_words}; MFU {mfu_words(forecast)}\n")
        wide = max(4, min(_BAR, console.width - 28))
        time = _bars("the step", forecast.seconds_by_origin, forecast.step_seconds, pretty_seconds, wide)
        free = max(0, forecast.memory_bytes - forecast.peak_bytes)
        kept = {name: float(size) for name, size in forecast.peak_bytes_by_category.items() if size}
        memory = _bars("the fullest rank's memory", kept, forecast.memory_bytes, pretty_bytes, wide, free=free)
        if console.width >= _WIDE:
            both = Table.grid(padding=(0, 4, 0, 0))
            both.add_row(time, memory)
            console.print(both)
        else:
            console.print(time)
            console.print(memory)
        if forecast.peak_reserved_bytes > forecast.peak_allocated_bytes:
            console.print(f"torch's allocator reserves {pretty_bytes(forecast.peak_reserved_bytes)}")
        whole = question.memory_of(forecast.memory_bytes)
        words = f"{pretty_bytes(forecast.memory_bytes)} of {pretty_bytes(whole)} may be used"
        out = f"; {running_out_words(forecast, whole)}" if cluster.device.kind == "cuda" else ""
        console.print(f"headroom {question.headroom:g} %: {words}{out}")
        console.print()
        for line in mesh_picture(plan, question.cluster, console.width):
            console.print(line)
        console.print()
    if result.is_interrupted:
        console.print(f"stopped before {'the end: the best so far' if best else 'a plan was found'}\n")
        if best is None:
            return
    for line in answer.explanation:
        console.print(line)
    for what in question.profile.unpriced:
        console.print(f"not counted, or roughly: {what}")


def _rate(scored: ScoredPlan) -> str:
    return f"{pretty_count(scored.forecast.tokens_per_second)} {scored.forecast.counts}/s"


def _bars(
    title: str, parts: Mapping[str, float], total: float, pretty: Callable[[float], str], wide: int, free: float = 0
) -> Table:
    """Largest first; `free` is what is left of the total."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(title, min_width=max(map(len, parts), default=4))
    table.add_column("", no_wrap=True, width=wide)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    rows = sorted(parts.items(), key=lambda item: -item[1])
    for name, size in [*rows, *([("free", free)] if free else [])]:
        share = size / total
        bar = ("░" if name == "free" else "█") * round(wide * min(share, 1)) or "▏"
        table.add_row(name, bar, f"{share:.0%}".replace("%", " %"), pretty(size))
    return table


def _against(other: ScoredPlan, best: ScoredPlan) -> str:
    """By tokens a second, so that another batch compares too."""
    ratio = best.tokens_to_target_per_second / other.tokens_to_target_per_second
    if abs(ratio - 1) < _AS_FAST:
        return "as fast"
    if ratio < 1:
        return f"{percent(1 / ratio - 1)} faster" if ratio > 0.5 else f"{1 / ratio:.1f} x faster"
    return f"{percent(ratio - 1)} slower" if ratio < 2 else f"{ratio:.1f} x slower"


def _print_why(console: Console, why: Why) -> None:
    wished = f" (you asked: {why.wished})" if why.wished else ""
    console.print(f"why {why.knob} is {why.value}{wished}", style="bold")
    plans = [why.best, *(other.best for other in why.others if other.best is not None)]
    target = ["to target"] * any(each.plan.steps_factor.source for each in plans)

    def figures(scored: ScoredPlan) -> list[str]:
        seconds = [scored.forecast.step_seconds, *[scored.seconds_to_target] * len(target)]
        return [*map(pretty_seconds, seconds), pretty_bytes(scored.forecast.peak_bytes)]

    table = FigureTable("", "step", *target, "memory", "", last="what differs, or why not")
    table.add_row(f"{why.value} (best)", *figures(why.best), "", "")
    for other in why.others:
        if other.best is None:
            table.add_row(other.words, *[""] * (len(target) + 3), other.reason)
            continue
        differs = "; ".join(differences(why.best.plan, other.best.plan))
        table.add_row(other.words, *figures(other.best), _against(other.best, why.best), differs)
    console.print(table)
    for note in why.notes:
        console.print(note)
    possible = [other for other in why.others if other.best is not None]
    nearest = max(possible, key=lambda other: other.best.tokens_to_target_per_second if other.best else 0, default=None)
    if nearest is None or nearest.best is None:
        console.print("Nothing else is possible.\n")
        return
    memory = nearest.best.forecast.peak_bytes - why.best.forecast.peak_bytes
    more = f", with {pretty_bytes(abs(memory))} {'more' if memory > 0 else 'less'} memory" if memory else ""
    console.print(f"The next best, {nearest.words}, is {_against(nearest.best, why.best)}{more}.\n")


def _print_what_if(console: Console, compared: ComparedPlans) -> None:
    console.print(f"what if {compared.words}", style="bold")
    after, before = compared.after, compared.before
    if after.best is None:
        console.print(f"no plan then: {after.reason}\n")
        return
    table = FigureTable("", "devices", "step", f"{after.best.forecast.counts}/s", "memory")
    for words, scored in (("now", before), ("then", after.best)):
        if scored is None:
            table.add_row(words, "", "nothing fits", "", "", "")
            continue
        plan, forecast = scored
        memory = f"{pretty_bytes(forecast.peak_bytes)} of {pretty_bytes(forecast.memory_bytes)}"
        rate = pretty_count(forecast.tokens_per_second)
        table.add_row(words, str(plan.num_ranks), pretty_seconds(forecast.step_seconds), rate, memory, short_plan(plan))
    console.print(table)
    if before is not None:
        for line in differences(before.plan, after.best.plan) or ("the same plan",):
            console.print(f"  {line}")
    console.print(worth_words(compared) + "\n")


def worth_words(compared: ComparedPlans) -> str:
    """What it buys in percent, and for each device where their number changes."""
    if compared.after.best is None:
        return f"no plan: {compared.after.reason}"
    ratio, devices = compared.rate_ratio, compared.device_ratio
    counts = compared.after.best.forecast.counts
    if ratio is None:
        return f"something fits: {pretty_count(compared.after.best.forecast.tokens_per_second)} {counts}/s"
    is_priced = any(each.plan.steps_factor.source for each in (compared.after.best, compared.before) if each)
    unit = f"{counts}/s" + ", by what is learnt from them," * is_priced
    gain = "buys nothing" if abs(ratio - 1) < _AS_FAST else f"{percent(ratio - 1)} more {unit}"
    if ratio < 1 - _AS_FAST:
        gain = f"{percent(1 - ratio)} fewer {unit}"
    if devices == 1:
        return gain
    each = ratio / devices
    if devices < 1:
        verdict = "each does more" if each > 1 + _AS_FAST else "each does as much" if each > 1 - _AS_FAST else "a loss"
        return f"{gain} with {percent(1 - devices)} fewer devices: {percent(each)} of a device's rate now, {verdict}"
    verdict = "worth it" if each >= _WORTH_IT else "hardly worth it" if ratio > 1 + _AS_FAST else "not worth it"
    return f"{gain} for {percent(devices - 1)} more devices: {percent(each)} of a device's rate now, {verdict}"


def _print_device_counts(console: Console, sizes: DeviceCounts, tokens: float) -> None:
    counts = next((size.outcome.best.forecast.counts for size in sizes.tried if size.outcome.best), "tokens")
    amount = f"{pretty_count(tokens).replace(' ', '')} {counts}"
    table = FigureTable("devices", "", "step", f"{counts}/s", "a device", f"device-hours for {amount}")
    for size in sizes.tried:
        best = size.outcome.best
        if best is None:
            table.add_row(str(size.devices), size.outcome.words, "", "", "", "", size.outcome.reason)
            continue
        table.add_row(
            str(size.devices),
            size.outcome.words,
            pretty_seconds(best.forecast.step_seconds),
            pretty_count(size.rate),
            pretty_count(size.rate / size.devices),
            _hours(size.device_hours(tokens)),
            short_plan(best.plan),
        )
    console.print(table)
    fastest, cheapest = sizes.fastest, sizes.cheapest
    if fastest is None or cheapest is None:
        console.print("Nothing fits on any of them.\n")
        return
    if fastest.devices == cheapest.devices:
        console.print(f"Fastest and cheapest: {counted(fastest.devices, 'device')}.\n")
        return
    more = fastest.device_hours(tokens) / cheapest.device_hours(tokens) - 1
    console.print(
        f"Fastest: {counted(fastest.devices, 'device')}. Cheapest: {cheapest.devices}; the fastest takes "
        f"{percent(more)} more device-hours and is {fastest.rate / cheapest.rate:.2g} x as fast.\n"
    )


def _print_goals(console: Console, goals: BatchGoals) -> None:
    for source in goals.goal.sources:
        console.print(source)
    soonest, cheapest = goals.soonest, goals.cheapest
    table = FigureTable("devices", "batch", "steps", "step", "to the target", "device-hours", last="")
    for run in sorted(goals.runs, key=lambda run: (run.devices, run.batch)):
        marks = [word for word, other in (("soonest", soonest), ("cheapest", cheapest)) if run is other]
        cells = ("", "", "")
        if run.outcome.best is not None:
            days = run.seconds / 86400
            until = f"{days:,.1f} days" if days >= 2 else pretty_seconds(run.seconds)
            cells = (pretty_seconds(run.outcome.best.forecast.step_seconds), until, _hours(run.device_hours))
        counts = (str(run.devices), str(run.batch), f"{run.steps:,.0f}")
        table.add_row(*counts, *cells, ", ".join(marks) or run.outcome.reason)
    console.print(table)
    if soonest is None or cheapest is None:
        console.print("Nothing fits with any batch.\n")
        return
    console.print(f"Batch {soonest.batch} on {counted(soonest.devices, 'device')} ends soonest.")
    third, triple = (run.batch if run else 0 for run in map(goals.soonest_if, (1 / 3, 3)))
    unfit = sorted({run.batch for run in goals.runs if run.outcome.best is None})
    rules_out = f"rules out batches of {unfit[0]} to {unfit[-1]}" if unfit else "sets no limit on the batch"
    lines = [f"Memory {rules_out}: a larger one runs in more microbatches."]
    if (knee := goals.knee) is not None:
        lines.append(f"Throughput alone: from batch {knee} on it is within {percent(1 - KNEE)} of the highest.")
    if any("critical batch" in source and "a guess" in source for source in goals.goal.sources):
        lines.append(
            "How many steps a batch needs is not forecast: it follows from the noise of the gradients, which only "
            f"training shows. With a critical batch a third as large batch {third} would end soonest, with one three "
            f"times as large batch {triple}. Losses and learning rates are not modelled."
        )
    console.print("\n".join(lines))
    by_devices = goals.best_of_devices()
    most = max(by_devices)
    if soonest.devices < most:
        times = by_devices[most].seconds / soonest.seconds
        console.print(f"Fewer devices end sooner: {most} take {times:.2f} x as long as {soonest.devices}.")
    for devices, run in by_devices.items():  # which end later, but for less
        if devices < soonest.devices and run.device_hours < soonest.device_hours:
            saved, later = 1 - run.device_hours / soonest.device_hours, run.seconds / soonest.seconds
            words = f"{counted(devices, 'device')} with batch {run.batch} end {later:.2f} x as late"
            console.print(f"{words} for {percent(saved)} fewer device-hours.")
    console.print()


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def plot(front: MemoryFront, width: int = 80) -> list[str]:
    """Seconds over bytes, both by their logarithms, in plain characters."""
    points, columns_wide = front.points, max(16, min(_PLOT_WIDTH, width - 12))
    low, high = points[0].peak_bytes, points[-1].peak_bytes
    slow, fast = points[0].seconds, points[-1].seconds

    def place(value: float, start: float, end: float, size: int) -> int:
        return round(math.log(value / start) / math.log(end / start) * (size - 1)) if start != end else 0

    columns = [place(point.peak_bytes, low, high, columns_wide) for point in points]
    heights = [place(point.seconds, slow, fast, _PLOT_HEIGHT) for point in points]
    rows = [[" "] * columns_wide for _ in range(_PLOT_HEIGHT)]
    for start, end, height in zip(columns, columns[1:], heights, strict=False):
        rows[height][start:end] = "-" * (end - start)
    for column, height in zip(columns, heights, strict=True):
        rows[height][column] = "o"
    labels = {0: pretty_seconds(slow), _PLOT_HEIGHT - 1: pretty_seconds(fast)}
    lines = [f"{labels.get(i, ''):>10} |{''.join(row)}".rstrip() for i, row in enumerate(rows)]
    ends = f"{pretty_bytes(low)}{pretty_bytes(high):>{columns_wide - len(pretty_bytes(low))}}"
    return [*lines, f"{'':>10} +{'-' * columns_wide}", f"{'':>12}{ends}"]
