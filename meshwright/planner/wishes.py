"""What the user insists on: pins (`tensor=2`, `recompute`, `microbatch=4`) and bans (`pipeline.schedule=gpipe`).

Names are looked up in the techniques themselves; every wrong word is reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.codec import decode_into, field_types
from meshwright.core.errors import MeshwrightError, Problem, nearest
from meshwright.core.technique import EXACTNESS, Technique, technique_named, technique_names

MICROBATCH = "microbatch"

ALLOW = ("exact", "reordered", "lossy", "approximate")
"""How far numbers may differ from one device's: not at all (but for the gradient's norm, which is always summed over
ranks); by the order of sums; by fewer bits; by another algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    pinned: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Technique -> settings it must have; empty settings: it must only be there."""
    banned: frozenset[str] = frozenset()
    banned_values: dict[tuple[str, str], tuple[Any, ...]] = field(default_factory=dict)
    """(technique, field) -> values it must not have."""
    microbatch: int | None = None
    allow: str = "lossy"


def read_wishes(
    pin: Sequence[str] = (), ban: Sequence[str] = (), *, allow: str = "lossy", microbatch: int | None = None
) -> Wishes:
    problems: list[Problem] = []
    if allow not in ALLOW:
        problems.append(Problem(where="allow", what=f'there is no "{allow}".', fix=nearest(allow, ALLOW)))
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


def allowance(kind: type[Technique] | Technique, settings: Mapping[str, Any] | None = None) -> str:
    """The least that must be allowed for a technique, with these settings."""
    exactness = kind.exactness if settings is None else kind.exactness_with(settings)
    if exactness == EXACTNESS[0]:
        return ALLOW[1] if kind.reorders else ALLOW[0]
    return ALLOW[EXACTNESS.index(exactness) + 1]


def is_allowed(kind: type[Technique] | Technique, allow: str) -> bool:
    return ALLOW.index(allowance(kind)) <= ALLOW.index(allow)


def _too_inexact(pinned: dict[str, dict[str, Any]], allow: str) -> list[Problem]:
    needed = {name: allowance(technique_named(name), settings) for name, settings in pinned.items()}
    return [
        Problem(
            where=f"pin {name}",
            what=f"it is {least}, and only {allow} techniques are allowed.",
            fix=f'Use allow = "{least}", or take the pin away.',
        )
        for name, least in needed.items()
        if ALLOW.index(least) > ALLOW.index(allow)
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
