"""All layers before the loss as one compiled graph: the model that one device trains, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from tiny import EXACT, GPT, LLAMA, plan_of, t

Run = Callable[..., list[dict[str, Any]]]
SHALLOW = {"num_layers": 2}
ONE = t("compile", backend="aot_eager", scope="model")
TOGETHER = (
    (ONE, tiny.RECOMPUTE_SOME),
    (ONE,),
    (ONE, tiny.CHUNKED),
    (ONE, tiny.RECOMPUTE),
    (ONE, tiny.REPLICATE),
)


@pytest.mark.parametrize("techniques", TOGETHER, ids=tiny.joined)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_one_graph_is_one_device(techniques: tuple[Any, ...], config: dict[str, Any], ran: Run) -> None:
    answers = ran(plan_of(*techniques), config | SHALLOW)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []
    assert [answer["num_graphs"] for answer in answers] == [1] * len(answers)


@pytest.mark.slow
def test_one_graph_by_inductor(ran: Run) -> None:
    one = t("compile", scope="model", graphs=True)  # CUDA graphs are left out on a CPU
    answers = ran(plan_of(one, microbatch=tiny.BATCH), GPT | {"num_layers": 1}, prices=False)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert answers[0]["num_graphs"] == 1


@pytest.mark.parametrize("techniques", [(tiny.BF16,), (t("precision", matmul="fp8_tensorwise"),)], ids=tiny.joined)
def test_one_graph_in_fewer_bits_is_near_float32(techniques: tuple[Any, ...], ran: Run) -> None:
    config = LLAMA | {"num_layers": 3, "hidden_size": 32, "ffn_size": 64, "init_std": 0.1}
    answers = ran(plan_of(*techniques, ONE, microbatch=4), config, dtype="float32")
    assert answers[0]["errors"]["first loss"][0] < 2**-7
    assert answers[0]["errors"]["first gradient"][0] < 2**-4
