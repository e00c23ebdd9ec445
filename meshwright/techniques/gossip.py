"""Peers that average their parameters with neighbours only.

What: ranks along `gossip` are peers. Each trains parameters of its own on its own samples, in any mesh (the same in
all), and clips by its own gradients' norm. After every `every`-th update it sends its parameters to one or two
neighbours, layer by layer, and goes on from an average of its own and theirs; nobody sums over all peers. `graph` says
whose: ring (both neighbours, 1/3 each: D-PSGD), exponential (peer i sends to i + 1, i + 2, i + 4, ... in turn, 1/2
each; as many peers as a power of two), pairs (a random perfect matching in each meeting, 1/2 each; of an odd number one
peer is idle), push (each sends to one random peer, with sum-weights as in GoSGD), or tree (binary: children send to
their parents in each `up`-th meeting, parents to their children in each `down`-th, a quarter of what they have and its
sum-weight). All graphs are connected, if not in one meeting. Random choices are drawn from `seed` and the number of the
meeting, alike on all ranks. With `drift` the period adapts: it grows by an update where those who meet are less than
0.7 of `drift` apart (as a share of their norm), and shrinks by one above 1.3 of it, from `every` to `longest`; all
ranks agree on the distance in each meeting. `meeting_period` and `meeting_drift` are then recorded in the metrics.
When it helps: many peers, where an all_reduce is slowed by its slowest link or by the latency of its many steps; a
meeting costs the same for any number of peers.
When it does not: few peers with a good network: a ring sends as many bytes as an all_reduce, the other graphs half of
it. With many peers on a ring, parameters drift apart: a meeting takes only a share of about 1/n^2 from the distance.
Cost: two messages of the parameters for each rank and meeting for ring, one for the other graphs (of a tree on the
average over the peers, less one n-th, for each way; a few numbers that all ranks agree on still cross the link in each
step, whose seconds forecasts have); memory for the average. Of a tree, the forecast has the mean over the peers: where
parents of two send or receive both messages, a meeting takes up to twice as long. A period that adapts is priced as
`every`, its shortest. What evaluates, writes checkpoints and exports sees the average over the peers (of push and tree,
weighted by sum-weights), which an unpriced all_reduce makes there and after the run's last step; `consensus_distance`,
the root mean square of the peers' distances from it, is then recorded in the metrics. The loss of a step is the mean
over the peers, each with its own parameters. Checkpoints also have each peer's parameters and states: with more peers,
new ones begin at the average with the first one's states. Batch norms, parameters on the host, coded sums and further
islands are refused. Search does not choose it by itself: nobody has measured how many more steps the same loss needs.
Loss after 500 steps of 512 tokens from random weights, four peers that meet after every update, against replicas: ring
+3.7 %, exponential +3.5 %, pairs +3.5 %, push +3.9 %; 0.9 M parameters and 2048 tokens: ring +4.7 %. Averages of all
four after every update +3.3 %: most of it comes of optimizers that see a quarter of the samples each, little of the
graph. Another seed -1.6 % (`benchmarks/exchange_gap.py --ranks 4`). With the best of three learning rates for each
(0.004 of 0.002, 0.004 and 0.008, for both) ring +3.3 %.
Exactness: approximate. Two peers with every = 1 and SGD without momentum or clipping are one device. Axis: gossip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Exactness, Technique
from meshwright.core.work import Circumstances, Collective, Compute, Num, ParameterSlot, Resident, Updating, Work

MOST_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Gossip(Technique):
    name: ClassVar[str] = "gossip"
    phase: ClassVar[str] = "optimizer"
    exactness: ClassVar[Exactness] = "approximate"
    axis: ClassVar[str] = "gossip"
    closeness: ClassVar[int] = -1
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True
    keeps_islands: ClassVar[bool] = True
    later_settings: ClassVar[tuple[str, ...]] = ("up", "down", "drift", "longest")

    size: int
    """Peers."""
    graph: Literal["ring", "exponential", "pairs", "push", "tree"] = "ring"
    """Who averages with whom in a meeting."""
    every: int = 1
    """Updates from one meeting to the next."""
    seed: int = 0
    """Of random neighbours."""
    up: int = 1
    """Of a tree: meetings from one in which children send to their parents to the next."""
    down: int = 1
    """Of a tree: meetings from one in which parents send to their children to the next."""
    drift: float = 0.0
    """Distance between those who meet, as a share of their norm, that the period adapts to; 0: it is `every`."""
    longest: int = 64
    """Updates from one meeting to the next, at most, where the period adapts."""

    @property
    def has_weights(self) -> bool:
        """What a peer takes does not sum to what it gives: sum-weights make up for it."""
        return self.graph in ("push", "tree")

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "parameters of two versions cannot be averaged with those of other peers."
        yield (given.size > 1) & given.overlaps_steps, self.problem(what, "Use another schedule.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile)]
        if not 1 <= self.every <= MOST_STEPS:
            problems.append(self.problem(f"every is {self.every}.", f"Use 1 to {MOST_STEPS} updates."))
        if min(self.up, self.down) < 1 or max(self.up, self.down) > MOST_STEPS:
            problems.append(self.problem(f"up is {self.up}, down {self.down}.", f"Use 1 to {MOST_STEPS} meetings."))
        elif self.graph != "tree" and (self.up, self.down) != (1, 1):
            what = f"up and down are periods of a tree, and the graph is {self.graph}."
            problems.append(self.problem(what, 'Leave them out, or use graph = "tree".'))
        if not 0 <= self.drift < math.inf:
            problems.append(self.problem(f"drift is {self.drift}.", "Use a share above 0, such as 0.01, or 0."))
        elif self.drift and not self.every <= self.longest <= MOST_STEPS:
            what = f"longest is {self.longest}, and every {self.every}: the period adapts between the two."
            problems.append(self.problem(what, f"Use {self.every} to {MOST_STEPS} updates."))
        if self.graph == "exponential" and self.size & (self.size - 1):
            what = f"an exponential graph of {self.size} peers: its steps of 1, 2, 4, ... do not go round evenly."
            problems.append(self.problem(what, "Use as many peers as a power of two, or another graph."))
        if any(site.kind == "statistics" for layer in profile.layers for site in layer.sites):
            what = f"batch norms of {profile.name} would keep statistics of each peer apart."
            problems.append(self.problem(what, "Use replicate, or a model without batch norms."))
        for other in plan.techniques:
            if other.hosts_states:
                what = f"{other.name} has parameters in host memory, where peers cannot exchange them."
            elif other.codes_sums:
                what = f"{other.name} codes sums, and peers exchange whole parameters."
            elif other.keeps_islands and other.name != self.name:
                what = f"{other.name} has islands, too, and a model has one average that is evaluated."
            else:
                continue
            problems.append(self.problem(what, f"Leave out {other.name}, or this technique."))
        return tuple(problems)

    def warnings_for(self, steps: int) -> tuple[str, ...]:
        if self.size == 1 or self.every <= steps:
            return ()
        return (f"{self.name}: every is {self.every}, and the run has {steps} steps: peers never meet.",)

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.is_elementwise:
            return ()
        what = "this optimizer looks at whole parameters of all ranks at once, and peers have their own."
        return (Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out."),)

    def price(self, work: Work) -> Work:
        ways, work = work.size(self.axis), self.forbid(work)
        work = work.with_facts(agreement=(self.axis, self.name))
        is_used = (ways > 1) * 1
        messages = np.minimum(ways - 1, 2 if self.graph == "ring" else 1)
        if self.graph == "pairs":
            messages = messages * (ways - ways % 2) / ways  # on the average over an odd number of peers
        if self.graph == "tree":
            messages = (ways - 1) / ways * (1 / self.up + 1 / self.down)  # on the average over peers and meetings

        def size_of(slot: ParameterSlot) -> Num:
            return slot.stored(slot.shards) * slot.element_bytes

        # Parameters are joined, scaled and written back; what comes in is written, read and added to them, and compared
        # with them where the period adapts.
        passes = 6 + (8 if self.drift else 4) * messages
        tasks: list[Any] = []
        residents = []
        for layer, repeat, size in work.units(size_of, trained=True):
            common: dict[str, Any] = {"layer": layer, "origin": self.name}
            message = common | {"kind": "send", "axis": self.axis, "phase": "backward", "per_step": True}
            tasks.append(Collective(**message, repeat=repeat * messages / self.every, bytes=size))
            made = common | {"kind": "memory", "role": "optimizer", "phase": "step", "name": self.name}
            made |= {"repeat": repeat * is_used / self.every, "moved_bytes": passes * size, "kernels": passes}
            tasks.append(Compute(**made))
            held = common | {"category": "buffers", "life": "always", "repeat": repeat}
            residents.append(Resident(**held, bytes=size * is_used))
        return work.with_tasks(*tasks).with_residents(*residents)

    def apply(self, build: Build) -> None:
        def install(build: Build) -> None:
            from meshwright.ops.gossip import NeighbourAverages

            build.add_exchange(self, NeighbourAverages(build, self))

        if self.size > 1:
            build.loss_scale *= self.size  # a peer's gradient is that of its own mean loss
            build.at("step", install)
