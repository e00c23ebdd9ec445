"""Pins that no plan can keep: said before the search, with what is possible instead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Technique, technique_named
from meshwright.planner.wishes import Wishes

_MOST_SHOWN = 12


def pin_problems(wishes: Wishes, profile: Profile, cluster: Cluster, sequence: int) -> list[Problem]:
    """What keeps each pinned technique, alone, from running this model on these machines; or else all together."""
    found = [
        replace(problem, where=f"pin {name}")
        for name, settings in wishes.pinned.items()
        for problem in (
            *_all_banned(technique_named(name), settings, wishes, profile, cluster),
            *_problems(technique_named(name), settings, profile, cluster, sequence),
        )
    ]
    return found or _too_many_ranks(wishes, cluster) or _at_odds(wishes, profile, cluster)


def _all_banned(
    kind: type[Technique], settings: Mapping[str, Any], wishes: Wishes, profile: Profile, cluster: Cluster
) -> Iterator[Problem]:
    for option in kind.options(profile, cluster):
        values = option.sizes if isinstance(option, Axis) else option.values if isinstance(option, Choice) else ()
        bad = wishes.banned_values.get((kind.name, getattr(option, "field", "")), ())
        if values and all(value in bad for value in values) and option.field not in settings:  # type: ignore[union-attr]
            yield Problem(where="", what=f"every {option.field} is banned.", fix="Take one of the bans away.")  # type: ignore[union-attr]


def _too_many_ranks(wishes: Wishes, cluster: Cluster) -> list[Problem]:
    sizes = {
        name: each["size"] for name, each in wishes.pinned.items() if technique_named(name).axis and "size" in each
    }
    ranks = prod(sizes.values())
    if cluster.num_devices % ranks == 0:
        return []
    words = " x ".join(f"{name} {size}" for name, size in sizes.items())
    what = f"{cluster.num_devices} devices cannot be shared out to {words}, {ranks} ranks."
    return [Problem(where=f"pin {', '.join(sizes)}", what=what, fix="Pin smaller sizes, or take a pin away.")]


def _at_odds(wishes: Wishes, profile: Profile, cluster: Cluster) -> list[Problem]:
    """Why pinned techniques do not go together, whatever the search would set beside what is pinned."""
    ways = [list(_ways(technique_named(name), settings, profile, cluster)) for name, settings in wishes.pinned.items()]
    first: list[Problem] = []
    for techniques in itertools.product(*ways):
        plan = Plan(techniques=techniques, batch=_ENOUGH)
        problems = [problem for each in plan.in_phase_order() for problem in each.check(plan, profile, cluster)]
        if not problems:
            return []
        first = first or [replace(problem, where=f"pin {problem.where}") for problem in problems]
    return first


def _ways(
    kind: type[Technique], settings: Mapping[str, Any], profile: Profile, cluster: Cluster
) -> Iterator[Technique]:
    """With each of its choices that runs alone."""
    choices = {}
    for option in kind.options(profile, cluster):
        if isinstance(option, Choice) and option.field not in settings:
            choices[option.field] = option.values
        elif isinstance(option, Axis) and option.field not in settings:
            choices[option.field] = option.sizes[:1]
    for values in itertools.product(*choices.values()):
        technique = kind(**settings, **dict(zip(choices, values, strict=True)))
        if not technique.check(Plan(techniques=(technique,), batch=_ENOUGH), profile, cluster):
            yield technique


def _problems(
    kind: type[Technique], settings: Mapping[str, Any], profile: Profile, cluster: Cluster, sequence: int
) -> Problems:
    """Of the pinned size; of the first possible one where none is pinned and none will do."""
    if not kind.axis:
        return _at_best(kind, settings, profile, cluster, sequence)
    possible = next((o.sizes for o in kind.options(profile, cluster) if isinstance(o, Axis)), ())
    possible = tuple(size for size in possible if cluster.num_devices % size == 0)
    if "size" in settings:
        size = settings["size"]
        problems = _at_best(kind, settings, profile, cluster, sequence)
        if not problems and cluster.num_devices % size:
            what = f"{cluster.num_devices} devices cannot be shared out to an axis of {size}."
            problems = (Problem(where="", what=what, fix=f"Use {_listed((1, *possible))}."),)
        return problems
    if not possible:
        what = f"no size is possible for {profile.name} on {cluster.num_devices} devices."
        return (Problem(where="", what=what, fix="Take the pin away."),)
    tried = [_at_best(kind, {**settings, "size": size}, profile, cluster, sequence) for size in possible]
    return tried[0] if all(tried) else ()


def _at_best(
    kind: type[Technique], settings: Mapping[str, Any], profile: Profile, cluster: Cluster, sequence: int
) -> Problems:
    """None where settings that are left to the search can be such that it runs: chunks are pinned, not the schedule."""
    problems = alone(kind(**settings), profile, cluster, sequence)
    if not problems:
        return ()
    options = kind.options(profile, cluster)
    choices = {o.field: o.values for o in options if isinstance(o, Choice) and o.field not in settings}
    ways = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    return problems if all(alone(kind(**settings, **way), profile, cluster, sequence) for way in ways) else ()


_ENOUGH = 1 << 20
"""Samples, so that a schedule which needs many microbatches is not refused for want of them."""


def alone(technique: Technique, profile: Profile, cluster: Cluster, sequence: int) -> Problems:
    """What keeps a technique, with no other beside it, from running this model on these machines."""
    try:
        plan = Plan(techniques=(technique,), batch=_ENOUGH)
    except MeshwrightError as error:
        return error.problems
    return technique.check(plan, profile, cluster) or technique.check_sequence(sequence)


def _listed(sizes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, sizes[:_MOST_SHOWN]))
    return f"{shown}, ..." if len(sizes) > _MOST_SHOWN else shown
