"""`mw train`: plan, say what it will cost, start the ranks, and compare with what was promised."""

from __future__ import annotations

import functools
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.cli.show import print_forecast, progress
from meshwright.core.errors import MeshwrightError
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.runtime.config import RunConfig, read_run
from meshwright.runtime.prepare import (
    Prepared,
    job_arguments,
    open_data,
    open_folder,
    prepare,
    write_prepared,
)
from meshwright.runtime.progress import held_out_text
from meshwright.supervise.environment import outside_launcher
from meshwright.supervise.launch import launch


def run(arguments: Namespace) -> int:
    place = outside_launcher(os.environ)
    config = read_run(arguments.run, arguments.changes)
    folder = Path(config.run.folder)
    console = Console(stderr=True, highlight=False)
    if place is not None:
        from meshwright.runtime.outside import run_outside

        before = functools.partial(describe, console, config)
        after = functools.partial(close, console, arguments.run, config)
        return run_outside(config, arguments.plan, place, before, after)
    with open_folder(folder):
        if _is_finished(config, folder):
            console.print(f"{folder} has its {config.train.steps} steps; raise train.steps to go on.")
            return 0
        open_data(config)  # what is wrong with the data is told before anything is measured or started
        prepared = prepare(config, arguments.plan, progress)
        write_prepared(config, prepared)
        describe(console, config, prepared)
        outcome = launch(
            "meshwright.runtime.rank",
            job_arguments(config, prepared),
            prepared.plan.num_ranks,
            log_folder=folder / "logs",
            environment={"KINETO_LOG_LEVEL": "9"},  # the profiler's own chatter
        )
        if outcome.exit_code not in (0, 75):
            raise MeshwrightError(outcome.message(), outcome.exit_code)
        close(console, arguments.run, config, prepared)
    return outcome.exit_code


def _is_finished(config: RunConfig, folder: Path) -> bool:
    from meshwright.checkpoint.format import list_steps

    steps = list_steps(folder / "checkpoints")
    return bool(steps) and steps[-1] >= config.train.steps


def describe(console: Console, config: RunConfig, prepared: Prepared) -> None:
    size = pretty_count(prepared.profile.num_params)
    console.print(f"{config.model.title}: {size} parameters, {prepared.profile.num_blocks} blocks")
    if prepared.found is not None:
        console.print(
            f"{prepared.found.evaluated:,} plans priced for {prepared.cluster.name} "
            f"({prepared.cluster.num_devices} devices) in {prepared.found.search_seconds:.2f} s"
        )
    print_forecast(console, prepared.plan, prepared.forecast, "the plan")
    if not prepared.forecast.fits:
        console.print("[bold red]this plan is not expected to fit[/bold red]")


def close(console: Console, run_file: str, config: RunConfig, prepared: Prepared) -> None:
    """Predicted against measured, worst first, and what to try next."""
    folder = Path(config.run.folder)
    path = folder / "result.json"
    if not path.exists():
        return
    result = json.loads(path.read_text(encoding="utf-8"))
    forecast = prepared.forecast
    rows = []
    if result["step_seconds"]:
        tokens = config.train.batch * config.sequence / result["step_seconds"]
        rows.append(("step", forecast.step_seconds, result["step_seconds"], pretty_seconds))
        counted = "tokens" if prepared.profile.counts == "tokens" else "samples"
        rows.append((f"{counted}/s", forecast.tokens_per_second, tokens, pretty_count))
    rows.append(("peak memory of a rank", forecast.peak_bytes, result["peak_bytes"], pretty_bytes))
    rows.sort(key=lambda row: -abs(row[1] / row[2] - 1))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for name, predicted, measured, pretty in rows:
        table.add_row(name, pretty(predicted), pretty(measured), f"{predicted / measured - 1:+.0%}")
    console.print()
    console.print(table)
    if result["held_out"]:
        console.print(f"held-out: {held_out_text(result['held_out'])}")
    if result["stopped"]:
        console.print(f"stopped at step {result['step']} and saved; the same command goes on from there")
    console.print(f"written to {folder}: metrics.jsonl, tensorboard/, checkpoints/, measured.trace.json")
    console.print(
        f"next: mw check {run_file}   (is this plan exact?)\n"
        f"      mw ckpt verify {folder}   (are the checkpoints whole?)\n"
        f"      open {folder}/measured.trace.json and predicted.trace.json in ui.perfetto.dev"
    )
    sys.stderr.flush()
