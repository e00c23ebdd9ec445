"""From timings to a Cluster, without a machine: the line through all_reduce times, known and new cards."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.errors import MeshwrightError
from meshwright.machine.assemble import WHOLE_BLOCKS, assemble, block_tasks, forecast_seconds
from meshwright.machine.fits import bus_bytes, fit_links
from meshwright.machine.named_clusters import preset
from meshwright.machine.probe import Reading

SIZES = (4096, 32768, 262144, 2**21, 2**23)
H200 = Reading(
    kind="cuda",
    device_name="NVIDIA H200",
    versions={"torch": "2.13", "driver": "580.1"},
    power_watts=700.0,
    num_threads=1,
    isa_limit="",
    num_processors=132,
    flops_per_second={"fp32": 50e12, "bf16": 790e12, "fp16": 790e12},
    attention=((128.0, 4096.0, 330e12, 330e12),),
    memory=(("copy", 4.2e9, 1e-3),),
    launch_seconds=5e-6,
    memory_bytes=150_000_000_000,
    reserved_bytes=600_000_000,
)


@given(
    latency=st.floats(0, 1e-2),
    bytes_per_second=st.floats(1e6, 1e12),
    num_devices=st.integers(2, 64),
)
def test_the_fit_finds_the_line_it_was_drawn_from(latency: float, bytes_per_second: float, num_devices: int) -> None:
    points = [(n, latency + bus_bytes("all_reduce", n, num_devices) / bytes_per_second) for n in SIZES]
    link = fit_links({"all_reduce": points}, num_devices, shared=True)
    for num_bytes, seconds in points:
        forecast = link.latency_seconds + bus_bytes("all_reduce", num_bytes, num_devices) / link.bytes_per_second
        assert forecast == pytest.approx(seconds, rel=1e-3)


def test_neither_term_goes_below_zero() -> None:
    steep = [(n, (n / 1e9) ** 1.3) for n in SIZES]
    assert fit_links({"all_reduce": steep}, 2, shared=False).latency_seconds == 0.0


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
        fit_links({"all_reduce": points}, 2, shared=False)


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
    first = replace(H200, links={"all_reduce": times})
    slower = replace(first, flops_per_second=dict.fromkeys(H200.flops_per_second, 700e12))
    found = assemble([first, slower], host_bytes=10**11)
    assert found.devices_per_node == 2
    assert found.device.matmul_fraction == pytest.approx(700 / 989)
    assert found.inner.bytes_per_second == preset("h200").inner.bytes_per_second == 4.5e11
    assert found.inner.fractions["all_reduce"] == pytest.approx(3 / 4.5, rel=1e-3)


def test_a_cpu_without_bf16_still_gives_a_cluster() -> None:
    cpu = replace(H200, kind="cpu", device_name="some CPU", flops_per_second={"fp32": 9e10})
    found = assemble([replace(cpu, attention=((64.0, 512.0, 2e11, 2e11),))], host_bytes=2**33)
    assert found.device.attention_fraction == 1.0
    assert found.device.memory_bytes == 2**33
    assert "bf16" not in found.device.flops_per_second


def test_numbers_that_are_no_machines_are_refused_all_at_once() -> None:
    broken = replace(H200, memory=(("copy", 4.2e9, 0.0),), launch_seconds=0.0)
    with pytest.raises(MeshwrightError) as caught:
        assemble([broken], host_bytes=10**11)
    assert len(caught.value.problems) == 2
    with pytest.raises(MeshwrightError, match="of the data sheet"):
        assemble([replace(H200, memory=(("copy", 9e9, 1e-3),))], host_bytes=10**11)


def test_odd_sizes_are_slower_by_what_was_measured() -> None:
    assert assemble([replace(H200, odd_slowdown=6.18)], host_bytes=10**11).device.unaligned_slowdown == 6.18
    assert assemble([replace(H200, odd_slowdown=0.97)], host_bytes=10**11).device.unaligned_slowdown == 1.0
    assert "odd number" in assemble([H200], host_bytes=10**11).sources["unaligned_slowdown"]
    with pytest.raises(MeshwrightError, match="odd_slowdown"):
        assemble([replace(H200, odd_slowdown=0.0)], host_bytes=10**11)


def block_forecast(reading: Reading) -> tuple[float, float]:
    """(arithmetic, traffic) of the device before it is held to a block."""
    return forecast_seconds(WHOLE_BLOCKS[reading.kind], assemble([reading], host_bytes=10**11).device)


@pytest.mark.parametrize(("off", "error"), [(1.0, 0.15), (1.04, 0.15), (1.22, 0.22), (0.8, 0.2), (1.6, 0.3)])
def test_the_error_bar_is_how_far_a_block_was_off(off: float, error: float) -> None:
    arithmetic, traffic = block_forecast(H200)
    found = assemble([replace(H200, blocks={"eager": off * (arithmetic + traffic)})], host_bytes=10**11)
    assert found.errors.compute == pytest.approx(error, abs=2e-3)
    assert f"{off:.3f} times its forecast" in found.sources["block"]
    assert assemble([H200], host_bytes=10**11).errors.compute == 0.15, "no block: as much as is assumed"


def test_on_a_gpu_a_block_sets_the_rate_of_its_traffic() -> None:
    arithmetic, traffic = block_forecast(H200)
    plain = assemble([H200], host_bytes=10**11).device
    slow = replace(H200, blocks={"eager": arithmetic + 1.25 * traffic})
    found = assemble([slow], host_bytes=10**11).device
    assert found.bandwidth_fraction == pytest.approx(plain.bandwidth_fraction / 1.25)
    assert found.matmul_fraction == plain.matmul_fraction
    assert sum(forecast_seconds(WHOLE_BLOCKS["cuda"], found)) == pytest.approx(slow.blocks["eager"], rel=0.01)
    # Far slower than any rate explains, and faster than the memory is.
    much = assemble([replace(H200, blocks={"eager": 5 * (arithmetic + traffic)})], host_bytes=10**11).device
    assert much.bandwidth_fraction == pytest.approx(plain.bandwidth_fraction / 2)
    little = assemble([replace(H200, blocks={"eager": 0.5 * arithmetic})], host_bytes=10**11).device
    assert little.bandwidth_fraction == 1.0


def test_on_a_cpu_a_block_corrects_nothing() -> None:
    cpu = replace(H200, kind="cpu", flops_per_second={"fp32": 9e10}, attention=((64.0, 512.0, 5e10, 4e10),))
    plain = assemble([cpu], host_bytes=2**33)
    busy = assemble([replace(cpu, blocks={"eager": 1.5 * sum(block_forecast(cpu))})], host_bytes=2**33)
    assert busy.device == plain.device
    assert busy.errors.compute == 0.3


def test_a_blocks_weights_are_cast_both_ways() -> None:
    weights = 2 * 2048**2 + 2 * 512 * 2048 + 3 * 8192 * 2048 + 2 * 2048
    casts = [task for task in block_tasks(WHOLE_BLOCKS["cuda"], on_gpu=True) if task.name == "cast"]
    assert [task.moved_bytes for task in casts] == [6 * weights, 6 * weights]
    assert sum(task.name == "cast" for task in block_tasks(WHOLE_BLOCKS["cpu"], on_gpu=False)) == 0


def test_a_kind_whose_times_do_not_grow_is_as_fast_as_the_others() -> None:
    good = [(n, 1e-4 + bus_bytes("all_gather", n, 2) / 2e9) for n in SIZES]
    noise = [(n, 4e-3 / (1 + place)) for place, n in enumerate(SIZES)]
    found = fit_links({"all_reduce": noise, "all_gather": good}, 2, shared=True)
    assert found.bytes_per_second == pytest.approx(2e9, rel=1e-6)
    assert found.fractions == {"all_gather": pytest.approx(1.0), "all_reduce": pytest.approx(1.0)}
    reading = replace(H200, links={"all_reduce": tuple(noise), "all_gather": tuple(good)})
    # 4 ms x (1 + 1/2 + 1/3 + 1/4 + 1/5) = 9.1 ms were measured; 5 x 0.1 ms + 10.8 MB / (2 GB/s) = 5.9 ms are said.
    assert assemble([reading, reading], host_bytes=10**11).errors.inner == pytest.approx(0.55, abs=0.02)
