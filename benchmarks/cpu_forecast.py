"""Forecasts beside steps really run: this machine, two CPU ranks, twelve plans of two models each.

The machine is probed first, all forecasts are made next, and only then anything runs. Every rank is one process of one
thread. All plans of a model are built in the same ranks and take turns, one step at a time, the order turning, so that
whatever else the machine does meets all alike; a step takes as long as on its slowest rank, a plan's step is the
median. Turns in which other processes had more than a twentieth of the cores do not count, where enough are left
without them: a forecast is for the machine as it was probed. Where too few are, all count and the case is marked busy.
An error is |forecast / measured - 1|; Kendall's tau is of the order of the plans of one model.

Run: python -m benchmarks.cpu_forecast [--quick] [--cluster C.cluster.json] [-o RESULT.json]
     python -m benchmarks.cpu_forecast --again RESULT.json [--cluster C.cluster.json]    forecasts anew, runs nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.claims import Claim
from benchmarks.published_scores import kendall_tau
from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode, load_artefact
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.probe import probe
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.run.model import open_config
from meshwright.run.run_file import OptimizerConfig
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.verify import parity

RESULTS = Path(__file__).parent / "results" / "cpu_forecast.json"
NUM_RANKS, SEED, WARM_UP, TIMEOUT_SECONDS = 2, 0, 2, 1800
LEAST_TURNS, MOST_ROUNDS = 7, 24
QUIET_FRACTION = 0.05
"""Of the cores' time that other processes may have in a turn that counts."""
RATES = OptimizerConfig(lr=3e-4, clip=1.0)
BATCH, SEQUENCE = 8, 256
GOALS = {"median_error": 0.15, "kendall_tau": 0.7}

# 7M parameters, nearly all in matmuls; and 8M of which half are a vocabulary: its loss moves more than it multiplies.
MODELS = {
    "plain": DecoderConfig(
        num_layers=4, hidden_size=384, num_heads=6, num_kv_heads=6, ffn_size=1024, vocab_size=256, max_sequence=256
    ),
    "vocabulary": DecoderConfig(
        num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2, ffn_size=768, vocab_size=8192, max_sequence=256
    ),
}
# name -> (microbatch, techniques with their settings)
PLANS: dict[str, tuple[int, Mapping[str, Mapping[str, Any]]]] = {
    "replicate": (4, {"replicate": {"size": 2}}),
    "replicate, 4 microbatches": (1, {"replicate": {"size": 2}}),
    "replicate, recompute": (4, {"replicate": {"size": 2}, "recompute": {}}),
    "replicate, chunked_loss": (4, {"replicate": {"size": 2}, "chunked_loss": {}}),
    "shard 1": (2, {"shard": {"size": 2, "stage": 1}}),
    "shard 2": (4, {"shard": {"size": 2, "stage": 2}}),
    "shard 3, 2 microbatches": (2, {"shard": {"size": 2, "stage": 3}}),
    "tensor": (8, {"tensor": {"size": 2}}),
    "tensor, sequence": (4, {"tensor": {"size": 2, "sequence": True}}),
    "pipeline gpipe, 2 microbatches": (4, {"pipeline": {"size": 2, "schedule": "gpipe"}}),
    "pipeline 1f1b, 8 microbatches": (1, {"pipeline": {"size": 2, "schedule": "1f1b"}}),
    "context": (8, {"context": {"size": 2}}),
}


def plan_named(name: str) -> Plan:
    microbatch, settings = PLANS[name]
    made: list[Any] = [technique_named(each)(**fields) for each, fields in settings.items()]
    return Plan(techniques=tuple(made), batch=BATCH, microbatch=microbatch)


class Turn(NamedTuple):
    seconds: float
    outside_fraction: float
    """Of the cores' time that went to other processes."""


def turn_of(plan: Plan, config: DecoderConfig) -> Callable[[], Turn]:
    """One step, as long as on its slowest rank."""
    opened = open_config(config, "bench", SEED)
    session = parity.open_session(plan, opened, RATES, dtype="float32", device=torch.device("cpu"))
    make = parity.random_samples(config.vocab_size, BATCH, SEQUENCE, masked=False)
    made = make(0, *session.mesh.part(plan.sample_axes))
    samples = replace(made, weights=made.weights.float())

    def turn() -> Turn:
        dist.barrier()
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        session.loop.step(samples, RATES.lr)
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        spent = torch.tensor([time.process_time() - own], dtype=torch.float64)
        dist.all_reduce(spent)
        outside = busy_seconds() - busy - spent.item()
        return Turn(elapsed.item(), max(0.0, outside) / (elapsed.item() * (os.cpu_count() or 1)))

    return turn


def busy_seconds() -> float:
    """That the cores have worked, for whomever, since the machine started (proc(5): in hundredths)."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def take_turns(
    *, model: str, plans: Mapping[str, Any], least: int, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, list[Turn]]:
    """Every turn, by plan. Rank 0 says when there are enough quiet ones."""
    parity.enter(rank, num_ranks, rendezvous)
    turns = {name: turn_of(decode(Plan, plan, "plan"), MODELS[model]) for name, plan in plans.items()}
    found = in_turn(turns, least, MOST_ROUNDS)
    turns.clear()
    parity.leave()
    return found


def in_turn(turns: Mapping[str, Callable[[], Turn]], least: int, most_rounds: int) -> dict[str, list[Turn]]:
    """One turn of each, again and again, another first each time, until all have `least` quiet ones."""
    for _ in range(WARM_UP):
        for turn in turns.values():
            turn()
    found: dict[str, list[Turn]] = {name: [] for name in turns}
    names = list(turns)
    for number in range(most_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(turns[name]())
        wanted = torch.tensor([float(any(len(quiet(own)) < least for own in found.values()))])
        dist.broadcast(wanted, 0)
        if number + 1 >= least and not wanted.item():
            break
    return found


def measured(turns: Sequence[Turn]) -> dict[str, Any]:
    """Of the turns that count, or of all where too few do."""
    is_quiet = len(quiet(turns)) >= min(LEAST_TURNS, len(turns))
    seconds = sorted(quiet(turns) if is_quiet else [turn[0] for turn in turns])
    return {
        "measured_seconds": statistics.median(seconds),
        "measured_p10_seconds": seconds[len(seconds) // 10],
        "measured_p90_seconds": seconds[-1 - len(seconds) // 10],
        "num_turns": len(seconds),
        "is_quiet": is_quiet,
    }


def quiet(turns: Sequence[Turn]) -> list[float]:
    """Seconds of the turns that count."""
    return [seconds for seconds, outside_fraction in turns if outside_fraction <= QUIET_FRACTION]


def forecast_of(model: str, plan: Plan, cluster: Cluster) -> Forecast:
    profile = decoder_profile(MODELS[model], model)
    return forecast(profile, plan, cluster, sequence=SEQUENCE, optimizer=RATES)


def case_of(name: str, forecasted: Forecast, turns: Sequence[Turn]) -> dict[str, Any]:
    told = measured(turns)
    seconds = told["measured_seconds"]
    return {
        "name": name,
        **told,
        "turns": [[round(value, 6) for value in turn] for turn in turns],
        "forecast_seconds": forecasted.step_seconds,
        "forecast_low_seconds": forecasted.step_seconds_low,
        "forecast_high_seconds": forecasted.step_seconds_high,
        "seconds_by_origin": dict(forecasted.seconds_by_origin),
        "error": forecasted.step_seconds / seconds - 1,
        "is_inside": forecasted.step_seconds_low <= seconds <= forecasted.step_seconds_high,
    }


def report(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Worst first; one line for all."""
    errors = sorted(abs(case["error"]) for case in cases)
    taus = []
    for model in MODELS:
        own = [case for case in cases if case["name"].startswith(f"{model}: ")]
        tau = kendall_tau([case["forecast_seconds"] for case in own], [case["measured_seconds"] for case in own])
        taus += [] if tau is None else [tau]
    return {
        "median_error": statistics.median(errors),
        "p90_error": errors[int(0.9 * (len(errors) - 1))],
        "kendall_tau": statistics.mean(taus),
        "coverage": statistics.mean(case["is_inside"] for case in cases),
        "goals": GOALS,
        "cases": sorted(cases, key=lambda case: -abs(case["error"])),
    }


def compare(cluster: Cluster, least: int) -> dict[str, Any]:
    plans = {name: plan_named(name) for name in PLANS}
    forecasts = {(model, name): forecast_of(model, plan, cluster) for model in MODELS for name, plan in plans.items()}
    cases = []
    for model in MODELS:
        print(f"{model}: {len(plans)} plans, {least} turns each", file=sys.stderr, flush=True)
        encoded = {name: encode(plan) for name, plan in plans.items()}
        arguments = {"model": model, "plans": encoded, "least": least}
        with RankPool(NUM_RANKS, threads_per_rank=1) as pool:
            function = "benchmarks.cpu_forecast:take_turns"
            first, *_ = pool.run(function, arguments, NUM_RANKS, timeout_seconds=TIMEOUT_SECONDS)
        cases += [case_of(f"{model}: {name}", forecasts[model, name], first[name]) for name in plans]
    return report(cases)


def compare_again(earlier: Mapping[str, Any], cluster: Cluster) -> dict[str, Any]:
    """The steps of an earlier run beside forecasts of today."""
    cases = []
    for case in earlier["cases"]:
        model, name = case["name"].split(": ", 1)
        turns = [Turn(*turn) for turn in case["turns"]]
        cases.append(case_of(case["name"], forecast_of(model, plan_named(name), cluster), turns))
    return report(cases)


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{'case':<44}{'forecast':>10}{'measured':>10}{'error':>8}  inside  turns"]
    for case in found["cases"]:
        milli = [f"{case[name] * 1e3:.0f} ms" for name in ("forecast_seconds", "measured_seconds")]
        inside = "yes" if case["is_inside"] else "no"
        turns = f"{case['num_turns']}{'' if case['is_quiet'] else '!'}"
        lines.append(f"{case['name']:<44}{milli[0]:>10}{milli[1]:>10}{case['error']:>+8.1%}  {inside:<6}{turns:>7}")
    lines.append(
        f"median error {found['median_error']:.1%}, p90 {found['p90_error']:.1%}, "
        f"tau {found['kendall_tau']:.2f}, inside {found['coverage']:.0%}"
    )
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def probed(quick: bool) -> tuple[Cluster, float]:
    """The machine as it is now, and the share of its cores' time that others had meanwhile."""
    busy, own, start = busy_seconds(), _children_seconds(), time.perf_counter()
    cluster = probe(num_devices=NUM_RANKS, report=say, quick=quick)
    elapsed = time.perf_counter() - start
    outside = busy_seconds() - busy - (_children_seconds() - own)
    return cluster, max(0.0, outside) / (elapsed * (os.cpu_count() or 1))


def _children_seconds() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def measure(quick: bool = False) -> list[Claim]:
    cluster, _ = probed(quick)
    found = compare(cluster, 1 if quick else LEAST_TURNS)
    close = tuple(1 - abs(case["error"]) for case in found["cases"])
    what = f"forecasts of {len(close)} cases on 2 CPU ranks: one less the error of the step time"
    order = "their order within a model: Kendall's tau"
    return [
        Claim(name="forecast", what=what, unit="ratio", goal=1 - GOALS["median_error"], measured=close),
        Claim(name="ranking", what=order, unit="ratio", goal=GOALS["kendall_tau"], measured=(found["kendall_tau"],)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_forecast")
    parser.add_argument("--quick", action="store_true", help="does it run at all? Writes nothing")
    parser.add_argument("--cluster", metavar="C.cluster.json", help="instead of probing now")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, metavar="RESULT.json")
    parser.add_argument("--again", type=Path, metavar="RESULT.json", help="forecast anew, run nothing")
    asked = parser.parse_args()
    earlier = json.loads(asked.again.read_text(encoding="utf-8")) if asked.again else {}
    outside = earlier.get("probe_outside_fraction")
    if asked.cluster:
        cluster, outside = load_artefact(Cluster, asked.cluster), None
    elif earlier:
        cluster = decode(Cluster, earlier["cluster"], "cluster")
    else:
        cluster, outside = probed(asked.quick)
        say(f"other processes had {outside:.0%} of the cores while the machine was probed")
    least = 1 if asked.quick else LEAST_TURNS
    found = compare_again(earlier, cluster) if earlier else compare(cluster, least)
    print(table(found))
    if not asked.quick:
        about = {"torch": torch.__version__, "probe_outside_fraction": outside, "cluster": encode(cluster)}
        asked.output.parent.mkdir(parents=True, exist_ok=True)
        asked.output.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
