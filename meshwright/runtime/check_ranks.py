"""What the pool's ranks do for `mw check`: the reference on one, the comparison on all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.data.source import open_text
from meshwright.models.cost import decoder_profile
from meshwright.ops.record import Traffic
from meshwright.runtime.config import RunConfig
from meshwright.runtime.loop import Samples
from meshwright.runtime.parity import (
    DTYPES,
    SamplesOf,
    compare,
    compare_rounded,
    enter,
    leave,
    observe,
    open_session,
    write_reference,
)
from meshwright.simulate.price import price


def _samples(config: RunConfig, batch: int, cache: str, dtype: str) -> SamplesOf:
    data = config.data
    text = open_text(data.train, sequence=data.sequence, held_out_fraction=0.0, seed=data.seed, cache=Path(cache))

    def samples(step: int, part: int, num_parts: int) -> Samples:
        rows = text.batch(step * batch, batch, part, num_parts)
        return Samples(
            inputs=torch.from_numpy(rows.inputs),
            targets=torch.from_numpy(rows.targets),
            weights=torch.from_numpy(rows.weights).to(DTYPES[dtype]),
            num_tokens=max(rows.num_tokens, 1.0),
        )

    return samples


def reference_job(
    *, rank: int, num_ranks: int, rendezvous: str, config: Any, folder: str, steps: int, dtype: str, batch: int,
    cache: str,
) -> None:  # fmt: skip
    run = decode(RunConfig, config, "")
    samples = _samples(run, batch, cache, dtype)
    write_reference(
        Path(folder), run.model.config(), run.train.optimizer, samples, steps, seed=run.train.seed, dtype=dtype,
        batch=batch,
    )  # fmt: skip


def parity_job(
    *, rank: int, num_ranks: int, rendezvous: str, config: Any, folder: str, steps: int, dtype: str, batch: int,
    cache: str, plan: Any, tolerance: float, exactness: str,
) -> dict[str, Any]:  # fmt: skip
    run, made = decode(RunConfig, config, ""), decode(Plan, plan, "plan")
    samples = _samples(run, batch, cache, dtype)
    optimizer = run.train.optimizer
    if made.mesh:
        enter(rank, num_ranks, rendezvous)
    session = open_session(
        made, run.model.config(), optimizer, seed=run.train.seed, dtype=dtype, device=torch.device("cpu")
    )
    if exactness == "exact":
        worst, departures = compare(session, Path(folder), samples, steps, optimizer, tolerance)
    else:
        worst, departures = compare_rounded(session, Path(folder), samples, optimizer, tolerance)
    traffic, sizes = observe(session, samples, optimizer)
    priced, priced_sizes = promised(session, run, made, dtype)
    lines = differences(traffic, priced)
    if _is_largest(session):
        lines += [
            f"{name}: {sizes[name]:,} bytes held, {priced_sizes[name]:,} priced"
            for name in sizes
            if sizes[name] != priced_sizes[name]
        ]
    if made.mesh:
        leave()
    found = [
        {"step": d.step, "quantity": d.quantity, "layer": d.layer, "error": d.error, "order": i}
        for i, d in enumerate(departures)
    ]
    messages = sum(traffic.values())
    return {"worst": worst, "departures": found, "traffic": lines, "num_messages": messages}


def _is_largest(session: Any) -> bool:
    """Price speaks of the largest rank: the first along every axis that cuts (rows may not divide evenly)."""
    cutting = {axis for axes in session.build.cut_axes.values() for axis in axes}
    wire = session.build.wire
    cutting -= {wire.axis} if wire is not None else set()
    return all(session.mesh.index(axis) == 0 for axis in cutting)


def promised(session: Any, run: RunConfig, plan: Plan, dtype: str) -> tuple[Traffic, dict[str, int]]:
    """Messages and resident bytes that `price` promises this rank."""
    profile = decoder_profile(run.model.config(), run.model.name)
    width = DTYPES[dtype].itemsize
    wire = session.build.wire
    work = price(
        profile,
        plan,
        sequence=run.data.sequence,
        stage=session.mesh.index(wire.axis) if wire is not None else 0,
        state_bytes=run.train.optimizer.state_bytes * width // 4,
        element_bytes=width,
    )
    traffic: Traffic = Counter()
    for task in work.collectives:
        count = int(task.repeat) * (1 if task.per_step else plan.num_microbatches)
        if count:
            traffic[task.kind, task.axis, int(task.bytes)] += count
    sizes: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for item in work.residents:
        if item.category in sizes:
            sizes[item.category] += int(item.repeat * item.bytes)
    return traffic, sizes


def differences(seen: Traffic, priced: Traffic) -> list[str]:
    lines = [
        f"{n} x {kind} of {size:,} bytes on {axis} not priced" for (kind, axis, size), n in (seen - priced).items()
    ]
    return lines + [
        f"{n} x {kind} of {size:,} bytes on {axis} priced and not sent"
        for (kind, axis, size), n in (priced - seen).items()
    ]
