"""`mw train`: a `Run` in a terminal: the plan and what it will cost, live progress, and what came of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial

from rich.console import Console

from meshwright.core.codec import load_artefact
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import EXACTNESS
from meshwright.core.units import counted, pretty_bytes, pretty_count, pretty_seconds
from meshwright.core.wrapping import wrapped
from meshwright.launch.environment import how_to_go_on, outside_launcher
from meshwright.launch.local_ranks import Stopped, stop_signals
from meshwright.launch.rank_job import GRACE_IS_OVER, Job, StopFlag, run_rank
from meshwright.models.dimensions import DecoderConfig
from meshwright.report.terminal import FigureTable, print_forecast, progress, stderr
from meshwright.run.hosts import HostSupervisor
from meshwright.run.prepare import PreparedRun
from meshwright.run.result import RunResult, held_out_text
from meshwright.run.run import Run
from meshwright.run.run_file import RunConfig
from meshwright.run.trackers import require_trackers


def run(arguments: Namespace) -> int:
    place = outside_launcher(os.environ)
    console = stderr()
    # The run as another command takes it: its file and what the command line changed.
    words = [arguments.run, *(word for change in arguments.changes for word in ("--set", change))]
    with Run(arguments.run, changes=arguments.changes, plan=arguments.plan, report=progress) as made:
        if made.config.run.hosts and (place is None or place.kind == "slurm"):  # a task on each host
            told = {"run": arguments.run, "changes": arguments.changes, "plan": arguments.plan}
            with stop_signals(requests=arguments.stop) as stop:
                return HostSupervisor(made, "meshwright.cli.train", told, stop).supervise()
        if place is not None:  # one rank of somebody else's launch; rank 0 tells the user
            from meshwright.runtime.outside import run_outside

            require_trackers(made.config.run.track)
            code = run_outside(made, place, _tell_plan, lambda result: close(console, words, made.config, result))
            if made.config.run.track:  # what a tracker has left running here must not hold up the end of the run
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            return code
        if made.is_finished:
            steps = counted(made.config.train.steps, "step")
            console.print(f"{made.folder} has its {steps}; raise train.steps to go on.")
            return 0
        describe(console, made.config, made.prepare(on_plan=lambda prepared: warn(console, made.config, prepared)))
        with stop_signals(requests=arguments.stop) as stop:
            result = made.start(stop=stop, show=True).result()
            close(console, words, made.config, result)
            if result.summary is None and result.is_stopped:
                raise Stopped(*([GRACE_IS_OVER] if made.steps_made else []))
    return result.exit_code


def _tell_plan(made: Run) -> None:
    prepared = made.prepare()
    warn(stderr(), made.config, prepared)
    describe(stderr(), made.config, prepared)


def rank_of_hosts(job: Job, stop: StopFlag) -> int:
    """As one rank of several hosts, started by the supervisor of this one."""
    from meshwright.runtime.outside import run_supervised

    told = job.arguments
    words = [told["run"], *(word for change in told["changes"] for word in ("--set", change))]
    with Run(told["run"], changes=told["changes"], plan=told["plan"], report=progress) as made:
        require_trackers(made.config.run.track)
        end = partial(close, stderr(), words, made.config)
        return run_supervised(made, job, stop, _tell_plan, end)


def warn(console: Console, config: RunConfig, prepared: PreparedRun) -> None:
    forecast = prepared.forecast
    for line in (line for each in prepared.plan.techniques for line in each.warnings_for(config.train.steps)):
        console.print(f"warning: {line}")
    if not forecast.fits:
        beside = forecast.peak_bytes - forecast.peak_allocated_bytes
        needs = pretty_bytes(max(forecast.peak_bytes, forecast.peak_reserved_bytes + beside))
        told = f"a rank needs {needs} of {pretty_bytes(forecast.memory_bytes)}"
        console.print(f"this plan is not expected to fit: {told}", style="bold red")


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
        if technique.exactness == EXACTNESS[-1]:
            console.print(f"{technique} is approximate: one device computes other numbers")


_NOT_COMPARED = "too few steps to compare with the forecast: none is left after those that warm up"
_PRETTY: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_seconds": ("step", pretty_seconds),
    "tokens_per_second": ("tokens/s", pretty_count),
    "samples_per_second": ("samples/s", pretty_count),
    "mfu": ("MFU", "{:.1%}".format),
    "peak_bytes": ("peak memory", pretty_bytes),
}


def close(console: Console, run_words: list[str], config: RunConfig, result: RunResult) -> None:
    """What came of it: forecast, measured and their difference; how far it went; where things are; what to try next."""
    folder, summary = result.folder, result.summary
    if summary is None:
        return
    measured, predicted = summary.measured, summary.predicted
    *titles, last = (_PRETTY[name][0] for name in predicted)
    table = FigureTable("", *titles, last=last)
    for words, values in (("forecast", predicted), ("measured", measured)):
        table.add_row(words, *(_PRETTY[name][1](values[name]) if name in values else "-" for name in predicted))
    ratios = {name: measured[name] / predicted[name] - 1 for name in measured if predicted[name]}
    table.add_row("difference", *(f"{ratios[name]:+.0%}" if name in ratios else "-" for name in predicted))
    console.print()
    console.print(table)
    seen = f"{pretty_count(summary.seen_now)} {summary.counts}"
    loss = "" if summary.loss is None else f"; loss {summary.loss:.4f}"
    lines = [
        *summary.comparison.get("lines", [_NOT_COMPARED]),
        *([result.overlay] if result.overlay else []),
        f"{counted(summary.steps_now, 'step')}, {seen} in {pretty_seconds(summary.seconds)}"
        f" (now at step {summary.step} of {summary.steps}){loss}",
    ]
    if summary.time_ledger is not None:
        lines.append(summary.time_ledger.text())
    if summary.held_out:
        lines.append(f"held-out: {held_out_text(summary.held_out)}")
    if found := summary.evicted:
        told = f"memory cap {config.train.memory_cap}: {counted(int(found['evictions']), 'eviction')}, "
        told += f"{pretty_bytes(found['dropped_bytes'])} computed again and {pretty_bytes(found['swapped_bytes'])} "
        lines.append(f"{told}copied to the host, about {pretty_seconds(found['eviction_seconds'])}")
    if summary.stopped:
        is_saved = summary.step in summary.checkpoints
        how = "and saved" if is_saved else "without time to save; steps since the last checkpoint are made again"
        lines.append(f"stopped at step {summary.step} {how}; {how_to_go_on(os.environ)}")
    lines.append(f"checkpoints kept: {', '.join(map(str, summary.checkpoints)) or 'none'}")
    lines.append(f"written to {folder}: {', '.join(['summary.json', *summary.files])}")
    for line in (*lines, *result.warnings):
        console.print(line)
    ways = {}
    with contextlib.suppress(MeshwrightError):  # plans with other numbers than one device's are not checked
        if not any(each.exactness == EXACTNESS[-1] for each in load_artefact(Plan, folder / "plan.json").techniques):
            ways[shlex.join(["mw", "check", *run_words, "--plan", f"{folder}/plan.json"])] = "is this plan exact?"
    ways[shlex.join(["mw", "ckpt", "verify", str(folder)])] = "are the checkpoints whole?"
    traces = [name for name in ("measured.trace.json", "predicted.trace.json") if (folder / name).exists()]
    if traces:  # too few steps are not measured
        ways[f"open {folder}/{' and '.join(traces)} in ui.perfetto.dev"] = ""
    if summary.checkpoints and _can_export(config):
        is_theirs = isinstance(config.model.config(), DecoderConfig) or bool(config.model.hf)
        what = "the weights as a Hugging Face folder" if is_theirs else "the weights as safetensors"
        origin = ["--model", config.model.hf] if config.model.hf else []  # its names, and its tokenizer goes along
        ways[shlex.join(["mw", "ckpt", "export", str(folder), "OUT", *origin])] = what
    for number, (way, why) in enumerate(ways.items()):
        goes_on = " " * 8, " \\" if way.startswith("mw ") else ""
        line = wrapped(f"{'next:' if not number else '     '} {way}", console.width, *goes_on)
        console.print(line + (f"\n        ({why})" if why else ""))
    sys.stderr.flush()


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


if __name__ == "__main__":
    run_rank(rank_of_hosts)
