"""Fit a device's rates and the dialects' constants to published rows: calibration rows only, inside physical limits.

Every source weighs the same, errors are of logarithms and large ones count less (networks stall). What comes out is
printed, to be written into the preset and the dialects by hand: nothing fits by itself.

Run: python -m benchmarks.published_fit CALIBRATE.csv --device a100-80 [--only SOURCE] [--every 3] [--frozen]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_dialects import as_told
from benchmarks.published_machines import cluster
from benchmarks.published_plans import Case, case_of, guess_on
from benchmarks.published_rows import Row, Unscored, measured, read_rows
from meshwright.core.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A number that may be turned: of the device or a link (`device.k_half`), or of a dialect (`nanotron.traffic`)."""

    name: str
    low: float
    start: float
    high: float


DEVICE = (
    Knob(name="device.matmul_fraction", low=0.6, start=0.8, high=0.9),
    Knob(name="device.k_half", low=0.0, start=60.0, high=250.0),
    Knob(name="device.bandwidth_fraction", low=0.75, start=0.86, high=0.92),
    Knob(name="device.memory_half_bytes", low=0.0, start=2e6, high=1e7),
    Knob(name="device.attention_fraction", low=0.35, start=0.55, high=0.7),
    Knob(name="device.attention_backward_fraction", low=0.3, start=0.45, high=0.65),
    Knob(name="device.attention_half_tokens", low=0.0, start=200.0, high=1000.0),
    Knob(name="device.small_head_fraction", low=0.6, start=0.85, high=1.0),
    Knob(name="outer.rate", low=0.3, start=0.8, high=0.95),
    Knob(name="beside.compute_by_collective", low=1.0, start=1.15, high=1.4),
    Knob(name="jitter_fraction", low=0.0, start=0.005, high=0.03),
)
_COMMON = (
    Knob(name="launch_seconds", low=3e-6, start=1.2e-5, high=8e-5),
    Knob(name="step_seconds", low=0.0, start=5e-3, high=0.05),
    Knob(name="traffic", low=0.7, start=1.2, high=3.0),
    Knob(name="loss_traffic", low=0.7, start=1.5, high=5.0),
)
DIALECTS: dict[str, tuple[Knob, ...]] = {
    "megatron-deepspeed": (*_COMMON, Knob(name="fused_scores.passes", low=3.0, start=4.5, high=7.0)),
    "scaling": (
        *_COMMON,
        Knob(name="fused_norm_traffic", low=0.7, start=1.0, high=2.5),
        Knob(name="older_flash.share", low=0.4, start=0.7, high=1.0),
        Knob(name="fused_scores.passes", low=3.0, start=4.5, high=7.0),
        Knob(name="plain_scores.passes", low=7.0, start=14.0, high=22.0),
    ),
    "llm-foundry": (*_COMMON, Knob(name="flash.share", low=0.4, start=0.7, high=1.0)),
    "nanotron": (
        *_COMMON,
        Knob(name="matmul", low=1.0, start=1.1, high=1.4),
        Knob(name="stage_wait_seconds", low=0.0, start=3e-4, high=6e-4),
    ),
}


def turned(value: Any, path: str, number: float) -> Any:
    """`value` with one number changed; `rate` of a link scales it."""
    first, _, rest = path.partition(".")
    if first == "rate":
        return replace(value, bytes_per_second=value.bytes_per_second * number)
    return replace(value, **{first: turned(getattr(value, first), rest, number) if rest else number})


def turn_all(value: Any, knobs: Sequence[Knob], numbers: Sequence[float]) -> Any:
    for knob, number in zip(knobs, numbers, strict=True):
        value = turned(value, knob.name, float(number))
    return value


@dataclass(frozen=True, kw_only=True)
class Example:
    row: Row
    case: Case
    seconds: float


def examples(path: Path, device: str, only: str, every: int) -> list[Example]:
    found = []
    for row in read_rows(path)[0]:
        try:
            real = measured(row)
            if real.step_seconds and (not only or row.text("file") == only):
                found.append(Example(row=row, case=case_of(row, real.memory_rank), seconds=real.step_seconds))
        except Unscored:
            continue
    is_known = [each for each in found if each.case.machine.device == device and each.case.dialect.name in DIALECTS]
    return is_known[::every]


@dataclass(frozen=True, kw_only=True)
class Fit:
    shown: Sequence[Example]
    groups: Sequence[tuple[str, Sequence[Knob]]]
    """The first is the machine's, the others are of dialects."""

    @property
    def knobs(self) -> list[Knob]:
        return [knob for _, some in self.groups for knob in some]

    def errors(self, numbers: np.ndarray, of: str = "machine") -> np.ndarray:
        """Of logarithms, with the knobs turned so; 0 for rows of other dialects than `of`."""
        sizes = [len(knobs) for _, knobs in self.groups]
        turns = dict(zip((name for name, _ in self.groups), np.split(numbers, np.cumsum(sizes)[:-1]), strict=True))
        machines: dict[Any, Cluster] = {}
        guessed: dict[Any, float] = {}

        def seconds(each: Example) -> float:
            case, name = each.case, each.case.dialect.name
            if case.machine not in machines:
                machines[case.machine] = turn_all(cluster(case.machine), self.groups[0][1], turns["machine"])
            dialect = as_told(turn_all(case.dialect, dict(self.groups)[name], turns[name]), each.row)
            key = case.machine, case.plans, case.config, repr(dialect)
            if key not in guessed:
                case = replace(case, dialect=dialect)
                guessed[key] = guess_on(case, case.plans[0], machines[case.machine], replays=False).step_seconds
            return guessed[key]

        names = ("machine", *(name for name, _ in self.groups[1:])) if of == "machine" else (of,)
        return np.array(
            [np.log(seconds(each) / each.seconds) if each.case.dialect.name in names else 0.0 for each in self.shown]
        )

    def slopes(self, numbers: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """How errors change with each knob; a dialect's is asked of its own rows alone."""
        base = self.errors(numbers)
        columns = []
        for name, knobs in self.groups:
            is_mine = np.array([name in ("machine", each.case.dialect.name) for each in self.shown])
            for _ in knobs:
                turned_one = numbers.copy()
                turned_one[len(columns)] += steps[len(columns)]
                columns.append(np.where(is_mine, self.errors(turned_one, name) - base, 0.0) / steps[len(columns)])
        return np.stack(columns, axis=1)

    def weights(self) -> np.ndarray:
        """Every source weighs the same."""
        rows = Counter(each.row.text("file") for each in self.shown)
        found = np.array([1 / np.sqrt(rows[each.row.text("file")]) for each in self.shown])
        return found / found.mean()

    def solve(self, rounds: int) -> np.ndarray:
        """In shares of each range, since numbers are of very different sizes."""
        from scipy.optimize import least_squares

        low, start, high = (np.array([getattr(k, field) for k in self.knobs]) for field in ("low", "start", "high"))
        width, weight = high - low, self.weights()
        found = least_squares(
            lambda share: weight * self.errors(low + share * width),
            np.clip((start - low) / width, 0.01, 0.99),
            jac=lambda share: weight[:, None] * self.slopes(low + share * width, 0.02 * width) * width,
            bounds=(0, 1),
            loss="soft_l1",
            f_scale=0.08,
            max_nfev=rounds,
        )
        return low + found.x * width


def main() -> int:
    parser = argparse.ArgumentParser(prog="published_fit")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="a100-80", help="a preset")
    parser.add_argument("--only", default="", help="one source")
    parser.add_argument("--every", type=int, default=3, help="take each n-th row")
    parser.add_argument("--frozen", action="store_true", help="leave the device as its preset has it")
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    shown = examples(asked.file, asked.device, asked.only, asked.every)
    names = sorted({each.case.dialect.name for each in shown})
    fit = Fit(
        shown=shown,
        groups=[("machine", () if asked.frozen else DEVICE), *((name, DIALECTS[name]) for name in names)],
    )
    begun = time.perf_counter()
    numbers = fit.solve(asked.rounds)
    print(f"{len(shown)} rows, {len(fit.knobs)} numbers, {time.perf_counter() - begun:.0f} s")
    for name, knob, number in zip((name for name, some in fit.groups for _ in some), fit.knobs, numbers, strict=True):
        near = min(number - knob.low, knob.high - number) < 1e-3 * (knob.high - knob.low)
        print(f"{name:20s} {knob.name:36s} {number:.4g}{'  (at its limit)' if near else ''}")
    off = np.abs(np.expm1(fit.errors(numbers)))
    for name in names:
        mine = [error for error, each in zip(off, shown, strict=True) if each.case.dialect.name == name]
        print(f"{name:20s} median error {np.median(mine):.1%}, p90 {np.quantile(mine, 0.9):.1%} of {len(mine)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
