"""Time to a loss over slow links: islands beside replicas, forecast and measured, and what the search picks.

Hosts are network namespaces joined by a bridge; what leaves a host is limited to so many bytes a second (`tc`, token
bucket). The 0.9 M decoder of `benchmarks/loss_gap.py`, 512 tokens a step, AdamW at a constant rate, one thread a rank.

1. Over 10 MB/s each plan trains until its held-out loss is that of replicas after 320 steps. Seconds are those of the
   steps, evaluations left out; bytes are those of the interface, beside the priced ones.
2. Six scenarios x plans: seconds of a step (whole periods, the least of the blocks, for other programs only add to it)
   times the steps of 1, which the link does not change: arithmetic is the same. What `--allow approximate` picks is
   among the plans.

Where other programs use the cores too, seconds are also given without what the kernel says that a rank's computing
thread waited for a core (of each step, the most of any rank): what is left is nearer to a machine of one's own.

Forecasts are made of the machine as it was probed, with the limit as the link between nodes.

Run (as root): python -m benchmarks.slow_links [--parts reach scenarios] [--quick] [--cluster C.cluster.json]
     python -m benchmarks.slow_links --render      the table in docs/search.md from the stored results
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from benchmarks.cpu_forecast import RESULTS as PROBED
from benchmarks.loss_gap import BATCH, MODEL, bytes_of_the_package, samples
from meshwright.ask.question import Question
from meshwright.ask.stragglers import Stragglers, forecast_stragglers
from meshwright.core.cluster import Cluster, Link
from meshwright.core.codec import decode, encode, load_artefact
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.ops.traffic import TrafficRecorder
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.simulator.pricing import price
from meshwright.verify import parity

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "slow_links.json"
PAGE = ROOT / "docs" / "search.md"
BEGIN, END = "<!-- benchmarks.slow_links: begin -->\n", "<!-- benchmarks.slow_links: end -->\n"
SAMPLES, TOKENS = BATCH // 2, 64
RATES = OptimizerConfig(lr=2e-3, warmup=20, schedule="constant")
EVALUATED, EVALUATE_EVERY = 8, 16
TARGET_STEPS, MOST_STEPS = 320, 768
LATENCY = 2e-4
"""Of a message between two hosts here, in seconds."""
BANNED = ("precision", "compile", "lowbit_optimizer", "chunked_loss", "pipeline.schedule=async")
"""Other arithmetic, which would change the loss, and what saves memory."""
MB = 1e6


def _islands(every: int, **settings: Any) -> dict[str, Any]:
    return {"name": "local_steps", "size": 2, "every": every, "outer_momentum": 0.5, **settings}


REPLICAS, INT8 = {"name": "replicate", "size": 2}, {"name": "compress_gradients", "codec": "int8"}
PLANS: dict[str, list[dict[str, Any]]] = {
    "all_reduce": [REPLICAS],
    "all_reduce, int8": [REPLICAS, INT8],
    "islands, H = 16": [_islands(16)],
    "islands, H = 64": [_islands(64)],
    "islands, H = 256": [_islands(256)],
    "streaming, H = 32": [_islands(32, fragments=4, overlap=2, blend=0.5)],
    "streaming int8, H = 32": [_islands(32, fragments=4, overlap=2, blend=0.5), INT8],
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    bytes_per_second: float
    """Of a host, each way; 0: no limit."""
    devices_each: int = 1
    stragglers: Stragglers | None = None


SCENARIOS = {
    "2 MB/s": Scenario(bytes_per_second=2 * MB),
    "10 MB/s": Scenario(bytes_per_second=10 * MB),
    "50 MB/s": Scenario(bytes_per_second=50 * MB),
    "no limit": Scenario(bytes_per_second=0),
    "10 MB/s, stragglers 0.1x2": Scenario(bytes_per_second=10 * MB, stragglers=Stragglers(share=0.1, factor=2.0)),
    "10 MB/s, two islands of two": Scenario(bytes_per_second=10 * MB, devices_each=2),
}
PAYLOAD = 1448 / 1514
"""Of what goes over a link: TCP in frames of 1,500 bytes."""
UNLIMITED_RATE = 1e9
"""Of the link between hosts where nothing limits it: copies in one memory."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do next."""

    plan: Mapping[str, Any]
    steps: int
    warm_up: int = 0
    """Steps before, which are not timed."""
    first: int = 0
    """Updates that count as made before: says when islands meet."""
    evaluate_every: int = 0
    target: float = 0.0
    """Held-out loss at which to stop."""
    bytes_per_second: float = 0.0
    late_every: int = 0
    late_seconds: float = 0.0
    """A rank sleeps so long before every so-manieth of its steps, each rank before another."""
    records: bool = False
    """Whether to record every collective."""
    interface: str = ""
    """That leads to the other hosts; empty: there are none."""


def limit(interface: str, bytes_per_second: float) -> None:
    """What may leave this host. The queue takes what connections send before they know the rate: nothing is lost."""
    words = ["tc", "qdisc", "del", "dev", interface, "root"]
    if bytes_per_second:
        waiting = max(262_144, int(bytes_per_second * 0.025))
        words = ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", f"{8 * bytes_per_second:.0f}bit"]
        words += ["burst", str(max(16_384, int(bytes_per_second * 0.001))), "limit", str(waiting)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode and bytes_per_second:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def sent_bytes(interface: str) -> int:
    """By this host, with all headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if interface and name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def waited_seconds() -> float:
    """That this process's first thread, which computes, was ready to run and had no core, so far. In collectives it
    sleeps."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def train_job(*, job: Mapping[str, Any], rank: int, num_ranks: int, rendezvous: str) -> dict[str, Any]:
    """Train as a job says. Seconds and bytes sent of each timed step, held-out losses by step, traffic."""
    given = Job(**job)
    if given.interface and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        limit(given.interface, given.bytes_per_second)
    torch.set_num_threads(1)
    parity.enter(rank, num_ranks, rendezvous)
    plan = decode(Plan, dict(given.plan), "plan")
    opened = open_config(MODEL, "bytes", 0)
    session = parity.open_session(plan, opened, RATES, dtype="float32", device=torch.device("cpu"))
    session.loop.optimizer.num_steps = given.first
    text = bytes_of_the_package()
    cut = len(text) * 19 // 20
    part, num_parts = session.mesh.part(plan.sample_axes)
    rows = slice(part * plan.batch // num_parts, (part + 1) * plan.batch // num_parts)
    recorder = TrafficRecorder(session.mesh.axis_of_group())
    answer: dict[str, Any] = {"seconds": [], "waited": [], "sent": [], "losses": []}
    for step in range(given.warm_up + given.steps):
        batch = samples(text[:cut], step, plan.batch, "cpu").rows(rows)
        is_late = given.late_every and step % given.late_every == 3 * rank % given.late_every
        if step == given.warm_up and given.records:
            recorder.__enter__()
        before, waited, start = sent_bytes(given.interface), waited_seconds(), time.perf_counter()
        if is_late:
            time.sleep(given.late_seconds)
        session.loop.step(batch, RATES.lr_at(step, MOST_STEPS))
        if step >= given.warm_up:
            answer["seconds"].append(round(time.perf_counter() - start, 6))
            answer["waited"].append(round(waited_seconds() - waited, 6))
            answer["sent"].append(sent_bytes(given.interface) - before)
        if given.evaluate_every and (step + 1) % given.evaluate_every == 0:
            held_out = (samples(text[cut:], at, plan.batch, "cpu").rows(rows) for at in range(EVALUATED))
            total, tokens, _ = session.loop.evaluate(held_out)
            answer["losses"].append([step + 1, total / tokens])
            if total / tokens <= given.target:
                break
    if given.records:
        recorder.__exit__(None, None, None)
    most = torch.tensor(answer["waited"], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    answer["waited"] = most.tolist()
    answer["traffic"] = sorted([*key, count] for key, count in recorder.traffic.items())
    parity.leave()
    return answer


def rank_main(path: Path) -> None:
    """A rank in its host: all jobs, one after the other."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # the kernel shares out cores by sessions first: each rank has its own, as from `mw train`
    asked, rank = json.loads(path.read_text()), int(os.environ["RANK"])
    for number, job in enumerate(asked["jobs"]):
        meeting = str(path.parent / f"meeting-{number}")
        found = train_job(job=job, rank=rank, num_ranks=asked["num_ranks"], rendezvous=meeting)
        if rank == 0:
            with (path.parent / "answers.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")


def run_jobs(jobs: Sequence[Job], devices_each: int, timeout_seconds: float) -> list[dict[str, Any]]:
    """On two hosts, made for them and removed whatever happens: what rank 0 answers."""
    sys.path += [str(ROOT / "tests" / "launch")]
    namespaces = importlib.import_module("namespaces")
    if reason := namespaces.why_there_are_none():
        raise SystemExit(f"slow_links: no network namespaces can be made here ({reason}). Run it as root.")
    with tempfile.TemporaryDirectory(prefix="meshwright-links-") as made, namespaces.hosts_made(2, Path(made)) as hosts:
        path = Path(made) / "jobs.json"
        asked = [asdict(replace(job, interface="eth0")) for job in jobs]
        path.write_text(json.dumps({"jobs": asked, "num_ranks": 2 * devices_each}))
        ranks = []
        for rank in range(2 * devices_each):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank % devices_each), "GLOO_SOCKET_IFNAME": "eth0"}
            ranks.append(hosts.start(rank // devices_each, "benchmarks.slow_links", "--rank", str(path), **place))
        deadline = time.monotonic() + timeout_seconds
        for rank in ranks:
            output, _ = rank.communicate(timeout=max(1.0, deadline - time.monotonic()))
            if rank.returncode:
                raise RuntimeError(output[-3000:])
        return [json.loads(line) for line in (Path(made) / "answers.jsonl").read_text().splitlines()]


def plan_of(techniques: Sequence[Mapping[str, Any]], devices_each: int) -> Plan:
    """Two islands or replicas; more devices of a host share the work of theirs."""
    named, ranks = [dict(each) for each in techniques], 2 * devices_each
    if devices_each > 1 and named[0]["name"] == REPLICAS["name"]:
        named[0]["size"] = ranks
    elif devices_each > 1:
        named.append(REPLICAS | {"size": devices_each})
    made: list[Any] = [technique_named(each.pop("name"))(**each) for each in named]
    return Plan(techniques=tuple(made), batch=SAMPLES, microbatch=SAMPLES // ranks)


def cluster_of(probed: Cluster, scenario: Scenario) -> Cluster:
    """The probed machine as two nodes. The limit is a host's, whose devices share it; so are the cores."""
    count = scenario.devices_each
    rate = (scenario.bytes_per_second * PAYLOAD or UNLIMITED_RATE) / count
    outer = Link(bytes_per_second=rate, latency_seconds=LATENCY, name="the limited link")
    device = replace(
        probed.device,
        flops_per_second={dtype: each / count for dtype, each in probed.device.flops_per_second.items()},
        memory_bytes_per_second=probed.device.memory_bytes_per_second / count,
        launch_seconds=probed.device.launch_seconds * count,
        memory_bytes=probed.device.memory_bytes // count,
    )
    return replace(probed, device=device, devices_per_node=count, num_nodes=2, outer=outer)


def exchange_words(plan: Plan) -> str:
    """What of a plan changes what is learnt: the same for any other mesh around it."""
    kept = [each for each in plan.techniques if each.keeps_islands or each.codes_sums]
    return " + ".join(map(str, kept))


def priced_sent(plan: Plan) -> float:
    """Bytes a step that a host of one device sends to the other, by the price."""
    total = 0.0
    for each in price(mw.model(MODEL).profile, plan, sequence=TOKENS).collectives:
        size = plan.mesh[each.axis]
        total += each.repeat * each.bytes * (size - 1) / size * (2 if each.kind == "all_reduce" else 1)
    return total


def reach(probed: Cluster, quick: bool) -> dict[str, Any]:
    """Every plan until it has the loss of replicas after so many steps, over 10 MB/s."""
    scenario = SCENARIOS["10 MB/s"]
    cluster, rate = cluster_of(probed, scenario), scenario.bytes_per_second
    steps, most, every = (32, 64, 16) if quick else (TARGET_STEPS, MOST_STEPS, EVALUATE_EVERY)
    plans = {name: plan_of(techniques, 1) for name, techniques in PLANS.items()}

    def jobs_of(name: str, target: float) -> list[Job]:
        common = {"plan": encode(plans[name]), "bytes_per_second": rate}
        train = Job(**common, steps=most if target else steps, evaluate_every=every, target=target)
        return [train, Job(**common, steps=period_of(plans[name]), warm_up=2, records=True)]

    first, *others = plans
    answers = run_jobs(jobs_of(first, 0.0), 1, 900)
    target = answers[0]["losses"][-1][1]
    print(f"{first}: {steps} steps, {sum(answers[0]['seconds']):.1f} s, loss {target:.4f}", flush=True)
    answers += run_jobs([job for name in others for job in jobs_of(name, target)], 1, 1800)
    rows = {}
    for name, found, seen in zip(plans, answers[::2], answers[1::2], strict=True):
        plan, (last, loss) = plans[name], found["losses"][-1]
        said = mw.forecast(mw.model(MODEL), plan, cluster, sequence=TOKENS, optimizer=RATES).step_seconds
        rows[name] = {
            "steps": last if loss <= target else None,
            "loss": loss,
            "seconds": sum(found["seconds"]),
            "undisturbed_seconds": sum(undisturbed(found)),
            "step_seconds": sum(undisturbed(found)) / last,
            "forecast_step_seconds": said,
            "forecast_seconds": said * steps * plan.steps_factor.mid,
            "factor": plan.steps_factor._asdict(),
            "sent_a_step": sum(seen["sent"]) / len(seen["sent"]),
            "recorded_a_step": _passed(seen["traffic"]) / len(seen["sent"]),
            "priced_a_step": priced_sent(plan),
            "losses": [[at, round(loss, 5)] for at, loss in found["losses"]],
        }
        print(name, {key: value for key, value in rows[name].items() if key not in ("losses", "factor")}, flush=True)
    return {"target_loss": target, "rows": rows}


def undisturbed(found: Mapping[str, Any]) -> list[float]:
    """Seconds of each step without waits for a core."""
    return [max(0.0, took - waited) for took, waited in zip(found["seconds"], found["waited"], strict=True)]


def period_of(plan: Plan) -> int:
    """Steps after which a plan does the same again."""
    return max((int(getattr(each, "every", 1)) for each in plan.techniques), default=1)


def _passed(traffic: Sequence[Sequence[Any]]) -> float:
    """Bytes that one of two ranks sends in collectives that were seen."""
    return sum(size * count * (1.0 if kind == "all_reduce" else 0.5) for kind, _, size, count in traffic)


def picked(cluster: Cluster) -> tuple[list[Plan], list[str]]:
    """The plan that the search picks, the best one of the other kind, and what it says of them."""
    answer = mw.plan(
        mw.model(MODEL), cluster, batch=SAMPLES, sequence=TOKENS, optimizer=RATES, allow="approximate", ban=BANNED
    )
    assert answer.best is not None, "nothing fits"
    advice = answer.exchange
    plans = [answer.best[0]] + ([advice.other.plan] if advice is not None and advice.other is not None else [])
    return plans, advice.lines() if advice is not None else []


def candidates(scenario: Scenario, cluster: Cluster) -> tuple[dict[str, Plan], str, list[str]]:
    """Plans by name, the name of the one that is picked, what the search says."""
    named = {name: plan_of(techniques, scenario.devices_each) for name, techniques in PLANS.items()}
    plans, lines = picked(cluster)
    pick = ""
    for plan in plans:
        name = next((name for name, other in named.items() if other == plan), "")
        name = name or ", ".join(map(str, plan.techniques)) + f", microbatch {plan.microbatch}"
        named[name], pick = plan, pick or name
    return named, pick, lines


def step_forecast(plan: Plan, cluster: Cluster, scenario: Scenario) -> float:
    profile = mw.model(MODEL).profile
    if scenario.stragglers is None:
        return mw.forecast(mw.model(MODEL), plan, cluster, sequence=TOKENS, optimizer=RATES).step_seconds
    question = Question(
        profile=profile, cluster=cluster, batch=SAMPLES, sequence=TOKENS, allow="approximate", optimizer=RATES
    )
    return forecast_stragglers(scenario.stragglers, plan, question).step_seconds


MOST_TIMED, WARM_UP = 64, 4


def job_of(plan: Plan, scenario: Scenario, said: float, compute_seconds: float, quick: bool) -> Job:
    """Whole periods; of a long one the steps around its meeting. Without, no longer than some seconds."""
    period = period_of(plan)
    steps = max(32, min(period, MOST_TIMED)) if period > 1 else min(32, max(10, round(4.0 / said)))
    late: dict[str, Any] = {}
    if scenario.stragglers is not None:
        late["late_every"] = round(1 / scenario.stragglers.share)
        late["late_seconds"] = (scenario.stragglers.factor - 1) * compute_seconds
        steps = -(-steps // late["late_every"]) * late["late_every"] if period == 1 else steps
    steps = min(steps, 16) if quick else steps
    first = max(0, period - steps // 2 - WARM_UP) if period > steps else 0
    return Job(
        plan=encode(plan), steps=steps, warm_up=WARM_UP, first=first, bytes_per_second=scenario.bytes_per_second, **late
    )


def mean_step(job: Job, period: int, seconds: Sequence[float]) -> float:
    """Over a period. Of a long one only the steps around its meeting were timed."""
    if period <= len(seconds):
        return sum(seconds) / len(seconds)
    at = period - job.first - job.warm_up - 1
    others = [*seconds[:at], *seconds[at + 1 :]]
    return (seconds[at] + (period - 1) * sum(others) / len(others)) / period


def measure_scenarios(probed: Cluster, names: Sequence[str], *, rounds: int, quick: bool) -> dict[str, Any]:
    """Each plan's step in each scenario, and the forecast beside it."""
    found: dict[str, Any] = {}
    alone = Scenario(bytes_per_second=0)
    compute_seconds = step_forecast(plan_of([REPLICAS], 1), cluster_of(probed, alone), alone)
    for name in sorted(names, key=lambda name: name != "no limit"):
        scenario = SCENARIOS[name]
        cluster = cluster_of(probed, scenario)
        plans, pick, lines = candidates(scenario, cluster)
        said = {key: step_forecast(plan, cluster, scenario) for key, plan in plans.items()}
        jobs = [job_of(plan, scenario, said[key], compute_seconds, quick) for key, plan in plans.items()]
        answers = run_jobs(jobs * rounds, scenario.devices_each, 1200)
        rows = {
            key: row_of(plan, jobs[at], said[key], answers[at :: len(plans)])
            for at, (key, plan) in enumerate(plans.items())
        }
        if name == "no limit":
            compute_seconds = rows["islands, H = 256"]["step_seconds"]
        found[name] = {"rows": rows, "picked": pick, "lines": lines}
        for key, row in rows.items():
            print(f"{name:30}{key:30}{row}{'  <- picked' if key == pick else ''}", flush=True)
    return found


def row_of(plan: Plan, job: Job, said: float, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`answers`: of each block."""
    return {
        "step_seconds": min(mean_step(job, period_of(plan), undisturbed(each)) for each in answers),
        "wall_step_seconds": min(mean_step(job, period_of(plan), each["seconds"]) for each in answers),
        "forecast_step_seconds": said,
        "factor": plan.steps_factor.mid,
        "exchange": exchange_words(plan),
    }


def judge(results: dict[str, Any]) -> None:
    """Seconds to the loss, measured and forecast, and how much later than the soonest plan the picked one has it."""
    reached = results["reached"]["rows"]
    steps = {exchange_words(plan_of(PLANS[name], 1)): row["steps"] for name, row in reached.items()}
    for each in results["scenarios"].values():
        for row in each["rows"].values():
            needed = steps[row["exchange"]]
            row["seconds"] = None if needed is None else row["step_seconds"] * needed
            row["forecast_seconds"] = row["forecast_step_seconds"] * row["factor"] * steps[""]
        each |= regret_of(each["rows"], each["picked"])


def regret_of(rows: Mapping[str, Mapping[str, Any]], pick: str) -> dict[str, Any]:
    """How much later than the soonest plan the picked one has the loss."""
    seconds = {name: row["seconds"] for name, row in rows.items() if row["seconds"] is not None}
    best = min(seconds, key=lambda name: seconds[name])
    return {"best": best, "regret": seconds[pick] / seconds[best] - 1 if pick in seconds else None}


def render(results: Mapping[str, Any]) -> str:
    """The tables of the page."""
    reached = results["reached"]
    lines = [
        *textwrap.wrap(
            f"Measured with `python -m benchmarks.slow_links` on {results['date']}, {results['note']}: two hosts, a "
            "decoder of 0.9 M parameters and 512 tokens a step, until its held-out loss is "
            f"{reached['target_loss']:.3f}. `alone`: without what ranks waited for a core. Over 10 MB/s:",
            width=120,
        ),
        "",
        "| exchange | steps | seconds | alone | forecast | a step, alone | forecast | sent a step | priced |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in reached["rows"].items():
        is_known = row["undisturbed_seconds"] is not None
        alone = (f"{row['undisturbed_seconds']:.1f} s", f"{row['step_seconds'] * 1e3:.1f} ms") if is_known else ("", "")
        took = f"{row['steps'] or 'never'} | {row['seconds']:.1f} s | {alone[0]}"
        step = f"{alone[1]} | {row['forecast_step_seconds'] * 1e3:.1f} ms"
        sent = f"{row['sent_a_step'] / 1e3:.1f} kB | {row['priced_a_step'] / 1e3:.1f} kB"
        lines.append(f"| {name} | {took} | {row['forecast_seconds']:.1f} s | {step} | {sent} |")
    if results["scenarios"]:
        lines += ["", "| scenario | picked | to the loss | soonest measured | to the loss | later by |"]
        lines += ["|---|---|---:|---|---:|---:|"]
    for name, each in results["scenarios"].items():
        pick, best = each["rows"][each["picked"]], each["rows"][each["best"]]
        took = "never" if pick["seconds"] is None else f"{pick['seconds']:.1f} s"
        later = "never there" if each["regret"] is None else f"{each['regret']:.0%}".replace("%", " %")
        lines.append(f"| {name} | {each['picked']} | {took} | {each['best']} | {best['seconds']:.1f} s | {later} |")
    return "\n".join(lines) + "\n"


def write_page(results: Mapping[str, Any]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + render(results) + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("reach", "scenarios"), default=["reach", "scenarios"])
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cluster", metavar="C.cluster.json", help="instead of the probe in cpu_forecast.json")
    parser.add_argument("--note", default="on a machine without other work", help="about the machine, for the table")
    parser.add_argument("--quick", action="store_true", help="does it run at all? Writes nothing")
    parser.add_argument("--render", action="store_true", help="the table from stored results")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.rank)
        return
    probed = load_artefact(Cluster, given.cluster) if given.cluster else stored_probe()
    found: dict[str, Any] = {}
    if not given.render:
        found = {"date": str(datetime.datetime.now(datetime.UTC).date()), "note": given.note, "cluster": encode(probed)}
        if "reach" in given.parts:
            found["reached"] = reach(probed, given.quick)
        if "scenarios" in given.parts:
            found["scenarios"] = measure_scenarios(probed, given.only, rounds=given.rounds, quick=given.quick)
    if given.quick:
        return
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    scenarios = results.get("scenarios", {}) | found.get("scenarios", {})
    results |= found | {"scenarios": {name: scenarios[name] for name in SCENARIOS if name in scenarios}}
    if "reached" in results:
        judge(results)
        write_page(results)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def stored_probe() -> Cluster:
    return decode(Cluster, json.loads(PROBED.read_text(encoding="utf-8"))["cluster"], "cluster")


if __name__ == "__main__":
    main()
