"""Plans, forecasts and timelines as a person would like to read them."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.simulate.forecast import Forecast


def stdout() -> Console:
    # A pipe has no width of its own; cutting a table there would lose words.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def mesh_of(plan: Plan) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "1"


def print_forecast(console: Console, plan: Plan, forecast: Forecast, title: str) -> None:
    console.print(f"[bold]{title}[/bold]")
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for technique in plan.in_phase_order():
        table.add_row("technique", str(technique))
    table.add_row("mesh", f"{mesh_of(plan)} ({plan.num_ranks} ranks)")
    table.add_row(
        "batch",
        f"{plan.batch} samples = {plan.num_replicas} replicas x {plan.num_microbatches} microbatches "
        f"of {plan.microbatch}",
    )
    table.add_row(
        "step",
        f"{pretty_seconds(forecast.step_seconds)} "
        f"({pretty_seconds(forecast.step_seconds_low)} to {pretty_seconds(forecast.step_seconds_high)})",
    )
    table.add_row(f"{forecast.counts}/s", f"{pretty_count(forecast.tokens_per_second)}, MFU {forecast.mfu:.1%}")
    parts = ", ".join(f"{name} {pretty_bytes(size)}" for name, size in forecast.peak_bytes_by_category.items() if size)
    table.add_row("memory", _memory_words(forecast))
    table.add_row("", f"[dim]{parts}[/dim]")
    table.add_row("bound by", forecast.bottleneck)
    console.print(table)


def _memory_words(forecast: Forecast) -> str:
    words = f"{pretty_bytes(forecast.peak_bytes)} of {pretty_bytes(forecast.memory_bytes)}"
    if forecast.peak_reserved_bytes > forecast.peak_allocated_bytes:
        words += f"; torch reserves {pretty_bytes(forecast.peak_reserved_bytes)}"
    if forecast.fits:
        return words
    over = forecast.peak_bytes - forecast.memory_bytes
    missing = f"{pretty_bytes(over)} too much" if over > 0 else "too much in pieces"
    largest = max(forecast.peak_bytes_by_category, key=lambda name: forecast.peak_bytes_by_category[name])
    return f"{words}: does not fit, {missing}; most of it {largest}"


def print_ranked(console: Console, ranked: tuple[tuple[Plan, Forecast], ...]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 1))
    for name in ("", "step", f"{ranked[0][1].counts}/s", "MFU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for rank, (plan, forecast) in enumerate(ranked, start=1):
        table.add_row(
            str(rank),
            pretty_seconds(forecast.step_seconds),
            pretty_count(forecast.tokens_per_second),
            f"{forecast.mfu:.1%}",
            pretty_bytes(forecast.peak_bytes),
            str(plan),
        )
    console.print(table)


def write_output(path: str, text: str) -> None:
    """Write a file the user named, or say why not."""
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror}."
        raise MeshwrightError([Problem(where=path, what=what)]) from None
