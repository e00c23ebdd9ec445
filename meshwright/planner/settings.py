"""What may be turned on each technique, from its own options and the user's wishes.

Axis sizes are numbers and become arrays, blocks that follow a policy are solved for; everything else is enumerated as
settings.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, PerLayer, Technique, technique_named, technique_names
from meshwright.planner.impossible_pins import alone
from meshwright.planner.wishes import Wishes, is_allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    kind: type[Technique]
    settings: tuple[dict[str, Any], ...]
    """Each way its enumerated fields can be set."""
    axis_field: str = ""
    sizes: tuple[int, ...] = ()
    policies: tuple[str, ...] = ()
    """Fields whose blocks are solved for."""
    named: Mapping[str, Any] = field(default_factory=dict)
    """Fields whose blocks the user has named."""
    required: bool = False

    def example(self, settings: dict[str, Any], size: int = 2) -> Technique:
        """The technique so set; numbers that are arrays stand in the sizes instead."""
        return self.kind(**settings, **self.named, **({self.axis_field: size} if self.axis_field else {}))

    @property
    def cuts(self) -> bool:
        """Whether it cuts the model into stages."""
        return bool(self.settings) and self.example(self.settings[0]).blocks_of_stages(1 << 20) is not None


def dials(profile: Profile, cluster: Cluster, wishes: Wishes, *, rescues: bool = False) -> tuple[Dial, ...]:
    """One for each technique that may be used, by name. `rescues`: with what is tried where nothing else fits."""
    found = []
    for name in technique_names():
        kind = technique_named(name)
        if name in wishes.banned or not is_allowed(kind, wishes.allow):
            continue
        dial = _dial(kind, profile, cluster, wishes, rescues)
        if dial is not None and (dial.settings or dial.required):  # bans may leave no way to set it
            found.append(dial)
    return tuple(found)


def _dial(kind: type[Technique], profile: Profile, cluster: Cluster, wishes: Wishes, rescues: bool) -> Dial | None:
    pinned = dict(wishes.pinned.get(kind.name, {}))
    required = kind.name in wishes.pinned
    options = kind.options(profile, cluster)
    if not options and not required:
        return None
    axis = next((o for o in options if isinstance(o, Axis)), None)
    numbers: dict[str, Any] = {}
    if kind.axis:
        size_field = axis.field if axis is not None else "size"
        size = pinned.pop(size_field, None)
        if size == 1:  # an axis of one rank is no axis
            return None
        sizes = (size,) if size is not None else axis.sizes if axis is not None else ()
        bad = wishes.banned_values.get((kind.name, size_field), ())
        numbers |= {"axis_field": size_field, "sizes": tuple(s for s in sizes if s > 1 and s not in bad)}
    solved = next((o.fields for o in options if isinstance(o, PerLayer)), ())
    named = {policy: pinned.pop(policy) for policy in kind.policies if policy in pinned}
    none = {policy for policy, value in named.items() if value in (0, "")}
    if none and none == set(kind.policies):
        return None
    # Nothing may follow what is pinned to none or banned; the rest is solved for, unless blocks are named.
    banned = {policy for policy in kind.policies if (kind.name, policy) in wishes.banned_values}
    if none == set(named):
        numbers["policies"] = tuple(policy for policy in solved if policy not in none | banned)
        named = {}
    choices: dict[str, list[Any]] = {}
    for option in options:
        if isinstance(option, Choice):
            values = (*option.values, *option.rescues) if rescues else option.values
            bad = wishes.banned_values.get((kind.name, option.field), ())
            choices[option.field] = [value for value in values if value not in bad]
    choices |= {field: [value] for field, value in pinned.items()}
    ways = tuple(dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    return _keeping(
        Dial(kind=kind, settings=ways, required=required, named=named, **numbers), profile, cluster, bool(pinned)
    )


def _keeping(dial: Dial, profile: Profile, cluster: Cluster, is_pinned: bool) -> Dial:
    """Without the settings that rule each other out, or that what is pinned does: chunks leave the schedules that have
    them."""
    if len(dial.settings) < 2 and not is_pinned:
        return dial

    def will_do(settings: dict[str, Any]) -> bool:
        sizes = dial.sizes if is_pinned else dial.sizes[:1]  # the smallest will do wherever any does
        tried = (dial.example(settings, size) for size in sizes or (1,))
        return not all(alone(technique, profile, cluster, profile.max_sequence) for technique in tried)

    return replace(dial, settings=tuple(settings for settings in dial.settings if will_do(settings)))
