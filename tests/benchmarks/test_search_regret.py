"""What picking by forecast costs, on made-up sweeps: every number below is worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.published_plans import Case, Guess
from benchmarks.published_rows import Row
from benchmarks.published_scores import ScoredPlan, score
from benchmarks.search_regret import report, table

SMALL = {
    "file": "vtrain_measured",
    "hardware": "A100-SXM4-80GB",
    "gpu_mem_gb": "80",
    "gpus": "8",
    "gpus_per_node": "8",
    "model": "Llama small",
    "family": "llama",
    "layers": "4",
    "hidden": "256",
    "heads": "8",
    "ffn": "512",
    "vocab": "1024",
    "seq_len": "128",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "zero_stage": "0",
    "recompute": "none",
    "precision": "bf16",
    "status": "ok",
}


def a_second_each(case: Case) -> Guess:
    """For each sample of a microbatch; everything fits."""
    plan = case.plans[0]
    seconds = float(plan.microbatch)
    return Guess(
        step_seconds=seconds, low_seconds=0.0, high_seconds=9.0, allocated_bytes=1.0, fits=True, plan=str(plan)
    )


def scored(*cells: tuple[int, int, float | None]) -> list[ScoredPlan]:
    """(batch, microbatch, measured seconds; None: out of memory)."""
    rows = []
    for number, (batch, microbatch, seconds) in enumerate(cells):
        told = {"step_time_s": str(seconds)} if seconds else {"step_time_s": "", "status": "oom"}
        facts = {"row_id": str(number), "global_batch": str(batch), "micro_batch": str(microbatch), **told}
        rows.append(Row({**SMALL, **facts}))
    return score(rows, a_second_each)


def test_regret_of_the_pick_and_what_explains_it() -> None:
    # We say 2, 4, 8 s; the best is the second. Both sweeps are wrong in the same way, so each explains the other.
    found = report(scored((64, 2, 4.0), (64, 4, 3.2), (64, 8, 10.0), (128, 2, 8.0), (128, 4, 6.4), (128, 8, 20.0)))
    assert (found["groups"], found["mean"], found["worst"]) == (2, pytest.approx(0.25), pytest.approx(0.25))
    (source,) = found["sources"].values()
    assert (source["best_picked"], source["out_of_memory_picked"]) == (0, 0)
    first = found["worst_groups"][0]
    assert (first["picked"]["forecast_seconds"], first["best"]["forecast_seconds"]) == (2.0, 4.0)
    assert first["differ_in"] == ["microbatch"]
    cause = found["causes"]["vtrain_measured"][0]
    assert (cause["setting"], cause["regret_left"]) == ("microbatch", pytest.approx(0.0))
    assert cause["regret_gone"] == pytest.approx(0.25)
    # Forecast over measured: 1/2, 5/4, 4/5. Their geometric mean is 2^(-1/3), and the second is 5/4 x 2^(1/3) of it.
    assert cause["errors"]["4"] == {"error": pytest.approx(1.25 * 2 ** (1 / 3) - 1), "rows": 2}
    assert "MISSED" in table(found)


def test_an_error_that_all_plans_share_costs_nothing() -> None:
    found = report(scored((64, 2, 1.0), (64, 4, 2.0), (64, 8, 4.0)))
    assert found["mean"] == 0.0
    assert "kept" in table(found)


def test_a_pick_that_ran_out_of_memory_is_counted() -> None:
    found = report(scored((64, 1, None), (64, 2, 1.0), (64, 4, 2.0), (64, 8, 4.0)))
    assert found["sources"]["vtrain_measured"]["out_of_memory_picked"] == 1
    assert found["mean"] == 0.0


def test_nothing_to_pick_from() -> None:
    assert table(report(scored((64, 2, 1.0), (64, 4, 2.0)))) == "no sweep: nothing to pick from"
