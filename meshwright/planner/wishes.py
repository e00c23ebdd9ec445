"""What the user insists on: pins (`tensor=2`, `recompute`, `microbatch=4`) and bans (`pipeline.schedule=gpipe`).

Names are looked up in the techniques themselves; every wrong word is reported at once. Pins that no plan can keep are
found before the search: a pinned technique is checked with no other beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode_into, field_types
from meshwright.core.errors import MeshwrightError, Problem, Problems, nearest
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import (
    EXACTNESS,
    Axis,
    Choice,
    Technique,
    is_within,
    technique_named,
    technique_names,
)

MICROBATCH = "microbatch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    pinned: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Technique -> settings it must have; empty settings: it must only be there."""
    banned: frozenset[str] = frozenset()
    banned_values: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    """(technique, field) -> values it must not have."""
    microbatch: int | None = None
    allow: str = "rounded"


def read_wishes(
    pin: Sequence[str] = (), ban: Sequence[str] = (), *, allow: str = "rounded", microbatch: int | None = None
) -> Wishes:
    problems: list[Problem] = []
    if allow not in EXACTNESS:
        problems.append(Problem(where="allow", what=f'there is no "{allow}".', fix=nearest(allow, EXACTNESS)))
    pinned: dict[str, dict[str, Any]] = {}
    for text in pin:
        if text.split("=")[0].strip() == MICROBATCH:
            microbatch = _read_microbatch(text, microbatch, problems)
            continue
        parsed = _read(text, f"pin {text}", problems)
        if parsed is None:
            continue
        name, setting, value = parsed
        settings = pinned.setdefault(name, {})
        if settings.get(setting, value) != value:
            problems.append(Problem(where=f"pin {text}", what=f"{setting} is also pinned to {settings[setting]}."))
        if setting:
            settings[setting] = value
    banned: set[str] = set()
    banned_values: dict[tuple[str, str], tuple[Any, ...]] = {}
    for text in ban:
        parsed = _read(text, f"ban {text}", problems)
        if parsed is not None and parsed[1]:
            key = parsed[:2]
            banned_values[key] = (*banned_values.get(key, ()), parsed[2])
        elif parsed is not None:
            banned.add(parsed[0])
    problems += [
        Problem(where=f"pin {name}", what="it is banned too.", fix="Take one of the two away.")
        for name, settings in pinned.items()
        if name in banned or any(value in banned_values.get((name, f), ()) for f, value in settings.items())
    ]
    if not problems:
        problems += _too_inexact(pinned, allow)
    if problems:
        raise MeshwrightError(problems)
    return Wishes(
        pinned=pinned,
        banned=frozenset(banned),
        banned_values=banned_values,
        microbatch=microbatch,
        allow=allow,
    )


def _too_inexact(pinned: dict[str, dict[str, Any]], allow: str) -> list[Problem]:
    needed = {name: technique_named(name).exactness_with(settings) for name, settings in pinned.items()}
    return [
        Problem(
            where=f"pin {name}",
            what=f"it is {least}, and only {allow} techniques are allowed.",
            fix=f'Use allow = "{least}", or take the pin away.',
        )
        for name, least in needed.items()
        if not is_within(least, allow)
    ]


def _read_microbatch(text: str, earlier: int | None, problems: list[Problem]) -> int | None:
    before = len(problems)
    value = decode_into(int, _plain(text.partition("=")[2].strip()), f"pin {text}", problems)
    if len(problems) > before:
        return earlier
    if value < 1:
        problems.append(Problem(where=f"pin {text}", what=f"is {value}.", fix="Use at least 1."))
    elif earlier is not None and earlier != value:
        problems.append(Problem(where=f"pin {text}", what=f"{MICROBATCH} is also pinned to {earlier}."))
    return value


def _read(text: str, where: str, problems: list[Problem]) -> tuple[str, str, Any] | None:
    """`name`, `name=value` (its main setting) or `name.field=value` -> (name, field, value)."""
    target, equals, value_text = (part.strip() for part in text.partition("="))
    name, dot, setting = target.partition(".")
    if name == MICROBATCH:
        fix = f"For example --pin {MICROBATCH}=4."
        problems.append(Problem(where=where, what="it can only be pinned to a number of samples.", fix=fix))
        return None
    if name not in technique_names():
        what = f'no technique is called "{name}".'
        problems.append(Problem(where=where, what=what, fix=nearest(name, (*technique_names(), MICROBATCH))))
        return None
    kind: type = technique_named(name)
    hints = field_types(kind)
    if not equals and not dot:
        return name, "", None
    setting = setting or next(iter(hints), "")
    if setting not in hints:
        problems.append(Problem(where=where, what=f'{name} has no "{setting}".', fix=nearest(setting, hints)))
        return None
    if not equals:
        problems.append(Problem(where=where, what="has no value.", fix=f"Write {target}=..."))
        return None
    before = len(problems)
    value = decode_into(hints[setting], _plain(value_text), where, problems)
    return None if len(problems) > before else (name, setting, value)


def _plain(text: str) -> Any:
    """`2`, `true`, `null`, `[4, 4]` as JSON has them; anything else is text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "null", "none") else text)
    except (ValueError, RecursionError):
        return None if text.lower() == "none" else text


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
        problems = _of_all(plan, profile, cluster)
        if not problems or not _of_all(_in_one_microbatch(plan), profile, cluster):
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
        plan = Plan(techniques=(technique,), batch=_ENOUGH)
        if not (_of_all(plan, profile, cluster) and _of_all(_in_one_microbatch(plan), profile, cluster)):
            yield technique


def _of_all(plan: Plan, profile: Profile, cluster: Cluster) -> list[Problem]:
    return [problem for each in plan.in_phase_order() for problem in each.check(plan, profile, cluster)]


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
    problems = technique.check(plan, profile, cluster)
    if problems and not technique.check(_in_one_microbatch(plan), profile, cluster):
        problems = ()
    return problems or technique.check_sequence(sequence)


def _in_one_microbatch(plan: Plan) -> Plan:
    return replace(plan, microbatch=plan.batch // plan.num_replicas)


def _listed(sizes: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, sizes[:_MOST_SHOWN]))
    return f"{shown}, ..." if len(sizes) > _MOST_SHOWN else shown
