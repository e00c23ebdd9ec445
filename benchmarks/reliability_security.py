"""Rows of the scorecard about hostile input: fuzzed files and command lines, strangers' folders, the control plane."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import pickle
import random
import re
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from benchmarks.damage import ACTS, BAD, campaign
from benchmarks.damage_kinds import KINDS, craft_command, make_commands, make_dcp, make_hf
from benchmarks.scorecard import RowResult, clean_environment, final_state, toy_run, train, train_words

ROOT = Path(__file__).parents[1]
HOSTS = ROOT / "tests" / "launch"
MOST_DEPENDENCIES = 10
SLOW_SECONDS = 2.0
"""Of processor time for one input."""
LICENCES = ("apache", "bsd", "mit", "isc", "psf", "python software foundation", "mpl")
OURS = ("text cache", "image cache", "table cache", "index cache", "prepared")
THEIRS = ("text", "jsonl", "parquet text", "csv", "npy", "flat bin", "megatron", "npz images", "npz table", "images")


def damaged(count: int, names: Sequence[str], seed: int) -> tuple[Counter[str], list[str], float]:
    """A campaign of benchmarks/damage.py: results, what was bad, and the slowest input."""
    found = campaign(count, seed, list(names), lambda line: None)
    bad = [
        f"python -m benchmarks.damage --seed {seed}: input {line['n']} {line['result']} ({line['kind']})"
        for line in found
        if line["result"] in BAD
    ]
    slow = [line for line in found if line.get("seconds", 0.0) > SLOW_SECONDS]
    bad += [f"input {line['n']} of seed {seed} took {line['seconds']} s of CPU ({line['kind']})" for line in slow]
    return Counter(line["result"] for line in found), bad, max(line.get("seconds", 0.0) for line in found)


def r14(count: int) -> RowResult:
    """Damaged data and caches; and real runs whose corpus changed since they began."""
    results, bad, _ = damaged(count, [*OURS, *OURS, *THEIRS], seed=14)
    changes: dict[str, Callable[[Path], object]] = {
        "as it was": lambda path: None,
        "missing": Path.unlink,
        "truncated": lambda path: path.write_bytes(path.read_bytes()[:-50]),
        "flipped": _flip_and_keep_the_time,
        "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    }
    with tempfile.TemporaryDirectory(prefix="meshwright-r14-") as made:
        wanted: dict[str, Any] = {}
        for name, change in changes.items():
            run_file = toy_run(Path(made) / name, steps=8, save_every=2, ranks=1)
            first = train(run_file, "--set", "train.steps=4")
            change(run_file.parent / "corpus.txt")
            done = train(run_file)
            if not wanted:
                wanted = final_state(run_file.parent / "run")
            elif done.returncode == 0 and final_state(run_file.parent / "run") == wanted:
                continue  # what is trained on was made from the file before it changed
            elif done.returncode != 2 or "corpus.txt" not in done.stderr:
                bad.append(f"corpus {name} since the start: exit {done.returncode}: {done.stderr[-200:]}")
            if first.returncode:
                bad.append(f"the run before the change: exit {first.returncode}: {first.stderr[-200:]}")
    figures = f"{results['refused']:,} refused, {results['same']:,} as if whole, {results['other']:,} valid otherwise, "
    figures += f"{results['SILENT']} wrong bytes used; {len(changes) - 1} corpora changed between two starts"
    return RowResult(passed=not bad, count=count, figures=figures, failures=tuple(bad[:10]))


def _flip_and_keep_the_time(path: Path) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def r25(count: int) -> RowResult:
    """Files and command lines in process; one command line in 2,000 for real; one random plan in 5,000 trained."""
    results, bad, slowest = damaged(count, [name for name in KINDS if name not in OURS], seed=25)
    num_real, num_plans = max(2, count // 2000), max(1, count // 5000)
    with tempfile.TemporaryDirectory(prefix="meshwright-r25-") as made:
        folder = Path(made)
        make_commands(folder)
        for number in range(num_real):
            _, content = craft_command(folder, random.Random(f"25/{number}"))
            words = [word for word in json.loads(content) if "\0" not in word]
            command = [sys.executable, "-P", "-m", "meshwright.cli.main", *words]
            done = subprocess.run(
                command, capture_output=True, text=True, env=clean_environment(), cwd=folder, timeout=300, check=False
            )
            if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
                bad.append(f"mw {words}: exit {done.returncode}: {done.stderr[-300:]}")
        words = ["--count", str(num_plans), "--first", "25000", "--most-ranks", "2", "--out", made]
        plans = subprocess.run(
            [sys.executable, "-m", "benchmarks.fuzz", *words], capture_output=True, text=True, cwd=ROOT, check=False
        )
        if plans.returncode:
            bad.append(f"python -m benchmarks.fuzz {' '.join(words[:-2])}: {(plans.stdout + plans.stderr)[-300:]}")
    figures = f"{sum(results.values()):,} inputs: {results['TRACEBACK']} tracebacks, {results['HANG']} hangs, "
    figures += f"{results['CRASH']} crashes, slowest {slowest:.1f} s of CPU; {num_real} real commands; "
    figures += f"{num_plans} random plans trained or refused"
    return RowResult(passed=not bad, count=count, figures=figures, failures=tuple(bad[:10]))


# R26: folders of strangers. What happens is seen by Python's own audit events, not by the code that reads.

FORBIDDEN_EVENTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "socket.bind",
    "ctypes.dlopen",
    "pickle.find_class",
    "shutil.",
    "os.remove",
    "os.rename",
    "os.link",
    "os.symlink",
)


PYTHONS = (sys.prefix, sys.base_prefix, str(ROOT), *(os.path.realpath(each) for each in sys.path if each))
"""Where Python's own modules, the installed ones and ours are."""
SANDBOXED = "<template>"
"""What Jinja calls the code of a template, which it runs in its sandbox: what that does is watched like all else."""


class Watch:
    """Events of this process that reading a stranger's folder must not cause."""

    def __init__(self, folder: Path):
        self.allowed, self.seen, self.is_on = str(folder), [], False
        sys.addaudithook(self.look)

    def look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open":
            path, mode, flags = arguments
            is_write = bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if isinstance(path, str | bytes) and (is_write or not self._is_known(os.fsdecode(path))):
                self.seen.append(f"open {path!r} {mode}")
        elif event.startswith(FORBIDDEN_EVENTS) or (event in ("exec", "compile") and not self._is_ours(arguments)):
            self.seen.append(f"{event} {arguments!r:.200}")

    def _is_known(self, path: str) -> bool:
        """In the folder itself, or Python's own modules and the kernel's files."""
        inside = os.path.realpath(path)
        return inside.startswith((self.allowed, *PYTHONS, "/proc/", "/sys/", "/dev/"))

    @staticmethod
    def _is_ours(arguments: tuple[Any, ...]) -> bool:
        code = arguments[0]
        name = getattr(code, "co_filename", "") or (arguments[1] if len(arguments) > 1 else "")
        return isinstance(name, str) and name.startswith((*PYTHONS, "<frozen", SANDBOXED))


class Runs:
    """What a hostile pickle asks for."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


def _safetensors(header: dict[str, Any] | bytes, data: int = 24) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def hostile_folders(root: Path, canary: Path) -> Iterator[tuple[str, Path, Callable[[Path], Any]]]:
    """(what, folder, how it is read): each must be refused with an error of ours."""
    read_hf, read_dcp, read_checkpoint = (KINDS[name].read for name in ("hugging face", "dcp", "checkpoint"))

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        make(folder)
        return folder

    folder = made("pickled metadata", make_dcp)
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(canary)))
    yield "a pickle that runs a command", folder, read_dcp
    folder = made("pickled file", make_hf)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(canary)))
    yield "pickled weights", folder, read_hf

    folder = made("auto map", make_hf)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    yield "auto_map", folder, read_hf

    entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
    headers: dict[str, dict[str, Any] | bytes] = {
        "overlapping offsets": {"a": entry, "b": entry},
        "offsets beyond the file": {"a": {**entry, "data_offsets": [0, 1 << 60]}},
        "a negative shape": {"a": {**entry, "shape": [-6]}},
        "a header of terabytes": b"",
        "a name twice": b'{"a": ' + json.dumps(entry).encode() + b', "a": ' + json.dumps(entry).encode() + b"}",
        "a million tensors": {
            f"t{number}": {**entry, "data_offsets": [24, 24], "shape": [0]} for number in range(10**6)
        },
    }
    for name, header in headers.items():
        folder = made(name, make_hf)
        (folder / "model.safetensors.index.json").unlink()
        for path in folder.glob("*.safetensors"):
            path.unlink()
        content = struct.pack("<Q", 1 << 42) + bytes(64) if header == b"" else _safetensors(header)
        (folder / "model.safetensors").write_bytes(content)
        yield name, folder, read_hf

    for name in ("../outside.safetensors", "/etc/passwd", "sub/../../outside.safetensors", ".", "a\u0000b"):
        folder = made(f"index {secrets.token_hex(3)}", make_hf)
        (root / "outside.safetensors").write_bytes(_safetensors({"a": entry}))
        index = {"metadata": {}, "weight_map": {"a": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        yield f"an index that names {name!r}", folder, read_hf
    folder = made("links", make_hf)
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    shard.rename(root / "moved")
    shard.symlink_to(root / "moved")
    yield "a link", folder, read_hf
    folder = made("pipe", make_hf)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    yield "a pipe", folder, read_hf

    folder = made("checkpoint link", KINDS["checkpoint"].make)
    for path in sorted(folder.glob("*/manifest.json")):
        path.rename(root / f"manifest-{path.parent.name}")
        path.symlink_to(root / f"manifest-{path.parent.name}")
    yield "linked manifests", folder, read_checkpoint

    def template(text: str) -> Callable[[Path], None]:
        def make(folder: Path) -> None:
            KINDS["chat template"].make(folder)
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": text}))

        return make

    escapes = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch " + str(canary) + "') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    )
    for number, text in enumerate(escapes):
        folder = made(f"template {number}", template(text))
        yield f"template {text[:40]}", folder, KINDS["chat template"].read


def fuzz_stranger(folder: Path, first: int, count: int, out: Path) -> None:
    """Many damaged folders of strangers in this process, audited; one JSON line of what was found. Imports first."""
    from meshwright.checkpoint.dcp import open_dcp
    from meshwright.checkpoint.manifest import parse_manifest
    from meshwright.checkpoint.safetensors_folder import read_shard
    from meshwright.core.errors import MeshwrightError
    from meshwright.hf.config_json import read_folder

    make_hf(folder)
    dcp, checkpoint = folder / "dcp", folder / "checkpoint"
    for place, make in ((dcp, make_dcp), (checkpoint, KINDS["checkpoint"].make)):
        place.mkdir()
        make(place)
    manifest = next(iter(checkpoint.glob("*/manifest.json"))).read_bytes()
    shard = sorted(folder.glob("*.safetensors"))[0]
    metadata_bytes, shard_bytes = (dcp / ".metadata").read_bytes(), shard.read_bytes()
    config_bytes = (folder / "config.json").read_bytes()
    fuzzed = folder / "fuzzed"
    fuzzed.mkdir()

    def as_shard(data: bytes) -> None:
        (fuzzed / "a.safetensors").write_bytes(data)
        watch.is_on = True
        read_shard(fuzzed, "a.safetensors")

    def as_config(data: bytes) -> None:
        (fuzzed / "config.json").write_bytes(data)
        watch.is_on = True
        read_folder(fuzzed)

    def as_pickle(data: bytes) -> None:
        (fuzzed / ".metadata").write_bytes(data)
        watch.is_on = True
        open_dcp(fuzzed).close()

    def as_manifest(data: bytes) -> None:
        watch.is_on = True
        parse_manifest(data, "manifest.json")

    readers: tuple[tuple[bytes, Callable[[bytes], None]], ...] = (
        (manifest, as_manifest),
        (metadata_bytes, as_pickle),
        (shard_bytes, as_shard),
        (config_bytes, as_config),
    )
    for data, read in readers:  # what they import, they import now
        watch = Watch(folder)
        read(data)
        watch.is_on = False
    watch = Watch(folder)
    acts, failures, refused = sorted(ACTS), [], 0
    for number in range(first, first + count):
        dice = random.Random(f"26/{number}")
        data, read = readers[number % len(readers)]
        name = dice.choice(acts)
        changed = ACTS[name](data, dice)
        if dice.randrange(3) == 0:
            changed = ACTS[dice.choice(acts)](changed or b"\0", dice)
        start = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                read(changed)
        except MeshwrightError:
            refused += 1
        except Exception as error:
            failures.append(f"input {number} ({read.__name__}, {name}): {type(error).__name__}: {error}"[:300])
        watch.is_on = False
        if time.process_time() - start > 2.0:
            failures.append(f"input {number} ({read.__name__}, {name}): {time.process_time() - start:.1f} s")
        if watch.seen:
            failures += [f"input {number}: {event}" for event in watch.seen[:3]]
            watch.seen.clear()
    out.write_text(json.dumps({"refused": refused, "failures": failures[:10], "count": count}))


def r26(count: int) -> RowResult:
    """Hostile folders, modules in the working folder, and fuzzed files of strangers with every event audited."""
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-r26-", dir="/dev/shm") as made:
        root, out = Path(made), Path(made) / "out.json"
        canary = root / "CANARY"
        command = [sys.executable, "-m", "benchmarks.reliability_security", "--hostile", made]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False)
        if done.returncode:
            failures.append(f"hostile folders: {done.stderr[-500:]}")
            folders: list[str] = []
        else:
            found = json.loads(out.read_text())
            folders = found["names"]
            failures += found["failures"]
        failures += _modules_of_the_working_folder(root, canary)
        (root / "fuzz").mkdir()
        words = ["--fuzz", str(root / "fuzz"), "--count", str(count), "--out", str(out)]
        command = [sys.executable, "-m", "benchmarks.reliability_security", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            failures.append(f"fuzz ended with {done.returncode}: {done.stderr[-500:]}")
            refused = 0
        else:
            found = json.loads(out.read_text())
            failures, refused = failures + found["failures"], found["refused"]
        if canary.exists():
            failures.append("something was executed: the canary is there")
    figures = (
        f"{count:,} fuzzed files of strangers ({refused:,} refused), {len(folders)} hostile folders, modules in the "
    )
    figures += f"working folder: {len(failures)} executions, escapes or tracebacks by Python's audit events"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _modules_of_the_working_folder(root: Path, canary: Path) -> list[str]:
    """`mw train` where modules of the standard library's and torch's names lie in the working folder."""
    place = root / "cwd"
    run_file = toy_run(place, steps=2, save_every=2)
    for name in ("random", "json", "torch", "numpy", "meshwright", "logging", "socket", "typing", "sitecustomize"):
        (place / f"{name}.py").write_text(f"open({str(canary)!r}, 'w').write({name!r})\nraise SystemExit(99)\n")
    mw = shutil.which("mw", path=str(Path(sys.executable).parent))
    if mw is None:
        return ["there is no command mw beside this Python"]
    words = [mw, *train_words(run_file)[3:]]
    done = subprocess.run(
        words, capture_output=True, text=True, env=clean_environment(), cwd=place, timeout=600, check=False
    )
    if done.returncode or canary.exists():
        what = canary.read_text() if canary.exists() else done.stderr[-300:]
        return [f"mw train beside modules of known names: exit {done.returncode}: {what}"]
    (root / "victim").write_text("precious")
    wrong = []
    for name in ("metrics.tmp", "events.jsonl", "plan.json", ".secret"):
        path = place / "run" / name
        path.unlink(missing_ok=True)
        path.symlink_to(root / "victim")
        done = train(run_file, "--set", "train.steps=4")
        path.unlink()
        if done.returncode != 2 or "symbolic link" not in done.stderr or (root / "victim").read_text() != "precious":
            wrong.append(f"a link {name} in the run folder: exit {done.returncode}: {done.stderr[-200:]}")
    return wrong


def read_hostile(root: Path) -> None:
    """Read every hostile folder in this process, audited; the outcome goes to `out.json`."""
    from meshwright.core.errors import MeshwrightError

    canary, failures, names = root / "CANARY", [], []
    inside = root / "hostile"
    inside.mkdir()
    for kind in ("hugging face", "dcp", "checkpoint", "chat template"):  # what they import, they import now
        warm = root / f"warm-{kind.replace(' ', '-')}"
        warm.mkdir()
        KINDS[kind].make(warm)
        KINDS[kind].read(warm)
    watch = Watch(inside)
    for name, folder, read in hostile_folders(inside, canary):
        watch.allowed, watch.is_on = str(folder), True
        start, verdict = time.monotonic(), "was accepted"
        try:
            read(folder)
        except MeshwrightError:
            verdict = ""
        except BaseException as error:
            verdict = f"{type(error).__name__}: {error}"
        finally:
            watch.is_on = False
        names.append(name)
        if time.monotonic() - start > 60:
            verdict += f" took {time.monotonic() - start:.0f} s"
        if verdict or watch.seen:
            failures.append(f"{name}: {verdict} {watch.seen[:2]}"[:300])
        watch.seen.clear()
    (root / "out.json").write_text(json.dumps({"names": names, "failures": failures}))


def r27(count: int) -> RowResult:
    """The static gate of tests/house, the number of hard dependencies, their licences, and `pip check`.

    An audit against a database of known vulnerabilities needs the network: `make audit`.
    """
    gate = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "house" / "test_style.py"), "-k"]
    house = subprocess.run([*gate, "unsafe or guard"], capture_output=True, text=True, cwd=ROOT, check=False)
    problems = [house.stdout[-500:]] if house.returncode else []
    problems += dependency_problems()
    figures = (
        f"{len(hard_dependencies())} hard dependencies with free licences; pip check clean; online audit: `make audit`"
    )
    return RowResult(passed=not problems, count=1, figures=figures, failures=tuple(problems))


def hard_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.split(r"[^A-Za-z0-9._-]", each)[0] for each in project["dependencies"]]


def dependency_problems() -> list[str]:
    """Too many, of a licence that asks for something back, or not what they need of each other."""
    names, problems = hard_dependencies(), []
    if len(names) > MOST_DEPENDENCIES:
        problems.append(f"{len(names)} hard dependencies: {', '.join(names)}; the limit is {MOST_DEPENDENCIES}")
    for name in names:
        about = metadata(name)
        told = [about.get("License-Expression") or "", about.get("License") or "", *(about.get_all("Classifier") or [])]
        licence = " ".join(text for text in told if text and ("::" not in text or text.startswith("License")))[:3000]
        if not any(word in licence.lower() for word in LICENCES):
            problems.append(f"{name}: licence {licence[:100] or 'unknown'}")
    pip = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return [*problems, *([pip.stdout[-500:]] if pip.returncode else [])]


# R29: the control plane, on hosts that are network namespaces.


def listeners(pid: int) -> set[tuple[str, int]]:
    """(address, port) of every TCP socket that listens where this process lives."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A":
                    host, port = local.split(":")
                    words = struct.pack(
                        f"={len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8))
                    )
                    found.add((socket.inet_ntop(family, words), int(port, 16)))
    return found


PROBE = """
import random, socket, sys
for port in map(int, sys.argv[2:]):
    for number in range(20):
        try:
            with socket.create_connection((sys.argv[1], port), 2) as s:
                s.settimeout(0.2)
                s.sendall(random.Random(number).randbytes(1 + 50 * number) if number % 4 else bytes(4096))
                s.recv(100)
        except OSError:
            pass
"""


def r29(count: int) -> RowResult:
    """What listens and where, in four settings; random bytes to it; ranks with another secret."""
    sys.path.insert(0, str(HOSTS))
    namespaces = importlib.import_module("namespaces")
    if reason := namespaces.why_there_are_none():
        return RowResult(passed=False, count=0, figures=f"no network namespaces here: {reason}")
    failures: list[str] = []
    seen: Counter[str] = Counter()
    settings: tuple[Callable[[Any, Path], Iterator[str]], ...] = (
        _one_host,
        _two_hosts,
        _wrong_secret,
        _outside_one_host,
    )
    for number in range(count):
        attempt = settings[number % len(settings)]
        with tempfile.TemporaryDirectory(prefix="meshwright-r29-") as made:
            folder = Path(made)
            with namespaces.hosts_made(3, folder) as hosts:
                wrong = list(attempt(hosts, folder))
        seen[attempt.__name__.strip("_").replace("_", " ")] += 1
        failures += [f"{attempt.__name__} {number}: {text}" for text in wrong]
    figures = ", ".join(f"{name} x {times}" for name, times in seen.items())
    figures = f"{figures}: {len(failures)} listeners off loopback unasked, strangers admitted or crashes"
    return RowResult(passed=not failures, count=count, figures=figures, failures=tuple(failures[:10]))


def _outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=600)[0]
    return process.returncode, output


def _when_training(folder: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        with contextlib.suppress(OSError):
            if (folder / "run" / "metrics.jsonl").read_bytes().count(b"\n") > 3:
                return
        time.sleep(0.05)


def _one_host(hosts: Any, folder: Path) -> Iterator[str]:
    """`mw train` by itself: nothing but the loopback."""
    process = hosts.start(0, *train_words(toy_run(folder, steps=400, save_every=0))[2:])
    _when_training(folder, [process])
    yield from (
        f"{host}:{port} listens" for host, port in listeners(process.pid) if not host.startswith(("127.", "::1"))
    )
    process.terminate()
    code, output = _outcome(process)
    if code != 75:
        yield f"exit {code}: {output[-300:]}"


def _outside_one_host(hosts: Any, folder: Path) -> Iterator[str]:
    """Two ranks of one host by torchrun's variables, which name its address on the network."""
    words = train_words(toy_run(folder, steps=400, save_every=0))[2:]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29511"}
    ranks = [hosts.start(0, *words, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(2)]
    _when_training(folder, ranks)
    found = listeners(ranks[0].pid)
    yield from (f"{host}:{port} listens" for host, port in found if not host.startswith(("127.", "::1")))
    if not found:
        yield "nothing was seen to listen, so nothing was tried"
    for rank in ranks:
        rank.terminate()
    yield from (f"exit {code}: {output[-300:]}" for code, output in map(_outcome, ranks) if code != 75)


def _two_hosts(hosts: Any, folder: Path) -> Iterator[str]:
    """Ranks of two hosts listen on their one address; a third host sends random bytes to all of it, and they finish."""
    hosts.count = 2
    words = train_words(toy_run(folder, steps=600, save_every=100))[3:]
    ranks = [hosts.start_rank(host, *words) for host in range(2)]
    hosts.count = 3
    _when_training(folder, ranks)
    for host, ports in enumerate([listeners(rank.pid) for rank in ranks]):  # all of them while the run goes on
        wrong = [each for each in ports if each[0] != hosts.address(host) and not each[0].startswith(("127.", "::1"))]
        yield from (f"{address}:{port} of host {host} listens" for address, port in wrong)
        script = folder / "probe.py"
        script.write_text(PROBE)
        command = ["ip", "netns", "exec", hosts.namespace(2), sys.executable, str(script), hosts.address(host)]
        open_ports = [str(port) for address, port in ports if address == hosts.address(host)]
        if not open_ports:
            yield f"host {host} was not seen to listen, so nothing was tried"
        subprocess.run([*command, *open_ports], timeout=300, check=True)
    for code, output in map(_outcome, ranks):
        if code or "Traceback" in output:
            yield f"exit {code}: {output[-500:]}"


def _wrong_secret(hosts: Any, folder: Path) -> Iterator[str]:
    """One of two ranks has another secret: nobody trains, both say who, and no secret is in what they write."""
    hosts.count = 2
    words = train_words(toy_run(folder, steps=50))[3:]
    theirs = [secrets.token_hex(16) for _ in range(2)]
    ranks = [hosts.start_rank(host, *words, MESHWRIGHT_SECRET=theirs[host]) for host in range(2)]
    hosts.count = 3
    shown: list[str] = []
    watcher = threading.Thread(target=_command_lines, args=(ranks, shown))
    watcher.start()
    for code, output in map(_outcome, ranks):
        shown.append(output)
        if code != 2 or "does not know this run's secret" not in output:
            yield f"exit {code}: {output[-300:]}"
    watcher.join()
    shown += [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    yield from ("a secret is in an output, a file or a command line" for one in theirs if one in "\n".join(shown))
    if (folder / "run" / "checkpoints").exists() and any((folder / "run" / "checkpoints").iterdir()):
        yield "a checkpoint was written"


def _command_lines(processes: Sequence[subprocess.Popen[str]], shown: list[str]) -> None:
    while any(process.poll() is None for process in processes):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                shown.append(path.read_bytes().decode(errors="replace"))
        time.sleep(2.0)


def main() -> None:
    """The parts of R26 that run in a process of their own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hostile", type=Path)
    parser.add_argument("--fuzz", type=Path)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.hostile:
        read_hostile(given.hostile)
    if given.fuzz:
        fuzz_stranger(given.fuzz, 0, given.count, given.out)


if __name__ == "__main__":
    main()
