"""A machine whose truth is known: runs on it are made by the simulator, and learning must find what was changed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.core.cluster import Cluster, Device
from meshwright.core.errors import MeshwrightError
from meshwright.core.ledger import Entry, Measured, Predicted, append
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.from_runs import learn, learn_one
from meshwright.machine.named_clusters import cluster
from meshwright.machine.probe import machine_name
from meshwright.models.presets import profile
from meshwright.simulator.forecast import Forecast, forecast

HERE = "made; 2 cores; 0 GPUs"
LAPTOP = cluster("2xlaptop")
PROFILE = profile("byte-3m")
NO_NOISE = random.Random(0)


def plan_of(microbatch: int, **settings: dict[str, Any]) -> Plan:
    made: list[Any] = [technique_named(name)(**fields) for name, fields in settings.items()]
    return Plan(techniques=tuple(made), batch=8, microbatch=microbatch)


PLANS = [
    plan_of(4, replicate={"size": 2}),
    plan_of(1, replicate={"size": 2}),
    plan_of(2, shard={"size": 2}),
    plan_of(8, tensor={"size": 2}),
    plan_of(4, tensor={"size": 2}),
    plan_of(2, pipeline={"size": 2}),
    plan_of(4, replicate={"size": 2}, recompute={}),
]


def told(plan: Plan, machines: Cluster, sequence: int = 128) -> Forecast:
    return forecast(PROFILE, plan, machines, sequence=sequence)


def slower(machines: Cluster, *, compute: float = 1.0, inner: float = 1.0) -> Cluster:
    names = ("matmul_fraction", "attention_fraction", "bandwidth_fraction")
    shares = {name: getattr(machines.device, name) / compute for name in names}
    device = replace(machines.device, **shares, launch_seconds=machines.device.launch_seconds * compute)
    link = machines.inner
    rate, latency = link.bytes_per_second / inner, link.latency_seconds * inner
    return replace(machines, device=device, inner=replace(link, bytes_per_second=rate, latency_seconds=latency))


def run_on(truth: Cluster, plan: Plan, planned_with: Cluster = LAPTOP, noise: float = 1.0, **changes: Any) -> Entry:
    promised, real = told(plan, planned_with), told(plan, truth).step_seconds * noise
    made = Entry(
        unix_seconds=1.0,
        versions={"torch": "2.11"},
        machine=HERE,
        device_name="",
        model="byte-3m",
        model_fingerprint=PROFILE.fingerprint,
        plan={},
        plan_fingerprint=plan.fingerprint,
        cluster=planned_with,
        sequence=128,
        batch=8,
        predicted=Predicted(
            step_seconds=promised.step_seconds,
            step_seconds_low=promised.step_seconds_low,
            step_seconds_high=promised.step_seconds_high,
            peak_bytes=promised.peak_bytes,
            seconds_by_origin=promised.seconds_by_origin,
            seconds_by_cause=promised.seconds_by_cause,
        ),
        measured=Measured(
            step_seconds=real,
            step_seconds_p10=real,
            step_seconds_p90=real,
            num_steps=20,
            peak_bytes=promised.peak_bytes + 1000,
        ),
    )
    return replace(made, **changes)


def errors(runs: Sequence[Entry], plans: Sequence[Plan], machines: Cluster) -> list[float]:
    pairs = zip(runs, plans, strict=True)
    return [abs(told(plan, machines).step_seconds / run.measured.step_seconds - 1) for run, plan in pairs]


@pytest.mark.parametrize(
    ("compute", "inner"), [(1.3, 1.0), (1.0, 2.0), (1.3, 1.6), (0.9, 1.0)], ids=["compute", "link", "both", "faster"]
)
def test_what_is_slower_is_found(compute: float, inner: float) -> None:
    truth = slower(LAPTOP, compute=compute, inner=inner)
    runs = [run_on(truth, plan) for plan in PLANS]
    found = learn(runs, HERE)
    assert found.factors["compute"] == pytest.approx(compute, rel=0.03)
    assert found.factors["inner"] == pytest.approx(inner, rel=0.1)
    assert max(errors(runs, PLANS, found.cluster)) < 0.03
    unseen = plan_of(1, shard={"size": 2, "stage": 3}, recompute={})
    seconds = [told(unseen, machines).step_seconds for machines in (found.cluster, truth)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.03)


def test_three_runs_and_noise_are_enough_for_compute() -> None:
    truth, chance = slower(LAPTOP, compute=1.3), random.Random(1)
    runs = [run_on(truth, plan, noise=chance.uniform(0.98, 1.02)) for plan in PLANS[:3]]
    assert learn(runs, HERE).factors["compute"] == pytest.approx(1.3, rel=0.03)


def test_a_run_on_a_busy_machine_counts_little() -> None:
    truth = slower(LAPTOP, compute=1.3)
    noises = [1.0, 1.01, 0.99, 3.0, 1.0, 1.01, 0.99]
    runs = [run_on(truth, plan, noise=noise) for plan, noise in zip(PLANS, noises, strict=True)]
    assert learn(runs, HERE).factors["compute"] == pytest.approx(1.3, rel=0.03)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("noise", [0.85, 0.99, 1.05, 1.3, 2.0, 6.0])
def test_one_run_brings_its_own_forecast_inside_the_interval(plan: Plan, noise: float) -> None:
    run = run_on(LAPTOP, plan, noise=noise)
    found = learn_one(run, LAPTOP)
    after, measured = told(plan, found.cluster), run.measured.step_seconds
    assert after.step_seconds_low <= measured <= after.step_seconds_high
    assert found.error_after <= found.error_before
    assert abs(after.step_seconds / measured - 1) <= abs(noise - 1) + 1e-3
    assert all(0 < getattr(found.cluster.errors, name) <= getattr(LAPTOP.errors, name) for name in found.factors)


def test_one_run_weighs_its_error_bar_against_its_scatter() -> None:
    """One cause, 1.2 times as long, bar 0.3, scatter 0.05: a Gaussian's weight is 0.3 ** 2 / (0.3 ** 2 + 0.05 ** 2)."""
    one = Plan(techniques=(), batch=8, microbatch=8)
    run = run_on(LAPTOP, one, noise=1.2)
    found = learn_one(run, LAPTOP)
    assert set(found.factors) == {"compute"}
    weight = 0.09 / (0.09 + 0.0025)
    assert found.factors["compute"] == pytest.approx(1.2**weight, rel=1e-6)
    assert found.cluster.errors.compute == pytest.approx((0.09 * (1 - weight)) ** 0.5, rel=1e-6)
    shaky = replace(run, measured=replace(run.measured, step_seconds_p90=run.measured.step_seconds * 1.6))
    assert learn_one(shaky, LAPTOP).factors["compute"] == pytest.approx(1.2**0.5, rel=1e-6), "as wide as the bar"
    waiting = replace(run, measured=replace(run.measured, data_seconds=run.measured.step_seconds / 6))
    assert learn_one(waiting, LAPTOP).factors["compute"] == pytest.approx(1.0, abs=1e-3), "no machine is slow for data"


def test_what_the_profiler_saw_tells_causes_apart() -> None:
    """Links were as fast as thought; without the profile their wider bar takes a good part of the blame."""
    plan = PLANS[4]
    truth = slower(LAPTOP, compute=1.6)
    run = run_on(truth, plan)
    parts = told(plan, truth).seconds_by_cause
    seen = replace(
        run,
        measured=replace(run.measured, seconds_by_part={"compute": parts["compute"], "collective": parts["inner"]}),
    )
    blind, told_apart = learn_one(run, LAPTOP), learn_one(seen, LAPTOP)
    assert abs(told_apart.factors["inner"] - 1) < 0.2 < abs(blind.factors["inner"] - 1)
    assert told_apart.factors["compute"] == pytest.approx(1.6, rel=0.05)
    assert told_apart.cluster.errors.inner < blind.cluster.errors.inner <= LAPTOP.errors.inner


def test_a_cpu_that_nobody_measured_may_be_much_faster_than_its_preset() -> None:
    one = Plan(techniques=(), batch=8, microbatch=8)
    run = run_on(LAPTOP, one, noise=0.25)
    assert told(one, learn_one(run, LAPTOP).cluster).step_seconds == pytest.approx(run.measured.step_seconds, rel=0.03)
    measured = replace(LAPTOP, sources={"measured": "made"})
    with pytest.raises(MeshwrightError, match=r"1\.25 times as fast"):
        learn_one(run_on(LAPTOP, one, noise=0.5), measured)


@pytest.mark.parametrize("times", [0.3, 3.3])
def test_a_run_that_contradicts_the_probe_threefold_corrects_nothing(times: float) -> None:
    measured = replace(LAPTOP, sources={"measured": "made"})
    runs = [run_on(LAPTOP, plan, noise=times, unix_seconds=float(at)) for at, plan in enumerate(PLANS)]
    with pytest.raises(MeshwrightError, match=r"contradict each other.*Probe again") as refused:
        learn(runs, HERE, measured)
    assert f"{times:.2f} times as long" in str(refused.value)
    assert refused.value.exit_code == 2
    with pytest.raises(MeshwrightError, match="contradict each other"):
        learn_one(runs[0], measured)
    learn(runs if times > 1 else [run_on(LAPTOP, plan, noise=0.9) for plan in PLANS], HERE, LAPTOP)


def test_probes_that_scatter_are_brought_together() -> None:
    truth = slower(LAPTOP, compute=1.3)
    probes = [slower(LAPTOP, compute=off) for off in (0.8, 1.2, 1.0, 0.9, 1.1, 1.3, 0.95)]
    pairs = enumerate(zip(PLANS, probes, strict=True))
    runs = [run_on(truth, plan, planned_with=probe, unix_seconds=float(number)) for number, (plan, probe) in pairs]
    found = learn(runs, HERE)
    assert max(errors(runs, PLANS, found.cluster)) < 0.03
    # The newest of them, planned with a probe that was already 0.95 of the laptop's seconds, is what is corrected.
    assert found.factors["compute"] == pytest.approx(1.3 / 0.95, rel=0.03)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_worse_on_its_own_runs(seed: int) -> None:
    chance = random.Random(seed)
    runs = [run_on(LAPTOP, plan, noise=chance.lognormvariate(0, 0.2)) for plan in chance.sample(PLANS, 4)]
    found = learn(runs, HERE)
    assert found.error_after <= found.error_before


def test_intervals_hold_what_they_were_learned_from() -> None:
    chance = random.Random(3)
    plans = PLANS * 4
    runs = [run_on(LAPTOP, plan, noise=chance.uniform(0.8, 1.25)) for plan in plans]
    wide = learn(runs, HERE).cluster
    exact = learn([run_on(LAPTOP, plan) for plan in plans], HERE).cluster
    inside = [
        (f := told(plan, wide)).step_seconds_low <= run.measured.step_seconds <= f.step_seconds_high
        for run, plan in zip(runs, plans, strict=True)
    ]
    assert 0.85 <= sum(inside) / len(inside) <= 1.0
    assert 0.1 < wide.errors.compute < LAPTOP.errors.compute
    assert 0 < exact.errors.compute < 0.1
    assert wide.errors.outer == LAPTOP.errors.outer, "no run has gone there"


def test_where_it_comes_from_is_said_and_learning_twice_changes_nothing() -> None:
    truth = slower(LAPTOP, compute=1.3)
    once = learn([run_on(truth, plan) for plan in PLANS], HERE).cluster
    assert re.match(r"learned from 7 runs: 1\.(29|30)", once.sources["learned.compute"])
    assert once.device.reserved_bytes == LAPTOP.device.reserved_bytes + 1000
    again = learn([run_on(truth, plan, planned_with=once) for plan in PLANS], HERE)
    assert again.factors["compute"] == pytest.approx(1.0, rel=0.01)
    assert re.search(r": 1\.(29|30)", again.cluster.sources["learned.compute"]), "against the probe, not the last time"


def test_too_few_runs_of_this_machine_are_refused() -> None:
    runs = [run_on(LAPTOP, plan) for plan in PLANS[:2]]
    other = [run_on(LAPTOP, plan, machine="another; 8 cores; 0 GPUs") for plan in PLANS]
    for entries, said in ((runs, "has 2 runs"), (other, "has 0 runs"), ([], "has 0 runs")):
        with pytest.raises(MeshwrightError, match=said):
            learn(entries, HERE)


def test_rates_that_no_probe_could_miss_are_refused() -> None:
    fast, slow = slower(LAPTOP, compute=10.0), slower(LAPTOP, inner=0.5)
    with pytest.raises(MeshwrightError, match=r"took 0\.1\d times as long as on a machine 1\.25 times as fast"):
        learn([run_on(LAPTOP, plan, planned_with=fast) for plan in PLANS], HERE)
    with pytest.raises(MeshwrightError, match=r"took [23]\.\d+ times as long as on a machine 10 times slower"):
        learn([run_on(LAPTOP, plan, noise=30.0) for plan in PLANS], HERE)
    found = learn([run_on(slow, plan) for plan in PLANS], HERE)
    assert found.factors["inner"] == pytest.approx(0.8), "and no further"


def test_little_by_little_is_no_way_round_the_limits() -> None:
    once = learn([run_on(slower(LAPTOP, compute=0.85), plan) for plan in PLANS], HERE).cluster
    truth = slower(LAPTOP, compute=0.75)
    again = learn([run_on(truth, plan, planned_with=once) for plan in PLANS], HERE).cluster
    assert again.device.matmul_fraction == pytest.approx(1.25, rel=1e-3)


def test_a_gpu_is_not_faster_than_its_data_sheet() -> None:
    sheet: Device = cluster("2xh100").device
    device = replace(sheet, matmul_fraction=0.95, bandwidth_fraction=0.9, launch_seconds=1e-9)
    known = replace(cluster("2xh100"), device=device)
    plans = [plan_of(4, replicate={"size": 2}), plan_of(2, shard={"size": 2}), plan_of(8, tensor={"size": 2})]
    runs = [run_on(slower(known, compute=0.9), plan, planned_with=known) for plan in plans]
    assert learn(runs, HERE).cluster.device.matmul_fraction == pytest.approx(1.0)


def test_a_machine_is_known_by_its_processor_and_gpus(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("model name\t: Made CPU\nflags : x\nmodel name\t: Made CPU\n")
    assert machine_name(tmp_path).startswith("Made CPU; ")
    assert machine_name(tmp_path).endswith("; 0 GPUs")
    for number in range(2):
        (tmp_path / "dev" / f"nvidia{number}").touch()
        folder = tmp_path / "proc" / "driver" / "nvidia" / "gpus" / f"000{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    (tmp_path / "dev" / "nvidiactl").touch()
    assert machine_name(tmp_path).endswith("; 2 x NVIDIA H200")


def test_the_command_writes_what_it_has_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, output = tmp_path / "ledger.jsonl", tmp_path / "learned.cluster.json"
    truth = slower(LAPTOP, compute=1.3)
    for plan in PLANS:
        assert append(run_on(truth, plan, machine=machine_name()), ledger) == ""
    with ledger.open("a") as file:
        file.write("not an entry\n")
    assert main(["probe", "--from-runs", str(ledger), "-o", str(output)]) == 0
    said = capsys.readouterr().err
    assert "1 lines are no entries" in said
    assert "learned from 7 runs" in said
    assert "compute takes 1.30 times as long" in said
    written = cluster(str(output))
    assert told(PLANS[0], written).step_seconds == pytest.approx(told(PLANS[0], truth).step_seconds, rel=0.03)
    assert written.sources["learned.compute"].startswith("learned from 7 runs")
