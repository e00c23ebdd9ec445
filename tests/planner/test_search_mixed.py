"""The search on groups of different devices: what each place gets, against brute force and by hand.

Tests of `planner/search.py` and `planner/splits.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from meshwright.ask.explain import explain_groups
from meshwright.core.cluster import Cluster, Device, DeviceGroup, Link
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named, technique_names
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.planner.search import SearchResult, search, share_microbatches, span_costs
from meshwright.planner.splits import fastest_splits, largest_first, most_even, smallest_first
from meshwright.simulator.forecast import Forecast, forecast

SEQUENCE = 128
PROFILE = decoder_profile(
    DecoderConfig(
        num_layers=5, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=512, vocab_size=512, max_sequence=256
    ),
    "small",
)
LAPTOP = replace(cluster("laptop"), jitter_fraction=0.0)
NEAR = Link(name="near", bytes_per_second=1e10, latency_seconds=1e-6)
ONLY = ("replicate", "pipeline")
OTHERS = [name for name in technique_names() if name not in ONLY]
WISHES: dict[str, Any] = {"sequence": SEQUENCE, "allow": "reordered"}
CHUNKED = ("interleaved", "looped_bfs", "zbv", "dualpipe_v")
SIMPLE = [*OTHERS, *(f"pipeline.schedule={name}" for name in (*CHUNKED, "gpipe", "zero_bubble_h1", "zero_bubble_h2"))]


def t(name: str, **settings: Any) -> Technique:
    return technique_named(name)(**settings)


def slower(device: Device, times: float) -> Device:
    return replace(
        device,
        flops_per_second={dtype: rate / times for dtype, rate in device.flops_per_second.items()},
        memory_bytes_per_second=device.memory_bytes_per_second / times,
        launch_seconds=device.launch_seconds * times,
        kernel_seconds=device.kernel_seconds * times,
    )


def mixed(*groups: tuple[int, float], between: Link = NEAR) -> Cluster:
    """Groups of (devices, times as slow as the laptop)."""
    made = [
        DeviceGroup(device=slower(LAPTOP.device, times), inner=NEAR, outer=NEAR, devices_per_node=count)
        for count, times in groups
    ]
    first = replace(LAPTOP, device=made[0].device, inner=NEAR, outer=NEAR, devices_per_node=made[0].devices_per_node)
    return replace(first, name="groups", others=tuple(made[1:]), between=between)


def best_of(found: SearchResult) -> tuple[Plan, Forecast]:
    assert found.best is not None
    return found.best


class TestDealing:
    def test_by_hand(self) -> None:
        assert share_microbatches(12, [lambda n: n, lambda n: 2.0 * n]) == (8, 4)
        assert share_microbatches(7, [lambda n: n, lambda n: 2.0 * n, lambda n: 4.0 * n]) == (4, 2, 1)
        assert share_microbatches(6, [lambda n: n] * 4) == (2, 2, 1, 1)
        # A pipeline that takes 10 to fill gets fewer.
        assert share_microbatches(12, [lambda n: n, lambda n: 10.0 + n]) == (11, 1)

    def test_all_ways(self) -> None:
        draw = random.Random(0)
        for _ in range(200):
            count, total = draw.randint(2, 4), draw.randint(4, 11)
            lines = [(draw.choice((0, 1, 3, 7)), draw.randint(1, 9)) for _ in range(count)]
            times = [lambda n, a=a, b=b: a + b * n for a, b in lines]
            ways = [way for way in itertools.product(range(1, total), repeat=count) if sum(way) == total]
            least = min(max(f(n) for f, n in zip(times, way, strict=True)) for way in ways)
            found = share_microbatches(total, times)
            assert sum(found) == total
            assert max(f(n) for f, n in zip(times, found, strict=True)) == least


def split_blocks(weights: list[float], times: list[tuple[float, float]], most: tuple[int, ...] = ()) -> list[Any]:
    limits = most or [len(weights)] * len(times)
    return fastest_splits(span_costs(weights, times, limits), smallest_first, largest_first, most_even)[1]


class TestSplitting:
    @pytest.mark.parametrize(
        ("weights", "times", "most", "split"),
        [
            ([1.0] * 12, [(0.0, 1.0), (0.0, 2.0)], (), (8, 4)),
            ([1.0] * 12, [(0.0, 1.0), (4.0, 1.0)], (), (8, 4)),
            ([1.0] * 6, [(0.0, 1.0), (0.0, 1.0)], (2, 6), (2, 4)),
            ([1.0, 5.0, 1.0], [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)], (), (1, 1, 1)),
        ],
    )
    def test_by_hand(self, weights: Any, times: Any, most: tuple[int, ...], split: tuple[int, ...]) -> None:
        assert split_blocks(weights, times, most) == [split] * 3

    def test_what_cannot_be(self) -> None:
        assert split_blocks([1.0] * 6, [(0.0, 1.0), (0.0, 1.0)], (2, 3)) == []

    def test_all_ways(self) -> None:
        draw = random.Random(1)
        for _ in range(200):
            blocks, spans = draw.randint(3, 8), draw.randint(2, 3)
            weights = [float(draw.randint(1, 9)) for _ in range(blocks)]
            times = [(float(draw.randint(0, 9)), float(draw.randint(1, 4))) for _ in range(spans)]

            def slowest(
                stages: tuple[int, ...], weights: list[float] = weights, times: list[tuple[float, float]] = times
            ) -> float:
                edges = [0, *itertools.accumulate(stages)]
                return max(
                    a + b * sum(weights[i:j]) for (a, b), (i, j) in zip(times, itertools.pairwise(edges), strict=True)
                )

            ways = [way for way in itertools.product(range(1, blocks), repeat=spans) if sum(way) == blocks]
            fastest = [way for way in ways if slowest(way) == min(map(slowest, ways))]
            smallest, largest, even = split_blocks(weights, times)
            assert (smallest, largest) == (min(fastest), max(fastest))
            assert even in fastest
            assert sum(n * n for n in even) == min(sum(n * n for n in way) for way in fastest)


def all_plans(here: Cluster, batch: int) -> Iterator[Plan]:
    """Every plan of replicas, and of stages under 1f1b, on all groups in every order, or on some of them."""
    numbers = range(len(here.groups))
    for count in range(1, len(here.groups) + 1):
        for groups in itertools.permutations(numbers, count):
            ranks = sum(here.groups[at].num_devices for at in groups)
            for stages in (size for size in range(1, ranks + 1) if ranks % size == 0):
                replicas = ranks // stages
                cuts = [way for way in itertools.product(range(1, 6), repeat=stages) if sum(way) == PROFILE.num_blocks]
                techniques = [t("replicate", size=replicas)] if replicas > 1 else []
                for cut, size in itertools.product(cuts, (b for b in range(1, batch + 1) if batch % b == 0)):
                    total = batch // size
                    made = [*techniques, t("pipeline", size=stages, stages=cut)] if stages > 1 else techniques
                    shares = [()] if total % replicas == 0 else []
                    if replicas > 1:
                        ways = itertools.product(range(1, total), repeat=replicas)
                        shares += [way for way in ways if sum(way) == total and len(set(way)) > 1]
                    for share in shares:
                        own = [replace(each, shares=share) if each.takes_shares else each for each in made]
                        axes = [each.axis for each in own]
                        for order in itertools.permutations(axes):
                            plan = Plan(techniques=tuple(own), batch=batch, microbatch=size, axis_order=order)
                            yield replace(plan, groups=groups)


@pytest.mark.parametrize(
    ("groups", "batch"),
    [
        (((1, 1.0), (1, 2.0)), 6),
        (((1, 3.0), (1, 1.0)), 8),
        (((2, 1.0), (2, 1.7)), 4),
        (((1, 1.0), (2, 2.5)), 6),
    ],
)
def test_brute_force(groups: Any, batch: int) -> None:
    """Replicas, stages, orders of groups, shares, cuts, microbatches and some of the groups: nothing is faster."""
    here = mixed(*groups)
    found = search(PROFILE, here, batch=batch, ban=SIMPLE, top=1000, **WISHES)
    plan, told = best_of(found)
    seconds = {
        each: forecast(PROFILE, each, here, sequence=SEQUENCE, replays=False).step_seconds
        for each in all_plans(here, batch)
        if not each.check(PROFILE, here)
    }
    assert len(seconds) > 50
    assert told.step_seconds == pytest.approx(min(seconds.values()), rel=1e-9)
    assert told.step_seconds == forecast(PROFILE, plan, here, sequence=SEQUENCE).step_seconds
    assert found.gap_fraction is not None
    assert told.step_seconds * (1 - found.gap_fraction) <= min(seconds.values()) * (1 + 1e-9)
    assert 0 < found.gap_fraction < 0.9


def test_half_as_fast_gets_half_as_much() -> None:
    here = mixed((1, 1.0), (1, 2.0))
    found = search(PROFILE, here, batch=48, ban=[*SIMPLE, "pipeline"], pin=["microbatch=1"], **WISHES)
    plan, _ = best_of(found)
    fast, slow = plan.shares
    assert (fast, slow) == pytest.approx((32, 16), abs=1)
    deep = replace(PROFILE, layers=tuple(replace(x, repeat=24) if x.is_block else x for x in PROFILE.layers))
    found = search(deep, here, batch=48, ban=[*SIMPLE, "replicate"], pin=["microbatch=1"], **WISHES)
    plan, _ = best_of(found)
    by_group = dict(zip(plan.groups or (0, 1), plan.blocks_of_stages(deep), strict=True))
    assert by_group[0] == pytest.approx(16, abs=1)


@pytest.mark.parametrize("ban", [SIMPLE, OTHERS])
def test_equal_groups_joined_like_nodes_give_the_answer_for_one_kind(ban: list[str]) -> None:
    alike = replace(LAPTOP, inner=NEAR, outer=NEAR, devices_per_node=2, num_nodes=2)
    wanted = best_of(search(PROFILE, alike, batch=8, ban=ban, **WISHES))
    merged = best_of(search(PROFILE, mixed((2, 1.0), (2, 1.0)), batch=8, ban=ban, **WISHES))
    assert merged == wanted
    by_groups = mixed((2, 1.0), (2, 1.0), between=replace(NEAR, name="by another name"))
    told = best_of(search(PROFILE, by_groups, batch=8, ban=ban, **WISHES))[1]
    assert told.step_seconds == pytest.approx(wanted[1].step_seconds, rel=1e-9)


@pytest.mark.parametrize("far", [NEAR, replace(NEAR, latency_seconds=1e-5)], ids=["as nodes", "islands"])
def test_permuting_equal_groups_changes_nothing(far: Link) -> None:
    groups = ((1, 1.0), (1, 2.0), (1, 1.0))
    answers = [
        best_of(search(PROFILE, mixed(*order, between=far), batch=6, ban=SIMPLE, **WISHES))
        for order in sorted(set(itertools.permutations(groups)))
    ]
    assert len(answers) == 3
    assert [told.step_seconds for _, told in answers] == pytest.approx([answers[0][1].step_seconds] * 3, rel=1e-9)
    again = best_of(search(PROFILE, mixed(*groups, between=far), batch=6, ban=SIMPLE, **WISHES))
    assert again in answers


def test_a_group_that_only_slows_the_rest_is_left_idle() -> None:
    here = replace(mixed((1, 60.0), (2, 1.0)), name="old+new")
    found = search(PROFILE, here, batch=8, ban=SIMPLE, **WISHES)
    plan, told = best_of(found)
    assert plan.groups == (1,)
    assert told.step_seconds == best_of(search(PROFILE, here.view(1), batch=8, ban=SIMPLE, **WISHES))[1].step_seconds
    lines = explain_groups(found, here)
    assert lines[0] == "Its ranks take new."
    assert lines[1].startswith("It leaves old idle")
    assert explain_groups(found, here.view(0)) == []
    assert explain_groups(found, mixed((1, 1.0), (1, 1.0))) == []


def test_pins_hold_across_groups() -> None:
    here = mixed((2, 1.0), (2, 2.0))
    two = best_of(search(PROFILE, here, batch=12, ban=OTHERS, pin=["replicate=2", "pipeline=2"], **WISHES))[0]
    assert {each.name: each.size for each in two.techniques} == {"pipeline": 2, "replicate": 2}  # type: ignore[attr-defined]
    given = best_of(search(PROFILE, here, batch=12, ban=SIMPLE, pin=["replicate.shares=[3,1]"], **WISHES))[0]
    assert given.shares == (3, 1)


def test_what_is_banned_or_not_allowed_lies_across_no_groups() -> None:
    here = mixed((1, 1.0), (1, 1.5))
    free = search(PROFILE, here, batch=12, ban=[*OTHERS, "pipeline"], **WISHES)
    assert best_of(free)[0].technique("replicate") is not None
    for wishes in ({"ban": [*OTHERS, "pipeline", "replicate=2"]}, {"ban": [*OTHERS, "pipeline"], "allow": "exact"}):
        result = search(PROFILE, here, batch=12, **{**WISHES, **wishes})
        assert all(plan.num_ranks == 1 for plan, _ in result.ranked), wishes
        assert best_of(result)[0].groups == (0,)


def test_memory_of_each_group_counts() -> None:
    """The second group has room for little: its stage gets few blocks, or it is not used."""
    deep = replace(PROFILE, layers=tuple(replace(x, repeat=24) if x.is_block else x for x in PROFILE.layers))
    here = mixed((1, 1.0), (1, 1.0), between=replace(NEAR, name="far"))
    even = Plan(techniques=(t("pipeline", size=2),), batch=8)
    room = forecast(deep, even, here, sequence=SEQUENCE).peak_bytes

    def with_room(num_bytes: int) -> Cluster:
        tight = replace(here.others[0].device, memory_bytes=num_bytes, reserved_bytes=0)
        return replace(here, others=(replace(here.others[0], device=tight),))

    while forecast(deep, even, with_room(room), sequence=SEQUENCE).fits:
        room = int(0.9 * room)
    small = with_room(room)
    plan, told = best_of(search(deep, small, batch=8, ban=[*SIMPLE, "replicate"], **WISHES))
    assert told.fits
    blocks = dict(zip(plan.groups or (0, 1), plan.blocks_of_stages(deep), strict=True))
    assert 1 not in blocks or blocks[1] < 12
