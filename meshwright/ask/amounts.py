"""Amounts as people write them: `70GiB`, `+20GiB`, `x2`, `+25%`, `100GB/s`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.core.errors import Problem
from meshwright.core.units import GIB, MIB

_FORM = re.compile(r"^([+x*-]?)([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z/%]*)$")
_MOST = 1e18
"""Above, floats and people lose count."""

MEMORY = {"B": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB, "TiB": 1024**4, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
RATE = {
    **{f"{unit}/s": size for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))},
    **{f"{unit}/s": size for unit, size in (("Mb", 1e6 / 8), ("Gb", 1e9 / 8), ("Mbit", 1e6 / 8), ("Gbit", 1e9 / 8))},
}
COUNT = {"": 1.0}
FACTOR: dict[str, float] = {}
"""Nothing but times and percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    how: str
    """`+` and `-` add, `x` multiplies, `` sets."""
    value: float

    def of(self, before: float) -> float:
        if self.how == "x":
            return before * self.value
        return {"": self.value, "+": before + self.value, "-": before - self.value}[self.how]


def read_amount(text: str, units: dict[str, float], where: str, example: str, problems: list[Problem]) -> Amount | None:
    """`units`: what may stand behind the number, and how much it is of ours."""
    match = _FORM.match(text.strip())
    if match is None:
        problems.append(Problem(where=where, what=f'"{text}" is no amount.', fix=f"For example {example}."))
        return None
    sign, number, unit = match.groups()
    how, value = sign.replace("*", "x"), float(number)
    if value > _MOST or (how in ("", "x") and value == 0):
        problems.append(Problem(where=where, what=f"{number} cannot be.", fix=f"For example {example}."))
        return None
    if unit == "%" and how in ("+", "-"):
        return Amount(how="x", value=1 + (value if how == "+" else -value) / 100)
    if how == "x" and not unit:
        return Amount(how=how, value=value)
    known = _unit(unit, units)
    if known is None or how == "x":
        what = f'"{unit}" is no unit of it.' if unit else "has no unit."
        problems.append(Problem(where=where, what=f"{text}: {what}", fix=f"For example {example}."))
        return None
    return Amount(how=how, value=value * known)


def _unit(unit: str, units: dict[str, float]) -> float | None:
    """In any case of letters where that leaves no doubt: a bit is a b, a byte a B."""
    if unit in units:
        return units[unit]
    close = {size for name, size in units.items() if name.lower() == unit.lower()}
    return close.pop() if len(close) == 1 else None


def read_memory(text: str, where: str, problems: list[Problem]) -> int | None:
    """`70GiB` -> bytes."""
    if text.strip()[:1] in "+-x*":
        problems.append(Problem(where=where, what=f"{text} is no size of a memory.", fix="For example 70GiB."))
        return None
    amount = read_amount(text, MEMORY, where, "70GiB", problems)
    return int(amount.value) if amount is not None else None
