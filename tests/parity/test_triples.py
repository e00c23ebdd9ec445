"""A slice of the covering array: every row trains one device's model and moves what was priced.

The whole array takes an hour on two cores: `python benchmarks/triples.py`, which writes its date into the matrix of the
docs.
"""

from __future__ import annotations

from typing import Any

import covering
import pytest

from meshwright.launch.rank_pool import RankPool

pytestmark = pytest.mark.slow  # the array alone takes 12 s

NUM_ROWS = 4
"""Of those with most techniques."""


@pytest.fixture(scope="module")
def whole() -> covering.Covering:
    return covering.covering()


def test_every_triple_is_in_a_row_or_is_refused_with_a_reason(whole: covering.Covering) -> None:
    held = {triple for row in whole.rows for triple in covering.triples_in(row)}
    for triple in covering.all_triples():
        assert (triple in held) != (triple in whole.refused), triple
    assert all(reasons and all(": " in reason for reason in reasons) for reasons in whole.refused.values())
    assert not any(covering.refusals(row) for row in whole.rows)


def test_the_array_is_the_same_every_time(whole: covering.Covering) -> None:
    assert covering.covering(most_rows=20).rows == whole.rows[:20]


@pytest.mark.parametrize("number", range(NUM_ROWS))
def test_a_row_trains_as_one_device(number: int, whole: covering.Covering, pool: RankPool, references: Any) -> None:
    longest = sorted(whole.rows, key=lambda row: -len(row))
    assert covering.faults(longest[number], pool.run, references) == []
