"""Drawings of timelines: in a terminal letter by letter, as a picture well formed and without words on words.

Tests of `report/timeline_lanes.py`, `report/timeline_svg.py`, `report/timeline_text.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.core.timeline import MemoryPoint, Span, Timeline
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.report.timeline_lanes import Spent, kind_of, spent
from meshwright.report.timeline_svg import LETTER, WIDTH, picture
from meshwright.report.timeline_text import draw
from meshwright.simulator.simulate import simulate

GIB = 1024**3


def span(device: int, name: str, start: float, end: float, lane: str = "compute", origin: str = "") -> Span:
    return Span(
        device=device,
        lane=lane,  # type: ignore[arg-type]
        name=name,
        start_seconds=start,
        seconds=end - start,
        origin=origin,
    )


def two_ranks() -> Timeline:
    spans = (
        span(0, "forward 0", 0, 2),
        span(0, "backward_input 0", 5, 7),
        span(0, "backward_weight 0", 7, 8),
        span(0, "update", 9, 10),
        span(0, "exchange", 6, 9, "collective", "replicate"),
        span(0, "send_forward 0", 2, 2.5, "collective", "pipeline"),
        span(7, "forward 0", 2.5, 3.5),
        span(7, "backward 0", 3.5, 5),
    )
    memory = (
        MemoryPoint(device=0, seconds=0.0, bytes=2 * GIB, by_category={"parameters": 2 * GIB}),
        MemoryPoint(device=0, seconds=5.0, bytes=4 * GIB, by_category={"parameters": 2 * GIB, "a<b&c": 2 * GIB}),
        MemoryPoint(device=7, seconds=0.0, bytes=GIB),
    )
    told = {"ranks_each": "4", "ranks": "8", "memory_bytes": str(8 * GIB), "microbatches": "1 of 1"}
    return Timeline(source="predicted", plan_fingerprint="x", spans=spans, memory=memory, environment=told)


def test_copies_are_neither_collectives_nor_idle_time() -> None:
    spans = (
        span(0, "forward 0", 0, 4),
        span(0, "copy", 3, 6, "copy", "offload"),
        span(0, "exchange", 5, 8, "collective", "replicate"),
        span(0, "update", 9, 10),
    )
    timeline = replace(two_ranks(), spans=spans, memory=())
    assert kind_of(spans[1]) == "copy"
    assert spent(timeline) == Spent(compute=5.0, collective=3.0, copy=1.0, idle=1.0)
    row, *_, legend = [line for line in text_of(timeline, 43) if "F" in line]
    drawn = re.sub(r"rank 0 *|busy.*", "", row).strip()
    assert re.fullmatch(r"F+~+=+\.+U+", drawn), drawn
    assert "~ copy alone" in legend


def text_of(timeline: Timeline, width: int, plain: bool = True) -> list[str]:
    return ["".join(words for words, _ in line) for line in draw(timeline, width=width, plain=plain)]


def test_a_terminal_shows_every_rank_and_the_memory_of_the_fullest() -> None:
    lines = text_of(two_ranks(), 63)  # forty columns of a quarter of a second
    assert lines == [
        "each row stands for 4 equal ranks of 8",
        "rank 0      FFFFFFFF............BBBBBBBBWWWW====UUUU  busy  60%",
        "rank 7      ..........FFFFBBBBBB....................  busy  25%",
        "            0                                10.00 s",
        "            ----------------------------------------",
        "memory                                              ",
        "of rank 0                                           ",
        "                                ####################",
        "            ########################################",
        "            at most 4.0 GiB; a device has 8.0 GiB (the line)",
        "            F forward   B backward   W weight half   U update   = collective alone   . idle",
    ]


def test_many_short_spans_show_in_their_proportion() -> None:
    short = [span(0, "forward 0", 0.01 * i, 0.01 * i + 0.0025) for i in range(1000)]
    short += [span(0, "backward 0", 0.01 * i + 0.0025, 0.01 * i + 0.01) for i in range(1000)]
    line = Timeline(source="measured", plan_fingerprint="x", spans=tuple(short))
    row = text_of(line, 100)[0]
    assert row.count("F") == pytest.approx(row.count("B") / 3, abs=2)


def test_what_is_left_out_is_said() -> None:
    line = two_ranks()
    told = {**line.environment, "microbatches": "1 of 9", "steps": "3"}
    told |= {"period_start_seconds": "2.5", "period_end_seconds": "7.5"}
    lines = text_of(replace(line, environment=told), 63)
    assert "microbatches: 1 of 9; the first 3 of steps that overlap" in lines[0]
    assert lines[4] == f"{'':12}{'':10}|- one step: 5.00 s |"


def test_a_drawing_without_memory_or_spans() -> None:
    bare = replace(two_ranks(), memory=(), environment={})
    assert len(text_of(bare, 63)) == 4
    assert text_of(replace(bare, spans=()), 63)
    assert ElementTree.fromstring(picture([replace(bare, spans=())], title="nothing")) is not None


def test_every_sign_of_a_plain_drawing_is_ascii() -> None:
    assert all(line.isascii() for line in text_of(two_ranks(), 100))
    assert not all(line.isascii() for line in text_of(two_ranks(), 100, plain=False))


def boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Words and the rectangle they take, by the width of a monospaced letter."""
    found = []
    for node in root.iter("{http://www.w3.org/2000/svg}text"):
        words, size = node.text or "", float(node.attrib["font-size"])
        x, y, wide = float(node.attrib["x"]), float(node.attrib["y"]), LETTER * size * len(words)
        x -= {"start": 0.0, "middle": wide / 2, "end": wide}[node.attrib["text-anchor"]]
        found.append((words, x, y - 0.8 * size, x + wide, y + 0.2 * size))
    return found


def _plan(*techniques: tuple[str, dict[str, object]], batch: int = 16) -> Plan:
    return Plan(techniques=tuple(technique_named(name)(**settings) for name, settings in techniques), batch=batch)


PLANS = [
    _plan(("shard", {"size": 8})),
    _plan(("pipeline", {"size": 4}), ("tensor", {"size": 2}), ("recompute", {"layers": "first 2"}), ("precision", {})),
    _plan(("pipeline", {"size": 2, "schedule": "async"}), ("replicate", {"size": 2})),
    _plan(("pipeline", {"size": 4, "schedule": "zero_bubble_h1"}), batch=512),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("is_over", [False, True], ids=["predicted", "over measured"])
def test_a_picture_is_whole_and_no_words_lie_on_others(plan: Plan, is_over: bool) -> None:
    profile = decoder_profile(preset("byte-3m"), "byte-3m")
    line = simulate(profile, plan, cluster("8xh100"), sequence=128)
    slower = [replace(s, start_seconds=1.7 * s.start_seconds, seconds=1.7 * s.seconds, origin="") for s in line.spans]
    measured = replace(line, source="measured", spans=tuple(slower), environment={})
    title, note = f"byte-3m <&> 8xh100: {plan} " * 2, "bound by something " * 20
    text = picture([line, measured] if is_over else [line], title=title, notes=[note])
    root = ElementTree.fromstring(text)
    assert root.attrib["width"] == str(WIDTH)
    assert not re.search(r"<script|<style|@import|href|url\(|<image|<foreignObject", text)
    found = boxes(root)
    tall = float(root.attrib["height"])
    for at, (words, left, top, right, bottom) in enumerate(found):
        assert min(left, top) >= 0, words
        assert (right <= WIDTH, bottom <= tall) == (True, True), words
        for others, left2, top2, right2, bottom2 in found[at + 1 :]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, f"{words} lies on {others}"
    told = " ".join(words for words, *_ in found)
    assert "predicted:" in told
    assert ("measured:" in told) == is_over
    assert all(technique.name in told for technique in plan.techniques)
    assert len(text) < 1_500_000


def shapes(text: str, kind: str) -> list[dict[str, str]]:
    return [dict(node.attrib) for node in ElementTree.fromstring(text).iter(f"{{http://www.w3.org/2000/svg}}{kind}")]


def test_spans_lie_where_their_time_is() -> None:
    text = picture([two_ranks()], title="t")
    titles = {node.text: node for node in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}title")}
    assert "exchange: replicate, 3.00 s" in titles
    root = ElementTree.fromstring(text)
    rects = {
        rect[0].text: (float(rect.attrib["x"]), float(rect.attrib["width"]))
        for rect in root.iter("{http://www.w3.org/2000/svg}rect")
        if len(rect)
    }
    # Ten seconds from 120 to 1160: 104 pixels a second.
    assert rects["exchange: replicate, 3.00 s"] == (120 + 6 * 104, 3 * 104)
    assert rects["update: model, 1.00 s"] == (120 + 9 * 104, 104)


def test_memory_is_stacked_and_the_limit_is_a_line() -> None:
    text = picture([two_ranks()], title="t")
    areas = [[tuple(map(float, p.split(","))) for p in each["points"].split()] for each in shapes(text, "polygon")]
    assert len(areas) == 2  # parameters, which never change, at the bottom; then the other
    dashed = [float(each["y1"]) for each in shapes(text, "line") if "stroke-dasharray" in each]
    bottom = max(y for _, y in areas[0])
    # 8 GiB of a device, 2 of them parameters, 4 at the peak.
    assert (bottom - min(y for _, y in areas[0])) / (bottom - dashed[0]) == pytest.approx(2 / 8, rel=0.01)
    assert (bottom - min(y for _, y in areas[1])) / (bottom - dashed[0]) == pytest.approx(4 / 8, rel=0.01)
    small = replace(two_ranks(), environment={"memory_bytes": str(80 * GIB)})
    assert not [each for each in shapes(picture([small], title="t"), "line") if "stroke-dasharray" in each]


def test_very_many_spans_become_a_bounded_picture() -> None:
    many = tuple(span(0, "forward 0", i / 1e5, (i + 0.5) / 1e5, origin="ab"[i % 2]) for i in range(100_000))
    text = picture([Timeline(source="measured", plan_fingerprint="x", spans=many)], title="t")
    assert len(text) < 300_000
