"""Pins that no plan can keep: said before the search, with what is possible instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Technique, technique_named
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
        return _alone(kind(**settings), profile, cluster, sequence)
    possible = next((o.sizes for o in kind.options(profile, cluster) if isinstance(o, Axis)), ())
    possible = tuple(size for size in possible if cluster.num_devices % size == 0)
    if "size" in settings:
        size = settings["size"]
        problems = _alone(kind(**settings), profile, cluster, sequence)
        if not problems and cluster.num_devices % size:
            what = f"{cluster.num_devices} devices cannot be shared out to an axis of {size}."
            problems = (Problem(where="", what=what, fix=f"Use {_listed((1, *possible))}."),)
        return problems
    if not possible:
        what = f"no size is possible for {profile.name} on {cluster.num_devices} devices."
        return (Problem(where="", what=what, fix="Take the pin away."),)
    tried = [_alone(kind(**{**settings, "size": size}), profile, cluster, sequence) for size in possible]
    return tried[0] if all(tried) else ()


_ENOUGH = 1 << 20
"""Samples, so that a schedule which needs many microbatches is not refused for want of them."""


def _alone(technique: Technique, profile: Profile, cluster: Cluster, sequence: int) -> Problems:
    try:
        plan = Plan(techniques=(technique,), batch=_ENOUGH)
    except MeshwrightError as error:
        return error.problems
    return technique.check(plan, profile, cluster) or technique.check_sequence(sequence)


def _listed(sizes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, sizes[:_MOST_SHOWN]))
    return f"{shown}, ..." if len(sizes) > _MOST_SHOWN else shown
