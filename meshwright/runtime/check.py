"""`mw check`: does this plan train the model exactly as one device would, and move the bytes priced? No torch.

The ranks are real processes in a pool. Only the schedule's length is cut: the same techniques, sizes and microbatches,
but no more of them than it takes to fill every stage twice.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import EXACTNESS
from meshwright.core.units import pretty_bytes
from meshwright.probe.machine import available_host_bytes
from meshwright.runtime.config import RunConfig
from meshwright.runtime.model import describe
from meshwright.simulate.price import price
from meshwright.supervise.pool import RankPool

TOLERANCE = {"exact": 1e-9, "rounded": 5e-2}
"""exact: largest difference of any element over the quantity's global norm, every step; rounded: distance between whole
gradients over their norm, and the loss, first step."""
DTYPE = {"exact": "float64", "rounded": "float32"}
_JOBS = "meshwright.runtime.check_ranks"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One comparison with one device."""

    exactness: str
    plan: Plan
    worst_error: float
    departures: tuple[dict[str, Any], ...]
    """Where ranks left the reference, in the order it happened: step, quantity, layer, error, rank."""
    traffic: tuple[str, ...]
    """Messages that were not priced, or priced and not sent."""
    num_messages: int

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.exactness]

    @property
    def passed(self) -> bool:
        return not self.departures and not self.traffic


@dataclass(frozen=True, kw_only=True)
class Checked:
    plan: Plan
    steps: int
    parts: tuple[Part, ...]
    """In float64 without what rounds, then, if something rounds, the whole plan."""
    seconds: float

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)


def exactness_of(plan: Plan) -> str:
    return max((t.exactness for t in plan.techniques), key=EXACTNESS.index, default="exact")


def shortened(plan: Plan, num_stages: int) -> Plan:
    """The same plan with no more microbatches than fill every stage twice."""
    count = min(plan.num_microbatches, max(2, 2 * num_stages))
    if plan.shares:
        return plan.with_shares(tuple(min(each, count) for each in plan.shares))
    return replace(plan, batch=plan.num_replicas * plan.microbatch * count)


def check(
    config: RunConfig,
    plan: Plan,
    *,
    steps: int = 2,
    report: Callable[[str], None] = lambda text: None,
    pool: RankPool | None = None,
) -> Checked:
    exactness = exactness_of(plan)
    if exactness not in TOLERANCE:
        named = ", ".join(str(each) for each in plan.techniques if each.exactness == exactness)
        what = f"{named} is {exactness}: one device computes other numbers, so there is no parity."
        fix = "Check the plan with exact settings in its place; its own algorithm is proved by the project's tests."
        raise MeshwrightError([Problem(where="plan", what=what, fix=fix)])
    start = time.monotonic()
    profile = describe(config.model, config.data.sequence).profile
    problems = plan.check(profile) or plan.check_sequence(config.sequence)
    if problems:
        raise MeshwrightError(problems)
    if "samples" not in profile.uncut:
        plan = shortened(plan, len(plan.blocks_of_stages(profile)))
    _check_memory(profile, plan, config.sequence)
    own = pool or RankPool(plan.num_ranks, threads_per_rank=1)
    parts = []
    try:
        exact = replace(plan, techniques=tuple(filter(None, (t.as_exact() for t in plan.techniques))))
        parts.append(_compare(config, exact, "exact", steps, own, report))
        if exactness != "exact":
            parts.append(_compare(config, plan, exactness, 1, own, report))
    finally:
        if pool is None:
            own.close()
    return Checked(plan=plan, steps=steps, parts=tuple(parts), seconds=time.monotonic() - start)


def _compare(
    config: RunConfig, plan: Plan, exactness: str, steps: int, pool: RankPool, report: Callable[[str], None]
) -> Part:
    with tempfile.TemporaryDirectory(prefix="mw-check-") as folder:
        common = {
            "config": encode(config),
            "folder": str(Path(folder) / "reference"),
            "steps": steps,
            "dtype": DTYPE[exactness],
            "batch": plan.batch,
            "cache": str(Path(folder) / "tokens"),
        }
        report(f"one device, {steps} steps of {plan.batch} samples in {DTYPE[exactness]}")
        pool.run(f"{_JOBS}:reference_job", common, 1, timeout_seconds=3600)
        report(f"{plan.num_ranks} ranks: {plan}")
        arguments = {**common, "plan": encode(plan), "tolerance": TOLERANCE[exactness], "exactness": exactness}
        answers = pool.run(f"{_JOBS}:parity_job", arguments, plan.num_ranks, timeout_seconds=3600)
    departures = [{**found, "rank": rank} for rank, a in enumerate(answers) for found in a["departures"]]
    return Part(
        exactness=exactness,
        plan=plan,
        worst_error=max(answer["worst"] for answer in answers),
        departures=tuple(sorted(departures, key=lambda d: (d["step"], d["order"], d["rank"]))),
        traffic=tuple(f"rank {rank}: {line}" for rank, a in enumerate(answers) for line in a["traffic"]),
        num_messages=sum(answer["num_messages"] for answer in answers),
    )


def _check_memory(profile: Profile, plan: Plan, sequence: int) -> None:
    """What the ranks hold in float64, all on this machine, and one device beside them."""
    stages = range(len(plan.blocks_of_stages(profile)))
    works = [price(profile, plan, sequence=sequence, stage=stage, element_bytes=8) for stage in stages]
    held = sum(float(r.repeat * r.bytes) for work in works for r in work.residents if r.life == "always")
    needed = held * plan.num_ranks / len(works) + profile.num_params * 8 * 4
    there = available_host_bytes()
    if needed > there:
        what = f"a float64 comparison needs about {pretty_bytes(needed)}; {pretty_bytes(there)} are free."
        fix = "Check a shallower model: --set model.change='{num_layers = 4}'."
        raise MeshwrightError([Problem(where="memory", what=what, fix=fix)])
