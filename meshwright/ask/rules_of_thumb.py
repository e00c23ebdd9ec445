"""Rules of thumb that people plan with, computed from a plan, each with its source and its limit.

They are for comparison: the search itself uses none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.ask.question import Question
from meshwright.core.units import pretty_bytes, pretty_rate, pretty_seconds
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import ScoredPlan

EFFICIENCY = 0.9
GRADIENT_BYTES = 4
LIMITS = {
    "Goyal": "shown for images up to 8192 a batch, from the old rate to the new one over the first 5 epochs",
    "Malladi": "with 1 - beta1 and 1 - beta2 twice as large and epsilon divided by the root of 2; a warm-up as before",
}
ZOU = "Zou et al. 2017, Distributed Training Large-Scale Deep Architectures"


def servers_for(gradient_bytes: float, workers: int, bytes_per_second: float, compute_seconds: float) -> int:
    """Parameter servers whose links take gradients in and weights out while workers compute."""
    return max(1, math.ceil(2 * gradient_bytes * workers / (bytes_per_second * compute_seconds)))


def overhead_for(efficiency: float, workers: int) -> float:
    """Most of a worker's overhead, as a share of its compute, that each further worker may add."""
    return (1 - efficiency) / (efficiency * (workers - 1))


def workers_for(efficiency: float, overhead: float) -> float:
    """Most workers, where each further one adds such a share: the same rule the other way round."""
    return 1 + (1 - efficiency) / (efficiency * overhead)


def worker_rules(question: Question, scored: ScoredPlan) -> Iterator[str]:
    """How many servers and workers, for the replicas and islands of a plan."""
    plan, profile, by_cause = scored.plan, question.profile, scored.forecast.seconds_by_cause
    workers, cluster = plan.num_replicas, question.cluster
    computes = sum(by_cause.get(cause, 0.0) for cause in ("compute", "launch"))
    waits = sum(by_cause.get(cause, 0.0) for cause in ("inner", "outer"))
    if workers < 2 or computes <= 0:
        return
    link = cluster.outer if cluster.num_nodes > 1 else cluster.inner
    size, rate = GRADIENT_BYTES * profile.num_trained_params, link.bytes_per_second
    servers = servers_for(size, workers, rate, computes)
    have = f"{pretty_bytes(size)} of gradients in float32 x {workers} workers"
    yield (
        f"Servers that would hide their traffic: at least {servers} = 2 x {have} / ({pretty_rate(rate, 'B/s')} x "
        f"{pretty_seconds(computes)} of compute) ({ZOU}). Limit: servers share the load evenly; latency is not counted."
    )
    most, overhead = overhead_for(EFFICIENCY, workers), waits / computes / (workers - 1)
    words = f"now {overhead:.2g}" + (
        f", good for {math.floor(min(workers_for(EFFICIENCY, overhead), 1e9))} workers" if overhead else ""
    )
    yield (
        f"For {EFFICIENCY:.0%} efficiency of {workers} workers, messages that show may take {most:.2g} of the compute "
        f"for each further worker; {words} ({ZOU}). Limit: overhead that grows in proportion to the workers; that of a "
        "ring hardly does."
    ).replace("%", " %")


def batch_rules(question: Question, scored: ScoredPlan) -> Iterator[str]:
    """Batch and learning rate where the workers become twice as many."""
    used, batch, workers = question.optimizer, scored.plan.batch, scored.plan.num_replicas
    each = batch / workers
    yield (
        f"Strong scaling, from {workers} to {2 * workers} workers: the batch stays {batch}, {each / 2:g} samples each, "
        "and the learning rate stays. Limit: small shares leave devices idle, and messages stay as large."
    )
    if not isinstance(used, OptimizerConfig) or used.rule.batch_exponent is None:
        return
    times, source = 2**used.rule.batch_exponent, used.rule.batch_source
    limit = next((words for name, words in LIMITS.items() if name in source), "as published")
    yield (
        f"Weak scaling, from {workers} to {2 * workers} workers: batch {2 * batch}, {each:g} samples each, {times:.3g} "
        f"times the learning rate with {used.name}, {used.lr:g} -> {used.lr * times:.3g} ({source}). Limit: up to the "
        f"critical batch; {limit}."
    )
