"""Two plugins of a page each: optimizer states on the host's tier, and a fused kernel by the roles of ops."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import toy_fused_norm
import toy_host_states

from meshwright.core.box import Box
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.optimizers.rule import ParameterPiece
from meshwright.optimizers.update import OptimizerConfig
from meshwright.planner.search import search
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.simulator.pricing import price
from meshwright.simulator.simulate import simulate

TOYS = (toy_host_states, toy_fused_norm)
PROFILE = profile("llama3.2-1b")
SEQUENCE = 2048


def told(*techniques: Technique) -> Forecast:
    plan = Plan(techniques=(technique_named("precision")(), *techniques), batch=4, microbatch=1)
    return forecast(PROFILE, plan, cluster("h100"), sequence=SEQUENCE)


def errors_of(pool: RankPool, folder: Path, plan: Plan, optimizer: dict[str, Any]) -> dict[str, Any]:
    """What the fullest rank's losses, gradients, parameters and states are off those of one device."""
    question = {"config": tiny.LLAMA, "optimizer": optimizer, "sequence": tiny.SEQUENCE, "steps": tiny.STEPS}
    asked = question | {"batch": tiny.BATCH, "dtype": "float64", "folder": str(folder)}
    pool.run("rank_jobs:reference_job", asked, num_ranks=1)
    arguments = question | {"plan": json.loads(plan.to_json()), "reference": str(folder)}
    answers = pool.run("rank_jobs:plan_job", arguments, num_ranks=plan.num_ranks)
    return {name: max(each["errors"][name][0] for each in answers) for name in answers[0]["errors"]}


@pytest.mark.parametrize("optimizer", [tiny.ADAMW, tiny.SGD], ids=lambda optimizer: optimizer["name"])
@pytest.mark.parametrize("splits", [(), ("replicate",), ("shard",)], ids=str)
def test_states_on_the_host_train_as_one_device_does(
    splits: tuple[str, ...], optimizer: dict[str, Any], plugged: RankPool, tmp_path: Path
) -> None:
    techniques = tuple(technique_named(name)(size=2) for name in splits)
    plan = Plan(techniques=(*techniques, technique_named("host_states")()), batch=tiny.BATCH, microbatch=2)
    errors = errors_of(plugged, tmp_path, plan, optimizer)
    assert {"loss", "gradient", "parameter"} <= set(errors)
    assert max(errors.values()) <= tiny.EXACT


def test_the_device_holds_no_state_between_updates() -> None:
    config = OptimizerConfig(name="adamw")
    box = Box.whole((3, 4))
    values = [torch.arange(12.0).reshape(3, 4) for _ in range(2)]
    pieces = [
        ParameterPiece(name="w", value=value, box=box, is_owned=True, lr_scale=1.0, weight_decay=0.1)
        for value in values
    ]
    build = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cpu")))
    plain = config.rule(config, pieces[:1], build, {})  # type: ignore[arg-type]
    streamed = toy_host_states.StreamedRule(config.rule, config, pieces[1:], build, {})  # type: ignore[arg-type]
    for step in range(3):
        for rule, value in zip((plain, streamed), values, strict=True):
            value.grad = torch.full((3, 4), step + 1.0)
            rule.step(0.1, step + 1)
        held = [state.value for states in streamed.of_rules for state in states]
        assert [value.untyped_storage().nbytes() for value in held] == [0, 0]
        for mine, its in zip(streamed.kept(), plain.kept(), strict=True):
            assert mine.kind == its.kind
            assert torch.equal(mine.value, its.value)
    assert torch.equal(*values)


def test_states_on_the_host_are_priced(plugged: RankPool) -> None:
    bare, streamed = told(), told(technique_named("host_states")())
    states = 8 * PROFILE.num_params
    assert streamed.peak_bytes_by_tier["host"] == states
    largest = max(streamed.peak_bytes_by_category["buffers"], 0)
    assert bare.peak_bytes - streamed.peak_bytes == pytest.approx(states - largest, rel=1e-3)
    seconds = 2 * states / cluster("h100").tiers["host"].in_bytes_per_second
    assert streamed.step_seconds - bare.step_seconds == pytest.approx(seconds, rel=0.05)
    plan = Plan(techniques=(technique_named("host_states")(),), batch=1)
    spans = simulate(PROFILE, plan, cluster("h100"), sequence=SEQUENCE).spans
    assert sum(span.seconds for span in spans if span.lane == "copy") == pytest.approx(seconds, rel=0.05)


def test_search_uses_the_host_where_nothing_else_fits(plugged: RankPool) -> None:
    found = search(profile("llama3.2-3b"), cluster("h100"), batch=4, sequence=1024)
    assert found.best is not None
    assert found.best.plan.technique("host_states") is None  # recomputation is enough, and cheaper
    found = search(profile("llama3-8b"), cluster("h100"), batch=4, sequence=1024, ban=["offload_states"])
    assert found.best is not None
    assert found.best.plan.technique("host_states") is not None
    assert found.best.forecast.peak_bytes_by_tier["host"] == 8 * profile("llama3-8b").num_params


def test_a_fused_norm_trains_as_one_device_does(plugged: RankPool, tmp_path: Path) -> None:
    plan = Plan(techniques=(technique_named("fused_norm")(),), batch=tiny.BATCH, microbatch=2)
    assert max(errors_of(plugged, tmp_path, plan, tiny.ADAMW).values()) <= tiny.EXACT


def test_a_fused_norm_is_priced_by_roles(plugged: RankPool) -> None:
    fused = technique_named("fused_norm")()
    before, after = (price(PROFILE, Plan(techniques=each, batch=1), sequence=SEQUENCE) for each in ((), (fused,)))
    kernels = [sum(task.kernels for task in work.computes if task.layer == "blocks") for work in (before, after)]
    assert kernels[0] - kernels[1] == 1
    moved = [sum(task.moved_bytes for task in work.computes if task.layer == "blocks") for work in (before, after)]
    assert moved[0] - moved[1] == pytest.approx(PROFILE.hidden_size * SEQUENCE * 4, rel=1e-2)
    assert told(fused).step_seconds < told().step_seconds
