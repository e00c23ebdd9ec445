"""Blocks that are updated seldom, against a loop of one process that shares nothing with them but the model's forward.

Tests of `techniques/multi_rate.py`, `optimizers/slow_parameters.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import t
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.models.frozen_parameters import freeze, frozen_by
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.simulator.pricing import price
from meshwright.verify import parity
from meshwright.verify.reference_model import plain_of

ADAMW = tiny.ADAMW | {"epsilon": 1e-4}


def num_steps(every: int) -> int:
    """Whole periods: what is sent in them is what is priced on average."""
    return 9 if every == 3 else 8


def one_device(config: dict[str, Any], slow: set[int], every: int, optimizer: dict[str, Any] = ADAMW) -> dict[str, Any]:
    """A plain loop: for each block an optimizer of torch's own, which takes a step or does not."""
    shape = decode(DecoderConfig, config, "config")
    plain = plain_of(open_config(shape, "tiny", 0), sequence=tiny.SEQUENCE, dtype=torch.float64)
    samples = parity.random_samples(shape.vocab_size, tiny.BATCH, tiny.SEQUENCE)

    def is_slow(name: str) -> bool:
        if name.startswith("blocks."):
            return int(name.split(".")[1]) in slow
        return 0 in slow and not config.get("tied") and name.startswith("embed")

    def torch_optimizer(names: list[str]) -> Any:
        values, decay = [plain.parameters[name] for name in names], OptimizerConfig().weight_decay
        groups = [
            {"params": [value for value in values if (value.ndim >= 2) == is_matrix], "weight_decay": decay * is_matrix}
            for is_matrix in (True, False)
        ]
        settings = {"lr": optimizer["lr"], "betas": (0.9, 0.95), "eps": optimizer["epsilon"]}
        return torch.optim.AdamW([group for group in groups if group["params"]], **settings)

    named = {False: [], True: []}
    for name in plain.parameters:
        named[is_slow(name)].append(name)
    assert named[True]
    assert named[False]
    always, seldom = torch_optimizer(named[False]), torch_optimizer(named[True])
    answer: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(num_steps(every)):
        given, due = samples(step, 0, 1), step % every == 0
        chosen = [plain.parameters[name] for name in named[False] + named[True] * due]
        loss = (plain.losses(plain.forward(given.inputs), given.targets) * given.weights).sum() / given.num_tokens
        gradients = torch.autograd.grad(loss, chosen)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for value, gradient in zip(chosen, gradients, strict=True):
            value.grad = gradient * min(1.0, float(optimizer["clip"] / norm))
        always.step()
        if due:
            seldom.step()
        answer["losses"].append(float(loss.detach()))
        answer["norms"].append(float(norm))
    answer["parameters"] = plain.parameters
    return answer


def asked(config: dict[str, Any], *techniques: Technique, **question: Any) -> dict[str, Any]:
    plan = tiny.plan_of(*techniques)
    asked = {"plan": json.loads(plan.to_json()), "config": config, "optimizer": ADAMW, "folder": ""}
    return asked | {"traffic": True} | question


def trained(folder: Path, step: int) -> dict[str, Tensor]:
    reader, found = Reader(step_folder(folder, step)), {}
    for key in reader.tensor_names():
        if key.startswith("parameter."):
            shape = tuple(reader.manifest.tensors[key].shape)
            found[key.removeprefix("parameter.")] = out = torch.empty(shape, dtype=torch.float64)
            reader.read_into(key, Box.whole(shape), out)
    return found


def promised(config: dict[str, Any], plan: Plan, stage: int, steps: int) -> Counter[tuple[str, str, int]]:
    """Messages of all steps."""
    counts = Counter[tuple[str, str, int]]()
    for each in price(tiny.profile_of(config), plan, sequence=tiny.SEQUENCE, element_bytes=8, stage=stage).collectives:
        count = each.repeat * (1 if each.per_step else plan.num_microbatches) * steps
        if count:
            counts[each.kind, each.axis, int(each.bytes)] += count
    return counts


TIED, APART = tiny.QWEN, tiny.LLAMA
MESHES: dict[str, tuple[Technique, ...]] = {
    "one device": (),
    "replicate": (tiny.REPLICATE,),
    "shard 1": (tiny.SHARD1,),
    "shard 2": (tiny.SHARD2,),
    "shard 3": (tiny.SHARD3,),
    "tensor": (tiny.TENSOR,),
    "sequence": (tiny.SEQUENCED,),
    "pipeline": (tiny.PIPELINE,),
    "interleaved": (tiny.INTERLEAVED,),
    "zbv": (tiny.ZBV,),
    "ring": (tiny.RING,),
    "compile": (tiny.COMPILE, tiny.REPLICATE),
    "recompute": (tiny.RECOMPUTE, tiny.SEQUENCED),
    "hybrid": (tiny.REPLICATE, tiny.SHARD3),
    "cube": (tiny.REPLICATE, tiny.SEQUENCED, tiny.PIPELINE),
    "sharded cube": (tiny.SHARD2, tiny.TENSOR, tiny.PIPELINE),
}
CASES = [
    ("shard 3", APART, "first 2", 2),  # the one of `make test`
    ("one device", APART, "first 3", 3),
    ("replicate", APART, "1-1,3", 3),
    ("cube", TIED, "first 3", 2),
    ("interleaved", APART, "first 3", 2),
    ("pipeline", APART, "first 3", 3),
    ("shard 3", APART, "first 1", 3),
    ("shard 2", APART, "last 2", 2),
    ("shard 3", TIED, "first 2", 2),
    ("interleaved", TIED, "all", 3),
    ("replicate", APART, "all", 2),
    *((mesh, APART, "first 2", 2) for mesh in MESHES if mesh != "shard 3"),
]


@pytest.mark.parametrize(("mesh", "config", "layers", "every"), CASES, ids=lambda each: str(each)[:12])
def test_a_mesh_does_what_a_plain_loop_does_and_sends_what_is_priced(
    mesh: str, config: dict[str, Any], layers: str, every: int, pool: RankPool, tmp_path: Path
) -> None:
    steps, techniques = num_steps(every), (t("multi_rate", layers=layers, every=every), *MESHES[mesh])
    plan = tiny.plan_of(*techniques)
    question = asked(config, *techniques, folder=str(tmp_path), steps=steps)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=plan.num_ranks)
    slow = {"first 1": {0}, "first 2": {0, 1}, "first 3": {0, 1, 2}, "last 2": {2, 3}, "1-1,3": {1, 3}}
    wanted = one_device(config, slow.get(layers, {0, 1, 2, 3}), every)
    for answer in answers:
        assert answer["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        assert answer["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
    found = trained(tmp_path, steps)
    assert set(found) == set(wanted["parameters"])
    for name, value in found.items():
        assert torch.allclose(value, wanted["parameters"][name].detach(), rtol=1e-9, atol=1e-11), name
    sent = [Counter({(kind, axis, size): n for kind, axis, size, n in answer["traffic"]}) for answer in answers]
    stages = [promised(config, plan, stage, steps) for stage in range(plan.mesh.get("pp", 1))]
    assert all(any(each == pytest.approx(stage) for stage in stages) for each in sent), (sent, stages)
    ranks_of_stage = plan.num_ranks // len(stages)
    whole = {what: sum(stage[what] for stage in stages) * ranks_of_stage for stage in stages for what in stage}
    assert whole == pytest.approx({what: sum(each[what] for each in sent) for each in sent for what in each})


def test_every_step_is_bit_for_bit_a_plan_without(pool: RankPool) -> None:
    held = []
    for techniques in ((), (tiny.EVERY_STEP,)):
        question = asked(TIED, tiny.REPLICATE, *techniques, steps=4)
        held.append(pool.run("local_jobs:trained_job", question, num_ranks=2))
    assert held[0] == held[1]


@pytest.mark.parametrize("at", [3, 4])
def test_a_run_goes_on_bit_for_bit(at: int, pool: RankPool, tmp_path: Path) -> None:
    """Resumed where a step begins that updates all, and where one does not; counts of updates are part of it."""
    techniques = t("multi_rate", layers="first 2", every=3), tiny.SHARD3
    whole = pool.run(
        "local_jobs:trained_job", asked(APART, *techniques, folder=str(tmp_path), save_at=at, steps=8), num_ranks=2
    )
    rest = asked(APART, *techniques, first=at, steps=8 - at, resume=str(tmp_path))
    again = pool.run("local_jobs:trained_job", rest, num_ranks=2)
    for before, after in zip(whole, again, strict=True):
        assert after["held"] == before["held"]
        assert after["losses"] == before["losses"][at:]


def backward_flops(profile: Profile, plan: Plan) -> float:
    tasks = price(profile, plan, sequence=tiny.SEQUENCE).computes
    return sum(float(task.flops * task.repeat) for task in tasks if task.phase in ("backward", "weight"))


@pytest.mark.parametrize("mesh", [(), (tiny.ZBV,)], ids=tiny.joined)
def test_backward_costs_what_is_left_of_it(mesh: tuple[Technique, ...]) -> None:
    """What backward leaves out, from the same model with these parameters frozen."""
    profile = tiny.profile_of(APART)
    every = backward_flops(profile, tiny.plan_of(*mesh))
    for layers, patterns in (("first 2", ["embed*", "blocks.[01].*"]), ("last 2", ["blocks.[23].*"])):
        frozen = freeze(profile, frozen_by(patterns, ()))
        rested = backward_flops(frozen, tiny.plan_of(*mesh))
        assert rested < every
        for k in (2, 5):
            seldom = backward_flops(profile, tiny.plan_of(t("multi_rate", layers=layers, every=k), *mesh))
            # The first block above those that rest makes no gradient of its input; that is not taken off.
            assert seldom == pytest.approx(every / k + rested * (k - 1) / k, rel=0.01)


@pytest.mark.parametrize(
    ("techniques", "words"),
    [
        ((t("multi_rate"),), "no block is chosen"),
        ((t("multi_rate", layers="first 9"),), "the model has 4 blocks"),
        ((t("multi_rate", layers="some"),), 'layers is "some"'),
        ((t("multi_rate", layers="first 1", every=0),), "every is 0"),
        ((t("multi_rate", layers="first 1"), t("pipeline", size=2, schedule="async")), "overlaps the next one"),
        ((t("multi_rate", layers="first 1"), tiny.ON_HOST), "takes tensors of every block"),
        ((t("multi_rate", layers="first 1"), tiny.IN_BACKWARD), "takes tensors of every block"),
        ((t("multi_rate", layers="first 1"), tiny.REPLICATE, tiny.KEEP_ALL), "makes no gradients of some layers"),
        ((t("multi_rate", layers="first 1"), t("compile", scope="model")), "one graph makes"),
        ((t("multi_rate", layers="first 1"), t("recompute", layers="all", slots=2)), "chosen while backward runs"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_makes_no_sense_is_refused(techniques: tuple[Technique, ...], words: str) -> None:
    problems = tiny.plan_of(*techniques).check(tiny.profile_of(APART))
    assert any(words in str(problem) and problem.fix for problem in problems), problems


def test_optimizers_that_need_all_gradients_are_refused() -> None:
    assert "looks at parameters of all ranks" in str(
        t("multi_rate", layers="first 1").refused_optimizer(OptimizerConfig(name="muon"))[0]
    )
    assert not t("multi_rate", layers="first 1").refused_optimizer(OptimizerConfig(name="lion"))
