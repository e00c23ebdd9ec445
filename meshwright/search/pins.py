"""Pins that no plan can keep: said before the search, with what is possible instead."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, Technique, technique_named
from meshwright.search.wishes import Wishes

_MOST_SHOWN = 12


def pin_problems(wishes: Wishes, profile: Profile, cluster: Cluster, sequence: int) -> list[Problem]:
    """What keeps each pinned technique, alone, from running this model on these machines."""
    return [
        replace(problem, where=f"pin {name}")
        for name, settings in wishes.pinned.items()
        for problem in _problems(technique_named(name), settings, profile, cluster, sequence)
    ]


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
