"""The line through measured times of collectives: seconds = latency + (bus bytes + half bytes) / (rate x fraction).

Bus bytes are what a rank passes on: 2 (n - 1) / n of the message in an all_reduce, (n - 1) / n where it is only
gathered, scattered or swapped, all of it in a send (nccl-tests, PERFORMANCE.md). So one rate serves every kind, and
each has a fraction of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from meshwright.core.cluster import Link
from meshwright.core.errors import MeshwrightError, Problem

Points = Sequence[tuple[float, float]]
"""(message bytes, seconds)."""

# Outside these a fit is not physics: the fastest link sold moves 0.9 TB/s, the slowest we plan for 100 kB/s.
_SLOWEST_BYTES_PER_SECOND = 1e5
_FASTEST_BYTES_PER_SECOND = 1e13
_LEAST_SECONDS = 1e-9


def bus_bytes(kind: str, num_bytes: float, num_devices: int) -> float:
    if kind == "send":
        return num_bytes
    return num_bytes * (2.0 if kind == "all_reduce" else 1.0) * (num_devices - 1) / num_devices


def fit_links(
    kinds: Mapping[str, Points], num_devices: int, *, shared: bool, sheet_bytes_per_second: float = 0.0
) -> Link:
    """Least squares on relative errors, no term below zero.

    Relative, because absolute errors would let the largest message set the latency. Fractions are of the data sheet's
    rate where there is one, else of the fastest kind's.
    """
    problems = [problem for kind, points in kinds.items() for problem in _unfit(kind, points, num_devices)]
    if problems or not kinds:
        raise MeshwrightError(problems or [_problem("links", "no collective was measured.")])
    found = {kind: _of_kind(kind, points, num_devices) for kind, points in kinds.items()}
    problems = [problem for kind, (_, slope) in found.items() for problem in _no_link(kind, slope, kinds[kind])]
    if len(problems) == len(kinds):
        raise MeshwrightError(problems)
    lines = {kind: found[kind] for kind in kinds if not _no_link(kind, found[kind][1], kinds[kind])}
    rate = sheet_bytes_per_second or max(1 / slope for _, slope in lines.values())
    fractions = {kind: 1 / slope / rate for kind, (_, slope) in lines.items()}
    # On a busy machine a kind's times may not grow with its size. It is then taken to be as fast as the others are; the
    # error bar, from all timings, says how well that went.
    fractions |= dict.fromkeys([kind for kind in kinds if kind not in lines], median(fractions.values()))
    # Intercepts are latency + half bytes / (rate x fraction): what grows with a kind's slowness is the half bytes'.
    starts = [(1 / fractions[kind], max(start, _LEAST_SECONDS)) for kind, (start, _) in lines.items()]
    latency, per_slowness = (next(iter(lines.values()))[0], 0.0) if len(lines) < 3 else line(starts)
    return Link(
        bytes_per_second=rate,
        latency_seconds=latency,
        shared=shared,
        half_bytes=per_slowness * rate,
        fractions=fractions,
    )


def link_seconds(link: Link, kind: str, num_bytes: float, num_devices: int) -> float:
    passed = bus_bytes(kind, num_bytes, num_devices)
    return link.latency_seconds + (passed + link.half_bytes) / (link.bytes_per_second * link.fractions.get(kind, 1.0))


def line(points: Points) -> tuple[float, float]:
    """Minimise the sum of ((a + b x - t) / t)^2 with a, b >= 0: solve freely, else on the edge that binds."""
    ones = sum(1 / t**2 for _, t in points)
    xs = sum(x / t**2 for x, t in points)
    squares = sum((x / t) ** 2 for x, t in points)
    ts = sum(1 / t for _, t in points)
    products = sum(x / t for x, t in points)
    determinant = ones * squares - xs * xs
    if determinant <= 1e-12 * ones * squares:  # all at one x
        return ts / ones, 0.0
    intercept = (ts * squares - products * xs) / determinant
    slope = (ones * products - xs * ts) / determinant
    if slope <= 0:
        return ts / ones, 0.0
    if intercept < 0:
        return 0.0, products / squares
    return intercept, slope


def _of_kind(kind: str, points: Points, num_devices: int) -> tuple[float, float]:
    return line([(bus_bytes(kind, num_bytes, num_devices), seconds) for num_bytes, seconds in points])


def _unfit(kind: str, points: Points, num_devices: int) -> list[Problem]:
    if num_devices < 2 or len({num_bytes for num_bytes, _ in points}) < 2:
        what = f"{len(points)} timings on {num_devices} devices cannot give a latency and a bandwidth."
        return [_problem(kind, what)]
    if any(not seconds > 0 for _, seconds in points):
        return [_problem(kind, "a collective took no time at all.")]
    return []


def _no_link(kind: str, seconds_per_byte: float, points: Points) -> list[Problem]:
    if 1 / _FASTEST_BYTES_PER_SECOND < seconds_per_byte < 1 / _SLOWEST_BYTES_PER_SECOND:
        return []
    shown = ", ".join(f"{num_bytes:.0f} B {seconds * 1e6:.0f} us" for num_bytes, seconds in points)
    return [_problem(kind, f"its time does not grow with its size as a link's would ({shown}).")]


def _problem(kind: str, what: str) -> Problem:
    return Problem(where=f"probe.{kind}", what=what, fix="Probe again when the machine is quiet.")
