"""Other numbers of devices, and other batches: what each would give.

Devices: the same kind of machine with more or fewer of them. Batches: which one reaches a target first, since larger
batches need fewer steps, which take longer (McCandlish et al., arXiv 1812.06162):

steps(B) = least_steps x (1 + critical_batch / B)
samples(B) = B x steps(B) = least_samples x (1 + B / critical_batch),  critical_batch = least_samples / least_steps
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from meshwright.ask.question import Outcome, Question, Tell, outcome
from meshwright.core.cluster import MOST_DEVICES, Cluster, parse_cluster_name
from meshwright.core.errors import Problem, raise_problems
from meshwright.core.profile import Profile
from meshwright.core.units import pretty_count

MOST_SIZES = 8
ONE_NODE = 8
"""Devices of a node where only one is given: as most machines of several are built."""


def node_width(cluster: Cluster) -> int:
    """Devices a whole node has; one alone says nothing of the node it is in."""
    return cluster.devices_per_node if cluster.num_devices > 1 else ONE_NODE


def resized(cluster: Cluster, devices: int) -> Cluster | None:
    """With so many devices: some of one node, or whole nodes; None where neither is possible, or groups differ."""
    width = node_width(cluster)
    if cluster.others:
        return cluster if devices == cluster.num_devices else None
    if devices < 1 or devices > MOST_DEVICES or (devices > width and devices % width):
        return None
    return reshaped(cluster, *((devices, 1) if devices <= width else (width, devices // width)))


def with_count(question: Question, devices: int) -> Question:
    """The same on so many devices, which are possible."""
    cluster = resized(question.cluster, devices)
    assert cluster is not None, f"{devices} devices are possible"
    return replace(question, cluster=cluster)


def reshaped(cluster: Cluster, devices_per_node: int, num_nodes: int) -> Cluster:
    """The cluster with another number of nodes and devices per node, renamed accordingly."""
    if (devices_per_node, num_nodes) == (cluster.devices_per_node, cluster.num_nodes):
        return cluster
    parsed = parse_cluster_name(cluster.name.lower())
    kind = parsed[2] if parsed else cluster.name
    nodes = f"{num_nodes}x" if num_nodes > 1 else ""
    return cluster.resized(devices_per_node, num_nodes, name=f"{nodes}{devices_per_node}x{kind}")


def sizes_between(cluster: Cluster, low: int, high: int) -> tuple[int, ...]:
    """At most eight numbers of devices from `low` to `high`: all there are, else both ends and powers of two."""
    if cluster.others:
        return (cluster.num_devices,) if low <= cluster.num_devices <= high else ()
    width = node_width(cluster)
    inside = {1 << bit for bit in range(width.bit_length()) if low <= 1 << bit <= min(width, high)}
    inside |= {width} if low <= width <= high else set()
    first, last = max(2, -(-low // width)), min(high, MOST_DEVICES) // width
    if len(inside) + max(0, last - first + 1) <= MOST_SIZES:
        return tuple(sorted(inside | {nodes * width for nodes in range(first, last + 1)}))
    doubled = {1 << bit for bit in range(last.bit_length()) if first <= 1 << bit <= last}
    every = sorted(inside | {nodes * width for nodes in doubled | {first, last}})
    steps = min(len(every), MOST_SIZES) - 1
    return tuple(every[round(i * (len(every) - 1) / steps)] for i in range(steps + 1))


def larger_sizes(cluster: Cluster) -> Iterator[int]:
    """Numbers of devices above the cluster's own, doubling: inside a node, then nodes."""
    width, devices = node_width(cluster), cluster.num_devices
    if cluster.others:
        return
    while True:
        if 2 * devices <= width:
            devices *= 2
        else:  # the next of 1, 2, 4, 8, ... nodes
            devices = width << (devices // width).bit_length()
        if devices > MOST_DEVICES:
            return
        yield devices


@dataclass(frozen=True, kw_only=True)
class DeviceCount:
    devices: int
    outcome: Outcome

    @property
    def rate(self) -> float:
        """Tokens (or samples) a second, by what is learnt from them; 0 where there is no plan."""
        return self.outcome.best.tokens_to_target_per_second if self.outcome.best else 0.0

    def device_hours(self, tokens: float) -> float:
        return tokens / self.rate * self.devices / 3600 if self.rate else float("inf")


@dataclass(frozen=True, kw_only=True)
class DeviceCounts:
    tried: tuple[DeviceCount, ...]
    is_interrupted: bool = False

    @property
    def fastest(self) -> DeviceCount | None:
        return max((size for size in self.tried if size.rate), key=lambda size: size.rate, default=None)

    @property
    def cheapest(self) -> DeviceCount | None:
        """Most tokens a device-hour; of equal ones the faster."""
        fitting = (size for size in self.tried if size.rate)
        return max(fitting, key=lambda size: (size.rate / size.devices, size.rate), default=None)


def compare_sizes(question: Question, devices: tuple[int, ...], tell: Tell) -> DeviceCounts:
    """The best plan for each number of devices."""
    tried: list[DeviceCount] = []
    try:
        for count in devices:
            asked = with_count(question, count)
            tell(f"searching {asked.cluster.name}, {len(tried) + 1} of {len(devices)}")
            tried.append(DeviceCount(devices=count, outcome=outcome(asked.cluster.name, asked)))
    except KeyboardInterrupt:
        return DeviceCounts(tried=tuple(tried), is_interrupted=True)
    return DeviceCounts(tried=tuple(tried))


NUM_BATCHES = 10
KNEE = 0.95
"""Share of the highest rate that counts as all of it."""
_MOST_MORE = 5
"""Further batches tried where the best is the last one."""
_TOKENS_PER_PARAMETER = 20
"""Hoffmann et al., arXiv 2203.15556: how much data a model of a size is worth training on."""
_KNOWN_BATCH_TOKENS, _KNOWN_TOKENS = 3.2e6, 300e9
"""GPT-3's batch, chosen by its gradient noise, and what it was trained on (arXiv 2005.14165)."""
_SAMPLES = 8192.0
"""The order of critical batches of image classifiers (arXiv 1812.06162, figure 4)."""
_EPOCH_SAMPLES = 100 * 1.28e6
"""Images in a hundred epochs of ImageNet: what models of samples are taken to need."""


@dataclass(frozen=True, kw_only=True)
class BatchGoal:
    critical_batch: float
    """Samples: half the steps are saved from here on, twice the samples spent."""
    least_steps: float
    """With a batch without end."""
    sources: tuple[str, ...]
    """Where the two come from, for people."""

    def steps(self, batch: int) -> float:
        return self.least_steps * (1 + self.critical_batch / batch)


def read_goal(
    profile: Profile,
    sequence: int,
    critical_batch: float | None = None,
    target_steps: float | None = None,
    target_tokens: float | None = None,
) -> BatchGoal:
    """From what is known; what is not is guessed, and said to be."""
    given = {"--critical-batch": critical_batch, "--target-steps": target_steps, "--target-tokens": target_tokens}
    problems = [
        Problem(where=name, what=f"is {value:g}.", fix="Use a number above 0.")
        for name, value in given.items()
        if value is not None and not 0 < value < math.inf
    ]
    if not problems and None not in given.values():
        what = "the critical batch is target tokens over target steps: all three cannot be given."
        problems.append(Problem(where="--critical-batch", what=what, fix="Take one away."))
    raise_problems(problems)
    sources = []
    if target_tokens is not None:
        samples = target_tokens / sequence
    elif profile.counts == "samples":
        samples = _EPOCH_SAMPLES
        sources.append(f"target: {pretty_count(samples)} samples, a guess; say --target-tokens")
    else:
        tokens = float(_TOKENS_PER_PARAMETER * profile.num_params)
        samples, words = tokens / sequence, f"{pretty_count(tokens)} tokens, {_TOKENS_PER_PARAMETER} a parameter"
        sources.append(f"target: {words}, a guess; say --target-tokens")
    guess = "a guess, measure yours and say --critical-batch"
    if target_steps is not None and target_tokens is not None:
        critical = samples / target_steps
        sources.append(f"critical batch {critical:,.0f} samples: target tokens over target steps")
    elif critical_batch is not None:
        critical = critical_batch
    elif profile.counts == "samples":
        critical, words = _SAMPLES, "the order of image classifiers (arXiv 1812.06162)"
        sources.append(f"critical batch {_SAMPLES:.0f} samples: {words}; {guess}")
    else:
        # It follows the data seen, not the model's size (arXiv 2410.21676), about as its square root.
        tokens = _KNOWN_BATCH_TOKENS * math.sqrt(samples * sequence / _KNOWN_TOKENS)
        critical = max(1.0, tokens / sequence)
        words = "GPT-3's 3.2 M for 300 B tokens, as the square root of the tokens"
        sources.append(f"critical batch {critical:,.0f} samples ({pretty_count(tokens)} tokens): {words}; {guess}")
    return BatchGoal(critical_batch=critical, least_steps=target_steps or samples / critical, sources=tuple(sources))


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """A batch on a number of devices: how long to the target."""

    batch: int
    devices: int
    outcome: Outcome
    steps: float

    @property
    def seconds(self) -> float:
        return self.steps * self.outcome.best.seconds_to_target if self.outcome.best else math.inf

    @property
    def device_hours(self) -> float:
        return self.seconds * self.devices / 3600


@dataclass(frozen=True, kw_only=True)
class BatchGoals:
    goal: BatchGoal
    runs: tuple[BatchRun, ...]
    is_interrupted: bool = False

    @property
    def soonest(self) -> BatchRun | None:
        return _least(self.runs)

    @property
    def cheapest(self) -> BatchRun | None:
        """The cheapest of those within ten times the shortest time: one device with batch 1 would always win."""
        soonest = self.soonest
        near = [run for run in self.runs if soonest is not None and run.seconds <= 10 * soonest.seconds]
        return min(near, key=lambda run: (run.device_hours, run.seconds), default=None)

    def soonest_if(self, times: float) -> BatchRun | None:
        """The batch that would end soonest with a critical batch so many times as large."""
        known = self.goal
        goal = replace(known, least_steps=known.least_steps / times, critical_batch=known.critical_batch * times)
        return _least([replace(run, steps=goal.steps(run.batch)) for run in self.runs])

    @property
    def knee(self) -> int | None:
        """The smallest batch on most devices that has nearly the highest rate: larger ones use them no better."""
        most = max((run.devices for run in self.runs if run.outcome.best), default=0)
        rates = [(run.batch, run.batch * run.steps / run.seconds) for run in self.runs if run.devices == most]
        return min(
            (batch for batch, rate in rates if rate >= KNEE * max(rates, key=itemgetter(1))[1] > 0), default=None
        )

    def best_of_devices(self) -> dict[int, BatchRun]:
        """The soonest run of each number of devices."""
        ending = [run for run in self.runs if math.isfinite(run.seconds)]
        counts = sorted({run.devices for run in ending})
        return {
            count: min((run for run in ending if run.devices == count), key=lambda run: run.seconds) for count in counts
        }


def _least(runs: Sequence[BatchRun]) -> BatchRun | None:
    ending = [run for run in runs if math.isfinite(run.seconds)]
    return min(ending, key=lambda run: (run.seconds, run.batch), default=None)


def ladder(devices: int) -> tuple[int, ...]:
    """Ten batches, each twice the one before, around one to a few samples a device, that the devices can share."""
    first = devices // (devices & -devices)
    while first * 8 < devices:
        first *= 2
    return tuple(first << i for i in range(NUM_BATCHES))


def best_batch(question: Question, goal: BatchGoal, devices: tuple[int, ...], tell: Tell) -> BatchGoals:
    """All batches on the first number of devices; on the others those near the best."""
    runs: list[BatchRun] = []

    def run(asked: Question, batch: int) -> BatchRun:
        count = asked.cluster.num_devices
        tell(f"searching batch {batch} on {count} devices")
        made = outcome(f"batch {batch}", replace(asked, batch=batch))
        runs.append(BatchRun(batch=batch, devices=count, outcome=made, steps=goal.steps(batch)))
        return runs[-1]

    def climb(asked: Question) -> None:
        """All batches of the ladder, and more as long as the last is the best."""
        own = [run(asked, batch) for batch in ladder(asked.cluster.num_devices)]
        for _ in range(_MOST_MORE):
            best = _least(own)
            if best is None or best.batch != own[-1].batch:
                return
            own.append(run(asked, 2 * best.batch))

    def look_near(asked: Question, batch: int) -> None:
        """From a batch that is good on other devices, up and down as long as it gets better."""
        least = run(asked, batch).seconds
        halves = [batch >> bits for bits in range(1, (batch & -batch).bit_length())]
        for others in (halves, [batch << bits for bits in range(1, _MOST_MORE + 1)]):
            for each in others:
                before, least = least, min(least, run(asked, each).seconds)
                if least == before:
                    break

    try:
        for count in devices:
            asked, best = with_count(question, count), _least(runs)
            if best is None:
                climb(asked)
            else:  # the batch of these devices' ladder that is nearest to the best one
                first = ladder(count)[0]
                look_near(asked, first << max(0, round(math.log2(max(1.0, best.batch / first)))))
    except KeyboardInterrupt:
        return BatchGoals(goal=goal, runs=tuple(runs), is_interrupted=True)
    return BatchGoals(goal=goal, runs=tuple(runs))


def fewer(devices: int) -> tuple[int, ...]:
    """All devices, half and a quarter of them."""
    return (devices, *(devices // part for part in (2, 4) if devices % part == 0))
