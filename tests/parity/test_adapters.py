"""Low-rank adapters on frozen weights, as one device trains them: on the same quantised weights, which the reference
decodes by the definition of their format and adds the adapters to.

Tests of `ops/packed_weights.py`, `zoo/layers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import GPT, LLAMA, QWEN, plan_of, t

from meshwright.core.plan import Plan

Run = Callable[..., list[dict[str, Any]]]
# Rows of two blocks at least: cut in two they are whole blocks.
WIDE: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "ffn_size": 128, "init_std": 0.08}
BASES = {base: {"rank": 4, "base": base} for base in ("bf16", "int8", "nf4")}
PLANS = (
    (),
    (tiny.REPLICATE,),
    (tiny.SHARD3,),
    (tiny.SHARD1,),
    (tiny.TENSOR,),
    (tiny.SEQUENCED,),
    (tiny.PIPELINE,),
    (tiny.ZBV,),
    (tiny.RING,),
    (tiny.RECOMPUTE,),
    (t("recompute", layers="none", selective="all"),),
    (tiny.COMPILE,),
    (tiny.CHUNKED,),
    (tiny.SHARD2, tiny.TENSOR, tiny.PIPELINE),
    (tiny.REPLICATE, tiny.SEQUENCED, tiny.RECOMPUTE, tiny.COMPILE),
)


def exact(plan: Plan, config: dict[str, Any], ran: Run) -> list[dict[str, Any]]:
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
    return answers


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
def test_four_bits_under_a_plan(techniques: tuple[Any, ...], ran: Run) -> None:
    layers = 4 if tiny.ZBV in techniques else 2
    exact(plan_of(*techniques), LLAMA | WIDE | {"num_layers": layers, "adapter": BASES["nf4"]}, ran)


@pytest.mark.parametrize("base", ["int8", "bf16"])
@pytest.mark.parametrize("techniques", [(tiny.SEQUENCED,), (tiny.SHARD2,), (tiny.PIPELINE, tiny.RECOMPUTE)], ids=str)
def test_other_bases(base: str, techniques: tuple[Any, ...], ran: Run) -> None:
    exact(plan_of(*techniques), QWEN | WIDE | {"adapter": BASES[base]}, ran)


@pytest.mark.parametrize("techniques", [(tiny.TENSOR,), (tiny.SHARD3,), (tiny.ULYSSES, tiny.REPLICATE)], ids=str)
def test_biases_and_some_layers_only(techniques: tuple[Any, ...], ran: Run) -> None:
    adapter = {"rank": 2, "alpha": 7.0, "targets": ["attention.*", "mlp.down"], "base": "nf4"}
    exact(plan_of(*techniques), GPT | WIDE | {"adapter": adapter}, ran)


@pytest.mark.parametrize("techniques", [(), (tiny.SHARD3,), (tiny.SEQUENCED, tiny.PIPELINE)], ids=tiny.joined)
def test_bytes_in_bf16(techniques: tuple[Any, ...], ran: Run) -> None:
    config = LLAMA | WIDE | {"adapter": BASES["nf4"]}
    answers = ran(plan_of(tiny.BF16, *techniques, microbatch=4), config, dtype="float32")
    assert tiny.price_differences(answers) == []
