"""The table of intervals: they cover what they promise, and widen where there is nothing."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.intervals import COVERAGE, Residual, fitted, held_out, neighbours, tie_fraction
from meshwright.simulator.forecast import OTHER_GPUS, PROBED_GPUS, Domain

HERE = Domain("A100s", 2, "decoders")


def drawn(count: int, spread: float, source: str = "one", bias: float = 0.0, seed: int = 0) -> list[Residual]:
    logs = np.random.default_rng(seed).normal(bias, spread, count)
    return [Residual(source=source, group=str(at % 7), domain=HERE, log=float(log)) for at, log in enumerate(logs)]


def test_nine_in_ten_rows_are_inside() -> None:
    rows = [row for at in range(4) for row in drawn(200, 0.1, f"source {at}", seed=at)]
    found = fitted(rows)
    assert COVERAGE - 0.03 < found["inside"] < 0.95
    assert abs(found["high"] - 1.645 * 0.1) < 0.03
    assert found["measured"] == 800
    assert found["sources"] == 4


def test_sources_that_differ_widen_an_interval() -> None:
    """Each lies elsewhere: one that had no say is covered less often than rows of known sources."""
    alike = [row for at in range(5) for row in drawn(60, 0.05, f"source {at}", seed=at)]
    apart = [row for at in range(5) for row in drawn(60, 0.05, f"source {at}", bias=0.3 * (at - 2), seed=at)]
    assert (held_out(apart) or 0) < (held_out(alike) or 0)
    assert fitted(apart)["high"] > 2 * fitted(alike)["high"]


def test_one_source_is_wider_than_two_of_its_kind() -> None:
    rows = drawn(100, 0.1)
    two = [Residual(source=str(at % 2), group=row.group, domain=HERE, log=row.log) for at, row in enumerate(rows)]
    assert fitted(rows)["high"] > fitted(two)["high"]
    shifted = fitted(drawn(100, 0.02, bias=0.5))
    assert shifted["low"] <= -shifted["high"] / 2  # not one-sided


def test_what_nobody_measured_has_its_neighbours_interval_widened() -> None:
    known = {HERE: {"low": -0.1, "high": 0.2}, Domain(PROBED_GPUS, 0, "decoders"): {"low": -0.01, "high": 0.01}}
    larger, smaller = (neighbours(HERE._replace(scale=scale), known) for scale in (3, 1))
    assert larger["measured"] == 0
    assert larger["from"] == str(HERE)
    assert larger["high"] > smaller["high"] > 0.2  # what is larger has more that can go wrong
    assert neighbours(Domain(OTHER_GPUS, 0, "decoders"), known)["from"] == str(HERE)  # never from a probed machine
    assert neighbours(HERE, {})["high"] == math.log(4)


def test_plans_are_told_apart_by_as_much_as_their_order_needs() -> None:
    def sweep(noise: float) -> list[Residual]:
        random = np.random.default_rng(1)
        return [
            Residual(
                source="s",
                group="g",
                domain=HERE,
                log=float(random.normal(0, noise)),
                sweep=("a",),
                forecast=1 + at / 100,
            )
            for at in range(80)
        ]

    assert tie_fraction(sweep(0.0)) == 0.0
    assert 0.05 < tie_fraction(sweep(0.1)) < 0.4
