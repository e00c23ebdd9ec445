"""Plan -> Work: fold `price` over the techniques, for one stage or for arrays of candidates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.core.training_state import settle
from meshwright.core.work import ADAM, Collective, Updating, Work, base_work, replace

ELEMENT_BYTES = 4
"""Parameters and gradients are kept in float32."""


def sizes_of(plan: Plan, profile: Profile, *, sequence: int, stage: int, chunk: int | None = None) -> dict[str, Any]:
    """The numbers a plan gives to `price`."""
    stages = plan.spans_of_stages(profile)
    spans = stages[stage]
    part: dict[str, Any] = {} if chunk is None or len(spans) == 1 else {"chunk": chunk}
    for technique in plan.techniques:
        part |= technique.counts_in(profile, spans, part.get("chunk"))
    spans = (spans[chunk],) if "chunk" in part and chunk is not None else spans
    return part | {
        **plan.mesh,
        "batch": plan.batch,
        "sequence": sequence // plan.sequence_parts,
        "sequence_parts": plan.sequence_parts,
        "microbatch": plan.microbatch,
        "num_microbatches": plan.num_microbatches,
        "stage": stage,
        "num_stages": len(stages),
        "first_block": spans[0][0],
        "blocks": sum(last - first for first, last in spans),
    }


def price(
    profile: Profile,
    plan: Plan,
    *,
    sequence: int,
    stage: int = 0,
    chunk: int | None = None,
    optimizer: Updating = ADAM,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """What a step asks of a rank of one stage, or of one chunk of its layers."""
    sizes = sizes_of(plan, profile, sequence=sequence, stage=stage, chunk=chunk)
    techniques = plan.in_phase_order()
    return price_sizes(profile, techniques, sizes, optimizer=optimizer, element_bytes=element_bytes)


def price_sizes(
    profile: Profile,
    techniques: tuple[Technique, ...],
    sizes: Mapping[str, Any],
    *,
    optimizer: Updating = ADAM,
    element_bytes: int = ELEMENT_BYTES,
) -> Work:
    """The same over arrays: one entry per candidate and stage in any of the sizes."""
    work = base_work(profile, sizes, element_bytes=element_bytes, optimizer=optimizer)
    for technique in techniques:
        work = technique.price(work)

    def sent(task: Any) -> Any:
        """One rank alone sends nothing."""
        return replace(task, repeat=task.repeat * (work.size(task.axis) > 1)) if isinstance(task, Collective) else task

    return settle(work).map_tasks(sent)
