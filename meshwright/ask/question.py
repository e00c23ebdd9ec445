"""What is asked of the search, as a value: so that it can be asked again with something changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.core.cluster import Cluster
from meshwright.core.device import Device
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.profile import Profile
from meshwright.core.units import pretty_bytes
from meshwright.core.work import ADAM, Updating
from meshwright.planner.search import Scored, SearchResult, search

Tell = Callable[[str], None]
"""Hears what is being searched now."""


def with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    """The same with every device changed, in all groups."""
    others = tuple(replace(group, device=change(group.device)) for group in cluster.others)
    return replace(cluster, device=change(cluster.device), others=others)


@dataclass(frozen=True, kw_only=True)
class Question:
    profile: Profile
    cluster: Cluster
    batch: int
    sequence: int
    allow: str
    optimizer: Updating = ADAM
    pin: tuple[str, ...] = ()
    ban: tuple[str, ...] = ()
    max_memory_bytes: int | None = None
    """Of a device that may be used; None: all."""

    @property
    def machine(self) -> Cluster:
        """The cluster with the memory that may be used."""
        limit = self.max_memory_bytes
        if limit is None:
            return self.cluster
        return with_devices(self.cluster, lambda d: replace(d, memory_bytes=min(limit, d.memory_bytes)))

    def memory_problem(self, num_bytes: float, where: str) -> Problem | None:
        """What is wrong with devices of so much memory."""
        taken = max(group.device.reserved_bytes for group in self.cluster.groups)
        if num_bytes > taken:
            return None
        what = f"{pretty_bytes(num_bytes)} is less than the {pretty_bytes(taken)} that driver and libraries take."
        return Problem(where=where, what=what, fix=f"This device has {pretty_bytes(self.cluster.device.memory_bytes)}.")

    def with_memory(self, num_bytes: int) -> Question:
        """Every device with so much."""
        cluster = with_devices(self.cluster, lambda device: replace(device, memory_bytes=num_bytes))
        return replace(self, cluster=cluster, max_memory_bytes=None)

    def ask(self, top: int = 1) -> SearchResult:
        return search(
            self.profile,
            self.machine,
            batch=self.batch,
            sequence=self.sequence,
            optimizer=self.optimizer,
            allow=self.allow,
            pin=self.pin,
            ban=self.ban,
            top=top,
        )


@dataclass(frozen=True, kw_only=True)
class AskedOutcome:
    """One question asked beside the first one, and what came of it."""

    words: str
    """What is different, for people."""
    question: Question
    found: SearchResult | None = None
    refusal: str = ""
    """Why it could not even be searched."""

    @property
    def best(self) -> Scored | None:
        return self.found.best if self.found is not None else None

    @property
    def reason(self) -> str:
        """Why there is no plan; empty if there is one."""
        if self.refusal or self.found is None:
            return self.refusal
        return "" if self.found.best is not None else why_none(self.found)


def outcome(words: str, question: Question) -> AskedOutcome:
    """Ask; what cannot be is a reason, not an error. An interrupted search ends everything that follows from it."""
    try:
        found = question.ask()
    except MeshwrightError as error:
        return AskedOutcome(words=words, question=question, refusal=" ".join(map(str, error.problems)))
    if found.is_interrupted:
        raise KeyboardInterrupt
    return AskedOutcome(words=words, question=question, found=found)


def why_none(found: SearchResult) -> str:
    """Why a search came back without a plan, in a few words."""
    if found.nearest_miss is not None:
        told = found.nearest_miss[1]
        over = told.peak_bytes - told.memory_bytes
        missing = f"{pretty_bytes(over)} too much" if over > 0 else "too much in pieces"
        return f"does not fit: the least is {pretty_bytes(told.peak_bytes)}, {missing}"
    if found.rejected:
        return max(found.rejected, key=lambda reason: found.rejected[reason])
    return "no plan uses all devices"
