"""The fuzzer and the zoo: what they found stays right, and a slice of both runs here.

`benchmarks/fuzz.py` and `benchmarks/zoo.py` run the whole; a finding joins `FOUND` with a line of its story.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.supervise.pool import RankPool

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `benchmarks`, in ranks too

from benchmarks import zoo
from benchmarks.campaign import BAD, Runner
from benchmarks.fuzz_cases import case_of

PATIENCE = 240.0
SEEDS = (3, 4, 7, 9)
"""Cheap ones: two axes, an optimizer with sums, recomputation, experts in bf16."""
SLICE = {"lstm_stack": ("shard",), "torchvision_vgg": ("replicate",), "graph_network": ("pipeline",)}


@pytest.fixture(scope="module")
def runner(pool: RankPool) -> Iterator[Runner]:
    with Runner(PATIENCE, pool) as runner:
        yield runner


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_of_the_fuzzer(seed: int, runner: Runner) -> None:
    result = runner.run(case_of(seed))
    assert result["verdict"] == "exact", result["why"]


def test_a_seed_is_always_the_same_case() -> None:
    assert case_of(11) == case_of(11)
    assert len({str(case_of(seed)["plan"]) for seed in range(50)}) > 45


@pytest.mark.parametrize("name", SLICE)
def test_a_slice_of_the_zoo(name: str, runner: Runner) -> None:
    for label in SLICE[name]:
        result = runner.run(zoo.case_of(zoo.names()[name], zoo.PLANS[label], whole=False))
        assert result["verdict"] not in BAD, result["why"]


def test_a_hang_and_a_crash_are_told_and_the_campaign_goes_on(runner: Runner) -> None:
    case = zoo.case_of(
        {"factory": "benchmarks.fuzz_models:perceptron", "arguments": {"layers": 2, "width": 4}}, [], whole=True
    )
    missing = {**case, "model": {"factory": "benchmarks.fuzz_models:nothing"}}
    assert runner.run(missing)["verdict"] == "absent"
    broken = {**case, "optimizer": {"name": "sgd", "lr": 0.01}, "mask": "unknown"}
    assert runner.run(broken)["verdict"] == "crash"
    assert runner.run(case)["verdict"] == "exact"


def zoo_case(name: str, *techniques: dict[str, Any]) -> dict[str, Any]:
    return zoo.case_of({"factory": f"benchmarks.zoo_plain:{name}"}, list(techniques), whole=False)


FOUND: dict[str, dict[str, Any]] = {
    "VGG: a block that is nn.ReLU(inplace=True) overwrote the input that its replay needs": zoo_case(
        "torchvision_vgg", {"name": "recompute"}
    ),
    "the same, recomputed selectively": zoo_case("torchvision_vgg", {"name": "recompute", "layers": 0, "selective": 5}),
}
"""Story -> the case."""


@pytest.mark.parametrize("story", FOUND)
def test_what_was_found_stays_right(story: str, runner: Runner) -> None:
    result = runner.run(FOUND[story])
    assert result["verdict"] == "exact", result["why"]
