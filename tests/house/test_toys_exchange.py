"""Two plugins of a page each: an exchange with a period, and a schedule driven by arrival.

Tests of `core/build.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
import toy_arrival_schedule
import toy_jobs
import toy_periodic_exchange

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.schedules import Timetable, schedule_names
from meshwright.simulator.pricing import price

TOYS = (toy_periodic_exchange, toy_arrival_schedule)


@pytest.mark.parametrize("every", [1, 3])
def test_parameters_are_averaged_every_few_steps(every: int, plugged: RankPool) -> None:
    batch, steps, num_ranks = 6, 7, 2
    arguments = {"batch": batch, "steps": steps, "every": every}
    answers = plugged.run("toy_jobs:local_steps_job", arguments, num_ranks=num_ranks)
    inputs, targets = toy_jobs.samples(batch)
    models = [toy_jobs.model() for _ in range(num_ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    rows = batch // num_ranks
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = slice(rank * rows, (rank + 1) * rows)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([each.detach() for each in same]).mean(0)
                    for each in same:
                        each.copy_(mean)
        for model, answer in zip(models, answers, strict=True):
            wanted = torch.cat([value.detach().flatten() for value in model.parameters()])
            assert torch.allclose(torch.tensor(answer[step]), wanted, rtol=1e-5, atol=1e-6)
        has_parted = answers[0][step] != answers[1][step]
        assert has_parted == bool((step + 1) % every)


def test_the_average_is_priced(plugged: RankPool) -> None:
    profile = decoder_profile(DecoderConfig(**tiny.LLAMA), "tiny")
    plan = Plan(techniques=(technique_named("toy_average")(size=2, every=4),), batch=8)
    (message,) = [task for task in price(profile, plan, sequence=16).collectives if task.axis == "toy"]
    elements = sum(slot.repeat * slot.elements for slot in price(profile, Plan(batch=8), sequence=16).slots)
    assert message.repeat * message.bytes == elements * 4 / 4


def test_a_second_exchange_over_an_axis_is_refused(plugged: RankPool) -> None:
    from meshwright.core.build import Exchange
    from meshwright.runtime.build import RankBuild

    build = RankBuild.__new__(RankBuild)
    build.exchanges, build.exchange_owners = [], {}
    first, second = technique_named("replicate")(size=2), technique_named("toy_average")(size=2)
    build.add_exchange(first, Exchange())
    with pytest.raises(MeshwrightError, match=r"toy_average: replicate already exchanges .* axis dp"):
        build.add_exchange(second, Exchange(), "dp")


def test_a_schedule_from_outside_runs_as_one_device_does(plugged: RankPool, tmp_path: Path) -> None:
    assert "arrival" in schedule_names()
    orders = Timetable("arrival").orders(3, 4)
    assert orders != Timetable("1f1b").orders(3, 4)
    assert orders != Timetable("gpipe").orders(3, 4)
    plan = Plan(techniques=(technique_named("pipeline")(size=3, schedule="arrival"),), batch=tiny.BATCH, microbatch=2)
    question = {"config": tiny.LLAMA, "optimizer": tiny.ADAMW, "sequence": tiny.SEQUENCE, "steps": 2}
    asked = question | {"batch": tiny.BATCH, "dtype": "float64", "folder": str(tmp_path / "one")}
    plugged.run("rank_jobs:reference_job", asked, num_ranks=1)
    arguments = question | {"plan": json.loads(plan.to_json()), "reference": str(tmp_path / "one")}
    for answer in plugged.run("rank_jobs:plan_job", arguments, num_ranks=3):
        assert answer["errors"]
        assert max(error for error, _ in answer["errors"].values()) <= tiny.EXACT


def test_an_unknown_schedule_is_named_with_what_there_is(plugged: RankPool) -> None:
    with pytest.raises(MeshwrightError, match=r'no schedule is called "arival".*Did you mean "arrival"') as error:
        technique_named("pipeline")(size=2, schedule="arival")
    assert error.value.problems[0].where == "schedule"
    with pytest.raises(MeshwrightError, match=r"Known: 1f1b, .*arrival.*zbv"):
        technique_named("pipeline")(size=2, schedule="xxxxxxxxxx")
