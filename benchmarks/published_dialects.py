"""How the frameworks that others measured do what a plan asks for, where it differs from us. One record each, nothing
per row: what a row itself tells (its attention kernel) is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.published_rows import Row
from meshwright.core.cluster import Cluster
from meshwright.core.work import Collective, Work


@dataclass(frozen=True, kw_only=True)
class Dialect:
    name: str
    launch_seconds: float = 0.0
    """The host's time for one op; 0: as the cluster's."""
    hides_gradients: bool = True
    """Sums of gradients run beside backward."""
    hides_gathers: bool = True
    """Gathers of parameters run beside compute."""

    def cluster(self, cluster: Cluster) -> Cluster:
        if not self.launch_seconds:
            return cluster
        return replace(cluster, device=replace(cluster.device, launch_seconds=self.launch_seconds))

    def change(self, work: Work) -> Work:
        """What one step asks of a rank, as this framework would have it."""

        def task(item: Any) -> Any:
            if not isinstance(item, Collective) or not item.hidden:
                return item
            stays = self.hides_gathers if item.kind == "all_gather" else self.hides_gradients
            return item if stays else replace(item, hidden=False)

        return work.map_tasks(task)


OURS = Dialect(name="ours")
_BY_SOURCE: dict[str, Dialect] = {}


def dialect_of(row: Row) -> Dialect:
    return _BY_SOURCE.get(row.text("file"), OURS)
