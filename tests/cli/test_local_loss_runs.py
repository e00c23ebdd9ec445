"""A run of groups with losses of their own, end to end: trained in two stages, gone on with on one device, exported.

Tests of `techniques/local_loss.py`, `hf/weights_import_export.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import losses, mw, write_plan, write_run
from safetensors import safe_open

LOCAL = {"name": "local_loss"}


@pytest.mark.slow
def test_groups_train_in_stages_and_go_on_on_one_device(tmp_path: Path) -> None:
    changes = ("model.change={ local_heads = 1 }", "plan.allow=approximate", "train.steps=4", "train.save_every=2")
    words = [word for change in changes for word in ("--set", change)]
    plan = write_plan(tmp_path, LOCAL, {"name": "pipeline", "size": 2})
    done = mw("train", write_run(tmp_path), "--plan", plan, *words)
    assert done.returncode == 0, done.stderr
    assert "local_loss() is approximate" in done.stderr
    more = mw("train", write_run(tmp_path), "--plan", write_plan(tmp_path, LOCAL), *words, "--set", "train.steps=6")
    assert more.returncode == 0, more.stderr
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert mw("ckpt", "export", str(tmp_path / "run"), str(tmp_path / "out")).returncode == 0
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as exported:
        names = set(exported.keys())
    assert "model.norm.weight" in names
    assert not any("local" in name for name in names)
