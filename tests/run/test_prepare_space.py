"""What this host has too little of is said before anything starts, with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.core.plan import Plan
from meshwright.data.data_section import DataSection
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.run.prepare import space_problems
from meshwright.run.run_file import ModelSection, RunConfig, RunSection, TrainSection
from meshwright.simulator.forecast import forecast


def test_a_host_or_a_disk_that_is_too_small_now_is_refused_with_the_gap(tmp_path: Path) -> None:
    plan = Plan(batch=4)
    plain = forecast(profile("byte-tiny"), plan, cluster("h100"), sequence=64)
    config = RunConfig(
        model=ModelSection(name="byte-tiny"),
        data=DataSection(train="corpus.txt", sequence=64),
        train=TrainSection(batch=4, steps=1),
        run=RunSection(folder=str(tmp_path / "new" / "run")),
    )
    assert space_problems(config, plan, plain, 1) == []
    large = replace(plain, peak_bytes_by_tier={"host": 1 << 60, "disk": 1 << 61})
    host, disk = space_problems(config, plan, large, 1)
    assert host.where == "the host"
    assert disk.where == "the disk"
    for problem in (host, disk):
        assert "too little" in problem.what
        assert "available" in problem.what
    assert str(tmp_path) in disk.what
    missing = replace(config, run=replace(config.run, disk=str(tmp_path / "none")))
    assert [each.where for each in space_problems(missing, plan, plain, 1)] == ["run.disk"]
