"""The fuzzer and the zoo: what they found stays right, and a slice of both runs here.

`benchmarks/fuzz.py` and `benchmarks/zoo.py` run the whole; a finding joins `FOUND` with a line of its story.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.launch.rank_pool import RankPool
from meshwright.optimizers.optimizer_config import OptimizerConfig

sys.path.insert(0, str(Path(__file__).parents[2]))  # for `benchmarks`, in ranks too

from benchmarks import oracle, zoo
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


def fuzz_case(model: dict[str, Any], *techniques: dict[str, Any], **changes: Any) -> dict[str, Any]:
    plan = {"techniques": list(techniques), "batch": 4, "microbatch": 2}
    return {"seed": 7, "model": model, "plan": plan, "optimizer": {"name": "adamw", "lr": 0.01}, "sequence": 8,
            "steps": 4, "mask": "some", "documents": False, "dtype": "float64"} | changes  # fmt: skip


def decoder(**changes: Any) -> dict[str, Any]:
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 4, "hidden_size": 9, "ffn_size": 6,
             "vocab_size": 17, "max_sequence": 64, "init_std": 0.2}  # fmt: skip
    return {"config": "decoder", "change": sizes | changes}


def mixer(layers: int) -> dict[str, Any]:
    sizes = {"layers": layers, "heads": 2, "hidden": 8, "sequence": 8, "vocab": 17, "ffn": 6}
    return {"factory": "benchmarks.fuzz_models:mixer", "arguments": sizes}


ONE_EXPERT = fuzz_case(
    decoder(num_experts=2, experts_per_token=1, expert_ffn_size=6, capacity_factor=1.0, router="sigmoid"),
    {"name": "pipeline", "size": 2},
    optimizer={"name": "lamb", "lr": 0.01, "weight_decay": 0.0},
)
# fmt: off
FOUND: dict[str, dict[str, Any]] = {
    "VGG: a block that is nn.ReLU(inplace=True) overwrote the input that its replay needs": zoo_case(
        "torchvision_vgg", {"name": "recompute"}
    ),
    "the same, recomputed selectively": zoo_case(
        "torchvision_vgg", {"name": "recompute", "layers": "none", "selective": "first 5"}
    ),
    "a shard of one rank beside tensor was wrapped and priced": fuzz_case(
        decoder(num_kv_heads=2), {"name": "tensor", "size": 2, "sequence": True}, {"name": "shard", "size": 1},
        {"name": "recompute"},
    ),
    "the same beside a pipeline that runs the two halves of a backward apart": fuzz_case(
        decoder(num_layers=3), {"name": "pipeline", "size": 2, "schedule": "zero_bubble_h1"},
        {"name": "shard", "size": 1, "prefetch": 1},
    ),
    "oracle: an evaluation reads running statistics, which are float32 in a float64 run": fuzz_case(
        {"config": "resnet", "change": {"stages": [2, 2], "widths": [3, 5], "stem_width": 4, "image_size": 18,
                                        "channels": 3, "num_classes": 7}},
        {"name": "shard", "size": 2, "stage": 2},
        seed=200173, plan={"techniques": [{"name": "shard", "size": 2, "stage": 2}], "batch": 6, "microbatch": 3},
    ),
    "oracle: queries and keys of a window of one token have no gradient, and AdamW moves them by rounding": fuzz_case(
        decoder(sliding_window=1, qkv_bias=True), {"name": "context", "size": 2, "kind": "ring"}
    ),
    "oracle: a router with one expert a token has no gradient, and LAMB moves it by rounding alone": ONE_EXPERT,
    "oracle: a shard gathers routers in bf16, and a token between two experts goes to the other one": fuzz_case(
        decoder(
            num_heads=6, num_kv_heads=3, hidden_size=18, ffn_size=7, vocab_size=31, positions="learned", norm="layer",
            num_experts=3, experts_per_token=2, expert_ffn_size=6, balance=0.1, capacity_factor=1.5, routed_scale=2.5,
            num_shared_experts=2,
        ) | {"freeze": ["blocks.1.*", "blocks.*.attention.*"]},
        seed=200042, plan={"techniques": [{"name": "shard", "size": 2}, {"name": "precision"}], "batch": 6,
                           "microbatch": 3},
        optimizer={"name": "adafactor", "lr": 0.01, "clip": 0.0}, sequence=5, mask="parts", dtype="float32",
    ),
    "slow: oracle: a rank's piece of GPT-2's fused weights is a part of the queries, of the keys and of the values":
    fuzz_case(
        {"factory": "benchmarks.fuzz_models:gpt2",
         "arguments": {"layers": 1, "heads": 2, "hidden": 12, "sequence": 5, "vocab": 31, "ffn": 10}},
        {"name": "tensor", "size": 2}, sequence=5,
    ),
    "slow: halves of backward gave a shard's sum gradients in two dtypes": fuzz_case(
        decoder(num_layers=4), {"name": "pipeline", "size": 2, "schedule": "dualpipe_v"},
        {"name": "shard", "size": 2, "stage": 1}, {"name": "precision"}, dtype="float32",
    ),
    "slow: stages whose weights stay gathered sent bf16 for float32, and norms met both": fuzz_case(
        mixer(2), {"name": "pipeline", "size": 2}, {"name": "shard", "size": 2, "stage": 1}, {"name": "recompute"},
        {"name": "precision"}, dtype="float32",
    ),
    "slow: the head's weights were gathered and summed again for each chunk of the last stage": fuzz_case(
        mixer(4), {"name": "pipeline", "size": 2, "schedule": "looped_bfs", "chunks": 2},
        {"name": "shard", "size": 2, "stage": 1},
    ),
}
# fmt: on
"""Story -> the case. Those of the oracle were right, and were reported all the same."""


@pytest.mark.parametrize(
    "story", [pytest.param(each, marks=[pytest.mark.slow] * each.startswith("slow:")) for each in FOUND]
)
def test_what_was_found_stays_right(story: str, runner: Runner) -> None:
    result = runner.run(FOUND[story])
    assert result["verdict"] == "exact", result["why"]


def test_rounding_moves_what_has_no_gradient_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = oracle.open_subject(ONE_EXPERT)
    plain, module = oracle.plain_subject(ONE_EXPERT, subject)
    first, exactly = oracle._copied(plain.parameters), oracle.reference.gradient
    settings: Any = (plain, module, ONE_EXPERT, subject, OptimizerConfig(**ONE_EXPERT["optimizer"]))
    answer = oracle.train_plainly(*settings, late=False)
    assert answer.undetermined == {f"blocks.{layer}.mlp.router.weight" for layer in range(2)}

    def rounded(*given: Any) -> Any:
        loss, gradients = exactly(*given)
        return loss, {name: each + 1e-17 * oracle._noise(each, 1) for name, each in gradients.items()}

    monkeypatch.setattr(oracle.reference, "gradient", rounded)
    off = {}
    for forced in ([], answer.steps):
        oracle._set(plain.parameters, first)
        control = oracle.Control(seed=1, forced=forced, rounding={})
        other = oracle.train_plainly(*settings, late=False, control=control)
        off[bool(forced)] = {name: float((other.last[name] - each).abs().max()) for name, each in answer.last.items()}
    assert min(off[False][name] for name in answer.undetermined) > 1e-4
    assert max(off[True].values()) < 1e-11
