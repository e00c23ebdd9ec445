"""What is wrong with a step, and what is done about it."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.collectives import gather_json
from meshwright.optimizers.update import Optimizer
from meshwright.runtime.build import RankBuild
from meshwright.runtime.loop import NO_LIMITS, StepLimits

WINDOW_STEPS = 64
LEAST_STEPS = 16
MOST_DEVIATIONS = 10.0
LEAST_RISES = (0.25, 2.0)
"""Of loss and gradient norm: a spike is at least so many medians above the median."""


class SpikeRule:
    """The largest loss and gradient norm that are no spike: the median of the last `WINDOW_STEPS` steps that were
    taken, and above it `MOST_DEVIATIONS` standard deviations (1.4826 times the median of absolute deviations) or
    `LEAST_RISES` of the median, whichever is more. Before `LEAST_STEPS` steps nothing is a spike.

    The step just before does not count: where the host reads a step late, it is not known.
    """

    def __init__(self, steps: Iterable[Sequence[Any]] = ()):
        """`steps`: of a checkpoint, (step, loss, gradient norm) each."""
        self.steps = deque([(int(step), float(loss), float(norm)) for step, loss, norm in steps], WINDOW_STEPS + 1)

    def add(self, step: int, loss: float, norm: float) -> None:
        self.steps.append((step, loss, norm))

    def limits(self, step: int) -> StepLimits:
        """For a step that is about to begin."""
        known = [each for each in self.steps if each[0] < step - 1][-WINDOW_STEPS:]
        if len(known) < LEAST_STEPS:
            return NO_LIMITS
        limits = []
        for values, rise in zip(list(zip(*known, strict=True))[1:], LEAST_RISES, strict=True):
            middle = statistics.median(values)
            deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
            limits.append(middle + max(MOST_DEVIATIONS * deviation, rise * abs(middle)))
        return StepLimits(loss=limits[0], gradient_norm=limits[1])


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that went wrong in a step, and what was done about it: a line of troubles.jsonl."""

    step: int
    """The first is 1."""
    cursor: int
    """Of the step's batch: samples before it."""
    reason: str
    """not finite, spike or mismatch."""
    action: str
    """stop, skip, roll_back or warn."""
    loss: float = math.nan
    gradient_norm: float = math.nan
    what: str = ""

    def as_json(self, samples: Sequence[int]) -> dict[str, Any]:
        """`samples`: numbers of the batch's samples. What is not finite is a text."""
        found = {"loss": self.loss, "gradient_norm": self.gradient_norm}
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in found.items()}
        about = {"cursor": self.cursor, "reason": self.reason, "action": self.action, "what": self.what}
        return {"step": self.step, **about, **numbers, "samples": list(samples)}


class TrainingTrouble(MeshwrightError):
    """A run cannot go on by itself: it stops, or rolls back. All ranks raise it together."""

    def __init__(self, trouble: Trouble, what: str, fix: str, *, is_state_good: bool, moves_on: bool):
        """`is_state_good`: the state in memory is the one before the step. `moves_on`: the batch is to blame, and is
        passed over after a roll back."""
        self.trouble, self.is_state_good, self.moves_on = trouble, is_state_good, moves_on
        super().__init__([Problem(where="train", what=what, fix=fix)], exit_code=1, is_everywhere=True)


class ReplicaCheck:
    """Compares parameters and optimizer states that several ranks hold alike, by the sums of their bits as integers."""

    def __init__(self, build: RankBuild, optimizer: Optimizer):
        self.build, self.optimizer = build, optimizer
        self.group = build.mesh.control
        self.keys: list[dict[str, int]] | None = None
        """Rank -> its pieces that others hold too, with the places of their sums."""

    def _pieces(self) -> Iterable[tuple[str, Tensor]]:
        boxes = self.build.boxes
        # Islands are not alike.
        here = self.optimizer.kind_here("parameter")
        held = ((here, name, value, boxes[name]) for name, value in self.build.local_parameters())
        for kind, name, value, box in (*held, *self.optimizer.state()):
            if not box.is_empty:
                yield f"{kind} {name} {box.offset} {box.size} {box.order or ''}", value

    @torch.no_grad()
    def odd_one(self) -> str:
        """Which rank holds what others do not, the same text on every rank; empty where all agree."""
        if self.group is None:
            return ""
        pieces = dict(self._pieces())
        if self.keys is None:
            listed = gather_json(self.group, list(pieces))
            counts = Counter(key for keys in listed for key in keys)
            shared = [[key for key in keys if counts[key] > 1] for keys in listed]
            self.keys = [{key: place for place, key in enumerate(keys)} for keys in shared]
        most, mine = max(map(len, self.keys)), self.keys[dist.get_rank()]
        if not most:
            return ""
        sums = torch.zeros(most, dtype=torch.int64)
        if mine:
            sums[: len(mine)] = torch.stack([bit_sum(pieces[key]).to(self.build.mesh.device) for key in mine]).cpu()
        every = [torch.empty_like(sums) for _ in self.keys]
        dist.all_gather(every, sums, group=self.group)
        found = [each.tolist() for each in every]
        for key in dict.fromkeys(key for keys in self.keys for key in keys):
            held = {rank: found[rank][keys[key]] for rank, keys in enumerate(self.keys) if key in keys}
            (usual, count), *others = Counter(held.values()).most_common()
            if not others:
                continue
            kind, name, *_ = key.split(" ")
            if count > others[0][1]:
                odd = [rank for rank, value in held.items() if value != usual]
                who = f"rank {', '.join(map(str, odd))} holds other bits than the other {count}"
            else:
                who = f"ranks {', '.join(map(str, held))} hold different bits, and which are wrong cannot be known"
            return f"{who}: {name}" if kind.startswith("parameter") else f"{who}: {kind} of {name}"
        return ""


def bit_sum(value: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers of 8 bytes, and of the bytes left: a flipped bit changes it."""
    bits = value.detach().contiguous().view(-1).view(torch.uint8)
    bits = bits.clone() if bits.storage_offset() % 8 else bits  # which integers there are must not depend on its place
    size = bits.numel() // 8 * 8
    return bits[:size].view(torch.int64).sum() + bits[size:].sum(dtype=torch.int64)


PARTS = ("data", "forward", "backward", "update")
SLOW_STEPS, SLOW_TIMES, SLOW_RATIO = 4, 3, 1.2
"""Ranks tell each other every so many steps; one is slow that was beyond the ratio so many times in a row."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    rank: int
    ratio: float
    """Its seconds of a step outside of waiting, over the median of its peers."""
    part: str
    """Where it loses most."""


class StragglerWatch:
    """The seconds that each rank computes in a step, by part, compared between ranks that do the same work.

    Actions that wait for others do not count. Where layers wait for each other inside of an action (a tensor or a
    sequence split, sharded parameters), all of a group take as long as its slowest rank.
    """

    def __init__(self, build: RankBuild):
        self.group, self.device = build.mesh.control, build.mesh.device
        if not all(exchange.keeps_pace for exchange in build.exchanges):
            self.group = None
        rows = build.mesh.part(build.plan.sample_axes)[0] if build.plan.shares else 0
        self.work = gather_json(self.group, [build.stage, rows])
        self.marks: list[tuple[str, Any]] = []
        """What began when in this step: seconds, or an event on a GPU."""
        self.before: tuple[list[tuple[str, Any]], float] | None = None
        """Of the step before, whose events are over, and its data's seconds."""
        self.steps: list[list[float]] = []
        self.slow: Counter[int] = Counter()

    def look(self, kind: str) -> None:
        part = "backward" if kind.startswith("backward") else kind
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append((part, mark))
        else:
            self.marks.append((part, time.perf_counter()))

    def end_step(self, data_seconds: float) -> Straggler | None:
        """After every step on every rank: the rank that is slow, where it is newly known."""
        if self.group is None:
            return None
        self.look("")
        ended, self.before, self.marks = self.before, (self.marks, data_seconds), []
        if ended is None:
            return None
        spent = Counter({"data": ended[1]})
        for (part, start), (_, end) in pairwise(ended[0]):
            spent[part] += start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start
        self.steps.append([spent[part] for part in PARTS])
        if len(self.steps) < SLOW_STEPS:
            return None
        mine = torch.tensor([statistics.median(each) for each in zip(*self.steps, strict=True)], dtype=torch.float64)
        self.steps.clear()
        every = [torch.empty_like(mine) for _ in self.work]
        dist.all_gather(every, mine, group=self.group)
        return self._newly_slow([each.tolist() for each in every])

    def _newly_slow(self, every: list[list[float]]) -> Straggler | None:
        """`every`: seconds of each rank by part."""
        newly: list[Straggler] = []
        for rank, own in enumerate(every):
            peers = [other for at, other in enumerate(every) if at != rank and self.work[at] == self.work[rank]]
            usual = statistics.median(map(sum, peers)) if peers else math.inf
            self.slow[rank] = self.slow[rank] + 1 if sum(own) > SLOW_RATIO * usual else 0
            if self.slow[rank] == SLOW_TIMES:
                excess = [mine - statistics.median(theirs) for mine, *theirs in zip(own, *peers, strict=True)]
                part = PARTS[excess.index(max(excess))]
                newly.append(Straggler(rank=rank, ratio=sum(own) / max(usual, 1e-9), part=part))
        return max(newly, key=lambda each: each.ratio, default=None)
