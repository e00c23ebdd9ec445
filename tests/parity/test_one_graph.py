"""All layers before the loss as one compiled graph: the model that one device trains, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import tiny
from test_models import MODELS
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


IMAGES = [("vit", (ONE,)), ("vit", (ONE, tiny.REPLICATE)), ("vgg", (ONE, tiny.RECOMPUTE)), ("resnet", (ONE,))]


@pytest.mark.parametrize(("model", "techniques"), IMAGES)
def test_an_image_model_is_one_graph_with_its_head(model: str, techniques: tuple[Any, ...], ran: Run) -> None:
    plan = plan_of(*techniques)
    answers = ran(replace(plan, microbatch=tiny.BATCH // plan.num_replicas), MODELS[model])
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []
    assert [answer["num_graphs"] for answer in answers] == [1] * len(answers)


def test_batch_norms_do_not_break_the_graphs_of_blocks(ran: Run) -> None:
    answers = ran(plan_of(t("compile", backend="aot_eager"), microbatch=tiny.BATCH), MODELS["resnet"])
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert answers[0]["num_graphs"] == 3  # one for each block


@pytest.mark.parametrize("recompute", [tiny.RECOMPUTE, tiny.RECOMPUTE_ONE])
def test_compiled_batch_norms_remember_a_batch_once(recompute: Any, ran: Run) -> None:
    answers = ran(plan_of(t("compile", backend="aot_eager"), recompute, microbatch=tiny.BATCH), MODELS["resnet"])
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
