"""Groups of blocks trained by heads of their own, against a loop of one process that shares nothing with them.

Tests of `techniques/local_loss.py`, and of heads between blocks without it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from test_multi_rate import ADAMW, asked, promised, trained
from tiny import t
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.frozen_parameters import check_patterns
from meshwright.models.presets import DecoderConfig, preset
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.schedules import SCHEDULES, Timetable
from meshwright.schedules.events import peak_held
from meshwright.simulator.forecast import forecast
from meshwright.simulator.makespan import makespan
from meshwright.simulator.pricing import price
from meshwright.simulator.simulate import simulate
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
        answer["losses"].append(float(each[-1].detach()))
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


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if not each.overlaps_steps])
def test_nothing_is_sent_back_or_waited_for_over_a_cut(schedule: str) -> None:
    """Of every schedule that may be cut: over a cut border messages go forward only, and all stages come to an end."""
    chunks = 2 if SCHEDULES[schedule].chunks > 1 else 1
    places = Timetable(schedule, chunks).places(4)
    cut = (2, places.num_spans - 1)
    table = Timetable(schedule, chunks, cut_spans=cut)
    told = Counter[str]()
    for stage in range(4):
        for action in table.actions(stage, 4, 6):
            span = places.span(stage, action.chunk)
            if action.kind in ("receive_backward", "send_backward"):
                assert span + (action.kind == "receive_backward") not in cut
            told[action.kind] += 1
    crossed = [span for span in range(1, places.num_spans) if places.stage(span - 1) != places.stage(span)]
    assert told["receive_forward"] == told["send_forward"] == 6 * len(crossed)
    assert told["receive_backward"] == told["send_backward"] == 6 * sum(span not in cut for span in crossed)
    for event in table.events(4, 6):
        sources = [table.events(4, 6)[at] for at in event.waits_for]
        assert not any(event.kind.startswith("backward") and each.span == event.span + 1 in cut for each in sources)
    orders = table.orders(4, 6)
    if chunks > 1:
        assert orders == Timetable(schedule, chunks).orders(4, 6)
    else:
        alone = Timetable(schedule)
        stages = [(0, 2), (1, 2), (0, 1), (0, 1)]  # of the pipelines between cuts
        assert [float(table.held(stage, 4, 6)) for stage in range(4)] == [alone.held(*each, 6) for each in stages]
        assert np.array_equal(table.held(np.arange(4), 4, 6) * np.ones(4), [alone.held(*each, 6) for each in stages])
        assert orders == (*alone.orders(2, 6), *alone.orders(1, 6), *alone.orders(1, 6))
        assert all(peak_held(orders[stage], [1.0]) <= table.held(stage, 4, 6) for stage in range(4))


def test_of_the_bubble_the_way_in_is_left() -> None:
    """Four equal stages, eight microbatches of 1 forward and 2 backward, messages of 0.5."""
    numbers: dict[str, Any] = {"forward": [1.0] * 4, "backward": [2.0] * 4, "weight": [0.0] * 4, "send": 0.5}
    for count in (8, 5000):
        made = makespan(Timetable("1f1b", cut_spans=(1, 2, 3)), **numbers, num_microbatches=count)
        assert made == pytest.approx(3 * (1.0 + 0.5) + count * 3.0)
        assert makespan(Timetable("1f1b"), **numbers, num_microbatches=count) >= made + 3 * (2.0 + 0.5)


def test_a_forecast_has_no_messages_back_and_a_shorter_step() -> None:
    config = preset("byte-3m")
    assert isinstance(config, DecoderConfig)
    profile = decoder_profile(replace(config, num_layers=4, local_heads=3), "byte-3m")
    machines = cluster("2x4xh100")
    pipeline, lines, steps = t("pipeline", size=4), [], []
    for techniques in ((pipeline,), (pipeline, LOCAL)):
        plan = Plan(techniques=techniques, batch=8, microbatch=1)
        steps.append(forecast(profile, plan, machines, sequence=128).step_seconds)
        line = simulate(profile, plan, machines, sequence=128)
        lines.append(Counter(span.name.split()[0] for span in line.spans if span.name.startswith("send")))
    assert lines == [{"send_forward": 24, "send_backward": 24}, {"send_forward": 24}]
    assert steps[1] < steps[0]


@pytest.mark.parametrize(("techniques", "config"), [((tiny.ZBV,), QWEN), ((tiny.SEQUENCED, tiny.EXPERT), tiny.MOE)])
def test_heads_alone_add_their_losses(techniques: tuple[Technique, ...], config: dict[str, Any], ran: Any) -> None:
    """Without the technique, against the reference of `mw check`."""
    answers = ran(tiny.plan_of(*techniques), config | {"local_heads": 1})
    assert tiny.departures(answers, tiny.bounds(tiny.EXACT)) == []
    assert tiny.price_differences(answers) == []


def test_a_run_goes_on_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    techniques = (LOCAL, tiny.PIPELINE)
    whole = pool.run("local_jobs:trained_job", asked(LLAMA, *techniques, folder=str(tmp_path), save_at=2, steps=4), 2)
    rest = pool.run("local_jobs:trained_job", asked(LLAMA, *techniques, first=2, steps=2, resume=str(tmp_path)), 2)
    for before, after in zip(whole, rest, strict=True):
        assert after["held"] == before["held"]
        assert after["losses"] == before["losses"][2:]


def test_what_is_evaluated_is_the_last_heads_loss(pool: RankPool) -> None:
    """In a step whose rate is 0 the evaluation after it says what the step said."""
    question = asked(LLAMA, LOCAL, tiny.PIPELINE, steps=2) | {"optimizer": ADAMW | {"lr": 1e-300}, "traffic": False}
    for answer in pool.run("local_jobs:trained_job", question, 2):
        assert answer["evaluated"] == pytest.approx(answer["losses"], rel=1e-12)


def test_a_head_costs_what_the_last_one_does() -> None:
    """Flops, parameters and logits of one device: those of the model without heads, and the last head's once more."""
    works = [price(tiny.profile_of(config), tiny.plan_of(), sequence=tiny.SEQUENCE) for config in (tiny.LLAMA, LLAMA)]

    def sums(work: Any, layers: tuple[str, ...]) -> list[float]:
        flops = sum(each.flops * each.repeat for each in work.computes if each.layer in layers)
        return [flops, *(sum(r.bytes * r.repeat for r in work.residents if r.category == kind and r.layer in layers)
                         for kind in ("parameters", "gradients", "optimizer", "logits"))]  # fmt: skip

    every = tuple(layer.name for layer in tiny.profile_of(LLAMA).layers)
    head = sums(works[0], ("head",))
    assert all(head)
    assert sums(works[1], every) == pytest.approx(
        [one + other for one, other in zip(sums(works[0], every), head, strict=True)]
    )


@pytest.mark.parametrize(
    ("techniques", "config", "words"),
    [
        ((LOCAL,), tiny.LLAMA, "no heads between its blocks"),
        ((t("local_loss", every=0),), LLAMA, "every is 0"),
        ((LOCAL, t("pipeline", size=2, schedule="async")), LLAMA, "where steps overlap"),
        ((LOCAL, t("multi_rate", layers="first 1")), LLAMA, "leaves layers out of backward"),
        ((LOCAL, t("compile", scope="model")), LLAMA, "one graph makes"),
        ((t("compile", scope="model"),), LLAMA, "heads with losses of their own"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_makes_no_sense_is_refused(techniques: tuple[Technique, ...], config: dict[str, Any], words: str) -> None:
    problems = tiny.plan_of(*techniques).check(tiny.profile_of(config))
    assert any(words in str(problem) and problem.fix for problem in problems), problems


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"local_heads": 4}, "5 groups of 4 blocks"),
        ({"local_heads": -1}, "local_heads: is -1"),
        ({"local_heads": 1, "adapter": {"rank": 2}}, "frozen with everything else"),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(MeshwrightError, match=words):
        decode(DecoderConfig, tiny.LLAMA | changed, "")
    with pytest.raises(MeshwrightError, match="has local heads"):
        check_patterns(tiny.profile_of(LLAMA), ["embed.*"], ())


def test_borders_are_those_of_as_many_stages() -> None:
    for blocks in range(2, 9):
        for groups in range(2, blocks + 1):
            made = decode(DecoderConfig, tiny.LLAMA | {"num_layers": blocks, "local_heads": groups - 1}, "")
            counts = Plan(techniques=(t("pipeline", size=groups),)).blocks_of_stages(
                tiny.profile_of(tiny.LLAMA | {"num_layers": blocks})
            )
            assert made.group_borders == tuple(itertools.accumulate(counts))[:-1]
