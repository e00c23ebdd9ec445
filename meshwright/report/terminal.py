"""Plans, forecasts and timelines as a person would like to read them."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from meshwright.core.errors import Problem, error_at
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.core.units import counted, pretty_bytes, pretty_count, pretty_seconds
from meshwright.core.wrapping import width_of, wrapped
from meshwright.planner.scoreboard import TIE
from meshwright.simulator.forecast import Forecast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions  # imported where it draws: JSON needs none of it


def stdout() -> Console:
    return _console(sys.stdout, 140)


def stderr() -> Console:
    return _console(sys.stderr, 10_000)  # where it is a log, a message is a line


def _console(stream: TextIO, piped: int) -> Console:
    """One that breaks lines at words and cuts none."""
    from rich.console import Console

    made = Console(file=stream, highlight=False, markup=False, width=width_of(stream, piped))
    plain = made.print

    def show(*objects: Any, **how: Any) -> None:
        text = [wrapped(each, made.width) if isinstance(each, str) else each for each in objects]
        plain(*text, crop=False, overflow="ignore" if all(isinstance(each, str) for each in text) else None, **how)

    made.print = show  # type: ignore[method-assign]
    return made


def progress(text: str) -> None:
    print(wrapped(f"  {text}", width_of(sys.stderr)), file=sys.stderr, flush=True)


class Waiting:
    """Says what is being done, once it has taken two seconds."""

    PATIENCE_SECONDS = 2.0

    def __init__(self, text: str):
        self.text = text
        self.timer = threading.Timer(self.PATIENCE_SECONDS, lambda: progress(self.text))
        self.timer.daemon = True

    def __enter__(self) -> Waiting:
        self.timer.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.timer.cancel()

    def tell(self, text: str) -> None:
        self.text = text
        if self.timer.finished.is_set():
            progress(text)


def print_forecast(console: Console, plan: Plan, forecast: Forecast, title: str) -> None:
    console.print(title, style="bold")
    table = FigureTable("", last="")
    for technique in plan.in_phase_order():
        table.add_row("technique", str(technique))
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "1"
    table.add_row("mesh", f"{mesh} ({counted(plan.num_ranks, 'rank')})")
    table.add_row("batch", plan.batch_words)
    table.add_row(
        "step",
        f"{pretty_seconds(forecast.step_seconds)} "
        f"({pretty_seconds(forecast.step_seconds_low)} to {pretty_seconds(forecast.step_seconds_high)})",
    )
    table.add_row("", f"90 % within, by {forecast.interval_basis}", style="dim")
    table.add_row(f"{forecast.counts}/s", pretty_count(forecast.tokens_per_second))
    table.add_row("MFU", mfu_words(forecast))
    parts = ", ".join(f"{name} {pretty_bytes(size)}" for name, size in forecast.peak_bytes_by_category.items() if size)
    words = f"{pretty_bytes(forecast.peak_bytes)} of {pretty_bytes(forecast.memory_bytes)}"
    if forecast.peak_reserved_bytes > forecast.peak_allocated_bytes:
        words += f"; torch reserves {pretty_bytes(forecast.peak_reserved_bytes)}"
    words += "".join(f"; {pretty_bytes(size)} on the {tier}" for tier, size in forecast.peak_bytes_by_tier.items())
    if not forecast.fits:
        largest = max(forecast.peak_bytes_by_category, key=lambda name: forecast.peak_bytes_by_category[name])
        words += f": does not fit, {forecast.missing_words}; most of it {largest}"
    table.add_row("memory", words)
    table.add_row("", parts, style="dim")
    table.add_row("bound by", forecast.bottleneck)
    console.print(table)


def mfu_words(forecast: Forecast) -> str:
    share = f"{forecast.mfu:.1%}"
    if round(forecast.mfu, 3) == round(forecast.needed_fraction, 3):
        return share
    return f"{share} as it is published; {forecast.needed_fraction:.1%} of the peak with causal attention counted half"


def short_technique(technique: Technique) -> str:
    """`shard 8 stage 2`: its size, then what differs from the defaults."""
    words = [technique.name]
    for field in fields(technique):
        value = getattr(technique, field.name)
        if value == field.default:
            continue
        if field.name == "size":
            words.append(str(value))
        elif value is True:
            words.append(field.name)
        elif isinstance(value, tuple):  # (5, 5, 5, 4) as 5x3,4
            runs = [(each, len(list(group))) for each, group in itertools.groupby(value)]
            shown = ",".join(f"{each}x{count}" if count > 1 else str(each) for each, count in runs)
            words.append(f"{field.name} {shown}")
        else:
            words.append(f"{field.name} {value}")
    return " ".join(words)


def short_plan(plan: Plan, leaving: frozenset[str] = frozenset()) -> str:
    """A plan in a line; without the techniques in `leaving`, as they are written here."""
    names = [short_technique(technique) for technique in plan.in_phase_order()]
    shown = [words for words in names if words not in leaving]
    nothing = "nothing more" if names else "one device"
    groups = f", on groups {', '.join(map(str, plan.groups))}" if plan.groups else ""
    return f"{' + '.join(shown) or nothing}, microbatch {plan.microbatch} x {plan.microbatch_words}" + groups


class FigureTable:
    """Columns of figures, and a last one of words that may take several lines. Where the console is too narrow for it,
    each row is written as lines of its own."""

    def __init__(self, *columns: str, last: str = "plan"):
        self.columns = (*columns, last)
        self.rows: list[tuple[tuple[str, ...], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        every = [self.columns, *(cells for cells, _ in self.rows)]
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        left = options.max_width - sum(widths[:-1]) - 2 * len(widths) + 2
        last = [wrapped(cells[-1], left) for cells in every] if left >= min(24, widths[-1]) else []
        if last and max(len(line) for text in last for line in text.split("\n")) <= left:
            table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(self.columns))
            for name, *column in zip(*every, strict=True):
                is_figure = all(cell[0] in "=+-0123456789" for cell in column if cell)
                table.add_column(name, justify="right" if is_figure else "left", no_wrap=True)
            for (cells, style), text in zip(self.rows, last[1:], strict=True):
                table.add_row(*map(Text, (*cells[:-1], text)), style=style)
            yield table
            return
        for cells, style in self.rows:
            named = [f"{name} {cell}".strip() for name, cell in zip(self.columns[:-1], cells, strict=False) if cell]
            lines = [wrapped(", ".join(named), options.max_width, "  ")] if named else []
            lines += [wrapped(f"  {cells[-1]}", options.max_width)] if cells[-1] else []
            yield Text("\n".join(lines), style=style, no_wrap=True, overflow="ignore")


def print_ranked(console: Console, ranked: tuple[tuple[Plan, Forecast], ...]) -> None:
    """What all plans have is said once, above the table."""
    by_plan = [frozenset(short_technique(technique) for technique in plan.techniques) for plan, _ in ranked]
    common = frozenset.intersection(*by_plan) if len(by_plan) > 1 else frozenset()
    if common:
        shared = [words for t in ranked[0][0].in_phase_order() if (words := short_technique(t)) in common]
        console.print(f"All plans below have {' + '.join(shared)}.")
    has = pretty_bytes(ranked[0][1].memory_bytes)
    is_priced = any(plan.steps_factor.source for plan, _ in ranked)
    more = ["to target"] if is_priced else []
    table = FigureTable("#", "step", *more, "90 % within", f"{ranked[0][1].counts}/s", "MFU", f"of {has}")
    group: list[float] = []
    for rank, (plan, forecast) in enumerate(ranked, start=1):
        seconds = forecast.step_seconds * plan.steps_factor.mid
        group.append(seconds)
        is_tied = max(group) <= min(group) * (1 + TIE)
        group = group if is_tied else [seconds]
        low, high = pretty_seconds(forecast.step_seconds_low), pretty_seconds(forecast.step_seconds_high)
        table.add_row(
            f"= {rank}" if is_tied and rank > 1 else str(rank),
            pretty_seconds(forecast.step_seconds),
            *([pretty_seconds(seconds)] if is_priced else []),
            f"{low} - {high}",
            pretty_count(forecast.tokens_per_second),
            f"{forecast.mfu:.1%}",
            pretty_bytes(forecast.peak_bytes),
            short_plan(plan, common),
            style="bold" if rank == 1 else "",
        )
    console.print(table)
    if is_priced:
        console.print("to target: step times how many more steps the same loss needs; plans are ranked by it.")
    console.print(f"90 % within: by {ranked[0][1].interval_basis}.")
    if any(cells[0].startswith("=") for cells, _ in table.rows):
        console.print(
            f"=: as fast as the one above, within the {100 * TIE:g} % that forecasts cannot tell; simpler first"
        )


def unwritable(paths: Mapping[str, str | None]) -> list[Problem]:
    """Flag -> the file it names: what would keep it from being written, found before anything is computed."""
    problems = []
    for flag, path in paths.items():
        if not path:
            continue
        folder = Path(path).parent
        if not folder.is_dir():
            what = f"{path} cannot be written: the folder {folder} does not exist."
            fix = f"Make it: mkdir -p {shlex.quote(str(folder))}"
        elif Path(path).is_dir():
            what, fix = f"{path} is a folder.", "Name a file."
        elif not os.access(path if Path(path).exists() else folder, os.W_OK):
            what, fix = f"{path} cannot be written: permission denied.", "Name a file that you may write."
        else:
            continue
        problems.append(Problem(where=flag, what=what, fix=fix))
    return problems


def write_output(path: str, text: str) -> None:
    """Write a file the user named, or say why not."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise error_at(path, f"cannot be written: {error.strerror}.") from None
