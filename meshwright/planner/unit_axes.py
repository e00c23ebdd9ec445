"""Axes that need no grid of their own: a size of one prices as if the technique were absent.

That is a law of the house, yet a technique may keep buffers even alone; so each is tried once on one device, and only
those that change nothing are folded. It halves the grids for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshwright.core.cluster import Cluster
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.planner.settings import Dial
from meshwright.simulator.axis_links import routes
from meshwright.simulator.peak_memory import stage_memory
from meshwright.simulator.pricing import price_sizes
from meshwright.simulator.stage_seconds import stage_cost


def folded(profile: Profile, cluster: Cluster, dials: Iterable[Dial], sequence: int) -> tuple[Dial, ...]:
    """The same dials; those that may be folded have 1 among their sizes."""
    alone = _measure(profile, cluster, (), sequence)

    def fold(dial: Dial) -> Dial:
        if not dial.axis_field or dial.required:
            return dial
        ones = [dial.example(settings, 1) for settings in dial.settings]
        if any(one.blocks_of_stages(profile.num_blocks) is not None for one in ones):
            return dial  # stages change what a row of the grid is
        if any(_measure(profile, cluster, (one,), sequence) != alone for one in ones):
            return dial
        return replace(dial, sizes=(1, *dial.sizes))

    return tuple(fold(dial) for dial in dials)


def _measure(profile: Profile, cluster: Cluster, techniques: tuple[Technique, ...], sequence: int) -> tuple[float, ...]:
    mesh = {technique.axis: 1 for technique in techniques}
    sizes = {"batch": 1, "sequence": sequence, "microbatch": 1, "num_microbatches": 1, "stage": 0}
    sizes |= {"num_stages": 1, "first_block": 0, "blocks": profile.num_blocks, **mesh}
    work = price_sizes(profile, techniques, sizes)
    cost = stage_cost(work, cluster, routes(cluster, mesh))
    seconds = [float(cost.seconds(part)) for part in ("forward", "backward", "step")]
    return (*seconds, float(stage_memory(work, cluster.device).peak_bytes()))
