"""One chunk's tokens on disk, and the process that makes such parts: `python -m meshwright.data.prepare_worker`.

It reads jobs from its input, a line each, and answers with a line each; it ends with its input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from meshwright.core.codec import decode, encode, seal, unseal
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.data.cache import write_whole
from meshwright.data.chat import ChatTemplate, open_template
from meshwright.data.json_records import TextKeys
from meshwright.data.megatron import megatron_dtype
from meshwright.data.token_reader import FileRange, FlatTokens, read_chunk, unreadable
from meshwright.data.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class PartJob:
    folder: str
    name: str
    chunk: FileRange
    tokenizer: str
    text_key: str
    prompt_key: str
    chat_template: str


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


def finished_part(job: PartJob) -> PartResult | None:
    """The result of an earlier run, if its files are still what it wrote: a power cut may have lost them."""
    path = Path(job.folder) / job.name
    try:
        result = decode(PartResult, json.loads(unseal(path.with_suffix(".json").read_bytes())), "part")
        ends = (".bin", ".lengths", *([".weights"] if result.has_weights else []))
        return result if result.digest == _digest(*(path.with_suffix(end).read_bytes() for end in ends)) else None
    except (OSError, ValueError, RecursionError, MeshwrightError):
        return None


def make_part(job: PartJob) -> PartResult:
    """Tokenize the chunk and write its files, the one that says it is done last. Problems are told, nothing written."""
    problems: list[Problem] = []
    try:
        words = _tokenizer(job.tokenizer)
        keys = TextKeys(text=job.text_key, prompt=job.prompt_key, template=_template(job.chat_template, job.tokenizer))
        found = read_chunk(job.chunk, keys, words, problems)
    except OSError as error:
        return PartResult(problems=(unreadable(job.chunk.path, error),))
    except MeshwrightError as error:
        return PartResult(problems=error.problems)
    if problems:
        return PartResult(problems=tuple(problems))
    return _write(Path(job.folder) / job.name, found, megatron_dtype(words.vocab_size))


def _write(path: Path, found: FlatTokens, dtype: np.dtype[np.integer]) -> PartResult:
    assert found.starts is not None
    lengths = _lengths(found)
    tokens = np.ascontiguousarray(found.tokens, dtype=dtype)
    contents = {".bin": tokens.tobytes(), ".lengths": lengths.tobytes()}
    if found.weights is not None:
        contents[".weights"] = found.weights.tobytes()
    for end, content in contents.items():
        write_whole(path.with_suffix(end), partial(_put, content=content), is_durable=False)
    result = PartResult(
        num_tokens=len(tokens),
        num_documents=len(found.starts),
        num_records=found.num_records,
        num_text_bytes=found.num_text_bytes,
        begins=bool(len(found.starts)) or not len(tokens),
        has_weights=found.weights is not None,
        digest=_digest(*contents.values()),
    )
    text = seal(json.dumps(encode(result)))
    write_whole(path.with_suffix(".json"), lambda file: file.write(text), is_durable=False)
    return result


def _put(file: BinaryIO, content: bytes) -> None:
    file.write(content)


def _lengths(found: FlatTokens) -> npt.NDArray[np.int32]:
    """Of documents, or of the one that goes on here."""
    assert found.starts is not None
    starts = found.starts if len(found.starts) else np.zeros(1, dtype=np.int64)
    return np.diff(starts, append=len(found.tokens)).astype(np.int32)[: len(found.tokens)]


def _digest(*contents: bytes) -> str:
    return " ".join(xxhash.xxh3_64_hexdigest(content) for content in contents)


@cache
def _tokenizer(name: str) -> Tokenizer:
    return open_tokenizer(name)


@cache
def _template(name: str, tokenizer: str) -> ChatTemplate | None:
    return open_template(name, tokenizer)


def _answers() -> Iterator[str]:
    for line in sys.stdin:
        yield json.dumps(encode(make_part(decode(PartJob, json.loads(line), "job"))))


if __name__ == "__main__":
    try:
        for answer in _answers():
            print(answer, flush=True)
    except BrokenPipeError:  # whoever asked is gone
        sys.stderr.close()
