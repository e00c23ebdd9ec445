"""The search: the fastest plan that fits, on devices of one kind or on groups that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.profile import Profile
from meshwright.core.technique import technique_named
from meshwright.core.work import ADAM, Updating
from meshwright.planner.best_first import search_group
from meshwright.planner.groups import search_across
from meshwright.planner.scoreboard import Alternative, ScoredPlan, SearchResult
from meshwright.planner.wishes import read_wishes

__all__ = ["EPSILON", "Alternative", "ScoredPlan", "SearchResult", "search"]

EPSILON = 0.01
"""Share of a step below which a faster plan is not looked for any longer, after the first looks."""


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch: int,
    sequence: int,
    optimizer: Updating = ADAM,
    allow: str = "rounded",
    pin: Sequence[str] = (),
    ban: Sequence[str] = (),
    top: int = 10,
    microbatch: int | None = None,
    max_memory_bytes: int | None = None,
    epsilon: float = EPSILON,
) -> SearchResult:
    """Plans for `batch` samples of `sequence` tokens a step on the devices of `cluster`, best first."""
    pinned = read_wishes(pin, ban, allow=allow, microbatch=microbatch).pinned
    problems = [problem for name in pinned for problem in technique_named(name).check_optimizer(optimizer)]
    if problems:
        raise MeshwrightError([replace(problem, where=f"pin {problem.where}") for problem in problems])
    settings: dict[str, Any] = {
        "batch": batch,
        "sequence": sequence,
        "optimizer": optimizer,
        "allow": allow,
        "pin": pin,
        "ban": ban,
        "top": top,
        "microbatch": microbatch,
        "max_memory_bytes": max_memory_bytes,
        "epsilon": epsilon,
    }
    merged = cluster.merged()
    return search_across(profile, cluster, **settings) if merged.others else search_group(profile, merged, **settings)
