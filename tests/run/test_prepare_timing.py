"""A run's own model is timed before it is planned: its ops' rates, waits between ranks, what a rank's process holds.

Tests of `run/prepare.py`, `runtime/rank.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.run import prepare
from meshwright.run.model import describe_run
from meshwright.run.prepare import timed_part, timings, with_timing
from meshwright.run.run import Run
from meshwright.run.run_file import RunConfig, read_run
from meshwright.runtime.rank import profiled_kinds
from meshwright.simulator.forecast import forecast

PROBED: Cluster = replace(cluster("2xlaptop"), sources={"measured": "made"})
ALONE = Plan(batch=4, microbatch=4)
MIB = 1 << 20
RUN = """\
[model]
{model}
[data]
train = "{folder}/corpus.txt"
sequence = 32
[train]
batch = 4
steps = 2
[run]
folder = "{folder}/run"
ranks = 2
"""
MODULE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    return Small()
"""


def run_of(folder: Path, model: str = 'name = "byte-3m"') -> RunConfig:
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog; " * 400)
    (folder / "run.toml").write_text(RUN.format(folder=folder, model=model))
    return read_run(folder / "run.toml", ())


def answered(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[dict[str, Any]]:
    """Ranks that answer with stated times; what they were asked."""
    asked: list[dict[str, Any]] = []
    shares = {"matmul": 0.04, "attention": 0.001, "memory": 0.01}
    kinds = {f"{kind} {way}": share for kind, share in shares.items() for way in ("forward", "backward")}
    answer = {"forward": 0.06, "backward": 0.12, "by_kind": kinds, "wait_seconds": 0.004, "peak_bytes": 600 * MIB}

    def run(self: RankPool, function: str, arguments: Any, num_ranks: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(arguments)
        return [answer | changes] * num_ranks

    monkeypatch.setattr(RankPool, "run", run)
    return asked


def timed(config: RunConfig, plan: Plan, base: Cluster = PROBED, said: list[str] | None = None) -> Cluster:
    report = (lambda text: None) if said is None else said.append
    return with_timing(config, describe_run(config), plan, base, report)


def told(config: RunConfig, plan: Plan, machine: Cluster) -> Any:
    profile = describe_run(config).profile
    return forecast(profile, plan, machine, sequence=config.sequence, optimizer=config.train.optimizer)


def test_ops_take_what_they_took_and_a_rank_holds_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(tmp_path)
    answered(monkeypatch)
    found = timed(config, ALONE)
    before, after = (told(config, ALONE, each) for each in (PROBED, found))
    assert not 0.17 < before.step_seconds < 0.19
    assert after.step_seconds == pytest.approx(0.18, rel=0.05), "as measured, and the update"
    assert found.device.op_slowdowns["attention backward fp32"] != found.device.op_slowdowns["matmul backward fp32"]
    held = after.peak_bytes - after.peak_bytes_by_category["optimizer"]
    assert held == pytest.approx(600 * MIB, abs=MIB)
    assert found.inner.latency_seconds == 0.004
    assert found.errors.compute == 0.1
    profile = describe_run(config).profile
    timed_now, this = timings(found, profile, ALONE, config.sequence)
    assert timed_now == [this]
    assert timings(found, profile, replace(ALONE, microbatch=2), config.sequence)[1] != this
    assert timings(found, profile, ALONE, 64)[1] != this
    assert Cluster.from_json(found.to_json(), "c").device.op_slowdowns == found.device.op_slowdowns


def test_kernels_of_other_kinds_than_the_profile_says_share_one_factor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path)
    answered(monkeypatch, by_kind={"matmul forward": 0.03, "matmul backward": 0.05, "memory backward": 0.01})
    found = timed(config, ALONE)
    assert len({each for name, each in found.device.op_slowdowns.items() if " forward " in name}) == 1
    assert told(config, ALONE, found).step_seconds == pytest.approx(0.18, rel=0.05)


def test_each_dtype_has_rates_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(tmp_path)
    bf16 = replace(ALONE, techniques=(technique_named("precision")(),))
    base = replace(PROBED, device=replace(PROBED.device, flops_per_second={"fp32": 1e11, "bf16": 4e11}))
    answered(monkeypatch)
    first = timed(config, bf16, base)
    answered(monkeypatch, forward=0.09, backward=0.18, wait_seconds=0.008)
    second = timed(config, ALONE, first)
    assert told(config, bf16, second).step_seconds == pytest.approx(0.18, rel=0.1)
    assert told(config, ALONE, second).step_seconds == pytest.approx(0.27, rel=0.05)
    assert second.inner.latency_seconds == 0.004, "ranks wait as they did"
    assert second.sources["timed"].count("; ") == 1


def test_only_the_first_blocks_of_a_long_step_are_timed_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = run_of(tmp_path), list[str]()
    asked = answered(monkeypatch)
    seconds = told(config, ALONE, PROBED).step_seconds
    monkeypatch.setattr(prepare, "_MOST_STEP_SECONDS", seconds / 2)
    timed(config, ALONE)
    assert 1 <= asked[0]["blocks"] < describe_run(config).profile.num_blocks
    monkeypatch.setattr(prepare, "_MOST_STEP_SECONDS", seconds / 1000)
    assert timed(config, ALONE, said=said) is PROBED
    assert "is not timed" in said[-1]
    assert len(asked) == 1


def test_what_is_timed_is_what_a_rank_does_by_itself() -> None:
    names = {"precision": {}, "replicate": {"size": 2}, "recompute": {}}
    plan = Plan(techniques=tuple(technique_named(n)(**s) for n, s in names.items()), batch=16, microbatch=4)
    assert str(timed_part(plan)) == "precision(), microbatch 4 x 1"


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_module_of_somebody_else_is_timed_whole_or_in_part(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small_model.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = run_of(tmp_path, 'factory = "small_model:make"')
    monkeypatch.setattr(prepare, "_SECONDS", 0.1)
    if share < 1:
        monkeypatch.setattr(prepare, "_MOST_STEP_SECONDS", share * told(config, ALONE, PROBED).step_seconds)
    said: list[str] = []
    plan = Plan(techniques=(technique_named("replicate")(size=2),), batch=4, microbatch=2)
    found = timed(config, plan, said=said)
    assert said == ["timing small_model:make itself: one device, microbatch 2 x 1"]
    assert {"matmul forward fp32", "matmul backward fp32", "memory forward fp32"} <= {*found.device.op_slowdowns}
    assert found.inner.latency_seconds >= PROBED.inner.latency_seconds
    assert 100 * MIB < found.device.reserved_bytes < 2000 * MIB


def test_a_run_times_its_model_once_and_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_of(tmp_path)
    monkeypatch.setattr("meshwright.machine.probe.probe", lambda **_: PROBED)
    asked = answered(monkeypatch)
    with Run(config) as run:
        prepared = run.prepare()
        run.adopt(prepared)
    assert 1 <= len(asked) <= prepare.MOST_TIMINGS
    assert prepared.cluster.device.op_slowdowns
    with Run(config) as run:
        again = run.prepare()
    assert 1 <= len(asked) <= prepare.MOST_TIMINGS, "the folder has it"
    assert again.forecast == prepared.forecast
    (tmp_path / "run" / "cluster.json").unlink()
    with monkeypatch.context() as broken:
        broken.undo()
        monkeypatch.setattr("meshwright.machine.probe.probe", lambda **_: PROBED)
        broken.setattr("meshwright.run.prepare.RankPool", FailingPool)
        said: list[str] = []
        with Run(config, report=said.append) as run:
            assert not run.prepare().cluster.device.op_slowdowns
        assert [line for line in said if "is not timed: no memory is left" in line]


class FailingPool:
    def __init__(self, *_: Any, **__: Any):
        pass

    def __enter__(self) -> FailingPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, *_: Any, **__: Any) -> list[Any]:
        from meshwright.launch.failure import Failure
        from meshwright.launch.rank_pool import RankError

        raise RankError(
            [Failure(rank=0, kind="exception", message="no memory is left", details="", is_secondary=False)], 2
        )


def test_ops_are_told_apart_by_kind_and_direction() -> None:
    model, x = nn.Linear(256, 256), torch.randn(1, 4, 256, 256)

    def step() -> None:
        with torch.profiler.record_function("mw:forward"):
            out = nn.functional.scaled_dot_product_attention(model(x), x, x).relu()
        with torch.profiler.record_function("mw:backward"):
            out.sum().backward()

    found = profiled_kinds(step, on_gpu=False)
    kinds = ("matmul", "attention", "memory")
    assert {*found} == {f"{kind} {way}" for kind in kinds for way in ("forward", "backward")}
    assert all(seconds > 0 for seconds in found.values())
