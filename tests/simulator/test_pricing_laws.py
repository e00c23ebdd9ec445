"""What every technique's price must obey, whichever techniques there are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.core.plan import Plan
from meshwright.core.technique import Axis, Choice, PerLayer, Technique, technique_named, technique_names
from meshwright.core.work import Collective, Compute, Copy, Work
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import PRESETS
from meshwright.simulator.peak_memory import stage_memory
from meshwright.simulator.pricing import price, price_sizes, sizes_of
from meshwright.simulator.stage_seconds import routes, stage_cost

CONFIG = replace(PRESETS["byte-tiny"], num_layers=4, num_kv_heads=4, max_sequence=1 << 16)
PROFILES = (decoder_profile(CONFIG, "tiny"), decoder_profile(replace(CONFIG, tied=True, qk_norm=True), "tied"))
CLUSTER = cluster("8xh100")
SEQUENCE = 16


def _settings(kind: type[Technique], profile: Any, size: int, count: int) -> list[dict[str, Any]]:
    options = kind.options(profile, CLUSTER)
    choices = [[(o.field, v) for v in o.values or o.rescues] for o in options if isinstance(o, Choice)]
    fixed = {o.field: size for o in options if isinstance(o, Axis)}
    # Of several policies each of the later ones has half of what those before it leave.
    for option in (o for o in options if isinstance(o, PerLayer)):
        left = profile.num_blocks - count
        fixed[option.fields[0]] = count
        for field in option.fields[1:]:
            fixed[field] = left // 2
            left -= left // 2
    return [fixed | dict(chosen) for chosen in itertools.product(*choices)]


def _axis_techniques(size: int) -> list[Technique]:
    kinds = [technique_named(name) for name in technique_names()]
    offered = [kind for kind in kinds if kind.axis and kind.options(PROFILES[0], CLUSTER)]
    assert len(offered) >= 5
    return [kind(**s) for kind in offered for s in _settings(kind, PROFILES[0], size, 1)]


def _flops(work: Work, phases: tuple[str, ...]) -> float:
    return float(sum(t.repeat * t.flops for t in work.computes if t.phase in phases))


@pytest.mark.parametrize("technique", _axis_techniques(1), ids=str)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_an_axis_of_one_rank_is_the_identity(technique: Technique, profile: Any) -> None:
    alone, split = (
        price(profile, Plan(techniques=t, batch=4, microbatch=2), sequence=SEQUENCE) for t in ((), (technique,))
    )
    every = ("forward", "backward", "weight", "recompute", "step")
    assert _flops(split, every) == _flops(alone, every)
    costs = [stage_cost(w, CLUSTER, routes(CLUSTER, {technique.axis: 1})) for w in (alone, split)]
    for part in ("forward", "backward", "weight", "step"):
        assert costs[1].seconds(part) == pytest.approx(costs[0].seconds(part), rel=1e-12)  # type: ignore[arg-type]
    assert sum(float(s) for charge, s in costs[1].charges.items() if charge.axis) == 0.0
    # A technique that gathers keeps its buffers even alone; everything else is untouched.
    assert _held(split) == _held(alone)
    if not any(item.category == "gathered" and item.bytes for item in split.residents):
        before, after = (stage_memory(w, CLUSTER.device).by_category() for w in (alone, split))
        assert after == before


def _held(work: Work) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for item in work.residents:
        if item.category != "gathered" and item.repeat * item.bytes:
            key = item.category, item.life
            found[key] = found.get(key, 0.0) + float(item.repeat * item.bytes)
    return found


@pytest.mark.parametrize("technique", _axis_techniques(2), ids=str)
def test_splitting_conserves_flops(technique: Technique) -> None:
    profile, every = PROFILES[0], ("forward", "backward", "weight")
    alone = price(profile, Plan(batch=8, microbatch=2), sequence=SEQUENCE)
    plan = Plan(techniques=(technique,), batch=8, microbatch=2)
    stages = len(plan.blocks_of_stages(profile))
    total = 0.0
    for stage in range(stages):
        work = price(profile, plan, sequence=SEQUENCE, stage=stage)
        total += _flops(work, every) * plan.num_microbatches * (plan.num_ranks / stages)
    assert total == pytest.approx(_flops(alone, every) * 4)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_doing_work_again_costs_at_most_a_forward_and_saves_memory(profile: Any) -> None:
    counted = [
        (technique_named(name), option)
        for name in technique_names()
        for option in technique_named(name).options(profile, CLUSTER)
        if isinstance(option, PerLayer)
        and technique_named(name).exactness == "exact"
        and not technique_named(name).uses_tiers
    ]
    assert counted
    for kind, field, none in ((kind, each, dict.fromkeys(o.fields, 0)) for kind, o in counted for each in o.fields):
        peaks = []
        for count in range(profile.num_blocks + 1):
            technique = kind(**none | {field: count})
            work = price(profile, Plan(techniques=(technique,), batch=4, microbatch=4), sequence=SEQUENCE)
            assert _flops(work, ("recompute",)) <= _flops(work, ("forward",))
            peaks.append(float(stage_memory(work, CLUSTER.device).peak_bytes()))
        assert peaks[-1] <= peaks[0]
        # After the first, which adds its own working memory, each one more only saves; but the last block's own working
        # memory comes where nothing has been freed yet.
        assert all(b <= a for a, b in itertools.pairwise(peaks[1:-1]))


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Any, list[Plan]]:
    """Plans with the same techniques and choices, and different numbers."""
    profile = draw(st.sampled_from(PROFILES))
    kinds = [technique_named(name) for name in technique_names()]
    present = [kind for kind in kinds if kind.options(profile, CLUSTER) and draw(st.booleans())]
    chosen = {kind: draw(st.integers(0, 5)) for kind in present}
    plans = []
    for _ in range(draw(st.integers(2, 4))):
        techniques = []
        for kind in present:
            ways = _settings(kind, profile, draw(st.sampled_from((2, 4))), draw(st.integers(0, 4)))
            techniques.append(kind(**ways[chosen[kind] % len(ways)]))
        microbatch = draw(st.sampled_from((1, 2, 3)))
        plan = Plan(techniques=tuple(techniques), microbatch=microbatch)
        replicas, count = plan.num_replicas, draw(st.integers(1, 5))
        plans.append(replace(plan, batch=replicas * microbatch * count))
    return profile, plans


@settings(max_examples=40, deadline=None)
@given(mixtures())
def test_pricing_many_plans_at_once_is_pricing_each(mixture: tuple[Any, list[Plan]]) -> None:
    profile, plans = mixture
    rows = [(plan, s) for plan in plans for s in range(len(plan.blocks_of_stages(profile)))]
    single = [sizes_of(plan, profile, sequence=SEQUENCE, stage=s) for plan, s in rows]
    together = {name: np.array([sizes[name] for sizes in single]) for name in single[0]}
    many = price_sizes(profile, plans[0].in_phase_order(), together)
    for row, (plan, stage) in enumerate(rows):
        one = price(profile, plan, sequence=SEQUENCE, stage=stage)
        assert [_figures(task, row) for task in many.tasks] == [_figures(task, 0) for task in one.tasks]
        for item, alone in zip(many.residents, one.residents, strict=True):
            assert _at(item.repeat, row) * _at(item.bytes, row) == _at(alone.repeat, 0) * _at(alone.bytes, 0)


def _figures(task: Compute | Collective | Copy, row: int) -> tuple[Any, ...]:
    if isinstance(task, Compute):
        return task.layer, task.name, task.phase, *(_at(x, row) for x in (task.repeat, task.flops, task.moved_bytes))
    if isinstance(task, Copy):
        return task.layer, task.source, task.target, task.phase, _at(task.repeat, row), _at(task.bytes, row)
    return task.layer, task.kind, task.axis, task.phase, _at(task.repeat, row), _at(task.bytes, row)


def _at(value: Any, row: int) -> float:
    return float(value[row]) if isinstance(value, np.ndarray) and value.ndim else float(value)
