"""Clusters by name: counts, aliases, files, and what is said when there is no such thing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.machine.named_clusters import cluster, preset, preset_names, preset_of_device


@pytest.mark.parametrize(
    ("name", "num_nodes", "devices_per_node"),
    [("h200", 1, 1), ("8xh100", 1, 8), ("64x8xh100", 64, 8), ("2x4xa100-40", 2, 4), ("4xlaptop", 1, 4)],
)
def test_counts_in_a_name(name: str, num_nodes: int, devices_per_node: int) -> None:
    found = cluster(name)
    assert (found.num_nodes, found.devices_per_node, found.name) == (num_nodes, devices_per_node, name)


def test_case_spaces_and_aliases_do_not_matter() -> None:
    assert cluster(" 8xH100 ") == cluster("8xh100")
    assert cluster("8xA100").device == cluster("a100-80").device
    assert "a100" in preset_names()


def test_a_file_is_read_and_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(cluster("2x8xh200").to_json())
    assert cluster(str(path)) == cluster("2x8xh200")
    bare = tmp_path / "mine"
    bare.write_text(path.read_text())
    assert cluster(str(bare)) == cluster("2x8xh200")


def test_a_known_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h100").write_text("not JSON")
    monkeypatch.chdir(tmp_path)
    assert cluster("h100").name == "h100"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("8xh10", 'Did you mean "h100"?'),
        ("8xfoo", "Known: a10, a100"),
        ("0xh100", "at least 1"),
        ("0x8xh100", "at least 1"),
        ("8 h100!", "no cluster name"),
        ("", "no cluster name"),
        ("missing.json", "cannot be read"),
    ],
)
def test_refusals_say_what_to_do(name: str, said: str) -> None:
    with pytest.raises(MeshwrightError, match=r".") as caught:
        cluster(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("torch_name", "expected"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GH200", None),
        ("NVIDIA GB200", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
    ],
)
def test_cards_are_told_apart(torch_name: str, expected: str | None) -> None:
    found = preset_of_device(torch_name)
    assert found == (preset(expected) if expected else None)


def test_names_and_the_parent_of_the_probe_import_no_torch() -> None:
    code = (
        "import sys, meshwright.machine.probe, meshwright.machine.named_clusters as n; n.cluster('8xh100');"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert isinstance(cluster("h100"), Cluster)
