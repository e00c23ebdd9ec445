"""The answer of `mw plan`: the ranked table, where the winner's time and memory go, its mesh on the machine, why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from meshwright.ask.explain import explain
from meshwright.ask.question import Question
from meshwright.ask.ways_out import WayOut
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.planner.search import Scored, SearchResult
from meshwright.report.mesh_picture import mesh_picture
from meshwright.report.terminal import print_ranked, short_plan

_BAR = 24
_WIDE = 110
"""Columns from which two tables stand side by side."""


def print_head(console: Console, question: Question, found: SearchResult) -> None:
    profile, cluster = question.profile, question.machine
    length = f"sequence {question.sequence}, " if profile.counts == "tokens" else ""
    limit = f", at most {pretty_bytes(question.max_memory_bytes)} a device" if question.max_memory_bytes else ""
    console.print(
        f"{profile.name} ({pretty_count(profile.num_params)} parameters) on {cluster.name}{limit}, "
        f"{length}batch {question.batch}: {found.evaluated:,} plans in {found.search_seconds:.2f} s\n",
        markup=False,
    )


def print_answer(console: Console, question: Question, found: SearchResult) -> None:
    if found.best is not None:
        print_ranked(console, found.ranked)
        console.print()
        _print_winner(console, question, found.best)
        console.print()
    if found.is_interrupted:
        console.print(f"stopped before {'the end: the best so far' if found.best else 'a plan was found'}\n")
        if found.best is None:
            return
    for line in explain(found, question.machine):
        console.print(line, markup=False)
    for what in question.profile.unpriced:
        console.print(f"not counted, or roughly: {what}", markup=False)


def print_short(console: Console, found: SearchResult) -> None:
    """The winner in a line, before something else about it."""
    if found.best is None:
        return
    plan, told = found.best
    console.print(f"best: {short_plan(plan)}", markup=False)
    memory = f"{pretty_bytes(told.peak_bytes)} of {pretty_bytes(told.memory_bytes)}"
    console.print(f"{pretty_seconds(told.step_seconds)} a step, {_rate(found.best)}, {memory}; {told.bottleneck}\n")


def _rate(scored: Scored) -> str:
    return f"{pretty_count(scored[1].tokens_per_second)} {scored[1].counts}/s"


def _print_winner(console: Console, question: Question, best: Scored) -> None:
    plan, told = best
    console.print(f"Plan 1: a step of {plan.batch_words}\n")
    time = _bars("the step", told.seconds_by_origin, told.step_seconds, pretty_seconds)
    free = max(0, told.memory_bytes - told.peak_bytes)
    kept = {name: float(size) for name, size in told.peak_bytes_by_category.items() if size}
    memory = _bars("the fullest rank's memory", kept, told.memory_bytes, pretty_bytes, free=free)
    if console.width >= _WIDE:
        both = Table.grid(padding=(0, 4, 0, 0))
        both.add_row(time, memory)
        console.print(both)
    else:
        console.print(time)
        console.print(memory)
    if told.peak_reserved_bytes > told.peak_allocated_bytes:
        console.print(f"torch's allocator reserves {pretty_bytes(told.peak_reserved_bytes)}")
    console.print()
    for line in mesh_picture(plan, question.cluster, console.width):
        console.print(line, markup=False, no_wrap=True, overflow="ignore", crop=False)


def _bars(title: str, parts: Mapping[str, float], total: float, pretty: object, free: float = 0) -> Table:
    """Largest first; `free` is what is left of the total."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(title, no_wrap=True)
    table.add_column("", no_wrap=True, width=_BAR)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    rows = sorted(parts.items(), key=lambda item: -item[1])
    for name, size in [*rows, *([("free", free)] if free else [])]:
        share = size / total
        bar = ("░" if name == "free" else "█") * round(_BAR * min(share, 1)) or "▏"
        table.add_row(name, bar, f"{share:.0%}".replace("%", " %"), pretty(size))  # type: ignore[operator]
    return table


def print_ways_out(console: Console, ways: Sequence[WayOut], closed: Sequence[str]) -> None:
    console.print("\nWays out, each searched:" if ways else "\nNo way out was found.")
    for number, way in enumerate(ways, start=1):
        assert way.outcome.best is not None, "a way out leads to a plan"
        plan, told = way.outcome.best
        each = told.tokens_per_second / plan.num_ranks
        console.print(
            f"{number}. {way.words}: {pretty_seconds(told.step_seconds)} a step, {_rate(way.outcome.best)} "
            f"({pretty_count(each)} a device), {pretty_bytes(told.peak_bytes)} of {pretty_bytes(told.memory_bytes)}\n"
            f"   {short_plan(plan)}",
            markup=False,
        )
    for line in closed:
        console.print(line, markup=False)
