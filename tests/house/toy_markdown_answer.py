"""A second renderer of `Answer`: Markdown, as a page or a comment would have it. It lives outside the package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.ask.answer import Answer
from meshwright.ask.question import Outcome
from meshwright.core.units import pretty_bytes, pretty_count, pretty_seconds
from meshwright.planner.search import ScoredPlan


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    names = list(names)
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def cells(scored: ScoredPlan) -> tuple[str, str, str, str]:
    told = scored.forecast
    rate = f"{pretty_count(told.tokens_per_second)} {told.counts}/s"
    return f"`{scored.plan}`", pretty_seconds(told.step_seconds), rate, pretty_bytes(told.peak_bytes)


def outcome_cells(outcome: Outcome) -> tuple[str, ...]:
    return (outcome.words, *(cells(outcome.best) if outcome.best else (outcome.reason, "", "", "")))


def markdown(answer: Answer) -> str:
    return "\n".join(lines(answer))


def lines(answer: Answer) -> Iterator[str]:
    question = answer.question
    yield f"# {question.profile.name} on {question.machine.name}, batch {question.batch}"
    yield ""
    plan = ("plan", "step", "rate", "memory")
    if answer.batch_goals is not None:
        runs = answer.batch_goals.runs
        yield "## Batches"
        yield from table(("batch", "devices", *plan), ((str(r.batch), *outcome_cells(r.outcome)) for r in runs))
    if answer.device_counts is not None:
        yield "## Numbers of devices"
        tried = answer.device_counts.tried
        yield from table(("devices", "cluster", *plan), ((str(d.devices), *outcome_cells(d.outcome)) for d in tried))
    if answer.result is not None and answer.result.ranked:
        yield "## Plans"
        yield from table(plan, map(cells, answer.result.ranked))
    yield from (f"- {line}" for line in answer.explanation)
    yield ""
    if answer.ways_out is not None:
        yield "## Ways out"
        yield from table(("way", *plan), (outcome_cells(way.outcome) for way in answer.ways_out.open))
        yield from (f"- {line}" for line in answer.ways_out.closed)
    for why in answer.why:
        yield f"## Why {why.knob} is {why.value}"
        yield from table(("instead", *plan), map(outcome_cells, why.others))
    if answer.what_if is not None:
        yield f"## What if {answer.what_if.words}"
        yield from table(("change", *plan), [outcome_cells(answer.what_if.after)])
    if answer.front is not None:
        yield "## The fastest plan for each memory"
        yield from table(plan, (cells(point.scored) for point in answer.front.points))
    if answer.is_interrupted:
        yield "*Stopped before the end.*"
