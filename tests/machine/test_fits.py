"""Fits find the machine that timings were made of, and say how far single timings are from it."""

from __future__ import annotations

import math

import pytest

from meshwright.core.cluster import Device
from meshwright.machine.fits import bus_bytes, fit_attention, fit_links, fit_matmuls, fit_traffic, line, nine_in_ten

PEAK = 1e15
PLAIN = Device(
    kind="cuda",
    memory_bytes=10**11,
    memory_bytes_per_second=4e12,
    flops_per_second={"fp32": 6e13, "bf16": PEAK},
    num_processors=100,
    bandwidth_fraction=1.0,
)


def exact_shape(m: float, n: float, k: float, fraction: float, k_half: float) -> tuple[float, float, float, float]:
    """Of 256 x 128 tiles in whole waves of 100: m n is a multiple of 100 tiles, so nothing is lost to the last one."""
    assert (m / 256) * (n / 128) % 100 == 0
    return m, n, k, 2 * m * n * k / (PEAK * fraction) * (k + k_half) / k


SHAPES = [(2560 * a, 1280 * b, k) for a, b in ((1, 1), (2, 1), (1, 4)) for k in (512, 1024, 4096, 16384)]


def test_matmuls_give_back_the_asymptote_and_the_ramp() -> None:
    points = [exact_shape(m, n, k, 0.8, 300.0) for m, n, k in SHAPES]
    found = fit_matmuls(points, PLAIN, "bf16", 2)
    assert found.fields["matmul_fraction"] == pytest.approx(0.8, rel=1e-6)
    assert found.fields["k_half"] == pytest.approx(300.0, rel=1e-4)
    assert {round(each[3], 6) for each in found.fields["residuals"]} == {1.0}
    assert found.scatter_fraction == pytest.approx(0.0, abs=1e-6)


def test_a_shape_without_a_good_kernel_is_kept_in_the_table_alone() -> None:
    points = [exact_shape(m, n, k, 0.8, 300.0) for m, n, k in SHAPES]
    m, n, k, seconds = points[5]
    points[5] = (m, n, k, 3 * seconds)
    found = fit_matmuls(points, PLAIN, "bf16", 2)
    assert found.fields["matmul_fraction"] == pytest.approx(0.8, rel=1e-3)
    assert found.fields["residuals"][5][3] == pytest.approx(3.0, rel=1e-2)
    assert sum(each[3] > 1.1 for each in found.fields["residuals"]) == 1
    assert found.scatter_fraction > 0.1, "its neighbours say another thing of it"


def test_shapes_that_wait_for_memory_say_nothing_of_arithmetic() -> None:
    points = [exact_shape(m, n, k, 0.8, 300.0) for m, n, k in SHAPES]
    # 2560 x 1280 outputs of 2 inputs each: 6.6 MB at 4 TB/s.
    small = (2560.0, 1280.0, 2.0, 2 * (2560 * 1280 + 2 * 1280 + 2 * 2560) / 4e12)
    found = fit_matmuls([*points, small], PLAIN, "bf16", 2)
    assert len(found.fields["residuals"]) == len(points)
    assert found.fields["matmul_fraction"] == pytest.approx(0.8, rel=1e-6)


def test_attention_gives_back_both_ways_the_ramp_and_small_heads() -> None:
    def rates(size: float, tokens: float) -> tuple[float, float, float, float]:
        reached = PEAK * tokens / (tokens + 400) * (0.75 if size == 64 else 1.0)
        return size, tokens, 0.6 * reached, 0.4 * reached

    found = fit_attention([rates(size, tokens) for size in (64, 128) for tokens in (512, 2048, 16384)], PEAK)
    assert (found.fields["attention_fraction"], found.fields["attention_backward_fraction"]) == (
        pytest.approx(0.6),
        pytest.approx(0.4),
    )
    assert found.fields["attention_half_tokens"] == pytest.approx(400, rel=1e-6)
    assert found.fields["small_head_fraction"] == pytest.approx(0.75)
    assert found.scatter_fraction < 1e-6


def test_one_length_of_attention_has_no_ramp() -> None:
    found = fit_attention([(64.0, 512.0, 0.3 * PEAK, 0.2 * PEAK)], PEAK)
    assert (
        found.fields["attention_fraction"],
        found.fields["attention_backward_fraction"],
        found.fields["attention_half_tokens"],
    ) == (pytest.approx(0.3), pytest.approx(0.2), 0.0)


def test_traffic_gives_back_its_rate_and_half() -> None:
    sizes = (2**20, 2**24, 2**28, 2**31)
    found = fit_traffic([("copy", size, (size + 8e6) / 3.9e12) for size in sizes])
    assert found.bytes_per_second == pytest.approx(3.9e12, rel=1e-6)
    assert found.half_bytes == pytest.approx(8e6, rel=1e-6)
    one = fit_traffic([("copy", 2e9, 1.0), ("add", 2e9, 0.5), ("norm", 2e9, 0.8)])
    assert (one.bytes_per_second, one.half_bytes) == (2.5e9, 0.0)


def test_nine_in_ten() -> None:
    assert nine_in_ten([1.0] * 9 + [5.0]) == 0.0
    assert nine_in_ten([1.0] * 8 + [0.5, 5.0]) == pytest.approx(1.0), "half is as far off as twice"
    assert nine_in_ten([]) == 0.0


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


@pytest.mark.parametrize(("ranks", "half"), [(2, 0.0), (8, 0.0), (2, 3e5), (8, 3e5)])
def test_links_give_back_each_kinds_share(ranks: int, half: float) -> None:
    shares = dict(zip(KINDS, (0.8, 0.7, 0.6, 0.5, 1.0), strict=True))
    points = {
        kind: [(n, 2e-5 + (bus_bytes(kind, n, ranks) + half) / (3e11 * share)) for n in (2**12, 2**18, 2**24, 2**28)]
        for kind, share in shares.items()
    }
    found = fit_links(points, ranks, shared=False)
    assert found.bytes_per_second == pytest.approx(3e11, rel=1e-6)
    assert found.latency_seconds == pytest.approx(2e-5, rel=1e-4)
    assert found.half_bytes == pytest.approx(half, rel=1e-3, abs=1.0)
    assert found.fractions == pytest.approx(shares, rel=1e-6)
    by_sheet = fit_links(points, ranks, shared=False, sheet_bytes_per_second=4.5e11)
    assert by_sheet.bytes_per_second == 4.5e11
    assert by_sheet.fractions["send"] == pytest.approx(3 / 4.5, rel=1e-6)


def test_what_a_rank_passes_on() -> None:
    assert [bus_bytes(kind, 8.0, 4) for kind in KINDS] == [12.0, 6.0, 6.0, 6.0, 8.0]


def test_a_line_of_one_place_is_flat() -> None:
    assert line([(3.0, 2.0), (3.0, 2.0)]) == (pytest.approx(2.0), 0.0)
    assert math.isclose(line([(1.0, 5.0), (2.0, 4.0)])[1], 0.0), "never falls"
