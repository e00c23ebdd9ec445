"""Figures that no such card has are told wherever a cluster file is read, and stop nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.machine.named_clusters import ALIASES, preset, preset_names, warnings_of
from meshwright.run.prepare import prepare
from meshwright.run.run_file import read_run

H100 = preset("h100")


def changed(found: Cluster = H100, name: str = "h100", **device: Any) -> Cluster:
    return replace(found, name=name, device=replace(found.device, **device))


def sparse(dtype: str, rate: float) -> dict[str, float]:
    return {**H100.device.flops_per_second, dtype: rate}


@pytest.mark.parametrize("name", sorted(set(preset_names()) - set(ALIASES)))
def test_no_preset_is_doubted(name: str) -> None:
    assert list(warnings_of(preset(name))) == []
    assert list(warnings_of(preset(name).resized(8, 4, name=f"4x8x{name}"))) == []


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (changed(flops_per_second=sparse("bf16", 1979e12)), ("bf16", "sparsity", "1.98 PFLOP/s", "989 TFLOP/s")),
        (changed(flops_per_second=sparse("fp8", 3958e12)), ("fp8", "sparsity")),
        (changed(flops_per_second=sparse("tf32", 989e12)), ("tf32", "sparsity")),
        (changed(flops_per_second=sparse("bf16", 1300e12)), ("bf16", "1.31 times")),
        (changed(memory_bytes_per_second=4.8e12), ("memory_bytes_per_second is 4.8 TB/s", "3.35 TB/s")),
        (changed(memory_bytes=2 * H100.device.memory_bytes), ("memory_bytes", "not fit")),
        (replace(H100, inner=replace(H100.inner, bytes_per_second=900e9)), ("inner", "both ways", "450 GB/s")),
        (replace(H100, outer=replace(H100.outer, bytes_per_second=400e9)), ("outer", "400 GB/s", "50 GB/s")),
    ],
)
def test_what_no_such_card_has_is_told(cluster: Cluster, words: tuple[str, ...]) -> None:
    (line,) = warnings_of(cluster)
    for word in words:
        assert word in line


def test_the_card_is_known_by_name_by_torchs_name_or_by_what_sparsity_leaves_alone() -> None:
    wrong = changed(name="ours", flops_per_second=sparse("bf16", 1979e12))
    assert "h100 has" in next(warnings_of(wrong))
    by_torch = replace(wrong, sources={"device": "NVIDIA H100 80GB HBM3"})
    assert "h100 has" in next(warnings_of(changed(by_torch, name="ours", memory_bytes_per_second=2e12)))
    unknown = changed(wrong, name="ours", memory_bytes_per_second=2e12)
    assert list(warnings_of(replace(unknown, sources={}))) == []


def written(folder: Path) -> str:
    path = folder / "c.cluster.json"
    path.write_text(changed(flops_per_second=sparse("bf16", 1979e12)).to_json(), encoding="utf-8")
    return str(path)


def test_plan_and_simulate_warn_and_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, file = tmp_path / "p.plan.json", written(tmp_path)
    words = ["--model", "byte-3m", "--cluster", file, "--seq", "64"]
    assert main(["plan", *words, "--batch", "4", "--json", "-o", str(plan)]) == 0
    said = capsys.readouterr()
    assert "warning" in said.err
    assert "sparsity" in said.err
    assert json.loads(said.out), "stdout is still JSON"
    assert isinstance(Plan.from_json(plan.read_text(encoding="utf-8")), Plan)
    assert main(["simulate", str(plan), *words, "--json"]) == 0
    assert "sparsity" in capsys.readouterr().err
    assert main(["plan", "--model", "byte-3m", "--cluster", "h100", "--seq", "64", "--batch", "4", "--json"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_planning_a_run_warns(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        "\n".join(
            [
                "[model]\nname = 'byte-3m'",
                "[data]\nsequence = 64\n",
                "[train]\nbatch = 4\nsteps = 1",
                f"[run]\nfolder = '{tmp_path / 'out'}'\ncluster = '{written(tmp_path)}'",
            ]
        ),
        encoding="utf-8",
    )
    lines: list[str] = []
    prepare(read_run(str(run)), "", lines.append)
    assert any("sparsity" in line for line in lines)
