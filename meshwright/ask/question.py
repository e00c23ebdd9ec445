"""A question to the search, as a value: so that it can be asked again with something changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.cluster import Cluster, Device
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.profile import Profile
from meshwright.core.units import pretty_bytes
from meshwright.core.work import ADAM, EachElement
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import Bounds, ScoredPlan, SearchResult, search

Tell = Callable[[str], None]
"""Is called with what is being searched now, for a person who waits."""


HEADROOM = 6.0
"""Percent of a device's memory that a forecast leaves free by default: four in five of the runs of docs/performance.md
reserved less than so much beyond their forecast."""
MOST_HEADROOM = 90.0


def with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    """The same with every device changed, in all groups."""
    others = tuple(replace(group, device=change(group.device)) for group in cluster.others)
    return replace(cluster, device=change(cluster.device), others=others)


def _limited(device: Device, most_bytes: float) -> Device:
    return replace(device, memory_bytes=int(min(most_bytes, device.memory_bytes)))


def with_headroom(cluster: Cluster, percent: float) -> Cluster:
    """The memory of its devices that a forecast may take where so many percent stay free."""
    return with_devices(cluster, lambda device: _limited(device, device.memory_bytes * (1 - percent / 100)))


@dataclass(frozen=True, kw_only=True)
class Question:
    profile: Profile
    cluster: Cluster
    batch: int
    sequence: int
    allow: str
    optimizer: OptimizerConfig | EachElement = ADAM
    pin: tuple[str, ...] = ()
    ban: tuple[str, ...] = ()
    max_memory_bytes: int | None = None
    """Memory of a device that a forecast may take; None: all of it but the headroom."""
    headroom: float = HEADROOM
    """Percent of a device's memory that a forecast leaves free."""
    seconds: float | None = None
    """After which a search ends with the plans it has found; None: when nothing faster can be left."""

    @property
    def machine(self) -> Cluster:
        """The cluster with the memory that may be used."""
        limit = math.inf if self.max_memory_bytes is None else self.max_memory_bytes
        if limit == math.inf and not self.headroom:
            return self.cluster
        return with_devices(with_headroom(self.cluster, self.headroom), lambda d: _limited(d, limit))

    def memory_of(self, usable_bytes: int) -> int:
        """The whole memory of the devices whose usable memory is `usable_bytes`."""
        both = zip(self.machine.groups, self.cluster.groups, strict=True)
        return min(whole.device.memory_bytes for used, whole in both if used.device.memory_bytes == usable_bytes)

    def memory_problem(self, num_bytes: float, where: str) -> Problem | None:
        """What is wrong with devices of so much memory."""
        taken = max(group.device.reserved_bytes for group in self.cluster.groups)
        if num_bytes > taken:
            return None
        what = f"{pretty_bytes(num_bytes)} is less than the {pretty_bytes(taken)} that driver and libraries take."
        return Problem(where=where, what=what, fix=f"This device has {pretty_bytes(self.cluster.device.memory_bytes)}.")

    def with_memory(self, num_bytes: int) -> Question:
        """Every device with so much that a forecast may take."""
        cluster = with_devices(self.cluster, lambda device: replace(device, memory_bytes=num_bytes))
        return replace(self, cluster=cluster, max_memory_bytes=None, headroom=0.0)

    def ask(
        self,
        top: int = 1,
        *,
        compares: bool = False,
        tie: float = 0.0,
        bounds: Bounds | None = None,
        tell: Tell | None = None,
    ) -> SearchResult:
        """`compares`: also what each technique is worth; `tie`: of plans that differ by less, the simpler first."""
        names = ("batch", "sequence", "optimizer", "allow", "pin", "ban", "seconds")
        settings: dict[str, Any] = {name: getattr(self, name) for name in names}
        settings |= {"top": top, "compares": compares, "tie": tie, "bounds": bounds, "tell": tell}
        return search(self.profile, self.machine, **settings)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a question that differs from the first one in something."""

    words: str
    """What is different, for people."""
    question: Question
    result: SearchResult | None = None
    refusal: str = ""
    """Why it could not even be searched."""

    @property
    def best(self) -> ScoredPlan | None:
        return self.result.best if self.result is not None else None

    @property
    def reason(self) -> str:
        """Why there is no plan; empty if there is one."""
        if self.refusal or self.result is None or self.result.best is not None:
            return self.refusal
        miss = self.result.nearest_miss
        if miss is not None:
            peak_bytes = miss.forecast.peak_bytes
            return f"does not fit: the least is {pretty_bytes(peak_bytes)}, {miss.forecast.missing_words}"
        rejected = self.result.rejected
        return max(rejected, key=lambda reason: rejected[reason], default="no plan uses all devices")


def outcome(words: str, question: Question, bounds: Bounds | None = None) -> Outcome:
    """Ask; what cannot be is a reason, not an error. An interrupted search ends everything that follows from it."""
    try:
        result = question.ask(bounds=bounds)
    except MeshwrightError as error:
        return Outcome(words=words, question=question, refusal=" ".join(map(str, error.problems)))
    if result.is_interrupted:
        raise KeyboardInterrupt
    return Outcome(words=words, question=question, result=result)
