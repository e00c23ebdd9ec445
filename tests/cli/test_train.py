"""`mw train` end to end: real processes, real files, resumed, re-cut, damaged, stopped and killed.

Tests of `runtime/rank.py`, `runtime/trainer.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import RUN, clean_environment, losses, mw, write_plan, write_run
from safetensors import safe_open

from meshwright.checkpoint.step_folders import list_steps, newest_good

REPLICATE = {"name": "replicate", "size": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps that nothing interrupted, with checkpoints at 4 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    changes = ("--set", "train.sample_every=4", "--set", "train.sample_tokens=8", "--set", "train.sample_prompt=the")
    done = mw("train", write_run(folder), "--plan", write_plan(folder, REPLICATE), *changes)
    assert done.returncode == 0, done.stderr
    (folder / "told.txt").write_text(done.stderr, encoding="utf-8")
    return folder


def copy_at_step_four(finished: Path, folder: Path) -> str:
    """The same run as if it had been interrupted after its first checkpoint."""
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000008")
    return write_run(folder)


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    """Every saved piece by its place in the manifest, as raw bytes."""
    place = folder / "run" / "checkpoints" / f"step-{step:08d}"
    manifest = json.loads((place / "manifest.json").read_text())
    found = {}
    for piece in manifest["pieces"]:
        with safe_open(place / piece["file"], framework="numpy") as file:
            found[f"{piece['tensor']}{piece['offset']}"] = file.get_tensor(piece["key"]).tobytes()
    return found


def test_a_run_leaves_metrics_events_checkpoints_and_both_timelines(finished: Path) -> None:
    run = finished / "run"
    assert sorted(losses(run)) == list(range(1, 9))
    assert losses(run)[8] < losses(run)[1]
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    for name in ("predicted", "measured"):
        timeline = json.loads((run / f"{name}.timeline.json").read_text())
        assert timeline["source"] == name
        assert timeline["spans"]
        assert json.loads((run / f"{name}.trace.json").read_text())["traceEvents"]
    assert {span["device"] for span in timeline["spans"]} == {0, 1}
    assert "measured: " in (run / "timeline.svg").read_text(encoding="utf-8")
    assert "timeline: a step of " in (finished / "told.txt").read_text(encoding="utf-8")
    listed = mw("ckpt", "list", str(run))
    assert listed.returncode == 0
    assert "complete" in listed.stdout
    assert mw("ckpt", "verify", str(run)).returncode == 0


def test_the_end_of_a_run_is_told_and_kept_as_data(finished: Path) -> None:
    run, told = finished / "run", (finished / "told.txt").read_text(encoding="utf-8")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["step"], summary["steps_now"], summary["steps"], summary["stopped"]) == (8, 8, 8, False)
    assert (summary["counts"], summary["seen_now"], summary["samples_in_all"]) == ("tokens", 8 * 4 * 32, 32)
    assert summary["loss"] == losses(run)[8]
    assert summary["held_out"]["held_out_bits_per_byte"] > 0
    assert summary["checkpoints"] == [4, 8]
    names = {"step_seconds", "tokens_per_second", "mfu", "peak_bytes"}
    assert names == set(summary["measured"]) == set(summary["predicted"])
    rates = [summary[side]["mfu"] / summary[side]["tokens_per_second"] for side in ("measured", "predicted")]
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0] > 0
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert row["mfu"] / row["tokens_per_second"] == pytest.approx(rates[0])
    for words in ("forecast", "8 steps, 1.02 k tokens in ", f"loss {summary['loss']:.4f}", "checkpoints kept: 4, 8"):
        assert words in told
    comparison = summary["comparison"]
    # Eight steps: three to warm up, one profiled.
    assert (comparison["facts"]["num_measured"], comparison["facts"]["num_left_out"]) == (4, 4)
    assert all(f"\n{line}\n" in told for line in comparison["lines"])
    assert comparison["text"] == " ".join(comparison["lines"])
    assert "over only 4 steps (left out: the first 3, warming up, and 1 profiled)" in comparison["text"]
    assert comparison["ratio"] == summary["measured"]["step_seconds"] / summary["predicted"]["step_seconds"]
    assert json.loads((run / "comparison.json").read_text())["comparison"] == comparison
    assert f"next: mw check {finished / 'run.toml'}" in told
    assert f"mw ckpt export {run} OUT" in told


def test_samples_are_shown_and_kept(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [(4, "the"), (8, "the")]
    assert all(row["text"].startswith("the") and len(row["text"]) <= 11 for row in rows)
    told = [line for line in (finished / "told.txt").read_text().splitlines() if " sample: " in line]
    assert [line.split(" sample: ")[0] for line in told] == ["step 4", "step 8"]


def test_images_are_counted_in_samples_and_cannot_be_sampled(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (40, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=rng.integers(0, 3, 40))
    text = RUN.replace("byte-tiny", "vit-b").replace("corpus.txt", "images.npz").replace("sequence = 32\n", "")
    change = (
        "num_layers=1, hidden_size=16, num_heads=2, ffn_size=16, image_size=8, patch_size=4, channels=1, num_classes=3"
    )
    path = write_run(tmp_path, text.replace('"vit-b"', f'"vit-b"\nchange = {{{{ {change} }}}}'))
    plan = write_plan(tmp_path, REPLICATE)
    refused = mw("train", path, "--plan", plan, "--set", "train.sample_every=2")
    assert refused.returncode == 2, refused.stderr
    assert "train.sample_every: the data holds images without a tokenizer" in refused.stderr
    done = mw("train", path, "--plan", plan, "--set", "train.steps=4")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stderr
    assert "4 steps, 16 samples in " in done.stderr
    assert "% right" in done.stderr
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["samples_per_second"] > 0


def test_a_tracker_that_is_missing_is_told_before_anything_else(tmp_path: Path) -> None:
    missing = [name for name in ("wandb", "mlflow", "trackio") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("all trackers are installed")
    done = mw("train", write_run(tmp_path), "--set", f"run.track={json.dumps(missing)}")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"mw train: run.track: {name} is not installed. Run: pip install 'meshwright[track]'" for name in missing
    ]
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(finished: Path, tmp_path: Path) -> None:
    path = copy_at_step_four(finished, tmp_path)
    done = mw("train", path, "--plan", write_plan(tmp_path, REPLICATE))
    assert done.returncode == 0, done.stderr
    assert "resuming from step 4" in done.stderr
    assert "too few steps to compare with the forecast" in done.stderr
    assert not (tmp_path / "run" / "comparison.json").exists(), "the earlier start's would be taken for this one's"
    assert losses(tmp_path / "run") == losses(finished / "run")
    assert tensors(tmp_path, 8) == tensors(finished, 8)


@pytest.mark.parametrize(
    "techniques",
    [
        ({"name": "tensor", "size": 2, "sequence": True},),
        ({"name": "pipeline", "size": 2}, {"name": "shard", "size": 2}),
        (),
    ],
    ids=["tensor", "pipeline+shard", "one rank"],
)
def test_a_run_resumes_under_another_plan_and_number_of_ranks(
    finished: Path, tmp_path: Path, techniques: tuple[dict[str, object], ...]
) -> None:
    path = copy_at_step_four(finished, tmp_path)
    ranks = 2 ** len(techniques)
    plan = write_plan(tmp_path, *techniques)
    done = mw("train", path, "--plan", plan, "--set", f"run.ranks={ranks}")
    assert done.returncode == 0, done.stderr
    there, before = losses(tmp_path / "run"), losses(finished / "run")
    assert there.keys() == before.keys()
    # float32 sums in another order: a few units in the last place, grown over four steps
    assert all(abs(there[step] - before[step]) < 2e-5 * before[step] for step in before)


def test_gathered_layers_are_put_back_before_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    """Evaluation leaves layers of stage 2 gathered; a checkpoint written then once had whole parameters as pieces."""
    path = write_run(tmp_path)
    plan = write_plan(tmp_path, {"name": "shard", "size": 2, "stage": 2})
    done = mw("train", path, "--plan", plan, "--set", "train.evaluate_every=2", "--set", "train.save_every=2")
    assert done.returncode == 0, done.stderr
    there, before = losses(tmp_path / "run"), losses(finished / "run")
    assert all(abs(there[step] - before[step]) < 2e-5 * before[step] for step in before)
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0


def test_a_damaged_checkpoint_is_passed_over_with_a_message(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "run" / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 1
    path = write_run(tmp_path)
    done = mw("train", path, "--plan", write_plan(tmp_path, REPLICATE))
    assert done.returncode == 0, done.stderr
    assert "step-00000008 is damaged" in done.stderr, "its last step being there says nothing of its bytes"
    assert "resuming from step 4" in done.stderr


def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    plan = write_plan(tmp_path, REPLICATE)
    wild = ("train.optimizer.lr=1e30", "train.optimizer.warmup=0", "train.save_every=1", "train.optimizer.clip=0.0")
    done = mw("train", path, "--plan", plan, *(word for change in wild for word in ("--set", change)))
    assert done.returncode == 1, done.stderr
    assert "this step was not taken" in done.stderr
    assert "Traceback" not in done.stderr
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0


def test_another_seed_or_optimizer_is_refused_on_resume(finished: Path, tmp_path: Path) -> None:
    path = copy_at_step_four(finished, tmp_path)
    changes = ("--set", "train.seed=7", "--set", "train.optimizer.name=sgd")
    done = mw("train", path, "--plan", write_plan(tmp_path, REPLICATE), *changes)
    assert done.returncode == 2, done.stderr
    assert "train.seed changed" in done.stderr
    assert "another optimizer" in done.stderr


def test_a_finished_run_says_so(finished: Path) -> None:
    done = mw("train", str(finished / "run.toml"))
    assert done.returncode == 0
    assert "raise train.steps" in done.stderr


def test_changed_data_is_refused_on_resume(finished: Path, tmp_path: Path) -> None:
    path = copy_at_step_four(finished, tmp_path)
    (tmp_path / "corpus.txt").write_text("something else entirely. " * 400)
    done = mw("train", path, "--plan", write_plan(tmp_path, REPLICATE))
    assert done.returncode == 2
    assert "data: is not what this run was trained with so far: corpus.txt changed." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run that has made its first steps."""
    path = write_run(tmp_path)
    plan = write_plan(tmp_path, {"name": "pipeline", "size": 2})
    words = ["train", path, "--plan", plan, "--set", "train.steps=100000", "--set", "train.save_every=0"]
    words += ["--set", "train.save_minutes=0.01", "--set", "run.restarts=0"]
    started = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size > 1000):
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    yield started
    started.kill()
    started.communicate()


def children_of(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def ranks_of(command: int) -> list[int]:
    (supervisor,) = children_of(command)
    return children_of(supervisor)


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_signal_saves_and_exits_75(running: subprocess.Popen[str], tmp_path: Path) -> None:
    ranks = ranks_of(running.pid)
    assert len(ranks) == 2
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 75, errors
    assert "the same command goes on" in errors
    assert mw("ckpt", "verify", str(tmp_path / "run")).returncode == 0
    assert gone(ranks)


def test_a_rank_that_dies_mid_pipeline_ends_all_with_one_message(running: subprocess.Popen[str]) -> None:
    ranks = ranks_of(running.pid)
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 1
    told = [line for line in errors.splitlines() if line.startswith("mw train:")]
    assert len(told) == 1, errors
    assert "rank 1 of 2 was killed by SIGKILL" in told[0]
    assert "Traceback" not in errors
    assert gone(ranks)


def test_killing_the_command_leaves_a_checkpoint_and_no_orphans(running: subprocess.Popen[str], tmp_path: Path) -> None:
    """Saved by time, since no number of steps is given."""
    ranks = ranks_of(running.pid)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not list_steps(tmp_path / "run" / "checkpoints"):
        time.sleep(0.1)
    running.kill()
    assert gone(ranks)
    assert newest_good(tmp_path / "run" / "checkpoints", report=print) is not None


def test_a_second_run_in_the_folder_is_refused(running: subprocess.Popen[str], tmp_path: Path) -> None:
    done = mw("train", str(tmp_path / "run.toml"))
    assert done.returncode == 2
    assert f"in use by process {running.pid}" in done.stderr


def test_inside_torchrun_rank_zero_plans_for_all(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "meshwright.cli.main", "train", path],
        capture_output=True,
        text=True,
        timeout=600,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(losses(tmp_path / "run")) == list(range(1, 9))
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["techniques"]
