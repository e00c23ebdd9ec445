"""Text to Megatron token files, in parallel, going on where an interrupted run stopped.

    X.parts/<chunk>.bin       the tokens of one chunk of the input; .lengths of its documents, .weights of its tokens
    X.parts/<chunk>.json      written after them, with their digest: this chunk is done
    X.bin X.idx               all chunks in order; X.weights where some tokens do not count in the loss
    X.facts.json              which tokenizer, from what, and hashes; written last. A tokenizer's file is copied too

A chunk's name is made of everything that decides its tokens, so what was done is found again, also after some of the
files changed. Chunks depend on the files alone: whoever makes which, the result is the same to the byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from meshwright.core.codec import decode, encode, seal, to_json
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.process import child_command, child_environment
from meshwright.data.cache import write_whole
from meshwright.data.chat import open_template
from meshwright.data.file_list import SourceFile, find_files
from meshwright.data.hashed_files import DamagedFile, hash_files
from meshwright.data.json_records import TextKeys
from meshwright.data.megatron import PreparedFacts, beside, megatron_dtype, write_index
from meshwright.data.prepare_worker import PartJob, PartResult, finished_part
from meshwright.data.token_reader import FileRange, chunks_of, emptiness, raise_all, unreadable
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

# Raise it when the same input gives other files than before.
_PREPARE_VERSION = 2
_COPY_BYTES = 1 << 24

Report = Callable[[int, int, int], None]
"""(bytes of input done, bytes of input in all, bytes that an earlier run had done)."""


@dataclass(frozen=True, kw_only=True)
class PreparedTokens:
    stem: Path
    facts: PreparedFacts
    num_bytes: int
    num_bytes_reused: int


@dataclass(frozen=True, kw_only=True)
class _Part:
    chunk: FileRange
    num_bytes: int
    """Of the input; a guess where rows are not laid out in bytes."""
    job: PartJob


def prepare(
    inputs: Sequence[str],
    output: str,
    *,
    tokenizer: str = "byte",
    text_key: str = "text",
    prompt_key: str = "prompt",
    chat_template: str = "",
    num_workers: int = 0,
    report: Report = lambda done, total, reused: None,
) -> PreparedTokens:
    """Tokenize `inputs` into OUTPUT.bin and .idx (or OUTPUT/tokens.bin and .idx of a folder)."""
    problems: list[Problem] = []
    files = find_files(tuple(inputs), problems)
    try:
        words = open_tokenizer(tokenizer)
    except MeshwrightError as error:
        problems.extend(error.problems)
        words = ByteTokenizer()
    keys = TextKeys(text=text_key, prompt=prompt_key)
    try:
        keys = replace(keys, template=open_template(chat_template, tokenizer))
    except MeshwrightError as error:
        problems.extend(error.problems)
    chunks = {file: _chunks(file, problems) for file in files}
    raise_all(problems)
    stem = _stem(output)
    folder = beside(stem, ".parts")
    make = partial(
        PartJob,
        folder=str(folder),
        tokenizer=tokenizer,
        text_key=text_key,
        prompt_key=prompt_key,
        chat_template=chat_template,
    )
    parts = [part for file in files for part in _parts(file, chunks[file], make, [words.name, *keys.facts])]
    identity = xxhash.xxh3_64_hexdigest(json.dumps([part.job.name for part in parts]).encode())
    total = sum(part.num_bytes for part in parts)
    finished = _finished(stem, identity)
    if finished:
        report(total, total, total)
        return PreparedTokens(stem=stem, facts=finished, num_bytes=total, num_bytes_reused=total)
    raise_all(_others_files(stem, folder))
    with _refusals(stem), _locked(folder):
        results, num_reused = _make(parts, num_workers or len(os.sched_getaffinity(0)), report)
        facts = _merge(stem, parts, results, words, tokenizer, identity)
        shutil.rmtree(folder, ignore_errors=True)
    return PreparedTokens(stem=stem, facts=facts, num_bytes=total, num_bytes_reused=num_reused)


def _chunks(file: SourceFile, problems: list[Problem]) -> list[FileRange]:
    try:
        return chunks_of(file)
    except OSError as error:
        problems.append(unreadable(file.path, error))
    except MeshwrightError as error:
        problems.extend(error.problems)
    return []


def _stem(output: str) -> Path:
    path = Path(output).expanduser()
    if path.is_dir() or output.endswith("/"):
        return path / "tokens"
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _parts(
    file: SourceFile, chunks: list[FileRange], make: Callable[..., PartJob], facts: list[str]
) -> Iterator[_Part]:
    for number, chunk in enumerate(chunks):
        identity = [_PREPARE_VERSION, encode(file), encode(chunk), *facts]
        name = f"{number:06}-{xxhash.xxh3_64_hexdigest(json.dumps(identity).encode())}"
        is_bytes = chunk.kind in ("text", "jsonl")
        num_bytes = chunk.stop - chunk.start if is_bytes else file.size_bytes // len(chunks)
        yield _Part(chunk=chunk, num_bytes=num_bytes, job=make(name=name, chunk=chunk))


def _finished(stem: Path, identity: str) -> PreparedFacts | None:
    """What an earlier run wrote, if it is whole and of the same input."""
    try:
        facts = PreparedFacts.beside(stem)
        if facts is None or facts.identity != identity or facts.hashes is None:
            return None
        for file in facts.open_files(stem).values():
            file.check_all()
        if facts.tokenizer != ByteTokenizer.name:
            content = beside(stem, ".tokenizer.json").read_bytes()
            return facts if f":{xxhash.xxh3_64_hexdigest(content)}:" in facts.tokenizer else None
    except (OSError, DamagedFile, MeshwrightError):
        return None
    return facts


def _others_files(stem: Path, folder: Path) -> list[Problem]:
    """Files that would be replaced and are not ours."""
    if beside(stem, ".facts.json").exists() or folder.exists():
        return []
    there = [path for path in (beside(stem, ".bin"), beside(stem, ".idx")) if path.exists()]
    what = "is there already, and was not written by `mw data prepare`."
    return [Problem(where=str(path), what=what, fix="Name another output.") for path in there]


def _make(parts: list[_Part], num_workers: int, report: Report) -> tuple[list[PartResult], int]:
    """Every part's result, in order; those an earlier run finished are only checked."""
    results: dict[int, PartResult] = {}
    for number, part in enumerate(parts):
        found = finished_part(part.job)
        if found is not None:
            results[number] = found
    total, reused = sum(part.num_bytes for part in parts), sum(parts[number].num_bytes for number in results)
    waiting = deque(number for number in range(len(parts)) if number not in results)
    done_bytes, lock = reused, threading.Lock()
    report(done_bytes, total, reused)

    def work() -> None:
        nonlocal done_bytes
        with _Worker(is_alone=num_workers == 1) as worker:
            while True:
                try:
                    number = waiting.popleft()
                except IndexError:
                    return
                result = worker.make(parts[number].job)
                with lock:
                    results[number] = result
                    done_bytes += parts[number].num_bytes
                    report(done_bytes, total, reused)

    num_needed = min(num_workers, len(parts) - len(results))
    with ThreadPoolExecutor(max(1, num_needed)) as pool:
        futures = [pool.submit(work) for _ in range(num_needed)]
        try:
            for future in as_completed(futures):
                future.result()
        finally:
            waiting.clear()  # interrupted, or a worker died: the others finish what they have begun
    in_order = [results[number] for number in range(len(parts))]
    raise_all(_problems(parts, in_order))
    return in_order, reused


def _problems(parts: list[_Part], results: list[PartResult]) -> list[Problem]:
    problems = list(dict.fromkeys(problem for result in results for problem in result.problems))
    for path in dict.fromkeys(part.chunk.path for part in parts):
        mine = [result for part, result in zip(parts, results, strict=True) if part.chunk.path == path]
        if not any(result.problems for result in mine):
            num_tokens, num_records = sum(r.num_tokens for r in mine), sum(r.num_records for r in mine)
            problems.extend(emptiness(path, num_tokens, num_records))
    return problems


class _Worker:
    """A process that makes parts, one line of JSON each way; it ends when we do, however we end."""

    def __init__(self, *, is_alone: bool):
        environment = {**os.environ, **child_environment()} | ({} if is_alone else {"TOKENIZERS_PARALLELISM": "false"})
        self.process = subprocess.Popen(
            child_command("meshwright.data.prepare_worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us; the worker sees its input end
        )

    def make(self, job: PartJob) -> PartResult:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(encode(job)) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            what = f"the worker process ended with code {self.process.wait()}."
            fix = "Out of memory? Use fewer workers; what is done is kept."
            raise MeshwrightError([Problem(where=job.chunk.path, what=what, fix=fix)], exit_code=1)
        return decode(PartResult, json.loads(answer), "worker")

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def _merge(
    stem: Path, parts: list[_Part], results: list[PartResult], words: Tokenizer, tokenizer: str, identity: str
) -> PreparedFacts:
    """The final files from the parts; the one that says all is there comes last."""
    paths = [Path(part.job.folder) / part.job.name for part in parts]
    dtype = megatron_dtype(words.vocab_size)

    def copy_weights(file: Any) -> None:
        for path, result in zip(paths, results, strict=True):
            part = path.with_suffix(".weights")
            file.write(part.read_bytes() if result.has_weights else b"\1" * result.num_tokens)

    def copy_tokens(file: Any) -> None:
        for path in paths:
            with open(path.with_suffix(".bin"), "rb") as part:
                while os.sendfile(file.fileno(), part.fileno(), None, _COPY_BYTES):
                    pass

    write_whole(beside(stem, ".bin"), copy_tokens)
    ends = [".bin", ".idx"]
    if any(result.has_weights for result in results):
        ends.append(".weights")
        write_whole(beside(stem, ".weights"), copy_weights)
    lengths = [np.fromfile(path.with_suffix(".lengths"), dtype=np.int32) for path in paths]
    begins = [result.begins for result in results]
    write_whole(beside(stem, ".idx"), lambda file: write_index(file, dtype, lengths, begins))
    if words.name != ByteTokenizer.name:
        source = Path(tokenizer).expanduser()
        source = source / "tokenizer.json" if source.is_dir() else source
        content = source.read_bytes()
        write_whole(beside(stem, ".tokenizer.json"), lambda file: file.write(content))
    hashes, content = hash_files({end: beside(stem, end) for end in ends})
    write_whole(beside(stem, ".xxh3"), lambda file: file.write(content))
    facts = PreparedFacts(
        hashes=hashes,
        identity=identity,
        tokenizer=words.name,
        separator=words.separator,
        num_bytes_of_a_token=dtype.itemsize,
        num_tokens=sum(result.num_tokens for result in results),
        num_documents=sum(result.num_documents for result in results),
        num_text_bytes=sum(result.num_text_bytes for result in results),
    )
    write_whole(beside(stem, ".facts.json"), lambda file: file.write(seal(to_json(facts) + "\n")))
    return facts


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another `mw data prepare` is writing here."
            raise MeshwrightError([Problem(where=str(folder), what=what, fix="Wait for it.")]) from None
        yield


@contextlib.contextmanager
def _refusals(stem: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {(error.strerror or str(error)).lower()}."
        fix = "Free space there or name another place; what is done is kept."
        raise MeshwrightError([Problem(where=str(error.filename or stem), what=what, fix=fix)], exit_code=1) from None
