"""Published measurements as rows: the CSV, its numbers, and what was measured. Nothing of meshwright, nothing fitted.

A row that cannot be used raises `Unscored` with a reason; reasons are counted, so they name no row.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.units import GIB

NEEDED = (
    "file",
    "hardware",
    "gpus",
    "model",
    "layers",
    "hidden",
    "heads",
    "seq_len",
    "micro_batch",
    "global_batch",
    "precision",
    "step_time_s",
    "status",
)
"""Without one of them no row can be scored."""

NUMBERS = (
    *("gpu_mem_gb", "gpus", "gpus_per_node", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"),
    *("experts", "topk", "seq_len", "tp", "sp", "pp", "vpp", "cp", "ep", "dp", "micro_batch", "grad_accum"),
    *("global_batch", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu", "mfu_peak_tflops", "hfu"),
    *("step_time_s", "peak_mem_gb"),
)
TEXTS = (
    *("file", "split", "quality", "source", "row_id", "hardware", "interconnect", "model", "family", "zero_stage"),
    *("recompute", "precision", "attention_kernel", "compile", "schedule", "optimizer", "task"),
    *("flops_convention", "mem_unit", "mem_kind", "status", "notes", "provenance", "url"),
)

STALL_MFU = 0.01
"""Below it a step waited for the network (published/README.md): its time says nothing of the plan."""
SMALL_TASK = "CI pretrain"
"""Tiny models whose steps are launches: their memory counts, their times do not."""
NOTHING = {"", "n/a", "na", "none", "-"}


class Unscored(Exception):
    """Why a row is not scored."""


@dataclass(frozen=True)
class Row:
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def number(self, column: str) -> float | None:
        """None where the cell is empty."""
        text = self.text(column)
        if text.lower() in NOTHING:
            return None
        try:
            return float(text)
        except ValueError:
            raise Unscored(f"{column} is no number") from None

    def whole(self, column: str, default: int | None = None, least: int = 1) -> int:
        value = self.number(column)
        if value is None:
            if default is None:
                raise Unscored(f"{column} is missing")
            return default
        if value != int(value) or value < least:
            raise Unscored(f"{column} is no whole number of at least {least}")
        return int(value)

    def check_numbers(self) -> None:
        """Refuse NaN, infinite and negative numbers wherever they stand: such a row was recorded wrong."""
        for column in NUMBERS:
            try:
                value = self.number(column)
            except Unscored:
                continue  # words are objected to by whoever needs the number
            if value is not None and not 0 <= value < math.inf:
                raise Unscored(f"{column} is NaN, infinite or negative")

    @property
    def batch(self) -> int:
        """Samples of a step."""
        if self.number("global_batch") is not None:
            return self.whole("global_batch")
        # Where only the microbatch is told, a step is one of them on each replica unless it says more.
        return self.whole("micro_batch") * self.whole("dp", self.replicas) * self.whole("grad_accum", 1)

    @property
    def replicas(self) -> int:
        """What the other axes leave of the devices."""
        ways = self.whole("tp", 1) * self.whole("pp", 1) * self.whole("cp", 1)
        return max(1, self.whole("gpus") // ways)


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """The rows, and warnings."""
    if not path.is_file():
        fix = "Give a CSV with the columns of published/README.md."
        raise MeshwrightError([Problem(where=str(path), what="there is no such file.", fix=fix)])
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="")
            columns = list(reader.fieldnames or ())
            cells = [{key: value for key, value in each.items() if isinstance(value, str)} for each in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeshwrightError([Problem(where=str(path), what=f"cannot be read as CSV: {error}.")]) from None
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        what = f"has no column {', '.join(missing)} (it has {len(columns)} columns)."
        raise MeshwrightError([Problem(where=str(path), what=what, fix="Add them, with empty cells if need be.")])
    unknown = sorted(set(columns) - {*NUMBERS, *TEXTS})
    warnings = [f"{path}: ignoring unknown columns: {', '.join(unknown)}."] if unknown else []
    return [Row(each) for each in cells], warnings


@dataclass(frozen=True, kw_only=True)
class Measured:
    step_seconds: float | None
    memory_bytes: float | None
    memory_rank: Literal["fullest", "first", "last"]
    label: Literal["fits", "oom", ""]

    @property
    def is_something(self) -> bool:
        return bool(self.step_seconds or self.memory_bytes or self.label)


def measured(row: Row) -> Measured:
    is_ok = row.text("status") == "ok"
    is_oom = re.fullmatch(r"oom( \(.*\))?", row.text("status")) is not None
    kind = row.text("mem_kind").lower()
    return Measured(
        step_seconds=_step_seconds(row) if is_ok and _is_timed(row) else None,
        memory_bytes=_memory_bytes(row) if is_ok else None,
        memory_rank="last" if "last" in kind else "first" if "rank-0" in kind else "fullest",
        label="fits" if is_ok else "oom" if is_oom else "",
    )


def _is_timed(row: Row) -> bool:
    mfu = row.number("mfu")
    is_stall = row.text("quality").startswith("very_low_mfu") or (mfu is not None and mfu < STALL_MFU)
    return not is_stall and row.text("task") != SMALL_TASK


def _step_seconds(row: Row) -> float | None:
    """As published, or from the rate that is: tokens, samples, or model flops (6 N + 12 L d s a token)."""
    if seconds := row.number("step_time_s"):
        return seconds
    if rate := row.number("tokens_per_s_per_gpu"):
        return row.batch * row.whole("seq_len") / (rate * row.whole("gpus"))
    if rate := row.number("samples_per_s"):
        return row.batch / rate
    mfu, peak, params = row.number("mfu"), row.number("mfu_peak_tflops"), row.number("params")
    if not (mfu and peak and params):
        return None
    tokens = row.batch * row.whole("seq_len")
    flops = 6 * params + 12 * row.whole("layers") * row.whole("hidden") * row.whole("seq_len")
    return flops * tokens / (mfu * peak * 1e12 * row.whole("gpus"))


def _memory_bytes(row: Row) -> float | None:
    """Of one GPU as torch counts it; what the driver shows, sums over GPUs and formulas are other things."""
    amount, kind = row.number("peak_mem_gb"), row.text("mem_kind").lower()
    is_of_torch = re.search(r"allocated|reserved|memory stats", kind) and not re.search(r"sum|analytic|smi", kind)
    unit = re.match(r"gib|gb", row.text("mem_unit").lower())
    if not amount or not is_of_torch or unit is None:
        return None
    return amount * (GIB if unit[0] == "gib" else 1e9)
