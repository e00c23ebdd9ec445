"""The search against brute force: every plan of a small space, forecast one by one by the same simulator.

Tests of `planner/space.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from small_spaces import IN_CHUNKS, ONE_CHUNK, Draw, Space

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Choice, PerLayer, Technique, technique_named
from meshwright.core.work import Work
from meshwright.planner.search import SearchResult, search
from meshwright.planner.splits import REACH, balanced_stages
from meshwright.simulator.forecast import Forecast, forecast

SPACES = 7
"""Of a case; each is asked about with up to four amounts of memory. Of large ones fewer, with more amounts."""

FEWEST = 15
"""Questions of a case, at least."""

CASES = {
    "one device": Draw(shapes=("laptop", "h100"), names=("recompute",), most=40),
    "anything": Draw(most=40),
    "anything more": Draw(most=40),
    "anything again": Draw(most=60),
    "large spaces": Draw(most=200, fewest=100),
    "replicas": Draw(names=("replicate",), shapes=("2xh100", "4xh100", "2xlaptop"), most=40),
    "shards": Draw(names=("shard", "recompute"), shapes=("2xh100", "4xh100"), num_axes=(0, 1), most=60),
    "split layers": Draw(names=("tensor",), shapes=("2xh100", "4xh100", "2x2xh100"), most=40),
    "split layers, recomputed": Draw(names=("tensor", "recompute"), shapes=("2xh100", "4xh100"), most=60),
    "three devices": Draw(shapes=("3xh100",), names=("pipeline",), num_axes=(0, 1), blocks=(3, 4), most=60),
    "stages": Draw(names=("pipeline",), shapes=("2xh100", "4xh100"), blocks=(2, 3, 4), most=60),
    "stages of one chunk": Draw(
        names=("pipeline", "recompute"), shapes=("2xh100",), num_axes=(0,), schedules=ONE_CHUNK, blocks=(2, 3), most=60
    ),
    "stages and replicas": Draw(
        names=("pipeline", "replicate", "recompute"),
        shapes=("4xh100",),
        num_axes=(0,),
        schedules=ONE_CHUNK,
        blocks=(2, 3),
        most=60,
    ),
    "four stages": Draw(
        names=("pipeline", "recompute"),
        shapes=("4xh100",),
        num_axes=(0,),
        schedules=ONE_CHUNK,
        blocks=(4,),
        fewest=100,
        most=600,
    ),
    "chunks": Draw(
        names=("pipeline",), shapes=("2xh100",), num_axes=(0,), schedules=IN_CHUNKS, blocks=(4,), fewest=1, most=120
    ),
    "chunks, recomputed": Draw(
        names=("pipeline", "recompute"),
        shapes=("2xh100",),
        num_axes=(0,),
        schedules=IN_CHUNKS,
        blocks=(4,),
        fewest=101,
        most=600,
    ),
    "two nodes": Draw(shapes=("2x2xh100",), num_axes=(2,), most=60, fewest=8),
    "two nodes with stages": Draw(shapes=("2x2xh100",), names=("pipeline",), num_axes=(1,), most=60, fewest=8),
    "three axes": Draw(shapes=("2x4xh100",), num_axes=(3,), blocks=(2,), most=100, fewest=8),
    "rounded": Draw(names=("precision", "recompute"), shapes=("h100", "2xh100"), num_axes=(1,), most=80),
    "rescues": Draw(
        names=("recompute",), shapes=("laptop", "2xh100"), axes=("replicate",), blocks=(4,), rescues=True, most=400
    ),
    "second copies": Draw(shapes=("2x2xh100",), names=("shard",), num_axes=(0, 1), most=80, fewest=8),
}


ROUNDING = 1e-5
"""Of a step. Policies of a stage are compared by all its seconds, and one that moves microseconds from forward to
backward may make a pipeline shorter by such a share."""


def _asked(space: Space) -> SearchResult:
    return search(space.profile, space.machine, **space.question, epsilon=0.0, top=1)


def _limits(told: dict[Plan, Forecast], draw: random.Random, count: int, *, is_rescue: bool) -> list[int]:
    """Bytes at which something stops fitting, and one less; and all that anything needs. Of rescues: where only they
    fit."""
    peaks = sorted({each.peak_bytes for each in told.values()})
    if is_rescue:
        usual = min(each.peak_bytes for plan, each in told.items() if not _is_rescue(plan))
        return [peak for peak in peaks if peak < usual][:count]
    some = [draw.choice(peaks) for _ in range(count - 2)]
    return sorted({peaks[-1], *some, some[0] - 1})


def _is_rescue(plan: Plan) -> bool:
    return any(getattr(technique, "slots", 0) for technique in plan.techniques)


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_what_brute_force_finds(name: str) -> None:
    asked, is_large = 0, CASES[name].fewest >= 100
    num_spaces, num_limits = (3, 10) if is_large else (2 * SPACES, 3) if CASES[name].rescues else (SPACES, 4)
    for number in range(num_spaces):
        seed = 100 * list(CASES).index(name) + number
        space, plans = CASES[name].space(seed)
        told = {
            plan: forecast(space.profile, plan, space.machine, sequence=space.sequence, replays=False) for plan in plans
        }
        for limit in _limits(told, random.Random(seed), num_limits, is_rescue=space.rescues):
            fitting = {plan: each.step_seconds for plan, each in told.items() if each.peak_bytes <= limit}
            found = _asked(space.with_memory(limit))
            words = f"seed {seed}, {limit} bytes, {len(plans)} plans: "
            asked += 1
            if not fitting:
                assert found.best is None or _is_rescue(found.best[0]), words + str(found.best)
                assert found.gap_fraction is None or found.best is not None
                continue
            best = min(fitting, key=lambda plan: fitting[plan])
            words += f"best is {best}, found {found.best and found.best[0]}"
            assert found.best is not None, words
            assert found.best[1].step_seconds == pytest.approx(fitting[best], rel=ROUNDING), words
            assert found.gap_fraction == 0.0, words
    assert asked >= FEWEST, f"{asked} questions only"


def test_blocks_follow_what_every_tier_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host had a copy of all that recomputation keeps: brute force with room for that of some plans."""
    kind = technique_named("recompute")
    price = kind.price

    def with_copies(self: Technique, work: Work) -> Work:
        after = price(self, work)
        kept = (item for item in after.residents if item.origin == self.name and item.life == "microbatch")
        return replace(after, residents=(*after.residents, *(replace(item, tier="host") for item in kept)))

    monkeypatch.setattr(kind, "price", with_copies)
    draw_from = Draw(
        shapes=("laptop", "2xh100"),
        names=("recompute",),
        axes=("replicate", "pipeline"),
        schedules=("1f1b",),
        blocks=(2, 3),
        fewest=10,
        most=60,
    )
    asked = 0
    for seed in (0, 9, 12, 13, 16, 22, 23):
        draw = random.Random(seed)
        space, plans = draw_from.space(9200 + seed)
        told = {p: forecast(space.profile, p, space.machine, sequence=space.sequence, replays=False) for p in plans}
        sizes = sorted({each.peak_bytes_by_tier.get("host", 0) for each in told.values()})
        for on_device in _limits(told, draw, 3, is_rescue=False)[:2]:
            each_host = draw.choice(sizes[: len(sizes) // 2 + 1])
            host = replace(space.machine.host, memory_bytes=each_host * space.machine.devices_per_node)
            small = replace(space, machine=replace(space.machine, host=host)).with_memory(on_device)
            again = [forecast(small.profile, p, small.machine, sequence=small.sequence, replays=False) for p in plans]
            fitting = [each.step_seconds for each in again if each.fits]
            best = _asked(small).best
            words = f"seed {seed}, {on_device} bytes, {each_host} of the host: {best and best[0]}"
            if not fitting:
                assert best is None or _is_rescue(best[0]), words
                continue
            asked += 1
            assert best is not None, words
            assert best[1].step_seconds == pytest.approx(min(fitting), rel=1e-9), words
    assert asked >= 10


def _is_everywhere(plan: Plan, profile: Profile) -> bool:
    offload = plan.technique("offload_activations")
    assert offload is not None
    return all(sum(offload.counts_in(profile, spans).values()) for spans in plan.spans_of_stages(profile))


@pytest.mark.parametrize("rate", [1e7, 1e9])
def test_blocks_follow_policies_of_two_techniques(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations recomputed or on the host, whose copies show or hide: brute force, with little of either tier."""
    offload, asked, both = technique_named("offload_activations"), 0, 0
    offered = (PerLayer(("layers",)), Choice("inputs", (), rescues=(False, True)), Choice("smallest", (1,)))
    monkeypatch.setattr(offload, "options", classmethod(lambda *_: offered))
    draw_from = Draw(
        shapes=("laptop", "2xh100"),
        names=("offload_activations", "recompute"),
        axes=("replicate", "pipeline"),
        schedules=("1f1b",),
        blocks=(2, 3),
        fewest=10,
        most=25,
    )
    for seed in (1, 3, 5):
        draw = random.Random(seed)
        space, _ = draw_from.space(9300 + seed)
        copies = dict.fromkeys(("in", "out"), rate)
        host = replace(space.machine.host, memory_bytes=1 << 50, memory_bytes_per_second=0.0)
        device = replace(space.machine.device, copy_bytes_per_second=copies)
        space = replace(space, machine=replace(space.machine, host=host, device=device))
        plans = list(space.plans())  # now that a host is known
        told = {p: forecast(space.profile, p, space.machine, sequence=space.sequence, replays=False) for p in plans}
        sizes = sorted({each.peak_bytes_by_tier.get("host", 0) for each in told.values()})
        for limit in _limits(told, draw, 4, is_rescue=False):
            host = replace(host, memory_bytes=draw.choice(sizes[1:]) * space.machine.devices_per_node)
            small = replace(space, machine=replace(space.machine, host=host)).with_memory(limit)
            # As it is pinned, some block of every stage follows it.
            using = [p for p in plans if p.technique(offload.name) and _is_everywhere(p, space.profile)]
            again = [forecast(small.profile, p, small.machine, sequence=small.sequence, replays=False) for p in using]
            fitting = {plan: each.step_seconds for plan, each in zip(using, again, strict=True) if each.fits}
            question = {**small.question, "pin": ["offload_activations"]}
            best = search(small.profile, small.machine, **question, epsilon=0.0, top=1).best
            words = f"seed {seed}, {limit} bytes, {host.memory_bytes} of the host: {best and best[0]}"
            if not fitting:
                assert best is None or _is_rescue(best[0]), words
                continue
            asked += 1
            fastest = min(fitting, key=lambda plan: fitting[plan])
            both += fastest.technique("recompute") is not None
            assert best is not None, words
            assert best[1].step_seconds == pytest.approx(fitting[fastest], rel=1e-9), f"{words}, best is {fastest}"
    assert asked >= 6
    assert both or rate > 1e7


JOINT = ("offload_activations", "offload_states", "recompute", "stream_weights")


@pytest.mark.parametrize(("shape", "rate"), [("h100", 1e7), ("h100", 1e9), ("2xh100", 1e8)])
def test_all_that_leaves_the_device_is_chosen_together(
    shape: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations, states and weights on the host or recomputed, by replicas that share a host's copy: brute force over
    everything, and so never slower than one of them alone."""
    replicas = 2 if shape == "2xh100" else 1
    offered = {
        "offload_activations": (PerLayer(("layers",)), Choice("inputs", (False, True)), Choice("smallest", (1,))),
        "offload_states": (Choice("share", (1.0, 0.5)), Choice("host_ranks", (replicas,))),
        "stream_weights": (Choice("buffers", (2,)),),
        "recompute": (PerLayer(("layers",)),),
    }
    for name, options in offered.items():
        monkeypatch.setattr(technique_named(name), "options", classmethod(lambda *_, options=options: options))
    draw_from = Draw(shapes=(shape,), names=JOINT, axes=("replicate",), blocks=(2,), kinds=(1,), fewest=4, most=80)
    used, asked = set[str](), 0
    for seed in (9401,):
        space, _ = draw_from.space(seed)
        host = replace(space.machine.host, memory_bytes=1 << 40, adam_elements_per_second=30 * rate)
        device = replace(space.machine.device, copy_bytes_per_second=dict.fromkeys(("in", "out"), rate))
        space = replace(space, machine=replace(space.machine, host=host, device=device))
        plans = list(space.plans())
        told = {p: forecast(space.profile, p, space.machine, sequence=space.sequence, replays=False) for p in plans}
        peaks = sorted({each.peak_bytes for each in told.values()})
        for limit in (peaks[0], peaks[len(peaks) // 8], peaks[len(peaks) // 3], peaks[-1]):
            fitting = {plan: each.step_seconds for plan, each in told.items() if each.peak_bytes <= limit}
            best, fastest = _asked(space.with_memory(limit)).best, min(fitting, key=lambda plan: fitting[plan])
            asked += 1
            words = f"seed {seed}, {limit} bytes, {len(plans)} plans: {best and best[0]}, best is {fastest}"
            assert best is not None, words
            assert best[1].step_seconds == pytest.approx(fitting[fastest], rel=1e-9), words
            used |= {technique.name for technique in best[0].techniques}
    assert asked == 4
    assert used >= {"offload_states", "stream_weights"}, used


def _is_near(stages: tuple[int, ...], even: tuple[int, ...]) -> bool:
    return len(stages) == 1 or all(abs(a - b) <= REACH for a, b in zip(stages, even, strict=True))


MANY_BLOCKS = {
    "policies": Draw(shapes=("laptop",), names=("recompute",), blocks=(7, 8), most=400),
    "policies of split layers": Draw(
        shapes=("2xh100",), names=("tensor", "recompute"), num_axes=(0,), blocks=(7,), most=400
    ),
    "stages": Draw(shapes=("3xh100",), names=("pipeline",), num_axes=(0,), schedules=ONE_CHUNK, blocks=(14,), most=400),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", MANY_BLOCKS)
def test_where_not_all_is_tried_the_gap_says_so(name: str, seed: int) -> None:
    """More blocks than choices are listed for, or splits simulated. Stages lie within `REACH` of about even."""
    space, plans = replace(MANY_BLOCKS[name], kinds=(1,), fewest=60).space(seed)
    even = balanced_stages(space.profile, 3, space.sequence)
    plans = [plan for plan in plans if _is_near(plan.blocks_of_stages(space.profile), even)]
    told = {
        plan: forecast(space.profile, plan, space.machine, sequence=space.sequence, replays=False) for plan in plans
    }
    for limit in _limits(told, random.Random(seed), 5, is_rescue=False):
        seconds = [each.step_seconds for each in told.values() if each.peak_bytes <= limit]
        found = _asked(space.with_memory(limit))
        if not seconds:
            assert found.best is None or _is_rescue(found.best[0])
            continue
        assert found.best is not None
        assert found.gap_fraction is not None
        best = found.best[1].step_seconds
        assert best * (1 - found.gap_fraction) <= min(seconds) * (1 + 1e-9), limit
        assert best <= min(seconds) * 1.005, limit
