"""`mw check`: does this plan train the model exactly as one device would, and move the bytes priced? No torch.

The ranks are real processes in a pool; one device is the independent reference (`verify/reference.py`). Only the
schedule's length is cut: the same techniques, sizes and microbatches, but no more of them than it takes to fill every
stage twice, and three at least.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.codec import encode
from meshwright.core.errors import Problem, error_at, raise_problems
from meshwright.core.plan import Plan
from meshwright.core.technique import EXACTNESS
from meshwright.core.units import pretty_bytes
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.probe import available_host_bytes
from meshwright.run.model import ModelDescription, describe_run
from meshwright.run.run_file import RunConfig
from meshwright.simulator.pricing import price

TOLERANCE = 1e-9
"""Largest difference of any element over the quantity's global norm, every step, in float64."""
MOST_SPREAD = 1e-3
"""One device that departs from itself by more sets no tolerance."""
STEPS = 4
_JOBS = "meshwright.verify.check_ranks"


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """The run whose plan is compared, as the parent has described its model: what every rank is told."""

    config: RunConfig
    description: ModelDescription
    plan: Plan
    steps: int
    folder: str = ""
    """Has what the reference leaves of each step, and the tokens of the data."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One comparison with one device."""

    exactness: str
    what: str
    """What was compared, in words."""
    plan: Plan
    worst_error: float
    tolerance: float
    tolerance_from: str
    departures: tuple[dict[str, Any], ...]
    """Where ranks left the reference, in the order it happened: step, quantity, layer, error, tolerance, rank."""
    traffic: tuple[str, ...]
    """Messages that were not priced, or priced and not sent."""
    num_messages: int

    @property
    def passed(self) -> bool:
        return not self.departures and not self.traffic


@dataclass(frozen=True, kw_only=True)
class Checked:
    plan: Plan
    steps: int
    parts: tuple[CheckResult, ...]
    """In float64 without what rounds; with dropout, where only one device can keep it; the whole plan, if it rounds."""
    seconds: float

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)


def exactness_of(plan: Plan) -> str:
    return max((t.exactness for t in plan.techniques), key=EXACTNESS.index, default=EXACTNESS[0])


def shortened(plan: Plan, num_stages: int) -> Plan:
    """The same plan with no more microbatches than fill every stage twice, three at least."""
    count = min(plan.num_microbatches, max(3, 2 * num_stages))
    if plan.shares:
        return plan.with_shares(tuple(min(each, count) for each in plan.shares))
    return replace(plan, batch=plan.num_replicas * plan.microbatch * count)


def check(
    config: RunConfig,
    plan: Plan,
    *,
    steps: int = STEPS,
    report: Callable[[str], None] = lambda text: None,
    pool: RankPool | None = None,
    description: ModelDescription | None = None,
) -> Checked:
    """Compare the plan's training with one device's. What the plan cannot run at all is a `MeshwrightError`."""
    start = time.monotonic()
    description = description or describe_run(config)
    profile = description.profile
    exactness = exactness_of(plan)
    if exactness == EXACTNESS[-1]:
        named = ", ".join(str(each) for each in plan.techniques if each.exactness == exactness)
        what = f"{named} is {exactness}: one device computes other numbers, so there is no parity."
        fix = "Check the plan with exact settings in its place; its own algorithm is proved by the project's tests."
        raise error_at("plan", what, fix)
    problems = list(plan.check(profile) or plan.check_sequence(config.sequence))
    problems += config.train.optimizer.problems_with(plan)
    raise_problems(problems)
    if "samples" not in profile.uncut:
        plan = shortened(plan, len(plan.blocks_of_stages(profile)))
    # What the ranks hold in float64, all on this machine, and one device beside them; and what it writes.
    stages = range(len(plan.blocks_of_stages(profile)))
    works = [price(profile, plan, sequence=config.sequence, stage=stage, element_bytes=8) for stage in stages]
    held = sum(float(r.repeat * r.bytes) for work in works for r in work.residents if r.life == "always")
    needed = {
        "memory": (max(held * plan.num_ranks / len(works), profile.num_params * 8 * 6), available_host_bytes()),
        tempfile.gettempdir(): (profile.num_params * 17 * steps, shutil.disk_usage(tempfile.gettempdir()).free),
    }
    fix = "Check a shallower model: --set model.change='{num_layers = 4}'."
    for where, (wanted, there) in needed.items():
        if wanted > there:
            what = f"a comparison needs about {pretty_bytes(wanted)}; {pretty_bytes(there)} are free."
            problems.append(Problem(where=where, what=what, fix=fix))
    raise_problems(problems)
    own = pool or RankPool(plan.num_ranks, threads_per_rank=1)
    try:
        run = CheckedRun(config=config, description=description, plan=plan, steps=steps)
        parts = tuple(parts_of(run, own, report))
    finally:
        if pool is None:
            own.close()
    return Checked(plan=plan, steps=steps, parts=parts, seconds=time.monotonic() - start)


def keeps_dropout(plan: Plan) -> bool:
    """Whether the plan draws the random numbers of one device, seeded rank by rank: ranks differ in their samples
    only."""
    is_local = set(plan.mesh) == set(plan.replica_axes)
    return is_local and all(technique.draws_alike for technique in plan.techniques)


def parts_of(run: CheckedRun, pool: RankPool, report: Callable[[str], None]) -> Iterator[CheckResult]:
    """The comparisons of one plan, on one pool."""
    rounds = any(technique.rounds for technique in run.plan.techniques)
    exact = replace(run.plan, techniques=tuple(filter(None, (t.as_exact() for t in run.plan.techniques))))
    with tempfile.TemporaryDirectory(prefix="mw-check-") as folder:
        whole = replace(run, folder=folder)
        apart = replace(whole, plan=exact)
        answer = _reference(apart, pool, report, keeps_dropout(exact) and not rounds, rounds)
        yield _compared(apart, pool, report, answer, "without what rounds, " if rounds else "")
        if rounds:
            yield _compared(whole, pool, report, answer, "", rounds=True)
    # Techniques that replay a forward must replay its random numbers; with axes, one rank shows that they do.
    alone = tuple(t for t in exact.techniques if not t.axis and t.draws_alike)
    if answer["is_random"] and answer["dropout"] == "off" and alone:
        local = replace(exact, techniques=alone, axis_order=(), groups=(), batch=run.plan.microbatch * 3)
        with tempfile.TemporaryDirectory(prefix="mw-check-") as folder:
            one = replace(run, plan=local, folder=folder)
            answer = _reference(one, pool, report, True, False)
            yield _compared(one, pool, report, answer, "one rank, dropout kept, ")


def _reference(
    run: CheckedRun, pool: RankPool, report: Callable[[str], None], keeps: bool, rounds: bool
) -> dict[str, Any]:
    more = " and in bf16" if rounds else ""
    report(f"one device in plain torch: {run.steps} steps of {run.plan.batch} samples in float64{more}")
    arguments = {"run": encode(run), "keeps_dropout": keeps, "rounds": rounds}
    (answer,) = pool.run(f"{_JOBS}:reference_job", arguments, 1, timeout_seconds=3600)
    return dict(answer)


def _compared(
    run: CheckedRun, pool: RankPool, report: Callable[[str], None], answer: dict[str, Any], what: str, *,
    rounds: bool = False,
) -> CheckResult:  # fmt: skip
    """The ranks of a plan against the reference's `answer`. A plan that rounds is judged by the whole gradient of the
    first step, by every loss, and by every update."""
    plan, spread = run.plan, answer["spread"]
    tolerance, source = TOLERANCE, "float64"
    if TOLERANCE / 10 < spread <= MOST_SPREAD:
        tolerance, source = 10 * spread, f"10 x what one device departs from itself, {spread:.1e}"
    elif spread > MOST_SPREAD:
        source = f"float64; one device departs by {spread:.1e} from itself"
    report(f"{plan.num_ranks} ranks: {plan}")
    arguments = {"run": encode(run), "tolerance": tolerance, "answer": answer, "rounds": rounds}
    answers = pool.run(f"{_JOBS}:parity_job", arguments, plan.num_ranks, timeout_seconds=3600)
    result: list[tuple[int, str, float, float]] = [  # of all ranks: step, quantity, error, tolerance
        (step, "learning rate", float("inf"), 1e-9) for step in answer["wrong_rates"] if not rounds
    ]
    if rounds:
        what, control = "the whole plan: first gradient, losses, updates", answer["rounded"]
        worst, bias = _of_sums([a["sums"] for a in answers])
        known, known_bias = _of_sums([control["sums"]])
        tolerance, source = max(4 * known, 1e-2), f"4 x that of one device in bf16 by autocast, {known:.1e}"
        result += [(0, "gradient", worst, tolerance)]
        result += [(0, "gradient's length", abs(bias), max(4 * abs(known_bias), 1e-2))]
        for step, exact in enumerate(control["exact"]):
            limit = max(4 * abs(control["losses"][step] - exact), abs(exact) / 128)
            result.append((step, "loss", max(abs(a["losses"][step] - exact) for a in answers), limit))
    else:
        what += "dropout off, " if answer["is_random"] and answer["dropout"] == "off" else ""
        what, worst = f"{what}in float64", max(answer["worst"] for answer in answers)
    departures = [
        {"step": step, "quantity": quantity, "layer": "all", "error": error, "tolerance": limit, "rank": 0, "order": -1}
        for step, quantity, error, limit in result
        if not error <= limit
    ]
    departures += [{**each, "rank": rank} for rank, a in enumerate(answers) for each in a["departures"]]
    return CheckResult(
        exactness=exactness_of(plan),
        what=what,
        plan=plan,
        worst_error=worst,
        tolerance=tolerance,
        tolerance_from=source,
        departures=tuple(sorted(departures, key=lambda d: (d["step"], d["order"], d["rank"]))),
        traffic=tuple(f"rank {rank}: {line}" for rank, a in enumerate(answers) for line in a["traffic"]),
        num_messages=sum(answer["num_messages"] for answer in answers),
    )


def _of_sums(sums: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Distance between two gradients over the second one's norm, and how much longer the first is along the second."""
    distance, norm, product = (sum(each) for each in zip(*sums, strict=True))
    return ((distance / norm) ** 0.5, product / norm - 1) if norm else (distance**0.5, 0.0)
