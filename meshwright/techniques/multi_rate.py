"""Some blocks are updated in every k-th step only, and have no weight gradients in the steps between.

What: blocks of `layers` (of the whole model, also where it is cut into stages) are updated in steps 1, 1 + `every`,
1 + 2 `every`, ... of the optimizer, by that step's own gradient: nothing is accumulated between. Where the first block
is among them, so is what comes before it (the embedding), unless its weights are tied, or summed in one message with
others; in the steps between, backward then ends at the first block that is updated.
AdamW's moments and count of steps, and weight decay, advance for a block when it is updated. The learning rate is that
of the step; gradients are clipped by the norm of those that were made in the step.
When it helps: backward, or the sums of gradients, take most of a step, and early blocks change slowly: fine-tuning, the
late part of a run. The first half of the blocks at `every` = 2 saves up to a sixth of the flops of a step.
When it does not: training from random weights, where all blocks move; memory, since a step that updates all must fit;
pipelines, whose stages wait for the one with most left to do.
Cost: of the chosen blocks 1 / `every` of the weight gradients, of the messages that sum them and of updates; where
backward ends above them, of their whole backward with its messages, and of recomputation. Handing gradients on between
stages costs what it did (zeros are sent). Checkpoints have nothing more: the number of the step says which blocks it
updates. Search does not choose it by itself: nobody has measured how many more steps the same loss needs.
Loss after 500 steps of AdamW from random weights, against updates of all: the first half of the blocks and the
embedding every 2nd step +11 %, every 4th +33 %, the last half every 2nd +4.6 %; another seed +2.7 %
(`benchmarks/exchange_gap.py`).
Exactness: approximate; with every = 1 it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problem, Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Profile
from meshwright.core.technique import Exactness, Spans, Technique
from meshwright.core.work import Circumstances, Collective, Compute, Num, Rests, Updating, Work

MOST_STEPS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MultiRate(Technique):
    name: ClassVar[str] = "multi_rate"
    phase: ClassVar[str] = "wrap"  # before whoever makes the sums
    exactness: ClassVar[Exactness] = "approximate"
    policies: ClassVar[tuple[str, ...]] = ("layers",)
    shares_blocks: ClassVar[bool] = True
    rests_layers: ClassVar[bool] = True

    layers: str = "none"
    """Blocks that are updated seldom."""
    every: int = 2
    """Steps from one of their updates to the next."""

    def refusals(self, given: Circumstances) -> Iterator[tuple[Num, Problem]]:
        what = "in a step that overlaps the next one, blocks would be trained for one and left out for the other."
        yield given.overlaps_steps, self.problem(what, "Use another schedule.")
        what = "one graph makes the gradients of all layers at once."
        yield given.joins_gradients, self.problem(what, "Compile blocks, without CUDA graphs, or leave this out.")
        what = "blocks that run again are chosen while backward runs, and some steps have none for the first ones."
        yield given.replays_blocks, self.problem(what, "Use slots = 0 for recomputed blocks.")

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = [*self.refused(plan, profile), *self.policy_problems(profile)]

        def refuse(what: str, fix: str) -> None:
            problems.append(self.problem(what, fix))

        if not 1 <= self.every <= MOST_STEPS:
            refuse(f"every is {self.every}.", f"Use 1 to {MOST_STEPS} steps.")
        if self.layers == "none":
            refuse("no block is chosen.", 'Name some, as in layers = "first 3", or leave it out.')
        if any(param.frozen for layer in profile.block_layers for param in layer.params):
            what = f"blocks of {profile.name} have frozen parameters, which leave little of a backward to save."
            refuse(what, "Train all parameters of blocks, or leave this out.")
        if any(site.kind == "statistics" for layer in profile.layers for site in layer.sites):
            what = f"batch norms of {profile.name} exchange sums in backward, also for blocks that have none."
            refuse(what, "Use a model without batch norms.")
        for other in plan.techniques:
            if other.uses_tiers or other.hosts_states or other.updates_in_backward:
                refuse(f"{other.name} takes tensors of every block in every step.", f"Leave out {other.name}, or this.")
        return tuple(problems)

    @classmethod
    def check_optimizer(cls, optimizer: Updating) -> Problems:
        if optimizer.is_elementwise:
            return ()
        what = "this optimizer looks at parameters of all ranks together, and in some steps not all have gradients."
        return (Problem(where=cls.name, what=what, fix="Use adamw, lion or sgd, or leave the technique out."),)

    def blocks_of(self, profile: Profile) -> tuple[int, ...]:
        return tuple(sorted(self._followed(((0, profile.num_blocks),))))

    def _first_layers(self, profile: Profile) -> list[Layer]:
        """Layers before the blocks, if they rest as the first block does."""
        tied = {param.tied.split(".")[0] for layer in profile.layers for param in layer.params if param.tied}
        first = list(takewhile(lambda layer: not layer.is_block, profile.layers))
        is_apart = all(
            layer.unit in ("", layer.name) and layer.name not in tied and not any(param.tied for param in layer.params)
            for layer in first
        )
        return first if is_apart and 0 in self.blocks_of(profile) else []

    def _num_ended(self, profile: Profile) -> int:
        """Blocks from the first on that have no backward in a step between."""
        blocks = self.blocks_of(profile)
        if 0 not in blocks or not (self._first_layers(profile) or not profile.trains_before(0)):
            return 0
        return next(at for at in range(profile.num_blocks + 1) if at not in blocks)

    def counts_in(self, profile: Profile, spans: Spans, chunk: int | None = None) -> dict[str, int]:
        """`ended`: of the blocks that follow `layers`, those that have no backward in a step between."""
        chosen = spans if chunk is None else (spans[chunk],)
        here = {block for first, last in chosen for block in range(first, last)}.intersection(self.blocks_of(profile))
        num_ended, result, start = self._num_ended(profile), dict[str, int](), 0
        for layer in profile.block_layers:
            mine = here.intersection(range(start, start := start + layer.repeat))
            result[f"{self.name}.layers.{layer.name}"] = len(mine)
            result[f"{self.name}.ended.{layer.name}"] = sum(block < num_ended for block in mine)
        return result

    def price(self, work: Work) -> Work:
        work = self.forbid(work)
        share, weights, passes = 1 - 1 / self.every, dict[str, Num](), dict[str, Num]()
        for layer in self._first_layers(work.profile):
            weights[layer.name] = passes[layer.name] = work.repeat_of(layer.name)
        left = dict[tuple[str, str], float]()
        """Of an op's backward, without its weight's gradient."""
        for layer in work.profile.block_layers:
            weights[layer.name] = work.following(self.name, "layers", layer.name)
            passes[layer.name] = work.following(self.name, "ended", layer.name)
            for op in layer.ops:
                has_weight = any(f"{param.name}.".startswith(f"{op.name}.") for param in layer.params)
                is_product = op.kind == "matmul" and (has_weight or op.role in ("linear", "convolution"))
                left[layer.name, op.name] = 0.5 if is_product else 0.0 if op.role == "bias" else 1.0
        rests = Rests(share=share, weights=weights, passes=passes)
        tasks: list[Any] = []
        for task in work.tasks:
            is_back = task.phase in ("backward", "weight", "recompute") and task.layer in weights
            if not is_back or task.per_step or (isinstance(task, Collective) and task.kind == "send"):
                tasks.append(task)
                continue
            repeat = work.repeat_of(task.layer)
            passed = rests.passed(task.layer, task.repeat, repeat)
            if not isinstance(task, Compute) or task.phase == "recompute":
                tasks.append(replace(task, repeat=passed))
                continue
            whole = task.repeat - share * weights[task.layer] * task.repeat / np.maximum(repeat, 1)
            part = left.get((task.layer, task.name), 0.0 if task.role == "weight_cast" else 1.0)
            if work.facts.splits_backward and task.role == "linear":
                part = float(task.phase == "backward")
            tasks.append(replace(task, repeat=whole))
            scaled = {"flops": task.flops * part, "moved_bytes": task.moved_bytes * part}
            if part and np.any(passed > whole):
                tasks.append(replace(task, **scaled, kernels=task.kernels * part, repeat=passed - whole))
        return replace(work, tasks=tuple(tasks)).with_facts(rests=rests)

    def apply(self, build: Build) -> None:
        def install(build: Build) -> None:
            from meshwright.optimizers.slow_parameters import SlowParametersRule

            profile = build.profile
            begins = [f"{profile.block_name(block)}." for block in self.blocks_of(profile)]
            begins += [f"{layer.name}." for layer in self._first_layers(profile)]
            trained = {name: parameter for name, parameter in build.named_parameters() if parameter.requires_grad}
            slow = {name: parameter for name, parameter in trained.items() if name.startswith(tuple(begins))}
            trained_from = self._num_ended(profile) or -1
            build.rule_wraps.append(lambda make: partial(SlowParametersRule, slow, trained_from, self.every, make))

        build.at("step", install)
