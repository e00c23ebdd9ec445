"""Is the plan that search picks the fastest one here? This machine, two CPU ranks, four models, twelve plans each.

All plans that two ranks can run are enumerated: each technique with an axis, in each of its settings, with each of the
others switched on or off, in each microbatch. Of these run: the one picked, the best forecast with each axis in each of
its settings, and the pick's neighbours (the best forecast with each one setting changed). As in `cpu_forecast` the
machine is probed first and forecasts are made before anything runs; all plans of a model are built in the same ranks,
by the normal runtime, and take turns, a step at a time; turns that other processes disturbed do not count where enough
are left. The regret is the picked plan's median step over the fastest plan's, less 1.

Run: python -m benchmarks.cpu_regret [--quick] [--cluster C.cluster.json] [-o RESULT.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.cpu_forecast import (
    LEAST_TURNS,
    MOST_ROUNDS,
    NUM_RANKS,
    RATES,
    SEED,
    TIMEOUT_SECONDS,
    Turn,
    busy_seconds,
    in_turn,
    measured,
    probed,
    say,
)
from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode, load_artefact
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Choice, PerLayer, Technique, is_within, technique_named, technique_names
from meshwright.data.dataset import part_rows
from meshwright.launch.rank_pool import RankPool
from meshwright.models.presets import Config, DecoderConfig, ViTConfig, preset, profile_of
from meshwright.planner.search import search
from meshwright.run.model import open_config
from meshwright.runtime.loop import Samples
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.verify import parity

RESULTS = Path(__file__).parent / "results" / "cpu_regret.json"
GOAL, MOST_PLANS, QUICK_PLANS = 0.10, 12, 4
ALLOW = "rounded"

_GPT2 = replace(preset("gpt2-124m"), num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=1024)  # type: ignore[arg-type]
_MIXTRAL = replace(
    preset("mixtral-8x7b"),  # type: ignore[arg-type]
    num_layers=3,
    hidden_size=192,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=512,
    expert_ffn_size=384,
    vocab_size=2048,
    max_sequence=256,
    balance=0.01,
)
_VIT = ViTConfig(num_layers=6, hidden_size=192, num_heads=4, ffn_size=768, patch_size=8, image_size=64, num_classes=100)


class Task(NamedTuple):
    config: Config
    batch: int
    sequence: int


TASKS: dict[str, Task] = {
    "byte-3m": Task(preset("byte-3m"), 8, 256),
    "gpt2-like": Task(replace(_GPT2, vocab_size=8192, max_sequence=256), 8, 256),
    "vit": Task(_VIT, 32, 1),
    "mixtral-like": Task(_MIXTRAL, 8, 256),
}
Said = dict[str, tuple[Plan, Forecast]]
"""By the plan in words."""


def settings_of(name: str, profile: Profile, cluster: Cluster) -> list[Technique]:
    """A technique in every way its options allow; an axis takes all ranks, a policy all blocks."""
    kind: Any = technique_named(name)
    options = kind.options(profile, cluster)
    if not options:
        return []
    fields: dict[str, tuple[Any, ...]] = {}
    policies: tuple[str, ...] = ()
    for option in options:
        match option:
            case Axis(field, sizes):
                fields[field] = tuple(size for size in sizes if size == cluster.num_devices)
            case Choice(field, values):
                fields[field] = values
            case PerLayer(names):
                policies = names
    ways = [dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
    followed = [{each: profile.num_blocks * (each == one) for each in policies} for one in policies] or [{}]
    ways = [way for way in ways if is_within(kind.exactness_with(way), ALLOW)]
    return [kind(**way, **more) for way in ways for more in followed]


def enumerated(task: Task, profile: Profile, cluster: Cluster) -> Iterator[Plan]:
    """Everything that can run on all ranks."""
    dials = {name: settings_of(name, profile, cluster) for name in technique_names()}
    axes = [each for ways in dials.values() for each in ways if each.axis]
    others = [[None, *ways] for ways in dials.values() if ways and not ways[0].axis]
    for axis, *more in itertools.product(axes, *others):
        techniques = (axis, *(each for each in more if each is not None))
        for microbatch in (size for size in range(1, task.batch + 1) if task.batch % size == 0):
            plan = Plan(techniques=techniques, batch=task.batch, microbatch=microbatch)
            if not plan.check(profile, cluster) and not plan.check_sequence(task.sequence):
                yield plan


def family(plan: Plan) -> str:
    return next(str(each) for each in plan.techniques if each.axis)


def chosen(picked: tuple[Plan, Forecast], every: Said, most: int) -> Said:
    """The pick, the best of each family, and the pick's neighbours; at most so many."""
    by_forecast = sorted(every.values(), key=lambda each: each[1].step_seconds)
    heads: dict[str, tuple[Plan, Forecast]] = {}
    for each in by_forecast:
        heads.setdefault(family(each[0]), each)
    nearest: dict[str, tuple[Plan, Forecast]] = {}
    for each in sorted(by_forecast, key=lambda each: len(picked[0].diff(each[0]))):  # stable: by forecast among equals
        nearest.setdefault(" ".join(map(_setting, picked[0].diff(each[0]))), each)
    # A third of the places is for neighbours: what the search should tell apart best is what is nearest.
    first = [picked, *heads.values()][: most - most // 3]
    found: Said = {}
    for plan, said in (*first, *nearest.values(), *by_forecast):
        if len(found) < most:
            found.setdefault(str(plan), (plan, said))
    return found


def _setting(difference: str) -> str:
    """`microbatch` of "microbatch: 4 -> 2", `recompute` of "+ recompute(layers=4)"."""
    return difference.lstrip("+- ").split("(")[0].split(":")[0]


def samples_of(task: Task, plan: Plan, part: int, num_parts: int) -> Samples:
    config = task.config
    if isinstance(config, DecoderConfig):
        made = parity.random_samples(config.vocab_size, task.batch, task.sequence, masked=False)
        whole = made(0, 0, 1)
    else:
        assert isinstance(config, ViTConfig)
        images = torch.randn(task.batch, config.channels, config.image_size, config.image_size)
        labels = torch.randint(config.num_classes, (task.batch,))
        weights = torch.ones(task.batch)
        whole = Samples(inputs=images, targets=labels, weights=weights, num_tokens=float(task.batch))
    own = whole.rows(part_rows(plan.batch, part, num_parts, plan.shares))
    return replace(own, weights=own.weights.float())


def turn_of(plan: Plan, task: Task) -> Callable[[], Turn]:
    """One step, as long as on its slowest rank."""
    opened = open_config(task.config, "bench", SEED)
    session = parity.open_session(plan, opened, RATES, dtype="float32", device=torch.device("cpu"))
    samples = samples_of(task, plan, *session.mesh.part(plan.sample_axes))

    def turn() -> Turn:
        dist.barrier()
        busy, own, start = busy_seconds(), time.process_time(), time.perf_counter()
        session.loop.step(samples, RATES.lr)
        elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        spent = torch.tensor([time.process_time() - own], dtype=torch.float64)
        dist.all_reduce(spent)
        outside = busy_seconds() - busy - spent.item()
        return Turn(elapsed.item(), max(0.0, outside) / (elapsed.item() * NUM_RANKS))

    return turn


def take_turns(
    *, model: str, plans: Mapping[str, Any], least: int, rank: int, num_ranks: int, rendezvous: str
) -> dict[str, list[Turn]]:
    """Every turn, by plan. Rank 0 says when there are enough quiet ones."""
    parity.enter(rank, num_ranks, rendezvous)
    turns = {name: turn_of(decode(Plan, plan, "plan"), TASKS[model]) for name, plan in plans.items()}
    found = in_turn(turns, least, MOST_ROUNDS if least > 1 else 1)
    turns.clear()
    parity.leave()
    return found


def said_of(task: Task, profile: Profile, cluster: Cluster) -> Said:
    found: Said = {}
    for plan in enumerated(task, profile, cluster):
        said = forecast(profile, plan, cluster, sequence=task.sequence, optimizer=RATES, replays=False)
        if said.fits:
            found[str(plan)] = plan, said
    return found


def case_of(plan: Plan, said: Forecast, turns: Sequence[Turn]) -> dict[str, Any]:
    return {"plan": str(plan), "forecast_seconds": said.step_seconds, **measured(turns)}


def compare(model: str, cluster: Cluster, least: int, most: int) -> dict[str, Any]:
    task = TASKS[model]
    profile = profile_of(task.config, model)
    found = search(profile, cluster, batch=task.batch, sequence=task.sequence, optimizer=RATES, allow=ALLOW, top=50)
    if found.best is None:
        raise MeshwrightError(f"{model}: nothing fits on {cluster.name}.")
    every = {str(plan): (plan, said) for plan, said in found.ranked} | said_of(task, profile, cluster)
    plans = chosen(found.best, every, most)
    say(f"{model}: {len(plans)} of {len(every)} plans, {least} turns each; picked {found.best[0]}")
    arguments = {"model": model, "plans": {name: encode(plan) for name, (plan, _) in plans.items()}, "least": least}
    with RankPool(NUM_RANKS, threads_per_rank=1) as pool:
        function = "benchmarks.cpu_regret:take_turns"
        first, *_ = pool.run(function, arguments, NUM_RANKS, timeout_seconds=TIMEOUT_SECONDS)
    cases = [case_of(plan, said, [Turn(*turn) for turn in first[name]]) for name, (plan, said) in plans.items()]
    cases.sort(key=lambda case: case["measured_seconds"])
    picked = next(case for case in cases if case["plan"] == str(found.best[0]))
    fastest_said = min(case["forecast_seconds"] for case in cases)
    return {
        "model": model,
        "enumerated": len(every),
        "picked": picked["plan"],
        "fastest": cases[0]["plan"],
        "regret": picked["measured_seconds"] / cases[0]["measured_seconds"] - 1,
        "is_picked_fastest_forecast": picked["forecast_seconds"] <= fastest_said * (1 + 1e-9),
        "cases": cases,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: -row["regret"]):
        verdict = "kept" if row["regret"] <= GOAL else "MISSED"
        lines.append(f"{row['model']}: regret {row['regret']:.1%} (goal {GOAL:.0%}) {verdict}")
        if not row["is_picked_fastest_forecast"]:
            lines.append("  A plan that was enumerated has a faster forecast than the one picked.")
        for case in row["cases"]:
            said, real = case["forecast_seconds"], case["measured_seconds"]
            mark = "picked" if case["plan"] == row["picked"] else ""
            turns = f"{case['num_turns']}{'' if case['is_quiet'] else '!'}"
            lines.append(
                f"  {real * 1e3:7.0f} ms  forecast {said * 1e3:6.0f} ms {said / real - 1:+5.0%}  {turns:>3}  "
                f"{mark:<7}{case['plan']}"
            )
    worst = max(row["regret"] for row in rows)
    mean = statistics.mean(row["regret"] for row in rows)
    lines.append(f"{len(rows)} models: worst regret {worst:.1%}, mean {mean:.1%}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_regret")
    parser.add_argument("--quick", action="store_true", help="does it run at all? Few plans and turns, writes nothing")
    parser.add_argument("--only", default="", metavar="WORDS", help="models whose names contain this")
    parser.add_argument("--cluster", metavar="C.cluster.json", help="instead of probing now")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, metavar="RESULT.json")
    asked = parser.parse_args()
    start, outside = time.perf_counter(), None
    if asked.cluster:
        cluster = load_artefact(Cluster, asked.cluster)
    else:
        cluster, outside = probed(asked.quick)
        say(f"other processes had {outside:.0%} of the cores while the machine was probed")
    least, most = (1, QUICK_PLANS) if asked.quick else (LEAST_TURNS, MOST_PLANS)
    rows = [compare(model, cluster, least, most) for model in TASKS if asked.only in model]
    print(table(rows))
    say(f"{time.perf_counter() - start:.0f} s in all")
    if not asked.quick:
        about = {"torch": torch.__version__, "probe_outside_fraction": outside, "cluster": encode(cluster)}
        asked.output.write_text(json.dumps({**about, "goal": GOAL, "models": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["regret"] <= GOAL for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
