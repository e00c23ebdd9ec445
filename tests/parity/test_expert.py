"""Experts shared out over ranks train the model one device trains, and send and hold what was priced.

Tests of `ops/routing.py`, `techniques/expert.py`, `verify/check_ranks.py`.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_jobs import CPU, open_tiny
from tiny import EXACT, SEQUENCE, STEPS, plan_of, t

from meshwright.checkpoint.load import Reader
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Axis, Technique
from meshwright.launch.rank_pool import RankError, RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig
from meshwright.ops.routing import ExpertHolder, sending_over, through_experts
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.runtime.checkpointing import restore_optimizer, save
from meshwright.simulator.pricing import price, price_sizes, sizes_of
from meshwright.verify import parity
from meshwright.verify.check_ranks import Message, differences, rounded_up

Run = Callable[..., list[dict[str, Any]]]

EXPERT = t("expert", size=2)
MIXTRAL = tiny.QWEN | {"num_layers": 2, "num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 12, "balance": 0.1}
DEEPSEEK = MIXTRAL | {
    "num_layers": 3,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "router": "sigmoid",
    "routed_scale": 2.5,
}
IDLE = MIXTRAL | {"num_experts": 16, "experts_per_token": 1}
"""More experts than a sample's tokens can keep busy."""
MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "idle": IDLE}
TIGHT = {"below one": DEEPSEEK | {"capacity_factor": 0.75}, "above one": MIXTRAL | {"capacity_factor": 1.25}}
WITH: tuple[tuple[Technique, ...], ...] = (
    (tiny.REPLICATE,),
    (tiny.SHARD3,),
    (tiny.SHARD2,),
    (tiny.SHARD1,),
    (tiny.TENSOR,),
    (tiny.SEQUENCED,),
    (tiny.PIPELINE,),
    (tiny.RECOMPUTE,),
    (tiny.RECOMPUTE_ONE,),
    (tiny.CHUNKED,),
    (tiny.COMPILE,),
    (tiny.COMPILE, tiny.RECOMPUTE),
)
CUBES: tuple[tuple[Technique, ...], ...] = (
    (tiny.SEQUENCED, tiny.PIPELINE, tiny.RECOMPUTE_ONE),
    (tiny.SHARD3, tiny.TENSOR),
    (tiny.REPLICATE, tiny.SHARD3),
    (tiny.SHARD1, tiny.PIPELINE),
)


def of(*techniques: Technique, expert: Technique = EXPERT) -> Plan:
    whole = plan_of(expert, *techniques)
    return plan_of(expert, *techniques, microbatch=max(1, tiny.BATCH // whole.num_replicas // 2))


def profile_of(config: dict[str, Any]) -> Profile:
    return decoder_profile(DecoderConfig(**config), "tiny")


@pytest.fixture
def right(ran: Run) -> Run:
    """Fails unless a plan trains as one device does, and sends and holds what its price says."""

    def check(plan: Plan, config: dict[str, Any], **question: Any) -> list[dict[str, Any]]:
        answers = ran(plan, config, **question)
        assert len(answers) == plan.num_ranks
        assert tiny.departures(answers, tiny.bounds(EXACT)) == []
        assert tiny.price_differences(answers) == []
        return answers

    return check


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_alone(model: str, size: int, right: Run) -> None:
    answers = right(of(expert=t("expert", size=size)), MODELS[model])
    sent = {(kind, axis) for answer in answers for kind, axis, *_ in answer["observed"]}
    assert sent == {("all_to_all", "ep"), ("all_reduce", "ep")}


@pytest.mark.parametrize("techniques", WITH, ids=tiny.joined)
def test_with_another(techniques: tuple[Technique, ...], right: Run) -> None:
    answers = right(of(*techniques), MIXTRAL)
    if techniques == (tiny.COMPILE,):  # under recomputation a block with experts is left as it is
        assert all(answer["num_graphs"] > 0 for answer in answers), "nothing was compiled"


@pytest.mark.parametrize("techniques", CUBES, ids=tiny.joined)
def test_three_axes_on_eight_ranks(techniques: tuple[Technique, ...], right: Run) -> None:
    plan = of(*techniques)
    assert plan.num_ranks == 8
    right(plan, DEEPSEEK)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_under_schedules_of_many_stages_and_of_halved_backward_passes(schedule: str, right: Run) -> None:
    right(plan_of(EXPERT, t("pipeline", size=2, schedule=schedule), microbatch=1), MIXTRAL | {"num_layers": 4})


def test_more_ranks_than_experts_of_one(right: Run) -> None:
    """2 experts here, sharded over 4: half of the ranks hold none."""
    right(of(t("shard", size=4)), MIXTRAL)


def test_in_bf16(ran: Run) -> None:
    answers = ran(of(tiny.BF16), MIXTRAL, dtype="float32")
    assert tiny.price_differences(answers) == []
    alike = ran(of(tiny.BF16), MIXTRAL, dtype="float32", like=(tiny.BF16.encode_self(),))
    assert tiny.departures(alike, tiny.ROUNDED) == []


@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
@pytest.mark.parametrize("techniques", [(), (tiny.SHARD3, tiny.TENSOR)], ids=tiny.joined)
def test_optimizers_that_look_beyond_a_piece(name: str, techniques: tuple[Technique, ...], right: Run) -> None:
    right(of(*techniques), MIXTRAL, optimizer={"name": name, "lr": 1e-2, "clip": 0.5})


@pytest.mark.parametrize(
    "chosen",
    [
        {"freeze": ["embed.*", "blocks.0.*"]},
        {"train": ["blocks.0.mlp.experts.*"]},
        {"train": ["*.router.*"]},
        {"freeze": ["*.experts.*"]},
    ],
    ids=str,
)
def test_what_is_frozen_sends_nothing_back(chosen: dict[str, Any], right: Run) -> None:
    right(of(), {"section": {"name": "moe-tiny", **chosen}, "vocab": 256})


@pytest.mark.parametrize("model", TIGHT)
@pytest.mark.parametrize("techniques", [(), (tiny.RECOMPUTE, tiny.SEQUENCED)], ids=tiny.joined)
def test_a_capacity_drops_what_it_drops_on_one_device(
    techniques: tuple[Technique, ...], model: str, ran: Run, pool: RankPool
) -> None:
    plan, config = of(*techniques), TIGHT[model]
    answers = ran(plan, config)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    work = price(profile_of(config), plan, sequence=SEQUENCE, element_bytes=8)
    at_most: set[Message] = {(task.kind, task.axis, int(task.bytes)) for task in work.collectives if task.at_most}
    assert len(at_most) == 1
    for answer in answers:
        seen, priced = (Counter({tuple(key): count for *key, count in answer[k]}) for k in ("observed", "priced"))
        assert seen != priced, "nothing was dropped"
        assert differences(rounded_up(seen, priced, at_most), priced) == []


def test_every_byte_is_a_choice_that_found_room(pool: RankPool) -> None:
    plan = of()
    arguments = {"plan": json.loads(plan.to_json()), "config": TIGHT["below one"]}
    for answer in pool.run("test_expert:counting_job", arguments, plan.num_ranks, timeout_seconds=60):
        assert answer["sent"]
        assert sorted(answer["sent"]) == sorted(answer["counted"])


def counting_job(
    *, plan: dict[str, Any], config: dict[str, Any], rank: int, num_ranks: int, rendezvous: str
) -> dict[str, list[int]]:
    """Bytes of every uneven message of a step, and what the rows that modules sent and received come to."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), OptimizerConfig(lr=1e-2)
    opened, samples = open_tiny(config, chosen.batch, SEQUENCE, "float32")
    session = parity.open_session(chosen, opened, rates, dtype="float32", device=CPU)
    counted: list[int] = []

    def watched(inner: Any) -> Any:
        def send(rows: torch.Tensor, counts: torch.Tensor) -> Any:
            assert int(counts.sum()) == len(rows)
            here, local, back = inner(rows, counts)
            assert int(local.sum()) == len(here)
            row_bytes = 4 * rows.shape[1]
            counted.extend(2 * [len(rows) * row_bytes] + 2 * [len(here) * row_bytes])
            return here, local, back

        return send

    for module in session.build.model.modules():
        if isinstance(module, ExpertHolder):
            module.send = watched(module.send)
    with parity.TrafficRecorder(session.mesh.axis_of_group()) as recorder:
        session.loop.step(samples(0, *session.mesh.part(chosen.sample_axes)), rates.lr)
    parity.leave()
    return {"sent": recorder.uneven["ep"], "counted": counted}


@pytest.mark.parametrize("favourite", [0, 3, None])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_rank_that_nobody_chose(favourite: int | None, dtype: str, pool: RankPool) -> None:
    """All tokens of all ranks go to one expert, or none go anywhere."""
    errors = pool.run("test_expert:lopsided_job", {"favourite": favourite, "dtype": dtype}, 2, timeout_seconds=60)
    assert max(errors) <= (0.02 if dtype == "bfloat16" else 1e-12)


def lopsided_job(*, favourite: int | None, dtype: str, rank: int, num_ranks: int, rendezvous: str) -> float:
    """Largest difference of outputs and gradients to all experts here, relative to the largest number."""
    parity.enter(rank, num_ranks, rendezvous)
    generator, kind = torch.Generator().manual_seed(1), getattr(torch, dtype)
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6, 8), (4, 6, 8), (4, 8, 6))
    ]
    x = torch.randn(num_ranks, 5, 8, generator=generator, dtype=torch.float64)
    chosen = torch.full((num_ranks, 5, 1), favourite or 0)
    share = torch.rand(num_ranks, 5, 1, generator=generator, dtype=torch.float64)

    def run(rows: Any, own: slice, send: Any) -> list[torch.Tensor]:
        given, weights = x[rows].flatten(0, 1).to(kind), [w[own].to(kind) for w in drawn]
        leaves = [each.clone().requires_grad_() for each in (given, *weights)]
        picked, part = chosen[rows].flatten(0, 1), share[rows].flatten(0, 1).to(kind)
        kept = torch.zeros_like(picked, dtype=torch.bool) if favourite is None else None
        out = through_experts(leaves[0], picked, part, kept, tuple(leaves[1:]), 4, **send)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    half, group = slice(2 * rank, 2 * rank + 2), torch.distributed.group.WORLD
    assert group is not None
    out, into_x, *into_weights = run(slice(rank, rank + 1), half, {"send": sending_over(group)})
    whole, whole_x, *whole_weights = run(slice(None), slice(None), {})
    wanted = [whole[5 * rank :][:5], whole_x[5 * rank :][:5], *(weight[half] for weight in whole_weights)]
    parity.leave()
    pairs = zip((out, into_x, *into_weights), wanted, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


@pytest.mark.parametrize("before", [(EXPERT,), (EXPERT, tiny.SHARD3)], ids=tiny.joined)
@pytest.mark.parametrize("after", [(), (t("expert", size=4),)], ids=tiny.joined)
def test_a_checkpoint_is_cut_again(
    before: tuple[Technique, ...], after: tuple[Technique, ...], pool: RankPool, tmp_path: Path
) -> None:
    steps_of(pool, (), (0, STEPS), tmp_path / "one")
    steps_of(pool, before, (0, 2), tmp_path / "cut")
    assert steps_of(pool, after, (2, STEPS), tmp_path / "cut", tmp_path / "one") < EXACT


def steps_of(
    pool: RankPool,
    techniques: tuple[Technique, ...],
    steps: tuple[int, int],
    folder: Path,
    one_device: Path | None = None,
) -> float:
    plan = plan_of(*techniques)
    arguments = {"plan": json.loads(plan.to_json()), "steps": steps, "folder": str(folder)}
    arguments["one_device"] = str(one_device or folder)
    return max(pool.run("test_expert:steps_job", arguments, plan.num_ranks, timeout_seconds=60))


def steps_job(
    *, plan: dict[str, Any], steps: tuple[int, int], folder: str, one_device: str, rank: int, num_ranks: int,
    rendezvous: str,
) -> float:  # fmt: skip
    """Steps from the checkpoint in `folder`, or from none, to the next; the largest difference to one device's."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), OptimizerConfig(lr=1e-2)
    opened, samples = open_tiny(MIXTRAL, chosen.batch, SEQUENCE, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    build, running = session.build, session.loop.optimizer
    if steps[0]:
        reader = Reader(Path(folder) / f"step-{steps[0]:08d}")
        for name, value in build.local_parameters():
            value.copy_(_read(reader, name, build.boxes[name], value))
        restore_optimizer(reader, build, running)
    for step in range(*steps):
        session.loop.step(samples(step, *session.mesh.part(chosen.sample_axes)), rates.lr_at(step, STEPS))
    assert save(Path(folder), steps[1], build, running, {}, keep=2) == ""
    reader = Reader(Path(one_device) / f"step-{steps[1]:08d}")
    pairs = [(value, _read(reader, key, build.boxes[key], value)) for key, value in build.local_parameters()]
    parity.leave()
    return max(float((value - wanted).abs().max()) for value, wanted in pairs if value.numel())


def _read(reader: Reader, name: str, box: Any, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    reader.read_into(f"parameter.{name}", box, out)
    return out


def test_a_rank_killed_on_its_way_to_the_others_ends_all_at_once(pool: RankPool) -> None:
    plan = of()
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        pool.run("test_expert:dying_job", {"plan": json.loads(plan.to_json())}, plan.num_ranks, timeout_seconds=60)
    assert str(caught.value).count("killed") == 1


def dying_job(*, plan: dict[str, Any], rank: int, num_ranks: int, rendezvous: str) -> None:
    """Rank 1 dies with its counts told and its rows awaited."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), OptimizerConfig(lr=1e-2)
    opened, samples = open_tiny(MIXTRAL, chosen.batch, SEQUENCE, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    swap, calls = torch.distributed.all_to_all_single, iter(range(100))

    def dying(*args: Any, **options: Any) -> Any:
        if next(calls) == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return swap(*args, **options)

    torch.distributed.all_to_all_single = dying
    session.loop.step(samples(0, *session.mesh.part(chosen.sample_axes)), rates.lr)


def test_experts_that_do_not_divide_are_refused_with_what_would() -> None:
    (problem,) = of(expert=t("expert", size=3)).check(profile_of(IDLE))[1:]  # the batch does not divide either
    assert "16 experts cannot be shared out 3 ways" in str(problem)
    assert "1, 2, 4, 8 or 16" in str(problem)


def test_a_model_without_experts_is_refused() -> None:
    (problem,) = of().check(profile_of(tiny.LLAMA))
    assert "has no experts" in str(problem)


def test_search_is_offered_what_divides() -> None:
    kind = type(EXPERT)
    machines = cluster("8xh100")
    assert kind.options(profile_of(MIXTRAL | {"num_experts": 12}), machines) == (Axis("size", (2, 4)),)
    assert kind.options(profile_of(MIXTRAL | {"num_experts": 3}), machines) == ()
    assert kind.options(profile_of(tiny.LLAMA), machines) == ()


def test_ranks_share_out_the_experts_and_nothing_else() -> None:
    profile = profile_of(DEEPSEEK)
    alone, split = (price(profile, plan_of(*each), sequence=SEQUENCE) for each in ((), (EXPERT,)))
    for whole, piece in zip(alone.slots, split.slots, strict=True):
        assert whole.elements == piece.elements * (2 if whole.shared_out == "experts" else 1)
    flops = [sum(task.repeat * task.flops for task in work.computes) for work in (alone, split)]
    assert flops[0] == flops[1]
    matmuls = [
        [task for task in work.computes if task.name == "mlp.experts.up" and task.flops] for work in (alone, split)
    ]
    weights = 4 * 4 * 12 * 16
    assert [a.moved_bytes - b.moved_bytes for a, b in zip(*matmuls, strict=True)] == [weights / 2, weights]


def test_copies_in_fewer_bits_are_of_the_experts_here() -> None:
    profile = profile_of(MIXTRAL)
    alone, split = (price(profile, plan_of(tiny.BF16, *each), sequence=SEQUENCE) for each in ((), (EXPERT,)))
    copies = [sum(i.repeat * i.bytes for i in work.residents if i.category == "gathered") for work in (alone, split)]
    experts = 2 * 3 * 4 * 12 * 16  # two layers of them
    assert copies[0] - copies[1] == experts / 2 * 2


@pytest.mark.parametrize("techniques", [(), (tiny.BF16, tiny.SEQUENCED, tiny.RECOMPUTE)], ids=tiny.joined)
def test_many_candidates_at_once_are_one_by_one(techniques: tuple[Technique, ...]) -> None:
    profile, plan = profile_of(DEEPSEEK), of(*techniques)
    alone = [sizes_of(plan, profile, sequence=s, stage=0) | {"ep": ep} for s in (16, 32) for ep in (1, 2, 4)]
    arrays = {name: np.array([sizes[name] for sizes in alone]) for name in alone[0]}
    together = price_sizes(profile, plan.in_phase_order(), arrays)
    for index, sizes in enumerate(alone):
        single = price_sizes(profile, plan.in_phase_order(), sizes)
        pairs = zip((*single.tasks, *single.residents), (*together.tasks, *together.residents), strict=True)
        for mine, theirs in pairs:
            for field in ("repeat", "flops", "moved_bytes", "bytes"):
                if hasattr(mine, field):
                    value = np.broadcast_to(getattr(theirs, field), len(alone))[index]
                    assert float(value) == float(getattr(mine, field)), (mine, field)
