"""A claim: what is promised, what was measured, whether it holds. And how two sides are timed fairly.

The sides of a comparison run in one process (or in the same ranks), in turn, in short blocks, so that
whatever else the machine does meets both alike. A pair of neighbouring blocks gives one ratio; the claim is
about the median of the pairs, and the worst pair is told too. Nothing here imports torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

WIDTHS = "{:<11}{:>9}{:>9}{:>9}  {:<9}{}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    name: str
    what: str
    unit: Literal["seconds", "ratio"]
    """A ratio is our tokens per second over theirs: more is better. Of seconds, less is."""
    goal: float
    measured: tuple[float, ...] = ()
    problem: str = ""
    """Why the measurement does not count, where it does not."""

    @property
    def median(self) -> float:
        return statistics.median(self.measured) if self.measured else float("nan")

    @property
    def worst(self) -> float:
        pick = min if self.unit == "ratio" else max
        return pick(self.measured) if self.measured else float("nan")

    @property
    def margin(self) -> float:
        """1: just at the goal; less: missed."""
        if self.problem or not self.measured:
            return 0.0
        return self.median / self.goal if self.unit == "ratio" else self.goal / self.median

    @property
    def is_kept(self) -> bool:
        return self.margin >= 1

    def encode(self) -> dict[str, Any]:
        measured = [round(value, 4) for value in self.measured]
        facts: dict[str, Any] = {"name": self.name, "what": self.what, "unit": self.unit, "goal": self.goal}
        if measured:
            facts |= {"median": round(self.median, 4), "worst": round(self.worst, 4)}
        return facts | {"is_kept": self.is_kept, "problem": self.problem, "measured": measured}

    @classmethod
    def decode(cls, facts: Mapping[str, Any]) -> Claim:
        names = ("name", "what", "unit", "goal", "problem")
        return cls(**{name: facts[name] for name in names}, measured=tuple(facts["measured"]))


def worst_first(claims: Sequence[Claim]) -> list[Claim]:
    return sorted(claims, key=lambda claim: (claim.margin, claim.name))


def table(claims: Sequence[Claim]) -> str:
    """For a terminal, worst first."""
    lines = [WIDTHS.format("claim", "median", "worst", "goal", "", "what")]
    for claim in worst_first(claims):
        unit = " s" if claim.unit == "seconds" else "  "
        numbers = [f"{value:.3f}{unit}" for value in (claim.median, claim.worst, claim.goal)]
        verdict = "kept" if claim.is_kept else "MISSED"
        lines.append(WIDTHS.format(claim.name, *numbers, verdict, claim.what))
        if claim.problem:
            lines.append(f"    {claim.problem}")
    return "\n".join(lines)


def alone(claims: Sequence[Claim]) -> int:
    """What a benchmark run by itself prints, and its exit code."""
    print(table(claims))
    return 0 if all(claim.is_kept for claim in claims) else 1


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in every round. The order turns, so that none always goes first."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(sides[name]())
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], ours: str = "ours") -> tuple[float, ...]:
    """Our speed over that of the fastest other side, round by round."""
    others = [name for name in seconds if name != ours]
    best = min(others, key=lambda name: statistics.median(seconds[name]))
    return tuple(theirs / mine for mine, theirs in zip(seconds[ours], seconds[best], strict=True))


def difference(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference of two sides' losses, step by step: they must do the same work."""
    assert len(mine) == len(theirs) > 0, "the sides took different numbers of steps"
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))
