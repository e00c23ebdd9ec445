"""What is asked of a search, and in it what the user insists on: pins (`tensor=2`, `recompute`, `microbatch=4`) and
bans (`pipeline.schedule=gpipe`).

Names are looked up in the techniques themselves; every wrong word is reported at once. Pins that no plan can keep are
found before the search: a pinned technique is checked with no other beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf, prod
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, field_types
from meshwright.core.errors import MeshwrightError, Problem, Problems, error_at, nearest
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import EXACTNESS, Axis, PerLayer, Technique, is_within, technique_named, technique_names
from meshwright.core.work import Updating
from meshwright.simulator.forecast import slowest_of

MICROBATCH = "microbatch"
Kinds = tuple[int, ...]
"""Blocks of each kind in a stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    pinned: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Technique -> settings it must have; empty settings: it must only be there."""
    banned: frozenset[str] = frozenset()
    banned_values: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    """(technique, field) -> values it must not have."""
    microbatch: int | None = None
    allow: str = "rounded"


@dataclass(frozen=True, kw_only=True)
class SearchInputs:
    """What is asked of a search, and so the same for all its candidates."""

    profile: Profile
    cluster: Cluster
    optimizer: Updating
    batch: int
    """Samples of a step."""
    sequence: int
    wishes: Wishes
    epsilon: float
    """Share of a step below which a faster plan is not looked for any longer, after the first looks."""
    deadline: float = inf
    """On `time.monotonic`: once there is a plan, none is looked for any longer."""
    tell: Callable[[str], None] | None = None
    """Is called now and then with how far the search is."""

    @cached_property
    def kinds(self) -> Callable[[int, int], Kinds]:
        """(first, blocks) -> of so many blocks from `first` on, how many are of each kind."""
        return cache(self.profile.blocks_within)

    @cached_property
    def is_one_kind(self) -> bool:
        return len(self.profile.block_layers) == 1 and not self.profile.group_borders

    @cached_property
    def slower(self) -> float:
        """Times a step of one rank that the slowest of all takes."""
        return slowest_of(self.cluster, self.cluster.num_devices)


def read_wishes(
    pin: Sequence[str] = (), ban: Sequence[str] = (), *, allow: str = "rounded", microbatch: int | None = None
) -> Wishes:
    problems: list[Problem] = []
    if allow not in EXACTNESS:
        problems.append(Problem(where="allow", what=f'there is no "{allow}".', fix=nearest(allow, EXACTNESS)))

    def read(kind: str, texts: Sequence[str]) -> Iterator[tuple[str, str, str, Any]]:
        for text in texts:
            try:
                yield text, *_read(text, f"{kind} {text}")
            except MeshwrightError as error:
                problems.extend(error.problems)

    pinned: dict[str, dict[str, Any]] = {} if microbatch is None else {MICROBATCH: {MICROBATCH: microbatch}}
    for text, name, setting, value in read("pin", pin):
        settings = pinned.setdefault(name, {})
        if settings.get(setting, value) != value:
            problems.append(Problem(where=f"pin {text}", what=f"{setting} is also pinned to {settings[setting]}."))
        if setting:
            settings[setting] = value
    banned: set[str] = set()
    banned_values: dict[tuple[str, str], tuple[Any, ...]] = {}
    for _, name, setting, value in read("ban", ban):
        if setting:
            banned_values[name, setting] = (*banned_values.get((name, setting), ()), value)
        else:
            banned.add(name)
    samples = pinned.pop(MICROBATCH, {}).get(MICROBATCH)
    for name, settings in pinned.items():
        settings |= {f: text for f, text in technique_named(name).read_policies(settings).items() if f in settings}
    problems += [
        Problem(where=f"pin {name}", what="it is banned too.", fix="Take one of the two away.")
        for name, settings in pinned.items()
        if name in banned or any(value in banned_values.get((name, f), ()) for f, value in settings.items())
    ]
    for name, settings in {} if problems else pinned.items():
        least = technique_named(name).exactness_with(settings)
        if not is_within(least, allow):
            what = f"it is {least}, and only {allow} techniques are allowed."
            fix = f'Use allow = "{least}", or take the pin away.'
            problems.append(Problem(where=f"pin {name}", what=what, fix=fix))
    if problems:
        raise MeshwrightError(problems)
    return Wishes(pinned=pinned, banned=frozenset(banned), banned_values=banned_values, microbatch=samples, allow=allow)


def _read(text: str, where: str) -> tuple[str, str, Any]:
    """`name`, `name=value` (its main setting) or `name.field=value` -> (name, field, value)."""
    target, equals, value_text = (part.strip() for part in text.partition("="))
    name, dot, setting = target.partition(".")
    if name == MICROBATCH and (dot or not where.startswith("pin")):
        what = "it can only be pinned to a number of samples."
        raise error_at(where, what, f"For example --pin {MICROBATCH}=4.")
    known = (*technique_names(), MICROBATCH)
    if name not in known:
        raise error_at(where, f'no technique is called "{name}".', nearest(name, known))
    kind: type | None = None if name == MICROBATCH else technique_named(name)
    hints = {MICROBATCH: int} if kind is None else field_types(kind)
    if not equals and not dot and kind is not None:
        return name, "", None
    setting = setting or next(iter(hints), "")
    if setting not in hints:
        raise error_at(where, f'{name} has no "{setting}".', nearest(setting, hints))
    if not equals and kind is not None:
        raise error_at(where, "has no value.", f"Write {target}=...")
    names_layers = setting in getattr(kind, "policies", ()) and not value_text.isdecimal()
    value = decode(hints[setting], value_text if names_layers else _plain(value_text), where)
    if kind is None and value < 1:
        raise error_at(where, f"is {value}.", "Use at least 1.")
    return name, setting, value


def _plain(text: str) -> Any:
    """`2`, `true`, `null`, `[4, 4]` as JSON has them; anything else is text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false", "null", "none") else text)
    except (ValueError, RecursionError):
        return None if text.lower() == "none" else text


_MOST_SHOWN = 12
_ENOUGH = 1 << 20
"""Samples, so that a schedule which needs many microbatches is not refused for want of them."""


def pin_problems(inputs: SearchInputs) -> list[Problem]:
    """What keeps each pinned technique, alone, from running this model on these machines; or else all together."""
    result = []
    for name, settings in inputs.wishes.pinned.items():
        kind, bad = technique_named(name), inputs.wishes.banned_values
        problems = [
            Problem(where="", what=f"every {each} is banned.", fix="Take one of the bans away.")
            for each, values in _left_open(kind, settings, inputs).items()
            if values and all(value in bad.get((name, each), ()) for value in values)
        ]
        problems += _problems(kind, settings, inputs)
        result += [replace(problem, where=f"pin {name}") for problem in problems]
    return result or _too_many_ranks(inputs) or _at_odds(inputs)


def _too_many_ranks(inputs: SearchInputs) -> list[Problem]:
    pinned, devices = inputs.wishes.pinned, inputs.cluster.num_devices
    sizes = {name: each["size"] for name, each in pinned.items() if technique_named(name).axis and "size" in each}
    ranks = prod(sizes.values())
    if devices % ranks == 0:
        return []
    words = " x ".join(f"{name} {size}" for name, size in sizes.items())
    what = f"{devices} devices cannot be shared out to {words}, {ranks} ranks."
    return [Problem(where=f"pin {', '.join(sizes)}", what=what, fix="Pin smaller sizes, or take a pin away.")]


def _at_odds(inputs: SearchInputs) -> list[Problem]:
    """Why pinned techniques do not go together, whatever the search would set beside what is pinned."""
    ways = []
    for name, settings in inputs.wishes.pinned.items():
        every = _ways(technique_named(name), settings, inputs)
        ways.append([each for each in every if not _refused(Plan(techniques=(each,), batch=_ENOUGH), inputs)])
    first: list[Problem] = []
    for techniques in itertools.product(*ways):
        problems = _refused(Plan(techniques=techniques, batch=_ENOUGH), inputs)
        if not problems:
            return []
        first = first or [replace(problem, where=f"pin {problem.where}") for problem in problems]
    return first


def _left_open(kind: type[Technique], settings: Mapping[str, Any], inputs: SearchInputs) -> dict[str, tuple[Any, ...]]:
    """Settings that are left to the search -> what it may choose."""
    return {
        option.field: option.sizes if isinstance(option, Axis) else option.values
        for option in kind.options(inputs.profile, inputs.cluster)
        if not isinstance(option, PerLayer) and option.field not in settings
    }


def _ways(kind: type[Technique], settings: Mapping[str, Any], inputs: SearchInputs) -> Iterator[Technique]:
    """With each choice that is left to the search, and the first size of an axis."""
    left = _left_open(kind, settings, inputs)
    left |= {"size": left["size"][:1]} if "size" in left else {}
    for values in itertools.product(*left.values()):
        yield kind(**settings, **dict(zip(left, values, strict=True)))


def _refused(plan: Plan, inputs: SearchInputs) -> list[Problem]:
    """What the techniques of a plan have against it, where they also have something against one microbatch."""
    first: list[Problem] = []
    for each in (plan, replace(plan, microbatch=plan.batch // plan.num_replicas)):
        checks = (technique.check(each, inputs.profile, inputs.cluster) for technique in each.in_phase_order())
        problems = [problem for check in checks for problem in check]
        if not problems:
            return []
        first = first or problems
    return first


def _problems(kind: type[Technique], settings: Mapping[str, Any], inputs: SearchInputs) -> Problems:
    """Problems of the pinned size; of the first possible size where none is pinned and all have problems."""
    devices = inputs.cluster.num_devices
    possible = [size for size in _left_open(kind, {}, inputs).get("size", ()) if devices % size == 0]
    possible += [1] * (bool(kind.axis) and kind(**{**settings, "size": 1}).acts_alone)
    if not kind.axis or "size" in settings:
        problems = _at_best(kind, settings, inputs)
        if kind.axis and not problems and devices % settings["size"]:
            what = f"{devices} devices cannot be shared out to an axis of {settings['size']}."
            shown = ", ".join(map(str, sorted({1, *possible})[:_MOST_SHOWN])) + (
                ", ..." if len(possible) >= _MOST_SHOWN else ""
            )
            problems = (Problem(where="", what=what, fix=f"Use {shown}."),)
        return problems
    if not possible and "options" not in vars(kind):
        return (Problem(where="", what="search does not choose its size.", fix=f"Pin it, as in {kind.name}=2."),)
    if not possible:
        what = f"no size is possible for {inputs.profile.name} on {devices} devices."
        return (Problem(where="", what=what, fix="Take the pin away."),)
    tried = [_at_best(kind, {**settings, "size": size}, inputs) for size in possible]
    return tried[0] if all(tried) else ()


def _at_best(kind: type[Technique], settings: Mapping[str, Any], inputs: SearchInputs) -> Problems:
    """None where settings that are left to the search can be such that it runs: chunks are pinned, not the schedule."""
    problems = alone(kind(**settings), inputs)
    return problems if problems and all(alone(way, inputs) for way in _ways(kind, settings, inputs)) else ()


def alone(technique: Technique, inputs: SearchInputs) -> Problems:
    """What keeps a technique, with no other beside it, from running this model on these machines."""
    try:
        plan = Plan(techniques=(technique,), batch=_ENOUGH)
    except MeshwrightError as error:
        return error.problems
    return tuple(_refused(plan, inputs)) or technique.check_sequence(inputs.sequence)
