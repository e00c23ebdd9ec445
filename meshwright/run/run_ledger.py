"""A run beside what was promised, as data: in its own folder, and when it has ended in the local ledger. No torch."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import meshwright
from meshwright.core.codec import encode
from meshwright.core.files import write_whole
from meshwright.core.ledger import LEAST_STEPS, Entry, Measured, append
from meshwright.run.step_times import Facts
from meshwright.run.verdict import Promise

COMPARISON = "comparison.json"
"""In the run's folder: one entry, of the latest start so far."""


def record(entry: Entry) -> str:
    """Why the run is not in the ledger although it should be, or nothing. Too few measured steps tell nothing."""
    if entry.measured.num_steps < LEAST_STEPS:
        return ""
    return append(entry)


def keep(entry: Entry, folder: Path) -> str:
    """Why it is not kept in the folder, or nothing: a full disk must not hurt a run."""
    try:
        write_whole(folder / COMPARISON, json.dumps(encode(entry), allow_nan=False) + "\n")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def entry_of(
    promise: Promise, facts: Facts, comparison: Mapping[str, Any], *, unix_seconds: float, torch: str, device_name: str
) -> Entry:
    return Entry(
        unix_seconds=unix_seconds,
        versions={"meshwright": meshwright.__version__, "torch": torch, "python": platform.python_version()},
        machine=promise.machine,
        device_name=device_name,
        model=promise.model,
        model_fingerprint=promise.model_fingerprint,
        plan=promise.plan,
        plan_fingerprint=promise.plan_fingerprint,
        cluster=promise.cluster,
        sequence=promise.sequence,
        batch=promise.batch,
        predicted=promise.predicted,
        measured=Measured(
            step_seconds=facts.step_seconds,
            step_seconds_p10=facts.step_seconds_p10,
            step_seconds_p90=facts.step_seconds_p90,
            num_steps=facts.num_measured,
            peak_bytes=facts.peak_bytes,
            reserved_bytes=facts.reserved_bytes,
            data_seconds=facts.data_seconds,
            seconds_by_part=_by_part(facts) if promise.has_one_stage else {},
        ),
        comparison=comparison,
    )


def _by_part(facts: Facts) -> dict[str, float]:
    seconds = facts.step_seconds - facts.data_seconds
    return {name: share * seconds for name, share in facts.parts.items() if name != "idle"}
