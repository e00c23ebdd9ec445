"""What `make gpu-test` runs, at small sizes and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXACT = [1, 2, 4, 8, "2, documents", "4, documents"]
"""Rings, in float64."""


def test_the_pieces_equal_the_whole_at_small_sizes(tmp_path: Path) -> None:
    file = tmp_path / "pieces.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "pieces", "--tiny", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    rows = {name: found[name]["rows"] for name in ("matmul", "context", "experts", "halves")}
    assert {name: len(each) for name, each in rows.items()} == {"matmul": 20, "context": 14, "experts": 4, "halves": 2}
    assert [row["n"] for row in rows["context"] if row.get("error", 1.0) < 1e-14] == EXACT
