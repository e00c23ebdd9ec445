"""What the whole suite shares: one pool of rank processes, and one device's runs of each model."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from meshwright.launch.rank_pool import RankPool

# Test folders share their fixtures' modules, and ranks import `rank_jobs`.
sys.path += [str(folder) for folder in Path(__file__).parent.iterdir() if folder.is_dir()]

# The same examples every time: a red build is then somebody's change, and can be run again.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

References = Callable[..., str]
"""(config, optimizer, batch=, sequence=, steps=, dtype=, techniques=) -> folder."""


SLICED = (
    "tests/parity/",
    "tests/runtime/test_api.py",
    "tests/planner/test_exact.py",
    "tests/planner/test_search_wishes.py",
)
"""Long parametrised proofs: `make test` runs the first case of each, `make test-all` the others."""
LONG = (
    "tests/cli/test_bad_input.py::test_no_plan_fits_says_what_came_closest",
    "tests/cli/test_bad_models.py::test_a_folder_of_another_architecture_is_trained_exported_and_loaded",
    "tests/cli/test_train.py::test_inside_torchrun_rank_zero_plans_for_all",
    "tests/cli/test_adapter_runs.py::test_adapters_are_trained_resumed_checked_and_exported",
    "tests/cli/test_uneven_train.py",
    "tests/house/test_docs.py::test_the_tutorials_blocks_run",
    "tests/ops/test_gpu_pieces.py",
    "tests/machine/test_probe.py::test_a_quick_probe_of_this_machine",
    "tests/run/test_handover.py::test_a_real_run_is_compared_and_teaches_the_next_forecast",
    "tests/runtime/test_sample.py::test_every_plan_writes_the_same_text",
    "tests/planner/test_search_best.py::test_no_plan_is_ranked_that_cannot_take_the_sequence",
)
"""More than ten seconds each on two idle cores: `make test-all` runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set[str]()
    for item in items:
        if item.nodeid.startswith(LONG):
            item.add_marker(pytest.mark.slow)
        if not item.nodeid.startswith(SLICED):
            continue
        test = item.nodeid.partition("[")[0]
        if test in seen:
            item.add_marker(pytest.mark.slow)
        seen.add(test)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-matrix", action="store_true", help="write docs/techniques/matrix.md instead of comparing it"
    )
    parser.addoption("--all-goldens", action="store_true", help="compare the goldens that take long, too")
    parser.addoption("--write-goldens", action="store_true", help="write tests/golden instead of comparing it")


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs that tests start are told in a ledger of the tests', not the user's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    with RankPool(16, threads_per_rank=1) as pool:
        yield pool


@pytest.fixture(scope="session")
def references(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> References:
    """One device's losses, gradients and parameters; one folder for each question."""
    root = tmp_path_factory.mktemp("references")

    def reference(config: dict[str, Any], optimizer: dict[str, Any], **question: Any) -> str:
        asked = {"config": config, "optimizer": optimizer, **question}
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        folder = root / key
        if not folder.exists():
            pool.run("rank_jobs:reference_job", asked | {"folder": str(folder)}, num_ranks=1)
        return str(folder)

    return reference
