"""From timings to a Cluster, without a machine: the line through all_reduce times, known and new cards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import MeshwrightError
from meshwright.probe.link_fit import all_reduce_bus_bytes, fit_link
from meshwright.probe.names import preset
from meshwright.probe.reading import Reading, assemble

SIZES = (4096, 32768, 262144, 2**21, 2**23)
H200 = Reading(
    kind="cuda",
    device_name="NVIDIA H200",
    torch_version="2.13",
    num_threads=1,
    isa_limit="",
    flops_per_second={"fp32": 50e12, "bf16": 790e12, "fp16": 790e12},
    attention_flops_per_second=330e12,
    memory_bytes_per_second=4.2e12,
    launch_seconds=5e-6,
    memory_bytes=150_000_000_000,
    reserved_bytes=600_000_000,
    all_reduce=(),
)


@given(
    latency=st.floats(0, 1e-2),
    bytes_per_second=st.floats(1e6, 1e12),
    num_devices=st.integers(2, 64),
)
def test_the_fit_finds_the_line_it_was_drawn_from(latency: float, bytes_per_second: float, num_devices: int) -> None:
    points = [(n, latency + all_reduce_bus_bytes(n, num_devices) / bytes_per_second) for n in SIZES]
    link = fit_link(points, num_devices, shared=True)
    for num_bytes, seconds in points:
        forecast = link.latency_seconds + all_reduce_bus_bytes(num_bytes, num_devices) / link.bytes_per_second
        assert forecast == pytest.approx(seconds, rel=1e-3)


def test_neither_term_goes_below_zero() -> None:
    steep = [(n, (n / 1e9) ** 1.3) for n in SIZES]
    assert fit_link(steep, 2, shared=False).latency_seconds == 0.0


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([(n, 1e-3) for n in SIZES], "does not grow"),
        ([(n, 1e-3 / n) for n in SIZES], "does not grow"),
        ([(4096, 1e-3)], "1 timings"),
        ([(4096, 0.0), (8192, 1e-3)], "no time"),
    ],
)
def test_what_is_no_link_is_refused(points: list[tuple[float, float]], said: str) -> None:
    with pytest.raises(MeshwrightError, match=said):
        fit_link(points, 2, shared=False)


def test_a_known_card_keeps_its_peak_and_gets_measured_shares() -> None:
    found = assemble([H200], host_bytes=10**11)
    sheet = preset("h200")
    assert found.device.flops_per_second == sheet.device.flops_per_second
    assert found.device.matmul_fraction == pytest.approx(790 / 989)
    assert found.device.attention_fraction == pytest.approx(330 / 989)
    assert found.device.bandwidth_fraction == pytest.approx(4.2 / 4.8)
    assert found.device.memory_bytes == 150_000_000_000
    assert found.inner == sheet.inner
    assert not found.inner.shared


def test_an_unknown_card_has_its_measured_rates() -> None:
    found = assemble([replace(H200, device_name="NVIDIA T1000")], host_bytes=10**11)
    assert found.device.flops_per_second["bf16"] == 790e12
    assert found.device.matmul_fraction == 1.0
    assert "PCIe" in found.sources["inner"]


def test_several_cards_measure_their_link_and_the_slower_sets_the_rate() -> None:
    times = tuple((n, 2e-5 + n / 3e11) for n in SIZES)
    first = replace(H200, all_reduce=times)
    slower = replace(first, flops_per_second=dict.fromkeys(H200.flops_per_second, 700e12))
    found = assemble([first, slower], host_bytes=10**11)
    assert found.devices_per_node == 2
    assert found.device.matmul_fraction == pytest.approx(700 / 989)
    assert found.inner.bytes_per_second == pytest.approx(3e11, rel=1e-3)


def test_a_cpu_without_bf16_still_gives_a_cluster() -> None:
    cpu = replace(H200, kind="cpu", device_name="some CPU", flops_per_second={"fp32": 9e10})
    found = assemble([replace(cpu, attention_flops_per_second=2e11)], host_bytes=2**33)
    assert found.device.attention_fraction == 1.0
    assert found.device.memory_bytes == 2**33
    assert "bf16" not in found.device.flops_per_second


def test_numbers_that_are_no_machines_are_refused_all_at_once() -> None:
    broken = replace(H200, memory_bytes_per_second=0.0, launch_seconds=0.0)
    with pytest.raises(MeshwrightError) as caught:
        assemble([broken], host_bytes=10**11)
    assert len(caught.value.problems) == 2
    with pytest.raises(MeshwrightError, match="of the data sheet"):
        assemble([replace(H200, memory_bytes_per_second=9e12)], host_bytes=10**11)
