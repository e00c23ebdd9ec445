"""Every optimizer trains the same model under every cut, remembers and sends what its price says, and can be re-cut.

Tests of `optimizers/rules/adafactor.py`, `optimizers/rules/adamw.py`, `optimizers/rules/lamb.py`,
`optimizers/rules/lars.py`, `optimizers/rules/lion.py`, `optimizers/rules/muon.py`,
`optimizers/rules/rowwise_adagrad.py`, `optimizers/rules/sgd.py`,
`optimizers/whole_parameters.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from rank_jobs import CPU, open_tiny
from tiny import EXACT, PIPELINE, QWEN, SEQUENCE, SHARD3, STEPS, TENSOR, plan_of

from meshwright.checkpoint.load import Reader
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import rules
from meshwright.runtime.checkpointing import restore_optimizer, save
from meshwright.verify import parity

Run = Callable[..., list[dict[str, Any]]]
OTHERS = sorted(set(rules()) - {"adamw", "sgd"})
PRICED = ("adafactor", "muon", "rowwise_adagrad")
"""The others remember a fixed number of values for each element, as AdamW and SGD do, and send nothing."""
RATES = {"lion": 1e-3, "lars": 10.0}
PLANS = ((SHARD3,), (TENSOR,), (PIPELINE,), (SHARD3, TENSOR))
MODEL = QWEN | {"num_layers": 3, "vocab_size": 37}
"""Tied across stages, and nothing divides: 3 matrices of a sort and 37 words over 2 ranks."""
EXPERTS = tiny.LLAMA | {"num_layers": 1, "num_experts": 3, "experts_per_token": 2, "expert_ffn_size": 8}
CUBE = (SHARD3, TENSOR, PIPELINE)


def settings(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "lr": RATES.get(name, 1e-2), "clip": 0.5, **more}


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
@pytest.mark.parametrize("name", OTHERS)
def test_as_on_one_device(name: str, techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(*techniques, microbatch=4), MODEL, optimizer=settings(name), prices=name in PRICED)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []


@pytest.mark.parametrize("techniques", PLANS, ids=tiny.joined)
@pytest.mark.parametrize("name", PRICED)
def test_as_priced(name: str, techniques: tuple[Any, ...], ran: Run) -> None:
    answers = ran(plan_of(*techniques, microbatch=4), MODEL, optimizer=settings(name))
    largest = answers[:1] if SHARD3 in techniques else answers  # the last rows of 37 are fewer
    assert tiny.price_differences(largest) == []
    dealt = any(kind == "all_to_all" for answer in answers for kind, *_ in answer["observed"])
    assert dealt == (rules()[name].kind == "whole_matrix" and techniques != (PIPELINE,))


def test_a_stage_with_fewer_matrices_than_ranks(ran: Run) -> None:
    """A rank that is dealt no matrix once sent its empty message in another dtype, and gloo ended the process."""
    answers = ran(plan_of(*CUBE, microbatch=2), QWEN | {"num_layers": 3}, optimizer=settings("muon"))
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize("name", PRICED)
def test_stacks_of_experts_are_cut_between_and_inside_their_matrices(name: str, ran: Run) -> None:
    answers = ran(plan_of(SHARD3, TENSOR, microbatch=4), EXPERTS, optimizer=settings(name))
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers[:1]) == []


def test_groups_reach_every_stage(ran: Run) -> None:
    groups = [{"match": "embed.*", "lr_scale": 0.1}, {"match": ["*norm.weight"], "weight_decay": 0.5}]
    plan, optimizer = plan_of(PIPELINE, microbatch=4), settings("adamw", groups=groups)
    assert tiny.departures(ran(plan, MODEL, optimizer=optimizer, prices=False), tiny.bounds(EXACT)) == []


@pytest.mark.parametrize("name", PRICED)
def test_state_cut_for_four_ranks_goes_on_under_a_pipeline(name: str, pool: RankPool, tmp_path: Path) -> None:
    run_steps(pool, (), name, (0, STEPS), tmp_path / "one")
    run_steps(pool, (SHARD3, TENSOR), name, (0, 2), tmp_path / "cut")
    error = run_steps(pool, (PIPELINE,), name, (2, STEPS), tmp_path / "cut", tmp_path / "one")
    assert error < EXACT


def run_steps(
    pool: RankPool,
    techniques: tuple[Any, ...],
    name: str,
    steps: tuple[int, int],
    folder: Path,
    one_device: Path | None = None,
) -> float:
    plan = plan_of(*techniques, microbatch=4)
    arguments = {"plan": json.loads(plan.to_json()), "name": name, "steps": steps, "folder": str(folder)}
    arguments["one_device"] = str(one_device or folder)
    return max(pool.run("test_optimizers:steps_job", arguments, plan.num_ranks, timeout_seconds=60))


def steps_job(
    *, plan: dict[str, Any], name: str, steps: tuple[int, int], folder: str, one_device: str, rank: int,
    num_ranks: int, rendezvous: str,
) -> float:  # fmt: skip
    """Steps from the checkpoint in `folder`, or from none, to the next; the largest difference to one device's."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), OptimizerConfig(**settings(name))
    opened, samples = open_tiny(MODEL, chosen.batch, SEQUENCE, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    build, running = session.build, session.loop.optimizer
    part = session.mesh.part(chosen.sample_axes)
    if steps[0]:
        reader = Reader(Path(folder) / f"step-{steps[0]:08d}")
        for parameter, value in build.local_parameters():
            value.copy_(_read(reader, parameter, build.boxes[parameter], value))
        restore_optimizer(reader, build, running)
    for step in range(*steps):
        session.loop.step(samples(step, *part), rates.lr_at(step, STEPS))
    assert save(Path(folder), steps[1], build, running, {}, keep=2) == ""
    reader = Reader(Path(one_device) / f"step-{steps[1]:08d}")
    pairs = [(value, _read(reader, key, build.boxes[key], value)) for key, value in build.local_parameters()]
    parity.leave()
    return max(float((value - wanted).abs().max()) for value, wanted in pairs if value.numel())


def _read(reader: Reader, name: str, box: Any, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    reader.read_into(f"parameter.{name}", box, out)
    return out
