"""Speed, memory and forecasts on the one GPU at hand, beside what others reach.

    python -m benchmarks.gpu bench      the table of speed: tokens/s, MFU, memory, forecast errors, ratios to the peers
    python -m benchmarks.gpu forecast   forecasts against runs, worst first; --list frozen, smoke, regret or rows
    python -m benchmarks.gpu regret     how much slower than the best of eight plans is the better of our first two?
    python -m benchmarks.gpu pieces     the pieces that splits leave to one GPU: equal to the whole, and how fast?
    python -m benchmarks.gpu ranks      plans of two and four ranks that share the GPU: equal to one device?
    python -m benchmarks.gpu test       pieces, ranks and the CUDA tests; `make gpu-test`
    python -m benchmarks.gpu page       docs/performance.md from results that are kept; needs no GPU

Every side of every case runs in a process of its own (`gpu_child`), so that one failure is one line of the result; the
JSON file is written after each case, and a second call adds to it (--missing: only what it lacks). Steps are timed in
blocks with nothing between them, as a training loop runs them. Peers are found in the folder of the environment
variable PEERS (`gpu_peers`). Ratios are medians over interleaved repeats: ours, theirs, ours, theirs.

Forecasts need the machine measured: --cluster takes a file of `mw probe -o`; --readings keeps what the probe measured,
or reads it again, so that a cluster is assembled by today's code. `--again RESULT.json` of forecast and regret makes
forecasts anew for an earlier run's measurements and needs no GPU. --tiny proves the script on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from typing import Any

import meshwright as mw
from benchmarks import gpu_cases
from benchmarks.gpu_cases import Case, TableRow
from benchmarks.published_scores import kendall_tau
from meshwright.core.cluster import Cluster
from meshwright.core.codec import decode, encode
from meshwright.machine.assemble import assemble
from meshwright.machine.probe import Reading, available_host_bytes, count_gpus, read_machine

Row = dict[str, Any]
ROOT = Path(__file__).parents[1]
PREPARE_SECONDS, START_SECONDS, STEPS_SECONDS = 240.0, 300.0, 120.0
"""After these a side has failed."""
BLOCKS = 3
"""Of steps, for a forecast to be compared with."""
GOAL, TOP, ROUNDS = 0.03, 2, 2
"""Of regret: the most, among so many of our first plans, over so many rounds."""
LISTS = {
    "seen": gpu_cases.SEEN,
    "frozen": gpu_cases.FROZEN,
    "next": gpu_cases.NEXT,
    "smoke": gpu_cases.SMOKE,
    "regret": gpu_cases.REGRET,
    "rows": tuple(row.ours for row in gpu_cases.ROWS),
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Child:
    """A process of `gpu_child`. After a failure it answers every question with it."""

    def __init__(self, job: Mapping[str, Any]):
        handle, self.log = tempfile.mkstemp(suffix=".log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            start_new_session=True,
        )
        os.close(handle)
        self.answers: queue.Queue[Row | None] = queue.Queue()
        self.over: Row | None = None
        self.prepared: Row | None = None
        threading.Thread(target=self._read, daemon=True).start()
        self._write(job)

    def prepare(self) -> Row:
        """What it says before anything runs; waits until it is ready."""
        if self.prepared is None:
            self.prepared = self._answer("prepare", PREPARE_SECONDS)
        return self.prepared

    def ask(self, what: str, limit: float = STEPS_SECONDS) -> Row:
        self.prepare()
        if self.over is None:
            self._write({"do": what})
        return self._answer(what, limit)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        Path(self.log).unlink(missing_ok=True)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                self.answers.put(json.loads(line[7:]))
        self.answers.put(None)

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def _answer(self, what: str, limit: float) -> Row:
        if self.over is not None:
            return self.over
        try:
            answer = self.answers.get(timeout=limit)
        except queue.Empty:
            answer = {"failed": f"no answer to {what} after {limit:.0f} s: {self._last_line()}"}
        if answer is None:
            answer = {"failed": f"ended during {what}: {self._last_line()}"}
        if answer.keys() & {"failed", "out_of_memory", "absent"}:
            self.over = answer
        return answer

    def _last_line(self) -> str:
        lines = Path(self.log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"


class Session:
    """What all commands share: where the machine's measurements are, the clock, and the file of results."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.begin = time.perf_counter()
        self.folder = tempfile.TemporaryDirectory()
        self.cluster: Cluster | None = None
        self.cluster_file = ""
        self.about: Row = {}

    def probe(self) -> None:
        """From a file, from the readings of an earlier probe, or probed now; all forecasts are made with it."""
        self.use(cluster_for(self.arguments))

    def use(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.cluster_file = str(Path(self.folder.name) / "this.cluster.json")
        Path(self.cluster_file).write_text(cluster.to_json(), encoding="utf-8")

    def job(self, case: Case) -> Row:
        job = {"case": asdict(case), "tiny": self.arguments.tiny, "cluster": self.cluster_file}
        return job | ({"count": self.arguments.steps} if self.arguments.steps else {})

    @property
    def is_late(self) -> bool:
        return time.perf_counter() - self.begin > 60 * self.arguments.minutes

    def tell(self, text: str) -> None:
        say(f"[{time.perf_counter() - self.begin:5.0f} s] {text}")

    def stored(self) -> Row:
        """What the file of results has already."""
        path: Path | None = self.arguments.json
        return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}

    def write(self, value: Row) -> None:
        path: Path | None = self.arguments.json
        if path is None:
            return
        about: Row = {**self.about, "date": time.strftime("%Y-%m-%d")}
        if self.cluster is not None:
            about["cluster"] = encode(self.cluster)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**about, **value}, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def cluster_for(arguments: argparse.Namespace) -> Cluster:
    if arguments.cluster or arguments.tiny:
        return mw.cluster(arguments.cluster or "laptop")
    path: Path | None = arguments.readings
    if path is not None and path.exists():
        given = json.loads(path.read_text(encoding="utf-8"))
        readings = [decode(Reading, each, f"{path}[{i}]") for i, each in enumerate(given["readings"])]
        return assemble(readings, host_bytes=given["host_bytes"])
    host_bytes = available_host_bytes()
    begin = time.perf_counter()
    readings = read_machine(num_devices=1, report=say, quick=arguments.quick)
    say(f"probed in {time.perf_counter() - begin:.0f} s")
    if path is not None:
        path.write_text(json.dumps({"host_bytes": host_bytes, "readings": encode(readings)}), encoding="utf-8")
    return assemble(readings, host_bytes=host_bytes)


def visits(cases: Iterable[Case], session: Session) -> Iterator[tuple[Case, Child, Row]]:
    """Each case's process after its first steps; the next one imports and forecasts meanwhile, and then rests."""
    waiting = iter(cases)
    case = next(waiting, None)
    child = Child(session.job(case)) if case is not None else None
    while case is not None and child is not None:
        after = next(waiting, None)
        beyond = None
        try:
            child.prepare()
            beyond = Child(session.job(after)) if after is not None else None
            begun = child.ask("start", START_SECONDS)
            if beyond is not None:
                beyond.prepare()
            yield case, child, begun
        except BaseException:
            if beyond is not None:
                beyond.end()
            raise
        finally:
            child.end()
        case, child = after, beyond


def outcome(row: Row) -> str:
    for name in ("failed", "absent"):
        if name in row:
            return f"{name}: {row[name]}"
    return "out of memory"


# forecast


def measured(child: Child, begun: Row, kernels: bool) -> Row:
    """A case's row: forecast, time, memory, and what went wrong."""
    row = dict(child.prepare())
    blocks = [child.ask("steps") for _ in range(BLOCKS)] if "build_seconds" in begun else [begun]
    if child.over is not None:
        return row | child.over
    seconds = sorted(block["seconds"] for block in blocks)
    row |= {
        "measured_seconds": median(seconds),
        "measured_low_seconds": seconds[0],
        "measured_high_seconds": seconds[-1],
        "steps": sum(block["count"] for block in blocks),
        "build_seconds": begun["build_seconds"],
        "first_steps_seconds": begun["first_steps_seconds"],
    }
    for name in ("allocated_bytes", "reserved_bytes"):
        if name in blocks[-1]:
            row[f"measured_{name}"] = blocks[-1][name]
    row |= {name: blocks[-1][name] for name in ("non_torch_bytes", "retries") if name in blocks[-1]}
    row |= rates(row, row["measured_seconds"])
    return row | (child.ask("kernels") if kernels else {})


def rates(row: Row, seconds: float) -> Row:
    from benchmarks.gpu_child import PEAK_FLOPS

    return {"tokens_per_second": row["tokens"] / seconds, "mfu": row["flops"] / seconds / PEAK_FLOPS}


def errors_of(row: Row) -> Row:
    """Forecast over measured - 1."""
    pairs = {"time": "seconds", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
    errors: Row = {
        f"{name}_error": row[f"forecast_{key}"] / row[f"measured_{key}"] - 1
        for name, key in pairs.items()
        if row.get(f"measured_{key}") and f"forecast_{key}" in row
    }
    if "measured_seconds" in row and "forecast_seconds" in row:
        errors["covered"] = row["forecast_low_seconds"] <= row["measured_seconds"] <= row["forecast_high_seconds"]
    if row.get("out_of_memory") or "measured_seconds" in row:
        errors["fits_right"] = bool(row.get("forecast_fits", True)) != bool(row.get("out_of_memory"))
    return errors


def summary(rows: Sequence[Row]) -> Row:
    result: Row = {"cases": len(rows), "failed": [row["name"] for row in rows if "failed" in row]}
    for name in ("time", "allocated", "reserved"):
        off = sorted(abs(row[f"{name}_error"]) for row in rows if f"{name}_error" in row)
        if off:
            ninth = off[min(len(off) - 1, int(0.9 * len(off)))]
            result[name] = {"median_error": median(off), "p90_error": ninth, "worst_error": off[-1], "rows": len(off)}
    for name, share in (("covered", "coverage"), ("fits_right", "fits_right")):
        given = [row[name] for row in rows if name in row]
        if given:
            result[share] = sum(given) / len(given)
    return result


def percent(row: Row, name: str) -> str:
    return f"{row[name]:+.1%}" if name in row else "-"


def gib(row: Row, name: str) -> str:
    return f"{row[name] / 2**30:.1f}" if name in row else "-"


def forecast_table(rows: Sequence[Row]) -> str:
    """Worst step time first."""
    title = f"{'case':60s} {'measured':>10s} {'forecast':>10s} {'time':>7s} {'alloc':>7s} {'reserv':>7s} {'GiB':>6s}"
    lines = [title]
    for row in sorted(rows, key=lambda row: -abs(row.get("time_error", 9.0))):
        took = row.get("measured_seconds")
        shown = f"{took * 1e3:8.2f}ms" if took else "no memory" if row.get("out_of_memory") else "failed"
        said = f"{row['forecast_seconds'] * 1e3:8.2f}ms" if row.get("forecast_fits") else "-"
        said = "no memory" if row.get("forecast_fits") is False else said
        off = " ".join(f"{percent(row, f'{name}_error'):>7s}" for name in ("time", "allocated", "reserved"))
        mark = "" if row.get("covered", True) else "  outside"
        if took and "kernels" in row:
            mark += f"  {row['kernels']} kernels busy {row['kernels_seconds'] / took:.0%}"
        if "failed" in row:
            mark = f"  {row['failed']}"
        size = gib(row, "measured_allocated_bytes")
        lines.append(f"{row['name'][:60]:60s} {shown:>10s} {said:>10s} {off} {size:>6s}{mark}")
    return "\n".join(lines)


def forecast(arguments: argparse.Namespace) -> int:
    session = Session(arguments)
    if arguments.again:
        return forecast_again(arguments, session)
    name = "frozen" if arguments.frozen else arguments.list
    listed: tuple[Case, ...] = gpu_cases.TINY_SEEN if arguments.tiny else LISTS[name]
    rows: dict[str, Row] = {row["name"]: row for row in session.stored().get("cases", ())}
    cases = [case for case in listed if arguments.only in case.name]
    if arguments.missing:
        cases = [case for case in cases if not rows.get(case.name, {}).keys() & {"measured_seconds", "out_of_memory"}]
    session.probe()
    session.about = machine(arguments) | {"list": name}
    for case, child, begun in visits(in_time(cases, session), session):
        start = time.perf_counter()
        row = {"name": case.name, "must_fail": case.must_fail, **measured(child, begun, arguments.kernels)}
        rows[case.name] = row | errors_of(row)
        off = percent(rows[case.name], "time_error")
        took = row.get("measured_seconds")
        end = f"{took * 1e3:.2f} ms, {off}" if took else outcome(row)
        session.tell(f"{case.name}: {end} ({time.perf_counter() - start:.0f} s)")
        session.write({"summary": summary(list(rows.values())), "cases": list(rows.values())})
    shown = [rows[case.name] for case in cases if case.name in rows]
    print(forecast_table(shown))
    if arguments.kernels:
        print(kernels_table({row["name"]: row for row in shown}))
    print(json.dumps(summary(shown), indent=1))
    return 1 if any("failed" in row for row in shown) else 0


def in_time(cases: Sequence[Case], session: Session) -> Iterator[Case]:
    for place, case in enumerate(cases):
        if session.is_late:
            session.tell(f"out of time: {len(cases) - place} cases are left (--missing runs them)")
            return
        yield case


def forecast_again(arguments: argparse.Namespace, session: Session) -> int:
    """Forecasts of today against an earlier run's measurements."""
    from benchmarks.gpu_child import forecast_of

    stored = json.loads(arguments.again.read_text(encoding="utf-8"))
    named = bool(arguments.cluster or arguments.readings)
    cluster = cluster_for(arguments) if named else decode(Cluster, stored["cluster"], f"{arguments.again}.cluster")
    session.use(cluster)
    cases = {case.name: case for each in (*LISTS.values(), gpu_cases.TINY_SEEN) for case in each}
    rows = []
    for row in stored["cases"]:
        case = cases.get(row["name"])
        if case is not None and arguments.only in case.name:
            row |= forecast_of(case, case.describe(), cluster)
            rows.append(row | errors_of(row))
    session.about = {key: stored[key] for key in ("device", "torch") if key in stored} | {"forecast_again": True}
    session.write({"summary": summary(rows), "cases": rows})
    print(forecast_table(rows))
    print(json.dumps(summary(rows), indent=1))
    return 0


# bench


def sides_of(row: TableRow, session: Session) -> dict[str, Row]:
    """Name -> job; ours first."""
    sides = {"ours": session.job(row.ours)}
    if row.beside is not None:
        sides[f"ours: {row.beside.name}"] = session.job(row.beside)
    for peer, given in row.peers:
        words = [peer, *(str(value) for value in given.values() if isinstance(value, str))]
        words += [name for name, value in given.items() if value is True]
        job = {"peer": peer, "arguments": dict(given), "tiny": session.arguments.tiny}
        count = session.arguments.steps
        sides[" ".join(words)] = job | ({"count": count} if count else {})
    return sides


def take_turns(row: TableRow, session: Session) -> dict[str, Row]:
    """Every side's answers, `blocks` of them in interleaved repeats."""
    jobs, arguments = sides_of(row, session), session.arguments
    results: dict[str, Row] = {name: {"blocks": []} for name in jobs}

    def start(name: str, child: Child) -> None:
        results[name] |= child.prepare()
        if child.over is None:
            results[name] |= child.ask("start", START_SECONDS)
        result = results[name]
        took = f"{result['build_seconds'] + result['first_steps_seconds']:.0f} s" if child.over is None else ""
        session.tell(f"  {name}: {f'ready after {took}' if took else outcome(result)}")

    def block(name: str, child: Child) -> None:
        answer = child.ask("steps")
        if child.over is None:
            results[name] |= {key: value for key, value in answer.items() if key not in ("seconds", "count")}
            results[name]["blocks"].append(answer["seconds"])
            session.tell(f"  {name}: {answer['seconds'] * 1e3:.2f} ms")
        else:
            results[name] |= answer

    def is_over(name: str) -> bool:
        return bool(results[name].keys() & {"failed", "out_of_memory", "absent"})

    children = {name: Child(job) for name, job in jobs.items()}
    try:
        if row.fits_together:
            for name, child in children.items():
                start(name, child)
                child.ask("rest")
        for number in range(arguments.repeats):
            for name in jobs:
                if is_over(name) or (number and not row.fits_together and session.is_late):
                    continue
                if not row.fits_together:
                    start(name, children[name])
                block(name, children[name])
                if arguments.kernels and number == 0 and children[name].over is None:
                    results[name] |= children[name].ask("kernels")
                if row.fits_together:
                    children[name].ask("rest")
                else:
                    children.pop(name).end()
                    if number + 1 < arguments.repeats:
                        children[name] = Child(jobs[name])  # imports while the others run
    finally:
        for child in children.values():
            child.end()
    return results


def bench_row(row: TableRow, results: dict[str, Row]) -> Row:
    """Ratios of each repeat, ours to the fastest of the others."""
    ours = results["ours"]
    told: Row = {"name": row.ours.name, "goal": row.goal, "most_gib": row.most_gib, "sides": results}
    for side in results.values():
        if side["blocks"]:
            side["measured_seconds"] = median(side["blocks"])
            side |= rates(ours, side["measured_seconds"]) if "tokens" in ours else {}
            for name in ("allocated_bytes", "reserved_bytes"):
                if name in side:
                    side[f"measured_{name}"] = side[name]
    ours |= errors_of(ours)
    others = {name: side for name, side in results.items() if name != "ours" and side["blocks"]}
    if not others or not ours["blocks"]:
        return told
    best = min(others, key=lambda name: others[name]["measured_seconds"])
    ratios = sorted(
        theirs / mine for mine, theirs in zip(ours["blocks"], others[best]["blocks"], strict=False)
    )  # a repeat that was left out has no pair
    told |= {"best_peer": best, "ratio": median(ratios), "ratio_low": ratios[0], "ratio_high": ratios[-1]}
    size = ours.get("allocated_bytes", 0) / 2**30
    told["kept"] = told["ratio"] >= row.goal and (not row.most_gib or size <= row.most_gib)
    return told


def bench_table(rows: Sequence[Row]) -> str:
    """The rows furthest below their goals first."""
    titles = ("case", "side", "tokens/s", "MFU", "GiB", "reserved", "time", "alloc", "reserv")
    lines = []

    def distance(row: Row) -> float:
        return row["ratio"] / row["goal"] if row.get("ratio") and row["goal"] else 9.0

    for row in sorted(rows, key=distance):
        for name, side in row["sides"].items():
            if not side.get("measured_seconds"):
                lines.append((row["name"], name, outcome(side)[:90], *[""] * 6))
                continue
            errors = [percent(side, f"{each}_error") for each in ("time", "allocated", "reserved")]
            shown = f"{side['mfu']:.1%}" if "mfu" in side else "-"
            speed = f"{side['tokens_per_second']:,.0f}" if "tokens_per_second" in side else "-"
            sizes = [gib(side, name) for name in ("measured_allocated_bytes", "measured_reserved_bytes")]
            lines.append((row["name"], name, speed, shown, *sizes, *errors))
        if "ratio" in row:
            limit = f", at most {row['most_gib']:g} GiB" if row["most_gib"] else ""
            goal = f"goal {row['goal']:.2f}{limit}: {'kept' if row['kept'] else 'MISSED'}" if row["goal"] else ""
            spread = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
            lines.append(("", f"= {row['ratio']:.3f} of {row['best_peer']}", f"({spread}) {goal}", *[""] * 6))
    widths = [max(len(line[place]) for line in (titles, *lines) if line[3] or place < 2) for place in range(9)]
    grid = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in (titles, *lines)]
    return "\n".join(line.rstrip() for line in grid)


def kernels_table(sides: Mapping[str, Row]) -> str:
    """Milliseconds of a step by category."""
    known = {
        name: side["milliseconds_by_category"] for name, side in sides.items() if "milliseconds_by_category" in side
    }
    lines = ["", "milliseconds of a step by kind of kernel"]
    for name, categories in known.items():
        lines.append(f"  {name} ({sides[name]['kernels']} kernels)")
        lines += [f"    {milliseconds:9.2f}  {category}" for category, milliseconds in categories.items()]
    return "\n".join(lines)


def bench(arguments: argparse.Namespace) -> int:
    session = Session(arguments)
    listed = gpu_cases.TINY_ROWS if arguments.tiny else gpu_cases.ROWS
    rows: dict[str, Row] = {row["name"]: row for row in session.stored().get("rows", ())}
    wanted = [row for row in listed if not arguments.only or row.ours.name in arguments.only.split(";")]
    if not wanted:
        say(f"no row is called {arguments.only}; there are: {'; '.join(row.ours.name for row in listed)}")
        return 2
    if arguments.missing:
        wanted = [row for row in wanted if "ratio" not in rows.get(row.ours.name, {})]
    if arguments.cluster or arguments.readings or arguments.tiny or arguments.probe:
        session.probe()
    session.about = machine(arguments)
    done = []
    for row in wanted:
        if session.is_late:
            session.tell(f"out of time: {row.ours.name} and what follows is left (--missing runs it)")
            break
        session.tell(row.ours.name)
        told = bench_row(row, take_turns(row, session)) | {"date": time.strftime("%Y-%m-%d")}
        rows[row.ours.name] = told
        done.append(told)
        session.write({"rows": list(rows.values())})
    print(bench_table(done))
    if arguments.kernels:
        print(kernels_table({f"{row['name']}: {name}": side for row in done for name, side in row["sides"].items()}))
    return 1 if any("failed" in side for row in done for side in row["sides"].values()) else 0


# regret


def verdict(model: str, rows: Sequence[Row]) -> Row:
    """Of the plans that ran; one that we say fits and does not, if it is in our first two, costs a place."""
    ran = [row for row in rows if "measured_seconds" in row]
    ranked = sorted((row for row in rows if row.get("forecast_fits")), key=lambda row: row["forecast_seconds"])
    ours = [row for row in ranked[:TOP] if "measured_seconds" in row]
    fastest = min(ran, key=lambda row: row["measured_seconds"], default=None)
    if fastest is None or not ours:
        return {"model": model, "plans": len(ran), "regret": None}
    best = fastest["measured_seconds"]
    return {
        "model": model,
        "plans": len(ran),
        "rounds": min(len(row["visits"]) for row in ran),
        "fastest": fastest["name"],
        "picked": [row["name"] for row in ranked[:TOP]],
        "regret": min(row["measured_seconds"] for row in ours) / best - 1,
        "regret_of_first": ranked[0].get("measured_seconds", float("inf")) / best - 1,
        "kendall_tau": kendall_tau([r["forecast_seconds"] for r in ran], [r["measured_seconds"] for r in ran]),
        "median_error": median(abs(row["forecast_seconds"] / row["measured_seconds"] - 1) for row in ran),
    }


def verdicts(rows: Mapping[str, Row]) -> list[Row]:
    models: dict[str, list[Row]] = {}
    for row in rows.values():
        models.setdefault(row["name"].split(": ")[0], []).append(row)
    each = [verdict(model, own) for model, own in models.items()]
    return sorted(each, key=lambda one: -(float("inf") if one["regret"] is None else one["regret"]))


def regret_table(rows: Mapping[str, Row]) -> str:
    """Models by regret, worst first; their plans by what they measured."""
    lines, models = [], verdicts(rows)
    for one in models:
        if one["regret"] is None:
            lines.append(f"{one['model']}: no plan that we would pick has run")
        else:
            kept = "kept" if one["regret"] <= GOAL else "MISSED"
            lines.append(
                f"{one['model']}: the best of our first {TOP} is {one['regret']:.1%} slower than the fastest of "
                f"{one['plans']} (goal {GOAL:.0%}) {kept}; our first alone {one['regret_of_first']:.1%}"
            )
        own = [row for row in rows.values() if row["name"].startswith(f"{one['model']}: ")]
        for row in sorted(own, key=lambda row: row.get("measured_seconds", float("inf"))):
            real, said = row.get("measured_seconds"), row.get("forecast_seconds", float("nan"))
            shown = f"{real * 1e3:9.2f} ms" if real else f"{'no memory' if row.get('out_of_memory') else 'failed':>12}"
            off = f"{said / real - 1:+6.1%}" if real else ""
            mark = "*" if row["name"] in one.get("picked", ()) else " "
            fits = "" if row.get("forecast_fits") else "  (said not to fit)"
            lines.append(f"  {mark} {shown}  forecast {said * 1e3:9.2f} ms {off:>7}  {row['name']}{fits}")
    known = [one["regret"] for one in models if one["regret"] is not None]
    if known:
        lines.append(f"{len(known)} models: mean regret {mean(known):.1%}, worst {max(known):.1%}")
    return "\n".join(lines)


def regret(arguments: argparse.Namespace) -> int:
    """Two rounds, the second in the other order, so that a machine that grows slower does so to all plans."""
    session = Session(arguments)
    listed = gpu_cases.TINY_REGRET if arguments.tiny else gpu_cases.REGRET
    rows: dict[str, Row]
    if arguments.again:
        from benchmarks.gpu_child import forecast_of

        stored = json.loads(arguments.again.read_text(encoding="utf-8"))
        named = bool(arguments.cluster or arguments.readings)
        cluster = cluster_for(arguments) if named else decode(Cluster, stored["cluster"], f"{arguments.again}.cluster")
        session.use(cluster)
        cases = {case.name: case for case in (*gpu_cases.REGRET, *gpu_cases.TINY_REGRET)}
        known = [row for row in stored["cases"] if row["name"] in cases]
        rows = {row["name"]: row | forecast_of(case := cases[row["name"]], case.describe(), cluster) for row in known}
        session.about = {key: stored[key] for key in ("device", "torch")} | {"forecast_again": True}
        session.write({"goal": GOAL, "models": verdicts(rows), "cases": list(rows.values())})
        print(regret_table(rows))
        return 0
    session.probe()
    session.about = machine(arguments)
    rows = {}
    models = list(dict.fromkeys(case.name.split(": ")[0] for case in listed if arguments.only in case.name))

    def rounds() -> Iterator[Case]:
        for model in models:
            own = [case for case in listed if case.name.split(": ")[0] == model]
            yield from own
            for case in own[::-1]:
                if not session.is_late and not rows.get(case.name, {}).keys() & {"failed", "out_of_memory"}:
                    yield case

    for case, child, begun in visits(rounds(), session):
        row = rows.setdefault(case.name, {"name": case.name, "visits": []})
        row |= child.prepare()
        answers = [child.ask("steps"), child.ask("steps")] if "build_seconds" in begun else [begun]
        if child.over is not None:
            row |= child.over
            session.tell(f"{case.name}: {outcome(row)}")
            continue
        row["visits"].append([answer["seconds"] for answer in answers])
        row["measured_seconds"] = median(seconds for visit in row["visits"] for seconds in visit)
        if "reserved_bytes" in answers[-1]:
            row["measured_reserved_bytes"] = answers[-1]["reserved_bytes"]
        session.tell(f"{case.name}: {row['measured_seconds'] * 1e3:.2f} ms")
        session.write({"goal": GOAL, "models": verdicts(rows), "cases": list(rows.values())})
    print(regret_table(rows))
    return 1 if any("failed" in row for row in rows.values()) else 0


def machine(arguments: argparse.Namespace) -> Row:
    """Asked in a process of its own: what opens a GPU holds half a gigabyte of it."""
    name = "'cpu'" if arguments.tiny else "torch.cuda.get_device_name()"
    words = f"import json, torch; print(json.dumps({{'device': {name}, 'torch': torch.__version__}}))"
    return json.loads(subprocess.run([sys.executable, "-c", words], capture_output=True, check=True).stdout)


def pieces(arguments: argparse.Namespace) -> int:
    from benchmarks import gpu_pieces

    return gpu_pieces.run(arguments.json, arguments.tiny)


def ranks(arguments: argparse.Namespace) -> int:
    from benchmarks import gpu_ranks

    return gpu_ranks.run(arguments.json, arguments.tiny, arguments.only)


def test(arguments: argparse.Namespace) -> int:
    """All that must hold on a GPU, in turn; what fails does not stop the rest."""
    words = ["--tiny"] if arguments.tiny else []
    commands = [[sys.executable, "-m", "benchmarks.gpu", name, *words] for name in ("pieces", "ranks")]
    if importlib.util.find_spec("pytest") is None:
        say("the CUDA tests are left out: there is no pytest here")
    elif not arguments.tiny:
        commands.append([sys.executable, "-m", "pytest", "tests/ops", "-m", "not slow", "-p", "no:cacheprovider"])
    codes = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in commands]
    for command, code in zip(commands, codes, strict=True):
        say(f"{'FAILED' if code else 'passed'}: {' '.join(command[2:])}")
    return max(codes)


def page(arguments: argparse.Namespace) -> int:
    from benchmarks import gpu_page

    return gpu_page.write()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"bench": bench, "forecast": forecast, "regret": regret, "pieces": pieces}
    commands |= {"ranks": ranks, "test": test, "page": page}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--only", metavar="NAME", default="", help="cases with this in their names; rows: NAME;NAME")
    parser.add_argument("--list", choices=LISTS, default="seen", help="of cases to forecast (seen)")
    parser.add_argument("--frozen", action="store_true", help="--list frozen: only when all is done")
    parser.add_argument("--kernels", action="store_true", help="also milliseconds by kind of kernel, by the profiler")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repeats of a row (3)")
    parser.add_argument("--steps", type=int, default=0, help="in a block (as many as take 1.5 s)")
    parser.add_argument("--cluster", metavar="C.cluster.json", help="of `mw probe -o`")
    parser.add_argument("--readings", type=Path, metavar="R.json", help="what a probe measured: kept, or read again")
    parser.add_argument("--probe", action="store_true", help="bench: probe first, for forecasts (others always do)")
    parser.add_argument("--quick", action="store_true", help="a quick probe")
    parser.add_argument("--json", type=Path, metavar="RESULT.json")
    parser.add_argument("--missing", action="store_true", help="only what RESULT.json lacks")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing after so many (9)")
    parser.add_argument("--again", type=Path, metavar="RESULT.json", help="forecast anew, measure nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: does the script run?")
    arguments = parser.parse_args()
    if not (arguments.tiny or arguments.again or arguments.command == "page") and not count_gpus():
        say("skipped: there is no CUDA device here; --tiny runs on the CPU.")
        return 0 if arguments.command == "test" else 2
    return commands[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
