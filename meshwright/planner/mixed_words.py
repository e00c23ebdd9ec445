"""How a plan uses the groups of a mixed cluster, in words."""

from __future__ import annotations

import itertools

from meshwright.core.cluster import Cluster
from meshwright.planner.search import SearchResult


def explain_mixed(found: SearchResult, cluster: Cluster) -> list[str]:
    """Where the plan lies, and what the other ways to use the groups would take."""
    if found.best is None or not cluster.merged().others:
        return []
    plan, told = found.best
    names = cluster.group_names
    used = plan.groups or tuple(range(len(names)))
    idle = [name for at, name in enumerate(names) if at not in used]
    lines = [f"Its ranks take {', then '.join(names[at] for at in used)}."]
    if idle:
        others = [each for other, each in found.ranked if set(other.groups or range(len(names))) > set(used)]
        worse = f"; with them a step takes {others[0].step_seconds / told.step_seconds:.2f} x as long" if others else ""
        lines.append(f"It leaves {' and '.join(idle)} idle{worse}.")
    if len(set(plan.shares)) > 1:
        words = ", ".join(f"{len(list(run))} x {share}" for share, run in itertools.groupby(plan.shares))
        lines.append(f"Replicas run {words} microbatches of {plan.microbatch}, so that all end at about the same time.")
    lines.append("The gap is against devices that need no memory and send nothing, so it is wide.")
    return lines
