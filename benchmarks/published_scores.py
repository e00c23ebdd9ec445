"""How far forecasts are from what was measured: a source's rows -> scores. An error is |forecast / measured - 1|."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.published_models import is_dense, reason_of
from benchmarks.published_plans import Case, Forecaster, Guess, case_of, explained
from benchmarks.published_rows import Measured, Row, Unscored, measured
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan

STALL_SECONDS = 0.2
"""For each message between stages: nanotron's runs on several nodes take 0.25 to 0.45 s more than their like, or less
than 0.1 s."""
LEAST_SWEEP = 3
"""Plans a sweep must have: with fewer there is hardly anything to rank."""


@dataclass(frozen=True, kw_only=True)
class ScoredPlan:
    """A row with its forecast, or the reason why it has none."""

    row: Row
    reason: str = ""
    is_dense: bool = False
    """A plain transformer of known size of which something was measured."""
    case: Case | None = None
    real: Measured | None = None
    guess: Guess | None = None

    @property
    def source(self) -> str:
        return self.row.text("file") or "(no file)"

    @property
    def real_seconds(self) -> float | None:
        if self.real and self.real.sample_seconds and self.guess:  # a step of as many samples as we took
            return self.real.sample_seconds * self.guess.batch
        return self.real.step_seconds if self.real else None

    @property
    def time_error(self) -> float | None:
        if self.guess is None or not self.real_seconds:
            return None
        return abs(self.guess.step_seconds / self.real_seconds - 1)

    @property
    def real_bytes(self) -> float | None:
        """None where the plan was chosen by what fits: then memory proves nothing."""
        return self.real.memory_bytes if self.real and self.case and self.case.is_told else None

    @property
    def memory_error(self) -> float | None:
        if self.guess is None or not self.real_bytes:
            return None
        return abs(self.guess.allocated_bytes / self.real_bytes - 1)

    @property
    def is_covered(self) -> bool | None:
        if self.guess is None or not self.real_seconds:
            return None
        return self.guess.low_seconds <= self.real_seconds <= self.guess.high_seconds

    @property
    def verdict(self) -> str:
        """right, false_fit (we say it fits, it was out of memory), false_oom, or nothing where there is no label."""
        if self.guess is None or not self.real or not self.real.label or not self.case or not self.case.is_told:
            return ""
        if self.guess.fits == (self.real.label == "fits"):
            return "right"
        return "false_fit" if self.guess.fits else "false_oom"

    @property
    def sweep(self) -> tuple[Any, ...]:
        """Rows that differ in nothing but the plan."""
        row = self.row
        columns = ("model", "hardware", "gpus", "seq_len")
        return (*(row.text(column) for column in columns), row.batch if row.has_batch else None)


def score_row(row: Row, forecaster: Forecaster) -> ScoredPlan:
    dense = False
    try:
        row.check_numbers()
        row = explained(row)
        dense = is_dense(row)
        real = measured(row)
        if not real.is_something:
            dense = False  # nor could anybody else score it
            raise Unscored(f"nothing measured (status {row.text('status') or 'empty'})")
        case = case_of(row, real.memory_rank)
        scored = ScoredPlan(row=row, is_dense=dense, case=case, real=real, guess=forecaster(case))
    except Unscored as unscored:
        return ScoredPlan(row=row, is_dense=dense, reason=str(unscored))
    except MeshwrightError as error:
        return ScoredPlan(row=row, is_dense=dense, reason=reason_of(error.problems[0]))
    if scored.time_error is None and scored.memory_error is None and not scored.verdict:
        reason = "nothing that can be compared (time left out, memory or recomputation not told)"
        return ScoredPlan(row=row, is_dense=dense, reason=reason)
    return scored


def score(rows: Iterable[Row], forecaster: Forecaster) -> list[ScoredPlan]:
    return [score_row(row, forecaster) for row in rows]


def by_source(all_scored: Iterable[ScoredPlan]) -> dict[str, list[ScoredPlan]]:
    found: dict[str, list[ScoredPlan]] = defaultdict(list)
    for each in all_scored:
        found[each.source].append(each)
    return dict(found)


def summary(rows: Sequence[ScoredPlan]) -> dict[str, Any]:
    """Of one source."""
    times = [each.time_error for each in rows if each.time_error is not None]
    memory = [each.memory_error for each in rows if each.memory_error is not None]
    verdicts = Counter(each.verdict for each in rows if each.verdict)
    covered = [each.is_covered for each in rows if each.is_covered is not None]
    steady = steady_rows(rows)
    regrets, steady_regrets = ([regret(sweep) for sweep in sweeps(some)] for some in (rows, steady))
    labelled = sum(verdicts.values())
    reasons = Counter(each.reason for each in rows if each.reason)
    dense = [not each.reason for each in rows if each.is_dense]
    return {
        "rows": len(rows),
        "scored": sum(not each.reason for each in rows),
        "dense_scored_fraction": _rounded(np.mean(dense)) if dense else None,
        "unscored": dict(reasons.most_common()),
        "time_median_error": _rounded(np.median(times)) if times else None,
        "time_p90_error": _rounded(np.quantile(times, 0.9)) if times else None,
        "kendall_tau": mean_tau(rows),
        "regret_mean": _rounded(np.mean(regrets)) if regrets else None,
        "regret_max": _rounded(max(regrets)) if regrets else None,
        "steady_tau": mean_tau(steady),
        "steady_regret_mean": _rounded(np.mean(steady_regrets)) if steady_regrets else None,
        "steady_regret_max": _rounded(max(steady_regrets)) if steady_regrets else None,
        "memory_median_error": _rounded(np.median(memory)) if memory else None,
        # Of all rows that ran or ran out of memory, so that the three add up to 1.
        "oom_accuracy": _rounded(verdicts["right"] / labelled) if labelled else None,
        "false_fit_fraction": _rounded(verdicts["false_fit"] / labelled) if labelled else None,
        "false_oom_fraction": _rounded(verdicts["false_oom"] / labelled) if labelled else None,
        "coverage": _rounded(np.mean(covered)) if covered else None,
    }


def _rounded(value: Any) -> float:
    return round(float(value), 4)


def sweeps(rows: Iterable[ScoredPlan]) -> list[list[ScoredPlan]]:
    """Rows with a time, of which only the plan differs, three or more together, and not all of one plan."""
    found: dict[tuple[Any, ...], list[ScoredPlan]] = defaultdict(list)
    for each in rows:
        if each.time_error is not None:
            found[each.sweep].append(each)
    # Repeats of one plan, or rows that differ in what no column tells, leave nothing to choose.
    return [
        members
        for members in found.values()
        if len(members) >= LEAST_SWEEP and len({each.case.plans for each in members if each.case}) > 1
    ]


def steady_rows(rows: Sequence[ScoredPlan]) -> list[ScoredPlan]:
    """Without runs whose `quality` tells of a low MFU and pipelines that stalled. Measured times alone decide."""
    stalled = {id(each) for sweep in sweeps(rows) for each in sweep if any(_has_stalled(each, by) for by in sweep)}
    return [each for each in rows if id(each) not in stalled and "low_mfu" not in each.row.text("quality")]


def _has_stalled(each: ScoredPlan, by: ScoredPlan) -> bool:
    """Whether a pipeline took longer than another run allows, by more for each message to a neighbour than any link
    explains: of n times the samples, blocks or parts of a block a slot takes at most n times as long."""
    (pp, tp, others, plan), (by_pp, by_tp, by_others, by_plan) = _shape(each), _shape(by)
    if min(pp, by_pp) == 1 or by_tp < tp or others != by_others:
        return False
    assert each.real_seconds
    assert by.real_seconds
    slots = (plan.num_microbatches + pp - 1) / (by_plan.num_microbatches + by_pp - 1)
    work = max(1, plan.microbatch / by_plan.microbatch) * max(1, by_pp / pp) * by_tp / tp
    most, messages = by.real_seconds * slots * work, 2 * plan.num_microbatches * min(2, pp - 1)
    return each.real_seconds > max(1.5 * most, most + STALL_SECONDS * messages)


def _shape(each: ScoredPlan) -> tuple[int, int, tuple[Any, ...], Plan]:
    """Stages, ranks that share a block, whatever else makes a step longer, and the plan."""
    assert each.case
    case, plan = each.case, each.case.plans[0]
    same = tuple(one for one in plan.techniques if one.name not in ("pipeline", "tensor", "replicate", "shard"))
    shard = plan.technique("shard")
    whole = case.numerics, case.variant, repr(case.dialect.attention), case.dialect.traffic, same
    pipeline, tensor = plan.technique("pipeline"), plan.technique("tensor")
    sizes = (1 if one is None else one.size for one in (pipeline, tensor))
    return *sizes, (*whole, shard is not None and shard.stage > 1, pipeline and pipeline.schedule), plan


def _columns(sweep: Sequence[ScoredPlan]) -> tuple[list[float], list[float]]:
    """Forecast and measured seconds of each plan; where it was run again, or with another release, their median."""
    found: dict[tuple[Any, ...], list[ScoredPlan]] = defaultdict(list)
    for each in sweep:
        if each.guess and each.real_seconds and each.case:
            case = each.case
            found[case.plans, case.numerics, case.variant, repr(case.dialect)].append(each)
    guesses = [some[0].guess.step_seconds for some in found.values() if some[0].guess]
    return guesses, [float(np.median([each.real_seconds for each in some])) for some in found.values()]


def regret(sweep: Sequence[ScoredPlan]) -> float:
    """What it costs to run the plan that we would pick: the fastest forecast of those that we say fit.

    Of equal forecasts the one that measured worst, for nothing tells us which to take.
    """
    fitting = [each for each in sweep if each.guess and each.guess.fits] or list(sweep)
    guesses, reals = _columns(fitting)
    picked = max(real for guess, real in zip(guesses, reals, strict=True) if guess == min(guesses))
    return picked / min(_columns(sweep)[1]) - 1


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Tau-b: pairs in the same order less pairs in the other, over pairs that are not tied. None where all are."""
    a, b = (np.sign(np.subtract.outer(values, values)) for values in (np.asarray(first), np.asarray(second)))
    untied = float(np.sum(a != 0)) * float(np.sum(b != 0))
    return float(np.sum(a * b) / np.sqrt(untied)) if untied else None


def mean_tau(rows: Sequence[ScoredPlan]) -> float | None:
    """Over sweeps, each counting as many times as it has plans."""
    taus = [(kendall_tau(*_columns(sweep)), len(sweep)) for sweep in sweeps(rows)]
    known = [(tau, count) for tau, count in taus if tau is not None]
    total = sum(count for _, count in known)
    return _rounded(sum(tau * count for tau, count in known) / total) if known else None
