"""Every model, ours and anybody's: a plan trains it as one device does and moves what was priced, or says why not.

Tests of `zoo/image_models.py`, `zoo/recommendation.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign as foreign_modules
import pytest
import tiny

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.run.model import describe
from meshwright.run.run_file import ModelSection

sys.path.insert(0, str(Path(__file__).parent))

Run = Callable[..., list[dict[str, Any]]]


SMALL, LARGE = [[[1, 8, 8], 0]], [[[1, 16, 16], 0]]


def ours(name: str, **more: Any) -> dict[str, Any]:
    return {"section": {"name": name, **more.pop("change", {})}, **more}


def foreign(function: str, **more: Any) -> dict[str, Any]:
    section = {"factory": f"foreign:{function}", **more.pop("section", {})}
    return {"section": section, **({} if "inputs" in more else {"vocab": 36}), **more}


IMAGES = {"targets": 10}
DEEPSEEK = {
    "num_layers": 3,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "router": "sigmoid",
    "routed_scale": 2.5,
    "capacity_factor": 1.0,
    "balance": 0.1,
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {**ours("moe-tiny"), "vocab": 256},
    "deepseek": {"section": {"name": "moe-tiny", "change": DEEPSEEK}, "vocab": 256},
    "vit": {**ours("vit-digits"), "inputs": [[[1, 8, 8], 0]], **IMAGES},
    "vgg": {**ours("vgg-tiny"), "inputs": [[[1, 8, 8], 0]], **IMAGES},
    "resnet": {**ours("resnet-tiny"), "inputs": [[[1, 16, 16], 0]], **IMAGES},
    "dlrm": {**ours("dlrm-tiny"), "inputs": [[[5], 0], [[4], 3]], "targets": -1},
    "gpt2": foreign("gpt2"),
    "llama": foreign("llama"),
    "qwen3": foreign("qwen3"),
    "mixtral": foreign("mixtral"),
    "bert": foreign("bert"),
    "t5": foreign("t5"),
    "by_hand": foreign("by_hand"),
    "convolutions": foreign("convolutions", inputs=SMALL, **IMAGES),
}
SPLIT: dict[str, dict[str, Any]] = {
    "phi3": foreign("phi3"),
    "mpt": foreign("mpt"),
    "neox": foreign("neox"),
    "bloom": foreign("bloom"),
    "falcon": foreign("falcon"),
    "olmoe": foreign("olmoe"),
    "qwen2_moe": foreign("qwen2_moe"),
    "bart": foreign("bart"),
    "whisper": foreign("whisper", inputs=[[[4, 16], 0]], **IMAGES),
}
"""Modules whose insides lie in other ways: fused weights, stacked experts, two lists of blocks, biases by head."""
WITH_STATISTICS = ("resnet", "convolutions", "residual_network")
PLANS = {
    "replicate": (tiny.REPLICATE,),
    "shard": (tiny.SHARD3,),
    "tensor": (tiny.TENSOR,),
    "pipeline": (tiny.PIPELINE,),
    "together": (tiny.TENSOR, tiny.PIPELINE, tiny.RECOMPUTE_ONE),
}
STAGED = {
    "staged replicas": (tiny.REPLICATE, tiny.PIPELINE),
    "staged shards": (tiny.SHARD2, tiny.t("pipeline", size=2, schedule="zero_bubble_h1")),
}
REFUSED = {
    ("resnet", "tensor"): "cannot be cut",
    ("dlrm", "tensor"): "cannot be cut",
    ("dlrm", "pipeline"): "cannot be cut into stages",
    ("t5", "tensor"): "reads more of another block than its first output",
    ("t5", "pipeline"): "block 1 also depends on",
    ("convolutions", "tensor"): "cannot be cut",
}
"""What is refused, with a part of the reason; everything else must pass."""


def plan_for(model: str, plan: str) -> Plan:
    techniques = (PLANS | STAGED)[plan]
    whole = tiny.plan_of(*techniques)
    share = tiny.BATCH // whole.num_replicas
    return tiny.plan_of(*techniques, microbatch=share if model in WITH_STATISTICS else share // 2)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_trains_as_on_one_device_or_is_refused(model: str, plan: str, ran: Run) -> None:
    config, chosen = MODELS[model], plan_for(model, plan)
    profile = describe(decode(ModelSection, config["section"], "model"), tiny.SEQUENCE).profile
    problems = chosen.check(profile)
    expected = [why for (name, each), why in REFUSED.items() if name == model and each in (plan, *_names(plan))]
    if expected:
        told = "\n".join(map(str, problems))
        assert all(why in told for why in expected), told
        return
    assert not problems
    answers = ran(chosen, config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


QUICK = [("phi3", "tensor"), ("olmoe", "tensor"), ("bart", "tensor")]
LONGER = [
    *((model, "tensor") for model in ("neox", "bloom", "falcon", "qwen2_moe", "whisper")),
    *((model, "together") for model in ("phi3", "mpt", "olmoe", "bart")),
]


@pytest.mark.parametrize(("model", "plan"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONGER)])
def test_a_fused_or_stacked_weight_is_split_as_it_is_used(model: str, plan: str, ran: Run) -> None:
    techniques = PLANS[plan]
    if model in ("bart", "whisper"):  # no stages
        techniques = (tiny.TENSOR, tiny.REPLICATE) if plan == "together" else techniques
    answers = ran(tiny.plan_of(*techniques, microbatch=2), SPLIT[model])
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize("model", ["moe", "deepseek"])
def test_experts_stay_whole_where_the_sequence_is_split(model: str, ran: Run) -> None:
    """Balance and capacity are a sequence's own: they must see all of it."""
    answers = ran(tiny.plan_of(tiny.SEQUENCED, tiny.SHARD3, microbatch=2), MODELS[model])
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


OTHERS = {
    "encoder": foreign("encoder"),
    "swin": foreign("swin", inputs=LARGE, **IMAGES),
    "vision_transformer": foreign("vision_transformer", inputs=SMALL, **IMAGES),
    "residual_network": foreign("residual_network", inputs=LARGE, **IMAGES),
    "lstm": foreign("lstm"),
    "gru": foreign("gru"),
    "deep_lstm": foreign("deep_lstm"),
}
"""Whose forward asks more of its blocks than to run them, or whose blocks are not in one list, or recurrent."""


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("encoder", "pipeline"),
        ("lstm", "pipeline"),
        ("residual_network", "pipeline"),
        slow("vision_transformer", "pipeline"),
        slow("swin", "pipeline"),
        slow("gru", "pipeline"),
        slow("encoder", "together"),
        slow("residual_network", "staged replicas"),
        slow("lstm", "shard"),
        slow("lstm", "staged shards"),
        slow("deep_lstm", "replicate"),
        slow("deep_lstm", "shard"),
    ],
)
def test_modules_as_others_write_them(model: str, plan: str, ran: Run) -> None:
    chosen = plan_for(model, plan)
    answers = ran(chosen, OTHERS[model])
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hf") / name
            getattr(foreign_modules, name)().save_pretrained(made[name])
        return made[name]

    return get


@pytest.mark.parametrize(("name", "plan"), [("opt", "pipeline"), slow("neox", "shard"), slow("qwen3_moe", "together")])
def test_a_folder_of_transformers_trains_as_on_one_device(
    name: str, plan: str, ran: Run, folder_of: Callable[[str], Path]
) -> None:
    config = {"section": {"hf": str(folder_of(name))}, "vocab": 36}
    described = describe(decode(ModelSection, config["section"], "model"), tiny.SEQUENCE)
    assert described.kind == "module"
    assert "stages" not in described.profile.uncut
    assert sum(op.flops(1, 16) for layer in described.profile.block_layers for op in layer.ops) > 0
    answers = ran(plan_for(name, plan), config)
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


def _names(plan: str) -> list[str]:
    return [technique.name for technique in PLANS[plan]]


REPLAYED = (tiny.RECOMPUTE, tiny.REPLICATE, tiny.SHARD3)
CUT = (tiny.TENSOR, tiny.PIPELINE)


@pytest.mark.parametrize("techniques", [REPLAYED, CUT], ids=tiny.joined)
@pytest.mark.parametrize("model", ["resnet", "vgg", "vit", "dlrm", "moe", "by_hand", "llama", "convolutions"])
def test_what_is_sent_in_bf16_is_what_is_priced(model: str, techniques: tuple[Any, ...], pool: RankPool) -> None:
    config = MODELS[model]
    profile = describe(decode(ModelSection, config["section"], "model"), tiny.SEQUENCE).profile
    # Without what this model refuses by itself.
    chosen = tuple(each for each in techniques if not _whole_batch(each).check(profile))
    plan = _whole_batch(tiny.BF16, *chosen)
    assert plan.check(profile) == ()
    question = {"config": config, "optimizer": tiny.ADAMW, "sequence": tiny.SEQUENCE, "steps": 1, "dtype": "float32"}
    arguments = {**question, "plan": json.loads(plan.to_json()), "prices": True}
    answers = pool.run("rank_jobs:plan_job", arguments, plan.num_ranks, timeout_seconds=300)
    assert tiny.price_differences(answers) == []


def _whole_batch(*techniques: Any) -> Plan:
    return tiny.plan_of(*techniques, microbatch=tiny.BATCH // tiny.plan_of(*techniques).num_replicas)


@pytest.mark.parametrize("technique", [tiny.REPLICATE, tiny.SHARD3], ids=str)
def test_replayed_batch_statistics_are_priced(technique: Any, ran: Run) -> None:
    for recompute in (tiny.RECOMPUTE, tiny.t("recompute", layers="first 1", selective="first 1")):
        answers = ran(_whole_batch(recompute, technique), MODELS["resnet"])
        assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
        assert tiny.price_differences(answers) == []


def test_batch_statistics_over_time_are_refused() -> None:
    profile = describe(ModelSection(name="resnet-tiny"), 0).profile
    (problem,) = tiny.plan_of(tiny.REPLICATE, microbatch=1).check(profile)
    assert "whole batch" in str(problem)
    assert f"microbatch = {tiny.BATCH // 2}" in str(problem)


def test_an_optimizer_knows_anybodys_blocks(ran: Run) -> None:
    answers = ran(plan_for("by_hand", "shard"), MODELS["by_hand"], optimizer={"name": "muon", "lr": 1e-2, "clip": 0.5})
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


TUNED: dict[str, dict[str, Any]] = {
    "ours, embedding and first block": {
        "section": {"name": "byte-tiny", "freeze": ["embed.*", "blocks.0.*"]},
        "vocab": 256,
    },
    "ours, head only": {"section": {"name": "byte-tiny", "train": ["head.*"]}, "vocab": 256},
    "ours, norms only": {"section": {"name": "byte-tiny", "train": ["*norm.weight"]}, "vocab": 256},
    "ours, attention outputs only": {"section": {"name": "byte-tiny", "train": ["*.attention.output.*"]}, "vocab": 256},
    "anybody's": foreign("by_hand", section={"freeze": ["words.*", "mixers.1.*", "out.bias"]}),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", TUNED)
def test_frozen_parameters_stay_and_cost_nothing(model: str, plan: str, ran: Run) -> None:
    answers = ran(plan_for(model, plan), TUNED[model])
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []
