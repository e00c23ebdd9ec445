"""The alpha-beta line through measured all_reduce times: seconds = latency + bus bytes / bandwidth.

Bus bytes are what a ring moves for each device, 2 (n - 1) / n of the message, so that one bandwidth serves
every collective (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.cluster import Link
from meshwright.core.errors import MeshwrightError, Problem

# Outside these a fit is not physics: the fastest link sold moves 0.9 TB/s, the slowest we plan for 100 kB/s.
_SLOWEST_BYTES_PER_SECOND = 1e5
_FASTEST_BYTES_PER_SECOND = 1e13


def all_reduce_bus_bytes(num_bytes: float, num_devices: int) -> float:
    return num_bytes * 2.0 * (num_devices - 1) / num_devices


def fit_link(points: Sequence[tuple[float, float]], num_devices: int, *, shared: bool) -> Link:
    """`points` are (message bytes, seconds). Least squares on relative errors, neither term below zero.

    Relative, because absolute errors would let the largest message set the latency.
    """
    if num_devices < 2 or len({num_bytes for num_bytes, _ in points}) < 2:
        raise _unfit(f"{len(points)} timings on {num_devices} devices cannot give a latency and a bandwidth.")
    if any(not seconds > 0 for _, seconds in points):
        raise _unfit("a collective took no time at all.")
    latency, seconds_per_byte = _line(
        [(all_reduce_bus_bytes(num_bytes, num_devices), seconds) for num_bytes, seconds in points]
    )
    if not 1 / _FASTEST_BYTES_PER_SECOND < seconds_per_byte < 1 / _SLOWEST_BYTES_PER_SECOND:
        shown = ", ".join(f"{num_bytes:.0f} B {seconds * 1e6:.0f} us" for num_bytes, seconds in points)
        raise _unfit(f"the time of an all_reduce does not grow with its size as a link's would ({shown}).")
    return Link(bytes_per_second=1 / seconds_per_byte, latency_seconds=latency, shared=shared)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Minimise the sum of ((a + b x - t) / t)^2 with a, b >= 0: solve freely, else on the edge that binds."""
    ones = sum(1 / t**2 for _, t in points)
    xs = sum(x / t**2 for x, t in points)
    squares = sum((x / t) ** 2 for x, t in points)
    ts = sum(1 / t for _, t in points)
    products = sum(x / t for x, t in points)
    determinant = ones * squares - xs * xs
    intercept = (ts * squares - products * xs) / determinant
    slope = (ones * products - xs * ts) / determinant
    if slope <= 0:
        return ts / ones, 0.0
    if intercept < 0:
        return 0.0, products / squares
    return intercept, slope


def _unfit(what: str) -> MeshwrightError:
    fix = "Probe again when the machine is quiet."
    return MeshwrightError([Problem(where="probe.all_reduce", what=what, fix=fix)])
