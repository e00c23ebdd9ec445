"""All that `mw plan` is asked, read from its flags; everything that is wrong is said at once."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from meshwright.ask.amounts import read_amount, read_memory
from meshwright.ask.batch_goal import BatchGoal, read_goal
from meshwright.ask.device_counts import node_width, resized, sizes_between
from meshwright.ask.question import Question
from meshwright.ask.what_if import WhatIfChange, read_changes, with_changes
from meshwright.ask.why import Knob, read_knobs
from meshwright.cli.arguments import PlanInputs, read_wanted
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.planner.wishes import read_wishes
from meshwright.report.terminal import progress, unwritable
from meshwright.run.run_file import OptimizerConfig, PlanSection, read_run

DEFAULT_BATCH = 64
AUTO = "auto"
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    wanted: PlanInputs
    question: Question
    devices: tuple[int, ...]
    """Numbers of devices to compare; empty: those of the cluster."""
    goal: BatchGoal | None
    """What a batch is to reach soonest; None: the batch is given."""
    knobs: tuple[Knob, ...]
    changes: tuple[WhatIfChange, ...]

    @property
    def is_narrow(self) -> bool:
        """One thing is to be told, not everything."""
        return bool(self.knobs or self.changes)


class _Reader:
    """Collects problems until all flags are read."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def tried(self, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except MeshwrightError as error:
            self.problems.extend(error.problems)
            return None

    def stop_if_wrong(self) -> None:
        if self.problems:
            raise MeshwrightError(list(dict.fromkeys(self.problems)))


def read_asked(arguments: Namespace) -> PlanRequest:
    reader = _Reader()
    reader.problems += unwritable({"-o": arguments.output})
    file = read_run(arguments.run) if arguments.run else None
    is_auto = arguments.batch == AUTO
    arguments.batch = None if is_auto else _batch(arguments.batch, reader)
    wanted = reader.tried(lambda: read_wanted(arguments, file))
    knobs = reader.tried(lambda: read_knobs(arguments.why)) or ()
    changes = reader.tried(lambda: read_changes(arguments.what_if)) or ()
    limit = read_memory(arguments.max_memory, "--max-memory", reader.problems) if arguments.max_memory else None
    range_ = _range(arguments.devices, reader) if arguments.devices else None
    targets = _targets(arguments, reader, is_auto)
    wishes = file.plan if file else PlanSection()
    pin, ban = (*wishes.pin, *arguments.pin), (*wishes.ban, *arguments.ban)
    allow = arguments.allow or wishes.allow
    reader.tried(lambda: read_wishes(pin, ban, allow=allow))
    reader.stop_if_wrong()
    assert wanted is not None
    cluster = _learned(arguments, wanted.cluster)
    devices = _devices(cluster, range_, reader) if range_ else ()
    if len(devices) == 1:
        cluster, devices = resized(cluster, devices[0]) or cluster, ()
    question = Question(
        profile=wanted.profile,
        cluster=cluster,
        batch=arguments.batch or (file.train.batch if file else DEFAULT_BATCH),
        sequence=wanted.sequence,
        optimizer=file.train.optimizer if file else OptimizerConfig(),
        allow=allow,
        pin=pin,
        ban=ban,
        max_memory_bytes=limit,
    )
    if limit is not None and (problem := question.memory_problem(limit, "--max-memory")):
        raise MeshwrightError([*reader.problems, problem])
    goal = reader.tried(lambda: read_goal(wanted.profile, wanted.sequence, *targets)) if is_auto else None
    reader.tried(lambda: with_changes(question, changes))
    reader.stop_if_wrong()
    return PlanRequest(wanted=wanted, question=question, devices=devices, goal=goal, knobs=knobs, changes=changes)


def _batch(text: str | None, reader: _Reader) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        what, fix = f'"{text}" is no number of samples.', f"For example --batch 128, or --batch {AUTO}."
        reader.problems.append(Problem(where="--batch", what=what, fix=fix))
        return None


def _range(text: str, reader: _Reader) -> tuple[int, int] | None:
    """`16..64`, or `16` alone."""
    first, dots, last = (part.strip() for part in text.partition(".."))
    if not (first.isascii() and first.isdigit() and (last.isascii() and last.isdigit() if dots else True)):
        problem = Problem(where="--devices", what=f'"{text}" is no range.', fix="For example --devices 16..64.")
        reader.problems.append(problem)
        return None
    low, high = int(first), int(last or first)
    if low < 1 or low > high:
        what = f"{text} goes from {low} to {high}."
        fix = f"Write --devices {high}..{low}." if 1 <= high < low else "Use at least 1 device."
        reader.problems.append(Problem(where="--devices", what=what, fix=fix))
        return None
    return low, high


def _devices(cluster: Cluster, range_: tuple[int, int], reader: _Reader) -> tuple[int, ...]:
    found = sizes_between(cluster, *range_)
    if range_[0] == range_[1] and not found and resized(cluster, range_[0]) is not None:
        return (range_[0],)  # no power of two, and asked for by name
    if not found:
        width = node_width(cluster)
        what = f"{range_[0]} to {range_[1]} has no part of a node and no whole nodes of {width} devices."
        reader.problems.append(Problem(where="--devices", what=what, fix=f"Use 1 to {width}, or multiples of {width}."))
    return found


def _targets(arguments: Namespace, reader: _Reader, is_auto: bool) -> tuple[float | None, ...]:
    """critical batch, target steps, target tokens."""
    found: list[float | None] = []
    for name in ("critical_batch", "target_steps", "target_tokens"):
        text, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        amount = read_amount(text, _COUNTS, flag, f"{flag} 1000", reader.problems) if text else None
        if amount is not None and amount.how:
            reader.problems.append(Problem(where=flag, what=f'"{text}" is no number.', fix=f"For example {flag} 1000."))
        # Tokens also say how many device-hours a range of devices is compared by.
        if text and not is_auto and not (name == "target_tokens" and arguments.devices):
            fix = f"Add --batch {AUTO}."
            reader.problems.append(Problem(where=flag, what="says how to choose a batch, which is given.", fix=fix))
        found.append(amount.value if amount is not None else None)
    return tuple(found)


def _learned(arguments: Namespace, cluster: Cluster) -> Cluster:
    """The cluster as a run has shown it to be."""
    if not arguments.from_run:
        return cluster
    from meshwright.run.learned_cluster import cluster_from_run

    learned, lines = cluster_from_run(arguments.from_run, cluster)
    for line in lines:
        progress(line)
    return learned


def tokens_to_compare(arguments: Namespace) -> float:
    """By which numbers of devices are compared: a billion unless said."""
    if not arguments.target_tokens:
        return 1e9
    amount = read_amount(arguments.target_tokens, _COUNTS, "--target-tokens", "1T", [])
    return amount.value if amount is not None else 1e9
