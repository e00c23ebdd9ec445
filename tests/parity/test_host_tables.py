"""Tables in host memory: the same model as on one device, and of the tables only the rows that were asked for move.

Tests of `ops/table_lookup.py`, `techniques/rows.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from rank_jobs import CPU, open_tiny
from test_rows import HOT, MODEL, PROFILE, TABLES, WAYS, _read, model
from tiny import BF16, EXACT, IN_BACKWARD, REPLICATE, SGD, plan_of, t

from meshwright.checkpoint.load import Reader
from meshwright.core.codec import decode, encode
from meshwright.core.plan import Plan
from meshwright.core.units import pretty_bytes
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.ops.table_lookup import HostTables
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.rule import rules
from meshwright.planner.search import search
from meshwright.runtime.checkpointing import restore_optimizer, save
from meshwright.simulator.forecast import Forecast, forecast
from meshwright.simulator.pricing import price, price_sizes, sizes_of
from meshwright.verify import parity

Run = Callable[..., list[dict[str, Any]]]
ROWWISE = {"name": "rowwise_adagrad", "lr": 1e-2, "clip": 0.5}
PLAIN = SGD | {"momentum": 0.0, "weight_decay": 0.0}
DECAYED = [ROWWISE | {"weight_decay": 0.1, "clip": 0.0}, PLAIN | {"weight_decay": 0.1}]
VECTOR_BYTES = 8 * 8
"""8 numbers of float64."""
DLRM = profile("dlrm-large")
ADAGRAD = OptimizerConfig(name="rowwise_adagrad")


def on_host(size: int, by: str = "rows") -> Any:
    return t("rows", size=size, by=by, tier="host")


@pytest.mark.parametrize("optimizer", [ROWWISE, PLAIN], ids=lambda each: each["name"])
@pytest.mark.parametrize(("size", "by"), [(1, "rows"), (2, "rows"), (2, "tables"), (4, "rows"), (4, "tables")])
@pytest.mark.parametrize("microbatch", [1, 2])
def test_as_on_one_device_and_as_priced(
    microbatch: int, size: int, by: str, optimizer: dict[str, Any], ran: Run
) -> None:
    answers = ran(plan_of(on_host(size, by), microbatch=microbatch), MODEL, optimizer=optimizer)
    assert tiny.departures(answers, tiny.bounds(EXACT)) == []
    assert tiny.price_differences(answers) == []


@pytest.mark.parametrize("optimizer", DECAYED, ids=lambda each: each["name"])
@pytest.mark.parametrize("config", [MODEL, HOT], ids=["spread", "hot"])
def test_rows_decay_also_where_nobody_asks_for_them(
    config: dict[str, Any], optimizer: dict[str, Any], ran: Run
) -> None:
    for size in (1, 2):
        answers = ran(plan_of(on_host(size), microbatch=4), config, optimizer=optimizer)
        assert tiny.departures(answers, tiny.bounds(EXACT)) == []


@pytest.mark.parametrize("size", [1, 2])
def test_frozen_tables_are_looked_up_only(size: int, ran: Run) -> None:
    for frozen in (["tables.*"], ["tables.tables.0.*"]):
        config = model(*TABLES, freeze=frozen)
        answers = ran(plan_of(on_host(size), microbatch=4), config, optimizer=ROWWISE)
        assert tiny.departures(answers, tiny.bounds(EXACT)) == []
        assert tiny.price_differences(answers) == []


def test_clipping_in_float32_reaches_the_rows(ran: Run) -> None:
    """SGD divides gradients inside of its kernel there, which has none for rows."""
    for optimizer in (ROWWISE, PLAIN):
        answers = ran(plan_of(on_host(2), microbatch=2), MODEL, optimizer=optimizer, dtype="float32", prices=False)
        assert tiny.departures(answers, tiny.bounds(1e-5)) == []


@pytest.mark.parametrize("size", [1, 2])
def test_vectors_round_to_bf16_as_on_one_device(size: int, ran: Run) -> None:
    plan = plan_of(on_host(size), BF16, microbatch=2)
    alone = ran(plan, MODEL, optimizer=ROWWISE, dtype="float32", like=(BF16.encode_self(),))
    assert tiny.departures(alone, tiny.ROUNDED) == []


@pytest.mark.parametrize("optimizer", [ROWWISE, PLAIN], ids=lambda each: each["name"])
def test_a_checkpoint_goes_from_the_host_to_the_device_and_back(
    optimizer: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    plans = ((), (on_host(2),), (t("rows", size=2, by="tables"),), (on_host(1),), (on_host(4, "tables"),))

    def steps(techniques: tuple[Any, ...], first: int, last: int, folder: str, compared: str = "") -> float:
        plan = plan_of(*techniques, microbatch=2)
        asked = {"plan": json.loads(plan.to_json()), "steps": (first, last), "optimizer": optimizer}
        asked |= {"folder": str(tmp_path / folder), "one_device": str(tmp_path / compared) if compared else ""}
        return max(pool.run("test_host_tables:steps_job", asked, plan.num_ranks, timeout_seconds=60))

    steps((), 0, 4, "one")
    for place, techniques in enumerate(plans[1:4]):
        steps(techniques, place, place + 1, "cut")
    assert steps(plans[4], 3, 4, "cut", "one") < EXACT


def steps_job(
    *, plan: dict[str, Any], steps: tuple[int, int], optimizer: dict[str, Any], folder: str, one_device: str,
    rank: int, num_ranks: int, rendezvous: str,
) -> float:  # fmt: skip
    """Steps from a checkpoint, or from none, to the next; the largest difference to one device's parameters."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = open_tiny(MODEL, chosen.batch, 1, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    build, running = session.build, session.loop.optimizer
    if steps[0]:
        reader = Reader(Path(folder) / f"step-{steps[0]:08d}")
        for name, value in build.local_parameters():
            value.copy_(_read(reader, name, build.boxes[name], value))
        restore_optimizer(reader, build, running)
    for step in range(*steps):
        session.loop.step(samples(step, *session.mesh.part(chosen.sample_axes)), rates.lr_at(step, 4))
    assert save(Path(folder), steps[1], build, running, {}, keep=9) == ""
    held = dict(build.local_parameters())
    parity.leave()
    if not one_device:
        return 0.0
    reader = Reader(Path(one_device) / f"step-{steps[1]:08d}")
    pairs = [(value, _read(reader, name, build.boxes[name], value)) for name, value in held.items()]
    return max(float((value - wanted).abs().max()) for value, wanted in pairs if value.numel())


def test_evaluation(pool: RankPool) -> None:
    losses = []
    for techniques in ((), (on_host(1),), (on_host(2),)):
        plan = plan_of(*techniques, microbatch=2)
        asked = {"plan": json.loads(plan.to_json()), "config": MODEL, "optimizer": ROWWISE, "sequence": 1}
        answers = pool.run("rank_jobs:evaluate_job", asked, plan.num_ranks, timeout_seconds=60)
        assert all(answer["untouched"] for answer in answers)
        losses.append([answers[0]["total"], answers[0]["loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=EXACT)
    assert losses[2] == pytest.approx(losses[0], rel=EXACT)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("size", [1, 2])
def test_bytes_that_are_copied_are_those_priced(size: int, by: str, pool: RankPool) -> None:
    """Of distinct ids exactly, summed over the ranks; of equal ones fewer."""
    plan = plan_of(on_host(size, by), microbatch=1)
    work = price(PROFILE, plan, sequence=1, optimizer=ADAGRAD, element_bytes=8)
    priced = [c.bytes * plan.num_microbatches for c in work.copies if c.source != c.target and c.bytes >= VECTOR_BYTES]
    assert len(priced) == 2
    for config, is_exact in ((MODEL, size == 1), (HOT, False)):
        asked = {"plan": json.loads(plan.to_json()), "config": config}
        moved = pool.run("test_host_tables:moved_job", asked, plan.num_ranks, timeout_seconds=60)
        total_in, total_out = (sum(each[way] for each in moved) for way in ("in", "out"))
        assert total_in == total_out > 0
        expected = [plan.num_microbatches * len(TABLES) * size * VECTOR_BYTES] * 2
        assert total_in <= expected[0]
        if is_exact:
            assert [total_in, total_out] == expected == priced
        assert sum(each["gradient rows"] for each in moved) <= sum(min(rows, tiny.BATCH) for rows in TABLES)
    hot = sum(each["gradient rows"] for each in moved)
    assert hot <= 2 + 1 + min(9, tiny.BATCH) + 1


def moved_job(
    *, plan: dict[str, Any], config: dict[str, Any], rank: int, num_ranks: int, rendezvous: str
) -> dict[str, int]:
    """Bytes of vectors that pass between the tables and the model in a step, and rows that have a gradient."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen = Plan.from_json(json.dumps(plan))
    opened, samples = open_tiny(config, chosen.batch, 1, "float64")
    session = parity.open_session(chosen, opened, OptimizerConfig(**ROWWISE), dtype="float64", device=CPU)
    (tables,) = [each for each in session.build.exchanges if isinstance(each, HostTables)]
    moved = {"in": 0, "out": 0, "gradient rows": 0}
    inner, select, update = tables._send_back, torch.index_select, session.loop.optimizer.update

    def sent_back(keys: torch.Tensor, rows: torch.Tensor) -> None:
        assert rows.grad is not None
        moved["out"] += rows.grad.nbytes
        inner(keys, rows)

    def selected(*given: Any, out: torch.Tensor) -> torch.Tensor:
        moved["in"] += out.nbytes
        return select(*given, out=out)

    def updated(*given: Any) -> None:
        weights = [table.weight for table in tables.tables]
        assert all(weight.grad is not None and weight.grad.is_sparse for weight in weights)
        moved["gradient rows"] += sum(weight.grad.values().shape[0] for weight in weights if weight.grad is not None)
        update(*given)

    tables._send_back, torch.index_select = sent_back, selected  # type: ignore[method-assign,assignment]
    session.loop.optimizer.update = updated  # type: ignore[method-assign]
    try:
        session.loop.step(samples(0, *session.mesh.part(chosen.sample_axes)), 0.1)
    finally:
        torch.index_select = select
    parity.leave()
    return moved


def test_a_step_that_is_not_finite_changes_no_row(pool: RankPool) -> None:
    asked = {"plan": json.loads(plan_of(on_host(2), t("precision", dtype="fp16"), microbatch=4).to_json())}
    asked |= {"config": MODEL, "optimizer": ROWWISE, "sequence": 1}
    for answer in pool.run("rank_jobs:overflow_job", asked, 2, timeout_seconds=60):
        assert answer["skipped"] == [True, False, True]
        assert answer["changed"] == [False, True, False]


def test_one_process_that_nobody_launched_uses_its_host() -> None:
    command = [sys.executable, "-m", "benchmarks.host_tables", "--quick", "--cluster", "h100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["device", "device", "host", "host"]


def told(*techniques: Any, machine: Any = None) -> str:
    ranks = plan_of(*techniques, batch=64).num_replicas
    return "\n".join(map(str, plan_of(*techniques, batch=2 * ranks).check(PROFILE, machine)))


def test_what_does_not_go_with_the_host_is_refused() -> None:
    assert told(on_host(2)) == told(on_host(1)) == told(on_host(2), BF16) == ""
    assert "tables are in host memory, and replicate shares samples" in told(on_host(2), REPLICATE)
    assert "Leave out replicate (size = 4)" in told(on_host(2), REPLICATE)
    assert "or of tables in host memory" in told(on_host(1), IN_BACKWARD)
    assert "precision updates whole parameters" in told(on_host(1), t("precision", weights="bf16"))
    bare = replace(cluster("h100"), host=replace(cluster("h100").host, memory_bytes=0))
    assert "nothing is known of the hosts" in told(on_host(1), machine=bare)
    assert t("rows", size=2).options(PROFILE, bare) == ()
    for name in rules():
        optimizer = OptimizerConfig(name=name)
        problems = [str(each) for each in optimizer.problems_with(plan_of(on_host(2)))]
        assert ["changes all rows of a table" in each for each in problems] == [True] * (name != "rowwise_adagrad")
        assert optimizer.problems_with(plan_of(t("rows", size=2))) == []
    assert OptimizerConfig(name="sgd", momentum=0.0).problems_with(plan_of(on_host(2))) == []


def test_plan_files_of_before_are_what_they_were() -> None:
    assert "tier" not in t("rows", size=2).encode_self()
    written = plan_of(on_host(2))
    assert written == Plan.from_json(written.to_json())
    assert written.techniques[0].encode_self()["tier"] == "host"


@pytest.mark.parametrize("by", WAYS)
def test_many_sizes_at_once_are_one_by_one(by: str) -> None:
    plans = [plan_of(on_host(size, by), BF16, batch=64) for size in (1, 2, 3, 8)]
    plans = [replace(plan, batch=2 * plan.num_ranks) for plan in plans]
    alone = [sizes_of(plan, DLRM, sequence=1, stage=0) for plan in plans]
    arrays = {name: np.array([sizes[name] for sizes in alone]) for name in alone[0]}
    together = price_sizes(DLRM, plans[0].in_phase_order(), arrays, optimizer=ADAGRAD)
    assert not np.any(together.facts.forbidden)
    for index, sizes in enumerate(alone):
        single = price_sizes(DLRM, plans[0].in_phase_order(), sizes, optimizer=ADAGRAD)
        pairs = zip((*single.tasks, *single.residents), (*together.tasks, *together.residents), strict=True)
        for mine, theirs in pairs:
            for field in ("repeat", "moved_bytes", "bytes"):
                if hasattr(mine, field):
                    value = np.broadcast_to(getattr(theirs, field), len(alone))[index]
                    assert float(value) == float(getattr(mine, field)), (mine, field)


def test_a_forecast_says_whether_the_host_has_memory_for_the_tables() -> None:
    machine, plan = cluster("h100"), plan_of(on_host(1), batch=4096, microbatch=4096)
    enough = forecast(DLRM, plan, machine, sequence=1, optimizer=ADAGRAD)
    tables = sum(rows for rows, *_ in (param.shape for param in DLRM.layers[1].params))
    assert enough.fits
    assert enough.peak_bytes < 2e9
    # Weights of 128 numbers, and one sum of each row.
    assert enough.peak_bytes_by_tier["host"] == pytest.approx(tables * (128 + 1) * 4, rel=0.01)
    assert enough.seconds_by_cause["copy"] > 2 * 4096 * 20 * 128 * 4 / machine.tiers["host"].in_bytes_per_second
    small = replace(machine, host=replace(machine.host, memory_bytes=64 << 30))
    refused = forecast(DLRM, plan, small, sequence=1, optimizer=ADAGRAD)
    assert not refused.fits
    missing = enough.peak_bytes_by_tier["host"] - (64 << 30)
    assert refused.missing_bytes_by_tier == {"host": missing}
    assert refused.missing_words == f"{pretty_bytes(missing)} too much on the host"
    assert decode(Forecast, encode(refused), "") == refused
    assert "missing_bytes_by_tier" not in encode(enough)


@pytest.mark.parametrize("devices", ["h100", "2xh100"])
def test_search_puts_tables_on_the_host_only_where_nothing_else_fits(devices: str) -> None:
    machine = cluster(devices)
    found = search(DLRM, machine, batch=4096, sequence=1, optimizer=ADAGRAD)
    assert found.best is not None
    rows = found.best.plan.technique("rows")
    assert (rows.size, rows.tier) == (machine.num_devices, "host")  # type: ignore[union-attr]
    assert found.best.forecast.peak_bytes_by_tier["host"] > 40e9
    small = search(profile("dlrm-small"), machine, batch=4096, sequence=1, optimizer=ADAGRAD)
    assert small.best is not None
    assert not small.best.forecast.peak_bytes_by_tier
    poor = replace(machine, host=replace(machine.host, memory_bytes=32 << 30))
    assert search(DLRM, poor, batch=4096, sequence=1, optimizer=ADAGRAD).best is None
    assert search(DLRM, machine, batch=4096, sequence=1, optimizer=OptimizerConfig()).best is None


@pytest.mark.parametrize("pin", [("rows.tier=host",), ("rows.tier=host", "rows.size=1")], ids=str)
def test_one_device_may_be_asked_to_use_its_host(pin: tuple[str, ...]) -> None:
    found = search(profile("dlrm-small"), cluster("h100"), batch=64, sequence=1, optimizer=ADAGRAD, pin=pin)
    assert found.best is not None
    assert str(found.best.plan.technique("rows")).endswith("tier=host)")
