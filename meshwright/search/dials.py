"""What may be turned on each technique, from its own options and the user's wishes.

Axis sizes and per-layer counts are numbers and become arrays; everything else is enumerated as settings.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, PerLayer, Technique, technique_named, technique_names
from meshwright.search.pins import alone
from meshwright.search.wishes import Wishes, is_allowed

QUARTERS = (0, 1, 2, 3, 4)
"""Per-layer counts tried: none, and a quarter, half, three quarters or all of a stage's blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    kind: type[Technique]
    settings: tuple[dict[str, Any], ...]
    """Each way its enumerated fields can be set."""
    axis_field: str = ""
    sizes: tuple[int, ...] = ()
    count_field: str = ""
    most: int = 0
    count: int | None = None
    """A pinned per-layer count."""
    bad_counts: tuple[Any, ...] = ()
    required: bool = False

    def counts(self, largest_stage: int) -> tuple[int, ...]:
        """Per-layer counts to try where no stage has more than `largest_stage` blocks; 0 means absent."""
        if self.count is not None:
            return (self.count,)
        tried = {min(self.most, -(-largest_stage * quarter // 4)) for quarter in QUARTERS}
        tried -= {0} if self.required else set()
        return tuple(sorted(count for count in tried if count not in self.bad_counts))

    def example(self, settings: dict[str, Any], size: int = 2) -> Technique:
        """The technique so set; numbers that are arrays stand in the sizes instead."""
        return self.kind(**settings, **({self.axis_field: size} if self.axis_field else {}))


def dials(profile: Profile, cluster: Cluster, wishes: Wishes) -> tuple[Dial, ...]:
    """One for each technique that may be used, by name."""
    found = []
    for name in technique_names():
        kind = technique_named(name)
        if name in wishes.banned or not is_allowed(kind, wishes.allow):
            continue
        dial = _dial(kind, profile, cluster, wishes)
        if dial is not None:
            found.append(dial)
    return tuple(found)


def _dial(kind: type[Technique], profile: Profile, cluster: Cluster, wishes: Wishes) -> Dial | None:
    pinned = dict(wishes.pinned.get(kind.name, {}))
    required = kind.name in wishes.pinned
    options = kind.options(profile, cluster)
    if not options and not required:
        return None
    axis = next((o for o in options if isinstance(o, Axis)), None)
    counted = next((o for o in options if isinstance(o, PerLayer)), None)
    numbers: dict[str, Any] = {}
    if kind.axis:
        field = axis.field if axis is not None else "size"
        size = pinned.pop(field, None)
        if size == 1:  # an axis of one rank is no axis
            return None
        sizes = (size,) if size is not None else axis.sizes if axis is not None else ()
        bad = wishes.banned_values.get((kind.name, field), ())
        numbers |= {"axis_field": field, "sizes": tuple(s for s in sizes if s > 1 and s not in bad)}
    if counted is not None:
        bad = wishes.banned_values.get((kind.name, counted.fields[0]), ())
        numbers |= {"count_field": counted.fields[0], "most": profile.num_blocks, "bad_counts": bad}
        if counted.fields[0] in pinned:
            count = pinned.pop(counted.fields[0])
            if count == 0:
                return None
            numbers["count"] = profile.num_blocks if count is None else count
    choices = {
        option.field: [
            value for value in option.values if value not in wishes.banned_values.get((kind.name, option.field), ())
        ]
        for option in options
        if isinstance(option, Choice)
    } | {field: [value] for field, value in pinned.items()}
    ways = tuple(dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    dial = Dial(kind=kind, settings=ways, required=required, **numbers)
    return _keeping(dial, profile, cluster) if pinned else dial


def _keeping(dial: Dial, profile: Profile, cluster: Cluster) -> Dial:
    """Without the settings that what is pinned rules out: pinned chunks leave the schedules that have them."""

    def will_do(settings: dict[str, Any]) -> bool:
        tried = (dial.example(settings, size) for size in dial.sizes or (1,))
        return not all(alone(technique, profile, cluster, profile.max_sequence) for technique in tried)

    return replace(dial, settings=tuple(settings for settings in dial.settings if will_do(settings)))
