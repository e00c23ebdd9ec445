"""Cross-validation of the constants: rows held out, constants fitted again to the others, errors of what was held out.

Held out in turn are groups (a model on a number of devices of one source), then whole sources. A source that alone
tells of a framework leaves it with the constants of a framework that nobody measured. Constants are moved from those in
use by at most 30 %, and their effects on the logarithm of a forecast are added up; what is modelled at all is not
chosen again.

Run: python -m benchmarks.published_cross CALIBRATE.csv CALIBRATE-MORE.csv
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published_dialects import Dialect, as_told
from benchmarks.published_fit import turned
from benchmarks.published_machines import cluster
from benchmarks.published_plans import Case, case_of, explained, guess_on
from benchmarks.published_rows import Row, Unscored, measured, read_rows
from meshwright.core.cluster import Cluster

RESULT = Path(__file__).parent / "results" / "published_cross.json"
STEP, MOST = math.log(1.1), math.log(1.3)
DEVICE = ("matmul_fraction", "bandwidth_fraction", "attention_fraction")
LINK = ("bytes_per_second", "step_seconds", "sum_step_seconds")
DIALECT = (
    *("launch_seconds", "traffic", "loss_traffic", "stage_wait_seconds", "far_latencies", "hidden_tensor"),
    *("expert_launches", "gathers_by_node", "flash.share", "fused_scores.passes"),
)
MOST_ROWS = 40
"""Of a source in a file; of more every n-th is taken."""
MANY_NODES = 16


@dataclass(frozen=True, kw_only=True)
class Example:
    row: Row
    case: Case
    seconds: float
    source: str
    group: str

    def told(self, dialect: Dialect) -> Dialect:
        return as_told(dialect, explained(self.row))

    def forecast(self, machines: Cluster | None = None, dialect: Dialect | None = None) -> float:
        case = replace(self.case, dialect=self.told(dialect)) if dialect else self.case
        return guess_on(case, case.plans[0], machines or cluster(case.machine), replays=False).step_seconds


def examples(path: Path) -> list[Example]:
    by_source: dict[str, list[Example]] = defaultdict(list)
    for row in read_rows(path)[0]:
        try:
            real, source = measured(row), row.text("file")
            if not real.step_seconds or len((case := case_of(row)).plans) > 1:
                continue
        except Unscored:
            continue
        group = f"{source} {row.text('model')} {row.text('gpus')}"
        by_source[source].append(Example(row=row, case=case, seconds=real.step_seconds, source=source, group=group))
    return [each for some in by_source.values() for each in some[:: -(-len(some) // MOST_ROWS)]]


def effects(rows: Sequence[Example]) -> tuple[list[str], np.ndarray]:
    """Names of constants, and how the logarithm of each row's forecast changes with that of each."""
    base = np.log([each.forecast() for each in rows])
    columns: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(rows)))

    def add(at: int, name: str, seconds: float) -> None:
        columns[name][at] = (math.log(seconds) - base[at]) / STEP

    for at, each in enumerate(rows):
        machines, dialect = cluster(each.case.machine), each.case.dialect
        for path, owner in [(f"device.{name}", each.case.machine.device) for name in DEVICE] + [
            (f"outer.{name}", machines.outer.name) for name in LINK if each.case.machine.num_nodes > 1
        ]:
            if value := _number(machines, path):
                add(at, f"{owner} {path}", each.forecast(machines=turned(machines, path, value * math.exp(STEP))))
        for path in DIALECT:
            value = _number(dialect, path)
            if value and dialect.name != "ours":
                add(at, f"{dialect.name} {path}", each.forecast(dialect=turned(dialect, path, value * math.exp(STEP))))
    names = [name for name, column in columns.items() if np.abs(column).max() > 1e-3]
    return names, np.stack([columns[name] for name in names], axis=1)


def _number(value: Any, path: str) -> float:
    for name in path.split("."):
        value = getattr(value, name)
    return float(value)


def fitted(logs: np.ndarray, slopes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Logarithms of what each constant is multiplied with."""
    from scipy.optimize import least_squares

    def left(moves: np.ndarray) -> np.ndarray:
        return weights * (logs - slopes @ moves)

    def jacobian(_: np.ndarray) -> np.ndarray:
        return -weights[:, None] * slopes

    start = np.zeros(slopes.shape[1])
    return least_squares(left, start, jac=jacobian, bounds=(-MOST, MOST), loss="soft_l1", f_scale=0.08).x


def held_out(rows: Sequence[Example], names: Sequence[str], slopes: np.ndarray, key: str) -> np.ndarray:
    """Errors of each row with constants that its group or source had no say in."""
    logs = np.log([each.seconds / each.forecast() for each in rows])
    labels = np.array([getattr(each, key) for each in rows])
    sources = np.array([each.source for each in rows])
    weights = np.array([1 / math.sqrt(np.sum(sources == each.source)) for each in rows])
    weights /= weights.mean()
    errors = np.zeros(len(rows))
    for label in sorted(set(labels)):
        mine = labels == label
        known = {each.case.dialect.name for each, is_mine in zip(rows, mine, strict=True) if not is_mine}
        moves = fitted(logs[~mine], slopes[~mine], weights[~mine])
        unknown = {each.case.dialect.name for each in rows} - known
        moves = np.where([name.split(" ")[0] in unknown for name in names], 0.0, moves)
        for at in np.flatnonzero(mine):
            each, log = rows[at], logs[at]
            if each.case.dialect.name in unknown:
                log = math.log(each.seconds / each.forecast(dialect=_unmeasured(each.case.dialect)))
            errors[at] = abs(math.exp(slopes[at] @ moves - log) - 1)
    return errors


def _unmeasured(dialect: Dialect) -> Dialect:
    """What it does is known from its code, what that costs is not."""
    plain = Dialect(name=dialect.name)
    numbers = {path.split(".")[0] for path in DIALECT} | {"step_seconds", "fused_norm_traffic", "matmul"}
    numbers |= {"older_flash", "plain_scores"}
    return replace(dialect, **{name: getattr(plain, name) for name in numbers})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_cross")
    parser.add_argument("files", nargs="+", type=Path, metavar="CALIBRATE.csv", help="the last is reported by source")
    asked = parser.parse_args(arguments)
    rows = [each for path in asked.files for each in examples(path)]
    reported = {row.text("row_id") for row in read_rows(asked.files[-1])[0]}
    names, slopes = effects(rows)
    now = np.array([abs(each.forecast() / each.seconds - 1) for each in rows])
    columns = {"now": now, **{key: held_out(rows, names, slopes, key) for key in ("group", "source")}}
    is_mine = np.array([each.row.text("row_id") in reported for each in rows])
    parts = {source: np.array([each.source == source for each in rows]) & is_mine for source in _sources(rows, is_mine)}
    parts["beyond 16 nodes"] = np.array([each.case.machine.num_nodes > MANY_NODES for each in rows]) & is_mine
    found: dict[str, Any] = {}
    for name, part in parts.items():
        medians = {key: round(float(np.median(errors[part])), 4) for key, errors in columns.items()}
        found[name] = {"rows": int(part.sum()), **medians}
    RESULT.write_text(json.dumps({"constants": len(names), "sources": found}, indent=1) + "\n", encoding="utf-8")
    for name, one in found.items():
        print(f"{name:28s}{one['rows']:6d}{one['now']:9.1%}{one['group']:9.1%}{one['source']:9.1%}")
    return 0


def _sources(rows: Sequence[Example], is_mine: np.ndarray) -> list[str]:
    return sorted({each.source for each, mine in zip(rows, is_mine, strict=True) if mine})


if __name__ == "__main__":
    raise SystemExit(main())
