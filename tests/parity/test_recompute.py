"""Blocks that keep what is dear, or few of their inputs, train one device's model and send what was priced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import MOE, QWEN, plan_of, t

Run = Callable[..., list[dict[str, Any]]]

SELECTIVE = t("recompute", layers="none", selective="first 4")
MIXED = t("recompute", layers="0", selective="1-2")
ONE_SLOT = t("recompute", layers="first 3", selective="first 1", slots=1)
ATTENTION = t("recompute", layers="none", attention="first 2", selective="first 2")

PLANS = (
    (SELECTIVE,),
    (MIXED,),
    (ONE_SLOT,),
    (MIXED, tiny.SEQUENCED),
    (SELECTIVE, tiny.TENSOR),
    (SELECTIVE, t("tensor", size=2, sequence=True, overlap=2)),
    (ONE_SLOT, tiny.SEQUENCED),
    (MIXED, tiny.SHARD3),
    (ONE_SLOT, tiny.SHARD2),
    (t("recompute", layers="first 1", selective="first 1"), tiny.PIPELINE),
    (t("recompute", layers="first 2", slots=1), tiny.PIPELINE),
    (t("recompute", layers="first 1", selective="first 1"), tiny.INTERLEAVED),
    (t("recompute", slots=1), tiny.GPIPE),
    (SELECTIVE, tiny.ZBV),
    (MIXED, tiny.RING),
    (SELECTIVE, tiny.ULYSSES),
    (ONE_SLOT, tiny.RING),
    (SELECTIVE, tiny.COMPILE),
    (MIXED, tiny.COMPILE, tiny.SEQUENCED),
    (SELECTIVE, tiny.CHUNKED, tiny.REPLICATE),
    (ATTENTION, tiny.TENSOR),
    (ATTENTION, tiny.SEQUENCED),
    (ATTENTION, tiny.RING),
    (t("recompute", layers="first 1", attention="first 1"), tiny.PIPELINE),
    (ATTENTION, tiny.COMPILE, tiny.SHARD3),
)
IN_GRAPHS = (
    (t("recompute", layers="none", selective="first 2"), tiny.ULYSSES),
    (t("recompute", layers="first 1", selective="first 1"), tiny.RING),
    (t("recompute", layers="first 1", selective="first 1"), t("tensor", size=2, sequence=True, overlap=2)),
)
"""Collectives inside blocks that are compiled and recomputed."""


def exact_and_honest(plan: Any, config: dict[str, Any], ran: Run) -> list[dict[str, Any]]:
    assert plan.check(tiny.profile_of(config)) == ()
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    return answers


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
def test_the_same_numbers_and_the_priced_messages(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = exact_and_honest(plan_of(*techniques), QWEN, ran)
    if tiny.COMPILE in techniques:
        assert all(answer["num_graphs"] > 0 for answer in answers)


@pytest.mark.parametrize("techniques", IN_GRAPHS, ids=tiny.joined)
def test_compiled_blocks_recompute_around_their_collectives(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = exact_and_honest(plan_of(*techniques, tiny.COMPILE), QWEN | {"num_layers": 2}, ran)
    assert all(answer["num_graphs"] > 0 for answer in answers), "nothing was compiled"


@pytest.mark.parametrize(
    "techniques",
    [
        # What a compiler cannot trace ends its graph, inside a block that is recomputed too.
        (t("recompute", layers="none", selective="first 2"), tiny.COMPILE),
        (t("recompute", layers="first 1", selective="first 1"), tiny.COMPILE, tiny.EXPERT, tiny.RING),
        (t("recompute", layers="none", selective="first 2"), tiny.EXPERT),
        (t("recompute", layers="first 1", selective="first 1"), tiny.TENSOR),
        (t("recompute", layers="first 1", selective="first 1"), tiny.RING),
        (t("recompute", slots=1), tiny.EXPERT, tiny.RING),
        (t("recompute", layers="none", attention="first 2"), tiny.EXPERT),
    ],
    ids=tiny.joined,
)
def test_with_experts(techniques: tuple[Any, ...], ran: Run) -> None:
    exact_and_honest(plan_of(*techniques), MOE, ran)
