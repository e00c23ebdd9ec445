"""Plan -> Work: apply `price` of all techniques, for one stage or for arrays of candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from operator import is_
from typing import Any, TypeVar

import numpy as np

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.core.training_state import settle
from meshwright.core.work import ADAM, Collective, Updating, Work, base_work, replace

ELEMENT_BYTES = 4
"""Parameters and gradients are kept in float32."""


def sizes_of(plan: Plan, profile: Profile, *, sequence: int, stage: int, chunk: int | None = None) -> dict[str, Any]:
    """The numbers a plan gives to `price`."""
    stages = plan.spans_of_stages(profile)
    spans = stages[stage]
    part: dict[str, Any] = {} if chunk is None or len(spans) == 1 else {"chunk": chunk}
    for technique in plan.techniques:
        part |= technique.counts_in(profile, spans, part.get("chunk"))
    spans = (spans[chunk],) if "chunk" in part and chunk is not None else spans
    return part | {
        **plan.mesh,
        "batch": plan.batch,
        "sequence": sequence // plan.sequence_parts,
        "sequence_parts": plan.sequence_parts,
        "microbatch": plan.microbatch,
        "num_microbatches": plan.num_microbatches,
        "stage": stage,
        "num_stages": len(stages),
        "first_block": spans[0][0],
        "blocks": sum(last - first for first, last in spans),
    }


def price(
    profile: Profile,
    plan: Plan,
    *,
    sequence: int,
    stage: int = 0,
    chunk: int | None = None,
    optimizer: Updating = ADAM,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """What a step asks of a rank of one stage, or of one chunk of its layers."""
    sizes = sizes_of(plan, profile, sequence=sequence, stage=stage, chunk=chunk)
    techniques = plan.in_phase_order()
    return price_sizes(profile, techniques, sizes, optimizer=optimizer, element_bytes=element_bytes)


def price_sizes(
    profile: Profile,
    techniques: tuple[Technique, ...],
    sizes: Mapping[str, Any],
    *,
    optimizer: Updating = ADAM,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """The same over arrays: one entry per candidate and stage in any of the sizes."""
    work = base_work(profile, sizes, element_bytes=element_bytes, optimizer=optimizer)
    for technique in techniques:
        work = technique.price(work)

    def sent(task: Any) -> Any:
        """One rank alone sends nothing."""
        return replace(task, repeat=task.repeat * (work.size(task.axis) > 1)) if isinstance(task, Collective) else task

    return settle(work).map_tasks(sent)


T = TypeVar("T")
_PLAIN = frozenset((str, int, float, bool, type(None)))


def stacked(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers of all candidates: an array where they differ, else the number they share."""
    return {
        name: value if all(one[name] == value for one in each) else np.array([one[name] for one in each])
        for name, value in each[0].items()
    }


def picked(value: T, at: int) -> T:
    """The same with the numbers of one candidate in the place of arrays over all; what has none stays what it is."""
    one: T = _picked(value, at)
    return one


def _picked(value: Any, at: int) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, np.ndarray):
        return value[at].item() if value.ndim else value.item()
    if isinstance(value, tuple):
        parts = _all_picked(value, at)
        if all(map(is_, parts, value)):
            return value
        return kind(*parts) if hasattr(kind, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return dict(zip(value, _all_picked(value.values(), at), strict=True))
    if is_dataclass(kind):
        names = _names(kind)
        before = [getattr(value, name) for name in names]
        parts = _all_picked(before, at)
        return value if all(map(is_, parts, before)) else kind(**dict(zip(names, parts, strict=True)))
    return value


def _all_picked(values: Iterable[Any], at: int) -> list[Any]:
    return [value if type(value) in _PLAIN else _picked(value, at) for value in values]


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
