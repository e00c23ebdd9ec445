"""`--stragglers 0.1x2`: what devices that are slow now and then cost a plan whose ranks wait for each other. No torch.

In each step each device, by itself, is slow with some probability, and its computing then takes a multiple of its time.
Ranks of a stage exchange with each other, so a stage is as slow as the slowest of its r ranks: in 1 - (1 - p)^r of all
steps. A step is simulated for the stages that are slow in it, in all replicas at once: replicas of a pipeline that are
slow in different stages make it no slower than that.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from meshwright.ask.question import Question
from meshwright.core.errors import Problem
from meshwright.core.plan import Plan
from meshwright.core.units import counted, pretty_seconds
from meshwright.simulator.forecast import slowest_of
from meshwright.simulator.mixed_groups import pipes_of, slowest_pipe
from meshwright.simulator.pricing import Seconds, Staged

MOST_TIMES = 1_000_000
_NUM_STEPS = 200
"""Drawn with a fixed seed for a plan of several stages; their mean is then known to about 2 %."""


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Each device takes `factor` times as long to compute in this `share` of its steps."""

    share: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class StragglerForecast:
    stragglers: Stragglers
    waiting_share: float
    """Of the steps, those in which some device is slow: all others wait for it."""
    step_seconds: float
    """On average."""
    slowdown: float
    """Times a step without stragglers."""
    slowdown_alone: float
    """Of a device that waits for nobody."""


def read_stragglers(text: str, problems: list[Problem], flag: str = "--stragglers") -> Stragglers:
    share, _, factor = text.partition("x")
    try:
        result = Stragglers(share=float(share), factor=float(factor))
    except ValueError:
        fix = "For example 0.1x2: in a tenth of its steps a device computes twice as long."
        problems.append(Problem(where=flag, what=f'"{text}" is not of the form SHARExTIMES.', fix=fix))
        return Stragglers(share=0.0, factor=1.0)
    if not 0 <= result.share <= 1:
        problems.append(Problem(where=flag, what=f"{share} is no share of steps.", fix="Use 0 to 1."))
    if not 1 <= result.factor <= MOST_TIMES:
        problems.append(Problem(where=flag, what=f"{factor} is no slowdown.", fix=f"Use 1 to {MOST_TIMES:,}."))
    return result


def forecast_stragglers(stragglers: Stragglers, plan: Plan, question: Question) -> StragglerForecast:
    """`plan`: an answer to the question."""
    here, pipes = pipes_of(question.profile, plan, question.cluster, question.sequence, question.optimizer)
    usual, _ = slowest_pipe(pipes)
    num_stages = len(pipes[0].unfolded)
    is_slow = 1 - (1 - stragglers.share) ** (plan.num_ranks / num_stages)
    known = {(False,) * num_stages: usual}

    def seconds(slow: tuple[bool, ...]) -> float:
        if slow not in known:
            known[slow] = slowest_pipe([_slowed(pipe, slow, stragglers.factor) for pipe in pipes])[0]
        return known[slow]

    if num_stages == 1:
        mean = is_slow * seconds((True,)) + (1 - is_slow) * usual
    else:
        draw = random.Random(0).random
        drawn = [tuple(draw() < is_slow for _ in range(num_stages)) for _ in range(_NUM_STEPS)]
        mean = math.fsum(map(seconds, drawn)) / _NUM_STEPS
    return StragglerForecast(
        stragglers=stragglers,
        waiting_share=1 - (1 - stragglers.share) ** plan.num_ranks,
        step_seconds=mean * slowest_of(here, plan.num_ranks),
        slowdown=mean / usual,
        slowdown_alone=1 + stragglers.share * (seconds((True,) * num_stages) / usual - 1),
    )


def _slowed(pipe: Staged, slow: tuple[bool, ...], factor: float) -> Staged:
    """With so many times the seconds of compute in stages that are `slow`; each stage stands by itself."""
    places, unfolded, stages = pipe.timetable.places(len(slow)), pipe.unfolded, []
    for stage, is_slow in zip(unfolded, slow, strict=True):
        charges = {
            charge: seconds * (factor if is_slow and charge.lane == "compute" else 1.0)
            for charge, seconds in stage.cost.charges.items()
        }
        alone = replace(stage.run, count=1)
        stages.append(replace(stage, run=alone, cost=replace(stage.cost, charges=charges)))
    spans = []
    for at, each in enumerate(pipe.spans):
        stage = places.stage(at)
        before, after = unfolded[stage].all_seconds, stages[stage].all_seconds
        spans.append(Seconds(*(a * (y / x if x else 1.0) for a, x, y in zip(each, before, after, strict=True))))
    groups = tuple(group for stage, group in zip(pipe.stages, pipe.groups, strict=True) for _ in range(stage.run.count))
    return replace(pipe, stages=tuple(stages), spans=tuple(spans), groups=groups)


def straggler_lines(found: StragglerForecast, num_ranks: int) -> list[str]:
    given = found.stragglers
    return [
        f"stragglers, {given.factor:g} times as slow in {given.share:.1%} of their steps: {found.waiting_share:.1%} of "
        f"the steps of {counted(num_ranks, 'device')} wait for one; a step takes {pretty_seconds(found.step_seconds)} "
        f"on average, {found.slowdown:.2f} times as long (a device that waits for nobody: {found.slowdown_alone:.2f})"
    ]
