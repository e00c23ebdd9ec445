"""metrics.jsonl: each line whole or absent, none of a step that runs again, and a resume reads only the end of it.

Tests of `ops/traffic.py`, `runtime/run_record.py`.
"""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from meshwright.runtime.run_record import Lines


def lines_of(steps: range) -> bytes:
    return b"".join(b'{"step": %d, "loss": 1.5}\n' % step for step in steps)


def opened(path: Path, last_step: int) -> list[str]:
    said: list[str] = []
    Lines(path, last_step, said.append).close()
    return said


@pytest.mark.parametrize(
    ("before", "last_step", "after"),
    [
        (lines_of(range(1, 9)), 4, lines_of(range(1, 5))),
        (lines_of(range(1, 9)), 8, lines_of(range(1, 9))),
        (lines_of(range(1, 9)), 0, b""),
        (b"", 4, b""),
        (b"\n\n", 4, b""),
        (lines_of(range(1, 5)) + b'{"step": 5, "lo', 8, lines_of(range(1, 5))),
        (lines_of(range(1, 5)) + b'{"step": 4}', 8, lines_of(range(1, 5))),
        (lines_of(range(1, 3)) + b"\xff\x00\n[]\n{}\n" + lines_of(range(3, 6)), 2, lines_of(range(1, 3))),
        (b"no step\n" + lines_of(range(1, 3)), 1, b"no step\n" + lines_of(range(1, 2))),
        (lines_of(range(1, 3)) + b"x" * 300_000 + b"\n" + lines_of(range(3, 20_000)), 2, lines_of(range(1, 3))),
    ],
    ids=["resume", "all", "anew", "empty", "blank", "torn", "no end", "foreign", "foreign first", "long"],
)
def test_lines_of_steps_that_run_again_and_torn_ones_go(
    before: bytes, last_step: int, after: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    assert opened(path, last_step) == []
    assert path.read_bytes() == after


def test_a_resume_reads_the_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines_of(range(1, 400_001)))
    tracemalloc.start()
    opened(path, 399_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20 < path.stat().st_size
    assert path.read_bytes().endswith(b'{"step": 399000, "loss": 1.5}\n')


def test_a_full_disk_tears_no_line_and_loses_none_that_it_later_has_room_for(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "metrics.jsonl"
    lines = Lines(path, 0, said.append)
    with files_of_at_most(1000):
        for step in range(1, 100):
            lines.write({"step": step})
            assert path.read_bytes().endswith(b"}\n")
    lines.write({"step": 100})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 101))
    assert len(said) == 1


def test_a_link_is_refused_by_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(victim)
    (said,) = opened(tmp_path / "metrics.jsonl", 0)
    assert "metrics.jsonl: is a symbolic link" in said
    assert victim.read_text() == "mine"
