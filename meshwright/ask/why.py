"""Why a knob has its value: the best plan with each neighbouring value, and without it at all.

Values come from the technique's own options. The knob is pinned, everything else is left to the search: what an axis
gives up another takes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

from meshwright.ask.question import Outcome, Question, Tell, outcome
from meshwright.ask.rules_of_thumb import batch_rules, worker_rules
from meshwright.core.all_reduce import ALGORITHMS, OF_NODES, AllReduce
from meshwright.core.codec import field_types
from meshwright.core.errors import Problem, nearest, raise_problems
from meshwright.core.plan import Plan
from meshwright.core.technique import Axis, Choice, Option, PerLayer, technique_named, technique_names
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.planner.search import ScoredPlan
from meshwright.planner.wishes import MICROBATCH
from meshwright.simulator.pricing import price
from meshwright.simulator.stage_seconds import routes

BATCH = "batch"
ABSENT = "absent"
ALGORITHM = "algorithm"
"""A setting that says which sends make an all_reduce."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    technique: str
    """Empty: the batch or the microbatch, named by `field`."""
    field: str

    def __str__(self) -> str:
        return f"{self.technique}.{self.field}" if self.technique and self.field else self.technique or self.field


@dataclass(frozen=True, kw_only=True)
class Why:
    knob: Knob
    value: str
    """What the best plan has."""
    wished: str
    """The pin or ban that left no choice; empty if search chose."""
    best: ScoredPlan
    others: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()


def read_knobs(texts: Sequence[str]) -> tuple[Knob, ...]:
    """Every wrong word is reported at once."""
    problems: list[Problem] = []
    knobs = []
    for text in texts:
        name, dot, field = text.strip().partition(".")
        kind: type | None = technique_named(name) if name in technique_names() else None
        if name in (BATCH, MICROBATCH) and not dot:
            knobs.append(Knob(technique="", field=name))
        elif kind is None:
            what, fix = f'no knob is called "{name}".', nearest(name, (*technique_names(), MICROBATCH, BATCH))
            problems.append(Problem(where=f"--why {text}", what=what, fix=fix))
        elif dot and field not in (fields := field_types(kind)):
            fix = nearest(field, fields) if fields else f"Write --why {name}."
            problems.append(Problem(where=f"--why {text}", what=f'{name} has no "{field}".', fix=fix))
        else:
            knobs.append(Knob(technique=name, field=field))
    raise_problems(problems)
    return tuple(knobs)


def why(question: Question, best: ScoredPlan, knob: Knob, tell: Tell) -> Why:
    """Searches again for each other value."""
    notes: list[str] = []
    others: list[Outcome] = []
    # Without the user's wishes about the knob: they would contradict every other value.
    wishes = [
        (kind, text)
        for kind, texts in (("pin", question.pin), ("ban", question.ban))
        for text in texts
        if text.partition("=")[0].partition(".")[0].strip() == (knob.technique or knob.field)
    ]
    pin = tuple(text for text in question.pin if ("pin", text) not in wishes)
    without = replace(question, pin=pin, ban=tuple(text for text in question.ban if ("ban", text) not in wishes))

    def ask(words: str, changed: Question) -> Outcome:
        tell(f"searching with {words}")
        others.append(outcome(words, changed))
        return others[-1]

    batch = best.plan.batch
    if knob.field == BATCH and not knob.technique:
        for count in (batch // 2 if batch % 2 == 0 else 0, batch * 2):
            if count:
                ask(f"batch {count}", replace(without, batch=count))
        notes += batch_rules(question, best)
    elif not knob.technique:  # the next microbatches that divide the batch
        small = [n for n in range(1, math.isqrt(batch) + 1) if batch % n == 0]
        for count in _neighbours({*small, *(batch // n for n in small)}, best.plan.microbatch):
            ask(f"microbatch {count}", _pinned(without, f"{MICROBATCH}={count}"))
    else:
        around: Plan | None = best.plan
        is_used = best.plan.technique(knob.technique) is not None
        if not is_used:  # the best plan that has it is what its values are compared around
            made = ask(f"{knob.technique}, set as fits best", _pinned(without, knob.technique))
            around = made.best.plan if made.best is not None else None
        for words, changed in _other_values(without, around, knob, notes) if around is not None else ():
            ask(words, changed)
        kind: type = technique_named(knob.technique)
        if knob.field in ("", ALGORITHM) and ALGORITHM in field_types(kind):
            notes.extend(largest_sum(question, around or best.plan, knob.technique))
        if is_used and technique_named(knob.technique).splits_samples:
            notes += worker_rules(question, best)
        if is_used:
            ask(f"no {knob.technique}", replace(without, ban=(*without.ban, knob.technique)))
    return Why(
        knob=knob,
        value=_value(best.plan, knob, question),
        wished=", ".join(f"--{kind} {text}" for kind, text in wishes),
        best=best,
        others=tuple(others),
        notes=tuple(notes),
    )


def largest_sum(question: Question, plan: Plan, technique: str) -> Iterator[str]:
    """Seconds of a technique's largest all_reduce by each algorithm, the fastest first."""
    work = price(question.profile, plan, sequence=question.sequence, optimizer=question.optimizer)
    sums = [each for each in work.collectives if (each.origin, each.kind) == (technique, "all_reduce") and each.repeat]
    if not sums:
        return
    largest = max(sums, key=lambda each: float(each.bytes))
    road = routes(question.cluster, plan.mesh)[largest.axis]
    every: dict[str, AllReduce | None] = {"auto": None}
    every |= {name: AllReduce(algorithm=name, node_size=int(road.per_node)) for name in ALGORITHMS}
    seconds = {name: float(road.seconds("all_reduce", largest.bytes, one)) for name, one in every.items()}
    ranked = ", ".join(f"{name} {pretty_seconds(seconds[name])}" for name in sorted(seconds, key=seconds.__getitem__))
    size = f"{pretty_bytes(float(largest.bytes))} over {int(road.size)} ranks, {int(road.per_node)} in a node"
    yield f"Its largest all_reduce, {size}: {ranked}. Only auto goes on beside backward."


def _other_values(question: Question, plan: Plan, knob: Knob, notes: list[str]) -> list[tuple[str, Question]]:
    """Other values of a setting that the plan uses: the neighbours of an ordered one, else all of them."""
    kind = technique_named(knob.technique)
    # As search asks: what may be tried depends on the samples there are, not on the longest the model takes.
    profile = replace(question.profile, max_sequence=question.sequence)
    options = {field: option for option in kind.options(profile, question.cluster) for field in _fields(option)}
    field = knob.field or (_main_field(tuple(options.values())) if options else "")
    declared: type = kind
    hint = field_types(declared).get(field)
    if field not in options and (get_origin(hint) is Literal or hint is bool):
        options[field] = Choice(field, get_args(hint) or (False, True))
    if field not in options:
        notes.append(
            f"Search does not turn {Knob(technique=knob.technique, field=field)}; pin it to try another value."
        )
        return []
    option, used = options[field], plan.technique(kind.name)
    now = getattr(used, field) if used is not None else None
    values: list[Any]
    if isinstance(option, Choice):
        values = [value for value in option.values if value != now]
    elif isinstance(option, PerLayer):  # a quarter of a stage's blocks less and more than the fullest stage has now
        most, count = max(plan.blocks_of_stages(question.profile)), 0
        for spans in plan.spans_of_stages(question.profile):
            counts = used.counts_in(question.profile, spans) if used is not None else {}
            prefix = f"{kind.name}.{field}."
            count = max(count, sum(blocks for key, blocks in counts.items() if key.startswith(prefix)))
        step = max(1, most // 4)
        values = [f"first {n}" for n in sorted({max(0, count - step), min(most, count + step)} - {0, count})]
    else:
        sizes = tuple(size for size in option.sizes if question.cluster.num_devices % size == 0)
        values = list(sizes[:1])
        if now is not None:  # beyond the largest: asked all the same, to hear which rule it breaks
            values = [*_neighbours(sizes, now), *([2 * now] if now >= max(sizes, default=0) else [])]
    words = {value: f"{knob.technique}.{field}={_plain(value)}" for value in values}
    beside: dict[Any, tuple[str, ...]] = {}
    if field == ALGORITHM and OF_NODES in values and kind.axis in plan.mesh:
        nodes = int(routes(question.cluster, plan.mesh)[kind.axis].per_node)
        beside[OF_NODES] = (f"{knob.technique}.node_size={nodes}",)
    return [(text, _pinned(question, text, *beside.get(value, ()))) for value, text in words.items()]


def _fields(option: Option) -> tuple[str, ...]:
    return option.fields if isinstance(option, PerLayer) else (option.field,)


def _main_field(options: tuple[Option, ...]) -> str:
    """What a technique's name alone asks about: its size, else how many layers, else its first choice."""
    open_ = [option for option in options if not (isinstance(option, Choice) and len(option.values) < 2)]
    by_role = [option for role in (Axis, PerLayer, Choice) for option in open_ if isinstance(option, role)]
    return _fields((*by_role, *options)[0])[0]


def _neighbours(sizes: Collection[int], now: int) -> list[int]:
    return [*sorted(size for size in sizes if size < now)[-1:], *sorted(size for size in sizes if size > now)[:1]]


def _pinned(question: Question, *pins: str) -> Question:
    return replace(question, pin=(*question.pin, *pins))


def _value(plan: Plan, knob: Knob, question: Question) -> str:
    if not knob.technique:
        return str(getattr(plan, knob.field))
    used = plan.technique(knob.technique)
    if used is None:
        return ABSENT
    options = technique_named(knob.technique).options(question.profile, question.cluster)
    field = knob.field or (_main_field(options) if options else "")
    return _plain(getattr(used, field)) if field else "used"


def _plain(value: Any) -> str:
    """As a pin would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
