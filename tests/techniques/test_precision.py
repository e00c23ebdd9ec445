"""What precision refuses, how far each setting is from exact, and what its price says of fp8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import DecoderConfig, profile
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.planner.search import search
from meshwright.planner.wishes import read_wishes
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import price

PRECISION: Any = technique_named("precision")
FP8 = PRECISION(matmul="fp8_tensorwise")
LLAMA = profile("llama3.2-1b")
SMALL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 128,
    "vocab_size": 37,
    "max_sequence": 64,
}


def _problems(technique: Any, model: Any = LLAMA, machine: Any = None, others: tuple[Any, ...] = ()) -> str:
    plan = Plan(techniques=(technique, *others), batch=8)
    return "; ".join(map(str, technique.check(plan, model, machine)))


def test_a_device_without_the_dtype_is_refused() -> None:
    assert _problems(FP8, machine=cluster("h200")) == ""
    assert "do not multiply in fp8" in _problems(FP8, machine=cluster("a100-80"))
    assert "do not compute in bf16" in _problems(PRECISION(), machine=cluster("titan-rtx"))
    assert 'Use dtype = "fp16"' in _problems(PRECISION(), machine=cluster("titan-rtx"))
    with pytest.raises(MeshwrightError, match="do not multiply in fp8"):
        search(LLAMA, cluster("a100-80"), batch=8, sequence=512, pin=["precision.matmul=fp8_rowwise"], allow="lossy")


def test_fp8_where_it_cannot_be_is_refused() -> None:
    odd = profile(DecoderConfig(**SMALL | {"hidden_size": 36, "num_heads": 3, "num_kv_heads": 3, "ffn_size": 40}))
    assert "multiples of 16" in _problems(FP8, odd)
    assert "none is left for fp8" in _problems(PRECISION(matmul="fp8_rowwise", edge_blocks=8))
    assert "dtype is fp32" in _problems(PRECISION(matmul="fp8_rowwise", dtype="fp32"))
    assert "autocast" in _problems(FP8, profile("vit-b16"))
    assert "dtype is fp16" in _problems(PRECISION(matmul="fp8_rowwise", dtype="fp16"))
    schedule = technique_named("pipeline")(size=2, schedule="zbv")
    assert "makes weights' gradients apart" in _problems(FP8, others=(schedule,))
    assert "edge_blocks is -1" in _problems(PRECISION(edge_blocks=-1))


def test_fp16_where_it_cannot_be_is_refused() -> None:
    fp16 = PRECISION(dtype="fp16")
    assert fp16.exactness == "rounded"
    assert "computes in fp16" in _problems(PRECISION(dtype="fp16", weights="bf16"))
    device = replace(cluster("h100").device, kind="cpu", flops_per_second={"fp32": 1e12, "bf16": 2e12})
    slow = replace(cluster("h100"), device=device)
    assert 'do not compute in fp16. Use dtype = "bf16"' in _problems(fp16, machine=slow)
    for other, words in (
        (technique_named("update_in_backward")(), "must be skipped as a whole"),
        (technique_named("pipeline")(size=2, schedule="async"), "whether a gradient of fp16 overflowed"),
    ):
        for precision, is_refused in ((fp16, True), (PRECISION(), False)):
            plan = Plan(techniques=(precision, other), batch=8, microbatch=4 if other.axis else 8)
            assert (words in "; ".join(map(str, plan.check(LLAMA)))) == is_refused
            assert (
                bool(np.any(price(LLAMA, plan, sequence=512, optimizer=OptimizerConfig(clip=0.0)).facts.forbidden))
                == is_refused
            )


def test_fp16_is_searched_only_where_there_is_no_bf16() -> None:
    question: dict[str, Any] = {"batch": 4, "sequence": 512, "top": 1}
    found = {
        name: search(LLAMA, cluster(name), pin=pins, **question).best[0].technique("precision")  # type: ignore[index]
        for name, pins in (("h200", ()), ("v100", ()), ("h100", ("precision.dtype=fp16",)))
    }
    assert {name: each.dtype for name, each in found.items()} == {"h200": "bf16", "v100": "fp16", "h100": "fp16"}


def test_fp16_costs_what_bf16_costs_at_its_own_rate() -> None:
    wide, narrow = (Plan(techniques=(PRECISION(dtype=dtype),), batch=4, microbatch=4) for dtype in ("bf16", "fp16"))
    machine = cluster("h100")
    rates = {name: rate for name, rate in machine.device.flops_per_second.items() if name != "fp16"}
    without = replace(machine, device=replace(machine.device, flops_per_second=rates))
    wanted = forecast(LLAMA, wide, without, sequence=4096)
    same = forecast(LLAMA, narrow, without, sequence=4096)
    assert (same.step_seconds, same.peak_bytes) == (wanted.step_seconds, wanted.peak_bytes)
    faster = replace(machine, device=replace(machine.device, flops_per_second=rates | {"fp16": 2 * rates["bf16"]}))
    assert forecast(LLAMA, narrow, faster, sequence=4096).step_seconds < wanted.step_seconds


def test_a_vocabulary_that_is_no_multiple_of_16_does_not_matter() -> None:
    model = DecoderConfig(**SMALL)
    assert _problems(FP8, profile(model), cluster("h200")) == ""


def test_each_setting_says_how_far_it_is_from_exact() -> None:
    assert PRECISION().exactness == "rounded"
    assert FP8.exactness == PRECISION.exactness_with({"matmul": "fp8_rowwise"}) == "lossy"
    with pytest.raises(MeshwrightError, match="it is lossy, and only rounded techniques are allowed"):
        read_wishes(["precision.matmul=fp8_rowwise"])
    read_wishes(["precision.matmul=fp8_rowwise"], allow="lossy")


def test_search_uses_fp8_where_lossy_is_allowed_and_only_there() -> None:
    question: dict[str, Any] = {"batch": 4, "sequence": 4096, "top": 1}
    rounded, lossy = (search(LLAMA, cluster("h200"), allow=allow, **question) for allow in ("rounded", "lossy"))
    (plan, plain), (narrow, fast) = rounded.best, lossy.best  # type: ignore[misc]
    assert plan.technique("precision") == PRECISION(weights="master")
    assert narrow.technique("precision").matmul
    assert 1.05 < plain.step_seconds / fast.step_seconds < 1.6


def test_fp8_changes_products_of_all_blocks_but_the_ends_and_no_bytes_that_are_held_or_sent() -> None:
    plain, narrow = (
        price(LLAMA, Plan(techniques=(each,), batch=4), sequence=4096)
        for each in (PRECISION(), PRECISION(matmul="fp8_rowwise"))
    )
    assert plain.residents == narrow.residents
    flops = {"fp8": 0.0, "bf16": 0.0}
    for task in narrow.computes:
        if task.role == "linear" and task.layer == "blocks":
            flops[task.dtype] += float(task.flops)
    assert flops["fp8"] / sum(flops.values()) == pytest.approx(14 / 16)
    total = [sum(float(task.repeat * task.flops) for task in work.computes) for work in (plain, narrow)]
    assert total[0] == pytest.approx(total[1])
    assert forecast(LLAMA, Plan(techniques=(FP8,), batch=4), cluster("h200"), sequence=4096).step_seconds < 1


def test_shard_gathers_what_tensorwise_products_read_in_8_bits() -> None:
    shard: Any = technique_named("shard")

    def gathered(each: Any) -> float:
        work = price(LLAMA, Plan(techniques=(each, shard(size=2)), batch=4), sequence=4096)
        return sum(float(each.bytes * each.repeat) for each in work.collectives if each.kind == "all_gather")

    wide, by_row, narrow = map(gathered, (PRECISION(), PRECISION(matmul="fp8_rowwise"), FP8))
    assert wide == by_row
    assert 0.5 < narrow / wide < 0.8  # the table, the head and two blocks of 16 are as before
