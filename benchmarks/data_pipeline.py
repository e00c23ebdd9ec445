"""Claims: data never waits. One core gives 20 M tokens/s in batches, streamed or packed by documents; five million
documents open in a second; `mw data prepare` turns 50 MB/s of text or JSONL into token files on two cores.

Measured: batches of 32 x 2048 from 200 M mapped uint16 tokens at shuffled places, a second of them at a time; the wall
time of `open_data` in a fresh process with a fresh cache, and of `prepare`, workers started and files on disk. Rates
are told as a ratio to their goal: 1 is 20 M tokens/s, or 50 MB/s.

Run: python -m benchmarks.data_pipeline [--quick] [--json]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.claims import Claim, alone
from meshwright.data.data_section import DataSection
from meshwright.data.dataset import Data
from meshwright.data.open_data import open_data
from meshwright.data.prepare import prepare
from meshwright.data.token_files import write_index

NUM_TOKENS, NUM_DOCUMENTS = 200_000_000, 200_000
SEQUENCE, BATCH = 2048, 32
TOKENS_PER_SECOND, BYTES_PER_SECOND, START_SECONDS = 20e6, 50e6, 1.0
START_SEQUENCE, START_DOCUMENTS = 16, 5_000_000
ROUNDS, PREPARE_BYTES = 5, 400_000_000
OPENED = """
import sys, time
from pathlib import Path
from meshwright.data.data_section import DataSection
from meshwright.data.open_data import open_data
start = time.perf_counter()
section = DataSection(train=sys.argv[1], sequence=int(sys.argv[2]), packing="documents")
data = open_data(section, cache=Path(sys.argv[3]))
data.batch(0, 32)
print(time.perf_counter() - start, data.num_samples)
"""


def write_pair(stem: Path, num_tokens: int, num_documents: int) -> None:
    """Random tokens in documents of random lengths."""
    random = np.random.default_rng(0)
    with open(f"{stem}.bin", "wb") as file:
        for start in range(0, num_tokens, 1 << 24):
            count = min(1 << 24, num_tokens - start)
            file.write(random.integers(0, 50_000, count, dtype=np.uint16).data)
    cuts = np.sort(random.choice(num_tokens - 1, num_documents - 1, replace=False)) + 1
    lengths = np.diff(cuts, prepend=0, append=num_tokens).astype(np.int32)
    with open(f"{stem}.idx", "wb") as file:
        write_index(file, np.dtype("uint16"), [lengths])


def batch_rate(data: Data, seconds: float) -> float:
    """Tokens per second of one process."""
    cursor, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds:
        data.batch(cursor, BATCH)
        cursor += BATCH
    return cursor * SEQUENCE / spent


def batches(folder: Path, quick: bool) -> list[Claim]:
    stem = folder / "tokens"
    write_pair(stem, NUM_TOKENS // (10 if quick else 1), NUM_DOCUMENTS // (10 if quick else 1))
    claims = []
    packings: tuple[Literal["stream", "documents"], ...] = ("stream", "documents")
    for packing in packings:
        section = DataSection(train=f"{stem}.bin", sequence=SEQUENCE, packing=packing)
        data = open_data(section, cache=folder / "cache")
        batch_rate(data, 0.5)  # the files into the disk cache
        rates = [batch_rate(data, 0.2 if quick else 1.0) for _ in range(ROUNDS)]
        what = f"batches of {BATCH} x {SEQUENCE} ({packing}): {max(rates) / 1e6:.0f} M tokens/s at best, goal 20"
        ratios = tuple(rate / TOKENS_PER_SECOND for rate in rates)
        claims.append(Claim(name=packing, what=what, unit="ratio", goal=1.0, measured=ratios))
    return claims


def start(folder: Path, quick: bool) -> list[Claim]:
    stem = folder / "many"
    num_documents = START_DOCUMENTS // (10 if quick else 1)
    write_pair(stem, num_documents * START_SEQUENCE + 1, num_documents)
    seconds = []
    for turn in range(2 if quick else 3):
        command = [sys.executable, "-c", OPENED, f"{stem}.bin", str(START_SEQUENCE), str(folder / f"cache{turn}")]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        assert int(told[1]) == num_documents
        seconds.append(float(told[0]))
    what = f"open {num_documents:,} samples of as many documents, first batch included"
    return [Claim(name="start", what=what, unit="seconds", goal=START_SECONDS, measured=tuple(seconds))]


def prepare_rate(path: Path, output: Path) -> float:
    begin = time.perf_counter()
    prepared = prepare([str(path)], str(output), num_workers=2)
    return prepared.num_bytes / (time.perf_counter() - begin)


def prepared(folder: Path, quick: bool) -> list[Claim]:
    size = PREPARE_BYTES // (10 if quick else 1)
    text = "".join(Path(name).read_text(encoding="utf-8") for name in _sources())
    text *= size // len(text) + 1
    writers: dict[str, Callable[[int], str]] = {
        "text": lambda place: text[place : place + 4000],
        "jsonl": lambda place: json.dumps({"text": text[place : place + 4000]}) + "\n",
    }
    claims = []
    for name, write in writers.items():
        path = folder / f"corpus.{'txt' if name == 'text' else 'jsonl'}"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(write(place) for place in range(0, size, 4000))
        rates = [prepare_rate(path, folder / f"{name}{turn}") for turn in range(3)]
        what = f"mw data prepare, {name}, 2 workers: {max(rates) / 1e6:.0f} MB/s at best, goal 50"
        ratios = tuple(rate / BYTES_PER_SECOND for rate in rates)
        claims.append(Claim(name=f"from {name}", what=what, unit="ratio", goal=1.0, measured=ratios))
    return claims


def _sources() -> list[str]:
    folder = Path(os.__file__).parent
    return sorted(str(path) for path in folder.glob("*.py"))


def measure(quick: bool = False) -> list[Claim]:
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        return [*batches(folder, quick), *start(folder, quick), *prepared(folder, quick)]


def main() -> int:
    claims = measure("--quick" in sys.argv)
    if "--json" in sys.argv:
        print(json.dumps([claim.encode() for claim in claims], indent=1))
        return 0 if all(claim.is_kept for claim in claims) else 1
    return alone(claims)


if __name__ == "__main__":
    sys.exit(main())
