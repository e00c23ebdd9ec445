"""A run that has ended, beside what was promised: its entry in the local ledger. No torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import meshwright
from meshwright.core.codec import encode
from meshwright.core.ledger import LEAST_STEPS, Entry, Measured, Predicted, append
from meshwright.probe.here import machine_name
from meshwright.runtime.config import RunConfig
from meshwright.runtime.prepare import Prepared


def record(config: RunConfig, prepared: Prepared, result: Mapping[str, Any]) -> str:
    """Why the run is not in the ledger although it should be, or nothing. Too few measured steps tell nothing."""
    if result["num_measured"] < LEAST_STEPS:
        return ""
    return append(entry_of(config, prepared, result))


def promised_bytes(prepared: Prepared) -> int:
    """Of the fullest rank, as it is measured: what torch allocates on a GPU, all that a process holds on a CPU."""
    forecast = prepared.forecast
    return forecast.peak_bytes if prepared.cluster.device.kind == "cpu" else forecast.peak_allocated_bytes


def entry_of(config: RunConfig, prepared: Prepared, result: Mapping[str, Any]) -> Entry:
    forecast = prepared.forecast
    return Entry(
        unix_seconds=result["finished_unix_seconds"],
        versions={"meshwright": meshwright.__version__, "torch": result["torch"], "python": platform.python_version()},
        machine=machine_name(),
        device_name=result["device_name"],
        model=config.model.title,
        model_fingerprint=prepared.profile.fingerprint,
        plan=encode(prepared.plan),
        plan_fingerprint=prepared.plan.fingerprint,
        cluster=prepared.cluster,
        sequence=config.sequence,
        batch=config.train.batch,
        predicted=Predicted(
            step_seconds=forecast.step_seconds,
            step_seconds_low=forecast.step_seconds_low,
            step_seconds_high=forecast.step_seconds_high,
            peak_bytes=promised_bytes(prepared),
            reserved_bytes=0 if prepared.cluster.device.kind == "cpu" else forecast.peak_reserved_bytes,
            seconds_by_origin=forecast.seconds_by_origin,
            seconds_by_cause=forecast.seconds_by_cause,
        ),
        measured=Measured(
            step_seconds=result["step_seconds"],
            step_seconds_p10=result["step_seconds_p10"],
            step_seconds_p90=result["step_seconds_p90"],
            num_steps=result["num_measured"],
            peak_bytes=result["peak_bytes"],
            reserved_bytes=result["reserved_bytes"],
        ),
    )
