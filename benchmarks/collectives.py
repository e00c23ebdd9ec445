"""How long sums of gradients take by each algorithm: by published formulas, and on processes of this machine.

The formulas give the delay of one exchange of a model's gradients (T: the model over one link, R: to add it, U: to
update it, n workers); they say nothing of latency. Measured are the algorithms of `core/all_reduce.py` and gloo's own
all_reduce, on 2 to 8 processes, beside a latency of each round and a rate fitted to the smallest and the largest size;
the size between them says how far that may be trusted.

Run: python -m benchmarks.collectives [--quick]   measures, and writes docs/collectives.md and its picture
     python -m benchmarks.collectives --render    the page again, from benchmarks/results/collectives.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.claims import interleave
from meshwright.core.all_reduce import ALGORITHMS, AllReduce, Hop
from meshwright.core.units import MIB, pretty_bytes, pretty_seconds
from meshwright.launch.rank_pool import RankPool

RESULTS = Path(__file__).parent / "results" / "collectives.json"
DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "collectives.md", DOCS / "pictures" / "collectives.svg"

MODELS = {"ResNet-110": 6.7 * MIB, "ResNet-152": 223 * MIB, "VGG-A": 491 * MIB}
LINKS = {"10 GbE": 1.25e9, "InfiniBand QDR": 4e9}
"""Bytes per second: 10 Gbit/s, and 40 Gbit/s in an 8b/10b code."""
BYTES_ADDED, BYTES_UPDATED = 10e9, 10e9
"""In a second by one worker: assumed, the publications do not say."""
WORKERS = range(2, 15)

Formula = Callable[[float, float, float, int], float]
FORMULAS: dict[str, Formula] = {
    "naive server": lambda T, R, U, n: 2 * n * T + (n - 1) * R + U,
    "async server": lambda T, R, U, n: n * T + U,
    "binomial tree": lambda T, R, U, n: 2 * math.ceil(math.log2(n + 1)) * T + math.ceil(math.log2(n)) * R + U,
    "recursive doubling": lambda T, R, U, n: math.ceil(math.log2(n)) * (T + R) + U,
    "scatter-reduce, broadcast": lambda T, R, U, n: (2 + 2 * (n - 1) / n) * T + (n - 1) / n * R + U,
    "ring": lambda T, R, U, n: 2 * (n - 1) / n * T + (n - 1) / n * R + U,
    "n-sharded server": lambda T, R, U, n: 2 * (n - 1) / n * T + (n - 1) / n * R + U / n,
}

SIZES = {"64 KiB": MIB // 16, "1 MiB": MIB, "16 MiB": 16 * MIB}
FITTED, CHECKED = ("64 KiB", "16 MiB"), "1 MiB"
RANKS = range(2, 9)
ROUNDS = 15
NODE = 2
OWN = "gloo's own"


def delay(formula: str, model: str, link: str, workers: int) -> float:
    """Seconds of one exchange."""
    size = MODELS[model]
    return FORMULAS[formula](size / LINKS[link], size / BYTES_ADDED, size / BYTES_UPDATED, workers)


def timed_job(*, num_bytes: int, rounds: int, rank: int, num_ranks: int, rendezvous: str) -> dict[str, list[float]]:
    """Seconds of each algorithm in each round, in turn."""
    import torch
    import torch.distributed as dist

    from meshwright.ops.collectives import all_reduce_by_sends
    from meshwright.ops.device_mesh import join

    torch.set_num_threads(1)
    join(rank, num_ranks, torch.device("cpu"), rendezvous=rendezvous, timeout_seconds=120)
    group = dist.group.WORLD
    assert group is not None
    flat = torch.ones(num_bytes // 4)

    def side(call: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            flat.fill_(1.0)
            dist.barrier()
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

        return run

    algorithms = {name: AllReduce(algorithm=name, node_size=NODE) for name in ALGORITHMS}
    sides = {OWN: side(lambda: dist.all_reduce(flat))}
    sides |= {name: side(lambda one=one: all_reduce_by_sends(flat, group, one)) for name, one in algorithms.items()}  # type: ignore[misc]
    seconds = interleave(sides, rounds + 1)
    dist.destroy_process_group()
    return {name: taken[1:] for name, taken in seconds.items()}


def measure(rounds: int) -> dict[str, Any]:
    """Ranks -> size -> algorithm -> median seconds until the last rank has the sum."""
    found: dict[str, Any] = {}
    for ranks in RANKS:
        with RankPool(ranks, threads_per_rank=1) as pool:
            for size, num_bytes in SIZES.items():
                asked = {"num_bytes": num_bytes, "rounds": rounds}
                each = pool.run("benchmarks.collectives:timed_job", asked, ranks, timeout_seconds=600)
                ends = {name: [max(taken) for taken in zip(*(r[name] for r in each), strict=True)] for name in each[0]}
                medians = {name: statistics.median(taken) for name, taken in ends.items()}
                found.setdefault(str(ranks), {})[size] = medians
                print(ranks, size, {name: pretty_seconds(value) for name, value in medians.items()}, flush=True)
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "rounds": rounds, "seconds": found}


def parts(algorithm: str, ranks: int, num_bytes: int) -> tuple[float, float]:
    """Rounds, and bytes that are passed on one after the other. Gloo's own is a ring."""
    one = AllReduce(algorithm="ring" if algorithm == OWN else algorithm, node_size=NODE)  # type: ignore[arg-type]
    rounds, passed = (float(one.seconds(ranks, ranks, hop, hop, num_bytes)) for hop in (Hop(1, 0), Hop(0, 1)))
    return rounds, passed


def fit(algorithm: str, ranks: int, seconds: Mapping[str, float]) -> tuple[float, float]:
    """(seconds of a round, seconds of a byte) by which both fitted sizes take what they took."""
    (a, b), (c, d) = (parts(algorithm, ranks, SIZES[size]) for size in FITTED)
    first, second = (seconds[size] for size in FITTED)
    whole = a * d - b * c
    return (first * d - b * second) / whole, (a * second - first * c) / whole


def render(results: Mapping[str, Any]) -> str:
    lines = [
        "# How gradients are summed",
        "",
        "Made by `python -m benchmarks.collectives`; do not edit.",
        "`replicate(algorithm=...)` sums gradients by the sends of a ring, a tree, recursive doubling, scatter and",
        "gather, or nodes first ([cards](techniques/cards.md)); `auto`, the default, is the backend's own all_reduce.",
        "`mw plan --why replicate.algorithm` says what each would take on a cluster.",
        "",
        "## By published formulas",
        "",
        "![delay of one exchange by the number of workers](pictures/collectives.svg)",
        "",
        "Delay of one exchange over links of 1.25 GB/s (10 GbE) and 4 GB/s (InfiniBand QDR), without latency; a worker",
        f"adds and updates {BYTES_ADDED / 1e9:g} GB/s, which is assumed. The tree's formula counts a server among its",
        "nodes; our `tree` has none. The formula of recursive doubling is whole rounds, rounded up; where n is not a",
        "power of two our `doubling` and `scatter_gather` have two rounds of the whole beside those of the one below.",
        "Where it is one, `scatter_gather` passes on as many bytes as a ring. A ring and an n-sharded server differ in",
        "the update alone, and lie on each other in the picture.",
    ]
    for link in LINKS:
        titles = [f"{model}, n = {n}" for model in MODELS for n in (2, 8, 14)]
        lines += ["", f"| {link} | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
        for name in FORMULAS:
            cells = [pretty_seconds(delay(name, model, link, n)) for model in MODELS for n in (2, 8, 14)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, *measured(results)]) + "\n"


def measured(results: Mapping[str, Any]) -> list[str]:
    """The page's section of what was measured."""
    names = [OWN, *ALGORITHMS]
    lines = [
        "",
        "## Measured",
        "",
        f"On {results['date']}: processes of one thread over gloo on one machine of two cores, which n processes share",
        f"and other programs used too. Median of {results['rounds']} rounds in turn, until the last rank has the sum;",
        f"`hierarchical` takes {NODE} ranks for a node. On two cores all copies and sums of all ranks compete, so this",
        "says what an algorithm costs in work and in switches between processes, and nothing of a network.",
        "",
        f"| ranks | size | {' | '.join(names)} |",
        "|---:|---:|" + "---:|" * len(names),
    ]
    for ranks, by_size in results["seconds"].items():
        for size, seconds in by_size.items():
            best = min(seconds.values())
            cells = [pretty_seconds(seconds[name]) for name in names]
            cells = [f"**{cell}**" if seconds[name] == best else cell for name, cell in zip(names, cells, strict=True)]
            lines.append(f"| {ranks} | {size} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Rounds x latency + bytes passed on / rate, with both fitted to {FITTED[0]} and {FITTED[1]}: latency of a",
        f"round, rate, and {CHECKED} as measured over what the formula then says. Gloo's own is taken for a ring.",
        "",
        f"| ranks | {' | '.join(names)} |",
        "|---:|" + "---:|" * len(names),
    ]
    ratios = []
    for ranks, by_size in results["seconds"].items():
        cells = []
        for name in names:
            latency, per_byte = fit(name, int(ranks), {size: seconds[name] for size, seconds in by_size.items()})
            rounds, passed = parts(name, int(ranks), SIZES[CHECKED])
            ratios.append(by_size[CHECKED][name] / (rounds * latency + passed * per_byte))
            cells.append(f"{pretty_seconds(latency)}, {pretty_bytes(1 / per_byte)}/s: {ratios[-1]:.2f}")
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    near = sum(1 for ratio in ratios if 0.75 <= ratio <= 1.25)
    words = f"{CHECKED} is within a quarter of the formula in {near} of {len(ratios)} cases"
    return [*lines, "", f"{words}; the worst are {min(ratios):.2f} and {max(ratios):.2f}."]


COLOURS = ("#b4572e", "#d98c1f", "#8c6d31", "#a34d9e", "#5b8c5a", "#3b6fb6", "#17889b")
WIDTH, HEIGHT, GAP = 330, 220, 60


def picture() -> str:
    """A panel for each model and link: seconds, from 0, by workers."""
    shapes = []
    for row, link in enumerate(LINKS):
        for column, model in enumerate(MODELS):
            left, top = GAP + column * (WIDTH + GAP), 40 + row * (HEIGHT + GAP)
            most = max(delay(name, model, link, n) for name in FORMULAS for n in WORKERS)
            shapes.append(
                f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#c9ced6"/>'
            )
            title = f"{model}, {pretty_bytes(MODELS[model])}, {link}"
            shapes.append(f'<text x="{left}" y="{top - 8}" font-weight="bold">{title}</text>')
            for n in WORKERS:
                x = left + (n - 2) / 12 * WIDTH
                shapes.append(f'<text x="{x:.0f}" y="{top + HEIGHT + 14}" text-anchor="middle">{n}</text>')
            for share in (0.5, 1.0):
                y = top + (1 - share) * HEIGHT + 4
                words = pretty_seconds(share * most)
                shapes.append(f'<text x="{left - 4}" y="{y:.0f}" text-anchor="end">{words}</text>')
            for name, colour in zip(FORMULAS, COLOURS, strict=True):
                points = " ".join(
                    f"{left + (n - 2) / 12 * WIDTH:.1f},{top + HEIGHT * (1 - delay(name, model, link, n) / most):.1f}"
                    for n in WORKERS
                )
                dashes = ' stroke-dasharray="6 4"' if name == "n-sharded server" else ""
                shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
    width, height = GAP + 3 * (WIDTH + GAP), 40 + 2 * (HEIGHT + GAP) + 20
    for at, (name, colour) in enumerate(zip(FORMULAS, COLOURS, strict=True)):
        x = GAP + at * 165
        shapes.append(f'<rect x="{x}" y="{height - 28}" width="14" height="4" fill="{colour}"/>')
        shapes.append(f'<text x="{x + 18}" y="{height - 22}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    paper = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="11">', paper, *shapes, "</svg>"]) + "\n"


def main() -> None:
    if "--render" not in sys.argv:
        results = measure(3 if "--quick" in sys.argv else ROUNDS)
        if "--quick" in sys.argv:
            return
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(render(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
