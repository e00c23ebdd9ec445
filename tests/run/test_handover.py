"""From forecast to run and back: a comparison says what numbers say, and what a run teaches makes forecasts right.

Tests of `run/comparison.py`, `run/learned_cluster.py`.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.core.cluster import Cluster
from meshwright.core.codec import encode, load_artefact
from meshwright.core.errors import MeshwrightError
from meshwright.core.ledger import Entry, Measured, Predicted, append
from meshwright.core.plan import Plan
from meshwright.core.timeline import Span
from meshwright.machine.named_clusters import cluster
from meshwright.machine.probe import machine_name
from meshwright.models.presets import profile
from meshwright.run.comparison import Comparison, Facts, Promise, StepTally, compare, parts_of, sentences
from meshwright.run.learned_cluster import cluster_from_run, cluster_of_run
from meshwright.run.prepare import plan_to_run, prepare
from meshwright.run.run_file import read_run
from meshwright.simulator.forecast import forecast

LAPTOP: Cluster = cluster("2xlaptop")
PROBED = replace(LAPTOP, sources={"measured": "made"}, errors=replace(LAPTOP.errors, compute=0.1, inner=0.5))
MIB = 1 << 20


def promise(**changes: Any) -> Promise:
    """A step of a second, 0.9 to 1.1: compute 0.8 s, links 0.2 s."""
    made = Promise(
        machine="made; 2 cores; 0 GPUs",
        model="byte-3m",
        model_fingerprint="m",
        plan={},
        plan_fingerprint="p",
        cluster=PROBED,
        sequence=128,
        batch=8,
        predicted=Predicted(
            step_seconds=1.0,
            step_seconds_low=0.9,
            step_seconds_high=1.1,
            peak_bytes=100 * MIB,
            seconds_by_origin={},
            seconds_by_cause={"compute": 0.8, "launch": 0.0, "inner": 0.2, "idle": 0.0},
        ),
        bytes_by_category={"activations": 60 * MIB, "parameters": 40 * MIB},
        has_one_stage=True,
        is_first_fullest=True,
    )
    return replace(made, **changes)


def facts(seconds: float, **changes: Any) -> Facts:
    """Of a run that nothing disturbed."""
    made = Facts(
        step_seconds=seconds,
        step_seconds_p10=0.99 * seconds,
        step_seconds_p90=1.01 * seconds,
        num_measured=15,
        num_left_out=5,
        first_step_seconds=3 * seconds,
        early_step_seconds=seconds,
        late_step_seconds=seconds,
        data_seconds=0.0,
        waited_fraction=0.02,
        parts={},
        peak_bytes=104 * MIB,
        reserved_bytes=0,
        num_retries=0,
    )
    return replace(made, **changes)


def judged(found: Facts, **changes: Any) -> Comparison:
    return compare(promise(**changes), found, is_whole=True)


def text_of(promise: Promise, found: Facts, comparison: Comparison, folder: str) -> str:
    return " ".join(sentences(promise, found, comparison, folder))


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0.9, "as forecast"), (1.1, "as forecast"), (0.89, "faster"), (1.11, "slower")]
)
def test_inside_the_interval_is_as_forecast(seconds: float, verdict: str) -> None:
    found = judged(facts(seconds))
    assert (found.verdict, found.ratio) == (verdict, pytest.approx(seconds))
    assert bool(found.reasons) == (verdict != "as forecast")


def test_the_paragraph_has_forecast_interval_median_spread_and_ratio() -> None:
    text = text_of(promise(), facts(1.05), judged(facts(1.05)), "runs/first")
    assert text == (
        "as forecast: a step takes 1.05 s (eight in ten 1.04 s to 1.06 s) over 15 steps (left out: the first 3, "
        "warming up, and 2 profiled); forecast 1.00 s (900.0 ms to 1.10 s), ratio 1.05. Memory of the fullest rank "
        "104.0 MiB, forecast 100.0 MiB."
    )
    missed = text_of(promise(), facts(1.5), judged(facts(1.5)), "runs/first")
    assert "slower than forecast" in missed
    assert "ratio 1.50, outside the interval" in missed
    assert "Likely reason: " in missed
    assert "mw probe" in missed
    assert "mw plan RUN.toml --from-run runs/first" in missed
    few = facts(1.5, num_measured=9)
    short = text_of(promise(), few, judged(few), "runs/first")
    assert "over only 9 steps" in short
    assert "--from-run" not in short, "which would refuse it"


SLOW = 1.5
REASONS: dict[str, tuple[dict[str, Any], str, float]] = {
    "data": ({"data_seconds": 0.4}, "waits 400.0 ms for its samples", 0.4),
    "cores": ({"waited_fraction": 0.3}, "had no core 30% of the time", 0.45),
    "spread": ({"step_seconds_p10": 1.05, "step_seconds_p90": 2.0}, "took 1.05 s or less", 0.45),
    "warm-up": ({"early_step_seconds": 2.0, "late_step_seconds": 1.2}, "2.00 s in the first third", 0.3),
    "slowing": ({"early_step_seconds": 1.1, "late_step_seconds": 1.9}, "1.90 s in the last", 0.4),
    "retries": ({"num_retries": 7, "reserved_bytes": 8 << 30}, "ran full 7 times in 15 steps", 0.5 * 7 / 15),
    # 1.5 x 0.9 of compute, where 0.8 + 0.0 were promised
    "compute": ({"parts": {"compute": 0.9, "collective": 0.1, "idle": 0.0}}, "takes 1.35 s of a step (90%", 0.55),
    "collective": ({"parts": {"compute": 0.55, "collective": 0.45, "idle": 0.0}}, "take 675.0 ms of a step", 0.475),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_rests_on_what_the_run_says(name: str) -> None:
    changes, words, seconds = REASONS[name]
    first = judged(facts(SLOW, **changes)).reasons[0]
    assert first.name == name
    assert words in first.what
    assert first.seconds == pytest.approx(seconds)


def test_what_explains_more_comes_first_and_parts_are_not_named_where_something_happened() -> None:
    found = judged(facts(SLOW, data_seconds=0.2, waited_fraction=0.3, parts={"compute": 0.9}))
    assert [reason.name for reason in found.reasons] == ["cores", "data"]
    little = judged(facts(SLOW, data_seconds=0.06, parts={"compute": 0.9}))
    assert [reason.name for reason in little.reasons] == ["data", "compute"], "a tenth of it was the data"


def test_figures_that_nobody_measured_are_a_reason_with_their_error() -> None:
    (reason,) = judged(facts(SLOW), cluster=LAPTOP).reasons
    assert reason.name == "figures"
    assert "2xlaptop (compute ±30%)" in reason.what
    assert "mw probe" in reason.next


def test_without_a_reason_the_widest_part_of_the_interval_is_named() -> None:
    """0.5 x 0.2 s of links against 0.1 x 0.8 s of compute; half a second more is 3.5 times 0.2 s."""
    (reason,) = judged(facts(SLOW)).reasons
    assert reason.name == "inner"
    assert "collectives inside a node (20% of its step, ±50%)" in reason.what
    assert "alone would have to take 3.50 times as long" in reason.what
    (fast,) = judged(facts(0.5)).reasons
    assert "times as long" not in fast.what, "links cannot take less than nothing"
    stages = judged(facts(SLOW, parts={"compute": 0.9}), has_one_stage=False)
    assert [reason.name for reason in stages.reasons] == ["inner"], "one rank of several stages does not stand for all"


def test_every_reason_has_a_number_and_there_are_two_at_most() -> None:
    chance = random.Random(5)
    for _ in range(300):
        picked = chance.sample(sorted(REASONS), 3)
        changes = {key: value for name in picked for key, value in REASONS[name][0].items()}
        found = judged(facts(chance.choice([0.3, 0.8, 1.2, SLOW, 9.0]), **changes))
        assert 1 <= len(found.reasons) <= 2
        assert all(re.search(r"\d", reason.what) for reason in found.reasons)


def test_memory_is_compared_where_the_fullest_rank_is_known() -> None:
    more = facts(1.0, peak_bytes=150 * MIB)
    whole = judged(more)
    assert (whole.memory_verdict, whole.memory_ratio) == ("more", pytest.approx(1.5))
    text = text_of(promise(), more, whole, "run")
    assert "150.0 MiB, forecast 100.0 MiB: more than forecast, 1.50 times; its largest part was activations" in text
    assert judged(facts(1.0, peak_bytes=80 * MIB)).memory_verdict == "less"
    other = promise(is_first_fullest=False)
    early = compare(other, more, is_whole=False)
    assert (early.memory_verdict, early.memory_ratio) == ("not known", 0.0)
    assert "Memory" not in text_of(other, more, early, "run")
    assert compare(other, more, is_whole=True).memory_verdict == "more"


def test_steps_are_tallied_without_those_that_warm_up() -> None:
    tally = StepTally()
    for number in range(20):
        assert not tally.is_enough
        tally.add(100.0 if number < 5 else float(number), 0.5, is_measured=number >= 5)
    assert tally.is_enough
    found = tally.facts((), {"peak_bytes": 1, "reserved_bytes": 2, "num_retries": 3})
    assert found is not None
    # 5 to 19: the median is 12, the first and last thirds' 7 and 17
    assert (found.step_seconds, found.step_seconds_p10, found.step_seconds_p90) == (12.0, 6.0, 18.0)
    assert (found.early_step_seconds, found.late_step_seconds) == (7.0, 17.0)
    assert (found.num_measured, found.num_left_out, found.first_step_seconds) == (15, 5, 100.0)
    assert (found.data_seconds, found.parts, found.num_retries) == (0.5, {}, 3)
    assert 0 <= found.waited_fraction <= 1
    assert Facts.of({**encode(found), "loss": 1.0}) == found
    assert StepTally().facts((), {}) is None


def test_parts_are_those_of_the_last_profiled_step() -> None:
    def step(start: float, waits: float) -> list[Span]:
        times = {"forward 0": (start, 4.0), "gloo:all_reduce": (start + 4, waits), "update": (start + 4 + waits, 2.0)}
        lanes = {"gloo:all_reduce": "collective"}
        return [
            Span(device=0, lane=lanes.get(name, "compute"), name=name, start_seconds=at, seconds=long)  # type: ignore[arg-type]
            for name, (at, long) in times.items()
        ]

    assert parts_of([*step(0.0, 10.0), *step(16.0, 2.0)]) == pytest.approx(
        {"compute": 0.75, "collective": 0.25, "idle": 0.0}
    )
    assert parts_of([]) == {}


def told(measured_seconds: float = 1.5, **changes: Any) -> Entry:
    made = Entry(
        unix_seconds=1.0,
        versions={"torch": "2.11"},
        machine=machine_name(),
        device_name="",
        model="byte-3m",
        model_fingerprint="m",
        plan={},
        plan_fingerprint="p",
        cluster=PROBED,
        sequence=128,
        batch=8,
        predicted=promise().predicted,
        measured=Measured(
            step_seconds=measured_seconds,
            step_seconds_p10=measured_seconds,
            step_seconds_p90=measured_seconds,
            num_steps=20,
            peak_bytes=130 * MIB,
        ),
    )
    return replace(made, **changes)


def test_what_a_ledger_teaches_is_said_in_words(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    reason = {"name": "cores", "what": "rank 0 was ready and had no core 30% of the time"}
    parts = {"compute": 1.2, "collective": 0.3}
    entry = told(comparison={"reasons": [reason]})
    append(replace(entry, measured=replace(entry.measured, seconds_by_part=parts)), ledger)
    learned, lines = cluster_from_run(ledger, PROBED.resized(8))
    assert learned.num_devices == 8
    text = "\n".join(lines)
    assert "learned from 1 run of byte-3m, sequence 128, batch 8: a step took 1.50 s (20 measured)" in text
    # Both parts took 1.5 times as long.
    assert re.search(r"^compute 1\.[45]\d x slower than thought; error bar 10% -> \d+%$", text, re.MULTILINE)
    assert re.search(r"^collectives inside a node 1\.[45]\d x slower than thought", text, re.MULTILINE)
    assert "a process holds 330.0 MiB of its own, not 300.0 MiB" in text
    assert "50.0% off before" in text
    assert "that run was disturbed" in text
    assert "no core 30% of the time" in text


def test_a_run_of_another_machine_is_said_and_of_another_device_refused(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    append(told(machine="Other CPU; 64 cores; 0 GPUs"), ledger)
    _, lines = cluster_from_run(ledger, PROBED)
    assert any("another machine (Other CPU; 64 cores; 0 GPUs)" in line for line in lines)
    with pytest.raises(MeshwrightError, match="ran on cpu devices, 8xh100 has cuda") as refused:
        cluster_from_run(ledger, cluster("8xh100"))
    assert refused.value.exit_code == 2
    cards = tmp_path / "cards.jsonl"
    append(told(cluster=cluster("2xh100"), device_name="NVIDIA H200"), cards)
    with pytest.raises(MeshwrightError, match=r"ran on NVIDIA H200: memory bytes .* of 8xh100"):
        cluster_from_run(cards, cluster("8xh100"))
    alone, _ = cluster_from_run(cards, cluster("8xh200"))
    mixed = cluster("8xh100+8xh200")
    learned, _ = cluster_from_run(cards, mixed)
    assert (learned.groups[0], learned.errors) == (mixed.groups[0], mixed.errors), "nobody ran there"
    assert learned.groups[1] == alone.groups[0] != mixed.groups[1]
    append(told(unix_seconds=9.0), cards)
    assert cluster_from_run(cards, cluster("8xh200"))[0] == alone, "an older run, but on such devices"
    append(told(), ledger)
    learned, lines = cluster_from_run(ledger, PROBED)
    assert "1 run of other machines or devices left out" in lines
    assert learned.sources["learned.compute"].startswith("learned from 1 run:")


def test_ledgers_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "corrupt").write_bytes(b"{\n\xff\x00 no\n")
    append(told(measured=replace(told().measured, num_steps=4)), tmp_path / "short")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "comparison.json").write_text('{"unix_seconds": 1.0, ')
    wanted = {
        "missing": "cannot be read",
        "empty": "is empty",
        "corrupt": "2 lines are no entries",
        "short": "has 4 measured steps; 10 are needed",
        "folder": "no comparison.json is there",
        "cut": "1 lines are no entries",
    }
    for name, words in wanted.items():
        with pytest.raises(MeshwrightError, match=words) as refused:
            cluster_from_run(tmp_path / name, PROBED)
        assert refused.value.exit_code == 2


RUN = """\
[model]
name = "byte-3m"
[data]
train = "{folder}/corpus.txt"
sequence = 32
[train]
batch = 4
steps = 24
[run]
folder = "{folder}/run"
cluster = "{cluster}"
ranks = 2
timeline_steps = 1
"""


def write_run(folder: Path, named: str = "laptop") -> str:
    (folder / "run.toml").write_text(RUN.format(folder=folder, cluster=named))
    return str(folder / "run.toml")


def write_plan(folder: Path, *techniques: dict[str, Any], batch: int = 4) -> str:
    value = {"techniques": list(techniques), "batch": batch, "microbatch": 1, "version": 1}
    (folder / "my.plan.json").write_text(json.dumps(value))
    return str(folder / "my.plan.json")


def test_a_real_run_is_compared_and_teaches_the_next_forecast(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks; the machine, whichever it is, is thought to be half as fast again as a laptop.

    How long its steps take depends on what else it does, so what they teach is tried with steps of a stated length.
    """
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    device = replace(LAPTOP.device, flops_per_second={"fp32": 1.35e11}, memory_bytes_per_second=2.25e10)
    (tmp_path / "fast.json").write_text(replace(LAPTOP, device=device).to_json())
    plan_file = write_plan(tmp_path, {"name": "replicate", "size": 2})
    assert main(["train", write_run(tmp_path, f"{tmp_path}/fast.json"), "--plan", plan_file]) == 0
    said = capfd.readouterr().err.splitlines()
    early = [line for line in said if re.search(r"^step 20: (slower|faster|as) ", line)]
    late = [line for line in said if re.search(r"^(slower than|faster than|as) forecast: ", line)]
    assert (len(early), len(late)) == (1, 1), "one rank of two tells, after twenty steps and at the end"
    assert "over 16 steps (left out: the first 3, warming up, and 1 profiled)" in early[0]
    assert "over 20 steps" in late[0]

    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    entry = json.loads((run / "comparison.json").read_text())
    assert entry["comparison"] == summary["comparison"]
    assert summary["comparison"]["lines"][0] == late[0]
    assert entry["measured"]["num_steps"] == summary["comparison"]["facts"]["num_measured"] == 20
    measured = 1.8 * entry["predicted"]["step_seconds"]
    steady = {"step_seconds": measured, "step_seconds_p10": 0.99 * measured, "step_seconds_p90": 1.01 * measured}
    entry["measured"] |= steady | {"data_seconds": 0.0, "seconds_by_part": {}}
    (run / "comparison.json").write_text(json.dumps(entry))

    plan, before = load_artefact(Plan, run / "plan.json"), load_artefact(Cluster, run / "cluster.json")
    assert cluster_of_run(run) == (before, str(run / "cluster.json"))
    after, lines = cluster_from_run(run, before)
    first, second = (forecast(profile("byte-3m"), plan, each, sequence=32) for each in (before, after))
    assert first.step_seconds == pytest.approx(entry["predicted"]["step_seconds"], rel=1e-6)
    assert second.step_seconds_low <= measured <= second.step_seconds_high
    assert abs(second.step_seconds / measured - 1) < 0.1 < abs(first.step_seconds / measured - 1)
    assert abs(second.peak_bytes - entry["measured"]["peak_bytes"]) < MIB
    assert any(line.startswith("compute ") and "slower than thought" in line for line in lines)


def test_a_plan_file_is_refused_before_data_is_made_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no data: whoever speaks of it has looked at it first."""
    path = write_run(tmp_path)
    for words, techniques, batch, changes in (
        (
            'precision() is rounded, and plan.allow is "reordered".',
            [{"name": "precision"}],
            4,
            ["plan.allow=reordered"],
        ),
        ("the plan is for 8 samples", [{"name": "replicate", "size": 2}], 8, []),
        ("needs 4 ranks", [{"name": "replicate", "size": 4}], 4, []),
        ("train.optimizer.clip", [{"name": "pipeline", "size": 2, "schedule": "async"}], 4, []),
    ):
        plan = write_plan(tmp_path, *techniques, batch=batch)
        sets = [word for change in changes for word in ("--set", change)]
        assert main(["train", path, "--plan", plan, *sets]) == 2
        said = capsys.readouterr().err
        assert words in said
        assert "corpus.txt" not in said
        assert not (tmp_path / "run" / "data").exists()


def test_pins_are_refused_and_a_plan_that_may_not_fit_is_told_of_before_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path)
    assert main(["train", path, "--set", 'plan.pin=["tensr=2"]']) == 2
    assert "tensr" in capsys.readouterr().err
    device = replace(LAPTOP.device, memory_bytes=310 * MIB)
    (tmp_path / "small.json").write_text(replace(LAPTOP, device=device).to_json())
    plan = write_plan(tmp_path, {"name": "replicate", "size": 2})
    assert main(["train", write_run(tmp_path, f"{tmp_path}/small.json"), "--plan", plan]) == 2
    said = capsys.readouterr().err
    assert re.search(r"not expected to fit: a rank needs \d+\.\d MiB of 310\.0 MiB", said)
    assert said.index("not expected to fit") < said.index("corpus.txt")


def test_a_machine_is_measured_with_as_many_ranks_as_the_plan_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def probe(*, num_devices: int | None, report: Any, quick: bool) -> Cluster:
        asked.append(num_devices)
        return replace(LAPTOP.resized(num_devices or 2), sources={"measured": "made"})

    monkeypatch.setattr("meshwright.machine.probe.probe", probe)
    config = read_run(write_run(tmp_path), ["run.cluster="])
    one = write_plan(tmp_path)
    found = prepare(config, one, lambda text: None)
    assert (asked, found.cluster.num_devices, found.plan.num_ranks) == ([1], 1, 1)
    four = write_plan(tmp_path, {"name": "replicate", "size": 4})
    with pytest.raises(MeshwrightError, match="needs 4 ranks"):
        prepare(config, four, lambda text: None)
    assert asked == [1, 2], "what the run file says is not exceeded"
    assert plan_to_run(config, four, found.profile) is not None, "without a machine nothing speaks against it"


@pytest.mark.parametrize("seconds", [0.3, 3.2])
def test_a_run_that_contradicts_the_probe_is_told_so_and_what_to_do(seconds: float) -> None:
    found = facts(seconds)
    comparison = judged(found)
    assert comparison.reasons[0].name == "probe"
    text = text_of(promise(), found, comparison, "runs/x")
    assert f"this run contradicts the probe of {PROBED.name}" in text
    assert f"{seconds:.2f} times as long" in text
    assert "Probe again" in text
    assert "--from-run" not in text, "which would be refused"
    assert judged(facts(2.9)).reasons[0].name != "probe"
    assert judged(facts(3.2), cluster=LAPTOP).reasons[0].name != "probe", "nobody has measured it"
