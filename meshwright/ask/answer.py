"""A request and its answer as values: the fastest plan, why it won, what anything else would give.

    request = read_request(profile, cluster, batch=128, sequence=8192, why=["tensor"], what_if=["memory=+20GiB"])
    answer = answer_of(request)          # an `Answer`; report/answer_text.py and report/answer_json.py render it

`plan` does both at once. Nothing here prints: a renderer gets the `Answer`, and whoever waits is told by a function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeVar

from meshwright.ask.exchange import ExchangeAdvice, advise_exchange
from meshwright.ask.explain import PublishedRun, beaten_run, explain, percent
from meshwright.ask.memory import MemoryFront, front
from meshwright.ask.question import HEADROOM, MOST_HEADROOM, Question, Tell, with_headroom
from meshwright.ask.sizes import (
    BatchGoal,
    BatchGoals,
    DeviceCounts,
    best_batch,
    compare_sizes,
    fewer,
    node_width,
    read_goal,
    resized,
    sizes_between,
)
from meshwright.ask.ways_out import WaysOut, ways_out, without_tiers
from meshwright.ask.what_if import (
    ComparedPlans,
    WhatIfChange,
    compare,
    read_amount,
    read_changes,
    read_memory,
    usual_changes,
    with_changes,
)
from meshwright.ask.why import Knob, Why, read_knobs, why
from meshwright.core.cluster import Cluster
from meshwright.core.codec import Artefact
from meshwright.core.errors import MeshwrightError, Problem, read_or_note
from meshwright.core.profile import Profile
from meshwright.core.technique import EXACTNESS
from meshwright.core.units import pretty_bytes
from meshwright.core.work import ADAM, EachElement
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.scoreboard import TIE
from meshwright.planner.search import Bounds, ScoredPlan, SearchResult
from meshwright.planner.wishes import read_wishes

AUTO = "auto"
DEFAULT_BATCH = 64
TOKENS_TO_COMPARE = 1e9
"""Tokens for which the device-hours of several numbers of devices are compared, where no target is given."""
_QUICK_SECONDS = 2.0
"""After a search this quick, the usual changes are searched too; after a longer one they are only named."""
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that is asked at once about one model on one cluster."""

    question: Question
    top: int = 8
    """Plans to rank."""
    devices: tuple[int, ...] = ()
    """Numbers of devices to compare; empty: those of the cluster."""
    tokens: float = TOKENS_TO_COMPARE
    """For which numbers of devices are compared."""
    goal: BatchGoal | None = None
    """What a batch is to reach soonest; None: the batch is given."""
    knobs: tuple[Knob, ...] = ()
    """Settings whose value is to be explained."""
    changes: tuple[WhatIfChange, ...] = ()
    """Changes of the machines or the batch, applied together."""
    has_front: bool = False
    """Whether the fastest plan for each memory is asked for."""
    suggests: bool = False
    """Whether to add what people ask next, where nothing particular is asked."""
    command: tuple[str, ...] = ()
    """The words of the command that asks; empty: it is no command."""

    @property
    def is_narrow(self) -> bool:
        """One thing is asked about the best plan, not everything."""
        return bool(self.knobs or self.changes or self.has_front)


@dataclass(frozen=True, kw_only=True)
class Answer(Artefact):
    """What came of a request. A part that was not asked for, or not reached, is empty."""

    request: PlanRequest
    question: Question
    """The one that `result` answers: with the devices and the batch that are best, where they were to be chosen."""
    result: SearchResult | None = None
    """None: stopped while devices or batch were chosen."""
    batch_goals: BatchGoals | None = None
    device_counts: DeviceCounts | None = None
    ways_out: WaysOut | None = None
    """Where nothing fits, or only with memory beyond the device's, and nothing else is asked."""
    exchange: ExchangeAdvice | None = None
    """Which exchange is recommended, where approximate ones are allowed."""
    why: tuple[Why, ...] = ()
    what_if: ComparedPlans | None = None
    front: MemoryFront | None = None
    suggested: tuple[WhatIfChange, ...] = ()
    suggestions: tuple[ComparedPlans, ...] = ()
    """Results for the suggested changes; empty where searching for them would take too long."""
    is_interrupted: bool = False
    """The user did not want to wait for the rest."""
    version: int = 1

    @property
    def best(self) -> ScoredPlan | None:
        return self.result.best if self.result is not None else None

    @property
    def ranked(self) -> tuple[ScoredPlan, ...]:
        """The fastest plans that fit, best first."""
        return self.result.ranked if self.result is not None else ()

    @property
    def explanation(self) -> list[str]:
        """Why the best plan won, or why nothing fits: a few lines of words."""
        lines = explain(self.result, self.question.machine) if self.result is not None else []
        if self.best is not None and (run := self.beaten_run) is not None:
            above = f"above the best published run of this kind ({percent(run.mfu)}"
            about = f"{run.model} on {run.devices} devices, {run.source}"
            lines.append(f"MFU {percent(self.best.forecast.mfu)}: {above}: {about}); treat with care")
        return lines

    @property
    def beaten_run(self) -> PublishedRun | None:
        """The best published run of this kind, where the best plan's forecast is above it."""
        return beaten_run(self.question.profile, self.question.cluster, self.best) if self.best is not None else None


def answer_of(request: PlanRequest, progress: Tell = lambda text: None) -> Answer:
    *_, whole = answers(request, progress)
    return whole


def answers(
    request: PlanRequest, progress: Tell = lambda text: None, adapted: Callable[[], Profile | None] = lambda: None
) -> Iterator[Answer]:
    """The answer as it grows, after each part; the last one is the whole. `adapted`: see `ways_out`."""
    question = request.question
    answer = Answer(request=request, question=question)

    def grown(**parts: Any) -> Answer:
        nonlocal answer
        answer = replace(answer, **parts)
        return answer

    if request.goal is not None:
        counts = request.devices[::-1] or fewer(question.cluster.num_devices)
        possible = tuple(count for count in counts if resized(question.cluster, count) is not None)
        goals = best_batch(question, request.goal, possible, progress)
        question = question if goals.soonest is None else goals.soonest.outcome.question
        yield grown(batch_goals=goals, question=question, is_interrupted=goals.is_interrupted)
    elif request.devices:
        sizes = compare_sizes(question, request.devices, progress)
        if sizes.fastest is not None:
            question = sizes.fastest.outcome.question
        else:
            question = replace(question, cluster=resized(question.cluster, request.devices[-1]) or question.cluster)
        yield grown(device_counts=sizes, question=question, is_interrupted=sizes.is_interrupted)
    if answer.is_interrupted:
        return
    progress("searching; Ctrl-C shows the best so far")
    bounds: Bounds | None = {} if request.has_front else None
    result = question.ask(top=request.top, compares=not request.is_narrow, tie=TIE, bounds=bounds, tell=progress)
    yield grown(result=result, is_interrupted=result.is_interrupted)
    if answer.is_interrupted:
        return
    try:  # what is asked about the best plan; where nothing is, what people ask next
        if result.best is None and not (request.changes or request.has_front):
            yield grown(ways_out=ways_out(question, result, progress, request.command, adapted))
        elif result.best is not None and result.best.forecast.peak_bytes_by_tier and not request.is_narrow:
            yield grown(ways_out=without_tiers(question, progress, request.command, adapted))
        if result.best is not None and question.allow == EXACTNESS[-1] and not request.is_narrow:
            yield grown(exchange=advise_exchange(question, result.best, progress))
        for knob in request.knobs:
            if result.best is not None:
                yield grown(why=(*answer.why, why(question, result.best, knob, progress)))
        if request.changes:
            yield grown(what_if=compare(question, request.changes, result.best))
        if request.has_front:
            made = front(question, progress, result.best, bounds)
            yield grown(front=made, is_interrupted=made.is_interrupted)
        if request.suggests and not request.is_narrow and result.best is not None:
            changes = usual_changes(question)
            is_quick = result.search_seconds < _QUICK_SECONDS
            compared = tuple(compare(question, (change,), result.best) for change in changes) if is_quick else ()
            yield grown(suggested=changes, suggestions=compared)
    except KeyboardInterrupt:
        yield grown(is_interrupted=True)


def read_request(
    profile: Profile | None,
    cluster: Cluster | None,
    *,
    batch: int | str,
    sequence: int,
    optimizer: OptimizerConfig | EachElement = ADAM,
    allow: str = "rounded",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    max_memory: int | str | None = None,
    headroom: float | None = None,
    top: int = 8,
    time_limit: float | None = None,
    why: Sequence[str] = (),
    what_if: Sequence[str] = (),
    front: bool = False,
    devices: int | str | None = None,
    critical_batch: float | str | None = None,
    target_steps: float | str | None = None,
    target_tokens: float | str | None = None,
    suggests: bool = False,
    default_batch: int = DEFAULT_BATCH,
    problems: Sequence[Problem] = (),
) -> PlanRequest:
    """Everything that is wrong is raised at once, with the `problems` that the caller knows of; then model and cluster
    may be None. `default_batch`: where the batch is to be chosen and none fits."""
    wrong = list(problems)

    def tried(read: Callable[[], T]) -> T | None:
        return read_or_note(wrong, read)

    is_auto = isinstance(batch, str) and batch == AUTO
    samples = default_batch if is_auto else read_batch(batch, wrong)
    knobs = (tried(lambda: read_knobs(why)) if why else None) or ()
    changes = tried(lambda: read_changes(what_if)) or ()
    limit = read_memory(max_memory, "--max-memory", wrong) if isinstance(max_memory, str) else max_memory
    wrong += _limit_problems(headroom, time_limit)
    range_ = _read_range(str(devices), wrong) if devices else None
    may_have_target = (is_auto, is_auto, is_auto or bool(devices))  # by tokens, ranges of devices are compared too
    flags = {"--critical-batch": critical_batch, "--target-steps": target_steps, "--target-tokens": target_tokens}
    targets = [_read_target(*flag, may, wrong) for flag, may in zip(flags.items(), may_have_target, strict=True)]
    tried(lambda: read_wishes(pin, ban, allow=allow))
    if wrong or profile is None or cluster is None or samples is None:
        raise MeshwrightError(list(dict.fromkeys(wrong)))
    counts = _devices(cluster, range_, wrong) if range_ else ()
    if len(counts) == 1:
        cluster, counts = resized(cluster, counts[0]) or cluster, ()
    question = Question(
        profile=profile,
        cluster=cluster,
        batch=samples,
        sequence=sequence,
        optimizer=optimizer,
        allow=allow,
        pin=tuple(pin),
        ban=tuple(ban),
        max_memory_bytes=limit,
        headroom=HEADROOM if headroom is None else headroom,
        seconds=time_limit,
    )
    if problem := _memory_problem(question, is_headroom_given=headroom is not None):
        raise MeshwrightError([*wrong, problem])
    goal = tried(lambda: read_goal(profile, sequence, *targets)) if is_auto else None
    tried(lambda: with_changes(question, changes))
    if wrong:
        raise MeshwrightError(list(dict.fromkeys(wrong)))
    return PlanRequest(
        question=question,
        top=top,
        devices=counts,
        tokens=targets[2] or TOKENS_TO_COMPARE,
        goal=goal,
        knobs=knobs,
        changes=changes,
        has_front=front,
        suggests=suggests,
    )


def read_batch(batch: SupportsIndex | str, wrong: list[Problem]) -> int | None:
    """None where it is wrong, which is added to `wrong`."""
    try:
        return int(batch) if isinstance(batch, str) else operator.index(batch)
    except (TypeError, ValueError):
        what, fix = f'"{batch}" is no number of samples.', f"For example --batch 128, or --batch {AUTO}."
        wrong.append(Problem(where="--batch", what=what, fix=fix))
        return None


def _limit_problems(headroom: float | None, seconds: float | None) -> Iterator[Problem]:
    if not 0 <= (headroom or 0) <= MOST_HEADROOM:
        what, fix = f"{headroom:g} percent of memory cannot stay free.", f"Use 0 to {MOST_HEADROOM:g}."
        yield Problem(where="--headroom", what=what, fix=fix)
    if not (seconds or 0) >= 0:
        what, fix = f"{seconds:g} seconds is no time.", "For example --time-limit 60."
        yield Problem(where="--time-limit", what=what, fix=fix)


def _memory_problem(question: Question, *, is_headroom_given: bool) -> Problem | None:
    limit, headroom = question.max_memory_bytes, f"--headroom {question.headroom:g}"
    if limit is not None and (problem := question.memory_problem(limit, "--max-memory")):
        return problem
    usable = min(group.device.memory_bytes for group in with_headroom(question.cluster, question.headroom).groups)
    if limit is not None and limit > usable and is_headroom_given:
        what = f"{headroom} leaves {pretty_bytes(usable)} of a device, --max-memory is {pretty_bytes(limit)}."
        fix = f"Use --max-memory {pretty_bytes(usable).replace(' ', '')} or less, or give one of the two."
        return Problem(where="--headroom, --max-memory", what=what, fix=fix)
    return question.memory_problem(usable, headroom)


def _read_range(text: str, problems: list[Problem]) -> tuple[int, int] | None:
    """`16..64`, or `16` alone."""
    first, dots, last = (part.strip() for part in text.partition(".."))
    if not (first.isascii() and first.isdigit() and (last.isascii() and last.isdigit() if dots else True)):
        problems.append(Problem(where="--devices", what=f'"{text}" is no range.', fix="For example --devices 16..64."))
        return None
    low, high = int(first), int(last or first)
    if low < 1 or low > high:
        what = f"{text} goes from {low} to {high}."
        fix = f"Write --devices {high}..{low}." if 1 <= high < low else "Use at least 1 device."
        problems.append(Problem(where="--devices", what=what, fix=fix))
        return None
    return low, high


def _read_target(flag: str, value: float | str | None, may_be: bool, problems: list[Problem]) -> float | None:
    if value and not may_be:
        what, fix = "says how to choose a batch, which is given.", f"Add --batch {AUTO}."
        problems.append(Problem(where=flag, what=what, fix=fix))
    if not isinstance(value, str):
        return value
    amount = read_amount(value, _COUNTS, flag, f"{flag} 1000", problems)
    if amount is not None and amount.how:
        problems.append(Problem(where=flag, what=f'"{value}" is no number.', fix=f"For example {flag} 1000."))
    return amount.value if amount is not None else None


def _devices(cluster: Cluster, range_: tuple[int, int], problems: list[Problem]) -> tuple[int, ...]:
    counts = sizes_between(cluster, *range_)
    if range_[0] == range_[1] and not counts and resized(cluster, range_[0]) is not None:
        return (range_[0],)  # no power of two, and asked for by name
    if not counts:
        width = node_width(cluster)
        what = f"{range_[0]} to {range_[1]} has no part of a node and no whole nodes of {width} devices."
        problems.append(Problem(where="--devices", what=what, fix=f"Use 1 to {width}, or multiples of {width}."))
    return counts
