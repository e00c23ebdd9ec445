"""Optimizer states that live in host memory, as a plugin: each parameter's come in for its update and go back.

`MESHWRIGHT_PLUGINS=toy_host_states` makes it a technique like any other: no line of the package knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build, OptimizerState
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, Exactness, Option, Technique
from meshwright.core.work import Copy, Num, ParameterSlot, Resident, Task, Work, replace
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import ParameterPiece, RuleMaker, UpdateRule


class StreamedRule(UpdateRule):
    """One rule for each parameter, whose states have no memory on the device but while it is updated."""

    def __init__(
        self,
        make: RuleMaker,
        config: OptimizerConfig,
        pieces: list[ParameterPiece],
        build: Build,
        shapes: Mapping[str, tuple[int, ...]],
    ):
        import torch

        super().__init__(config, pieces, build, shapes)
        self.rules = [make(config, [piece], build, shapes) for piece in pieces]
        self.of_rules = [list(rule.kept()) for rule in self.rules]
        is_pinned = build.mesh.device.type == "cuda"
        self.homes = [
            [torch.empty(each.value.shape, dtype=each.value.dtype, pin_memory=is_pinned) for each in states]
            for states in self.of_rules
        ]
        for at in range(len(self.rules)):
            self._send_home(at)

    def step(self, lr: float, count: int) -> None:
        for at, rule in enumerate(self.rules):
            for state, home in zip(self.of_rules[at], self.homes[at], strict=True):
                state.value.untyped_storage().resize_(home.numel() * home.element_size())
                state.value.copy_(home)
            rule.step(lr, count)
            self._send_home(at)

    def _send_home(self, at: int) -> None:
        for state, home in zip(self.of_rules[at], self.homes[at], strict=True):
            home.copy_(state.value)
            state.value.untyped_storage().resize_(0)

    def kept(self) -> Iterator[OptimizerState]:
        for states, homes in zip(self.of_rules, self.homes, strict=True):
            for state, home in zip(states, homes, strict=True):
                yield state._replace(value=home)

    def set_num_steps(self, count: int) -> None:
        for rule in self.rules:
            rule.set_num_steps(count)


@dataclass(frozen=True, kw_only=True)
class HostStates(Technique):
    name: ClassVar[str] = "host_states"
    phase: ClassVar[str] = "optimizer"
    exactness: ClassVar[Exactness] = "exact"

    is_used: bool = True

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        return (Choice("is_used", (True,)),) if cluster.tiers["host"].bytes else ()

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        if cluster is not None and not cluster.tiers["host"].bytes:
            return (self.problem(f"nothing is known of the hosts of {cluster.name}.", "Measure them: mw probe."),)
        return ()

    def price(self, work: Work) -> Work:
        copies: list[Task] = []
        largest: Num = 0
        for slot in work.slots:
            if slot.frozen or slot.copy_of:
                continue
            size = work.optimizer.state_bytes_of(slot)
            largest = np.maximum(largest, size * (slot.repeat > 0))
            common: dict[str, Any] = {"layer": slot.layer, "repeat": slot.repeat, "bytes": size, "origin": self.name}
            common |= {"phase": "step", "per_step": True}
            copies.append(Copy(source="host", target="device", **common))
            copies.append(Copy(source="device", target="host", **common))

        def on_host(slot: ParameterSlot) -> ParameterSlot:
            return replace(slot, state_tiers=(("host", 1),))

        first = work.profile.layers[0].name
        buffer = Resident(layer=first, category="buffers", repeat=1, bytes=largest, life="always", origin=self.name)
        return work.map_slots(on_host).with_tasks(*copies).with_residents(buffer)

    def apply(self, build: Build) -> None:
        build.at("optimizer", lambda build: build.rule_wraps.append(lambda make: partial(StreamedRule, make)))
