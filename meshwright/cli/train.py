"""`mw train`: plan, say what it will cost, start the ranks, and compare with what was promised."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from meshwright.core.errors import MeshwrightError
from meshwright.core.files import write_whole
from meshwright.core.ledger import Entry
from meshwright.core.units import counted, pretty_bytes, pretty_count, pretty_seconds
from meshwright.launch.environment import outside_launcher
from meshwright.launch.local_ranks import Stopped, launch, stop_signals
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE
from meshwright.models.dimensions import DecoderConfig
from meshwright.report.overlay import PICTURE, overlay
from meshwright.report.terminal import print_forecast, progress
from meshwright.run.comparison import COMPARISON, Facts, as_data, compare, entry_of, keep, paragraph, record
from meshwright.run.model import describe_run
from meshwright.run.prepare import (
    PreparedRun,
    is_machine_known,
    job_arguments,
    open_data,
    open_folder,
    plan_to_run,
    prepare,
    problems_here,
    promise_of,
    write_prepared,
)
from meshwright.run.progress import held_out_text
from meshwright.run.run_file import RunConfig, read_run
from meshwright.run.trackers import require_trackers


def run(arguments: Namespace) -> int:
    place = outside_launcher(os.environ)
    config = read_run(arguments.run, arguments.changes)
    require_trackers(config.run.track)
    folder = Path(config.run.folder)
    console = Console(stderr=True, highlight=False)
    if place is not None:
        from meshwright.runtime.outside import run_outside

        def before(prepared: PreparedRun) -> None:
            warn(console, prepared)
            describe(console, config, prepared)

        after = functools.partial(close, console, _run_words(arguments), config)
        code = run_outside(config, arguments.plan, place, before, after)
        return _leave(code) if config.run.track else code
    description = describe_run(config)
    plan = plan_to_run(config, arguments.plan, description.profile)
    if problems := problems_here(config, plan):
        raise MeshwrightError(problems)
    with open_folder(folder):
        if _is_finished(config, folder):
            console.print(f"{folder} has its {counted(config.train.steps, 'step')}; raise train.steps to go on.")
            return 0
        # What is wrong with a plan is told before data is made ready, which may take hours; what is wrong with the data
        # before a machine is measured only to search.
        if plan is not None or is_machine_known(config):
            prepared = prepare(config, arguments.plan, progress, description=description)
            warn(console, prepared)
            config.train.require_tokenizer(open_data(config, description))
        else:
            config.train.require_tokenizer(open_data(config, description))
            prepared = prepare(config, arguments.plan, progress, description=description)
            warn(console, prepared)
        write_prepared(config, prepared)
        describe(console, config, prepared)
        with stop_signals() as stop:
            outcome = launch(
                "meshwright.runtime.rank",
                job_arguments(config, prepared),
                prepared.plan.num_ranks,
                log_folder=folder / "logs",
                environment={"KINETO_LOG_LEVEL": "9"},  # the profiler's own chatter
                stop=stop,
            )
            if outcome.exit_code not in (0, PREEMPTED_EXIT_CODE):
                raise MeshwrightError(outcome.message(), outcome.exit_code)
            if not close(console, _run_words(arguments), config, prepared) and outcome.exit_code:
                raise Stopped
    return outcome.exit_code


def _run_words(arguments: Namespace) -> list[str]:
    """The run as another command takes it: its file and what the command line changed."""
    return [arguments.run, *(word for change in arguments.changes for word in ("--set", change))]


def _leave(code: int) -> NoReturn:
    """At once: what a tracker has left running in this process must not hold up the end of the run."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_finished(config: RunConfig, folder: Path) -> bool:
    """Whether its last step is in a checkpoint whose every byte is right; else the ranks say what is wrong."""
    from meshwright.checkpoint.format import list_steps, newest_good, read_manifest

    steps = list_steps(folder / "checkpoints")
    if not steps or steps[-1] < config.train.steps:
        return False
    newest = newest_good(folder / "checkpoints", report=lambda text: None)
    return newest is not None and read_manifest(newest).step >= config.train.steps


def warn(console: Console, prepared: PreparedRun) -> None:
    forecast = prepared.forecast
    if not forecast.fits:
        beside = forecast.peak_bytes - forecast.peak_allocated_bytes
        needs = pretty_bytes(max(forecast.peak_bytes, forecast.peak_reserved_bytes + beside))
        told = f"a rank needs {needs} of {pretty_bytes(forecast.memory_bytes)}"
        console.print(f"[bold red]this plan is not expected to fit[/bold red]: {told}")


def describe(console: Console, config: RunConfig, prepared: PreparedRun) -> None:
    size = pretty_count(prepared.profile.num_params)
    console.print(f"{config.model.title}: {size} parameters, {counted(prepared.profile.num_blocks, 'block')}")
    if prepared.found is not None:
        console.print(
            f"{prepared.found.evaluated:,} plans priced for {prepared.cluster.name} "
            f"({counted(prepared.cluster.num_devices, 'device')}) in {prepared.found.search_seconds:.2f} s"
        )
    print_forecast(console, prepared.plan, prepared.forecast, "the plan")
    for technique in prepared.plan.techniques:
        if technique.exactness == "approximate":
            console.print(f"{technique} is approximate: one device computes other numbers", markup=False)


def close(console: Console, run_words: list[str], config: RunConfig, prepared: PreparedRun) -> bool:
    """What came of it: predicted against measured, worst first; how far it went; where things are; what to try next.

    False where no rank has left a result.
    """
    folder = Path(config.run.folder)
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    line = overlay(folder, f"{config.model.title} on {prepared.cluster.name}: {prepared.plan}")
    entry = _entry(config, prepared, result)
    summary = summarise(config, prepared, result) | {"comparison": {} if entry is None else entry.comparison}
    try:
        write_whole(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    except OSError as error:
        console.print(f"summary.json is not written: {error.strerror or error}")
    console.print()
    console.print(_compared(summary))
    for told in ([line] if line else []) + _told(summary, folder):
        console.print(told, markup=False, soft_wrap=True)
    if entry is not None and (reason := keep(entry, folder)):
        console.print(f"{COMPARISON} is not written: {reason}", soft_wrap=True)
    if entry is not None and (reason := record(entry)):
        console.print(f"this run is not in the ledger that mw probe --from-runs reads: {reason}", soft_wrap=True)
    ways = {
        shlex.join(["mw", "check", *run_words, "--plan", f"{folder}/plan.json"]): "is this plan exact?",
        shlex.join(["mw", "ckpt", "verify", str(folder)]): "are the checkpoints whole?",
    }
    traces = [name for name in ("measured.trace.json", "predicted.trace.json") if (folder / name).exists()]
    if traces:  # too few steps are not measured
        ways[f"open {folder}/{' and '.join(traces)} in ui.perfetto.dev"] = ""
    if summary["checkpoints"] and _can_export(config):
        is_theirs = isinstance(config.model.config(), DecoderConfig) or bool(config.model.hf)
        what = "the weights as a Hugging Face folder" if is_theirs else "the weights as safetensors"
        origin = ["--model", config.model.hf] if config.model.hf else []  # its names, and its tokenizer goes along
        ways[shlex.join(["mw", "ckpt", "export", str(folder), "OUT", *origin])] = what
    for number, (way, why) in enumerate(ways.items()):
        line = f"{'next:' if not number else '     '} {way}" + (f"   ({why})" if why else "")
        console.print(line, markup=False, soft_wrap=True)
    sys.stderr.flush()
    return True


def _entry(config: RunConfig, prepared: PreparedRun, result: Mapping[str, Any]) -> Entry | None:
    """The whole run beside its forecast; None where no step was measured."""
    if not result["num_measured"]:
        return None
    promise, facts = promise_of(config, prepared), Facts.of(result)
    comparison = compare(promise, facts, is_whole=True)
    text = paragraph(promise, facts, comparison, config.run.folder)
    about = {"torch": result["torch"], "device_name": result["device_name"]}
    told = as_data(comparison, facts, text)
    return entry_of(promise, facts, told, unix_seconds=result["finished_unix_seconds"], **about)


def summarise(config: RunConfig, prepared: PreparedRun, result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that is told at the end, as data."""
    from meshwright.checkpoint.format import list_steps

    folder, forecast, step_seconds = Path(config.run.folder), prepared.forecast, result["step_seconds"]
    rate = f"{result['counts']}_per_second"
    measured = {"peak_bytes": result["peak_bytes"]}
    if step_seconds:
        measured |= {"step_seconds": step_seconds, rate: config.train.batch * config.sequence / step_seconds}
    predicted = {
        "step_seconds": forecast.step_seconds,
        rate: forecast.tokens_per_second,
        "peak_bytes": promise_of(config, prepared).predicted.peak_bytes,
    }
    names = [*_FILES, *(() if not config.run.track else ("track/",))]
    told = ("step", "steps_now", "stopped", "seconds", "counts", "seen_now", "samples_in_all", "loss", "held_out")
    return {
        "model": config.model.title,
        "plan": str(prepared.plan),
        **{name: result[name] for name in told},
        "steps": config.train.steps,
        "predicted": predicted,
        "interval_seconds": [forecast.step_seconds_low, forecast.step_seconds_high],
        "measured": measured,
        "checkpoints": list_steps(folder / "checkpoints"),
        "files": [name for name in names if (folder / name).exists()],
    }


_FILES = ("metrics.jsonl", "samples.jsonl", "tensorboard/", "checkpoints/", "measured.trace.json", PICTURE)
_NOT_COMPARED = "too few steps to compare with the forecast: none is left after those that warm up"
_PRETTY: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step", pretty_seconds),
    "tokens_per_second": ("tokens/s", pretty_count),
    "samples_per_second": ("samples/s", pretty_count),
    "peak_bytes": ("peak memory of a rank", pretty_bytes),
}


def _compared(summary: Mapping[str, Any]) -> Table:
    measured = summary["measured"]
    errors = {name: summary["predicted"][name] / measured[name] - 1 for name in measured}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if not name else "right")
    for name, error in sorted(errors.items(), key=lambda pair: -abs(pair[1])):
        title, pretty = _PRETTY[name]
        table.add_row(title, pretty(summary["predicted"][name]), pretty(measured[name]), f"{error:+.0%}")
    return table


def _told(summary: Mapping[str, Any], folder: Path) -> list[str]:
    seen = f"{pretty_count(summary['seen_now'])} {summary['counts']}"
    loss = "" if summary["loss"] is None else f"; loss {summary['loss']:.4f}"
    lines = [
        summary["comparison"].get("text", _NOT_COMPARED),
        f"{counted(summary['steps_now'], 'step')}, {seen} in {pretty_seconds(summary['seconds'])}"
        f" (now at step {summary['step']} of {summary['steps']}){loss}",
    ]
    if summary["held_out"]:
        lines.append(f"held-out: {held_out_text(summary['held_out'])}")
    if summary["stopped"]:
        lines.append(f"stopped at step {summary['step']} and saved; the same command goes on from there")
    kept = ", ".join(map(str, summary["checkpoints"])) or "none"
    lines.append(f"checkpoints kept: {kept}")
    lines.append(f"written to {folder}: {', '.join(['summary.json', *summary['files']])}")
    return lines


def _can_export(config: RunConfig) -> bool:
    """Whether transformers has a family for it; other models are written by their own names."""
    from meshwright.hf.config_json import config_for

    decoder = config.model.config()
    if not isinstance(decoder, DecoderConfig):
        return True
    try:
        config_for(decoder)
    except MeshwrightError:
        return False
    return True
