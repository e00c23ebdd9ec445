"""Text to Megatron token files, in parallel, going on where an interrupted run stopped.

    X.parts/<chunk>.bin       the tokens of one chunk of the input; .lengths of its documents, .weights of its tokens
    X.parts/<chunk>.json      written after them, with their digest: this chunk is done
    X.bin X.idx               all chunks in order; X.weights where some tokens do not count in the loss
    X.facts.json              which tokenizer, from what, and hashes; written last. A tokenizer's file is copied too

A chunk's name is made of everything that decides its tokens, so what was done is found again, also after some of the
files changed. Chunks depend on the files alone: whoever makes which, the result is the same to the byte.

This file is also the worker process that makes parts: it reads jobs from its input, a line of JSON each, and answers
with a line each; it ends with its input.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import xxhash

from meshwright.core.codec import decode, encode, seal, to_json, unseal
from meshwright.core.errors import MeshwrightError, Problem, error_at, raise_problems
from meshwright.core.files import write_whole
from meshwright.core.process import child_command, child_environment
from meshwright.data.cache import hash_files, json_digest
from meshwright.data.data_section import DataSection
from meshwright.data.file_list import collect_problems, find_files
from meshwright.data.records import TextKeys, open_words
from meshwright.data.token_files import PreparedFacts, beside, megatron_dtype, write_index
from meshwright.data.token_reader import FileRange, chunks_of, emptiness, read_chunk
from meshwright.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

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
class PartJob:
    """One chunk of the input, to be made a part of the output."""

    path: str
    """Where the part goes, without an ending."""
    chunk: FileRange
    section: DataSection
    num_bytes: int = 0
    """Bytes of the input; an estimate where rows are not laid out in bytes."""

    def file(self, end: str) -> Path:
        return Path(f"{self.path}{end}")


@dataclass(frozen=True, kw_only=True)
class PartResult:
    num_tokens: int = 0
    num_documents: int = 0
    """Those that begin here."""
    num_records: int = 0
    num_text_bytes: int = 0
    has_weights: bool = False
    begins: bool = True
    """Whether the first sequence begins a document, rather than going on with the last chunk's."""
    digest: str = ""
    problems: tuple[Problem, ...] = ()


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
    section = DataSection(tokenizer=tokenizer, text_key=text_key, prompt_key=prompt_key, chat_template=chat_template)
    words, keys = open_words(section, problems)
    stem = Path(output).expanduser()
    if stem.is_dir() or output.endswith("/"):
        stem = stem / "tokens"
    stem = stem.with_suffix("") if stem.suffix in (".bin", ".idx") else stem
    folder = beside(stem, ".parts")
    jobs: list[PartJob] = []
    for file in files:
        chunks: list[FileRange] = []
        with collect_problems(problems, file.path):
            chunks = chunks_of(file)
        for number, chunk in enumerate(chunks):
            name = json_digest([_PREPARE_VERSION, encode(file), encode(chunk), words.name, *keys.facts])
            is_bytes = chunk.kind in ("text", "jsonl")
            num_bytes = chunk.stop - chunk.start if is_bytes else file.size_bytes // len(chunks)
            path = str(folder / f"{number:06}-{name}")
            jobs.append(PartJob(path=path, chunk=chunk, section=section, num_bytes=num_bytes))
    raise_problems(problems)
    identity = json_digest([os.path.basename(job.path) for job in jobs])
    total = sum(job.num_bytes for job in jobs)
    finished = _finished(stem, identity)
    if finished:
        report(total, total, total)
        return PreparedTokens(stem=stem, facts=finished, num_bytes=total, num_bytes_reused=total)
    if not beside(stem, ".facts.json").exists() and not folder.exists():
        what = "is there already, and was not written by `mw data prepare`."
        there = [path for path in (beside(stem, ".bin"), beside(stem, ".idx")) if path.exists()]
        raise_problems(Problem(where=str(path), what=what, fix="Name another output.") for path in there)
    with _writing(stem, folder):
        results, num_reused = _make_parts(jobs, num_workers or len(os.sched_getaffinity(0)), report)
        facts = _merge(stem, jobs, results, words, identity)
        shutil.rmtree(folder, ignore_errors=True)
    return PreparedTokens(stem=stem, facts=facts, num_bytes=total, num_bytes_reused=num_reused)


def _finished(stem: Path, identity: str) -> PreparedFacts | None:
    """What an earlier run wrote, if it is whole and of the same input."""
    try:
        facts = PreparedFacts.beside(stem)
        if facts is None or facts.identity != identity or facts.hashes is None:
            return None
        for file in facts.open_files(stem).values():
            file.check_all()
        if facts.tokenizer != ByteTokenizer.name:
            facts.read_tokenizer(stem)
    except (OSError, MeshwrightError):
        return None
    return facts


def _make_parts(jobs: list[PartJob], num_workers: int, report: Report) -> tuple[list[PartResult], int]:
    """Every part's result, in order, and the input bytes of those that an earlier run made: these are only checked."""
    earlier = {number: finished_part(job) for number, job in enumerate(jobs)}
    results = {number: result for number, result in earlier.items() if result is not None}
    total, reused = sum(job.num_bytes for job in jobs), sum(jobs[number].num_bytes for number in results)
    waiting = [number for number in range(len(jobs)) if number not in results]
    done_bytes = reused
    report(done_bytes, total, reused)
    idle: SimpleQueue[Callable[[PartJob], PartResult]] = SimpleQueue()

    def work(job: PartJob) -> PartResult:
        make = idle.get()
        try:
            return make(job)
        finally:
            idle.put(make)

    with contextlib.ExitStack() as workers, ThreadPoolExecutor(num_workers) as pool:
        for _ in range(min(num_workers, len(waiting))):
            idle.put(workers.enter_context(_worker(is_alone=num_workers == 1)))
        futures = {pool.submit(work, jobs[number]): number for number in waiting}
        try:
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                done_bytes += jobs[futures[future]].num_bytes
                report(done_bytes, total, reused)
        finally:  # interrupted, or a worker died: the others finish what they have begun
            pool.shutdown(cancel_futures=True)
    in_order = [results[number] for number in range(len(jobs))]
    problems = list(dict.fromkeys(problem for result in in_order for problem in result.problems))
    for path in dict.fromkeys(job.chunk.path for job in jobs):
        mine = [result for job, result in zip(jobs, in_order, strict=True) if job.chunk.path == path]
        if not any(result.problems for result in mine):
            problems += emptiness(path, sum(r.num_tokens for r in mine), sum(r.num_records for r in mine))
    raise_problems(problems)
    return in_order, reused


@contextlib.contextmanager
def _worker(*, is_alone: bool) -> Iterator[Callable[[PartJob], PartResult]]:
    """A process that makes parts, one line of JSON each way; it ends when we do, however we end."""
    environment = {**os.environ, **child_environment()} | ({} if is_alone else {"TOKENIZERS_PARALLELISM": "false"})
    process = subprocess.Popen(
        child_command("meshwright.data.prepare"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for us; the worker sees its input end
    )
    assert process.stdin is not None
    assert process.stdout is not None
    jobs, answers = process.stdin, process.stdout

    def make(job: PartJob) -> PartResult:
        with contextlib.suppress(BrokenPipeError):
            jobs.write(json.dumps(encode(job)) + "\n")
            jobs.flush()
        answer = answers.readline()
        if not answer:
            what = f"the worker process ended with code {process.wait()}."
            raise error_at(job.chunk.path, what, "Out of memory? Use fewer workers; what is done is kept.", exit_code=1)
        return decode(PartResult, json.loads(answer), "worker")

    try:
        yield make
    finally:
        with contextlib.suppress(BrokenPipeError):
            jobs.close()
        answers.close()
        process.wait()


@cache
def _open_words(section: DataSection) -> tuple[Tokenizer, TextKeys]:
    problems: list[Problem] = []
    opened = open_words(section, problems)
    raise_problems(problems)
    return opened


def make_part(job: PartJob) -> PartResult:
    """Tokenize the chunk and write its files, the one that says it is done last. Problems are told, nothing written."""
    problems: list[Problem] = []
    with collect_problems(problems, job.chunk.path):
        words, keys = _open_words(job.section)
        corpus = read_chunk(job.chunk, keys, words, problems)
    if problems:
        return PartResult(problems=tuple(problems))
    tokens, starts = np.ascontiguousarray(corpus.tokens, dtype=megatron_dtype(words.vocab_size)), corpus.starts
    assert starts is not None
    # Of documents, or of the one that goes on here.
    lengths = np.diff(starts if len(starts) else np.zeros(1, dtype=np.int64), append=len(tokens)).astype(np.int32)
    contents = {".bin": tokens.tobytes(), ".lengths": lengths[: len(tokens)].tobytes()}
    if corpus.weights is not None:
        contents[".weights"] = corpus.weights.tobytes()
    for end, content in contents.items():
        write_whole(job.file(end), content)
    result = PartResult(
        num_tokens=len(tokens),
        num_documents=len(starts),
        num_records=corpus.num_records,
        num_text_bytes=corpus.num_text_bytes,
        begins=bool(len(starts)) or not len(tokens),
        has_weights=corpus.weights is not None,
        digest=_digest(*contents.values()),
    )
    write_whole(job.file(".json"), seal(json.dumps(encode(result))))
    return result


def finished_part(job: PartJob) -> PartResult | None:
    """The result of an earlier run, if its files are still what it wrote: a power cut may have lost them."""
    try:
        result = decode(PartResult, json.loads(unseal(job.file(".json").read_bytes())), "part")
        ends = (".bin", ".lengths", *([".weights"] if result.has_weights else []))
        return result if result.digest == _digest(*(job.file(end).read_bytes() for end in ends)) else None
    except (OSError, ValueError, RecursionError, MeshwrightError):
        return None


def _digest(*contents: bytes) -> str:
    return " ".join(xxhash.xxh3_64_hexdigest(content) for content in contents)


@contextlib.contextmanager
def _writing(stem: Path, folder: Path) -> Iterator[None]:
    """Hold the folder of parts for this process alone; an OSError says what could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise error_at(folder, "another `mw data prepare` is writing here.", "Wait for it.") from None
            yield
    except OSError as error:
        what = f"cannot be written: {(error.strerror or str(error)).lower()}."
        fix = "Free space there or name another place; what is done is kept."
        raise error_at(error.filename or stem, what, fix, exit_code=1) from None


def _merge(
    stem: Path, jobs: list[PartJob], results: list[PartResult], words: Tokenizer, identity: str
) -> PreparedFacts:
    """The final files from the parts; the one that says all is there comes last."""
    dtype = megatron_dtype(words.vocab_size)

    def copy_weights(file: Any) -> None:
        for job, result in zip(jobs, results, strict=True):
            file.write(job.file(".weights").read_bytes() if result.has_weights else b"\1" * result.num_tokens)

    def copy_tokens(file: Any) -> None:
        for job in jobs:
            with open(job.file(".bin"), "rb") as part:
                while os.sendfile(file.fileno(), part.fileno(), None, _COPY_BYTES):
                    pass

    lengths = [np.fromfile(job.file(".lengths"), dtype=np.int32) for job in jobs]
    begins = [result.begins for result in results]
    contents = {".bin": copy_tokens, ".idx": lambda file: write_index(file, dtype, lengths, begins)}
    if any(result.has_weights for result in results):
        contents[".weights"] = copy_weights
    for end, write in contents.items():
        write_whole(beside(stem, end), write, is_durable=True)
    if isinstance(words, FileTokenizer):
        write_whole(beside(stem, ".tokenizer.json"), words.content, is_durable=True)
    hashes, content = hash_files({end: beside(stem, end) for end in contents})
    write_whole(beside(stem, ".xxh3"), content, is_durable=True)
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
    write_whole(beside(stem, ".facts.json"), seal(to_json(facts) + "\n"), is_durable=True)
    return facts


if __name__ == "__main__":
    try:
        for line in sys.stdin:
            print(json.dumps(encode(make_part(decode(PartJob, json.loads(line), "job")))), flush=True)
    except BrokenPipeError:  # whoever asked is gone
        sys.stderr.close()
