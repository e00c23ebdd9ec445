"""`replace` of work items is dataclasses.replace, only faster."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.core.work import ADAM, Compute, Resident, WorkFacts, replace


@dataclass(frozen=True, kw_only=True)
class WithoutSlots:
    size: int = 1
    name: str = ""


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        (Compute(layer="a", name="b", kind="matmul", phase="forward", repeat=3), {"repeat": 4, "shape": (1, 2)}),
        (Resident(layer="a", category="working", repeat=2, bytes=3, life="always"), {"bytes": 0}),
        (WorkFacts(), {"compute_dtype": "bf16"}),
        (ADAM, {"state_bytes": 4}),
        (WithoutSlots(), {"size": 2}),
        (WithoutSlots(size=3), {}),
        (WorkFacts(loss_calls=2), {}),
    ],
)
def test_replace_changes_what_it_is_told_to(item: Any, changes: dict[str, Any]) -> None:
    before = dataclasses.asdict(item)
    changed = replace(item, **changes)
    assert changed == dataclasses.replace(item, **changes)
    assert type(changed) is type(item)
    assert dataclasses.asdict(item) == before


@pytest.mark.parametrize("item", [WorkFacts(), ADAM, WithoutSlots()])
def test_a_name_that_is_no_field_is_refused(item: Any) -> None:
    with pytest.raises(TypeError, match="no_field"):
        replace(item, no_field=1)
