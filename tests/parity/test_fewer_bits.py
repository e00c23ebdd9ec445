"""Fewer bits (fp8 products, bf16 weights, fp16) under every cut: near float32, as on one device, and as priced."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import ALL_FP8, BY_ROW, FP8, LLAMA, LOSSY, WIDE, plan_of

from meshwright.launch.rank_pool import RankPool

Run = Callable[..., list[dict[str, Any]]]

CASES = (
    (FP8,),
    (BY_ROW,),
    (ALL_FP8, tiny.SHARD1),
    (ALL_FP8, tiny.SHARD2),
    (ALL_FP8, tiny.SHARD3),
    (FP8, tiny.SHARD3),
    (BY_ROW, tiny.SHARD3),
    (BY_ROW, tiny.SEQUENCED),
    (FP8, tiny.PIPELINE, tiny.RECOMPUTE),
    pytest.param((BY_ROW, tiny.REPLICATE, tiny.COMPILE), marks=pytest.mark.slow),
    pytest.param((ALL_FP8, tiny.SHARD3, tiny.COMPILE), marks=pytest.mark.slow),
    pytest.param((ALL_FP8, tiny.SHARD3, tiny.RECOMPUTE), marks=pytest.mark.slow),
    pytest.param((FP8, tiny.SHARD3, tiny.TENSOR, tiny.PIPELINE), marks=pytest.mark.slow),
    pytest.param((FP8, tiny.SHARD2, tiny.INTERLEAVED), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("techniques", CASES, ids=tiny.joined)
def test_fp8_is_near_float32_and_sends_what_is_priced(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(*techniques, microbatch=4), WIDE, dtype="float32")
    assert tiny.departures(answers, LOSSY) == []
    assert tiny.price_differences(answers) == []
    errors = [answer["errors"]["first gradient"][0] for answer in answers if "first gradient" in answer["errors"]]
    assert max(errors) > 2**-9, "no product was in 8 bits"


NARROW = tiny.t("precision", weights="bf16")
# Weights of 2^-9 are a rounding apart from the start; what is gained in a step is rounded again.
OF_NARROW = {
    "first loss": 2**-6,
    "first gradient": 2**-5,
    "first gradient norm": 2**-5,
    "loss": 2**-5,
    "parameter": 2**-6,
}
IN_NARROW = (
    (NARROW,),
    (NARROW, tiny.REPLICATE),
    (NARROW, tiny.SHARD3),
    (NARROW, tiny.SEQUENCED),
    (NARROW, tiny.PIPELINE, tiny.RECOMPUTE),
    pytest.param((NARROW, tiny.SHARD3, tiny.TENSOR, tiny.PIPELINE), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("techniques", IN_NARROW, ids=tiny.joined)
def test_bf16_weights_are_near_float32_and_half_as_large(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(*techniques, microbatch=4), LLAMA, dtype="float32")
    assert tiny.departures(answers, OF_NARROW) == []
    assert tiny.price_differences(answers) == []
    whole = ran(plan_of(*techniques[1:], microbatch=4), LLAMA, dtype="float32")
    for narrow, wide in zip(answers, whole, strict=True):
        assert [narrow["state"][each] * 2 for each in ("parameters", "gradients")] == [
            wide["state"][each] for each in ("parameters", "gradients")
        ]
        assert narrow["state"]["optimizer"] == wide["state"]["optimizer"]


MASTER = tiny.t("precision", weights="master")


@pytest.mark.parametrize("techniques", [(MASTER,), (MASTER, tiny.RECOMPUTE), (MASTER, tiny.CHUNKED)], ids=tiny.joined)
def test_copies_of_master_weights_are_priced(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(*techniques, microbatch=tiny.BATCH), LLAMA, dtype="float32")
    assert tiny.price_differences(answers) == []
    assert answers[0]["state"]["gradients"] < answers[0]["state"]["parameters"]


FP16 = tiny.t("precision", dtype="fp16")
# 11 bits; Adam makes whole steps of the signs of the smallest gradients, as in bf16.
OF_FP16 = {
    "first loss": 2**-11,
    "first gradient": 2**-10,
    "first gradient norm": 2**-10,
    "loss": 2**-9,
    "parameter": 2**-9,
}
IN_FP16 = (
    (FP16,),
    (FP16, tiny.REPLICATE),
    (FP16, tiny.SHARD1),
    (FP16, tiny.SHARD2),
    (FP16, tiny.SHARD3),
    (FP16, tiny.SEQUENCED),
    (FP16, tiny.PIPELINE, tiny.RECOMPUTE),
    (FP16, tiny.CHUNKED, tiny.RECOMPUTE_SOME),
    (FP16, tiny.ZBV),
    pytest.param((FP16, tiny.COMPILE, tiny.REPLICATE), marks=pytest.mark.slow),
    pytest.param((FP16, tiny.SHARD3, tiny.TENSOR, tiny.PIPELINE), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("techniques", IN_FP16, ids=tiny.joined)
def test_fp16_is_near_float32_and_sends_what_bf16_sends(techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(*techniques, microbatch=4), LLAMA, dtype="float32")
    assert tiny.departures(answers, OF_FP16) == []
    assert tiny.price_differences(answers) == []
    errors = [answer["errors"]["first gradient"][0] for answer in answers]
    assert min(errors) > 1e-6, "nothing was rounded"


@pytest.mark.parametrize("technique", [tiny.REPLICATE, tiny.SHARD1, tiny.SHARD3, tiny.TENSOR, tiny.PIPELINE], ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(technique: Any, pool: RankPool) -> None:
    plan = plan_of(FP16, technique)
    question = {"config": LLAMA, "optimizer": tiny.ADAMW, "sequence": tiny.SEQUENCE}
    answers = pool.run("rank_jobs:overflow_job", question | {"plan": json.loads(plan.to_json())}, num_ranks=2)
    for answer in answers:
        assert answer["skipped"] == [True, False, True]
        assert answer["changed"] == [False, True, False]
        assert answer["scales"] == [2.0**16, 2.0**15, 2.0**15]
        assert answer["num_steps"] == 1


BF16_BOUNDS = {
    "first loss": 2**-8,
    "first gradient": 2**-5,
    "first gradient norm": 2**-5,
    "loss": 2**-7,
    "parameter": 2**-6,
}
TUNED = {
    "last block": {"train": ["blocks.3.*"]},
    "embedding and first block": {"freeze": ["embed.*", "blocks.0.*"]},
    "projections": {"train": ["*.attention.query.*", "*.mlp.down.*"]},
}
"""Where nothing before a stage is trained, no gradient passes back through it."""
IN_TUNED = ((), (tiny.REPLICATE,), (tiny.SHARD2,), (tiny.SHARD3,), (tiny.SEQUENCED,), (tiny.PIPELINE,))
MORE_TUNED = (
    (tiny.ZBV, tiny.REPLICATE),
    (tiny.INTERLEAVED, tiny.SHARD2),
    (tiny.PIPELINE, tiny.TENSOR, tiny.RECOMPUTE),
    (tiny.RECOMPUTE_SOME, tiny.SHARD3),
)


@pytest.mark.parametrize("techniques", IN_TUNED + MORE_TUNED, ids=tiny.joined)
@pytest.mark.parametrize("trained", TUNED)
def test_frozen_parameters_are_bf16_and_train_as_one_device_with_them_frozen(
    trained: str, techniques: tuple[Any, ...], ran: Run
) -> None:
    """The reference is a plain torch loop with `requires_grad` off; in bf16, nobody's frozen weight moves."""
    config = {"section": {"name": "byte-tiny", "change": {"num_layers": 4}, **TUNED[trained]}, "vocab": 256}
    answers = ran(plan_of(tiny.BF16, *techniques, microbatch=4), config, dtype="float32")
    assert tiny.departures(answers, BF16_BOUNDS) == []
    assert tiny.price_differences(answers) == []
    if not techniques:
        (wide,) = ran(plan_of(microbatch=4), config, dtype="float32")
        state, (kept,) = wide["state"], answers
        frozen = state["parameters"] - state["gradients"]
        assert kept["state"] == state | {"parameters": state["parameters"] - frozen // 2}
