"""Every preset parses, and no figure is one with sparsity: such tables are often wrong by two."""

from __future__ import annotations

import pytest

from meshwright.core.cluster import Cluster
from meshwright.machine.named_clusters import ALIASES, PRESETS_FOLDER, preset, preset_names

DENSE_PEAK = {
    "v100": ("fp16", 125e12),
    "a100-40": ("bf16", 312e12),
    "a100-80": ("bf16", 312e12),
    "h100": ("bf16", 989e12),
    "h100-pcie": ("bf16", 756.5e12),
    "h200": ("bf16", 989e12),
    "b200": ("bf16", 2250e12),
    "mi300x": ("bf16", 1307e12),
    "l40s": ("bf16", 362e12),
    "rtx4090": ("bf16", 165e12),
    "laptop": ("bf16", 1.3e9),
    "v100-16": ("fp16", 125e12),
    "t4": ("fp16", 65e12),
    "rtx8000": ("fp16", 130.5e12),
    "titan-rtx": ("fp16", 130.5e12),
    "a10": ("bf16", 125e12),
    "a10g": ("bf16", 70e12),
    "a40": ("bf16", 149.7e12),
    "a6000": ("bf16", 154.85e12),
    "a800": ("bf16", 312e12),
    "a100-pcie-40": ("bf16", 312e12),
    "a100-pcie-80": ("bf16", 312e12),
    "l4": ("bf16", 121e12),
    "rtx3090": ("bf16", 71.2e12),
    "rtx5090": ("bf16", 209.5e12),
    "rtx6000-ada": ("bf16", 364.25e12),
    "h20": ("bf16", 148e12),
    "h800": ("bf16", 989.5e12),
    "h100-nvl": ("bf16", 835.5e12),
    "gh200": ("bf16", 989.5e12),
    "b300": ("bf16", 2250e12),
    "gb200": ("bf16", 2500e12),
    "gb300": ("bf16", 2500e12),
    "mi250x": ("bf16", 191.5e12),
    "mi325x": ("bf16", 1307.4e12),
    "mi355x": ("bf16", 2516e12),
}
STEMS = sorted(set(preset_names()) - set(ALIASES))
SOURCED = {
    "memory_bytes",
    "memory_bytes_per_second",
    "flops_per_second",
    "matmul_fraction",
    "attention_fraction",
    "bandwidth_fraction",
    "launch_seconds",
    "reserved_bytes",
    "inner",
    "outer",
}


def test_every_preset_is_in_the_table() -> None:
    assert set(STEMS) == set(DENSE_PEAK)
    assert set(ALIASES.values()) <= set(STEMS)


@pytest.mark.parametrize("name", STEMS)
def test_preset_is_one_device_and_written_as_we_write(name: str) -> None:
    found = preset(name)
    assert (found.name, found.num_devices) == (name, 1)
    assert found.to_json() + "\n" == (PRESETS_FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert Cluster.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", STEMS)
def test_rates_are_dense(name: str) -> None:
    flops = preset(name).device.flops_per_second
    dtype, peak = DENSE_PEAK[name]
    assert 0.99 * peak <= flops[dtype] <= peak
    half_rate = flops[dtype]
    assert flops.get("fp16", half_rate) <= half_rate
    assert flops.get("fp8", 0.0) <= 2 * half_rate
    assert flops.get("tf32", 0.0) <= 0.501 * half_rate


@pytest.mark.parametrize("name", STEMS)
def test_figures_are_physical_and_sourced(name: str) -> None:
    found = preset(name)
    device = found.device
    for fraction in (device.matmul_fraction, device.attention_fraction, device.bandwidth_fraction):
        assert 0.1 < fraction <= 1.0
    assert 0 < device.reserved_bytes < 0.1 * device.memory_bytes
    assert found.outer.bytes_per_second <= found.inner.bytes_per_second < device.memory_bytes_per_second
    assert 1e-6 < found.inner.latency_seconds <= found.outer.latency_seconds * 1.5 < 1e-3
    assert found.inner.shared == (device.kind == "cpu")
    assert found.errors.compute >= 0.05
    assert set(found.sources) >= SOURCED
    assert all(found.sources.values())
