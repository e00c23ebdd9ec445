"""The fastest plan that fits: bound everything, then look closer in the order of the bounds until nothing can win.

candidates --bounds.py, arrays--> no faster than, no smaller than
    next lowest --orders.py--> the same for each order of its axes
    next lowest --solve.py---> stages, policies, simulated seconds --forecast, allocator--> the best so far
stop when the next bound is not below the best by more than epsilon: what is left over is the gap
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.profile import Profile
from meshwright.core.work import ADAM, Updating
from meshwright.planner.best_first import Pool
from meshwright.planner.result import Alternative, ScoredPlan, SearchResult
from meshwright.planner.rows import SearchInputs
from meshwright.planner.wishes import pin_problems, read_wishes

__all__ = ["EPSILON", "Alternative", "ScoredPlan", "SearchResult", "search"]

EPSILON = 0.01
"""Share of a step below which a faster plan is not looked for any longer, after the first looks."""

MOST_COUNTED = 2**53
"""Samples or tokens; above, the floats that prices are cannot count them one by one."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    sequence: int,
    optimizer: Updating = ADAM,
    allow: str = "lossy",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    top: int = 10,
    microbatch: int | None = None,
    max_memory_bytes: int | None = None,
    epsilon: float = EPSILON,
) -> SearchResult:
    """Plans for `batch` samples of `sequence` tokens a step on all devices of `cluster`, best first."""
    if cluster.others:
        from meshwright.planner.across_groups import search_mixed

        return search_mixed(
            profile,
            cluster,
            batch=batch,
            sequence=sequence,
            optimizer=optimizer,
            allow=allow,
            pin=pin,
            ban=ban,
            top=top,
            microbatch=microbatch,
            max_memory_bytes=max_memory_bytes,
            epsilon=epsilon,
        )
    started = time.perf_counter()
    wishes = read_wishes(pin, ban, allow=allow, microbatch=microbatch)
    problems = [*_number_problems(batch=batch, sequence=sequence, top=top, microbatch=wishes.microbatch)]
    if problems := problems or pin_problems(wishes, profile, cluster, sequence):
        raise MeshwrightError(problems)
    if max_memory_bytes is not None and max_memory_bytes < cluster.device.memory_bytes:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=max_memory_bytes))
    question = SearchInputs(profile=profile, cluster=cluster, optimizer=optimizer)
    for rescues in (False, True):
        pool = Pool(question, wishes, batch=batch, sequence=sequence, epsilon=epsilon, rescues=rescues)
        pool.run(top)
        if pool.best is not None or pool.is_interrupted or not pool.may_be_rescued:
            break
    return replace(pool.found(top), search_seconds=time.perf_counter() - started)


def _number_problems(**numbers: int | None) -> Iterator[Problem]:
    for name, value in numbers.items():
        if value is not None and not 1 <= value <= MOST_COUNTED:
            fix = "Use at least 1." if value < 1 else f"Use at most {MOST_COUNTED}."
            yield Problem(where=name, what=f"is {value}.", fix=fix)
