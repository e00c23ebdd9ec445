"""Claim: with one of four workers 5 times slower, servers that wait for three of four gradients keep the others' pace.

Measured: samples that updates were made of, per second: with all workers alike, with one whose forward passes take 5
times as long (always the same, which bounds ssp after `staleness` steps), and with any one so slow in every fifth step.
Delays stand for compute, since cores are few: workers of a tiny model sleep. Samples are counted until as many workers
as an update needs have ended their steps; of async while all are at work: until the first has.

Run: python -m benchmarks.stragglers [--steps 40] [--seconds 0.2] [--slow 5] [CASE ...]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

import torch

from benchmarks.loss_gap import SMALL
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.optimizers.pulled_weights import ServerExchange
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity

WORKERS, SEQUENCE = 4, 8
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all_reduce": ("replicate", {}),
    "sync": ("parameter_server", {}),
    "ssp s = 3": ("parameter_server", {"mode": "ssp", "staleness": 3}),
    "async": ("parameter_server", {"mode": "async"}),
    "backups = 1": ("parameter_server", {"backups": 1}),
}


def paced_job(
    *, plan: str, steps: int, seconds: float, slow: float, roams: bool, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, Any]:
    """When this worker's steps ended, and what the server has decided. `slow`: times the seconds of the last worker, or
    where it `roams` of any one in about every fifth step."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen = Plan.from_json(plan)
    opened = open_config(SMALL, "bytes", 0)
    rates = decode(OptimizerConfig, {"name": "sgd", "lr": 1e-3}, "optimizer")
    session = parity.open_session(chosen, opened, rates, dtype="float32", device=torch.device("cpu"))
    servers = [each for each in session.build.exchanges if isinstance(each, ServerExchange)]
    samples = parity.random_samples(SMALL.vocab_size, chosen.batch, SEQUENCE)
    drawn, step = random.Random(0), 0
    any_rank = [*range(num_ranks), *[-1] * (4 * num_ranks)]
    slow_ranks = [drawn.choice(any_rank) if roams else num_ranks - 1 for _ in range(steps + 1)]

    def wait(kind: str) -> None:
        if kind == "forward":
            time.sleep(seconds * (slow if slow_ranks[step] == rank else 1))

    session.loop.step(parity.own_samples(session, samples, 0), rates.lr)  # what is lazy happens here
    session.build.on_action.append(wait)
    torch.distributed.barrier()
    start, ended = time.monotonic(), []
    for step in range(1, steps + 1):
        session.loop.step(parity.own_samples(session, samples, step), rates.lr)
        ended.append(time.monotonic() - start)
    record = servers[0].read(record=True) if servers else []
    parity.leave()
    return {"ended": ended, "record": record}


def rate(case: str, pool: RankPool, given: argparse.Namespace, slow: float, *, roams: bool = False) -> float:
    """Samples per second, of one a worker and step; those of the first step, which is not timed, are left out."""
    name, settings = CASES[case]
    plan = Plan(techniques=(technique_named(name)(size=WORKERS, **settings),), batch=WORKERS, microbatch=1)
    question = {"plan": plan.to_json(), "steps": given.steps, "seconds": given.seconds, "slow": slow, "roams": roams}
    answers = pool.run("benchmarks.stragglers:paced_job", question, WORKERS, timeout_seconds=600)
    ended, ends = [answer["ended"] for answer in answers], sorted(answer["ended"][-1] for answer in answers)
    if settings.get("mode") == "async":  # each gradient counts
        return sum(moment <= ends[0] for each in ended for moment in each) / ends[0]
    end = ends[WORKERS - 1 - settings.get("backups", 0)]
    if name == "replicate":
        return given.steps * WORKERS / end
    updates = [about[2] for about in answers[0]["record"] if about[0] == "update" and about[1] > 1]
    return sum(map(len, updates)) / end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("cases", nargs="*", metavar="CASE", default=list(CASES))
    given = parser.parse_args()
    found = {}
    print(f"{'':14}{'alike':>10}{'one slow':>18}{'any one at times':>20}   (samples/s, share of all_reduce alike)")
    with RankPool(WORKERS) as pool:
        base = rate("all_reduce", pool, given, 1.0)
        for case in given.cases:
            alike = base if case == "all_reduce" else rate(case, pool, given, 1.0)
            one, roaming = (rate(case, pool, given, given.slow, roams=roams) for roams in (False, True))
            found[case] = {"alike": alike, "one slow": one, "roaming": roaming}
            shares = f"{one:10.2f} ({one / base:4.0%}){roaming:12.2f} ({roaming / base:4.0%})"
            print(f"{case:14}{alike:10.2f}{shares}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
