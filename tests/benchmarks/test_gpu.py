"""The GPU benchmark at small sizes on a CPU: every command runs, and one side's failure is one line of the result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import bench_row, bench_table, errors_of, summary, verdict
from benchmarks.gpu_cases import ROWS, SEEN, SMOKE
from benchmarks.gpu_child import category_of
from benchmarks.gpu_page import page

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    file = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.gpu", *words, "--tiny", "--steps", "2", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert file.exists(), done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


def test_a_row_of_the_table_runs_with_its_peer(tmp_path: Path) -> None:
    result, shown = run(tmp_path, "bench", "--only", "byte-tiny", "--repeats", "2", "--kernels")
    (row,) = result["rows"]
    assert row["best_peer"] == "nanogpt"
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    assert {len(side["blocks"]) for side in row["sides"].values()} == {2}
    assert row["sides"]["ours"]["milliseconds_by_category"]["idle gaps"] >= 0
    assert "of nanogpt" in shown


@pytest.mark.slow
def test_a_side_that_fails_or_is_absent_is_one_line(tmp_path: Path) -> None:
    result, shown = run(tmp_path, "bench", "--only", "byte-tiny without memory or package", "--repeats", "1")
    sides = result["rows"][0]["sides"]
    assert "no peer is called absent" in sides["absent"]["absent"]
    assert "invalid for input" in sides["nanogpt"]["failed"]
    assert sides["ours"]["blocks"]
    assert "failed: RuntimeError" in shown


@pytest.mark.slow
def test_forecasts_run_at_small_sizes_and_are_made_again(tmp_path: Path) -> None:
    result, _ = run(tmp_path, "forecast", "--only", "byte-tiny")
    assert [row["name"] for row in result["cases"] if row["measured_seconds"] > 0 and "time_error" in row] == [
        "byte-tiny, 2 x 32",
        "byte-tiny, 4 x 64 in 2",
        "byte-tiny, 2 x 32 of documents",
    ]
    again = [sys.executable, "-m", "benchmarks.gpu", "forecast", "--again", str(tmp_path / "result.json")]
    assert subprocess.run(again, cwd=ROOT, capture_output=True, timeout=120, check=False).returncode == 0


@pytest.mark.slow
def test_ranks_that_share_a_device_are_compared_with_one(tmp_path: Path) -> None:
    result, shown = run(tmp_path, "ranks", "--only", "replicate(size=2)")
    assert [row["problems"] for row in result["rows"]] == [[]] * len(result["rows"])
    assert "plans are equal to one device" in shown


def test_cases_are_plans_that_may_run() -> None:
    names = [case.name for case in (*SEEN, *SMOKE)]
    assert len(set(names)) == len(names)
    for case in (*SEEN, *SMOKE, *(row.ours for row in ROWS)):
        assert case.plan.check(case.describe().profile, None) == ()
    assert len({row.ours.name for row in ROWS}) == len(ROWS)


def test_a_ratio_is_the_median_of_pairs_and_the_fastest_peer_counts() -> None:
    sides = {
        "ours": {"blocks": [1.0, 2.0, 1.0], "tokens": 8, "flops": 1.0, "allocated_bytes": 40 * 2**30},
        "slow": {"blocks": [4.0, 4.0, 4.0]},
        "fast": {"blocks": [1.5, 3.2, 1.2]},
        "none": {"blocks": [], "absent": "no such package"},
    }
    row = bench_row(ROWS[1], sides)
    assert row["best_peer"] == "fast"
    assert row["ratio"] == 1.5
    assert not row["kept"], "40 GiB are more than the row's 33"
    assert "MISSED" in bench_table([row])


def test_the_page_has_the_worst_first_and_says_what_is_open() -> None:
    def row(name: str, ratio: float) -> dict[str, Any]:
        sides = {"ours": {"tokens_per_second": 9e3, "mfu": 0.5, "allocated_bytes": 2**30, "kernels": 7}, "peer": {}}
        sides["ours"]["milliseconds_by_category"] = {"matmul": 2.0, "idle gaps": 0.5}
        told = {"best_peer": "peer", "ratio": ratio, "ratio_low": ratio, "ratio_high": ratio, "kept": ratio >= 1.1}
        return {"name": name, "goal": 1.1, "most_gib": 33.0, "sides": sides, **told}

    case = {"name": "a case", "measured_seconds": 0.1, "time_error": 0.3, "allocated_error": 0.01}
    frozen = {"cases": [case], "summary": summary([case])}
    shown = page({"device": "a GPU", "torch": "2.11", "rows": [row("good", 1.2), row("bad", 0.8)]}, frozen)
    assert shown.index("| bad |") < shown.index("| good |")
    assert "| missed |" in shown
    assert "matmul 2.0" in shown
    assert "30.0% (goal 5%)" in shown
    assert "Not measured yet." in page({}, {})


def test_errors_are_of_what_was_measured() -> None:
    row = {"forecast_seconds": 1.1, "measured_seconds": 1.0, "forecast_low_seconds": 1.05, "forecast_high_seconds": 1.2}
    told = errors_of({**row, "forecast_fits": True})
    assert told["time_error"] == pytest.approx(0.1)
    assert not told["covered"]
    assert summary([{"name": "one", **told}])["time"]["worst_error"] == pytest.approx(0.1)
    assert errors_of({"out_of_memory": True, "forecast_fits": False})["fits_right"]


def test_regret_is_of_the_better_of_our_first_two() -> None:
    rows = [
        {
            "name": f"m: {i}",
            "forecast_fits": True,
            "forecast_seconds": said,
            "measured_seconds": took,
            "visits": [[took]],
        }
        for i, (said, took) in enumerate([(1.0, 1.3), (1.1, 1.2), (1.2, 1.0)])
    ]
    assert verdict("m", rows)["regret"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("kernel", "category"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
        ("triton_red_fused__log_softmax_nll_loss_forward_1", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused__fused_rms_norm_add_3", "norm"),
        ("triton_poi_fused_mul_silu_2", "pointwise"),
        ("Memcpy HtoD (Pageable -> Device)", "memcpy"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution"),
    ],
)
def test_kernels_have_categories(kernel: str, category: str) -> None:
    assert category_of(kernel) == category
