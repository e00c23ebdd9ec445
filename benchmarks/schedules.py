"""Claim: a stage idles as the simulator says, within a tenth of the step, under every schedule.

Measured: two ranks of one thread each, a decoder of eight equal blocks, 2, 4 and 8 microbatches. Every action of every
rank is timed; a stage idles when it is in none of forward, backward or their halves. The simulator gets the medians of
those times and the schedule, nothing else: no send time, no idle time. Both shares are of the time from the first
action to the last of either rank, and the claim is one less their difference.

Run: python -m benchmarks.schedules [--quick]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.claims import Claim, alone
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig
from meshwright.runtime import loop
from meshwright.schedules import SCHEDULES, Timetable
from meshwright.schedules.actions import COMPUTES
from meshwright.schedules.events import sweep
from meshwright.verify import parity

MODEL = DecoderConfig(
    num_layers=8, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=768, vocab_size=256, max_sequence=256
)
SEQUENCE, COUNTS = 128, (2, 4, 8)
RATES = OptimizerConfig(lr=3e-4, clip=0.0)
NUM_RANKS, WARM_UP, STEPS, SEED = 2, 2, 7, 0
GOAL, TIMEOUT_SECONDS = 0.9, 1800
NAMES = tuple(SCHEDULES)

Timed = tuple[str, int, float, float]
"""(kind, chunk, start, end) of one action."""
UPDATE = "update"
"""Where steps overlap, the optimizer's work lies between microbatches, and is not idle time."""


class Watch:
    """Times every action that computes, where the loop names it for the profiler."""

    def __init__(self, *, with_updates: bool) -> None:
        self.with_updates = with_updates
        self.actions: list[Timed] = []

    def __enter__(self) -> Watch:
        self.plain = loop.record_function
        loop.record_function = self.timed
        return self

    def __exit__(self, *_: object) -> None:
        loop.record_function = self.plain

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """`mw:backward 3.1`: the microbatch and, but for the first, the chunk."""
        kind, _, number = name.removeprefix("mw:").partition(" ")
        start = time.monotonic()
        yield
        if kind in COMPUTES or (self.with_updates and kind in ("exchange", UPDATE)):
            chunk = int(number.partition(".")[2] or 0)
            self.actions.append((kind if kind in COMPUTES else UPDATE, chunk, start, time.monotonic()))


def watched(*, steps: int, rank: int, num_ranks: int, rendezvous: str) -> dict[str, list[list[Timed]]]:
    """The timed actions of this rank's steps, by schedule and microbatches."""
    parity.enter(rank, num_ranks, rendezvous)
    found: dict[str, list[list[Timed]]] = {}
    pipeline: Any = technique_named("pipeline")
    for name in NAMES:
        for count in COUNTS:
            plan = Plan(techniques=(pipeline(size=NUM_RANKS, schedule=name),), batch=count, microbatch=1)
            opened = open_config(MODEL, "bench", SEED)
            session = parity.open_session(plan, opened, RATES, dtype="float32", device=torch.device("cpu"))
            make = parity.random_samples(MODEL.vocab_size, count, SEQUENCE, masked=False)
            made = make(0, 0, 1)
            samples = replace(made, weights=made.weights.float())
            taken, overlaps = [], session.build.timetable.overlaps_steps
            for step in range(WARM_UP + steps):
                if not overlaps:
                    dist.barrier()
                with Watch(with_updates=overlaps) as watch:
                    (session.loop.feed if overlaps else session.loop.step)(samples, RATES.lr)
                taken += [watch.actions] if step >= WARM_UP else []
            session.loop.flush()
            # Without a flush between them, steps are one long step.
            found[f"{name} {count}"] = [[action for each in taken for action in each]] if overlaps else taken
    parity.leave()
    return found


def idle_fraction(ranks: list[list[Timed]]) -> float:
    """Of one step, over both ranks."""
    start = min(action[2] for actions in ranks for action in actions)
    end = max(action[3] for actions in ranks for action in actions)
    busy = sum(action[3] - action[2] for actions in ranks for action in actions)
    return 1.0 - busy / len(ranks) / (end - start)


def simulated_fraction(name: str, count: int, ranks: list[list[list[Timed]]]) -> float:
    """The same of the schedule, given how long each kind of action took in each span."""
    table = Timetable(name, SCHEDULES[name].chunks)
    places = table.places(NUM_RANKS)
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rank, steps in enumerate(ranks):
        for actions in steps:
            for kind, chunk, start, end in actions:
                taken[kind, places.span(rank, chunk)].append(end - start)
    seconds = {
        kind: [statistics.median(taken.get((kind, span), [0.0])) for span in range(places.num_spans)]
        for kind in COMPUTES
    }
    if table.overlaps_steps:  # no way in or out: the slower stage sets the pace
        stages = range(NUM_RANKS)
        updates = [statistics.median(taken[UPDATE, stage]) for stage in stages]
        each = [count * (seconds["forward"][stage] + seconds["backward"][stage]) + updates[stage] for stage in stages]
        return 1.0 - statistics.mean(each) / max(each)
    events = table.events(NUM_RANKS, count)
    _, finished = sweep(events, seconds, 0.0)
    busy = sum(seconds[event.kind][event.span] for event in events)
    return 1.0 - busy / NUM_RANKS / float(max(finished))


def measure(quick: bool = False) -> list[Claim]:
    with RankPool(NUM_RANKS, threads_per_rank=1) as pool:
        arguments = {"steps": 2 if quick else STEPS}
        answers = pool.run("benchmarks.schedules:watched", arguments, NUM_RANKS, timeout_seconds=TIMEOUT_SECONDS)
    claims = []
    for name in NAMES:
        close, shown = [], []
        for count in COUNTS:
            ranks = [answer[f"{name} {count}"] for answer in answers]
            measured = statistics.median(idle_fraction(list(step)) for step in zip(*ranks, strict=True))
            simulated = simulated_fraction(name, count, ranks)
            close.append(1.0 - abs(measured - simulated))
            shown.append(f"{measured:.2f} ({simulated:.2f})")
        what = f"{name}: idle share measured (simulated) at m = 2, 4, 8: {', '.join(shown)}; one less the difference"
        claims.append(Claim(name=f"idle {name}", what=what, unit="ratio", goal=GOAL, measured=tuple(close)))
    return claims


if __name__ == "__main__":
    sys.exit(alone(measure("--quick" in sys.argv)))
