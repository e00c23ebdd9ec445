"""What the pool's ranks do for `mw check`: the reference on one, the comparison on all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.ops.record import Traffic
from meshwright.runtime.config import RunConfig
from meshwright.runtime.loop import Samples
from meshwright.runtime.model import Opened, open_model
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
from meshwright.runtime.prepare import open_data
from meshwright.simulate.price import price


def _samples(config: RunConfig, batch: int, cache: str, dtype: str) -> SamplesOf:
    data = open_data(replace(config, data=replace(config.data, held_out_fraction=0.0)), Path(cache))

    def put(array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(DTYPES[dtype]) if tensor.is_floating_point() else tensor

    def samples(step: int, part: int, num_parts: int) -> Samples:
        rows = data.batch(step * batch, batch, part, num_parts)
        return Samples(
            inputs=tuple(map(put, rows.inputs)) if isinstance(rows.inputs, tuple) else put(rows.inputs),
            targets=put(rows.targets),
            weights=put(rows.weights),
            num_tokens=rows.num_tokens,
        )

    return samples


def _open(config: RunConfig) -> Opened:
    """The run's model without dropout: one device and many would draw different numbers."""
    opened = open_model(config.model, config.data.sequence, config.train.seed)
    for module in opened.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return opened


def reference_job(
    *, rank: int, num_ranks: int, rendezvous: str, config: Any, folder: str, steps: int, dtype: str, batch: int,
    cache: str,
) -> None:  # fmt: skip
    run = decode(RunConfig, config, "")
    samples = _samples(run, batch, cache, dtype)
    write_reference(Path(folder), _open(run), run.train.optimizer, samples, steps, dtype=dtype, batch=batch)


def parity_job(
    *, rank: int, num_ranks: int, rendezvous: str, config: Any, folder: str, steps: int, dtype: str, batch: int,
    cache: str, plan: Any, tolerance: float, exactness: str,
) -> dict[str, Any]:  # fmt: skip
    run, made = decode(RunConfig, config, ""), decode(Plan, plan, "plan")
    samples = _samples(run, batch, cache, dtype)
    optimizer = run.train.optimizer
    if made.mesh:
        enter(rank, num_ranks, rendezvous)
    session = open_session(made, _open(run), optimizer, dtype=dtype, device=torch.device("cpu"))
    if exactness == "exact":
        worst, departures = compare(session, Path(folder), samples, steps, optimizer, tolerance)
    else:
        worst, departures = compare_rounded(session, Path(folder), samples, optimizer, tolerance)
    traffic, sizes = observe(session, samples, optimizer)
    priced, at_most, priced_sizes = promised(session, run, made, dtype)
    lines = differences(rounded_up(traffic, priced, at_most), priced)
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


Message = tuple[str, str, int]


def promised(session: Any, run: RunConfig, plan: Plan, dtype: str) -> tuple[Traffic, set[Message], dict[str, int]]:
    """Messages that `price` promises this rank, which of them may be shorter, and resident bytes."""
    wire = session.build.wire
    work = price(
        session.build.profile,
        plan,
        sequence=run.sequence,
        stage=session.mesh.index(wire.axis) if wire is not None else 0,
        optimizer=run.train.optimizer,
        element_bytes=DTYPES[dtype].itemsize,
    )
    num_microbatches = plan.microbatches_of(session.mesh.part(plan.sample_axes)[0])
    traffic: Traffic = Counter()
    at_most: set[Message] = set()
    for task in work.collectives:
        count = int(task.repeat) * (1 if task.per_step else num_microbatches)
        if count:
            message = (task.kind, task.axis, int(task.bytes))
            traffic[message] += count
            at_most |= {message} if task.at_most else set()
    sizes: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for item in work.residents:
        if item.category in sizes:
            sizes[item.category] += int(item.repeat * item.bytes)
    return traffic, at_most, sizes


def rounded_up(seen: Traffic, priced: Traffic, at_most: set[Message]) -> Traffic:
    """What was seen, a message shorter than a promise of "at most" as that promise."""
    settled: Traffic = Counter()
    for message, count in seen.items():
        kind, axis, size = message
        bounds = [bound for bound in at_most if bound[:2] == (kind, axis) and bound[2] >= size]
        settled[message if message in priced or not bounds else min(bounds)] += count
    return settled


def differences(seen: Traffic, priced: Traffic) -> list[str]:
    lines = [
        f"{n} x {kind} of {size:,} bytes on {axis} not priced" for (kind, axis, size), n in (seen - priced).items()
    ]
    return lines + [
        f"{n} x {kind} of {size:,} bytes on {axis} priced and not sent"
        for (kind, axis, size), n in (priced - seen).items()
    ]
