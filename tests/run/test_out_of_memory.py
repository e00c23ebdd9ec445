"""A step that runs out of memory: what the rank held, and plans that need less.

Tests of `run/out_of_memory.py`, `runtime/out_of_memory.py`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import RUN, losses, write_plan, write_run
from sanity_jobs import Poisoned
from torch import nn

from meshwright.core.codec import load_artefact
from meshwright.core.errors import MeshwrightError, error_at
from meshwright.core.plan import Plan
from meshwright.launch.failure import error_as_json, failure_from_error
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.run.out_of_memory import CATEGORIES, FOLDER, MemoryFailure, PostMortem, examine, failure_of
from meshwright.run.run import Run
from meshwright.run.run_file import read_run
from meshwright.runtime.out_of_memory import held_bytes, is_out_of_memory, out_of_memory, saved_by
from meshwright.simulator.forecast import forecast

MIB = 1 << 20
CPU = torch.device("cpu")


def failed_allocation() -> BaseException:
    """Of 16 TiB, which the kernel refuses."""
    try:
        torch.empty(1 << 44, dtype=torch.uint8)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has 16 TiB")


def test_failed_allocations_are_told_from_other_errors() -> None:
    error = failed_allocation()
    assert is_out_of_memory(error)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert is_out_of_memory(error_at("train.memory_cap", "is 1 GiB"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(error_at("train.batch", "is 0"))
    told = out_of_memory(error, 1, 2, CPU, 0, None)
    crossed = failure_from_error(1, json.loads(json.dumps(error_as_json(told))), None)
    failure = failure_of(crossed.facts)
    assert failure is not None
    assert (failure.asked_bytes, failure.action, failure.rank) == (1 << 44, "start", 1)
    assert failure_of(failure_from_error(0, error_as_json(ValueError("x")), None).facts) is None
    assert sum(held_bytes(error, CPU, 0).values()) > 10 * MIB, "what this process holds"


def test_what_autograd_saves_is_counted_as_its_hooks_see_it() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8), nn.Softmax(-1))
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hooked = model(torch.randn(16, 32))
    output = model(torch.randn(16, 32))
    found = {each.data_ptr(): each.nbytes() for each in (t.untyped_storage() for t in saved_by([output]))}
    assert sorted(found.values()) == sorted(seen.values())
    assert sorted(t.untyped_storage().nbytes() for t in saved_by([hooked]) if t.numel()) != []
    output.sum().backward()
    assert list(saved_by([output])) == [], "backward has freed them"


@pytest.fixture
def failing(tmp_path: Path) -> tuple[Any, Plan, MemoryFailure]:
    text = RUN.replace('"byte-tiny"', '"byte-3m"').replace("batch = 4", "batch = 256").replace("= 32", "= 64")
    config = read_run(write_run(tmp_path, text))
    (tmp_path / "run").mkdir()
    plan = load_artefact(Plan, write_plan(tmp_path, {"name": "replicate", "size": 2}, microbatch=128, batch=256))
    held = dict(zip(CATEGORIES, (12 * MIB, 12 * MIB, 23 * MIB, 430 * MIB, 130 * MIB, 283 * MIB), strict=True))
    about: dict[str, Any] = {"rank": 1, "num_ranks": 2, "stage": 0, "step": 7, "action": "forward 0"}
    return config, plan, MemoryFailure(**about, asked_bytes=64 * MIB, held_bytes=held)


def test_fixes_need_less_by_as_much_as_the_forecast_was_wrong(failing: tuple[Any, Plan, MemoryFailure]) -> None:
    config, plan, failure = failing
    machine, model = cluster("2xlaptop"), profile("byte-3m")
    found = examine(config, model, machine, plan, failure, ["mw", "train", "RUN.toml"])
    expected = forecast(model, plan, machine, sequence=64, optimizer=config.train.optimizer)
    assert sum(found.predicted_bytes.values()) == pytest.approx(expected.peak_bytes, abs=len(CATEGORIES))
    assert found.usable_bytes <= sum(failure.held_bytes.values())
    assert found.usable_bytes < expected.peak_bytes
    kinds = [fix.kind for fix in found.fixes]
    assert len(kinds) == 3
    assert len(set(kinds)) == 3
    assert "a smaller microbatch" in kinds
    assert [fix.step_seconds for fix in found.fixes] == sorted(fix.step_seconds for fix in found.fixes)
    folder = Path(config.run.folder) / FOLDER
    for number, fix in enumerate(found.fixes, start=1):
        again = forecast(model, fix.plan, machine, sequence=64, optimizer=config.train.optimizer)
        assert (again.peak_bytes, again.step_seconds) == (fix.peak_bytes, fix.step_seconds)
        assert fix.peak_bytes <= found.usable_bytes
        assert fix.plan.batch == plan.batch
        assert load_artefact(Plan, folder / f"fix-{number}.plan.json") == fix.plan
        assert fix.command == ("mw", "train", "RUN.toml", "--plan", str(folder / f"fix-{number}.plan.json"))
    assert load_artefact(PostMortem, folder / "report.json") == found
    text = (folder / "report.txt").read_text()
    assert "rank 1 of 2 ran out of memory in step 7, at forward 0 of stage 0: it held 890.0 MiB and needed 64.0" in text
    assert all(name in text for name in CATEGORIES)


def test_where_nothing_is_smaller_the_report_says_so(failing: tuple[Any, Plan, MemoryFailure]) -> None:
    config, plan, failure = failing
    tiny = MemoryFailure(**{**vars(failure), "held_bytes": {"other": 10 * MIB}})
    plan = replace(plan, microbatch=1)
    found = examine(config, profile("byte-3m"), cluster("2xlaptop"), plan, tiny, ["mw", "train", "RUN.toml"])
    assert found.fixes == ()
    assert "No plan for these ranks is expected to fit" in found.text()


@pytest.mark.slow
def test_a_run_says_what_it_held_and_goes_on_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(__file__).parents[1] / name) for name in ("runtime", "parity")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    path = write_run(tmp_path, RUN.replace('name = "byte-tiny"', 'factory = "sanity_jobs:hungry"'))
    large = write_plan(tmp_path, {"name": "replicate", "size": 2}, microbatch=2)
    told: list[str] = []
    with Run(path, plan=large, changes=["train.save_every=2"], report=told.append) as run:
        run.start()
        with pytest.raises(MeshwrightError, match="ran out of memory in step 4, at forward 0 of stage 0"):
            run.result()
    assert run.post_mortem is not None
    failure = run.post_mortem.failure
    assert failure.asked_bytes >= 1 << 44
    assert failure.held_bytes["parameters"] == 4 * sum(p.numel() for p in Poisoned().parameters())
    assert failure.held_bytes["optimizer"] >= 2 * failure.held_bytes["parameters"]
    assert failure.held_bytes["activations"] >= 2 * 32 * 16 * 4, "of the forward that failed"
    assert "1. " in "\n".join(told)
    (smaller,) = (fix for fix in run.post_mortem.fixes if fix.kind == "a smaller microbatch")
    with Run(path, plan=smaller.command[-1], changes=["train.save_every=2"]) as again:
        assert again.start().result().exit_code == 0
    assert sorted(losses(tmp_path / "run")) == list(range(1, 9))
