"""One quick probe of this machine, and what is said when a measuring process dies.

Tests of `launch/cpu_bf16.py`, `machine/measure.py`, `machine/measure_compute.py`, `machine/measure_host.py`,
`machine/timing.py`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.launch.cpu_bf16 import survives
from meshwright.machine import probe as machine
from meshwright.machine.measure_host import both_ways
from meshwright.ops.disk_memory import BLOCK_BYTES, nameless_file


def test_a_quick_probe_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    lines: list[str] = []
    found = machine.probe(num_devices=2, report=lines.append, quick=True)
    assert (found.name, found.devices_per_node, found.device.kind) == ("this machine", 2, "cpu")
    # An order of magnitude around any core of these twenty years: the units are right.
    assert 1e9 < found.device.flops_per_second["fp32"] < 1e13
    assert 1e8 < found.device.memory_bytes_per_second < 1e12
    assert 1e-7 < found.device.launch_seconds < 1e-3
    assert 0 < found.device.attention_fraction <= 1
    assert found.inner.shared
    assert 1e6 < found.inner.bytes_per_second < 1e12
    assert 0 <= found.inner.latency_seconds < 0.1
    assert 0 < found.device.reserved_bytes < found.device.memory_bytes
    assert Cluster.from_json(found.to_json()) == found
    assert lines[0].startswith("measuring 2 cpu devices")
    assert "all_reduce" in lines


def test_a_process_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    monkeypatch.setattr(machine, "_MODULE", "meshwright.machine.no_such_module")
    with pytest.raises(MeshwrightError, match=r"device \d ended with code 1[\s\S]*no_such_module"):
        machine.probe(num_devices=2, report=lambda line: None)


def test_a_process_past_the_deadline_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 0)
    monkeypatch.setattr(machine, "_DEADLINE_SECONDS", 0.05)
    with pytest.raises(MeshwrightError, match="did not end within"):
        machine.probe(num_devices=1, report=lambda line: None)


def test_device_counts_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshwrightError, match="at least 1"):
        machine.probe(num_devices=0, report=print)
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    with pytest.raises(MeshwrightError, match="sees 2 GPUs"):
        machine.probe(num_devices=3, report=print)


def test_available_memory_heeds_a_container(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable:  800 kB\n")
    assert machine.available_host_bytes(meminfo, limit) == 800 * 1024
    limit.write_text("max\n")
    assert machine.available_host_bytes(meminfo, limit) == 800 * 1024
    limit.write_text("4096\n")
    assert machine.available_host_bytes(meminfo, limit) == 4096
    with pytest.raises(MeshwrightError, match="does not say"):
        machine.available_host_bytes(tmp_path / "none", limit)


def test_an_op_may_die_in_its_fork() -> None:
    assert survives(lambda: None)
    assert not survives(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert not survives(lambda: os._exit(3))


def test_a_disk_is_read_and_written_at_once_past_the_cache(tmp_path: Path) -> None:
    file = nameless_file(tmp_path)
    read, write = both_ways(file, 2 * BLOCK_BYTES, 0.05)
    assert read > 0
    assert write > 0
    assert os.fstat(file).st_size == 4 * BLOCK_BYTES
    os.close(file)
    assert list(tmp_path.iterdir()) == []
