"""A slice of the campaign of benchmarks/damage.py: damaged files are refused, or read as if they were whole."""

from __future__ import annotations

import pytest

from benchmarks.damage import BAD, campaign
from benchmarks.damage_kinds import KINDS

# They import torch, or search for plans; tests/checkpoint and tests/cli damage those too.
HEAVY = {"checkpoint", "hugging face", "dcp", "metrics", "command", "run file", "run folder", "artefacts", "dataset"}


@pytest.mark.parametrize(
    ("names", "count"),
    [
        pytest.param(sorted(set(KINDS) - HEAVY), 300, id="data"),
        pytest.param(sorted(HEAVY), 200, id="all else", marks=pytest.mark.slow),
    ],
)
def test_no_damage_is_silent_or_crashes(names: list[str], count: int) -> None:
    found = campaign(count, seed=12, names=names, say=lambda line: None)
    assert len(found) == count
    assert [line for line in found if line["result"] in BAD] == []
    results = {line["result"] for line in found}
    assert results == {"refused", "same", "other"}
