"""`mw plan` as a user sees it: its table and pictures, its flags, what it refuses, being stopped.

Tests of `report/answer_text.py`, `report/mesh_picture.py`, `report/terminal.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from command import clean_environment

import meshwright as mw
from meshwright.ask import question as asking
from meshwright.ask.memory import MemoryFront, Point
from meshwright.ask.what_if import ComparedPlans
from meshwright.cli.main import accept_any_encoding, main
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.units import GIB
from meshwright.machine.named_clusters import cluster
from meshwright.planner.search import ScoredPlan, SearchResult, search
from meshwright.report.answer_text import plot, worth_words
from meshwright.report.mesh_picture import axis_lines, mesh_picture, place_of
from meshwright.report.terminal import short_plan, short_technique

TINY = ("plan", "--model", "byte-tiny", "--cluster", "2xlaptop", "--seq", "32", "--batch", "4")
QUICK = ("--ban", "pipeline", "--ban", "tensor", "--ban", "recompute", "--ban", "precision")
"""A space that is searched in no time."""
Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    def run(*words: str) -> tuple[int, str, str]:
        code = main([*TINY, *QUICK, *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def made(**sizes: int) -> Plan:
    return Plan(techniques=tuple(technique_named(name)(size=size) for name, size in sizes.items()), batch=4096)


# The answer


def test_the_answer_has_a_table_bars_a_picture_and_reasons(told: Told) -> None:
    code, out, _ = told("--top", "3")
    assert code == 0
    for words in (
        "90 % within",
        "MFU",
        "█",
        "node 0",
        "bottleneck:",
        "proof: none of",
        "runner-up:",
        "what if memory=+25%",
    ):
        assert words in out
    rows = [line for line in out.splitlines() if line.split(" ")[0] in ("1", "2", "3")]
    assert len(rows) == 3


def test_json_keeps_its_keys_and_has_new_ones(told: Told) -> None:
    code, out, _ = told("--json", "--why", "microbatch", "--what-if", "memory=x2", "--front")
    value = json.loads(out)
    assert code == 0
    kept = {"best", "ranked", "rejected", "nearest_miss", "evaluated", "search_seconds", "gap_fraction"}
    assert kept | {"explain", "why", "what_if", "front"} <= value.keys()
    assert value["explain"]["bottleneck"] == value["best"]["forecast"]["bottleneck"]
    assert value["what_if"]["forecast"]["memory_bytes"] == 2 * value["best"]["forecast"]["memory_bytes"]
    points = [(p["forecast"]["peak_bytes"], p["forecast"]["step_seconds"]) for p in value["front"]]
    assert points == sorted(points)
    assert [seconds for _, seconds in points] == sorted((seconds for _, seconds in points), reverse=True)
    best = value["best"]["forecast"]
    assert (best["peak_bytes"], best["step_seconds"]) in points


def test_a_limit_of_memory_is_kept(told: Told) -> None:
    _, out, _ = told("--json")
    free = json.loads(out)["best"]["forecast"]["peak_bytes"]
    code, out, _ = told("--json", "--max-memory", "320MiB")
    value = json.loads(out)
    assert free < 320 * 2**20
    assert code == 0
    assert value["best"]["forecast"]["memory_bytes"] == 320 * 2**20


def test_numbers_of_devices_are_compared(told: Told) -> None:
    code, out, _ = told("--devices", "1..4", "--top", "1", "--target-tokens", "1M")
    assert code == 0
    assert "device-hours for 1M tokens" in out
    assert "astest" in out
    code, out, _ = told("--devices", "1..4", "--json")
    value = json.loads(out)
    assert [size["devices"] for size in value["sizes"]["tried"]] == [1, 2, 4]
    rates = {size["devices"]: size["forecast"]["tokens_per_second"] for size in value["sizes"]["tried"]}
    assert value["sizes"]["fastest"] == max(rates, key=lambda count: rates[count])
    assert value["sizes"]["cheapest"] == max(rates, key=lambda count: rates[count] / count)
    assert value["best"]["forecast"]["tokens_per_second"] == pytest.approx(max(rates.values()))


def test_the_batch_is_chosen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.ask.sizes.NUM_BATCHES", 3)
    words = ["--critical-batch", "2", "--target-steps", "100", "--json"]
    assert main([*TINY[:-1], "auto", *QUICK, *words]) == 0
    value = json.loads(capsys.readouterr().out)
    tried = {(run["batch"], run["devices"]): run for run in value["goal"]["tried"]}
    assert {batch for batch, devices in tried if devices == 2} >= {1, 2, 4}
    for (batch, _), run in tried.items():
        if run["forecast"] is not None:
            assert run["steps"] == pytest.approx(100 * (1 + 2 / batch))
            assert run["seconds"] == pytest.approx(run["steps"] * run["forecast"]["step_seconds"])
    soonest = min(run["seconds"] for run in tried.values() if run["seconds"] is not None)
    assert value["goal"]["soonest"]["seconds"] == soonest
    assert value["best"]["plan"]["batch"] == value["goal"]["soonest"]["batch"]
    options = {"ban": QUICK[1::2], "critical_batch": 2, "target_steps": "100"}
    answer = mw.plan("byte-tiny", "2xlaptop", sequence=32, batch="auto", **options)
    assert answer.batch_goals is not None
    assert [(run.batch, run.devices) for run in answer.batch_goals.runs] == list(tried)
    assert [run.steps for run in answer.batch_goals.runs] == [run["steps"] for run in tried.values()]


def test_what_is_printed_for_one_thing_is_short(told: Told) -> None:
    code, out, _ = told("--why", "microbatch")
    assert code == 0
    assert "why microbatch is" in out
    assert "node 0" not in out
    code, out, _ = told("--why", "batch")
    assert "1.41 times the learning rate with adamw" in out
    code, out, _ = told("--what-if", "nodes=+1")
    assert "what if nodes=+1" in out
    assert "more devices" in out


# What is refused


def test_everything_wrong_is_said_at_once(told: Told) -> None:
    wrong = ["--what-if", "memory=lots", "--why", "nothing", "--devices", "64..16", "--max-memory", "-3"]
    wrong += ["--allow", "anything", "--critical-batch", "5", "--batch", "many", "--from-run", ""]
    code, out, err = told(*wrong)
    assert (code, out) == (2, "")
    for words in ("memory=lots", "nothing", "16..64", "--max-memory", "anything", "--critical-batch", "--batch"):
        assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-memory", "1KiB"], "--max-memory: 1.0 KiB is less than"),
        (["--devices", "x"], '"x" is no range'),
        (["--devices", "0..4"], "at least 1"),
        (["--what-if", "seq=100000"], "positions for"),
        (["--why", "tensor.siz"], '"size"'),
        (["--batch", "0"], "--batch: is 0"),
    ],
)
def test_values_that_cannot_be(told: Told, flags: list[str], words: str) -> None:
    code, _, err = told(*flags)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


# Nothing fits


def test_where_nothing_fits_there_are_ways_out(told: Told) -> None:
    code, out, _ = told("--max-memory", "300.2MiB")
    assert code == 1, out
    assert "Nothing fits in 300.2 MiB" in out
    assert "too much" in out
    assert "Ways out" in out
    code, out, _ = told("--max-memory", "300.2MiB", "--json")
    value = json.loads(out)
    assert code == 1
    assert value["best"] is None
    assert value["nearest_miss"]["forecast"]["fits"] is False
    assert all(way["forecast"]["fits"] for way in value["ways_out"]["open"])


# Being stopped


def test_a_search_that_is_stopped_shows_the_best_so_far(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **settings: object) -> SearchResult:
        return replace(search(*arguments, **settings), is_interrupted=True, gap_fraction=0.25)  # type: ignore[arg-type]

    monkeypatch.setattr(asking, "search", stopped)
    code, out, _ = told()
    assert code == 130
    assert "the best so far" in out
    assert "more than 25 % faster" in out
    code, out, _ = told("--json")
    assert code == 130
    assert json.loads(out)["best"] is not None
    code, out, _ = told("--devices", "1..4")
    assert code == 130


def test_control_c_elsewhere_is_told_in_a_word(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **settings: object) -> SearchResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(asking, "search", stopped)
    assert told() == (130, "", "mw plan: stopped\n")


# Pictures


def test_a_mesh_inside_a_node_and_between_nodes() -> None:
    lines = mesh_picture(made(tensor=4, shard=4, pipeline=2), cluster("4x8xh100"), 120)
    assert lines[0].startswith("┌ node 0: pp 0 ")
    assert lines[1].startswith("│ fsdp 0   tp 0 1 2 3 │  │ fsdp 2   tp 0 1 2 3 │")
    assert lines[2].startswith("│ fsdp 1   tp 0 1 2 3 │  │ fsdp 3   tp 0 1 2 3 │")
    assert lines[4] == "... and 1 more node"
    assert lines[5:] == [
        "pp 2: between nodes, InfiniBand 50 GB/s",
        "fsdp 4: 2 inside a node, 2 nodes, InfiniBand 50 GB/s",
        "tp 4: inside a node, NVLink 450 GB/s",
    ]


def test_thousands_of_nodes_are_counted_not_drawn() -> None:
    lines = mesh_picture(made(tensor=8, shard=128, pipeline=16), cluster("2048x8xh100"), 80)
    assert len(lines) < 12
    assert "... and 2,045 more nodes" in lines
    assert max(map(len, lines)) <= 80


def test_groups_are_drawn_by_name() -> None:
    lines = mesh_picture(made(tensor=8, pipeline=3), cluster("8xh100+2x8xa100"), 120)
    assert lines[0].startswith("┌ node 0 8xh100: pp 0")
    assert any("node 1 2x8xa100: pp 1" in line and "node 2 2x8xa100: pp 2" in line for line in lines)
    assert lines[-2].startswith("pp 3: between nodes of 2 groups")


@pytest.mark.parametrize("rank", range(12))
def test_places_count_as_ranks_do(rank: int) -> None:
    place = place_of(rank, {"pp": 2, "dp": 3, "tp": 2})
    assert place["pp"] * 6 + place["dp"] * 2 + place["tp"] == rank


def test_seven_stages_in_a_node() -> None:
    assert axis_lines(made(pipeline=7), cluster("7xh100")) == ["pp 7: inside a node, NVLink 450 GB/s"]


def test_plans_in_short_words() -> None:
    stages = technique_named("pipeline")(size=4, stages=(9, 8, 8, 7))
    plan = Plan(techniques=(stages, technique_named("shard")(size=2, stage=1)), batch=64, microbatch=2)
    assert short_plan(plan) == "pipeline 4 stages 9,8x2,7 + shard 2 stage 1, microbatch 2 x 16"
    assert short_plan(plan, frozenset({"shard 2 stage 1"})) == "pipeline 4 stages 9,8x2,7, microbatch 2 x 16"
    assert short_plan(Plan(batch=4)) == "one device, microbatch 1 x 4"
    recompute = technique_named("recompute")
    assert short_technique(recompute(layers="none", selective="0-0")) == "recompute layers none selective 0-0"
    assert short_technique(recompute(layers="0-15")) == "recompute layers 0-15"
    assert short_technique(recompute()) == "recompute"


def _scored(seconds: float, peak: int, plan: Plan | None = None) -> ScoredPlan:
    from meshwright.simulator.forecast import Forecast

    numbers = dict.fromkeys(("step_seconds", "step_seconds_low", "step_seconds_high"), seconds)
    sizes = dict.fromkeys(("peak_bytes", "peak_reserved_bytes", "memory_bytes"), peak)
    told = Forecast(
        **numbers,
        **sizes,
        tokens_per_second=1 / seconds,
        mfu=0.5,
        peak_bytes_by_category={},
        bottleneck="",
        fits=True,
        seconds_by_origin={},
        seconds_by_cause={},
        worst_stage=0,
    )
    return ScoredPlan(plan or Plan(), told)


def test_the_front_is_plotted_from_end_to_end() -> None:
    sizes = [(8.0, 16 * GIB), (4.0, 32 * GIB), (2.0, 64 * GIB)]
    points = tuple(Point(scored=_scored(s, p), budget_bytes=p) for s, p in sizes)
    lines = plot(MemoryFront(points=points))
    assert lines[0] == f"{'8.00 s':>10} |o{'-' * 31}"
    assert lines[11].endswith("o")
    assert [line.count("o") for line in lines[:12]].count(1) == 3
    assert lines[6].index("o") - 12 == 32  # twice from half to full, by logarithms: in the middle
    assert lines[-1].split() == ["16.0", "GiB", "64.0", "GiB"]
    assert plot(MemoryFront(points=points[:1]))


@pytest.mark.parametrize(
    ("seconds", "devices", "words"),
    [
        (0.5, 16, "100 % more tokens/s for 100 % more devices: 100 % of a device's rate now, worth it"),
        (0.8, 16, "hardly worth it"),
        (1.1, 16, "not worth it"),
        (1.0, 8, "buys nothing"),
        (0.8, 8, "25 % more tokens/s"),
        (2.0, 4, "each does as much"),
    ],
)
def test_what_it_buys_in_words(seconds: float, devices: int, words: str) -> None:
    from meshwright.models.cost_decoder import decoder_profile
    from meshwright.models.presets import preset

    profile = decoder_profile(preset("byte-tiny"), "byte-tiny")
    machine = cluster("8xh100").resized(devices)
    asked = asking.Question(profile=profile, cluster=machine, batch=4, sequence=32, allow="reordered")
    after = _scored(seconds, GIB, made(shard=devices))
    found = SearchResult(
        best=after,
        ranked=(),
        rejected={},
        nearest_miss=None,
        evaluated=1,
        search_seconds=0,
        gap_fraction=0,
    )
    then = asking.Outcome(words="x", question=asked, result=found)
    assert words in worth_words(ComparedPlans(words="x", before=_scored(1.0, GIB, made(shard=8)), after=then))


# Terminals


def test_a_terminal_without_unicode_gets_ascii() -> None:
    environment = clean_environment() | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "meshwright.cli.main", *TINY, *QUICK, "--top", "2"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert "+ node 0" in text
    assert "####" in text
    assert "?" not in text


def test_an_encoding_is_accepted_twice() -> None:
    accept_any_encoding()
    accept_any_encoding()
    assert "µs × ─ ? é".encode("ascii", errors="meshwright-plain") == b"us x - ? ?"
