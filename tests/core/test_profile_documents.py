"""Attention inside packed documents: priced by the documents' own squares (`core/profile.py`, `run/prepare.py`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.cli.main import main
from meshwright.core.plan import Plan
from meshwright.data.data_section import DataSection
from meshwright.data.open_data import open_data
from meshwright.machine.named_clusters import cluster
from meshwright.models.presets import profile
from meshwright.run.prepare import document_length
from meshwright.simulator.forecast import forecast
from meshwright.simulator.pricing import price

LLAMA, PLAN = profile("llama3.2-1b"), Plan(techniques=(), batch=1)


def attention_flops(length: int, sequence: int) -> float:
    work = price(LLAMA.with_documents(length), PLAN, sequence=sequence)
    return sum(float(task.flops * task.repeat) for task in work.computes if task.kind == "attention")


def test_attention_costs_the_squares_of_documents() -> None:
    whole = price(LLAMA, PLAN, sequence=8192)
    flops = sum(float(task.flops * task.repeat) for task in whole.computes if task.kind == "attention")
    assert attention_flops(8192, 8192) == pytest.approx(flops)
    assert attention_flops(1024, 8192) == pytest.approx(flops / 8)
    assert attention_flops(1024, 16384) == pytest.approx(flops / 4)
    seconds = [
        forecast(each, PLAN, cluster("h200"), sequence=8192).step_seconds for each in (LLAMA.with_documents(512), LLAMA)
    ]
    assert seconds[0] < 0.9 * seconds[1]


def test_length_is_that_of_the_squares_in_the_rows_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 400)
    section = DataSection(train=str(tmp_path / "text.txt"), sequence=16, packing="documents", held_out_fraction=0.0)
    data = open_data(section, cache=tmp_path)
    documents = np.asarray(data.batch(0, 4).inputs[1])
    lengths = [int((row == each).sum()) for row in documents for each in np.unique(row)]
    assert document_length(data, rows=4) == pytest.approx(sum(n * n for n in lengths) / sum(lengths))


def test_the_flag_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--cluster", "1xh100", "--batch", "8", "--top", "1", "--model"]
    assert main([*words, "resnet-tiny", "--documents", "0"]) == 2
    assert "--documents: is 0" in capsys.readouterr().err
    assert main([*words, "resnet-tiny", "--documents", "8"]) == 2
    assert "no attention over a sequence" in capsys.readouterr().err
