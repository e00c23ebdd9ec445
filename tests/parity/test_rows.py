"""Tables that are shared out: the same model as on one device, and only the rows that were asked for travel.

Tests of `models/cost_samples.py`, `ops/table_lookup.py`, `techniques/rows.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import CPU, open_tiny
from tiny import ADAMW, BF16, EXACT, REPLICATE, SGD, SHARD1, SHARD3, STEPS, plan_of, t

from meshwright.checkpoint.load import Reader
from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.cost_samples import dlrm_profile
from meshwright.models.presets import PRESETS, DecoderConfig, DLRMConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.runtime.checkpointing import restore_optimizer, save
from meshwright.simulator.pricing import price, price_sizes, sizes_of
from meshwright.techniques.rows import _dealt
from meshwright.verify import parity

Run = Callable[..., list[dict[str, Any]]]
WAYS = ("rows", "tables")
TABLES = (67, 31, 9, 3)
"""Nothing divides by 2 or by 4, and the last has fewer rows than there are ranks."""


def model(*drawn: int, **section: Any) -> dict[str, Any]:
    """Ids below `drawn` are asked for: few of them, many times, where those are few."""
    changed = {"name": "dlrm-tiny", "change": {"tables": list(TABLES)}, **section}
    return {"section": changed, "inputs": [[[5], 0], [[len(TABLES)], list(drawn)]], "targets": -1}


MODEL, HOT = model(*TABLES), model(2, 1, 9, 1)
PROFILE = dlrm_profile(DLRMConfig(tables=TABLES, embedding_size=8, num_dense=5, bottom=(16,), top=(32, 16)), "dlrm")


def shared(size: int, by: str) -> Any:
    return t("rows", size=size, by=by)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("by", WAYS)
def test_as_on_one_device_and_as_priced(size: int, by: str, ran: Run) -> None:
    answers = ran(plan_of(shared(size, by), microbatch=1), MODEL)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []
    messages = [count for kind, axis, _, count in answers[0]["observed"] if (kind, axis) == ("all_to_all", "emb")]
    num_microbatches = tiny.BATCH // size
    assert sum(messages) == num_microbatches * (4 if by == "rows" else 3)
    # Nothing of a table is summed: what is travels once a step, and is the dense part.
    dense = sum(p.numel() for p in _dense_part().parameters()) * 8  # bytes of a float64
    assert [[kind, size] for kind, _, size, _ in answers[0]["observed"] if kind != "all_to_all"] == [
        ["all_reduce", dense]
    ]


def _dense_part() -> torch.nn.Module:
    opened, _ = open_tiny(MODEL, tiny.BATCH, 1, "float32")
    return torch.nn.ModuleList([opened.model.bottom, opened.model.top])


@pytest.mark.parametrize("by", WAYS)
def test_the_same_few_rows_again_and_again(by: str, ran: Run) -> None:
    answers = ran(plan_of(shared(2, by), microbatch=4), HOT)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize(
    ("other", "by"), [(REPLICATE, "rows"), (REPLICATE, "tables"), (SHARD3, "tables"), (SHARD1, "rows")], ids=str
)
def test_with_other_ways_to_share_samples(other: Any, by: str, ran: Run) -> None:
    answers = ran(plan_of(shared(2, by), other, microbatch=1), MODEL)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    largest = [answer for answer in answers if answer["holds_largest"]]  # the others' rows are fewer
    assert tiny.price_differences(largest) == []


def test_three_axes_on_eight_ranks(ran: Run) -> None:
    answers = ran(plan_of(shared(2, "rows"), REPLICATE, SHARD3, microbatch=1), MODEL, prices=False)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []


@pytest.mark.parametrize("by", WAYS)
def test_vectors_travel_in_bf16_and_round_as_on_one_device(by: str, ran: Run) -> None:
    plan = plan_of(shared(2, by), BF16, microbatch=2)
    alone = ran(plan, MODEL, dtype="float32", like=(BF16.encode_self(),))
    assert tiny.departures(alone, tiny.ROUNDED) == []
    assert tiny.price_differences(ran(plan, MODEL, dtype="float32")) == []


@pytest.mark.parametrize(
    ("name", "by"), [("sgd", "rows"), ("lamb", "tables"), ("adafactor", "rows"), ("adafactor", "tables")]
)
def test_optimizers(name: str, by: str, ran: Run) -> None:
    optimizer = SGD if name == "sgd" else {"name": name, "lr": 1e-2, "clip": 0.5}
    answers = ran(plan_of(shared(2, by), microbatch=4), MODEL, optimizer=optimizer)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize("frozen", [["tables.*"], ["tables.tables.0.*"]], ids=["all", "one"])
@pytest.mark.parametrize("by", WAYS)
def test_frozen_tables_send_no_gradient(frozen: list[str], by: str, ran: Run) -> None:
    """One frozen: the rank that has no other still takes part in the exchange of gradients."""
    config = model(*TABLES, freeze=frozen)
    answers = ran(plan_of(shared(2, by), microbatch=4), config)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize("by", WAYS)
def test_a_checkpoint_goes_on_where_nothing_is_shared(by: str, pool: RankPool, tmp_path: Path) -> None:
    run_steps(pool, (), (0, STEPS), tmp_path / "one")
    run_steps(pool, (shared(2, by),), (0, 1), tmp_path / "cut")
    run_steps(pool, (), (1, 2), tmp_path / "cut")
    error = run_steps(pool, (shared(4, by),), (2, STEPS), tmp_path / "cut", tmp_path / "one")
    assert error < EXACT


@pytest.mark.parametrize("by", WAYS)
def test_tables_are_saved_as_they_are(by: str, pool: RankPool, tmp_path: Path) -> None:
    plan = plan_of(shared(2, by), microbatch=4)
    arguments = {"plan": json.loads(plan.to_json()), "steps": (0, 1), "folder": str(tmp_path)}
    pieces = pool.run("test_rows:steps_job", {**arguments, "one_device": ""}, 2, timeout_seconds=60)
    reader = Reader(tmp_path / "step-00000001")
    for place, rows in enumerate(TABLES):
        name = f"parameter.tables.tables.{place}.weight"
        whole = torch.empty(rows, 8, dtype=torch.float64)
        reader.read_into(name, Box.whole((rows, 8)), whole)
        parts = [each[name.removeprefix("parameter.")] for each in pieces]
        held = [torch.tensor(part, dtype=torch.float64) for part in parts if part]
        assert torch.equal(torch.cat(held), whole)
        assert len(held) == (2 if by == "rows" else 1)


def run_steps(
    pool: RankPool, techniques: tuple[Any, ...], steps: tuple[int, int], folder: Path, one_device: Path | None = None
) -> float:
    plan = plan_of(*techniques, microbatch=2)
    arguments = {"plan": json.loads(plan.to_json()), "steps": steps, "folder": str(folder)}
    arguments["one_device"] = str(one_device or folder)
    return max(pool.run("test_rows:steps_job", arguments, plan.num_ranks, timeout_seconds=60))


def steps_job(
    *, plan: dict[str, Any], steps: tuple[int, int], folder: str, one_device: str, rank: int, num_ranks: int,
    rendezvous: str,
) -> Any:  # fmt: skip
    """Steps from the checkpoint in `folder`, or from none, to the next; the largest difference to one device's,
    or, where there is none to compare with, this rank's tables."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, ADAMW, "optimizer")
    opened, samples = open_tiny(MODEL, chosen.batch, 1, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    build, running = session.build, session.loop.optimizer
    part = session.mesh.part(chosen.sample_axes)
    if steps[0]:
        reader = Reader(Path(folder) / f"step-{steps[0]:08d}")
        for name, value in build.local_parameters():
            value.copy_(_read(reader, name, build.boxes[name], value))
        restore_optimizer(reader, build, running)
    for step in range(*steps):
        session.loop.step(samples(step, *part), rates.lr_at(step, STEPS))
    assert save(Path(folder), steps[1], build, running, {}, keep=2) == ""
    held = dict(build.local_parameters())
    parity.leave()
    if not one_device:
        return {name: value.tolist() for name, value in held.items()}
    reader = Reader(Path(one_device) / f"step-{steps[1]:08d}")
    pairs = [(value, _read(reader, name, build.boxes[name], value)) for name, value in held.items()]
    return max(float((value - wanted).abs().max()) for value, wanted in pairs if value.numel())


def _read(reader: Reader, name: str, box: Any, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    if out.numel():
        reader.read_into(f"parameter.{name}", box, out)
    return out


def test_evaluation(pool: RankPool) -> None:
    totals = []
    for techniques in ((), (shared(2, "rows"),), (shared(4, "tables"),)):
        plan = plan_of(*techniques, microbatch=2)
        asked = {"plan": json.loads(plan.to_json()), "config": MODEL, "optimizer": ADAMW, "sequence": 1}
        answers = pool.run("rank_jobs:evaluate_job", asked, plan.num_ranks, timeout_seconds=60)
        assert all(answer["untouched"] for answer in answers)
        totals.append([answers[0]["total"], answers[0]["loss"]])
    assert totals[1] == pytest.approx(totals[0], rel=EXACT)
    assert totals[2] == pytest.approx(totals[0], rel=EXACT)


def told(technique: Any, profile: Any = PROFILE) -> str:
    return "\n".join(map(str, plan_of(technique, batch=tiny.BATCH * technique.size).check(profile)))


def test_what_cannot_be_shared_is_refused() -> None:
    decoder = decoder_profile(DecoderConfig(**tiny.LLAMA), "tiny")
    assert "tiny has no embedding tables" in told(shared(2, "rows"), decoder)
    assert t("rows", size=2).options(decoder, cluster("8xh100")) == ()
    assert "4 tables cannot be dealt to 5 ranks" in told(shared(5, "tables"))
    assert 'a size of 1 to 4, or by = "rows"' in told(shared(5, "tables"))
    assert "67 rows of the largest table cannot be shared by 68 ranks" in told(shared(68, "rows"))
    assert told(shared(67, "rows")) == told(shared(4, "tables")) == ""


@given(rows=st.lists(st.integers(1, 1000), min_size=1, max_size=30), ways=st.integers(1, 8))
def test_dealt_tables_balance_and_rank_0_has_most(rows: list[int], ways: int) -> None:
    dealt = _dealt(rows, ways)
    totals = [sum(count for count, rank in zip(rows, dealt, strict=True) if rank == each) for each in range(ways)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] <= sum(rows) / ways + max(rows)
    assert len(set(dealt)) == min(ways, len(rows))


@pytest.mark.parametrize("by", WAYS)
def test_many_sizes_at_once_are_one_by_one(by: str) -> None:
    profile = dlrm_profile(PRESETS["dlrm-large"], "dlrm-large")  # type: ignore[arg-type]
    plans = [plan_of(shared(size, by), SHARD3, BF16, batch=64) for size in (1, 2, 3, 8)]
    alone = [sizes_of(plan, profile, sequence=1, stage=0) for plan in plans]
    arrays = {name: np.array([sizes[name] for sizes in alone]) for name in alone[0]}
    together = price_sizes(profile, plans[0].in_phase_order(), arrays)
    for index, sizes in enumerate(alone):
        single = price_sizes(profile, plans[0].in_phase_order(), sizes)
        pairs = zip((*single.tasks, *single.residents), (*together.tasks, *together.residents), strict=True)
        for mine, theirs in pairs:
            for field in ("repeat", "moved_bytes", "bytes"):
                if hasattr(mine, field):
                    value = np.broadcast_to(getattr(theirs, field), len(alone))[index]
                    assert float(value) == float(getattr(mine, field)), (mine, field)


@pytest.mark.parametrize("by", WAYS)
def test_one_rank_changes_nothing(by: str) -> None:
    alone, one = (price(PROFILE, plan_of(*each), sequence=1) for each in ((), (shared(1, by),)))
    figures = [
        (
            [(c.layer, c.name, c.moved_bytes) for c in work.computes if c.repeat],
            [(r.layer, r.category, r.bytes) for r in work.residents if r.repeat],
        )
        for work in (alone, one)
    ]
    assert figures[0] == figures[1]
