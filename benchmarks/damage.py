"""Claim: whatever file is damaged, `mw` says so or gives what the whole file gives; it neither crashes nor hangs, takes
at most 1 GiB for it, and never uses damaged bytes of files that it wrote itself.

Each input is a small whole example of a format with one change: flipped bits, a cut, a page of zeros, bytes of another
file, numbers that are huge, negative or none, wrong types, deep nesting, names given twice, text that is not UTF-8. It
is read by the function that the commands call, in a process that is started anew if it dies.

    refused     a MeshwrightError: file, place, what to do
    same        read, with the result of the whole file (also: made again)
    other       read, with another result: a changed file of the user that is still valid
    SILENT      the same of a file that mw wrote itself
    TRACEBACK, HANG (10 s of CPU), MEMORY (over 1 GiB above the start), CRASH (the process died)

Run: python -m benchmarks.damage [--count 20000] [--seed 0] [--kind NAME] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.damage_kinds import KINDS, Kind
from meshwright.core.errors import MeshwrightError

GOOD, BAD = ("refused", "same", "other"), ("SILENT", "TRACEBACK", "HANG", "MEMORY", "CRASH")
MAX_BYTES, CPU_SECONDS = 1 << 30, 10
VALUES = (
    *(
        "null",
        "true",
        '""',
        '"x"',
        "-1",
        "0",
        "1",
        "2147483648",
        "9223372036854775808",
        "18446744073709551616",
        "1e308",
    ),
    *("1e400", "-0.0", "0.5", "NaN", "Infinity", "[]", "{}", "[[]]", '{"a": 1}', '"../../etc/passwd"', '"\\ud800"'),
    *('"\\u0000"', "1" * 500, '"' + "y" * 5000 + '"', "[" * 50_000, '{"a":' * 5000, "[1, 2, 3]", '"NaN"', "1e-320"),
)


class Hang(BaseException):
    pass


# What can happen to bytes.


def flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 8))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.choice((0, 1, 8, len(data) - 1, dice.randrange(len(data))))]


def zero(data: bytes, dice: random.Random) -> bytes:
    size = dice.choice((1, 16, 512, 4096))
    at = dice.randrange(len(data)) // size * size
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def double(data: bytes, dice: random.Random) -> bytes:
    a, b = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:b] * dice.choice((1, 1, 3)) + data[b:]


def drop(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + data[at + dice.choice((1, 2, 8, 100)) :]


def insert(data: bytes, dice: random.Random) -> bytes:
    junk = dice.choice(
        (b"\xff\xfe", b"\0", b"\xc3", b"\r\n", b"\xef\xbb\xbf", b"\n\n", dice.randbytes(dice.randrange(64)))
    )
    at = dice.choice((0, len(data), dice.randrange(len(data) + 1)))
    return data[:at] + junk + data[at:]


def number(data: bytes, dice: random.Random) -> bytes:
    """A binary number, most likely in a header or a footer."""
    width = dice.choice((1, 2, 4, 8))
    value = dice.choice((b"\xff" * width, b"\xff" * (width - 1) + b"\x7f", b"\0" * width, bytes(width - 1) + b"\x80"))
    at = dice.choice((dice.randrange(min(256, len(data))), max(0, len(data) - 1 - dice.randrange(256))))
    return data[:at] + value + data[at + width :]


def digits(data: bytes, dice: random.Random) -> bytes:
    """A number written as text."""
    places = [at for at, byte in enumerate(data[:20_000]) if 48 <= byte <= 57]
    if not places:
        return flip(data, dice)
    at = dice.choice(places)
    end = at
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    same = str(dice.randrange(10 ** (end - at))).zfill(end - at) if end - at < 30 else "9" * (end - at)
    new = dice.choice((same, same, "9" * (end - at), "-1", "0", "99999999999999999999", "1e999", "nan"))
    return data[:at] + new.encode() + data[end:]


def value(data: bytes, dice: random.Random) -> bytes:
    """A value, a name or a pair of JSON (one line of several) in place of another."""
    lines = data.split(b"\n")
    try:
        json.loads(data)
        where, text = None, data
    except (ValueError, RecursionError):
        where = dice.randrange(len(lines))
        text = lines[where]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return digits(data, dice)
    places = list(_places(found))[:2000]
    if not places:
        return digits(data, dice)
    holder, key = dice.choice(places)
    mark = "!!mark!!"
    act = dice.randrange(8)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = mark
    made = json.dumps(found)
    new = dice.choice(VALUES)
    if act == 2 and isinstance(holder, dict):  # the name twice
        made = made.replace(f'"{mark}"', f"{new}, {json.dumps(key)}: {dice.choice(VALUES)}")
    changed = made.replace(f'"{mark}"', new).encode("utf-8", "surrogatepass")
    if where is None:
        return changed
    return b"\n".join([*lines[:where], changed, *lines[where + 1 :]])


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    keys = found if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
    for key in keys:
        yield found, key
        yield from _places(found[key])


ACTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "cut": cut,
    "zero": zero,
    "double": double,
    "drop": drop,
    "insert": insert,
    "number": number,
    "digits": digits,
    "value": value,
}


# One input.


class Case:
    """One kind's whole files, and what they give."""

    def __init__(self, kind: Kind, folder: Path):
        self.kind, self.folder = kind, folder
        self.targets = sorted(path for pattern in kind.targets for path in folder.glob(pattern) if path.is_file())
        assert self.targets, f"{kind.name} made no file"
        self.whole = {path: path.read_bytes() for path in self.targets}
        self.expected = kind.read(folder)

    def restore(self) -> None:
        folders = {path.parent for path in self.targets}
        for path in (found for pattern in self.kind.targets for found in self.folder.glob(pattern)):
            if path.is_file() and path not in self.whole:
                path.unlink()
        for path, content in self.whole.items():
            if not path.is_file() or path.read_bytes() != content:
                assert path.parent in folders
                path.write_bytes(content)

    def damage(self, dice: random.Random) -> tuple[str, str]:
        """Change one file; what was done, and to which."""
        path = dice.choice(self.targets)
        data = self.whole[path]
        names = [*ACTS, "swap", "remove", *(["crafted"] * 2 if self.kind.crafted else [])]
        if path.suffix in (".json", ".jsonl", ".toml", ".txt", ".csv", ".py"):
            names += ["value", "digits"] * 2
        act = dice.choice(names)
        if act == "remove":
            path.unlink()
        elif act == "swap":
            path.write_bytes(self.whole[dice.choice(self.targets)] if len(self.targets) > 1 else b"\x93NUMPY\x01\0")
        elif act == "crafted":
            assert self.kind.crafted
            path, content = self.kind.crafted(self.folder, dice)
            path.write_bytes(content)
        else:
            path.write_bytes(ACTS[act](data, dice) if data else b"\0")
        return act, str(path.relative_to(self.folder))

    def run(self, number: int, seed: int) -> dict[str, Any]:
        dice = random.Random(f"{seed}/{number}/{self.kind.name}")
        act, file = self.damage(dice)
        before, start = _reset_peak(), time.process_time()
        result, detail = self._read()
        seconds = round(time.process_time() - start, 3)
        peak = _peak_bytes() - before
        self.restore()
        if peak > MAX_BYTES and result in GOOD:
            result = "MEMORY"
        told = {"n": number, "kind": self.kind.name, "act": act, "file": file, "result": result, "mib": peak >> 20}
        told["seconds"] = seconds
        return {**told, "detail": detail} if result in BAD or result == "refused" else told

    def _read(self) -> tuple[str, str]:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
                try:
                    found = self.kind.read(self.folder)
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
        except MeshwrightError as error:
            return ("refused", str(error)[:300]) if str(error).strip() else ("TRACEBACK", "an error without words")
        except Hang:
            return "HANG", f"{CPU_SECONDS} s"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return "TRACEBACK", "".join(traceback.format_exception(error))[-1500:]
        if found == self.expected:
            return "same", ""
        return ("SILENT", f"{self.expected!r:.200} became {found!r:.200}") if self.kind.is_ours else ("other", "")


def _reset_peak() -> int:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    """The most memory of this process since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


# Many inputs.


def work(folder: Path, names: list[str], seed: int, numbers: range, results: Path) -> None:
    """The inputs with these numbers, a line of JSON for each; run in a process of its own."""

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGPROF, stop)
    cases: dict[str, Case] = {}
    with open(results, "a", encoding="utf-8", buffering=1) as file:
        for number in numbers:
            name = names[number % len(names)]
            if name not in cases:
                cases[name] = Case(KINDS[name], folder / name.replace(" ", "-"))
            file.write(json.dumps({"begins": number}) + "\n")
            file.write(json.dumps(cases[name].run(number, seed)) + "\n")


def campaign(count: int, seed: int, names: list[str], say: Callable[[str], None]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="meshwright-damage-") as made:
        folder, results = Path(made), Path(made) / "results.jsonl"
        environment = os.environ | {"XDG_STATE_HOME": f"{made}/state", "TOKENIZERS_PARALLELISM": "false"}
        first, found = 0, []
        while first < count:
            words = ["--worker", made, "--seed", str(seed), "--first", str(first), "--count", str(count)]
            words += [word for name in names for word in ("--kind", name)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.damage", *words],
                cwd=Path(__file__).parents[1],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
            found = [line for line in lines if "result" in line]
            begun = max((line["begins"] for line in lines if "begins" in line), default=-1)
            if done.returncode == 0:
                break
            if done.returncode > 0 or begun < first:
                raise RuntimeError(f"the worker failed:\n{done.stderr[-3000:]}")
            name = names[begun % len(names)]
            say(f"input {begun} ({name}) ended the process with code {done.returncode}")
            crash = {"n": begun, "kind": name, "result": "CRASH", "detail": done.stderr[-1500:], "mib": 0}
            with open(results, "a", encoding="utf-8") as file:
                file.write(json.dumps(crash) + "\n")
            found.append(crash)
            shutil.rmtree(folder / name.replace(" ", "-"), ignore_errors=True)
            first = begun + 1
        return found


def prepare_all(folder: Path, names: list[str]) -> None:
    for name in names:
        place = folder / name.replace(" ", "-")
        if not place.exists():
            place.mkdir()
            KINDS[name].make(place)


def table(found: list[dict[str, Any]]) -> str:
    counts: dict[str, Counter[str]] = {}
    for line in found:
        counts.setdefault(line["kind"], Counter())[line["result"]] += 1
    total = sum(counts.values(), Counter())
    rows = ["| what | inputs | refused | same | other | silent | traceback | hang | over 1 GiB | crash | most MiB |"]
    rows.append("|---|" + "---|" * 10)
    for name, each in [*sorted(counts.items()), ("all", total)]:
        most = max((line["mib"] for line in found if name in ("all", line["kind"])), default=0)
        label = f"{name} (mw's own)" if name in KINDS and KINDS[name].is_ours else name
        numbers = [each[result] for result in (*GOOD, *BAD)]
        rows.append(f"| {label} | {sum(numbers):,} | " + " | ".join(f"{n:,}" for n in numbers) + f" | {most:,} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--worker", default="")
    chosen = parser.parse_args()
    names = chosen.kind or [name for name, kind in KINDS.items() for _ in range(kind.share)]
    if chosen.worker:
        folder = Path(chosen.worker)
        prepare_all(folder, sorted(set(names)))
        work(folder, names, chosen.seed, range(chosen.first, chosen.count), folder / "results.jsonl")
        return 0
    found = campaign(chosen.count, chosen.seed, names, lambda line: print(line, file=sys.stderr))
    bad = [line for line in found if line["result"] in BAD]
    print(json.dumps(found) if chosen.json else table(found))
    for line in bad[:40] if not chosen.json else []:
        print(f"\n{line['result']}: {line['kind']} {line.get('act')} {line.get('file')} (input {line['n']})")
        print(line.get("detail", ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
