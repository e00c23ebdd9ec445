"""Where a plan's ranks lie on a mixed cluster: group after group, so that the outermost axis lies across groups.

8xh100+8xa100, pp 4 x tp 4      stages 0 1 on the first group, 2 3 on the second
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem

if TYPE_CHECKING:
    from meshwright.core.plan import Plan


def placed(plan: Plan, cluster: Cluster) -> Cluster:
    """The groups that the plan's ranks take, in their order; those that nothing tells apart as one."""
    if not cluster.others:
        return cluster
    arranged = cluster.arranged(plan.groups or tuple(range(len(cluster.groups)))).merged()
    ends = _ends(arranged)
    used = next((i for i, end in enumerate(ends) if plan.num_ranks <= end), len(ends) - 1)
    return arranged if used == len(ends) - 1 else arranged.arranged(tuple(range(used + 1)))


def outermost(plan: Plan) -> str:
    """The axis that lies across groups; empty where there is one rank."""
    return next((axis for axis, size in plan.mesh.items() if size > 1), "")


def group_of_units(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The group of each place along the outermost axis, for a plan that `group_problems` has nothing against."""
    ends, count = _ends(cluster), plan.mesh.get(outermost(plan), 1)
    ranks_each = plan.num_ranks // count
    return tuple(next(i for i, end in enumerate(ends) if unit * ranks_each < end) for unit in range(count))


def group_problems(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    """What keeps the plan's ranks from lying on these groups."""
    count = len(cluster.groups)
    wrong = [index for index in plan.groups if not 0 <= index < count]
    if wrong or len(set(plan.groups)) < len(plan.groups):
        what = f"{', '.join(map(str, plan.groups))}: {cluster.name} has groups 0 to {count - 1}, each to be named once."
        yield Problem(where="groups", what=what, fix="Leave it out for all of them.")
        return
    here = placed(plan, cluster)
    if not here.others or plan.num_ranks > here.num_devices:  # too many ranks are told of elsewhere
        return
    axis = outermost(plan)
    owner = next(t for t in plan.techniques if t.axis == axis)
    if not owner.takes_shares and owner.blocks_of_stages(1 << 20) is None:
        what = f"{axis} ({owner.name}) is the outermost axis, so it would lie across {here.name}."
        yield Problem(where="axis_order", what=what, fix="Put stages or replicas outermost, or use one group.")
        return
    names, ends, size = here.group_names, _ends(here), plan.mesh[axis]
    ranks_each = plan.num_ranks // size
    for end, before, after in zip(ends, names, names[1:], strict=False):
        if end % ranks_each:
            unit = end // ranks_each
            what = (
                f"{axis} {unit} has ranks {unit * ranks_each} to {(unit + 1) * ranks_each - 1}, of which {before} has "
                f"those up to {end - 1} and {after} the rest."
            )
            fix = f"Let the ranks of one {axis} divide the devices of each group."
            yield Problem(where=owner.name, what=what, fix=fix)


def _ends(cluster: Cluster) -> list[int]:
    """The number of devices up to the end of each group."""
    return list(accumulate(group.num_devices for group in cluster.groups))
