"""After the last technique: what a rank holds of parameters, gradients and optimizer, and what updating them asks."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.core.work import Collective, Compute, Num, ParameterSlot, Resident, Task, Work

UPDATE_LAUNCHES = 1.0
"""Ops of the host for each parameter in a step: its gradient let go of, its place in the lists of norm and update (20
to 40 us each beside an H200)."""


def settle(work: Work) -> Work:
    """Residents and the optimizer's own work follow from the slots."""
    tasks: list[Task] = [*work.optimizer.collectives(work)]
    residents = []
    for axis, origin in sorted({late for slot in work.slots for late in slot.late}):
        owed = [s for s in work.slots if (axis, origin) in s.late and not (s.copy_of or s.frozen)]
        size = sum(s.repeat * s.stored(s.gradient_shards) * s.element_bytes for s in owed)
        tasks.append(
            Collective(
                layer="",
                kind="all_reduce",
                axis=axis,
                phase="step",
                repeat=(size > 0) * 1,
                bytes=size,
                origin=origin,
                per_step=True,
            )
        )
    has_older_versions, keeps_gradients = (
        bool(np.any(each)) for each in (work.facts.older_versions, work.facts.keeps_gradients)
    )
    for slot in work.slots:
        if slot.copy_of:
            continue
        stored = slot.stored(slot.shards)
        common: dict[str, Any] = {"layer": slot.layer, "repeat": slot.repeat, "life": "always"}
        residents.append(Resident(category="parameters", bytes=stored * slot.element_bytes, **common))
        if slot.frozen:
            continue
        state_bytes = work.optimizer.state_bytes_of(slot)
        for tier, share in slot.state_tiers:
            residents.append(Resident(category="optimizer", bytes=state_bytes * share, tier=tier, **common))
        if not slot.state_tiers:
            residents.append(Resident(category="optimizer", bytes=state_bytes, **common))
        residents += _gradients(work, slot, keeps_gradients)
        older_bytes: Num = 0
        if has_older_versions:
            older_bytes = work.facts.older_versions * stored * slot.element_bytes
            residents.append(Resident(category="buffers", bytes=older_bytes, **common))
        tasks.append(
            Compute(
                layer=slot.layer,
                name=slot.name,
                kind="memory",
                role="optimizer",
                phase="step",
                repeat=slot.repeat,
                # read gradient for the norm; read gradient, read and write parameter and state for the update; an older
                # version is read and written
                moved_bytes=stored * 4 * slot.element_bytes + 2 * state_bytes + 2 * older_bytes,
                kernels=0.0,  # one for very many parameters
            )
        )
    trained = sum(slot.repeat for slot in work.slots if not (slot.frozen or slot.copy_of))
    launches: dict[str, Any] = {
        "name": "update",
        "kind": "memory",
        "role": "optimizer",
        "kernels": UPDATE_LAUNCHES * trained,
    }
    tasks.append(Compute(**launches, layer="", phase="step", repeat=1))
    return work.with_tasks(*tasks).with_residents(*residents, *_made_gradients(work))


def _gradients(work: Work, slot: ParameterSlot, is_kept: bool) -> list[Resident]:
    """Kept from step to step where somebody keeps them in one place to be summed, else made anew in each."""
    common: dict[str, Any] = {"category": "gradients", "layer": slot.layer, "repeat": slot.repeat}
    # A tied weight's is first made where it is used last.
    last = [each.layer for each in work.slots if each.copy_of == f"{slot.layer}.{slot.name}"]
    common["layer"] = [slot.layer, *last][-1]
    size = slot.stored(slot.gradient_shards) * slot.element_bytes
    if not is_kept:
        return [Resident(**common, bytes=size, life="step")]
    kept = work.facts.keeps_gradients * (slot.gradient_shards == 1)
    return [
        Resident(**common, bytes=size * (1 - kept), life="step"),
        Resident(**common, bytes=size * kept, life="always"),
    ]


def _made_gradients(work: Work) -> list[Resident]:
    """A weight's gradient as it is computed, on its way into the one that is kept: one weight at a time."""
    width = work.facts.widths.compute if work.facts.computes_narrow else 0
    tied = {slot.copy_of for slot in work.slots if slot.copy_of}
    largest: dict[str, tuple[Num, Num]] = {}
    for slot in work.slots:
        if slot.frozen:
            continue
        is_added = (work.size("num_microbatches") > 1) | (f"{slot.layer}.{slot.name}" in tied)
        size = slot.elements * (width + slot.element_bytes * is_added) * (slot.gradient_shards == 1)
        largest[slot.layer] = slot.repeat, np.maximum(largest.get(slot.layer, (0, 0))[1], size)
    return [
        Resident(layer=layer, category="working", repeat=repeat, bytes=size, life="backward")
        for layer, (repeat, size) in largest.items()
    ]
