"""Tables in host memory: the same model as on one device, and of the tables only the rows that were asked for move.

Tests of `ops/table_lookup.py`, `techniques/rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from test_rows import HOT, MODEL, PROFILE, TABLES, model, steps_job  # noqa: F401
from tiny import EXACT, SGD, plan_of, t

Run = Callable[..., list[dict[str, Any]]]
WAYS = ("rows", "tables")
ROWWISE = {"name": "rowwise_adagrad", "lr": 1e-2, "clip": 0.5}
PLAIN = SGD | {"momentum": 0.0}
OPTIMIZERS = [ROWWISE, ROWWISE | {"weight_decay": 0.1, "clip": 0.0}, PLAIN]


def on_host(size: int, by: str = "rows") -> Any:
    return t("rows", size=size, by=by, tier="host")


def ids(optimizer: dict[str, Any]) -> str:
    return f"{optimizer['name']}-{optimizer.get('weight_decay', '')}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=ids)
@pytest.mark.parametrize(("size", "by"), [(1, "rows"), (2, "rows"), (2, "tables"), (4, "rows"), (4, "tables")])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_as_on_one_device_and_as_priced(
    microbatch: int, size: int, by: str, optimizer: dict[str, Any], ran: Run
) -> None:
    answers = ran(plan_of(on_host(size, by), microbatch=microbatch), MODEL, optimizer=optimizer)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []
