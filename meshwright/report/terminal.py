"""Plans, forecasts and timelines as a person would like to read them."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.core.errors import Problem, error_at
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.core.units import counted, pretty_bytes, pretty_count, pretty_seconds
from meshwright.simulator.forecast import Forecast

if TYPE_CHECKING:
    from rich.console import Console  # imported where it draws: JSON needs none of it
    from rich.table import Table


def stdout() -> Console:
    from rich.console import Console

    # A pipe has no width of its own; cutting a table there would lose words.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


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
    from rich.table import Table

    console.print(f"[bold]{title}[/bold]")
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 2))
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
    table.add_row("", f"[dim]90 % within, by {forecast.interval_basis}[/dim]")
    table.add_row(f"{forecast.counts}/s", pretty_count(forecast.tokens_per_second))
    table.add_row("MFU", mfu_words(forecast))
    parts = ", ".join(f"{name} {pretty_bytes(size)}" for name, size in forecast.peak_bytes_by_category.items() if size)
    words = f"{pretty_bytes(forecast.peak_bytes)} of {pretty_bytes(forecast.memory_bytes)}"
    if forecast.peak_reserved_bytes > forecast.peak_allocated_bytes:
        words += f"; torch reserves {pretty_bytes(forecast.peak_reserved_bytes)}"
    words += "".join(f"; {pretty_bytes(size)} on the {tier}" for tier, size in forecast.peak_bytes_by_tier.items())
    if not forecast.fits:
        over = forecast.peak_bytes - forecast.memory_bytes
        missing = f"{pretty_bytes(over)} too much" if over > 0 else "too much in pieces"
        largest = max(forecast.peak_bytes_by_category, key=lambda name: forecast.peak_bytes_by_category[name])
        words += f": does not fit, {missing}; most of it {largest}"
    table.add_row("memory", words)
    table.add_row("", f"[dim]{parts}[/dim]")
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
    told = [short_technique(technique) for technique in plan.in_phase_order()]
    shown = [words for words in told if words not in leaving]
    nothing = "nothing more" if told else "one device"
    groups = f", on groups {', '.join(map(str, plan.groups))}" if plan.groups else ""
    return f"{' + '.join(shown) or nothing}, microbatch {plan.microbatch} x {plan.microbatch_words}" + groups


def figures_table(*columns: str, last: str = "plan") -> Table:
    """Columns of figures, and a last one of words that may take several lines."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column(last, overflow="fold")
    return table


def print_ranked(console: Console, ranked: tuple[tuple[Plan, Forecast], ...]) -> None:
    """What all plans have is said once, above the table."""
    told = [frozenset(short_technique(technique) for technique in plan.techniques) for plan, _ in ranked]
    common = frozenset.intersection(*told) if len(told) > 1 else frozenset()
    if common:
        shared = [words for t in ranked[0][0].in_phase_order() if (words := short_technique(t)) in common]
        console.print(f"All plans below have {' + '.join(shared)}.")
    has = pretty_bytes(ranked[0][1].memory_bytes)
    table = figures_table("#", "step", "90 % within", f"{ranked[0][1].counts}/s", "MFU", f"of {has}")
    for rank, (plan, forecast) in enumerate(ranked, start=1):
        low, high = pretty_seconds(forecast.step_seconds_low), pretty_seconds(forecast.step_seconds_high)
        table.add_row(
            str(rank),
            pretty_seconds(forecast.step_seconds),
            f"{low} - {high}",
            pretty_count(forecast.tokens_per_second),
            f"{forecast.mfu:.1%}",
            pretty_bytes(forecast.peak_bytes),
            short_plan(plan, common),
            style="bold" if rank == 1 else "",
        )
    console.print(table)
    console.print(f"90 % within: by {ranked[0][1].interval_basis}.")


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
