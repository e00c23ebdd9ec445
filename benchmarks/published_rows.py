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
    *("recompute", "precision", "attention_kernel", "compile", "schedule", "optimizer", "task", "framework"),
    *("flops_convention", "mem_unit", "mem_kind", "status", "notes", "provenance", "url"),
)

STALL_MFU = 0.01
"""Below it a step waited for the network (published/README.md): its time says nothing of the plan."""
SMALL_TASK = "CI pretrain"
"""Tiny models whose steps are launches: their memory counts, their times do not."""
NOTHING = {"", "n/a", "na", "none", "-", "--", "?", "null", "unknown", "unspecified", "not stated"}
YES, NO = {"1", "1.0", "true", "yes", "on"}, {"", "0", "0.0", "false", "no", "off", "n/a", "none", "-"}
_BINARY = ("seq_len", "micro_batch", "global_batch", "grad_accum")
"""Columns whose 2k is 2048; elsewhere it is 2000."""
_PAIRED = ("micro_batch", "global_batch", "grad_accum")
_BETWEEN = re.compile(r"\s+and\s+|\s*[/;]\s*|\s*,\s+|\s+,|,(?!\d{3}(?!\d))")
_UNIT = re.compile(r"\s*\(.*\)$|\s*(tokens?|samples|sequences|seqs?|gpus?|gib|gb|s)$", re.IGNORECASE)
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?) ?([kmbt]?)", re.IGNORECASE)


class Unscored(Exception):
    """Why a row is not scored."""


def parsed(text: str, column: str) -> float | None:
    """`61.5`, `~2,048`, `2k`, `1.3B`; None where it is no number."""
    try:
        return float(text)
    except ValueError:
        bare = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text.strip(" ~≈<>=+"))
        amount = _AMOUNT.fullmatch(_UNIT.sub("", bare))
    if amount is None:
        return None
    thousand = 1024 if column in _BINARY else 1000
    return float(amount[1]) * float(thousand ** " kmbt".index(amount[2].lower() or " "))


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
        value = parsed(text, column)
        if value is None and column in _PAIRED:
            value = self._of_two(column, text)
        if value is None:
            raise Unscored(f"{column} is no number")
        return value

    def _of_two(self, column: str, text: str) -> float | None:
        """`126 and 256`: batches in full and in 16-bit precision, which has room for the larger one."""
        values = [parsed(part, column) for part in _BETWEEN.split(text)]
        known = [value for value in values if value is not None]
        if len(values) != 2 or len(known) != 2:
            return None
        is_full = re.search(r"fp32|tf32", self.text("precision").lower()) is not None
        # With larger microbatches a step accumulates fewer of them.
        return min(known) if is_full != (column == "grad_accum") else max(known)

    def whole(self, column: str, default: int | None = None, least: int = 1) -> int:
        value = self.number(column)
        if value is None:
            if default is None:
                raise Unscored(f"{column} is missing")
            return default
        if column == "seq_len" and value >= 1:
            value = round(value)  # an average
        if value != int(value) or value < least:
            raise Unscored(f"{column} is no whole number of at least {least}")
        return int(value)

    def is_on(self, column: str) -> bool:
        text = self.text(column).lower()
        if text in YES or text in NO:
            return text in YES
        raise Unscored(f"{column} is {text}")

    def filled(self, facts: Mapping[str, str]) -> Row:
        """With `facts` where it is silent."""
        return Row({**facts, **{column: text for column, text in self.cells.items() if (text or "").strip()}})

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
    def gpus(self) -> int:
        if self.number("gpus") is None and self.number("dp") is not None:
            return self._ways * self.whole("dp")
        return self.whole("gpus")

    @property
    def batch(self) -> int:
        """Samples of a step."""
        if "tok" in self.text("global_batch").lower():
            return max(1, round((self.number("global_batch") or 0) / self.whole("seq_len")))
        if self.number("global_batch") is not None:
            return self.whole("global_batch")
        # Where only the microbatch is told, a step is one of them on each replica unless it says more.
        return self.whole("micro_batch") * self.replicas * self.whole("grad_accum", 1)

    @property
    def has_batch(self) -> bool:
        return self.number("global_batch") is not None or self.number("micro_batch") is not None

    @property
    def replicas(self) -> int:
        """What the other axes leave of the devices, whatever `dp` counts (some count context ranks as well)."""
        if self.gpus % self._ways:
            raise Unscored("tp x pp x cp does not divide gpus")
        return self.gpus // self._ways

    @property
    def _ways(self) -> int:
        return self.whole("tp", 1) * self.whole("pp", 1) * self.whole("cp", 1)


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
    sample_seconds: float | None
    """Of one sample of a step, where it is not told how many a step has."""
    memory_bytes: float | None
    memory_rank: Literal["fullest", "first", "last"]
    label: Literal["fits", "oom", ""]

    @property
    def is_something(self) -> bool:
        return bool(self.step_seconds or self.sample_seconds or self.memory_bytes or self.label)


def measured(row: Row) -> Measured:
    status = row.text("status").lower()
    is_ok, is_oom = status == "ok", re.fullmatch(r"oom( \(.*\))?", status) is not None
    kind = row.text("mem_kind").lower()
    is_timed = is_ok and _is_timed(row)
    has_batch = row.has_batch or bool(row.number("step_time_s"))
    return Measured(
        step_seconds=_step_seconds(row) if is_timed and has_batch else None,
        sample_seconds=_sample_seconds(row) if is_timed and not has_batch else None,
        memory_bytes=_memory_bytes(row) if is_ok else None,
        memory_rank="last" if "last" in kind else "first" if "rank-0" in kind else "fullest",
        label="fits" if is_ok else "oom" if is_oom else "",
    )


def _is_timed(row: Row) -> bool:
    mfu = row.number("mfu")
    is_stall = row.text("quality").startswith("very_low_mfu") or (mfu is not None and mfu < STALL_MFU)
    # A length that is the longest sample's drives the memory, not the time.
    is_longest = re.search(r"seq_len ?= ?longest", row.text("notes")) is not None
    return not is_stall and not is_longest and row.text("task") != SMALL_TASK


def _step_seconds(row: Row) -> float | None:
    """As published, or from the rate that is."""
    if seconds := row.number("step_time_s"):
        return seconds
    each = _sample_seconds(row)
    return None if each is None else each * row.batch


def _sample_seconds(row: Row) -> float | None:
    """From tokens, samples, or model flops (6 N + 12 L d s a token) in a second."""
    if rate := row.number("tokens_per_s_per_gpu"):
        return row.whole("seq_len") / (rate * row.gpus)
    if rate := row.number("samples_per_s"):
        return 1 / rate
    mfu, peak, params = row.number("mfu"), row.number("mfu_peak_tflops"), row.number("params")
    if not (mfu and peak and params):
        return None
    tokens = row.whole("seq_len")
    flops = 6 * params + 12 * row.whole("layers") * row.whole("hidden") * tokens
    return flops * tokens / (mfu * peak * 1e12 * row.gpus)


def _memory_bytes(row: Row) -> float | None:
    """Of one GPU as torch counts it; what the driver shows, sums over GPUs and formulas are other things."""
    amount, kind = row.number("peak_mem_gb"), row.text("mem_kind").lower()
    is_of_torch = re.search(r"allocated|reserved|memory stats", kind) and not re.search(r"sum|analytic|smi", kind)
    unit = re.match(r"gib|gb", row.text("mem_unit").lower())
    if not amount or not is_of_torch or unit is None:
        return None
    return amount * (GIB if unit[0] == "gib" else 1e9)
