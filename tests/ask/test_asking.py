"""Asking the planner further: other machines, other values, other sizes, the front, ways out.

Most of it asks a search that is made up, whose answers are known by hand; what it asks is what is tested.

Tests of `ask/explain.py`, `ask/memory.py`, `ask/question.py`, `ask/sizes.py`, `ask/what_if.py`, `ask/why.py`,
`report/answer_json.py`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from meshwright.ask import question as asking
from meshwright.ask.explain import differences, explain
from meshwright.ask.memory import MOST_POINTS, front
from meshwright.ask.question import Question, outcome
from meshwright.ask.sizes import (
    best_batch,
    compare_sizes,
    fewer,
    ladder,
    larger_sizes,
    read_goal,
    resized,
    sizes_between,
)
from meshwright.ask.what_if import (
    MEMORY,
    RATE,
    compare,
    read_amount,
    read_changes,
    read_memory,
    usual_changes,
    with_changes,
)
from meshwright.ask.why import read_knobs, why
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.units import GIB
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.planner.search import Alternative, ScoredPlan, SearchResult
from meshwright.report.answer_json import explanation_as_json
from meshwright.simulator.forecast import Forecast

LLAMA = decoder_profile(preset("llama3-8b"), "llama3-8b")
TINY = decoder_profile(preset("byte-tiny"), "byte-tiny")


def silent(text: str) -> None:
    pass


def ask(name: str = "8xh100", **changes: object) -> Question:
    asked = Question(profile=LLAMA, cluster=cluster(name), batch=128, sequence=8192, allow="reordered")
    return replace(asked, **changes)  # type: ignore[arg-type]


def made(
    seconds: float, *, peak: int = GIB, memory: int = 80 * GIB, plan: Plan | None = None, tokens: float = 1e6
) -> ScoredPlan:
    """A plan and a forecast that say what they are told to."""
    told = Forecast(
        step_seconds=seconds,
        step_seconds_low=seconds,
        step_seconds_high=seconds,
        tokens_per_second=tokens / seconds,
        mfu=0.5,
        peak_bytes=peak,
        peak_bytes_by_category={"activations": peak},
        peak_reserved_bytes=peak,
        bottleneck="compute: 90 % of the step",
        fits=peak <= memory,
        memory_bytes=memory,
        seconds_by_origin={"compute": seconds},
        seconds_by_cause={"compute": seconds},
        worst_stage=0,
    )
    return ScoredPlan(plan or Plan(), told)


def found_of(best: ScoredPlan | None, nearest: ScoredPlan | None = None, **more: object) -> SearchResult:
    settings: dict[str, object] = {"ranked": (best,) if best else (), "rejected": {}, "evaluated": 7}
    settings |= {"search_seconds": 0.1, "gap_fraction": 0.0 if best else None} | more
    return SearchResult(best=best, nearest_miss=nearest, **settings)  # type: ignore[arg-type]


Answer = Callable[..., SearchResult]


def made_up(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[dict[str, object]]:
    """From now on questions are answered so; the list has what was asked."""
    asked: list[dict[str, object]] = []

    def search(profile: object, machine: object, **settings: object) -> SearchResult:
        asked.append({"cluster": machine, **settings})
        return answer(machine, **settings)

    def forecast(*_: object, **settings: object) -> SimpleNamespace:
        return SimpleNamespace(fits=True)

    monkeypatch.setattr(asking, "search", search)
    monkeypatch.setattr("meshwright.ask.memory.forecast", forecast)
    return asked


# Amounts and changes


@pytest.mark.parametrize(
    ("text", "units", "before", "after"),
    [
        ("+20GiB", MEMORY, 80 * GIB, 100 * GIB),
        ("-20gib", MEMORY, 80 * GIB, 60 * GIB),
        ("x2", MEMORY, 80, 160),
        ("120GiB", MEMORY, 1, 120 * GIB),
        ("+25%", MEMORY, 80, 100),
        ("100GB/s", RATE, 5, 1e11),
        ("400Gb/s", RATE, 5, 5e10),
        ("x0.5", RATE, 8, 4),
    ],
)
def test_amounts_are_read_as_people_mean_them(text: str, units: dict[str, float], before: float, after: float) -> None:
    problems: list[Problem] = []
    amount = read_amount(text, units, "here", "x2", problems)
    assert problems == []
    assert amount is not None
    assert amount.of(before) == pytest.approx(after)


@pytest.mark.parametrize(
    "text", ["lots", "", "x", "20", "20Gix", "x2GiB", "x0", "0GiB", "1e99GiB", "--3GiB", "25%", "+-1"]
)
def test_amounts_that_are_none(text: str) -> None:
    problems: list[Problem] = []
    assert read_amount(text, MEMORY, "here", "70GiB", problems) is None
    assert len(problems) == 1
    assert problems[0].where == "here"


@pytest.mark.parametrize("text", ["-3", "+3GiB", "x2", "70", "0GiB"])
def test_a_limit_of_memory_is_a_size(text: str) -> None:
    problems: list[Problem] = []
    assert read_memory(text, "--max-memory", problems) is None
    assert len(problems) == 1


def test_changes_are_made_together() -> None:
    texts = ["memory=+20GiB", "inner=x2", "outer=100GB/s", "nodes=+1", "flops=x3", "batch=256", "seq=4096"]
    before = ask("2x8xh100")
    after = with_changes(before, read_changes(texts))
    old, new = before.cluster, after.cluster
    assert new.device.memory_bytes == old.device.memory_bytes + 20 * GIB
    assert new.inner.bytes_per_second == 2 * old.inner.bytes_per_second
    assert new.outer.bytes_per_second == 1e11
    assert (new.num_nodes, new.devices_per_node, new.name) == (3, 8, "3x8xh100")
    assert new.device.flops_per_second["bf16"] == 3 * old.device.flops_per_second["bf16"]
    assert (after.batch, after.sequence) == (256, 4096)
    assert with_changes(ask("8xh100"), read_changes(["devices=4"])).cluster.name == "4xh100"


def test_more_memory_is_more_than_what_may_be_used() -> None:
    after = with_changes(ask(max_memory_bytes=40 * GIB), read_changes(["memory=+10GiB"]))
    assert after.machine.device.memory_bytes == 50 * GIB


def test_changes_that_cannot_be_are_told_at_once() -> None:
    with pytest.raises(MeshwrightError) as words:
        read_changes(["memory=lots", "memry=+1GiB", "nodes", "flops=3"])
    assert len(words.value.problems) == 4
    assert "memory" in words.value.problems[1].fix
    texts = ["devices=12", "nodes=-1", "seq=9000", "memory=-200GiB", "batch=x0.3", "between=x2"]
    with pytest.raises(MeshwrightError) as numbers:
        with_changes(ask(), read_changes(texts))
    assert [problem.where for problem in numbers.value.problems] == [f"--what-if {text}" for text in texts]


def test_links_between_groups_are_changed_in_all_of_them() -> None:
    mixed = ask("8xh100+8xa100")
    after = with_changes(mixed, read_changes(["inner=x2", "memory=x2", "between=x4"])).cluster
    for old, new in zip(mixed.cluster.groups, after.groups, strict=True):
        assert new.inner.bytes_per_second == 2 * old.inner.bytes_per_second
        assert new.device.memory_bytes == 2 * old.device.memory_bytes
    assert after.between is not None
    assert after.between.bytes_per_second == 4 * min(g.outer.bytes_per_second for g in mixed.cluster.groups)
    with pytest.raises(MeshwrightError, match="whose they are"):
        with_changes(mixed, read_changes(["nodes=+1"]))


def test_what_a_change_buys(monkeypatch: pytest.MonkeyPatch) -> None:
    eight, sixteen = (Plan(techniques=(technique_named("shard")(size=n),), batch=128) for n in (8, 16))
    made_up(monkeypatch, lambda machine, **_: found_of(made(6.0, plan=sixteen)))
    compared = compare(ask(), read_changes(["nodes=+1"]), made(9.0, plan=eight))
    assert compared.rate_ratio == pytest.approx(1.5)
    assert compared.device_ratio == 2
    assert [str(change) for change in usual_changes(ask("h100"))] == ["memory=+25%", "nodes=+1"]
    assert [str(change) for change in usual_changes(ask("2x8xh100"))] == ["memory=+25%", "outer=x2", "nodes=+1"]


# Numbers of devices


@pytest.mark.parametrize(
    ("name", "low", "high", "sizes"),
    [
        ("8xh100", 16, 64, (16, 24, 32, 40, 48, 56, 64)),
        ("8xh100", 1, 8, (1, 2, 4, 8)),
        ("8xh100", 2, 64, (2, 4, 8, 16, 32, 64)),
        ("8xh100", 9, 15, ()),
        ("8xh100", 30, 200, (32, 64, 128, 200)),
        ("h100", 1, 16, (1, 2, 4, 8, 16)),
        ("6xh100", 1, 12, (1, 2, 4, 6, 12)),
    ],
)
def test_sizes_are_parts_of_a_node_or_whole_nodes(name: str, low: int, high: int, sizes: tuple[int, ...]) -> None:
    machine = cluster(name)
    assert sizes_between(machine, low, high) == sizes
    assert all((one := resized(machine, size)) is not None and one.num_devices == size for size in sizes)


def test_many_sizes_are_thinned_to_eight() -> None:
    sizes = sizes_between(cluster("8xh100"), 1, 1 << 17)
    assert len(sizes) == 8
    assert sizes[0] == 1
    assert sizes[-1] == 1 << 17
    assert list(sizes) == sorted(set(sizes))


def test_larger_sizes_double() -> None:
    assert list(larger_sizes(cluster("h100")))[:5] == [2, 4, 8, 16, 32]
    assert list(larger_sizes(cluster("3x6xh100")))[:3] == [24, 48, 96]
    assert resized(cluster("8xh100"), 12) is None
    assert list(larger_sizes(cluster("8xh100+8xa100"))) == []


def test_fastest_and_cheapest_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {8: 10.0, 16: 6.0, 32: 4.0}

    def answer(machine: object, **_: object) -> SearchResult:
        count = machine.num_devices  # type: ignore[attr-defined]
        return found_of(made(seconds[count])) if count != 24 else found_of(None, made(1.0, peak=90 * GIB))

    made_up(monkeypatch, answer)
    sizes = compare_sizes(ask(), (8, 16, 24, 32), silent)
    assert sizes.fastest is not None
    assert sizes.cheapest is not None
    assert (sizes.fastest.devices, sizes.cheapest.devices) == (32, 8)
    # 1e6 tokens a step of 10 s on 8 devices: 1e9 tokens take 10,000 s, 80,000 device-seconds.
    assert sizes.tried[0].device_hours(1e9) == pytest.approx(80_000 / 3600)
    assert "10.0 GiB too much" in sizes.tried[2].outcome.reason


# The batch that ends soonest


def test_steps_to_the_target_by_hand() -> None:
    goal = read_goal(LLAMA, 8192, critical_batch=100, target_steps=1000)
    assert goal.steps(100) == 2000
    assert goal.steps(50) == 3000
    assert goal.steps(10**9) == pytest.approx(1000, rel=1e-5)
    # Least samples over least steps is the critical batch.
    both = read_goal(LLAMA, 8192, target_steps=1000, target_tokens=8192 * 64_000)
    assert both.critical_batch == 64
    assert both.least_steps == 1000
    guessed = read_goal(LLAMA, 8192, target_tokens=300e9)
    assert guessed.critical_batch * 8192 == pytest.approx(3.2e6)
    assert guessed.least_steps * guessed.critical_batch * 8192 == pytest.approx(300e9)
    assert any("guess" in source for source in guessed.sources)
    with pytest.raises(MeshwrightError, match="all three"):
        read_goal(LLAMA, 8192, 1, 2, 3)
    with pytest.raises(MeshwrightError, match="above 0"):
        read_goal(LLAMA, 8192, -1)


@pytest.mark.parametrize(("devices", "first"), [(8, 1), (64, 8), (7, 7), (24, 3), (1, 1)])
def test_batches_are_doubled_from_what_devices_can_share(devices: int, first: int) -> None:
    assert ladder(devices) == tuple(first * 2**i for i in range(10))


@pytest.mark.parametrize("critical", [1.0, 30.0, 1000.0, 1e5])
def test_the_batch_that_ends_soonest_is_found(monkeypatch: pytest.MonkeyPatch, critical: float) -> None:
    """A step takes half a second and a hundredth for each sample a device has."""

    def step_seconds(batch: int, devices: int) -> float:
        return 0.5 + 0.01 * batch * 8 / devices

    def answer(machine: object, **settings: object) -> SearchResult:
        return found_of(made(step_seconds(settings["batch"], machine.num_devices)))  # type: ignore[arg-type, attr-defined]

    made_up(monkeypatch, answer)
    goal = read_goal(LLAMA, 8192, critical_batch=critical, target_steps=1000)
    goals = best_batch(ask(), goal, fewer(8), silent)
    every = {
        (b, d): 1000 * (1 + critical / b) * step_seconds(b, d) for b in (2**i for i in range(16)) for d in (2, 4, 8)
    }
    best = min(every, key=lambda pair: every[pair])
    assert goals.soonest is not None
    assert (goals.soonest.batch, goals.soonest.devices) == best
    assert goals.soonest.seconds == pytest.approx(every[best])
    for devices, run in goals.best_of_devices().items():
        assert run.seconds == pytest.approx(min(every[pair] for pair in every if pair[1] == devices), rel=0.02)


def test_fewer_devices_may_end_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(monkeypatch, lambda machine, **_: found_of(made(float(machine.num_devices))))
    goals = best_batch(ask(), read_goal(LLAMA, 8192, critical_batch=1), fewer(8), silent)
    assert goals.soonest is not None
    assert goals.soonest.devices == 2
    assert goals.cheapest is goals.soonest


# Why


def _shared_out() -> Plan:
    shard, tensor = technique_named("shard")(size=4), technique_named("tensor")(size=2)
    return Plan(techniques=(shard, tensor), batch=128, microbatch=2)


@pytest.mark.parametrize(
    ("knob", "pins", "bans"),
    [
        ("shard", ["shard.size=2", "shard.size=8"], ["shard"]),
        ("shard.size", ["shard.size=2", "shard.size=8"], ["shard"]),
        ("tensor", ["tensor.size=4"], ["tensor"]),
        ("tensor.sequence", ["tensor.sequence=true"], ["tensor"]),
        ("microbatch", ["microbatch=1", "microbatch=4"], []),
        ("pipeline", ["pipeline"], []),
    ],
)
def test_neighbours_of_a_knob_are_asked(
    monkeypatch: pytest.MonkeyPatch, knob: str, pins: list[str], bans: list[str]
) -> None:
    # With what is absent nothing fits, so there are no values around it to ask about.
    asked = made_up(monkeypatch, lambda machine, **_: found_of(None, made(3.0, peak=90 * GIB)))
    told = why(ask(), made(1.0, plan=_shared_out()), read_knobs([knob])[0], silent)
    assert [pin for each in asked for pin in each["pin"]] == pins  # type: ignore[attr-defined]
    assert [ban for each in asked for ban in each["ban"]] == bans  # type: ignore[attr-defined]
    assert len(told.others) == len(pins) + len(bans)
    assert all("10.0 GiB too much" in other.reason for other in told.others)


def test_values_around_what_is_absent_are_those_of_the_best_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = Plan(techniques=(technique_named("pipeline")(size=4),), batch=128)
    asked = made_up(monkeypatch, lambda machine, **_: found_of(made(2.0, plan=with_it)))
    told = why(ask(), made(1.0, plan=_shared_out()), read_knobs(["pipeline"])[0], silent)
    assert told.value == "absent"
    assert [each["pin"] for each in asked] == [("pipeline",), ("pipeline.size=2",), ("pipeline.size=8",)]


def test_a_setting_of_few_values_is_asked_value_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(techniques=(technique_named("replicate")(size=8),), batch=128)
    asked = made_up(monkeypatch, lambda machine, **_: found_of(made(2.0, plan=plan)))
    told = why(ask(), made(1.0, plan=plan), read_knobs(["replicate.algorithm"])[0], silent)
    assert told.value == "auto"
    others = ["ring", "tree", "doubling", "scatter_gather", "hierarchical"]
    pins = [each["pin"] for each in asked if each["pin"]]
    assert pins == [
        (f"replicate.algorithm={name}", *("replicate.node_size=8",) * (name == others[-1])) for name in others
    ]
    (note,) = (each for each in told.notes if each.startswith("Its largest all_reduce"))
    ranked = [words.split()[0] for words in note.partition(": ")[2].partition(". Only")[0].split(", ")]
    assert sorted(ranked) == sorted(["auto", *others])
    assert "over 8 ranks" in note


def test_own_wishes_about_a_knob_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = made_up(monkeypatch, lambda machine, **_: found_of(made(2.0)))
    pinned = ask(pin=("shard=4", "microbatch=2"), ban=("shard.stage=1", "pipeline"))
    told = why(pinned, made(1.0, plan=_shared_out()), read_knobs(["shard"])[0], silent)
    assert told.wished == "--pin shard=4, --ban shard.stage=1"
    assert [each["pin"] for each in asked[:2]] == [("microbatch=2", f"shard.size={n}") for n in (2, 8)]
    assert asked[-1]["ban"] == ("pipeline", "shard")


def test_beyond_the_largest_size_the_rule_is_heard() -> None:
    """A real search: eight devices cannot be an axis of sixteen."""
    tiny = Question(
        profile=TINY, cluster=cluster("2xlaptop"), batch=4, sequence=32, allow="reordered", ban=("pipeline",)
    )
    best = tiny.ask().best
    assert best is not None
    axis = next(technique for technique in best[0].techniques if technique.axis)
    told = why(tiny, best, read_knobs([axis.name])[0], silent)
    beyond = next(other for other in told.others if other.words.endswith("=4"))
    assert beyond.best is None
    assert "2 devices cannot be shared out to an axis of 4" in beyond.reason or "4" in beyond.reason
    for other in told.others:
        if other.best is not None:
            assert other.best[1].step_seconds >= best[1].step_seconds


def test_knobs_that_are_none_are_told_at_once() -> None:
    with pytest.raises(MeshwrightError) as told:
        read_knobs(["nothing", "tensor.sise", "microbatch.size"])
    assert len(told.value.problems) == 3
    assert '"size"' in told.value.problems[1].fix


# The front


@pytest.mark.parametrize("seed", range(20))
def test_every_point_of_the_front_is_on_the_true_one(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Plans with peaks and times drawn at random; brute force says which of them no other beats."""
    draw = random.Random(seed)
    plans = [(draw.randint(2 * GIB, 400 * GIB), draw.uniform(1, 5)) for _ in range(draw.choice([1, 3, 40, 400]))]
    true = [(p, s) for p, s in plans if not any((q <= p and r < s) or (q < p and r <= s) for q, r in plans)]

    def answer(machine: object, **_: object) -> SearchResult:
        memory = machine.device.memory_bytes  # type: ignore[attr-defined]
        fitting = [(s, p) for p, s in plans if p <= memory]
        if not fitting:
            peak, seconds = min(plans)
            return found_of(None, made(seconds, peak=peak, memory=memory))
        seconds, peak = min(fitting)
        return found_of(made(seconds, peak=peak, memory=memory))

    asked = made_up(monkeypatch, answer)
    now = ask().ask().best
    points = front(ask(), silent, now).points
    told = [(point.peak_bytes, point.seconds) for point in points]
    assert set(told) <= set(true)
    assert told[0] == min(true)
    assert told[-1] == max(true)
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(told))
    assert now is None or (now[1].peak_bytes, now[1].step_seconds) in told
    if len(points) < MOST_POINTS:  # what is left out lies within one percent of memory or a little time of what is told
        for peak, _ in set(true) - set(told):
            upper = min(point for point in told if point[0] > peak)
            lower = max((p for p in points if p.peak_bytes < peak), key=lambda p: p.peak_bytes)
            assert upper[0] <= 1.01 * lower.budget_bytes or lower.seconds <= 1.002 * upper[1]
    assert len(asked) <= 30
    # What a point promises: with its budget nothing is faster.
    for point in points:
        assert min(s for p, s in plans if p <= point.budget_bytes) == point.seconds


def test_a_front_that_is_stopped_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([found_of(made(1.0, peak=100 * GIB, memory=1 << 50)), found_of(None, is_interrupted=True)])
    made_up(monkeypatch, lambda machine, **_: next(answers))
    stopped = front(ask(), silent, made(2.0, peak=70 * GIB))
    assert stopped.is_interrupted
    assert [point.seconds for point in stopped.points] == [2.0]


# Explaining


def test_the_runner_up_the_unfit_and_the_gap_are_told() -> None:
    best, other = _shared_out(), replace(_shared_out(), microbatch=4)
    winner, second = made(1.0, plan=best), made(1.1, plan=other)
    unfit = made(0.8, plan=replace(best, microbatch=8), peak=95 * GIB)
    alternatives = (
        Alternative(technique="tensor", is_used=True, scored=made(2.5), least_seconds=2.499),
        Alternative(technique="shard", is_used=True, scored=made(1.5), least_seconds=1.001),
        Alternative(technique="replicate", is_used=True, scored=made(3.0), least_seconds=1.2),
        Alternative(technique="compile", is_used=True, scored=None, least_seconds=1.3),
        Alternative(technique="recompute", is_used=False, scored=None),
    )
    found = found_of(winner, ranked=(winner, second), gap_fraction=0.008, faster_unfit=unfit, alternatives=alternatives)
    text = "\n".join(explain(found, cluster("8xh100")))
    assert "none of 7 plans is more than 0.8 % faster" in text
    assert "runner-up: 10 % slower with microbatch: 2 -> 4" in text
    assert "20 % faster with microbatch: 2 -> 8; 15.0 GiB of memory too much" in text
    assert "without: tensor 2.5 x slower, shard at most 50 % slower, " in text
    assert "replicate at least 20 %, at most 3.0 x slower, compile at least 30 % slower" in text
    assert "with: recompute nothing fits" in text
    told = explanation_as_json(found)
    assert told["runner_up"]["times_step_seconds"] == pytest.approx(1.1)
    assert told["faster_unfit"]["missing_bytes"] == 15 * GIB
    assert math.isclose(told["alternatives"][0]["step_seconds"], 2.5)


def test_the_order_of_other_axes_goes_without_saying() -> None:
    one, two = _shared_out(), Plan(techniques=(technique_named("shard")(size=8),), batch=128, microbatch=2)
    assert differences(one, two) == ("shard.size: 4 -> 8", "- tensor(size=2)")
    turned = replace(one, axis_order=("tp", "fsdp"))
    assert any(line.startswith("axis_order") for line in differences(one, turned))


def test_what_cannot_be_asked_is_a_reason() -> None:
    refused = outcome("tensor 3", ask(pin=("tensor=3",)))
    assert refused.best is None
    assert "tensor" in refused.reason
