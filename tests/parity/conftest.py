"""A plan is run once, on as many ranks as it has; every test here asks about that run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny import ADAMW, SEQUENCE, STEPS

from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool


@pytest.fixture(scope="session")
def ran(pool: RankPool, references: Callable[..., str]) -> Callable[..., list[dict[str, Any]]]:
    """Answers of `rank_jobs:plan_job`, one for each rank: errors against one device, traffic, state."""
    answers: dict[str, list[dict[str, Any]]] = {}

    def run(
        plan: Plan,
        config: dict[str, Any],
        *,
        optimizer: dict[str, Any] = ADAMW,
        dtype: str = "float64",
        like: tuple[dict[str, Any], ...] = (),
        prices: bool = True,
        device: str = "cpu",
    ) -> list[dict[str, Any]]:
        """`like`: techniques that the one device has too."""
        question = {
            "config": config,
            "optimizer": optimizer,
            "sequence": SEQUENCE,
            "steps": STEPS,
            "dtype": dtype,
        }
        asked = {**question, "plan": json.loads(plan.to_json()), "like": like, "prices": prices, "device": device}
        key = json.dumps(asked, sort_keys=True)
        if key not in answers:
            reference = references(**question, batch=plan.batch, techniques=list(like))
            arguments = {**question, "plan": asked["plan"], "reference": reference, "prices": prices and not like}
            arguments["device"] = device
            answers[key] = pool.run("rank_jobs:plan_job", arguments, plan.num_ranks, timeout_seconds=300)
        return answers[key]

    return run
