"""One notation for layers: read, written, and read again; what earlier releases wrote is read with a warning.

Tests of `core/technique.py`.
"""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import OldNotation
from meshwright.core.plan import Plan
from meshwright.core.technique import LayerChoice, format_layers, layers_text, parse_layers, technique_named

RECOMPUTE = technique_named("recompute")


@pytest.mark.parametrize(
    ("text", "choice", "written"),
    [
        ("none", LayerChoice("none"), "none"),
        ("all", LayerChoice("all"), "all"),
        ("All ", LayerChoice("all"), "all"),
        ("first 3", LayerChoice("first", 3), "first 3"),
        ("last  2", LayerChoice("last", 2), "last 2"),
        ("first 0", LayerChoice("none"), "none"),
        ("0-3,8", LayerChoice("listed", spans=((0, 4), (8, 9))), "0-3,8"),
        ("0, 1, 2-3", LayerChoice("listed", spans=((0, 1), (1, 2), (2, 4))), "0-3"),
        ("5", LayerChoice("listed", spans=((5, 6),)), "5-5"),
    ],
)
def test_each_form_is_read_and_written(text: str, choice: LayerChoice, written: str) -> None:
    assert parse_layers(text) == choice
    assert layers_text(text) == written
    assert layers_text(written) == written


@pytest.mark.parametrize("text", ["", "3-1", "0-3,2", "first", "first -1", "some", "0-", "1;2", "²", "first 3,8"])
def test_what_is_not_written_so_is_no_choice(text: str) -> None:
    assert parse_layers(text) is None


@given(st.sets(st.integers(0, 60)))
def test_numbers_are_read_as_they_were_written(blocks: set[int]) -> None:
    choice = parse_layers(format_layers(blocks))
    assert choice is not None
    assert {block for first, last in choice.spans for block in range(first, last)} == blocks


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"layers": None}, {"layers": "all"}),
        ({"layers": 2}, {"layers": "first 2"}),
        ({"layers": 0, "selective": 2}, {"layers": "none", "selective": "first 2"}),
        ({"layers": "", "selective": "1,3"}, {"layers": "none", "selective": "1,3"}),
        ({"selective": 2}, {"selective": "last 2"}),
    ],
)
def test_plans_of_the_first_version_are_read_with_a_warning(old: dict[str, object], new: dict[str, object]) -> None:
    text = json.dumps({"techniques": [{"name": "recompute", **old}], "batch": 4, "version": 1})
    with pytest.warns(OldNotation, match="layers are written"):
        plan = Plan.from_json(text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan == Plan(techniques=(RECOMPUTE(**new),), batch=4)
        assert Plan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["version"] == 2
