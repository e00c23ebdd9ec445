"""Ranks that know the toys of a test file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from meshwright.core.plugins import VARIABLE
from meshwright.launch.rank_pool import RankPool


@pytest.fixture(scope="module")
def plugged(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks that were started with the file's `TOYS` as plugins; they are plugins of the test too."""
    patch = pytest.MonkeyPatch()
    patch.setitem(os.environ, VARIABLE, ",".join(toy.__name__ for toy in request.module.TOYS))
    with RankPool(3, threads_per_rank=1) as pool:
        yield pool
    patch.undo()
