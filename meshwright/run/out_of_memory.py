"""After a step ran out of memory: what the rank held beside the forecast, and plans that would need less. No torch.

The forecast was wrong, or something else took memory: fixes are plans whose forecast, wrong by as much as this one's,
stays within what the rank could get.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.ask.question import Question
from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.core.files import write_whole
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import technique_named, technique_names
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.planner.scoreboard import ScoredPlan
from meshwright.run.run_file import RunConfig
from meshwright.simulator.forecast import forecast

FOLDER = "out_of_memory"
"""In a run's folder: report.json, report.txt, and a plan file for each fix."""
CATEGORIES = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "temporary": ("working", "gathered", "logits"),
    "other": ("buffers", "non_torch"),
}
"""What a rank holds, and which categories of a forecast are the same."""
_MOST_FIXES = 3
_SMALLER, _SETTINGS, _SEVERAL = "a smaller microbatch", "other settings", "a smaller microbatch and other settings"
_SPLIT, _TIERS = "another split over the ranks", "host memory"


@dataclass(frozen=True, kw_only=True)
class MemoryFailure:
    """What a rank held when it ran out of memory."""

    rank: int
    num_ranks: int
    stage: int
    step: int
    """The first is 1; 0: before any."""
    action: str
    """`forward 3`, `update`, `evaluation`, `start`."""
    asked_bytes: int
    """That could not be had; 0: not known."""
    held_bytes: Mapping[str, int]
    """By category of `CATEGORIES`."""

    def sentence(self) -> str:
        place = f"in step {self.step}, at {self.action} of stage {self.stage}" if self.step else f"at the {self.action}"
        asked = f" and needed {pretty_bytes(self.asked_bytes)} more" if self.asked_bytes else ""
        return f"ran out of memory {place}: it held {pretty_bytes(sum(self.held_bytes.values()))}{asked}."


@dataclass(frozen=True, kw_only=True)
class MemoryFix:
    """A plan that needs less."""

    kind: str
    changes: tuple[str, ...]
    """From the plan that failed to this one."""
    plan: Plan
    step_seconds: float
    peak_bytes: int
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    failure: MemoryFailure
    plan: Plan
    step_seconds: float
    """Of the plan that failed, as forecast."""
    predicted_bytes: Mapping[str, int]
    """At the fullest moment of the fullest rank, by category of `CATEGORIES`."""
    usable_bytes: int
    """What the forecast of a plan may need at most, so that as wrong as this one it fits."""
    fixes: tuple[MemoryFix, ...]
    """The fastest first."""
    unix_seconds: float

    def text(self) -> str:
        failure, held = self.failure, self.failure.held_bytes
        lines = [
            f"rank {failure.rank} of {failure.num_ranks} {failure.sentence()}",
            f"{'':12}{'predicted':>12}{'actual':>12}",
        ]
        for name, wanted, had in (
            *((name, self.predicted_bytes.get(name, 0), held.get(name, 0)) for name in CATEGORIES),
            ("total", sum(self.predicted_bytes.values()), sum(held.values())),
        ):
            lines.append(f"{name:12}{pretty_bytes(wanted):>12}{pretty_bytes(had):>12}")
        lines += ["(predicted: at the fullest moment of the fullest rank; actual: when it failed)"]
        if not self.fixes:
            lines.append("No plan for these ranks is expected to fit; `mw plan` says what would.")
        for number, fix in enumerate(self.fixes, start=1):
            cost = f"{pretty_seconds(fix.step_seconds)} a step ({fix.step_seconds / self.step_seconds - 1:+.0%})"
            changes = ", ".join(each for each in fix.changes if not each.startswith("axis_order"))
            size = pretty_bytes(fix.peak_bytes) + (
                ", which may be too much" if fix.peak_bytes > self.usable_bytes else ""
            )
            lines.append(f"{number}. {fix.kind} ({changes}): {cost}, {size}")
            lines.append(f"   {' '.join(fix.command)}")
        return "\n".join(lines)


def smaller_microbatch(
    config: RunConfig, profile: Profile, cluster: Cluster, plan: Plan, most_bytes: float
) -> ScoredPlan | None:
    """The same plan and batch in the largest smaller microbatches that are expected to fit; else in the smallest."""
    found = None
    about: dict[str, Any] = {"sequence": config.sequence, "optimizer": config.train.optimizer}
    for size in range(plan.microbatch - 1, 0, -1) if not plan.shares else ():
        smaller = replace(plan, microbatch=size)
        problems = [*smaller.check(profile, cluster), *config.train.optimizer.problems_with(smaller)]
        if problems or config.train.problems_with(smaller):
            continue
        found = ScoredPlan(smaller, forecast(profile, smaller, cluster, **about))
        if found.forecast.peak_bytes <= most_bytes:
            break
    return found


def examine(
    config: RunConfig, profile: Profile, cluster: Cluster, plan: Plan, failure: MemoryFailure, command: Sequence[str]
) -> PostMortem:
    """Search for what would need less, and write it all into the run's folder. `command`: trains the run."""
    about: dict[str, Any] = {"sequence": config.sequence, "optimizer": config.train.optimizer}
    failed = forecast(profile, plan, cluster, **about)
    by_category = failed.peak_bytes_by_category
    held = sum(failure.held_bytes.values())
    usable = int(held / max(1.0, (held + failure.asked_bytes) / failed.peak_bytes))
    scored = _fixes(config, profile, cluster, plan, usable)
    folder = Path(config.run.folder) / FOLDER
    fixes = []
    for number, (kind, (other, expected)) in enumerate(scored, start=1):
        words = (*command, "--plan", str(folder / f"fix-{number}.plan.json"))
        costs: dict[str, Any] = {"step_seconds": expected.step_seconds, "peak_bytes": expected.peak_bytes}
        fixes.append(MemoryFix(kind=kind, changes=plan.diff(other), plan=other, command=words, **costs))
    found = PostMortem(
        failure=failure,
        plan=plan,
        step_seconds=failed.step_seconds,
        predicted_bytes={name: sum(by_category.get(each, 0) for each in own) for name, own in CATEGORIES.items()},
        usable_bytes=usable,
        fixes=tuple(fixes),
        unix_seconds=time.time(),
    )
    folder.mkdir(exist_ok=True)
    for number, fix in enumerate(fixes, start=1):
        write_whole(folder / f"fix-{number}.plan.json", fix.plan.to_json() + "\n")
    write_whole(folder / "report.json", json.dumps(encode(found), indent=1) + "\n")
    write_whole(folder / "report.txt", found.text() + "\n")
    return found


def _fixes(
    config: RunConfig, profile: Profile, cluster: Cluster, plan: Plan, usable: int
) -> list[tuple[str, ScoredPlan]]:
    """The best of each kind, and then others, by what a step is expected to take."""
    uses_tiers = [name for name in technique_names() if technique_named(name).uses_tiers]
    wishes: dict[str, Any] = {name: getattr(config.plan, name) for name in ("allow", "pin", "ban")}
    question = Question(
        profile=profile,
        cluster=cluster,
        batch=config.train.batch,
        sequence=config.sequence,
        optimizer=config.train.optimizer,
        max_memory_bytes=usable,
        headroom=0.0,
        **wishes,
    )
    mesh = tuple(f"{each.name}={each.size}" for each in plan.techniques if each.axis)  # type: ignore[attr-defined]
    on_device = tuple(name for name in uses_tiers if plan.technique(name) is None and name not in question.pin)
    ban = tuple(dict.fromkeys((*question.ban, *on_device)))
    found: list[ScoredPlan] = []
    for more in ((), mesh, (*mesh, f"microbatch={plan.microbatch}"), None):
        pin = tuple(dict.fromkeys((*question.pin, *(more or ()))))
        with contextlib.suppress(MeshwrightError):  # a pin and another may not go together
            found += replace(question, pin=pin, ban=question.ban if more is None else ban).ask(top=_MOST_FIXES).ranked
    smaller = smaller_microbatch(config, profile, cluster, plan, usable)
    if smaller is not None and (smaller.forecast.peak_bytes <= usable or not found):
        found.append(smaller)  # where nothing is expected to fit, it is the most that can be tried
    by_plan = {each.plan: each for each in found if each.plan != plan}
    ranked = sorted(by_plan.values(), key=lambda each: each.rank)
    kinds: dict[str, ScoredPlan] = {}
    for each in ranked:
        kinds.setdefault(_kind_of(plan, each.plan), each)
    first = [each for kind, each in kinds.items() if kind != _SEVERAL]
    chosen = [*first, *(each for each in ranked if each not in first)][:_MOST_FIXES]
    return [(_kind_of(plan, each.plan), each) for each in sorted(chosen, key=lambda each: each.rank)]


def _kind_of(plan: Plan, other: Plan) -> str:
    if other.techniques == plan.techniques:
        return _SMALLER
    if _num_tiers(other.techniques) > _num_tiers(plan.techniques):
        return _TIERS
    if other.mesh != plan.mesh:
        return _SPLIT
    return _SETTINGS if other.microbatch == plan.microbatch else _SEVERAL


def _num_tiers(techniques: Iterable[Any]) -> int:
    return sum(each.uses_tiers for each in techniques)


def failure_of(facts: Mapping[str, Any]) -> MemoryFailure | None:
    """What the facts of a rank's error say of its memory, if it ran out of it."""
    told = facts.get("out_of_memory")
    return None if told is None else MemoryFailure(**told)
