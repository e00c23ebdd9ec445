"""Workers that push gradients to servers and pull weights from them.

What: ranks along `server` are workers of one device each, on samples of their own. Beside each of the first `shards`
workers runs a process that has one of as many equal parts of the parameters in its host's memory, sums the gradients
that are pushed to it, and runs the optimizer. mode = sync: an update is made of the gradients of all workers, as an
all_reduce would sum them. ssp: the same, but a worker goes on while it is at most `staleness` steps ahead of the
slowest one, with the newest weights (stale synchronous parallel, with weights sent eagerly). async: each gradient is an
update by itself as it comes, and nobody waits. With `backups` of sync and ssp, an update needs so many gradients less;
those that come later are dropped, and a worker that is late leaves out the steps whose update was made without it.
Gradients that are old may be compensated by `compensation` x gradient^2 x (weights now - weights then), the learning
rate of async divided by a gradient's age (`scaled_rate`).
When it helps: workers that are slow now and then (ssp, async) or always (backups, async): with one of four always 5
times slower, backups = 1 makes updates of 85 % of the samples per second that an all_reduce has without it, and an
all_reduce 23 % (`benchmarks/stragglers.py`). Optimizer states leave the devices.
When it does not: equal workers with a good network, where an all_reduce sends as much and needs no servers; with fewer
shards than workers a server's own link, which carries every worker's messages, is the limit. A worker that is always
slow bounds ssp too, as soon as the others are `staleness` steps ahead of it.
Cost: two messages of the parameters in each step and worker, each in `shards` parts, and copies to and from host
memory; what a server's link or cores make others wait for is not priced, nor are a few numbers. The host of a shard
holds its weights, optimizer states and gradients of all workers that wait to be used. A run's metrics have the counts
of clock gaps (steps that a worker began ahead of the slowest one) and of staleness (updates between the weights of a
gradient and its use), and the gradients that were dropped. Steps of ssp and async report the first worker's own loss;
an update of ssp and sync is clipped by the norm of its whole gradient, one of async by that of its one. Checkpoints are
those of one device: they go on with any number of workers or none. A server that dies is named, and the run goes on
from its last checkpoint; so it is with a worker that others cannot do without. Servers listen on the loopback, so all
workers are on one host. Other axes, optimizers that look at whole parameters, batch norms, and what updates parameters
or keeps states otherwise are refused. Search does not choose it by itself: nobody has measured how many more steps the
same loss needs.
Exactness: approximate. sync without backups is one device's numbers up to the order of sums, and ssp with staleness = 0
is sync. Axis: server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Exactness, Technique
from meshwright.core.work import Circumstances, Collective, Copy, Num, ParameterSlot, Resident, Updating, Work


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Technique):
    name: ClassVar[str] = "parameter_server"
    phase: ClassVar[str] = "optimizer"
    exactness: ClassVar[Exactness] = "approximate"
    axis: ClassVar[str] = "server"
    closeness: ClassVar[int] = -1
    splits_samples: ClassVar[bool] = True
    sums_late: ClassVar[bool] = True
    keeps_islands: ClassVar[bool] = True

    size: int
    """Workers."""
    shards: int = 1
    """Servers, each with an equal part of the parameters."""
    mode: Literal["sync", "ssp", "async"] = "sync"
    """Whom an update waits for."""
    staleness: int = 0
    """Steps that a worker of ssp may be ahead of the slowest one."""
    backups: int = 0
    """Workers whose gradients an update of sync and ssp does not wait for."""
    compensation: float = 0.0
    """Strength of the correction of old gradients of ssp and async; 0: none."""
    scaled_rate: bool = False
    """Divide the learning rate of an update of async by its gradient's age."""

    @property
    def bound(self) -> int | None:
        """Steps that a worker may be ahead; None: any number."""
        return {"sync": 0, "ssp": self.staleness, "async": None}[self.mode]

    @property
    def paces_apart(self) -> bool:
        return self.size > 1 and self.bound != 0

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        is_used = given.size > 1
        what = "servers have one version of the weights."
        yield is_used & given.overlaps_steps, self.problem(what, "Use another schedule.")
        what = "a step in which a gradient of fp16 overflows must be skipped by all workers."
        fix = "Use another dtype than fp16, or leave the technique out."
        yield is_used & given.scales_loss, self.problem(what, fix)

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile), *self.setting_problems()]
        if any(site.kind == "statistics" for layer in profile.layers for site in layer.sites):
            what = f"batch norms of {profile.name} would keep statistics of each worker apart."
            problems.append(self.problem(what, "Use replicate, or a model without batch norms."))
        for other in plan.techniques:
            if other is self or self.size == 1:
                continue
            if plan.mesh.get(other.axis, 1) > 1:
                what = f"a worker is one device, and {other.name} has an axis of its own."
            elif other.hosts_states or other.codes_states or other.copies_weights:
                what = f"{other.name} keeps weights or states in a way of its own, and servers have them."
            elif other.updates_in_backward or other.updates_each_alone or other.takes_gradients or other.rests_layers:
                what = f"{other.name} updates parameters apart, and servers update all at once."
            elif other.codes_sums:
                what = f"{other.name} codes sums, and workers send whole gradients."
            else:
                continue
            problems.append(self.problem(what, f"Leave out {other.name}, or this technique."))
        return tuple(problems)

    def setting_problems(self) -> Iterator[Problem]:
        if not 1 <= self.shards <= self.size:
            what = f"shards is {self.shards}, of servers beside {self.size} workers."
            yield self.problem(what, "Use 1 to size.")
        if self.staleness < 0 or (self.staleness and self.mode != "ssp"):
            what = f"staleness is {self.staleness}, with mode = {self.mode}."
            yield self.problem(what, "Use 0 or more with mode = ssp, and 0 with another.")
        if not 0 <= self.backups < self.size or (self.backups and self.mode == "async"):
            what = f"backups is {self.backups}, of {self.size} workers with mode = {self.mode}."
            yield self.problem(what, "Use 0 to size - 1 with sync or ssp; with async, 0: nobody waits there.")
        if not 0 <= self.compensation <= 1e6 or (self.compensation and self.mode == "sync"):
            what = f"compensation is {self.compensation:g}, with mode = {self.mode}."
            yield self.problem(what, "Use 0 or more with ssp or async; gradients of sync are not old.")
        if self.scaled_rate and self.mode != "async":
            what = f"scaled_rate is true, with mode = {self.mode}."
            yield self.problem(what, "Use it with async, whose updates have one gradient each.")

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.is_elementwise:
            return ()
        what = "this optimizer looks at whole parameters, and a server has a part of them."
        return (Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out."),)

    def price(self, work: Work) -> Work:
        ways, work = work.size(self.axis), self.forbid(work)
        work = work.forbid((ways > 1) & (work.size("num_ranks") != ways))
        is_used, optimizer = (ways > 1) * 1, work.optimizer
        trained = [slot for slot in work.slots if not (slot.frozen or slot.copy_of)]
        if not trained:
            return work
        elements: Num = sum(slot.repeat * slot.elements for slot in trained)
        states: Num = sum(slot.repeat * optimizer.state_bytes_of(slot) for slot in trained)
        width = trained[0].element_bytes
        part = -(-elements // self.shards) * width
        common: dict[str, Any] = {"layer": work.profile.layers[0].name, "origin": self.name}
        message = common | {"kind": "send", "axis": self.axis, "phase": "backward", "per_step": True}
        tasks: list[Any] = [Collective(**message, repeat=2 * self.shards * is_used, bytes=part)]
        for source, target in (("device", "host"), ("host", "device")):
            moved = common | {"source": source, "target": target, "bytes": elements * width, "phase": "step"}
            tasks.append(Copy(**moved, per_step=True, repeat=is_used))
        # Of a server: weights, the sum under way, gradients that wait, and the weights that each worker has.
        held = part * (2 + ways * (1 + (self.bound or 0) + (self.compensation > 0))) + states // self.shards
        kept = common | {"category": "buffers", "tier": "host", "repeat": is_used}
        residents = [Resident(**kept, life="always", bytes=2 * part * self.shards + held)]

        def left(slot: ParameterSlot) -> ParameterSlot:
            return slot if slot.frozen else replace(slot, state_tiers=(("device", 1 - is_used),))

        work = replace(work, slots=tuple(map(left, work.slots)))
        return work.with_tasks(*tasks).with_residents(*residents)

    def apply(self, build: Build) -> None:
        def install(build: Build) -> None:
            from meshwright.optimizers.pulled_weights import PulledWeights, ServerExchange

            exchange = ServerExchange(build, self)
            build.add_exchange(self, exchange)
            build.rule_wraps.append(lambda make: partial(PulledWeights, exchange))

        if self.size > 1:
            build.at("step", install)
