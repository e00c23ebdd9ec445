"""Predicted timelines: what lies beside what, what it adds up to, and what traces of it say. Worked out by hand.

Tests of `report/timeline_lanes.py`, `simulator/simulate.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from meshwright.core.cluster import Cluster, Device, Link
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.core.timeline import MemoryPoint, Span, Timeline, in_rows, last_step
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.report.timeline_lanes import compared, shown_devices, spent, united, without
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import stage_plan
from meshwright.simulator.simulate import simulate

PROFILE = decoder_profile(preset("byte-3m"), "byte-3m")
NODES = cluster("2x4xh100")


def made(bytes_per_second: float = 1e9, jitter_fraction: float = 0.0) -> Cluster:
    """Eight devices whose collectives cost bytes over a rate and nothing else."""
    link = Link(bytes_per_second=bytes_per_second, latency_seconds=0.0)
    device = Device(
        kind="cuda", memory_bytes=1 << 36, memory_bytes_per_second=1e12, flops_per_second={"fp32": 1e12, "bf16": 1e13}
    )
    sources = {"inner": "measured", "outer": "measured"}
    return Cluster(
        name="made",
        device=device,
        inner=link,
        outer=link,
        devices_per_node=8,
        sources=sources,
        jitter_fraction=jitter_fraction,
    )


def plan_of(*techniques: Technique, batch: int = 16, microbatch: int = 1) -> Plan:
    return Plan(techniques=techniques, batch=batch, microbatch=microbatch)


def t(name: str, **settings: Any) -> Technique:
    return technique_named(name)(**settings)


def of(line: Timeline, device: int, lane: str, name: str = "") -> list[Span]:
    return [s for s in line.spans if (s.device, s.lane) == (device, lane) and s.name.startswith(name)]


def times(spans: list[Span]) -> list[tuple[float, float]]:
    return [(span.start_seconds, span.end_seconds) for span in spans]


def test_a_hidden_exchange_is_drawn_whole_beside_the_backward_that_hides_it() -> None:
    line = simulate(PROFILE, plan_of(t("replicate", size=2), batch=2), made(1e11), sequence=128)
    exchange = of(line, 0, "collective", "exchange")
    # All-reduce by two: each passes half of the bytes on, twice.
    assert sum(span.seconds for span in exchange) == pytest.approx(PROFILE.num_params * 4 / 1e11, rel=1e-3)
    backward = united(times(of(line, 0, "compute", "backward")))
    beside = sum(e - s for s, e in united(times(exchange))) - sum(e - s for s, e in without(times(exchange), backward))
    assert beside > 0.5 * exchange[0].seconds
    assert max(span.end_seconds for span in exchange) <= min(s for s, _ in times(of(line, 0, "compute", "update")))


def test_a_slow_exchange_shows_where_backward_is_over() -> None:
    line = simulate(PROFILE, plan_of(t("replicate", size=2), batch=2), made(1e6), sequence=128)
    exchange, backward = of(line, 0, "collective", "exchange"), of(line, 0, "compute", "backward")
    over = max(span.end_seconds for span in backward)
    assert exchange[0].start_seconds < over
    assert exchange[-1].end_seconds - over > 0.9 * PROFILE.num_params * 4 / 1e6
    assert spent(line).collective == pytest.approx(exchange[-1].end_seconds - over)


PLANS = [
    plan_of(),
    plan_of(t("shard", size=8), t("precision"), t("recompute", layers="first 2")),
    plan_of(t("shard", size=4, stage=1), t("tensor", size=2)),
    plan_of(t("shard", size=2, stage=2), t("replicate", size=2), batch=32, microbatch=2),
    plan_of(t("pipeline", size=4), t("replicate", size=2), microbatch=2),
    plan_of(t("pipeline", size=2, schedule="interleaved"), t("tensor", size=2)),
    plan_of(t("pipeline", size=2, schedule="zbv"), t("replicate", size=2)),
    plan_of(t("pipeline", size=4, schedule="zero_bubble_h1")),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("machines", [NODES, made(jitter_fraction=0.02)], ids=["h100", "made"])
def test_a_device_computes_one_thing_at_a_time_and_the_parts_add_up(plan: Plan, machines: Cluster) -> None:
    line = simulate(PROFILE, plan, machines, sequence=128)
    step = forecast(PROFILE, plan, machines, sequence=128).step_seconds
    assert line.seconds == pytest.approx(step)
    for device in line.devices:
        assert len(in_rows(of(line, device, "compute"))) == 1
        own = [span.seconds for span in line.spans if (span.device, span.lane) == (device, "compute")]
        assert sum(own) <= line.seconds * (1 + 1e-9)
    parts = spent(line)
    assert parts.compute + parts.collective + parts.idle == pytest.approx(step)
    if len(line.devices) == 1:
        assert parts.idle == pytest.approx(0.0, abs=1e-6 * step)
    assert line.environment["ranks_each"] == str(plan.num_ranks // len(line.devices))


def test_compute_and_what_stops_it_fill_a_microbatch() -> None:
    """The time of an event is what its spans cover together: nothing is drawn after it, nothing is left out."""
    plan = plan_of(t("shard", size=4), t("tensor", size=2))
    line, staged = simulate(PROFILE, plan, made(), sequence=128), stage_plan_of(plan)
    for kind in ("forward", "backward"):
        mine = [span for lane in ("compute", "collective") for span in of(line, 0, lane, f"{kind} 1")]
        covered = united(times(mine))
        assert len(covered) == 1
        assert covered[0][1] - covered[0][0] == pytest.approx(getattr(staged.all_seconds, kind))


def stage_plan_of(plan: Plan) -> Any:
    from meshwright.core.work import ADAM

    return stage_plan(PROFILE, plan, made(), sequence=128, optimizer=ADAM).stages[0]


def test_overlapping_steps_are_drawn_as_a_stream_with_one_step_marked() -> None:
    plan = plan_of(t("pipeline", size=2, schedule="async"), batch=8)
    line = simulate(PROFILE, plan, made(9e13), sequence=128)
    start, end = (float(line.environment[f"period_{name}_seconds"]) for name in ("start", "end"))
    slowest = max(
        sum(span.seconds for span in of(line, device, "compute", "forward") + of(line, device, "compute", "backward"))
        for device in line.devices
    )
    update = max(sum(span.seconds for span in of(line, device, "compute", "update")) for device in line.devices)
    assert end - start == pytest.approx((slowest + update) / 3, rel=0.02)
    assert end - start == pytest.approx(forecast(PROFILE, plan, made(9e13), sequence=128).step_seconds, rel=0.02)
    assert {span.name.split()[1] for span in of(line, 0, "compute", "forward")} == {str(i) for i in range(24)}
    parts = spent(line)
    assert parts.compute + parts.collective + parts.idle == pytest.approx(end - start)


def trace(line: Timeline) -> list[dict[str, Any]]:
    return json.loads(line.to_chrome())["traceEvents"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble_h1", "zbv"])
def test_a_trace_has_names_rows_without_overlaps_and_an_arrow_for_each_message(schedule: str) -> None:
    plan = plan_of(t("pipeline", size=2, schedule=schedule), t("shard" if "z" not in schedule else "replicate", size=2))
    line = simulate(PROFILE, plan, made(), sequence=128)
    events = trace(line)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {d: f"rank {d} (predicted, one of 2 equal ranks)" for d in (0, 2)}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(threads.values()) >= {"compute", "collective", "message"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in slices.values():
        row.sort()
        assert all(after[0] >= before[1] * (1 - 1e-9) for before, after in pairwise(row))
    begun = {e["id"]: e for e in events if e["ph"] == "s"}
    ended = {e["id"]: e for e in events if e["ph"] == "f"}
    sends = [span for span in line.spans if span.name.startswith("send_")]
    assert len(begun) == len(ended) == len(sends) > 0
    for number, arrow in begun.items():
        there = ended[number]
        assert threads[there["pid"], there["tid"]] == "compute"
        assert there["pid"] != arrow["pid"]
        assert any(start == there["ts"] for start, _ in slices[there["pid"], there["tid"]])
        assert there["ts"] >= arrow["ts"]


def test_a_trace_counts_memory_by_category() -> None:
    line = simulate(PROFILE, plan_of(), made(), sequence=128)
    counters = [event for event in trace(line) if event["ph"] == "C"]
    assert len(counters) == len(line.memory)
    assert counters[0]["args"]["parameters"] == PROFILE.num_params * 4
    assert all(
        sum(c["args"].values()) == pytest.approx(p.bytes, abs=9) for c, p in zip(counters, line.memory, strict=True)
    )


def test_sixteen_thousand_ranks_are_sixteen_lanes() -> None:
    profile = decoder_profile(preset("llama3-405b"), "llama3-405b")
    techniques = (t("pipeline", size=16), t("tensor", size=8), t("shard", size=128), t("precision"), t("recompute"))
    plan = plan_of(*techniques, batch=2048)
    line = simulate(profile, plan, cluster("2048x8xh100"), sequence=8192)
    assert line.devices == tuple(range(0, 16384, 1024))
    assert (line.environment["ranks"], line.environment["ranks_each"]) == ("16384", "1024")
    assert len(line.spans) < 10_000


def hand(source: str = "measured", **changes: Any) -> Timeline:
    """Two ranks, two steps of three seconds each; rank 1 begins a second later."""
    spans = []
    for rank, first in ((0, 10.0), (1, 11.0)):
        for start in (first, first + 3):
            common = {"device": rank, "lane": "compute"}
            spans += [
                Span(**common, name="forward 0", start_seconds=start, seconds=1.0),
                Span(**common, name="update", start_seconds=start + 2, seconds=0.5),
                Span(device=rank, lane="collective", name="gloo:all_reduce", start_seconds=start + 0.5, seconds=1.25),
                Span(device=rank, lane="collective", name="receive_forward 0", start_seconds=start, seconds=1.9),
            ]
    memory = tuple(MemoryPoint(device=0, seconds=at, bytes=int(at)) for at in (10.0, 12.6, 13.5))
    return replace(
        Timeline(source=source, plan_fingerprint="x", spans=tuple(spans), memory=memory),  # type: ignore[arg-type]
        **changes,
    )


def test_the_last_step_and_how_it_is_spent() -> None:
    step = last_step(hand())
    assert {(s.device, s.name, s.start_seconds) for s in step.spans if s.lane == "compute"} == {
        (0, "forward 0", 0.0),
        (0, "update", 2.0),
        (1, "forward 0", 1.0),
        (1, "update", 3.0),
    }
    assert [(p.seconds, p.bytes) for p in step.memory] == [(0.0, 12), (0.5, 13)]
    assert step.seconds == 3.5
    parts = spent(step)
    # Of 3.5 seconds: 1.5 compute, 0.75 of the all-reduce after the forward; waiting for messages is idle.
    assert (parts.compute, parts.collective, parts.idle) == pytest.approx((1.5, 0.75, 1.25))


def test_the_part_that_differs_most_is_named() -> None:
    step = last_step(hand())
    predicted = replace(step, source="predicted", spans=tuple(s for s in step.spans if s.lane == "compute"))
    assert compared(predicted, step) == (
        "timeline: a step of 3.50 s predicted, 3.50 s measured while profiled; "
        "collectives differ most: 750.0 ms more (0 s -> 750.0 ms)"
    )
    partial = replace(predicted, environment={"microbatches": "2 of 4"})
    assert compared(partial, step) == "timeline: a step of 3.50 s predicted, 3.50 s measured while profiled"


def test_intervals() -> None:
    assert united([(3, 4), (0, 1), (0.5, 2), (4, 5), (6, 6)]) == [(0, 2), (3, 5)]
    assert without([(0, 4), (5, 9)], [(1, 2), (3, 6), (8, 8.5)]) == [(0, 1), (2, 3), (6, 8), (8.5, 9)]
    assert without([(0, 1)], []) == [(0, 1)]


def test_of_very_many_ranks_some_are_shown() -> None:
    one = Span(device=0, lane="compute", name="forward 0", start_seconds=0.0, seconds=1.0)
    many = Timeline(source="measured", plan_fingerprint="x", spans=tuple(replace(one, device=d) for d in range(1000)))
    shown = shown_devices(many)
    assert (len(shown), shown[0], shown[-1]) == (32, 0, 999)
    assert shown_devices(many, wanted=(0, 500)) == (0, 500)


@pytest.mark.parametrize(("field", "value"), [("start_seconds", -1.0), ("seconds", -0.1), ("device", -1)])
def test_a_span_below_zero_is_refused_with_its_place(field: str, value: float) -> None:
    changed = json.loads(hand().to_json())
    changed["spans"][3][field] = value
    with pytest.raises(MeshwrightError, match=rf"line\.spans\[3\]\.{field}: is {value}, below zero"):
        Timeline.from_json(json.dumps(changed), "line")


def test_a_timeline_of_the_first_version_is_read() -> None:
    old = json.loads(hand().to_json()) | {"version": 1}
    for span in old["spans"]:
        del span["to_device"]
    for point in old["memory"]:
        del point["by_category"]
    assert replace(Timeline.from_json(json.dumps(old)), version=2) == hand()
