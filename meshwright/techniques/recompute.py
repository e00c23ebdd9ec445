"""Forget a block's activations after forward and compute them again in backward.

What: blocks named by `layers` keep only their input (full recomputation); those named by `selective` also keep what
products, attention and collectives made, and compute only the rest again (norms, activations, positions, casts, sums).
Blocks named by `attention` keep what attention and collectives made, but no products: those run again too.
Of a stage's equal blocks full ones come first, then these, then selective ones, then those that keep all: what is
needed last in backward is kept least, when the others' memory is already free. With `slots`, of each run of fully
recomputed equal blocks at most so many inputs are kept; the others are made again from the nearest one, as often as is
best for so few.
When it helps: activations are the peak. selective gives up half of them for 8 % of the time (a block of Llama 8B on an
H200), full most of them for a third more compute, slots nearly all. attention keeps a fifth of what selective keeps,
for a fifth more time (a block of Llama 3B), and less than full takes where sequences are long. Of blocks that are
compiled selective costs 3 % of the time; the products of a block all save about as many bytes for their compute, so
some blocks of one kind and some of the other are as good as anything between the two.
When it does not: parameters and optimizer are the peak, or memory is free. selective gains little where much of what is
kept came out of collectives (a split sequence, experts elsewhere), and costs more than full where blocks are so small
that the device waits for its host, who watches every operator; slots is slow, for what fits no other way.
Cost: full: one more forward of each block, kept: its input (Chen et al. 2016); the exit of the last region is not
replayed: nothing in backward needs it. selective: the forward without products, attention and collectives; kept: the
input and what those made, as far as backward depends on it (Korthikanti et al. 2022, by operators). attention: the
same, less by the products' results, more by their compute. slots: of n blocks c inputs and the one in use; forwards
beside the replay: the optimum of a chain (Griewank & Walther 2000, Beaumont et al. 2019), for n = 32 24 with c = 8, 46
with 4, 496 with 1.
Exactness: exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from meshwright.core.build import Build
from meshwright.core.cluster import Cluster
from meshwright.core.errors import Problems
from meshwright.core.plan import Plan
from meshwright.core.profile import Layer, Op, Poly, Profile
from meshwright.core.revolve import forwards_again
from meshwright.core.technique import Choice, Exactness, Option, PerLayer, Spans, Technique
from meshwright.core.work import Collective, Compute, Copy, HostUpdate, Num, Resident, Task, Work, replace

DEAR = ("matmul", "attention")
"""Kinds of ops whose results selective blocks keep."""
WATCHED_LAUNCHES = 1.5
"""More for each kernel, where the host looks at what it launches: 3 to 5 ms for a block of 2048, forward and replay,
beside an H200 (torch's own selective checkpoints take as long)."""


@dataclass(frozen=True, kw_only=True)
class Recompute(Technique):
    name: ClassVar[str] = "recompute"
    phase: ClassVar[str] = "block"
    exactness: ClassVar[Exactness] = "exact"

    policies: ClassVar[tuple[str, ...]] = ("layers", "attention", "selective")
    later_settings: ClassVar[tuple[str, ...]] = ("attention",)

    layers: int | str | None = "all"
    """Blocks that are recomputed as a whole: "all" that no other setting names, "none", "first 3" or "last 3" of every
    stage, or "0-3,8"."""
    selective: int | str | None = "none"
    """Blocks that keep what is dear to compute."""
    slots: int = 0
    """Inputs kept of a run of equal blocks recomputed as a whole; 0: all."""
    attention: int | str | None = "none"
    """Blocks that keep what attention and collectives made, and no products."""

    @property
    def replays_blocks(self) -> bool:
        return self.slots > 0

    @classmethod
    def options(cls, profile: Profile, cluster: Cluster) -> tuple[Option, ...]:
        fewer = tuple(slots for slots in (16, 8, 4, 3, 2, 1) if slots < profile.num_blocks)
        attends = any(op.kind == "attention" for layer in profile.block_layers for op in layer.ops)
        fields = cls.policies if attends else ("layers", "selective")
        return (PerLayer(fields), Choice("slots", (0,), rescues=() if "stages" in profile.uncut else fewer))

    def check(self, plan: Plan, profile: Profile, cluster: Cluster | None) -> Problems:
        problems = self.policy_problems(profile)
        if problems or not self.slots:
            return tuple(problems)
        if self.slots < 0:
            return (self.problem(f"slots is {self.slots}.", "Use 1 or more inputs, or 0 for all."),)
        if all(getattr(self, field) == "none" for field in self.policies):
            what = f"slots is {self.slots}, and no block is recomputed."
            problems.append(self.problem(what, "Use slots = 0, or name blocks in layers."))
        if "stages" in profile.uncut:
            what = f"a block's input may not be all that it needs: {profile.uncut['stages']}"
            problems.append(self.problem(what, "Use slots = 0."))
        return tuple(problems)

    def price(self, work: Work) -> Work:
        replays: dict[str, Num] = {}
        for layer in work.profile.block_layers:
            repeat = work.repeat_of(layer.name)
            full = work.following(self.name, "layers", layer.name)
            few = np.minimum(work.following(self.name, "attention", layer.name), repeat - full)
            some = np.minimum(work.following(self.name, "selective", layer.name), repeat - full - few)
            again, inputs = self._in_chains(work, layer, full)
            replays[layer.name] = (full + again) * work.has_backward(layer.name)
            tasks = self._replays(work, layer, full, few, some, again)
            kept = [
                *self._full(work, layer, full, inputs),
                *self._selective(work, layer, few, keeps_products=False),
                *self._selective(work, layer, some, keeps_products=True),
            ]
            rest = tuple(
                replace(item, repeat=repeat - full - few - some) if _is_kept(item, layer.name) else item
                for item in work.residents
            )
            work = replace(work, residents=(*rest, *kept)).with_tasks(*tasks)
        work = work.with_facts(replays=replays)  # for what talks inside blocks and is priced later
        if not self.slots:
            return work
        # Counts alone do not say how a stage's chunks share them.
        is_unknown = work.facts.chunks > 1 and not any(name.startswith(f"{self.name}.again.") for name in work.sizes)
        return work.with_facts(replays_blocks=True).forbid(is_unknown | (self.slots >= work.profile.num_blocks))

    def _in_chains(self, work: Work, layer: Layer, full: Num) -> tuple[Num, Num]:
        """Forwards run only to reach a block's input, and inputs kept; of one run of blocks where nobody says."""
        if not self.slots:
            return 0, full
        again = work.sizes.get(f"{self.name}.again.{layer.name}")
        inputs = work.sizes.get(f"{self.name}.inputs.{layer.name}")
        if again is None or inputs is None:
            again, inputs = forwards_again(self.slots, layer.repeat)[full], np.minimum(full, self.slots)
        return again, inputs

    def counts_in(self, profile: Profile, spans: Spans, chunk: int | None = None) -> dict[str, int]:
        result = super().counts_in(profile, spans, chunk)
        if not self.slots:
            return result
        runs = self._runs(profile, spans)
        for layer in profile.block_layers:
            lengths = [len(blocks) for at, name, blocks in runs if name == layer.name and chunk in (None, at)]
            again = (int(forwards_again(self.slots, length)[length]) for length in lengths)
            result[f"{self.name}.again.{layer.name}"] = sum(again)
            result[f"{self.name}.inputs.{layer.name}"] = sum(min(self.slots, length) for length in lengths)
        return result

    def _runs(self, profile: Profile, spans: Spans) -> list[tuple[int, str, list[int]]]:
        """(chunk, kind, blocks) of fully recomputed equal blocks that follow each other."""
        kinds = [layer.name for layer in profile.block_layers for _ in range(layer.repeat)]
        runs: list[tuple[int, str, list[int]]] = []
        for chunk, (first, last) in enumerate(spans):
            is_open = False
            for block in range(first, last):
                is_full = self.policy_of(block, spans) == "layers"
                if is_full and is_open and runs[-1][1] == kinds[block]:
                    runs[-1][2].append(block)
                elif is_full:
                    runs.append((chunk, kinds[block], [block]))
                is_open = is_full
        return runs

    def _replays(self, work: Work, layer: Layer, full: Num, few: Num, some: Num, again: Num) -> list[Task]:
        """The forward's tasks, repeated as often as they are run again."""
        each = np.maximum(work.repeat_of(layer.name), 1)  # some tasks come several times a block
        goes_back = work.has_backward(layer.name)
        result, last = [], _last_product(layer.ops)
        for task in work.tasks:
            if task.layer != layer.name or task.phase != "forward":
                continue
            if isinstance(task, Compute):
                times, origin = full + again + (few + some) * (task.kind not in DEAR), self.name
                if task.kind == "matmul" and task.name != last:
                    times = times + few * _is_whole(work, task)
            else:
                # The last exit only makes the output: for the next block's input, and for nothing else.
                is_tail = isinstance(task, Collective) and task.tail
                times, origin = (again if is_tail else full + again), task.origin
                if is_tail and not self.slots:
                    continue
            repeat = task.repeat * times // each * goes_back
            result.append(replace(task, phase="recompute", repeat=repeat, origin=origin))
        return [*result, *self._watching(work, layer, few + some)]

    def _watching(self, work: Work, layer: Layer, count: Num) -> list[Compute]:
        """The host's part in telling what is dear: once when it is kept, once when it is found again."""
        each = np.maximum(work.repeat_of(layer.name), 1)
        mine = [task for task in work.computes if task.layer == layer.name and task.phase == "forward"]
        launches = sum(task.kernels * task.repeat / each for task in mine) * WATCHED_LAUNCHES
        common: dict[str, Any] = {"layer": layer.name, "name": "watching", "kind": "memory", "origin": self.name}
        again = count * work.has_backward(layer.name)
        return [
            Compute(**common, phase="forward", repeat=count, kernels=launches),
            Compute(**common, phase="recompute", repeat=again, kernels=launches),
        ]

    def _full(self, work: Work, layer: Layer, count: Num, inputs: Num) -> list[Resident]:
        boundary = _boundary_bytes(work, layer)
        each = boundary * inputs / np.maximum(count, 1) * work.has_backward(layer.name)
        own: dict[str, Any] = {"layer": layer.name, "origin": self.name, "turn": -3}
        kept = Resident(**own, category="activations", repeat=count, bytes=each, life="microbatch", is_input=True)
        result = [kept]
        if self.slots:  # the input that has been made again
            here = (count > inputs) * 1
            result.append(Resident(**own, category="working", repeat=here, bytes=boundary, life="backward"))
        return result + _revived(work, layer, count, 1.0, own)

    def _selective(self, work: Work, layer: Layer, count: Num, *, keeps_products: bool) -> list[Resident]:
        dear = _dear_bytes(work, layer, keeps_products)
        own: dict[str, Any] = {"layer": layer.name, "origin": self.name, "turn": -1 if keeps_products else -2}
        each = (_boundary_bytes(work, layer) + dear) * work.has_backward(layer.name)
        kept = Resident(**own, category="activations", repeat=count, bytes=each, life="microbatch")
        saved = sum(
            item.bytes for item in work.residents if _is_kept(item, layer.name) and item.category == "activations"
        )
        left = np.maximum(saved - dear, 0) / np.maximum(saved, 1)
        return [kept, *_revived(work, layer, count, left, own)]

    def apply(self, build: Build) -> None:
        build.at("block", self._wrap)

    def _wrap(self, build: Build) -> None:
        from meshwright.ops.recompute import Chain, on_copies, recomputed, selectively_recomputed, writes_in_place

        numbers = [block for first, last in build.spans for block in range(first, last)]
        blocks = dict(zip(numbers, build.model.block_modules(), strict=True))
        for number, block in blocks.items():
            policy = self.policy_of(number, build.spans)
            if policy and writes_in_place(block):
                block.forward = on_copies(block.forward)
            if policy in ("attention", "selective"):
                block.forward = selectively_recomputed(block.forward, keeps_products=policy == "selective")
            elif policy == "layers" and not self.slots:
                block.forward = recomputed(block.forward)
                build.replayed_blocks.add(number)
        for _, _, run in self._runs(build.profile, build.spans) if self.slots else ():
            Chain([blocks[number] for number in run], self.slots)


def _is_kept(item: Resident, layer: str) -> bool:
    return item.layer == layer and item.life == "microbatch" and item.category in ("activations", "gathered")


def _boundary_bytes(work: Work, layer: Layer) -> Num:
    width = work.facts.widths.stream
    elements = layer.boundary(work.size("microbatch"), work.size("sequence"))
    return elements * width / work.facts.sequence_ways


def _revived(work: Work, layer: Layer, count: Num, share: Num, own: dict[str, Any]) -> list[Resident]:
    """What a block's replay brings back; a `share` of the activations, where it finds the others."""
    return [
        replace(
            item,
            **own,
            category="gathered" if item.category == "gathered" else "working",
            repeat=(count > 0) * 1,
            bytes=item.bytes if item.category == "gathered" else item.bytes * share,
            life="backward",
        )
        for item in work.residents
        if _is_kept(item, layer.name)
    ]


def _dear_bytes(work: Work, layer: Layer, keeps_products: bool) -> Num:
    """What attention, collectives and (if it `keeps_products`) products of a block made, as far as its backward depends
    on it."""
    each = np.maximum(work.repeat_of(layer.name), 1)
    wide = work.facts.widths.state
    last, total = _last_product(layer.ops), 0.0
    for task in work.tasks:
        if task.layer != layer.name or task.phase != "forward" or task.per_step or isinstance(task, Copy | HostUpdate):
            continue
        if isinstance(task, Collective):
            size = 0.0 if task.tail or task.kind in ("ring", "send") else task.bytes * (work.size(task.axis) > 1)
            size = size / work.size(task.axis) if task.kind == "reduce_scatter" else size
        elif task.kind == "attention":
            size = _attended_bytes(work, task, wide)
        elif task.kind == "matmul" and task.name != last and keeps_products:
            size = _product_bytes(work, task, wide)
        else:
            continue
        total = total + size * task.repeat / each
    return total


def _product_bytes(work: Work, task: Compute, wide: int) -> Num:
    if not task.shape:  # all that it read and wrote: never too little
        return task.moved_bytes
    size = task.flops / (2 * task.shape[1]) * (2 if task.dtype in ("bf16", "fp16") else wide)
    return size * _is_whole(work, task)


def _is_whole(work: Work, product: Compute) -> Num:
    """Not a partial sum, which only the collective reads that completes it."""
    if product.cut != "tensor" or product.cut_dim != "k":
        return True
    return np.equal(work.facts.inside_ways, 1) | np.not_equal(product.matrices, 1)


def _attended_bytes(work: Work, task: Compute, wide: int) -> Num:
    """The output, and a number for each of its rows; rows by tokens, or by flops where samples have no sequence."""
    if not task.shape:
        return task.moved_bytes
    heads, size, seen = task.shape
    rows = work.size("microbatch") * work.size("sequence") * heads * task.kernels
    rows = np.maximum(rows, task.flops / (4 * size * seen))
    return rows * (size * (2 if task.dtype in ("bf16", "fp16") else wide) + wide)


def _last_product(ops: tuple[Op, ...]) -> str:
    """The product that makes a block's output, or what is only added to it: nothing in backward asks for it. Empty
    where an op that runs after it keeps something, or may do so."""
    keeping = [op for op in ops if op.saved != Poly() and op.kernels > 0]  # others keep what was there before
    if any(op.role == "block" for op in keeping):  # of a traced block's own forward no order is known
        return ""
    products = [place for place, op in enumerate(ops) if op.kind == "matmul"]
    last = ops[products[-1]] if products else None
    if last is None or last.kernels != 1 or any(op in keeping for op in ops[products[-1] :]):
        return ""
    return last.name if sum(op.name == last.name for op in ops) == 1 else ""
