"""Groups of blocks trained by heads of their own, against a loop of one process that shares nothing with them.

Tests of `techniques/local_loss.py`, and of heads between blocks without it.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from test_multi_rate import ADAMW, asked, promised, trained
from tiny import t
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.verify import parity

STEPS = 4
LLAMA, QWEN = tiny.LLAMA | {"local_heads": 1}, tiny.LLAMA | {"tied": True, "local_heads": 3}
LOCAL = t("local_loss")


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """Rotary positions: of a head's numbers i and i + half as a pair."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def block(x: Tensor, w: dict[str, Tensor], heads: int, kv_heads: int) -> Tensor:
    batch, length, _ = x.shape

    def projected(name: str, count: int) -> Tensor:
        out = rms(x, w["attention_norm.weight"]) @ w[f"attention.{name}.weight"].T
        return out.view(batch, length, count, -1).transpose(1, 2)

    q, k, v = turned(projected("query", heads)), turned(projected("key", kv_heads)), projected("value", kv_heads)
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ w["attention.output.weight"].T
    y = rms(x, w["mlp_norm.weight"])
    return x + (F.silu(y @ w["mlp.gate.weight"].T) * (y @ w["mlp.up.weight"].T)) @ w["mlp.down.weight"].T


def losses(w: dict[str, Tensor], config: dict[str, Any], given: Any, cut: set[int]) -> list[Tensor]:
    """Mean loss of every head, in order; what enters the blocks of `cut` is a constant."""

    def head(x: Tensor, norm: Tensor, matrix: Tensor) -> Tensor:
        each = F.cross_entropy((rms(x, norm) @ matrix.T).flatten(0, 1), given.targets.flatten(), reduction="none")
        return (each * given.weights.flatten()).sum() / given.num_tokens

    x, found = w["embed.tokens.weight"][given.inputs], []
    for number in range(config["num_layers"]):
        x = x.detach() if number in cut else x
        prefix = f"blocks.{number}."
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        x = block(x, own, config["num_heads"], config["num_kv_heads"])
        if f"local_heads.{number}.norm.weight" in w:
            found.append(head(x, *(w[f"local_heads.{number}.{name}.weight"] for name in ("norm", "output"))))
    matrix = w.get("head.output.weight", w["embed.tokens.weight"])
    return [*found, head(x, w["head.norm.weight"], matrix)]


def one_device(config: dict[str, Any], cut: set[int]) -> dict[str, Any]:
    shape = decode(DecoderConfig, config, "config")
    opened = open_config(shape, "tiny", 0)
    w = {
        name: opened.source(name, Box.whole(tuple(each.shape)), torch.float64).clone().requires_grad_()
        for name, each in opened.model.named_parameters()
    }
    samples = parity.random_samples(shape.vocab_size, tiny.BATCH, tiny.SEQUENCE)
    decays = OptimizerConfig().weight_decay
    groups = [
        {"params": [each for each in w.values() if (each.ndim >= 2) == is_matrix], "weight_decay": decays * is_matrix}
        for is_matrix in (True, False)
    ]
    rule = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=(0.9, 0.95), eps=ADAMW["epsilon"])
    answer: dict[str, Any] = {"losses": [], "norms": [], "parameters": w}
    for step in range(STEPS):
        each = losses(w, config, samples(step, 0, 1), cut)
        rule.zero_grad()
        torch.stack(each).sum().backward()
        norm = torch.cat([value.grad.flatten() for value in w.values() if value.grad is not None]).norm()
        for value in w.values():
            assert value.grad is not None
            value.grad *= min(1.0, float(ADAMW["clip"] / norm))
        rule.step()
        answer["losses"].append(float(each[-1]))
        answer["norms"].append(float(norm))
    return answer


MESHES: dict[str, tuple[Technique, ...]] = {
    "one device": (),
    "replicate": (tiny.REPLICATE,),
    "shard 1": (tiny.SHARD1,),
    "shard 3": (tiny.SHARD3,),
    "tensor": (tiny.TENSOR,),
    "sequence": (tiny.SEQUENCED, tiny.CHUNKED),
    "ring": (tiny.RING,),
    "recompute": (tiny.RECOMPUTE, tiny.REPLICATE),
    "compile": (tiny.COMPILE,),
    "pipeline": (tiny.PIPELINE,),
    "uneven": (tiny.UNEVEN,),
    "gpipe": (tiny.GPIPE, tiny.REPLICATE),
    "four stages": (t("pipeline", size=4),),
    "interleaved": (tiny.INTERLEAVED,),
    "zbv": (tiny.ZBV,),
    "sharded stages": (tiny.SHARD2, tiny.TENSOR, tiny.PIPELINE),
}
CASES = [
    ("pipeline", LLAMA, 1),  # the one of `make test`
    *((mesh, LLAMA, 1) for mesh in MESHES if mesh != "pipeline"),
    *((mesh, QWEN, 1) for mesh in ("one device", "shard 3", "four stages", "interleaved", "zbv")),
    *((mesh, QWEN, 2) for mesh in ("sequence", "uneven", "four stages", "interleaved")),
    *((mesh, QWEN, 9) for mesh in ("replicate", "pipeline")),
]


def cut_of(config: dict[str, Any], every: int) -> set[int]:
    return set([2] if config["local_heads"] == 1 else {1: [1, 2, 3], 2: [2], 9: []}[every])


@pytest.mark.parametrize(("mesh", "config", "every"), CASES, ids=lambda each: str(each)[:14])
def test_a_mesh_does_what_a_plain_loop_does_and_sends_what_is_priced(
    mesh: str, config: dict[str, Any], every: int, pool: RankPool, tmp_path: Path
) -> None:
    techniques = (t("local_loss", every=every), *MESHES[mesh])
    plan = tiny.plan_of(*techniques)
    answers = pool.run(
        "local_jobs:trained_job", asked(config, *techniques, folder=str(tmp_path), steps=STEPS), plan.num_ranks
    )
    wanted = one_device(config, cut_of(config, every))
    for answer in answers:
        assert answer["losses"] == pytest.approx(wanted["losses"], rel=1e-9)
        assert answer["norms"] == pytest.approx(wanted["norms"], rel=1e-9)
    found = trained(tmp_path, STEPS)
    assert set(found) == set(wanted["parameters"])
    for name, value in found.items():
        assert torch.allclose(value, wanted["parameters"][name].detach(), rtol=1e-9, atol=1e-11), name
    assert_sent(config, plan, answers)


def assert_sent(config: dict[str, Any], plan: Plan, answers: list[dict[str, Any]]) -> None:
    """Every rank sends what is priced for some stage, and all together what is priced for all."""
    sent = [Counter({(kind, axis, size): n for kind, axis, size, n in answer["traffic"]}) for answer in answers]
    stages = [promised(config, plan, stage, STEPS) for stage in range(plan.mesh.get("pp", 1))]
    assert all(each in stages for each in sent), (sent, stages)
    assert Counter(map(str, map(sorted_items, sent))) == Counter(
        {str(sorted_items(stage)): plan.num_ranks // len(stages) * stages.count(stage) for stage in stages}
    )


def sorted_items(counts: Counter[Any]) -> list[Any]:
    return sorted((key, int(n)) for key, n in counts.items())
