"""Memory beside the devices: what a cluster says of its hosts and disks, as one device sees it."""

from __future__ import annotations

import json

import pytest

from meshwright.core.cluster import Cluster
from meshwright.machine.named_clusters import PRESETS_FOLDER, cluster, preset


def test_the_host_of_a_named_cluster_grows_with_its_nodes_and_is_shared_by_them() -> None:
    one, eight = cluster("h100"), cluster("4x8xh100")
    assert eight.tiers["host"].bytes == 8 * one.tiers["host"].bytes == 2 << 40
    assert eight.tiers["host"].bytes_each == one.tiers["host"].bytes_each
    assert eight.tiers["device"].bytes == eight.device.memory_bytes


def test_a_node_of_another_size_has_as_much_host_for_each_device() -> None:
    eight, four = cluster("8xh100"), cluster("4xh100")
    assert eight.resized(4).tiers == four.tiers
    assert four.resized(8, 2).tiers == eight.tiers
    assert eight.resized(4).host.memory_bytes == eight.host.memory_bytes // 2
    assert eight.resized(8, 4).host == eight.host


def test_a_copy_takes_what_the_slowest_part_of_its_way_takes() -> None:
    host = cluster("8xh100").tiers["host"]
    assert host.in_bytes_per_second == 614.4e9 / 2 / 8  # the memory's, both ways at once, not PCIe's 49.9
    assert host.copy_seconds(38.4e9, is_inward=True) == pytest.approx(1.0, rel=1e-3)
    assert cluster("8xa100").tiers["host"].in_bytes_per_second == pytest.approx(24.9e9)  # PCIe's


def test_what_is_not_known_is_zero_and_as_slow_as_never() -> None:
    workstation = cluster("2xrtx4090")
    assert workstation.tiers["host"].bytes == 0
    assert "not known" in workstation.sources["host"]
    assert workstation.tiers["disk"].copy_seconds(1e9, is_inward=False) > 1e8


@pytest.mark.parametrize("path", sorted(PRESETS_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_presets_name_the_sources_of_hosts_and_links(path: object) -> None:
    known = preset(path.stem)  # type: ignore[attr-defined]
    if known.device.kind == "cuda":
        assert {"host", "copy_bytes_per_second"} <= set(known.sources)
        assert known.device.copy_bytes_per_second


def test_groups_keep_their_own_hosts() -> None:
    mixed = cluster("8xh100+8xl4")
    assert [group.host.memory_bytes >> 30 for group in mixed.groups] == [2048, 768]
    assert mixed.view(1).tiers["host"].bytes == cluster("8xl4").tiers["host"].bytes


def test_files_of_before_there_were_tiers_are_read_as_they_are() -> None:
    data = json.loads(preset("h100").to_json())
    del data["host"]["disk_bytes"], data["errors"]["copy"]
    data["version"] = 3
    old = Cluster.from_json(json.dumps(data))
    assert old.tiers["disk"].bytes == 0
    assert old.tiers["host"] == preset("h100").tiers["host"]
