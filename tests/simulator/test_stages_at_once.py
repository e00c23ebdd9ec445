"""All runs of equal stages are priced in one call: each has the very numbers it has when priced alone."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.core.plan import Plan
from meshwright.core.technique import Technique, technique_named
from meshwright.core.work import ADAM
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import preset
from meshwright.simulator.peak_memory import stage_memory
from meshwright.simulator.pricing import picked, price, stacked, stage_plan
from meshwright.simulator.stage_seconds import Charge, routes, stage_cost

PROFILE = decoder_profile(preset("byte-3m"), "byte-3m")
MACHINES = cluster("2x4xh100")


def _t(name: str, **settings: object) -> Technique:
    return technique_named(name)(**settings)


PLANS = [
    Plan(techniques=(_t("pipeline", size=4), _t("shard", size=2), _t("precision")), batch=16),
    Plan(techniques=(_t("pipeline", size=4, schedule="gpipe"), _t("tensor", size=2), _t("recompute")), batch=16),
    Plan(techniques=(_t("pipeline", size=4, schedule="zero_bubble_h1"), _t("replicate", size=2)), batch=16),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_stage_priced_with_others_is_the_stage_priced_alone(plan: Plan) -> None:
    staged = stage_plan(PROFILE, plan, MACHINES, sequence=128, optimizer=ADAM)
    assert len(staged.stages) >= 3  # the first, those between, the last
    for stage in staged.stages:
        work = price(PROFILE, plan, sequence=128, stage=stage.run.start)
        alone = stage_cost(work, MACHINES, routes(MACHINES, plan.mesh))
        assert stage.cost.charges == {charge: float(seconds) for charge, seconds in alone.charges.items()}
        assert stage.cost.send_seconds == alone.send_seconds
        memory = stage_memory(work, MACHINES.device)
        assert stage.memory.peak_bytes() == memory.peak_bytes()
        assert stage.memory.by_category() == memory.by_category()


def test_numbers_of_one_are_taken_out_wherever_they_are() -> None:
    together = stacked([{"a": 1, "b": 2}, {"a": 1, "b": 5}])
    assert together["a"] == 1
    assert together["b"].tolist() == [2, 5]
    charge, plain = Charge("x", "", "step"), ("kept", 1.5)
    value = {"whole": plain, "deep": (charge, (np.array([1.0, 2.0]), np.float64(3)))}
    found = picked(value, 1)
    assert found == {"whole": plain, "deep": (charge, (2.0, 3.0))}
    assert found["whole"] is plain
    assert picked(PLANS[0], 0) is PLANS[0]
